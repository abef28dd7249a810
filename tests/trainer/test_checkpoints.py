"""Every way of storing a base that is understood, and a clear error of its own for each that is not."""

from __future__ import annotations

import dataclasses
import json
import pickle
import weakref

import pytest
import tiny
import torch
from graft_lora.trainer import checkpoints
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.errors import (
    CheckpointError,
    MisshapedKeysError,
    MissingKeysError,
    NotAModelFileError,
    PickleFileError,
    TruncatedFileError,
    UnexpectedKeysError,
    UnreadableFormatError,
    WrongModelError,
)
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.quantization import FrozenLinear
from safetensors.torch import load_file, save_file


def loaded_tensors(path):
    return dict(open_model_file(path).tensors())


def assert_same(found, model, dtype=torch.float32):
    wanted = model.state_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], value.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_reads_official_files(tmp_path, family_name, dtype, prefix):
    model = tiny.build(family_name)
    path = tiny.write(model, tmp_path / "base.safetensors", dtype, prefix)
    file = open_model_file(path)
    assert file.family is FAMILIES[family_name]
    assert file.config == tiny.CONFIGS[family_name]
    assert_same(dict(file.tensors()), model, dtype)


def test_reads_diffusers_names_with_q_k_v_split(tmp_path, family_name):
    model = tiny.build(family_name)
    twin = tiny.diffusers_twin(family_name, model)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({k: v.contiguous() for k, v in twin.state_dict().items()}, path)
    assert_same(loaded_tensors(path), model)


def scaled_fp8(model, per_row, scale_suffix="weight_scale", marker=None):
    """A ComfyUI fp8 file whose scales are far from 1 and all different; returns tensors and the weights they mean."""
    generator = torch.Generator().manual_seed(7)
    state, meant = {}, {}
    for name, value in model.state_dict().items():
        value = value.detach()
        linear = name.endswith(".weight") and value.ndim == 2 and "indicator" not in name
        if not linear:
            state[name] = meant[name] = value
            continue
        scale = torch.rand(value.shape[0] if per_row else 1, generator=generator) * 40 + 3
        column = scale[:, None] if per_row else scale
        data = (value / column).to(torch.float8_e4m3fn)
        layer = name.removesuffix(".weight")
        state[name] = data
        state[f"{layer}.{scale_suffix}"] = scale[:, None].clone() if per_row else scale.squeeze()
        meant[name] = data.float() * column
        if marker:
            state[f"{layer}.comfy_quant"] = torch.tensor(
                list(json.dumps({"format": marker}).encode()), dtype=torch.uint8
            )
    return state, meant


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", ["comfy_quant", "metadata", "scaled_fp8"])
def test_diffusers_13861_the_fp8_scale_is_never_dropped(tmp_path, family_name, per_row, kind):
    model = tiny.build(family_name)
    path, metadata = tmp_path / "fp8.safetensors", {}
    if kind == "scaled_fp8":
        state, meant = scaled_fp8(model, per_row, "scale_weight")
        state["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
        state |= {k.replace(".scale_weight", ".scale_input"): torch.ones(1) for k in state if "scale_weight" in k}
    else:
        state, meant = scaled_fp8(model, per_row, marker="float8_e4m3fn" if kind == "comfy_quant" else None)
        layers = [k.removesuffix(".weight_scale") for k in state if k.endswith(".weight_scale")]
        if kind == "metadata":
            metadata = {
                "_quantization_metadata": json.dumps({"layers": {k: {"format": "float8_e4m3fn"} for k in layers}})
            }
    state = {f"model.diffusion_model.{key}": value for key, value in state.items()}
    save_file(state, path, metadata)
    found = loaded_tensors(path)
    for name, value in meant.items():
        assert torch.equal(found[name].float(), value.float()), name

    base = load_base(path, precision="fp32", compute_dtype="fp32")
    reference = tiny.build(family_name)
    reference.load_state_dict(meant)
    arguments = tiny.inputs(family_name)
    assert tiny.relative(base.model(**arguments), reference(**arguments)) < 1e-5


def test_fp8_with_split_q_k_v_and_a_scale_each(tmp_path):
    """unsloth 6873: fused qkv and per-channel scales; here the three members bring scales of their own."""
    model = tiny.build("ideogram4")
    twin = tiny.diffusers_twin("ideogram4", model)
    state, meant = scaled_fp8(twin, per_row=True)
    path = tmp_path / "split.safetensors"
    save_file(state, path)
    found = loaded_tensors(path)
    thirds = [meant[f"layers.0.attention.to_{member}.weight"] for member in "qkv"]
    assert torch.equal(found["layers.0.attention.qkv.weight"], torch.cat(thirds))


def test_a_plain_fp8_cast_has_no_scales_and_needs_none(tmp_path):
    model = tiny.build("krea2")
    state = {k: v.to(torch.float8_e4m3fn) if v.ndim == 2 else v for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "cast.safetensors")
    found = loaded_tensors(tmp_path / "cast.safetensors")
    assert torch.equal(found["blocks.0.attn.wq.weight"], state["blocks.0.attn.wq.weight"].float())


@pytest.mark.parametrize("kind", ["comfy_quant", "scaled_fp8", "no marker"])
def test_a_missing_scale_is_an_error_that_names_the_weight(tmp_path, kind):
    state, _ = scaled_fp8(tiny.build("krea2"), True, marker="float8_e4m3fn" if kind == "comfy_quant" else None)
    if kind == "scaled_fp8":
        state["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    del state["blocks.1.mlp.up.weight_scale"]
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UnreadableFormatError, match=r"blocks\.1\.mlp\.up\.weight is fp8 .* its own scale is not there"):
        open_model_file(tmp_path / "a.safetensors")


@pytest.mark.parametrize("key", ["blocks.7.mlp.up.weight_scale", "blocks.0.attn.qknorm.qnorm.weight_scale"])
def test_a_scale_without_a_weight_is_an_error(tmp_path, key):
    state, _ = scaled_fp8(tiny.build("krea2"), True)
    save_file({**state, key: torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UnexpectedKeysError, match=rf"scales that belong to no weight: {key}"):
        open_model_file(tmp_path / "a.safetensors")


def test_a_scale_of_the_wrong_length_is_an_error(tmp_path):
    state, _ = scaled_fp8(tiny.build("krea2"), True)
    state["blocks.1.mlp.up.weight_scale"] = torch.ones(3)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UnreadableFormatError, match=r"the scale of blocks\.1\.mlp\.up\.weight is \[3\]; wanted one"):
        open_model_file(tmp_path / "a.safetensors")


def test_a_scale_on_an_unquantised_weight_is_applied_too(tmp_path):
    model = tiny.build("krea2")
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state["blocks.0.attn.wq.weight_scale"] = torch.tensor(4.0)
    save_file(state, tmp_path / "a.safetensors")
    found = loaded_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["blocks.0.attn.wq.weight"], state["blocks.0.attn.wq.weight"] * 4)


def test_another_quantisation_is_refused_by_name(tmp_path):
    state, _ = scaled_fp8(tiny.build("krea2"), False, marker="convrot_w4a4")
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UnreadableFormatError, match=r"quantised as convrot_w4a4.*use the bf16 file"):
        open_model_file(tmp_path / "a.safetensors")


def test_int8_data_without_any_marker_is_refused(tmp_path):
    state = {k: v.to(torch.int8) if v.ndim == 2 else v for k, v in tiny.build("krea2").state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UnreadableFormatError, match="is stored as I8, which cannot be read"):
        open_model_file(tmp_path / "a.safetensors")


def test_reads_one_tensor_at_a_time(tmp_path, monkeypatch):
    path = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    asked = []
    original = checkpoints._decode

    def spy(files, weight, shape):
        asked.append(weight.entry.key)
        return original(files, weight, shape)

    monkeypatch.setattr(checkpoints, "_decode", spy)
    stream = open_model_file(path).tensors()
    assert asked == []
    name, _ = next(stream)
    assert asked == [name]


def test_left_out_parts_of_an_all_in_one_checkpoint_are_told(tmp_path):
    state = {f"model.diffusion_model.{k}": v.detach() for k, v in tiny.build("krea2").state_dict().items()}
    state |= {"vae.decoder.conv_in.weight": torch.zeros(2), "text_encoders.model.embed_tokens.weight": torch.zeros(2)}
    save_file(state, tmp_path / "all.safetensors")
    file = open_model_file(tmp_path / "all.safetensors")
    assert file.notes == ["left aside 2 tensors of the VAE and text encoder"]


def changed(tmp_path, change, name="krea2"):
    state = {k: v.detach().clone() for k, v in tiny.build(name).state_dict().items()}
    change(state)
    save_file(state, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


def test_missing_keys(tmp_path):
    path = changed(tmp_path, lambda s: s.pop("blocks.1.mlp.up.weight"))
    with pytest.raises(MissingKeysError, match=r"lacks 1 of \d+ parameters of Krea 2: blocks\.1\.mlp\.up\.weight"):
        open_model_file(path)


def test_missing_member_of_a_split_qkv(tmp_path):
    twin = tiny.diffusers_twin("ideogram4", tiny.build("ideogram4"))
    state = {k: v.detach().contiguous() for k, v in twin.state_dict().items()}
    del state["layers.1.attention.to_k.weight"]
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(MissingKeysError, match=r"layers\.1\.attention\.qkv\.weight \(from layers\.1\.attention\.to_q"):
        open_model_file(tmp_path / "a.safetensors")


def test_members_of_a_split_qkv_that_do_not_match(tmp_path):
    twin = tiny.diffusers_twin("ideogram4", tiny.build("ideogram4"))
    state = {k: v.detach().contiguous() for k, v in twin.state_dict().items()}
    state["layers.1.attention.to_q.weight"] = torch.zeros(300, 256)
    state["layers.1.attention.to_k.weight"] = torch.zeros(212, 256)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(
        MissingKeysError, match=r"qkv\.weight \(its members are \[300, 256\], \[212, 256\], \[256, 256\]\)"
    ):
        open_model_file(tmp_path / "a.safetensors")


def test_a_parameter_under_two_names_is_an_error(tmp_path):
    path = changed(tmp_path, lambda s: s.update({"transformer_blocks.0.attn.to_q.weight": torch.zeros(256, 256)}))
    with pytest.raises(
        UnexpectedKeysError, match=r"blocks\.0\.attn\.wq\.weight twice: as .* and as transformer_blocks"
    ):
        open_model_file(path)


def test_a_key_with_and_without_prefix_is_an_error(tmp_path):
    state = {f"model.diffusion_model.{k}": v.detach() for k, v in tiny.build("krea2").state_dict().items()}
    save_file({**state, "first.bias": torch.zeros(256)}, tmp_path / "a.safetensors")
    with pytest.raises(UnexpectedKeysError, match=r"both with and without 'model\.diffusion_model\.': first\.bias"):
        open_model_file(tmp_path / "a.safetensors")


def test_unexpected_keys(tmp_path, family_name):
    path = changed(tmp_path, lambda s: s.update({"extra.weight": torch.zeros(1)}), family_name)
    with pytest.raises(UnexpectedKeysError, match=r"has 1 keys that .* does not know: extra\.weight"):
        open_model_file(path)


def test_misshaped_keys(tmp_path):
    path = changed(tmp_path, lambda s: s.update({"blocks.1.mlp.up.weight": torch.zeros(3, 256)}))
    with pytest.raises(MisshapedKeysError, match=r"blocks\.1\.mlp\.up\.weight is \[3, 256\], wanted \[256, 256\]"):
        open_model_file(path)


def test_truncated_file(tmp_path, family_name):
    path = tiny.write(tiny.build(family_name), tmp_path / "base.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(TruncatedFileError, match=r"is truncated: its header promises \d+ bytes, it has \d+"):
        open_model_file(path)


def test_file_that_ends_in_its_header(tmp_path):
    path = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TruncatedFileError, match="ends inside its header"):
        open_model_file(path)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_pickle(tmp_path, how):
    path = tmp_path / "base.safetensors"
    if how == "torch":
        torch.save({"a": torch.zeros(1)}, path)
    else:
        path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(PickleFileError, match="pickled checkpoint, which can run code"):
        open_model_file(path)


@pytest.mark.parametrize("extra", range(0, 256, 8))
def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path, extra):
    """The first byte of a safetensors file is the low byte of a length: 0x80 there is no pickle."""
    state = {k: v.detach() for k, v in tiny.build("krea2").state_dict().items()}
    save_file(state, tmp_path / "a.safetensors", {"padding": "x" * extra})
    assert open_model_file(tmp_path / "a.safetensors").family.name == "krea2"


@pytest.mark.parametrize("content", [b"", b"hello, I am a text file\n" * 20, b"\x00" * 64])
def test_not_safetensors(tmp_path, content):
    path = tmp_path / "base.safetensors"
    path.write_bytes(content)
    with pytest.raises(NotAModelFileError, match="is not a safetensors file, whatever its name says"):
        open_model_file(path)


def test_no_such_file_and_a_folder(tmp_path):
    with pytest.raises(NotAModelFileError, match="there is no such file"):
        open_model_file(tmp_path / "nothing.safetensors")
    with pytest.raises(NotAModelFileError, match=r"is a folder with 0 \.safetensors files"):
        open_model_file(tmp_path)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "a text encoder"),
        ("decoder.conv_in.weight", "a VAE"),
        ("diffusion_model.blocks.0.attn.wq.lora_down.weight", "a LoRA"),
        ("double_blocks.0.img_attn.qkv.weight", r"another model \(its keys begin with double_blocks"),
    ],
)
def test_a_sound_file_of_something_else(tmp_path, key, kind):
    save_file({key: torch.zeros(4, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(WrongModelError, match=f"{kind}.*wanted the diffusion model of Krea 2 or Ideogram 4"):
        open_model_file(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "header",
    [b"{" + b"x" * 30, b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}', b'{"a": {"data_offsets": [0, "x"]}}'],
)
def test_a_damaged_header(tmp_path, header):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(NotAModelFileError, match="header is damaged"):
        open_model_file(path)


def test_bytes_that_the_header_does_not_know_of(tmp_path):
    path = tiny.write(tiny.build("krea2"), tmp_path / "a.safetensors")
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(NotAModelFileError, match="is damaged"):
        open_model_file(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": {"first": 3}}'])
def test_damaged_quantisation_marks(tmp_path, text):
    state = {k: v.detach() for k, v in tiny.build("krea2").state_dict().items()}
    save_file(state, tmp_path / "a.safetensors", {"_quantization_metadata": text})
    with pytest.raises(UnreadableFormatError, match="_quantization_metadata in its header is damaged"):
        open_model_file(tmp_path / "a.safetensors")
    state["first.comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(UnreadableFormatError, match=r"first\.comfy_quant is damaged"):
        open_model_file(tmp_path / "b.safetensors")


def test_a_norm_without_a_shape(tmp_path):
    path = changed(tmp_path, lambda s: s.update({"blocks.0.attn.qknorm.qnorm.scale": torch.tensor(1.0)}))
    with pytest.raises(MisshapedKeysError, match="its shapes do not fit"):
        open_model_file(path)


def test_loading_holds_one_tensor_of_the_file_at_a_time(tmp_path, monkeypatch):
    path = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors", torch.bfloat16)
    alive, most = [], 0
    original = checkpoints._decode

    def spy(files, weight, shape):
        nonlocal most
        tensor = original(files, weight, shape)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(reference() is not None for reference in alive))
        return tensor

    monkeypatch.setattr(checkpoints, "_decode", spy)
    load_base(path, "int8", "fp32")
    # The tensor being read, and the one before it, which the loop's own variable still names.
    assert len(alive) > 50
    assert most <= 2


def shards_of(state, folder, count=3):
    """The state in several files, with the index that diffusers writes."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(count):
        name = f"diffusion_pytorch_model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: state[key] for key in sorted(state)[number::count]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_a_diffusers_folder_of_shards(tmp_path, family_name):
    """Members of a split qkv, and scales, stand in other files than their neighbours."""
    model = tiny.build(family_name)
    twin = tiny.diffusers_twin(family_name, model)
    state = {k: v.detach().contiguous() for k, v in twin.state_dict().items()}
    shards_of(state, tmp_path / "model" / "transformer")
    assert_same(loaded_tensors(tmp_path / "model"), model)
    assert_same(loaded_tensors(tmp_path / "model" / "transformer"), model)
    base = load_base(tmp_path / "model", "fp32", "fp32")
    arguments = tiny.inputs(family_name)
    assert tiny.relative(base.model(**arguments), model(**arguments)) < 1e-6


def test_scales_may_stand_in_another_shard(tmp_path):
    state, meant = scaled_fp8(tiny.build("krea2"), True, marker="float8_e4m3fn")
    shards_of(state, tmp_path / "model")
    found = loaded_tensors(tmp_path / "model")
    assert all(torch.equal(found[name].float(), value.float()) for name, value in meant.items())


def test_a_folder_with_a_single_checkpoint_is_that_file(tmp_path):
    (tmp_path / "folder").mkdir()
    tiny.write(tiny.build("krea2"), tmp_path / "folder" / "krea.safetensors")
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert_same(loaded_tensors(tmp_path / "folder"), tiny.build("krea2"))
    tiny.write(tiny.build("krea2"), tmp_path / "folder" / "other.safetensors")
    with pytest.raises(NotAModelFileError, match=r"a folder with 2 \.safetensors files and 0 indices"):
        open_model_file(tmp_path / "folder")


def test_shards_that_are_not_there_or_overlap_and_a_damaged_index(tmp_path):
    state = {k: v.detach() for k, v in tiny.build("krea2").state_dict().items()}
    shards_of(state, tmp_path / "model")
    second = tmp_path / "model" / "diffusion_pytorch_model-00002-of-00003.safetensors"
    content = second.read_bytes()
    save_file({**load_file(second), "first.bias": torch.zeros(256), "blocks.0.mod.lin": torch.zeros(1536)}, second)
    with pytest.raises(UnexpectedKeysError, match="keys in two of its files: "):
        open_model_file(tmp_path / "model")
    second.unlink()
    with pytest.raises(MissingKeysError, match=r"names 3 files, of which diffusion_pytorch_model-00002-of-00003"):
        open_model_file(tmp_path / "model")
    second.write_bytes(content[:-9])
    with pytest.raises(TruncatedFileError, match=r"00002-of-00003\.safetensors is truncated"):
        open_model_file(tmp_path / "model")
    (tmp_path / "model" / "diffusion_pytorch_model.safetensors.index.json").write_text("[]")
    with pytest.raises(NotAModelFileError, match=r"index\.json is damaged"):
        open_model_file(tmp_path / "model")


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("ideogram4_unconditional.safetensors", "ideogram4_unconditional.safetensors"),
        ("unconditional_transformer", "unconditional_transformer/a.safetensors"),
        ("unconditional_transformer/a.safetensors", "unconditional_transformer/a.safetensors"),
    ],
)
def test_the_unconditional_transformer_is_refused_by_name(tmp_path, given, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    tiny.write(tiny.build("ideogram4"), tmp_path / file)
    path = tmp_path / given
    with pytest.raises(WrongModelError, match="unconditional transformer of a pair"):
        open_model_file(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8", "nf4", "mxfp8"])
def test_loaded_base_is_frozen_and_near_the_file(tmp_path, family_name, precision):
    model = tiny.build(family_name)
    base = load_base(tiny.write(model, tmp_path / "base.safetensors"), precision, "fp32")
    assert not any(p.requires_grad for p in base.model.parameters())
    assert all(isinstance(m, FrozenLinear) for m in base.model.modules() if isinstance(m, torch.nn.Linear))
    arguments = tiny.inputs(family_name)
    error = tiny.relative(base.model(**arguments), model(**arguments))
    # On random weights: rounding for the dense modes, then 8 bits, then 4.
    assert error <= {"fp32": 1e-6, "bf16": 0.02, "fp8": 0.15, "int8": 0.05, "nf4": 0.4, "mxfp8": 0.15}[precision]
    if precision != "fp32":
        assert error > 0
    assert precision in base.notes[-1] or precision == "fp32"


def test_requantising_an_fp8_file_as_fp8_loses_nothing(tmp_path):
    """Ideogram 4 is published as fp8 with a scale per row: mode fp8 must keep its very bits."""
    model = tiny.build("ideogram4")
    state, meant = {}, {}
    for name, value in model.state_dict().items():
        if value.ndim == 2 and "indicator" not in name:
            scale = value.abs().amax(1, keepdim=True) / 448
            state[name], state[name + "_scale"] = (value / scale).to(torch.float8_e4m3fn), scale
            meant[name] = state[name].float() * scale
        else:
            state[name] = value
    save_file(state, tmp_path / "a.safetensors")
    base = load_base(tmp_path / "a.safetensors", "fp8", "fp32")
    for name in ("layers.0.attention.qkv", "layers.1.feed_forward.w2"):
        layer = base.model.get_submodule(name)
        assert torch.equal(layer.data.float(), state[f"{name}.weight"].float())
        assert torch.allclose(layer.dequantized(torch.float32), meant[f"{name}.weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 50, 3000, -1])
def test_a_file_cut_anywhere_is_one_clear_line(tmp_path, cut):
    path = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError) as caught:
        open_model_file(path)
    assert "\n" not in str(caught.value)
    assert "base.safetensors" in str(caught.value)


@pytest.mark.parametrize("misfit", ["zeros", "size"])
def test_a_weight_that_nf4_cannot_store_is_kept_in_bf16_with_a_word(tmp_path, misfit):
    """Of zeros alone the scales would be 0 / 0: every activation behind it NaN."""
    if misfit == "zeros":
        path = changed(tmp_path, lambda s: s["blocks.1.mlp.up.weight"].zero_())
        name, precisions = "blocks.1.mlp.up", {"nf4"}
    else:
        model = FAMILIES["krea2"].build(dataclasses.replace(tiny.CONFIGS["krea2"], text_mlp=65))
        path = tiny.write(model, tmp_path / "a.safetensors")
        name, precisions = "txtfusion.layerwise_blocks.0.mlp.gate", {"nf4"}
    for precision in ("nf4", "int8"):
        base = load_base(path, precision, "fp32")
        told = [note for note in base.notes if f"{precision} cannot store" in note and name in note]
        assert bool(told) == (precision in precisions)
        assert base.model.get_submodule(name).format.name == ("bf16" if precision in precisions else precision)
        assert base.model(**tiny.inputs("krea2")).isfinite().all()
