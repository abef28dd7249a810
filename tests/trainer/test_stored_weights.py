"""Every quantisation that is read, against the library that defines it; every other, refused by name."""

from __future__ import annotations

import copy
import importlib
import json
import math
import re
from pathlib import Path

import pytest
import tiny
import torch
from graft_lora.trainer import stored_weights
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import OpenFiles, open_model_file, read_header
from graft_lora.trainer.errors import MisshapedKeysError, UnexpectedKeysError, UnreadableFormatError
from graft_lora.trainer.stored_weights import Entry, Layer, understand
from safetensors.torch import load_file, save_file
from torch import nn

kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen has no build for this machine")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes has no build for this machine")
kitchen_tensor = importlib.import_module("comfy_kitchen.tensor")

LAYOUTS = {
    "int8_tensorwise": "TensorWiseINT8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
}
# How ComfyUI's files differ: format, the quantiser's settings, what the mark says besides.
COMFY = {
    "int8 per tensor": ("int8_tensorwise", {}, {}),
    "int8 per row": ("int8_tensorwise", {"per_channel": True}, {}),
    "nvfp4": ("nvfp4", {}, {}),
    "mxfp8": ("mxfp8", {}, {}),
}


def rough(*shape, seed=3):
    """A matrix whose rows have magnitudes from 1/50 to 50 and whose columns differ too, so that no scale is near 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = 50 ** (2 * torch.rand(shape[0], 1, generator=generator) - 1)
    columns = 3 ** (2 * torch.rand(1, shape[1], generator=generator) - 1)
    return torch.randn(*shape, generator=generator) * rows * columns


def comfy_quantise(weight, kind):
    """The tensors of ComfyUI's file for one weight, by suffix, and the weight that they mean in fp32."""
    format, settings, extra = COMFY[kind] if isinstance(kind, str) else kind
    quantised = kitchen_tensor.QuantizedTensor.from_float(weight, LAYOUTS[format], **settings)
    tensors = {f"weight{suffix[6:]}": value for suffix, value in quantised.state_dict("weight").items()}
    return tensors, {"format": format, **extra}, quantised.dequantize()


def mark(config):
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def decode(folder: Path, tensors, shape, config=None):
    """One weight through a file: `layer.weight` and what stands beside it."""
    path = folder / "one.safetensors"
    save_file({f"layer.{name}": value.contiguous() for name, value in tensors.items()}, path)
    entries = {
        key: Entry(path, key, value["dtype"], tuple(value["shape"]))
        for key, value in read_header(path).items()
        if key != "__metadata__"
    }
    layer = Layer(path.name, "layer.weight", entries)
    with OpenFiles() as files:
        stored = understand(layer, config, False, files.read)
        assert layer.used | {"layer.weight"} >= set(entries) - {"layer.comfy_quant"}
        assert stored.holds(shape)
        return stored.decode(files.read, shape)


def linear_names(model):
    """Linears with more than a block of rows and columns, as ComfyUI's tools quantise; the others stay dense.

    Heads are counted from the rows of wq and wk, where padding must be less than a head: it is in the real models (128
    wide), but not in the tiny text fusion (20).
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and min(module.weight.shape) > 32
        if not re.fullmatch(r"txtfusion\..*\.w[qk]", name)
    ]


# --- ComfyUI ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", ["comfy_quant", "metadata"])
@pytest.mark.parametrize("kind", COMFY)
def test_comfyui_files_decode_as_comfy_kitchen_does(tmp_path, family_name, kind, marks):
    model = tiny.build(family_name)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    layers, meant = {}, dict(state)
    for name in linear_names(model):
        tensors, config, value = comfy_quantise(state.pop(f"{name}.weight"), kind)
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        layers[name], meant[f"{name}.weight"] = config, value
    assert len(layers) > 10
    metadata = None
    if marks == "metadata":
        whole = {f"model.diffusion_model.{name}": config for name, config in layers.items()}
        metadata = {"_quantization_metadata": json.dumps({"layers": whole})}
    else:
        state |= {f"{name}.comfy_quant": mark(config) for name, config in layers.items()}
        state |= {f"{name}.input_scale": torch.tensor(0.3) for name in layers}
    path = tmp_path / "comfy.safetensors"
    save_file({f"model.diffusion_model.{key}": value for key, value in state.items()}, path, metadata)

    found = dict(open_model_file(path).tensors())
    assert set(found) == set(meant)
    for name, value in meant.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value), name
    for name in layers:
        assert tiny.relative(found[f"{name}.weight"], model.get_submodule(name).weight) < 0.12
    assert_same_outputs(path, family_name, meant)


def assert_same_outputs(path, family_name, meant):
    reference = tiny.build(family_name)
    reference.load_state_dict(meant)
    arguments = tiny.inputs(family_name)
    base = load_base(path, precision="fp32", compute_dtype="fp32")
    assert tiny.relative(base.model(**arguments), reference(**arguments)) < 1e-5


@pytest.mark.parametrize("shape", [(33, 40), (130, 72), (300, 200), (128, 64), (260, 1000)])
@pytest.mark.parametrize("kind", COMFY)
def test_odd_shapes_are_padded_and_cut_in_whatever_slabs(tmp_path, monkeypatch, kind, shape):
    weight = rough(*shape)
    tensors, config, value = comfy_quantise(weight, kind)
    if kind in ("nvfp4", "mxfp8") and shape[0] % 32:
        assert tensors["weight"].shape[0] > shape[0]
    assert tiny.relative(value, weight) < 0.2
    for slab in (stored_weights.SLAB, 1000):
        monkeypatch.setattr(stored_weights, "SLAB", slab)
        assert torch.equal(decode(tmp_path, tensors, shape, config), value)


@pytest.mark.parametrize("group", [4, 16, 64, 256])
@pytest.mark.parametrize("inside", [True, False])
def test_int8_convrot_is_turned_back(tmp_path, monkeypatch, group, inside):
    """The file's integers turned exactly, then scaled; the library scales first, so that its sums are rounded."""
    monkeypatch.setattr(stored_weights, "SLAB", 3000)
    weight = rough(70, 512)
    settings = {"convrot": True, "convrot_groupsize": group}
    config = {"params": settings} if inside else settings
    tensors, config, value = comfy_quantise(weight, ("int8_tensorwise", {**settings, "per_channel": True}, config))
    found = decode(tmp_path, tensors, (70, 512), config)
    assert tiny.relative(found, value) < 1e-6
    assert tiny.relative(found, weight) < 0.02
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double()
    turn = four
    while len(turn) < group:
        turn = torch.kron(turn, four)
    stored = tensors["weight"].double().unflatten(1, (-1, group)) @ turn
    exact = stored.flatten(1) * tensors["weight_scale"].double() / math.sqrt(group)
    assert torch.equal(found, exact.float())


def test_int8_convrot_in_a_model(tmp_path, family_name):
    model = tiny.build(family_name)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    meant = dict(state)
    settings = {"convrot": True, "convrot_groupsize": 16}
    names = [name for name in linear_names(model) if model.get_submodule(name).in_features % 16 == 0]
    for name in names:
        kind = ("int8_tensorwise", {**settings, "per_channel": True}, settings)
        tensors, config, meant[f"{name}.weight"] = comfy_quantise(state.pop(f"{name}.weight"), kind)
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        state[f"{name}.comfy_quant"] = mark(config)
    save_file(state, tmp_path / "a.safetensors")
    found = dict(open_model_file(tmp_path / "a.safetensors").tensors())
    assert all(tiny.relative(found[f"{name}.weight"], meant[f"{name}.weight"]) < 1e-6 for name in names)
    assert_same_outputs(tmp_path / "a.safetensors", family_name, meant)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_block_scales_stored_as_bytes(tmp_path, kind):
    tensors, config, value = comfy_quantise(rough(64, 96), kind)
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    assert torch.equal(decode(tmp_path, tensors, (64, 96), config), value)


def test_pre_quant_scale_multiplies_the_layers_input(tmp_path):
    """ComfyUI multiplies the input by it and then the matrix: the same as the matrix with its columns multiplied."""
    tensors, config, value = comfy_quantise(rough(64, 90), "nvfp4")
    tensors["pre_quant_scale"] = torch.rand(90) + 0.5
    found = decode(tmp_path, tensors, (64, 90), config)
    x = torch.randn(5, 90)
    wanted = nn.functional.linear(x.double() * tensors["pre_quant_scale"].double(), value.double())
    assert tiny.relative(nn.functional.linear(x.double(), found.double()), wanted) < 1e-6


def test_a_file_may_mix_formats_and_dense_layers(tmp_path):
    model = tiny.build("krea2")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    meant = dict(state)
    for name, kind in zip(linear_names(model), [*COMFY, None] * 20, strict=False):
        if kind is not None:
            tensors, config, meant[f"{name}.weight"] = comfy_quantise(state.pop(f"{name}.weight"), kind)
            state |= {f"{name}.{leaf}": value for leaf, value in tensors.items()}
            state[f"{name}.comfy_quant"] = mark(config)
    save_file(state, tmp_path / "mixed.safetensors")
    found = dict(open_model_file(tmp_path / "mixed.safetensors").tensors())
    assert all(torch.equal(found[name], value) for name, value in meant.items())


@pytest.mark.parametrize("kind", ["int8 per row", "nvfp4", "mxfp8"])
def test_members_of_a_split_qkv_are_padded_each_for_itself(tmp_path, kind):
    """diffusers' names in a quantised file: a third of the rows is cut from each member, not from the whole."""
    twin = tiny.diffusers_twin("ideogram4", tiny.build("ideogram4"))
    state = {name: value.detach().contiguous() for name, value in twin.state_dict().items()}
    thirds = []
    for member in "qkv":
        name = f"layers.0.attention.to_{member}"
        tensors, config, value = comfy_quantise(state.pop(f"{name}.weight"), kind)
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
        state[f"{name}.comfy_quant"] = mark(config)
        thirds.append(value)
    save_file(state, tmp_path / "split.safetensors")
    found = dict(open_model_file(tmp_path / "split.safetensors").tensors())
    assert torch.equal(found["layers.0.attention.qkv.weight"], torch.cat(thirds))


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


def bnb_4bit(weight, kind="nf4", nested=True, block=64, storage=torch.uint8):
    """What bitsandbytes' own `Linear4bit` saves, and the weight that it means in fp32."""
    quantised, state = bnb.functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    tensors = {"weight": quantised}
    tensors |= {f"weight.{leaf}": value for leaf, value in state.as_dict(packed=True).items()}
    state.dtype = torch.float32
    return tensors, bnb_value(quantised, state)


def bnb_value(quantised, state):
    """What bitsandbytes dequantises, as one row: its AVX-512 kernel takes a wrong scale where a block crosses rows."""
    row = copy.copy(state)
    row.shape = torch.Size([state.shape.numel()])
    return bnb.functional.dequantize_4bit(quantised, row).view(state.shape)


@pytest.mark.parametrize("shape", [(64, 128), (33, 40), (7, 9), (130, 517)])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4bit_decodes_as_the_library_does(tmp_path, monkeypatch, kind, block, nested, shape):
    tensors, value = bnb_4bit(rough(*shape), kind, nested, block)
    assert ("weight.nested_absmax" in tensors) == nested
    for slab in (stored_weights.SLAB, 1002):
        monkeypatch.setattr(stored_weights, "SLAB", slab)
        assert torch.equal(decode(tmp_path, tensors, shape), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bitsandbytes_rounds_to_its_dtype_what_is_read_in_fp32(tmp_path, dtype):
    weight = rough(64, 128).to(dtype)
    quantised, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    tensors = {"weight": quantised}
    tensors |= {f"weight.{leaf}": value for leaf, value in state.as_dict(packed=True).items()}
    found = decode(tmp_path, tensors, (64, 128))
    assert found.dtype == torch.float32
    assert torch.equal(found.to(dtype), bnb_value(quantised, state))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bitsandbytes_codes_in_a_container_of_another_dtype(tmp_path, storage):
    tensors, value = bnb_4bit(rough(64, 128), storage=storage)
    assert tensors["weight"].dtype == storage
    assert torch.equal(decode(tmp_path, tensors, (64, 128)), value)


def test_bitsandbytes_int8_decodes_as_the_library_does(tmp_path):
    weight = rough(33, 40)
    linear = bnb.nn.Linear8bitLt(40, 33, bias=False, has_fp16_weights=False)
    linear.weight.data.copy_(weight)
    state = linear.to("cpu").state_dict()
    assert state["weight"].dtype == torch.int8
    value = bnb.functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
    assert torch.equal(decode(tmp_path, dict(state), (33, 40)), value)
    assert tiny.relative(value, weight) < 0.02


def bnb_twin(family_name, make):
    """diffusers' transformer with bitsandbytes' Linears, as `from_pretrained` with a BitsAndBytesConfig builds it."""
    twin = tiny.diffusers_twin(family_name, tiny.build(family_name))
    for name in linear_names(twin):
        linear = twin.get_submodule(name)
        quantised = make(linear.in_features, linear.out_features, linear.bias is not None)
        quantised.load_state_dict(linear.state_dict())
        twin.set_submodule(name, quantised.to("cpu"))
    return twin


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_bitsandbytes_folder_of_diffusers_loads(tmp_path, family_name, bits, shards):
    if bits == 4:
        twin = bnb_twin(family_name, lambda i, o, bias: bnb.nn.Linear4bit(i, o, bias, quant_type="nf4"))
    else:
        twin = bnb_twin(family_name, lambda i, o, bias: bnb.nn.Linear8bitLt(i, o, bias, has_fp16_weights=False))
    dense = tiny.diffusers_twin(family_name, tiny.build(family_name))
    names = linear_names(dense)
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    config = {"quantization_config": {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}}
    (folder / "config.json").write_text(json.dumps(config))
    state = {key: value.contiguous() for key, value in twin.state_dict().items()}
    assert sum(key.endswith((".absmax", ".SCB")) for key in state) == len(names) > 10
    if shards:
        weight_map = {}
        for number in range(3):
            part = {key: state[key] for key in sorted(state)[number::3]}
            save_file(part, folder / f"{number}.safetensors")
            weight_map |= dict.fromkeys(part, f"{number}.safetensors")
        index = folder / "diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file(state, folder / "diffusion_pytorch_model.safetensors")

    for name in names:
        quantised = twin.get_submodule(name).weight
        value = (
            bnb_value(quantised, quantised.quant_state)
            if bits == 4
            else bnb.functional.int8_vectorwise_dequant(quantised, state[f"{name}.SCB"])
        )
        dense.get_submodule(name).weight.data.copy_(value)
    save_file({k: v.contiguous() for k, v in dense.state_dict().items()}, tmp_path / "dense.safetensors")
    wanted = dict(open_model_file(tmp_path / "dense.safetensors").tensors())
    found = dict(open_model_file(tmp_path / "model").tensors())
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert_same_outputs(tmp_path / "model", family_name, wanted)


# --- refusals --------------------------------------------------------------------------------------------------------


KEY = "blocks.1.mlp.up"


def changed(tmp_path, tensors, config=None):
    """A Krea 2 file whose layer `blocks.1.mlp.up` (256, 256) is stored so."""
    state = {name: value.detach().clone() for name, value in tiny.build("krea2").state_dict().items()}
    del state[f"{KEY}.weight"]
    state |= {f"{KEY}.{leaf}": value.contiguous() for leaf, value in tensors.items() if value is not None}
    if config is not None:
        state[f"{KEY}.comfy_quant"] = mark(config)
    save_file(state, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("int8 per row", "weight_scale"),
        ("nvfp4", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
        ("mxfp8", "weight_scale"),
    ],
)
def test_a_missing_neighbour_of_a_comfyui_weight_is_named(tmp_path, kind, leaf):
    tensors, config, _ = comfy_quantise(rough(256, 256), kind)
    path = changed(tmp_path, {**tensors, leaf: None}, config)
    with pytest.raises(UnreadableFormatError, match=rf"blocks\.1\.mlp\.up\.weight is \w+, but its {leaf} is not there"):
        open_model_file(path)


@pytest.mark.parametrize(
    "leaf", ["absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"]
)
def test_a_missing_neighbour_of_a_bitsandbytes_weight_is_named(tmp_path, leaf):
    tensors, _ = bnb_4bit(rough(256, 256))
    path = changed(tmp_path, {**tensors, f"weight.{leaf}": None})
    with pytest.raises(UnreadableFormatError, match=rf"mlp\.up\.weight is .*bitsandbytes.* its {leaf} is not there"):
        open_model_file(path)


def test_a_missing_scb_leaves_int8_that_cannot_be_read(tmp_path):
    path = changed(tmp_path, {"weight": torch.zeros(256, 256, dtype=torch.int8)})
    with pytest.raises(UnreadableFormatError, match=r"mlp\.up\.weight is stored as I8, which cannot be read"):
        open_model_file(path)


@pytest.mark.parametrize(
    ("kind", "leaf", "value", "text"),
    [
        ("int8 per row", "weight_scale", torch.ones(255), r"F32 \[255\], wanted .* of 1 or 256 numbers"),
        (
            "int8 per row",
            "weight",
            torch.zeros(256, 256, dtype=torch.uint8),
            r"is U8 \[256, 256\], wanted a matrix of I8",
        ),
        ("nvfp4", "weight", torch.zeros(256, 256, dtype=torch.int8), "wanted a matrix of U8"),
        ("nvfp4", "weight", torch.zeros(256, 100, dtype=torch.uint8), "of 200 columns; wanted a multiple of 16"),
        (
            "nvfp4",
            "weight_scale",
            torch.ones(256, 15).to(torch.float8_e4m3fn),
            r"\[256, 15\], wanted .* of 4096 numbers",
        ),
        ("nvfp4", "weight_scale", torch.ones(256, 16), r"is F32 \[256, 16\], wanted F8_E4M3 or U8"),
        ("nvfp4", "weight_scale_2", torch.ones(2), r"F32 \[2\], wanted .* of 1 numbers"),
        ("nvfp4", "pre_quant_scale", torch.ones(2), r"pre_quant_scale is F32 \[2\]"),
        ("mxfp8", "weight", torch.zeros(256, 256, dtype=torch.uint8), "wanted a matrix of F8_E4M3"),
        ("mxfp8", "weight_scale", torch.ones(256, 7, dtype=torch.uint8), r"U8 \[256, 7\], wanted .* of 2048 numbers"),
    ],
)
def test_a_misshapen_neighbour_of_a_comfyui_weight_is_named(tmp_path, kind, leaf, value, text):
    tensors, config, _ = comfy_quantise(rough(256, 256), kind)
    with pytest.raises(UnreadableFormatError, match=text):
        open_model_file(changed(tmp_path, {**tensors, leaf: value}, config))


@pytest.mark.parametrize(
    ("leaf", "value", "text"),
    [
        ("weight", torch.zeros(100, 1, dtype=torch.uint8), r"nf4 of \[256, 256\], but holds \[100, 1\] U8"),
        ("weight.absmax", torch.zeros(1023, dtype=torch.uint8), "absmax is U8 .* wanted U8 of 1024 numbers"),
        ("weight.absmax", torch.zeros(1024), r"absmax is F32 \[1024\], wanted U8"),
        ("weight.quant_map", torch.zeros(15), "quant_map is F32 .* of 16 numbers"),
        ("weight.nested_absmax", torch.zeros(5), "nested_absmax is F32 .* of 4 numbers"),
        ("weight.nested_quant_map", torch.zeros(16), "nested_quant_map is F32 .* of 256 numbers"),
        ("weight.quant_state.bitsandbytes__nf4", mark({"shape": [256]}), "quant_state is damaged"),
        ("weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "quant_state is damaged"),
    ],
)
def test_a_misshapen_neighbour_of_a_bitsandbytes_weight_is_named(tmp_path, leaf, value, text):
    tensors, _ = bnb_4bit(rough(256, 256))
    with pytest.raises(UnreadableFormatError, match=text):
        open_model_file(changed(tmp_path, {**tensors, leaf: value}))


@pytest.mark.parametrize("shape", [(256, 192), (256, 288), (288, 256)])
@pytest.mark.parametrize("kind", COMFY)
def test_a_quantised_weight_of_another_shape_does_not_fit(tmp_path, kind, shape):
    """Larger by a whole block is no padding."""
    tensors, config, _ = comfy_quantise(rough(*shape), kind)
    found = rf"\[{shape[0]}, {shape[1]}\]"
    with pytest.raises(MisshapedKeysError, match=rf"blocks\.1\.mlp\.up\.weight is {found}, wanted \[256, 256\]"):
        open_model_file(changed(tmp_path, tensors, config))


def test_a_pre_quant_scale_tells_the_true_width(tmp_path):
    tensors, config, _ = comfy_quantise(rough(256, 256), "nvfp4")
    path = changed(tmp_path, {**tensors, "pre_quant_scale": torch.ones(250)}, config)
    with pytest.raises(MisshapedKeysError, match=r"mlp\.up\.weight is \[256, 250\], wanted \[256, 256\]"):
        open_model_file(path)


@pytest.mark.parametrize(("key", "value"), [("quant_type", "fp4"), ("blocksize", 63), ("blocksize", 0)])
def test_a_bitsandbytes_state_that_cannot_be_is_refused(tmp_path, key, value):
    tensors, _ = bnb_4bit(rough(256, 256))
    leaf = "weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[leaf].tolist())), key: value}
    with pytest.raises(UnreadableFormatError, match="is bitsandbytes nf4, but its quant_state is damaged"):
        open_model_file(changed(tmp_path, {**tensors, leaf: mark(state)}))


def test_bitsandbytes_int8_in_tiles_is_refused(tmp_path):
    tensors = {"weight": torch.zeros(256, 256, dtype=torch.int8), "SCB": torch.ones(256)}
    tensors["weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(UnreadableFormatError, match="in an order of tiles that bitsandbytes itself no longer reads"):
        open_model_file(changed(tmp_path, tensors))


def test_mxfp8_without_its_mark_is_not_taken_for_fp8_with_a_scale_per_row(tmp_path):
    """Its scales are bytes, exponents: they must not be read as numbers."""
    tensors = {"weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}
    tensors["weight_scale"] = torch.zeros(256, 1, dtype=torch.uint8)
    with pytest.raises(UnreadableFormatError, match=r"one per row of \[256, 256\], in F32 or BF16 or F16, found U8"):
        open_model_file(changed(tmp_path, tensors))


def test_a_bitsandbytes_weight_of_another_shape_does_not_fit(tmp_path):
    tensors, _ = bnb_4bit(rough(128, 512))
    with pytest.raises(MisshapedKeysError, match=r"blocks\.1\.mlp\.up\.weight is \[128, 512\], wanted \[256, 256\]"):
        open_model_file(changed(tmp_path, tensors))


@pytest.mark.parametrize("leaf", ["weight_scale_2", "pre_quant_scale", "SCB", "weight_format", "weight.nested_absmax"])
def test_a_neighbour_that_belongs_to_another_way_of_storing_is_not_dropped(tmp_path, leaf):
    tensors, config, _ = comfy_quantise(rough(256, 256), "mxfp8")
    other = "blocks.0.mlp.up"
    path = changed(tmp_path, tensors, config)
    save_file({**load_file(path), f"{other}.{leaf}": torch.ones(256)}, path)
    with pytest.raises((UnexpectedKeysError, UnreadableFormatError), match=r"blocks\.0\.mlp\.up"):
        open_model_file(path)


@pytest.mark.parametrize("size", [8, 3, 1024, "16"])
def test_a_turn_that_does_not_fit_is_refused(tmp_path, size):
    tensors, _, _ = comfy_quantise(rough(256, 256), "int8 per row")
    config = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
    with pytest.raises(UnreadableFormatError, match=rf"turned in groups of {size} columns; wanted a power of 4"):
        open_model_file(changed(tmp_path, tensors, config))


def test_a_weight_that_padding_hides_is_refused(tmp_path):
    """Krea 2's projector, (1, 3) here, would be read as (16, 16): 16 text layers instead of 3."""
    model = tiny.build("krea2")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tensors, config, _ = comfy_quantise(state.pop("txtfusion.projector.weight"), "nvfp4")
    state |= {f"txtfusion.projector.{leaf}": value for leaf, value in tensors.items()}
    state["txtfusion.projector.comfy_quant"] = mark(config)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UnreadableFormatError, match=r"projector\.weight is nvfp4 padded to \[16, 16\]"):
        open_model_file(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_without_comfy_kitchen_a_clear_word(tmp_path, monkeypatch, kind):
    tensors, config, _ = comfy_quantise(rough(256, 256), kind)
    path = changed(tmp_path, tensors, config)
    # None in sys.modules makes an import fail as if nothing were installed.
    monkeypatch.setitem(stored_weights.importlib.sys.modules, "comfy_kitchen", None)
    with pytest.raises(
        UnreadableFormatError, match=rf"is {kind}, which needs comfy-kitchen: .*pip install comfy-kitchen"
    ):
        open_model_file(path)


def test_int8_and_bitsandbytes_need_no_library(tmp_path, monkeypatch):
    tensors, config, value = comfy_quantise(rough(256, 256), "int8 per row")
    files = [(changed(tmp_path, tensors, config), value)]
    (tmp_path / "second").mkdir()
    tensors, value = bnb_4bit(rough(256, 256))
    files.append((changed(tmp_path / "second", tensors), value))
    for library in ("comfy_kitchen", "bitsandbytes"):
        monkeypatch.setitem(stored_weights.importlib.sys.modules, library, None)
    for path, wanted in files:
        assert torch.equal(dict(open_model_file(path).tensors())[f"{KEY}.weight"], wanted)


def test_an_old_comfy_kitchen_is_told(tmp_path, monkeypatch):
    tensors, config, _ = comfy_quantise(rough(256, 256), "mxfp8")
    monkeypatch.delattr(kitchen, "dequantize_mxfp8")
    with pytest.raises(UnreadableFormatError, match="installed comfy-kitchen is too old"):
        open_model_file(changed(tmp_path, tensors, config))


@pytest.mark.parametrize("format", ["convrot_w4a4", "asym_w4a8_int8", "something_new"])
def test_an_unknown_comfyui_format_is_refused_by_its_name(tmp_path, format):
    path = changed(tmp_path, {"weight": torch.zeros(256, 128, dtype=torch.int8)}, {"format": format})
    with pytest.raises(
        UnreadableFormatError, match=rf"is quantised as {format}, which cannot be read; use the bf16 file"
    ):
        open_model_file(path)


def test_nvfp4_without_comfyuis_mark_is_not_guessed(tmp_path):
    """ModelOpt's nvfp4 (diffusers' `bfl`) has the same keys, other nibbles and untiled scales."""
    tensors, _, _ = comfy_quantise(rough(256, 256), "nvfp4")
    with pytest.raises(UnreadableFormatError, match=r"mlp\.up\.weight is nvfp4 without ComfyUI's mark"):
        open_model_file(changed(tmp_path, tensors))


BYTES = torch.zeros(256, 128, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("SDNQ", {"weight": BYTES, "scale": torch.ones(256, 1)}),
        ("SDNQ", {"weight": BYTES, "scale": torch.ones(256, 1), "zero_point": torch.ones(256, 1)}),
        (
            "SDNQ",
            {"weight": BYTES, "scale": torch.ones(1), "svd_up": torch.ones(256, 32), "svd_down": torch.ones(32, 9)},
        ),
        (
            "Nunchaku",
            {"qweight": BYTES.to(torch.int8), "wscales": torch.ones(4, 256), "proj_down": torch.ones(256, 32)},
        ),
        ("GPTQ", {"qweight": torch.zeros(32, 256, dtype=torch.int32), "g_idx": torch.zeros(256, dtype=torch.int32)}),
        ("AWQ", {"qweight": torch.zeros(256, 32, dtype=torch.int32), "qzeros": torch.zeros(2, 32, dtype=torch.int32)}),
        ("torchao", {"_weight_qdata": BYTES.to(torch.int8), "_weight_scale": torch.ones(256, 1)}),
        ("quanto", {"weight._data": BYTES.to(torch.int8), "weight._scale": torch.ones(256, 1)}),
        ("compressed-tensors", {"weight_packed": torch.zeros(256, 32, dtype=torch.int32)}),
        ("HQQ", {"W_q": BYTES}),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, name, tensors):
    with pytest.raises(UnreadableFormatError, match=rf"quantised by {name}.*{KEY}.*cannot be trained on; use the bf16"):
        open_model_file(changed(tmp_path, tensors))


def test_what_torchao_itself_saves_is_refused_by_name(tmp_path):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_(linear, Int8WeightOnlyConfig(version=2))
    tensors, metadata = flatten_tensor_state_dict({"blocks.0.mlp.up.weight": linear[0].weight.data})
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    with pytest.raises(UnreadableFormatError, match="quantised by torchao"):
        open_model_file(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("method", "name"), [("sdnq", "SDNQ"), ("torchao", "torchao"), ("modelopt", "ModelOpt"), ("new_one", "new_one")]
)
@pytest.mark.parametrize("own_file", [True, False])
def test_a_folder_that_says_how_it_is_quantised_is_refused_by_name(tmp_path, method, name, own_file):
    tiny.write(tiny.build("krea2"), tmp_path / "diffusion_pytorch_model.safetensors")
    settings = {"quant_method": method, "weights_dtype": "int8"}
    if own_file:
        (tmp_path / "quantization_config.json").write_text(json.dumps(settings))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(UnreadableFormatError, match=rf"quantised by {name} .*quant_method \"{method}\" in "):
        open_model_file(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"quantization_config": null}'])
def test_a_config_that_says_nothing_of_quantisation_is_no_obstacle(tmp_path, text):
    tiny.write(tiny.build("krea2"), tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(text)
    assert open_model_file(tmp_path).family.name == "krea2"
