"""A base that is kept as its file stores it: the file's own bytes, decoding's numbers, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, as_stored, plan, stored_weights
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.eight_bit_choice import eligible
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.plan import Workload
from graft_lora.trainer.quantization import FrozenLinear
from safetensors.torch import load_file, save_file
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What a file may hold: dtype, whether the scale is one per row, the group of a turn.
KINDS = {
    "fp8 per tensor": (E4M3, False, 0),
    "fp8 per row": (E4M3, True, 0),
    "fp8 e5m2": (E5M2, False, 0),
    "int8 per tensor": (torch.int8, False, 0),
    "int8 per row": (torch.int8, True, 0),
    "int8 turned": (torch.int8, True, 16),
}


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def write(tmp_path, family_name, kind, marks=True, dense=(), prefix="", split=False):
    """A tiny model as ComfyUI's file, quantised here by the plain formula; names of the Linears that are."""
    dtype, per_row, group = KINDS[kind]
    model = tiny.build(family_name)
    tensors, quantised = {}, []
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, value in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        excluded = (
            owner in dense or owner not in linears or leaf != "weight" or not owner.startswith(("blocks", "layers"))
        )
        if excluded or (group and value.shape[1] % group):
            tensors[prefix + name] = value.to(torch.bfloat16)
            continue
        quantised.append(owner)
        largest = value.abs().amax(1, keepdim=True) if per_row else value.abs().max()
        scale = largest / {E4M3: 448, E5M2: 57344, torch.int8: 127}[dtype]
        numbers = value / scale
        tensors[prefix + name] = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
        tensors[f"{prefix}{owner}.weight_scale"] = scale
        if marks:
            format = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2", torch.int8: "int8_tensorwise"}[dtype]
            turn = {"convrot": True, "convrot_groupsize": group} if group else {}
            mark = json.dumps({"format": format, **turn}).encode()
            tensors[f"{prefix}{owner}.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    path = tmp_path / "stored.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path, quantised


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_the_files_and_the_numbers_those_that_decoding_gives(tmp_path, monkeypatch, family_name, kind):
    monkeypatch.setattr(stored_weights, "SLAB", 1000)  # in many slabs
    path, quantised = write(tmp_path, family_name, kind)
    base = load_base(path, "as-stored")
    stored, decoded = load_file(path), load_base(path, "fp32").model
    layers = {name: module for name, module in base.model.named_modules() if isinstance(module, FrozenLinear)}
    assert len(quantised) >= 8
    for name, layer in layers.items():
        assert torch.equal(as_bytes(layer.get_buffer("data")), as_bytes(stored[f"{name}.weight"])), name
        assert torch.equal(layer.dequantized(torch.float32), decoded.get_submodule(name).weight), name
        assert torch.equal(layer.dequantized(torch.bfloat16), decoded.get_submodule(name).weight.bfloat16()), name
        if name in quantised:
            scale = stored[f"{name}.weight_scale"]
            assert torch.equal(layer.get_buffer("scale"), scale.reshape(-1, 1).expand(len(layer.weight), 1))
        else:
            assert layer.format.name == "bf16"
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, decoded.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["fp8 per tensor", "int8 per row"])
def test_a_prefix_and_the_older_way_of_marking_make_no_difference(tmp_path, kind):
    path, quantised = write(tmp_path, "krea2", kind, marks=kind.startswith("int8"), prefix="model.diffusion_model.")
    stored, model = load_file(path), load_base(path, "as-stored").model
    for name in quantised:
        data = model.get_submodule(name).get_buffer("data")
        assert torch.equal(as_bytes(data), as_bytes(stored[f"model.diffusion_model.{name}.weight"]))


def test_a_plain_cast_to_fp8_has_no_scale_and_is_kept_too(tmp_path):
    model = tiny.build("krea2")
    path = tmp_path / "cast.safetensors"
    save_file(
        {k: v.to(E4M3 if v.ndim == 2 and "lin" not in k else torch.bfloat16) for k, v in model.state_dict().items()},
        path,
    )
    base, stored = load_base(path, "as-stored"), load_file(path)
    layer = base.model.get_submodule("blocks.0.attn.wq")
    assert torch.equal(as_bytes(layer.data), as_bytes(stored["blocks.0.attn.wq.weight"]))
    assert torch.equal(layer.dequantized(torch.float32), stored["blocks.0.attn.wq.weight"].float())
    # The family's excluded layers, which such a file casts too, are kept but never multiplied in 8 bits.
    assert base.model.get_submodule("tproj.1").format.name == "fp8"
    assert "tproj.1" not in eligible(base.model, base.family)
    assert "blocks.0.attn.wq" in eligible(base.model, base.family)


def test_thirds_of_a_split_qkv_keep_their_own_scales(tmp_path):
    path, _ = write(tmp_path, "ideogram4", "fp8 per tensor")
    stored = load_file(path)
    layers = {name.removesuffix(".attention.qkv.weight") for name in stored if name.endswith(".attention.qkv.weight")}
    for name in layers:
        data = stored.pop(f"{name}.attention.qkv.weight")
        stored.pop(f"{name}.attention.qkv.comfy_quant")
        stored.pop(f"{name}.attention.qkv.weight_scale")
        for third, (leaf, scale) in enumerate({"to_q": 0.5, "to_k": 0.25, "to_v": 2.0}.items()):
            stored[f"{name}.attention.{leaf}.weight"] = data.view(torch.uint8).chunk(3)[third].clone().view(E4M3)
            stored[f"{name}.attention.{leaf}.weight_scale"] = torch.tensor(scale)
        kept = data
    save_file(stored, path)
    layer = load_base(path, "as-stored").model.get_submodule(f"{name}.attention.qkv")
    assert torch.equal(as_bytes(layer.data), as_bytes(kept))
    assert layer.scale.unique_consecutive().tolist() == [0.5, 0.25, 2.0]
    assert torch.equal(
        layer.dequantized(torch.float32), load_base(path, "fp32").model.get_submodule(f"{name}.attention.qkv").weight
    )


def test_it_trains_as_the_decoded_base_does_and_can_wait_on_the_cpu(tmp_path, family_name):
    path, _ = write(tmp_path, family_name, "fp8 per row")
    found = []
    for precision, waiting in (("fp32", 0), ("as-stored", 0), ("as-stored", 1)):
        base = load_base(path, precision, "fp32", blocks_on_cpu=waiting)
        targets = adapters.resolve_targets(base.family, adapters.linears(base.model), LoraSettings(rank=2))
        adapters.inject(base.model, "a", LoraSettings(rank=2), targets, torch.Generator().manual_seed(0))
        found.append(tiny.loss_and_gradients(base, "a", recomputing=False))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_stored_in_8_bits_is_refused(tmp_path):
    path = tiny.write(tiny.build("krea2"), tmp_path / "dense.safetensors", torch.bfloat16)
    with pytest.raises(SettingsError) as caught:
        load_base(path, "as-stored")
    assert str(caught.value) == (
        "dense.safetensors is stored in bf16, and precision as-stored wants ComfyUI's fp8 or int8 file; set [model] "
        'precision to "auto", or to one of fp32, bf16, fp8, int8, nf4, mxfp8'
    )


def test_a_format_that_cannot_be_kept_is_refused_with_the_layers_that_have_it(tmp_path):
    path, _ = write(tmp_path, "krea2", "fp8 per tensor")
    stored = load_file(path)
    weight = stored["blocks.0.attn.wq.weight"]
    stored["blocks.0.attn.wq.weight"] = torch.ones(weight.shape, dtype=torch.int8)
    stored["blocks.0.attn.wq.SCB"] = torch.ones(len(weight))
    del stored["blocks.0.attn.wq.weight_scale"], stored["blocks.0.attn.wq.comfy_quant"]
    save_file(stored, path)
    with pytest.raises(
        SettingsError, match=r"stores blocks\.0\.attn\.wq in a way that cannot be kept as it is, wanted"
    ):
        load_base(path, "as-stored")


def test_what_a_cache_of_quantised_bases_says(tmp_path):
    path, _ = write(tmp_path, "krea2", "fp8 per tensor")
    base = load_base(path, "as-stored", quantized_cache=tmp_path / "cache")
    assert f"nothing is kept in {tmp_path / 'cache'}: as-stored needs no quantising" in base.notes
    assert not (tmp_path / "cache").exists()


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("kind", ["fp8 per tensor", "int8 turned"])
def test_the_plan_counts_the_bytes_that_are_loaded(tmp_path, family_name, kind, uneven):
    names = {"krea2": ("blocks.1.mlp.up",), "ideogram4": ("layers.1.feed_forward.w1",)}[family_name]
    path, quantised = write(tmp_path, family_name, kind, dense=names if uneven else ())
    assert (names[0] in quantised) is not uneven
    file, base = open_model_file(path), load_base(path, "as-stored")
    workload = Workload(
        file.family, file.config, tiny.LATENTS[family_name], lora=LoraSettings(rank=2), precision="as-stored",
        stored=as_stored.formats_for("as-stored", file), checkpointing=False, blocks_on_cpu=0, preview=False,
    )  # fmt: skip
    model = plan.skeleton(workload)
    found = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert found == sum(t.nbytes for t in (*base.model.parameters(), *base.model.buffers()))
    assert plan._stored_alike(workload) is not uneven
    dense = dataclasses.replace(workload, precision="bf16", stored=())
    assert plan.predict(workload).weights < plan.predict(dense).weights


def test_a_few_blocks_stand_for_all_where_the_file_stores_them_alike(monkeypatch):
    """The extrapolated count of a deeper model equals that of all its blocks."""
    family = FAMILIES["krea2"]
    config = dataclasses.replace(tiny.CONFIGS["krea2"], blocks=6)
    with torch.device("meta"):
        names = [name for name, m in family.build(config).named_modules() if isinstance(m, nn.Linear)]
    kept = plan.BF16 if hasattr(plan, "BF16") else as_stored.BF16
    stored = tuple((n, as_stored.FORMATS["fp8"] if family.block_of(n) is not None else kept) for n in names)
    workload = Workload(
        family, config, (16, 8, 8), 16, LoraSettings(rank=2), "as-stored", stored, checkpointing=True, blocks_on_cpu=0
    )
    few = plan.predict(workload)
    monkeypatch.setattr(plan, "_stored_alike", lambda workload: False)
    plan._counts.cache_clear()
    assert plan.predict(workload) == few
    plan._counts.cache_clear()
