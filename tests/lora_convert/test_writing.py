"""Writing: each target through its real reader where that is installed, else by the reader's formula, written out."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
import torch
from graft_lora.lora_convert.canonical import DiffModule, LohaModule, LokrModule, LoraModule, Split
from graft_lora.lora_convert.compare import difference
from graft_lora.lora_convert.errors import CannotConvertError
from graft_lora.lora_convert.reading import LoraFile, read_lora
from graft_lora.lora_convert.sizes import Sizes
from graft_lora.lora_convert.tables import TABLES
from graft_lora.lora_convert.writing import LAYOUTS, gather, write_lora
from safetensors.torch import load_file, save_file
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FUSED = {  # target → families whose q, k and v it has fused
    "comfyui": ("ideogram4",),
    "diffusers": (),
    "kohya": ("ideogram4",),
    "ai-toolkit": ("ideogram4",),
    "onetrainer": ("ideogram4",),
    "simpletuner": ("krea2", "ideogram4"),
}
JOINT = {"krea2": "blocks.0.attn.qkv", "ideogram4": "layers.0.attention.qkv"}
PLAIN = {"krea2": "blocks.0.mlp.up", "ideogram4": "layers.0.feed_forward.w1"}
SQUARE = {"krea2": "blocks.0.attn.wo", "ideogram4": "layers.0.attention.o"}


def lora(shape, rank=4, alpha=6.0, seed=0, dtype=FP32, **lengths):
    generator = torch.Generator().manual_seed(seed)
    down = 0.1 * torch.randn(rank, shape[1], generator=generator)
    return LoraModule(down.to(dtype), torch.randn(shape[0], rank, generator=generator).to(dtype), alpha, **lengths)


def loha(shape, rank=3, alpha=2.0, **lengths):
    generator = torch.Generator().manual_seed(1)
    a, b, c, d = (0.3 * torch.randn(s, generator=generator) for s in ((shape[0], rank), (rank, shape[1])) * 2)
    return LohaModule(a, b, c, d, alpha, **lengths)


def lokr(shape, low=(False, True), alpha=1.5, **lengths):
    """out₁ = in₁ = 4, the factors whole or of rank 2."""
    generator = torch.Generator().manual_seed(2)

    def factor(rows, columns, low):
        if low:
            return 0.3 * torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator)
        return 0.3 * torch.randn(rows, columns, generator=generator)

    return LokrModule(factor(4, 4, low[0]), factor(shape[0] // 4, shape[1] // 4, low[1]), alpha, **lengths)


def diff(shape, **lengths):
    return DiffModule(0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(3)), **lengths)


class Tiny:
    """A tiny model, its sizes and its weights by official name."""

    def __init__(self, family):
        self.family, self.model = family, tiny.build(family)
        self.weights = {n: m.weight.detach().clone() for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        self.sizes = Sizes.of(family, {n: p.shape for n, p in self.model.named_parameters()})

    def base(self, name):
        return self.weights[name]

    def weight(self, module):
        members = TABLES[self.family].members(module)
        return torch.cat([self.weights[m] for m in members]) if members else self.weights[module]

    def file(self, modules, metadata=None, biases=None):
        return LoraFile(self.family, modules, biases or {}, "unknown", "other", None, metadata or {}, ())

    def write(self, modules, layout, metadata=None, biases=None, **options):
        return write_lora(self.file(modules, metadata, biases), layout, sizes=self.sizes, **options)

    def everything(self, make=lora):
        """One change for every Linear, q, k and v of Krea 2 gathered."""
        changes = {n: make(tuple(w.shape), seed=i) for i, (n, w) in enumerate(self.weights.items())}
        return gather(changes, self.family, self.sizes)


@pytest.fixture
def model(family_name):
    return Tiny(family_name)


def deltas(model, modules, module):
    """dW of a module, q, k and v in one."""
    entry = modules[module]
    if isinstance(entry, Split):
        width = next(m for m in entry.members if m is not None).shape[1]
        return torch.cat(
            [
                m.delta() if m is not None else torch.zeros(r, width)
                for m, r in zip(entry.members, entry.rows, strict=True)
            ]
        )
    return entry.delta()


# ---- every target


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_can_be_saved(layout, model, tmp_path):
    """safetensors refuses what is not contiguous and what shares storage: A of a fused module goes to q, k and v."""
    modules = {JOINT[model.family]: lora(model.weight(JOINT[model.family]).shape)}
    written = model.write(modules, layout)
    save_file(written.state, tmp_path / "a.safetensors", written.metadata)
    assert all(torch.equal(v, written.state[k]) for k, v in load_file(tmp_path / "a.safetensors").items())
    assert written.metadata["format"] == "pt"


def test_tensors_are_contiguous_and_share_no_storage(model, tmp_path):
    """Also where those of the source are views, or one tensor for two modules."""
    one, other = PLAIN[model.family], SQUARE[model.family]
    first = lora(model.weight(one).shape)
    second = replace(first, up=lora(model.weight(other).shape).up.T.contiguous().T)
    state = model.write(
        {one: first, other: second, JOINT[model.family]: lora(model.weight(JOINT[model.family]).shape)}, "kohya"
    ).state
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    save_file(state, tmp_path / "a.safetensors")


def read_low_rank(written):
    """module as spelled → dW, by the formula that all readers share: alpha / rank · B @ A, alpha the rank if none."""
    found = {}
    for key, up in written.state.items():
        for b, a in ((".lora_B.weight", ".lora_A.weight"), (".lora_up.weight", ".lora_down.weight")):
            if key.endswith(b):
                stem = key.removesuffix(b)
                alpha = written.state.get(f"{stem}.alpha", torch.tensor(float(up.shape[1])))
                found[stem] = alpha / up.shape[1] * up.float() @ written.state[stem + a].float()
    return found


@pytest.mark.parametrize("source", ["split", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_q_k_and_v_are_as_the_target_has_them(layout, source, model):
    """Cut at Krea 2's own rows, which are no thirds; dW stays."""
    joint = JOINT[model.family]
    rows = model.sizes.rows(joint)
    width = model.weight(joint).shape[1]
    if source == "split":
        entry = Split(tuple(lora((r, width), seed=i, rank=i + 2) for i, r in enumerate(rows)), rows)
    else:
        entry = lora((sum(rows), width))
    options = {"rank": 9} if layout == "onetrainer" else {}
    found = read_low_rank(model.write({joint: entry}, layout, **options))
    fused = model.family in FUSED[layout]
    assert len(found) == (1 if fused else 3)
    assert torch.allclose(torch.cat(list(found.values())), deltas(model, {joint: entry}, joint), atol=1e-5)


STEMS = {
    ("comfyui", "krea2"): "diffusion_model.blocks.0.attn.wq",
    ("comfyui", "ideogram4"): "diffusion_model.layers.0.attention.qkv",
    ("diffusers", "krea2"): "transformer.transformer_blocks.0.attn.to_q",
    ("diffusers", "ideogram4"): "transformer.layers.0.attention.to_q",
    ("kohya", "krea2"): "lora_unet_blocks_0_attn_wq",
    ("kohya", "ideogram4"): "lora_unet_layers_0_attention_qkv",
    ("ai-toolkit", "krea2"): "diffusion_model.blocks.0.attn.wq",
    ("ai-toolkit", "ideogram4"): "diffusion_model.layers.0.attention.qkv",
    ("onetrainer", "krea2"): "diffusion_model.blocks.0.attn.wq",
    ("onetrainer", "ideogram4"): "diffusion_model.layers.0.attention.qkv",
    ("simpletuner", "krea2"): "transformer.transformer_blocks.0.attn.to_qkv",
    ("simpletuner", "ideogram4"): "transformer.layers.0.attention.qkv",
}
SUFFIXES = {
    "comfyui": {"lora_down.weight", "lora_up.weight", "alpha"},
    "diffusers": {"lora_A.weight", "lora_B.weight"},
    "kohya": {"lora_down.weight", "lora_up.weight", "alpha"},
    "ai-toolkit": {"lora_A.weight", "lora_B.weight"},
    "onetrainer": {"lora_A.weight", "lora_B.weight", "alpha"},
    "simpletuner": {"lora_A.weight", "lora_B.weight"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_a_layout(layout, model):
    joint = JOINT[model.family]
    state = model.write({joint: lora(model.weight(joint).shape, dtype=BF16)}, layout).state
    stem = STEMS[layout, model.family]
    assert {key.removeprefix(f"{stem}.") for key in state if key.startswith(f"{stem}.")} == SUFFIXES[layout]
    assert {t.dtype for k, t in state.items() if k.endswith("alpha")} <= {FP32}
    assert {t.dtype for k, t in state.items() if not k.endswith("alpha")} == {BF16}


@pytest.mark.parametrize("layout", ["comfyui", "kohya", "onetrainer"])
def test_alpha_and_factors_are_left_as_they_are_where_alpha_is_read(layout, model):
    module = lora(model.weight(PLAIN[model.family]).shape, dtype=BF16, alpha=2 / 3)
    written = model.write({PLAIN[model.family]: module}, layout)
    down, up, alpha = written.state.values()
    assert torch.equal(down, module.down)
    assert torch.equal(up, module.up)
    assert alpha.dtype == FP32
    assert alpha.item() == pytest.approx(2 / 3, rel=1e-7)


@pytest.mark.parametrize("layout", ["diffusers", "ai-toolkit", "simpletuner"])
def test_a_power_of_two_is_folded_exactly_and_another_scale_says_what_it_costs(layout, model):
    shape = model.weight(PLAIN[model.family]).shape
    exact = lora(shape, dtype=BF16, alpha=1.0)
    written = model.write({PLAIN[model.family]: exact}, layout)
    up = next(t for k, t in written.state.items() if "lora_B" in k)
    assert torch.equal(up.float(), 0.25 * exact.up.float())
    assert not any("powers of two" in note for note in written.notes)
    written = model.write({PLAIN[model.family]: lora(shape, dtype=BF16, alpha=8 / 3)}, layout)
    (note,) = (note for note in written.notes if "powers of two" in note)
    cost = float(note.split("up to ")[1].split()[0])
    assert 1e-3 < cost < 2.5e-3
    in_fp32 = model.write({PLAIN[model.family]: lora(shape, dtype=BF16, alpha=8 / 3)}, layout, dtype=FP32)
    assert not any("powers of two" in note for note in in_fp32.notes)
    wanted = lora(shape, dtype=BF16, alpha=8 / 3).delta()
    assert tiny.relative(next(iter(read_low_rank(in_fp32).values())), wanted) < 1e-6


def test_fp16_that_would_overflow_is_refused_by_name(model):
    name = PLAIN[model.family]
    module = lora(model.weight(name).shape)
    module = replace(module, up=module.up * 1e6)
    with pytest.raises(CannotConvertError, match=rf"{name} has values up to .*which float16 cannot hold; write bf16"):
        model.write({name: module}, "comfyui", dtype=FP16)
    model.write({name: module}, "comfyui", dtype=BF16)
    large = replace(lora(model.weight(name).shape, dtype=FP16), alpha=4e6)
    with pytest.raises(CannotConvertError, match="float16 cannot hold"):
        model.write({name: large}, "diffusers")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_dtype_is_that_of_the_factors_and_never_of_alpha_and_lengths(dtype, model):
    name = PLAIN[model.family]
    out = model.weight(name).shape[0]
    module = lora(model.weight(name).shape, magnitude_over_base=torch.rand(out))
    state = model.write({name: module}, "comfyui", dtype=dtype).state
    assert {k.rsplit(".", 1)[-1]: v.dtype for k, v in state.items()} == {
        "weight": dtype, "alpha": FP32, "dora_scale": FP32,
    }  # fmt: skip


def test_an_unknown_layout_and_a_rank_of_nothing_are_errors(model):
    with pytest.raises(ValueError, match="no layout 'a1111'; wanted one of comfyui, diffusers"):
        model.write({}, "a1111")
    with pytest.raises(ValueError, match="a rank of 0"):
        model.write({}, "comfyui", rank=0)


# ---- diffusers and PEFT


def pipeline_class(family):
    from diffusers.loaders import lora_pipeline

    return {"krea2": lora_pipeline.Krea2LoraLoaderMixin, "ideogram4": lora_pipeline.Ideogram4LoraLoaderMixin}[family]


def diffusers_loads(model, path):
    """The file through `load_lora_weights`, on the tiny twin; returns the twin."""
    twin = tiny.diffusers_twin(model.family, model.model)
    owner = pipeline_class(model.family)()
    owner.transformer, owner.components, owner.hf_device_map = twin, {}, None
    owner.load_lora_weights(path)
    return twin


@pytest.mark.parametrize("ranks", ["equal", "unequal"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_diffusers_loads_every_module(kind, ranks, model, tmp_path):
    """Through the pipeline's loader, from a file with its header: the model then computes what ours does."""
    modules = model.everything(lambda s, seed: lora(s, seed=seed, rank=4 if ranks == "equal" else 2 + seed % 3))
    if kind == "dora":
        modules = {n: with_magnitudes(model, n, m) for n, m in modules.items()}
    written = model.write(modules, "diffusers")
    path = tmp_path / "a.safetensors"
    save_file(written.state, path, written.metadata)
    twin = diffusers_loads(model, path)
    arguments = tiny.inputs(model.family)
    with torch.no_grad():
        found = tiny.diffusers_velocity(model.family, twin, *arguments.values())
        merge(model, modules)
        assert tiny.relative(found, model.model(**arguments)) < 2e-5
        twin.disable_lora()
        assert tiny.relative(tiny.diffusers_velocity(model.family, twin, *arguments.values()), found) > 0.01


def with_magnitudes(model, name, entry):
    """A DoRA whose lengths are a bit beside those of its base."""
    weight = model.weight(name)
    if isinstance(entry, Split):
        weights = weight.split(entry.rows)
        members = (
            None if m is None else replace(m, magnitude=w.norm(dim=1) * (0.8 + 0.4 * torch.rand(len(w))))
            for m, w in zip(entry.members, weights, strict=True)
        )
        return replace(entry, members=tuple(members))
    return replace(entry, magnitude=weight.norm(dim=1) * (0.8 + 0.4 * torch.rand(len(weight))))


def merge(model, modules):
    """The changes into the tiny model's own weights."""
    linears = dict(model.model.named_modules())
    with torch.no_grad():
        for name, entry in modules.items():
            if isinstance(entry, Split):
                for member, change in zip(TABLES[model.family].members(name), entry.members, strict=True):
                    if change is not None:
                        linears[member].weight.copy_(change.merged(model.weights[member]))
            else:
                linears[name].weight.copy_(entry.merged(model.weights[name]))


def test_diffusers_header_is_fresh(model, tmp_path):
    """A stale `lora_adapter_metadata` gives a size mismatch."""
    stale = {
        "lora_adapter_metadata": json.dumps({"transformer.r": 99, "transformer.lora_alpha": 1}),
        "ss_network_dim": "99", "ss_network_alpha": "1", "sshs_model_hash": "x", "lora_alpha": "1", "lora_rank": "99",
        "ss_steps": "10", "modelspec.title": "mine",
    }  # fmt: skip
    written = model.write(model.everything(), "diffusers", metadata=stale)
    assert written.metadata.keys() == {"format", "ss_steps", "modelspec.title", "lora_adapter_metadata"}
    settings = json.loads(written.metadata["lora_adapter_metadata"])
    assert settings["transformer.r"] == settings["transformer.lora_alpha"] == 4
    save_file(written.state, tmp_path / "a.safetensors", written.metadata)
    diffusers_loads(model, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("change", "word"),
    [(loha, "a LoHa"), (lokr, "a LoKr"), (diff, "a full change")],
)
def test_diffusers_is_not_given_what_it_cannot_load(change, word, model):
    name = PLAIN[model.family]
    modules = {name: change(tuple(model.weight(name).shape))}
    with pytest.raises(CannotConvertError, match=rf"{name} is {word}, which diffusers cannot load; .*--rank N"):
        model.write(modules, "diffusers")
    written = model.write(modules, "diffusers", rank=16)
    (found,) = read_low_rank(written).values()
    assert tiny.relative(found, modules[name].delta()) == pytest.approx(written.errors[name], abs=1e-4)


@pytest.mark.parametrize("layout", ["diffusers", "onetrainer", "simpletuner"])
def test_a_dora_among_plain_loras_is_refused_or_made_one(layout, model):
    """PEFT, and the trainers likewise, give every module lengths, those of W where the file has none."""
    dora, plain = PLAIN[model.family], SQUARE[model.family]
    modules = {
        dora: with_magnitudes(model, dora, lora(model.weight(dora).shape)),
        plain: lora(model.weight(plain).shape),
    }
    with pytest.raises(CannotConvertError, match=rf"{plain} is no DoRA and {dora} is one; .* give the base model"):
        model.write(modules, layout)
    state = model.write(modules, layout, base=model.base).state
    length = [v for k, v in state.items() if k.endswith(("magnitude", "lora_magnitude_vector", "dora_scale"))][1]
    found = replace(modules[plain], magnitude=length.flatten()).merged(model.weight(plain))
    assert tiny.relative(found, modules[plain].merged(model.weight(plain))) < 1e-6


# ---- ComfyUI


def comfyui_merges(state, stem, weight):
    """What ComfyUI 0.33 makes of a weight, in fp32, by the formulas of its weight adapters, written out."""
    get = lambda suffix: state.get(f"{stem}.{suffix}")  # noqa: E731
    alpha, scale = get("alpha"), 1.0
    if (up := get("lora_up.weight")) is not None:
        change, scale = up.float() @ get("lora_down.weight").float(), alpha.item() / up.shape[1]
    elif (a := get("hada_w1_a")) is not None:
        change = (a @ get("hada_w1_b")) * (get("hada_w2_a") @ get("hada_w2_b"))
        scale = alpha.item() / a.shape[1]
    elif (change := get("diff")) is not None:
        return weight + change
    else:
        w1, w2 = get("lokr_w1"), get("lokr_w2")
        if w1 is None:
            w1, scale = get("lokr_w1_a") @ get("lokr_w1_b"), alpha.item() / get("lokr_w1_b").shape[0]
        if w2 is None:
            w2, scale = get("lokr_w2_a") @ get("lokr_w2_b"), alpha.item() / get("lokr_w2_b").shape[0]
        change = torch.kron(w1, w2)
    changed = weight + scale * change
    lengths = get("dora_scale")
    if lengths is None:
        return changed
    norm = weight.norm(dim=1, keepdim=True) if lengths.shape[0] == len(weight) else changed.norm(dim=0, keepdim=True)
    return changed * (lengths / (norm + torch.finfo(FP32).eps))


KINDS = {
    "lora": lora,
    "loha": loha,
    "lokr": lokr,
    "whole lokr": lambda s, **m: lokr(s, low=(False, False), **m),
    "lokr of low w1": lambda s, **m: lokr(s, low=(True, False), **m),
    "diff": diff,
}


@pytest.mark.parametrize("axis", [None, "magnitude", "magnitude_over_base", "column_magnitude"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "diff"])
def test_comfyui_computes_the_weight(kind, axis, model):
    """On a square weight, where a 1-D `dora_scale` would go unnoticed over the wrong axis."""
    name = SQUARE[model.family]
    weight = model.weight(name)
    lengths = {} if axis is None else {axis: (0.8 + 0.4 * torch.rand(len(weight))) * weight.norm(dim=1)}
    module = KINDS[kind](tuple(weight.shape), **lengths)
    state = model.write({name: module}, "comfyui", base=model.base if axis == "magnitude" else None).state
    assert tiny.relative(comfyui_merges(state, f"diffusion_model.{name}", weight), module.merged(weight)) < 1e-5


def test_comfyui_is_given_full_changes_of_weights_vectors_and_biases(model):
    name, norm, bias = {
        "krea2": ("blocks.0.mlp.up", "blocks.0.prenorm.scale", "first"),
        "ideogram4": ("layers.0.feed_forward.w1", "layers.0.attention_norm1", "input_proj"),
    }[model.family]
    modules = {name: diff(model.weight(name).shape), norm: diff((256,))}
    state = model.write(modules, "comfyui", biases={bias: torch.ones(256)}).state
    keys = (f"{name}.diff", f"{norm}.diff", f"{bias}.diff_b")
    assert state.keys() == {f"diffusion_model.{key}" for key in keys}
    assert torch.equal(state[f"diffusion_model.{norm}.diff"], modules[norm].diff)


def test_comfyui_wants_lengths_over_w_which_take_the_base(model):
    name = PLAIN[model.family]
    module = with_magnitudes(model, name, lora(model.weight(name).shape))
    with pytest.raises(
        CannotConvertError, match=rf"{name} is a DoRA over the norm of W \+ dW, and ComfyUI .*give the base"
    ):
        model.write({name: module}, "comfyui")
    over_base = model.write({name: module}, "comfyui", base=model.base).state[f"diffusion_model.{name}.dora_scale"]
    back = replace(module, magnitude=None, magnitude_over_base=over_base[:, 0])
    with pytest.raises(
        CannotConvertError, match=rf"{name} is a DoRA over the norm of W, and diffusers .*give the base"
    ):
        model.write({name: back}, "diffusers")
    (length,) = (v for k, v in model.write({name: back}, "diffusers", base=model.base).state.items() if "magn" in k)
    assert torch.allclose(length, module.magnitude, rtol=1e-5)


def test_a_dora_is_baked_with_the_base(model):
    """Each of q, k and v against its own rows of the base, fused there or not."""
    joint = JOINT[model.family]
    rows, weight = model.sizes.rows(joint), model.weight(joint)
    entry = Split(tuple(lora((r, weight.shape[1]), seed=i) for i, r in enumerate(rows)), rows)
    entry = with_magnitudes(model, joint, entry)
    with pytest.raises(CannotConvertError, match="is a DoRA; to bake it, give the base model"):
        model.write({joint: entry}, "comfyui", bake=True)
    state = model.write({joint: entry}, "comfyui", bake=True, base=model.base).state
    wanted = torch.cat([m.merged(w) for m, w in zip(entry.members, weight.split(rows), strict=True)])
    assert all(k.endswith(".diff") for k in state)
    assert tiny.relative(weight + torch.cat(list(state.values())), wanted) < 1e-6
    fused = replace(lora(weight.shape), column_magnitude=weight.norm(dim=0))
    state = model.write({joint: fused}, "comfyui", bake=True, base=model.base).state
    assert tiny.relative(weight + torch.cat(list(state.values())), fused.merged(weight)) < 1e-6


def test_comfyui_takes_the_columns_of_one_row_for_rows():
    """Krea 2's text-fusion projector has one output row."""
    model = Tiny("krea2")
    module = lora(model.weight("txtfusion.projector").shape, column_magnitude=torch.rand(3))
    with pytest.raises(CannotConvertError, match="by column of one row, which ComfyUI takes for one by row; bake"):
        model.write({"txtfusion.projector": module}, "comfyui")


def test_lengths_of_a_full_change_are_refused_or_baked_in(model):
    """ComfyUI counts the `dora_scale` beside a `.diff` as loaded and does nothing with it."""
    name = PLAIN[model.family]
    module = diff(model.weight(name).shape, magnitude_over_base=torch.ones(len(model.weight(name))))
    with pytest.raises(CannotConvertError, match=r"a full change with the lengths of a DoRA.*with the base model$"):
        model.write({name: module}, "comfyui")
    weight = model.weight(name)
    (found,) = model.write({name: module}, "comfyui", base=model.base).state.values()
    assert tiny.relative(weight + found, module.merged(weight)) < 1e-6


# ---- kohya: musubi-tuner and OneTrainer


def test_kohya_spells_underscores_that_belong_to_a_name():
    state = Tiny("krea2").write({"txtfusion.layerwise_blocks.1.attn.wo": lora((80, 80))}, "kohya").state
    assert "lora_unet_txtfusion_layerwise_blocks_1_attn_wo.alpha" in state
    state = Tiny("ideogram4").write({"layers.1.adaln_modulation": lora((1024, 64))}, "kohya").state
    assert "lora_unet_layers_1_adaln_modulation.alpha" in state


def musubi_merges(state, stem):
    """musubi-tuner's LoKr: the first factor whole, alpha / rank of the second where that is in two."""
    w1, a = state[f"{stem}.lokr_w1"], state.get(f"{stem}.lokr_w2_a")
    if a is None:
        return torch.kron(w1, state[f"{stem}.lokr_w2"])
    return torch.kron(w1, a @ state[f"{stem}.lokr_w2_b"]) * (state[f"{stem}.alpha"] / a.shape[1])


@pytest.mark.parametrize("low", [(False, False), (False, True), (True, False), (True, True)])
def test_musubi_reads_the_first_factor_of_a_lokr_whole_only(low, model):
    name = SQUARE[model.family]
    module = lokr(tuple(model.weight(name).shape), low=low)
    state = model.write({name: module}, "kohya").state
    stem = "lora_unet_" + name.replace(".", "_")
    assert tiny.relative(musubi_merges(state, stem), module.delta()) < 1e-6


@pytest.mark.parametrize("layout", ["kohya", "onetrainer", "ai-toolkit"])
def test_two_kinds_in_a_file_are_refused_where_one_would_be_passed_over(layout, model):
    """musubi-tuner takes the kind of the first key for that of all."""
    one, other = PLAIN[model.family], SQUARE[model.family]
    modules = {one: lora(model.weight(one).shape), other: lokr(tuple(model.weight(other).shape))}
    with pytest.raises(CannotConvertError, match=rf"{one} is a LoRA and {other} a LoKr; .* one kind in a file"):
        model.write(modules, layout)


@pytest.mark.parametrize("layout", ["kohya", "onetrainer", "diffusers", "simpletuner"])
def test_vectors_and_biases_are_refused_where_no_reader_has_them(layout, model):
    norm = {"krea2": "blocks.0.prenorm.scale", "ideogram4": "layers.0.attention_norm1"}[model.family]
    with pytest.raises(CannotConvertError, match=rf"{norm} is a vector, which .* cannot load; write comfyui"):
        model.write({norm: diff((256,))}, layout)
    with pytest.raises(CannotConvertError, match=r"has a bias, which .* cannot load; write comfyui"):
        model.write({}, layout, biases={"input_proj": torch.ones(256)})


def test_musubi_passes_over_a_dora_scale_and_is_given_none(model):
    name = PLAIN[model.family]
    with pytest.raises(CannotConvertError, match=r"which musubi-tuner cannot load; .*write onetrainer"):
        model.write({name: with_magnitudes(model, name, lora(model.weight(name).shape))}, "kohya")


# ---- ai-toolkit


def test_ai_toolkit_takes_the_scale_of_a_lokr_for_one(model):
    """It is made when the layer is, from settings, and the file's alpha is not looked at."""
    name = SQUARE[model.family]
    for low in ((False, True), (True, False), (True, True)):
        module = lokr(tuple(model.weight(name).shape), low=low)
        state = model.write({name: module}, "ai-toolkit").state
        found = LokrModule(
            *(
                state.get(f"diffusion_model.{name}.{w}")
                if f"diffusion_model.{name}.{w}" in state
                else (state[f"diffusion_model.{name}.{w}_a"], state[f"diffusion_model.{name}.{w}_b"])
                for w in ("lokr_w1", "lokr_w2")
            ),
            alpha=state[f"diffusion_model.{name}.alpha"].item(),
        )
        assert found.scale == 1.0
        assert tiny.relative(found.delta(), module.delta()) < 1e-6


def test_ai_toolkit_is_said_the_largest_rank(model):
    one, other = PLAIN[model.family], SQUARE[model.family]
    modules = {one: lora(model.weight(one).shape, rank=2), other: lora(model.weight(other).shape, rank=5)}
    (note,) = model.write(modules, "ai-toolkit", dtype=FP32).notes
    assert "ranks are 2 to 5: train on with linear: 5" in note


@pytest.mark.parametrize("axis", ["magnitude", "magnitude_over_base"])
def test_ai_toolkit_starts_lengths_anew_and_is_given_none(axis, model):
    name = PLAIN[model.family]
    module = replace(lora(model.weight(name).shape), **{axis: model.weight(name).norm(dim=1) * 1.1})
    with pytest.raises(CannotConvertError, match=f"{name} is a LoRA with the lengths of a DoRA, .* bake them in"):
        model.write({name: module}, "ai-toolkit")
    state = model.write({name: module}, "ai-toolkit", base=model.base, bake=True).state
    assert list(state) == [f"diffusion_model.{name}.diff"]


# ---- OneTrainer


@pytest.mark.parametrize("axis", ["magnitude", "column_magnitude"])
def test_onetrainer_has_lengths_in_the_papers_sense_on_either_axis(axis, model):
    name = PLAIN[model.family]
    weight = model.weight(name)
    length = weight.norm(dim=1 if axis == "magnitude" else 0)
    written = model.write({name: lora(weight.shape, **{axis: length})}, "onetrainer", {"graft": '{"dora_scale": "x"}'})
    shape = (-1, 1) if axis == "magnitude" else (1, -1)
    assert torch.equal(written.state[f"diffusion_model.{name}.dora_scale"], length.reshape(shape))
    assert any(f"output axis {'on' if axis == 'magnitude' else 'off'}" in note for note in written.notes)
    assert json.loads(written.metadata["graft"]) == {"dora_scale": "the paper's"}


def test_the_two_axes_in_a_file_are_refused(model):
    one, other = PLAIN[model.family], SQUARE[model.family]
    w = model.weight
    modules = {
        one: lora(w(one).shape, magnitude=w(one).norm(dim=1)),
        other: lora(w(other).shape, column_magnitude=w(other).norm(dim=0)),
    }
    with pytest.raises(CannotConvertError, match=f"{one} and {other} are DoRAs of different axes"):
        model.write(modules, "onetrainer")
    with pytest.raises(CannotConvertError, match=f"{other} is a DoRA by column"):
        model.write(modules, "diffusers")


def test_onetrainer_has_one_rank_and_is_given_zeros_to_it(model):
    one, other = PLAIN[model.family], SQUARE[model.family]
    modules = {one: lora(model.weight(one).shape, rank=2), other: lora(model.weight(other).shape, rank=5, alpha=3.0)}
    with pytest.raises(CannotConvertError, match=f"{other} has rank 5 and {one} rank 2; .* --rank 5 is exact"):
        model.write(modules, "onetrainer")
    written = model.write(modules, "onetrainer", rank=5)
    assert {t.shape[0] for k, t in written.state.items() if "lora_A" in k} == {5}
    assert written.errors == {}
    for name, delta in read_low_rank(written).items():
        assert tiny.relative(delta, modules[name.removeprefix("diffusion_model.")].delta()) < 1e-6


def test_a_rank_for_lohas_is_not_called_exact(model):
    """A LoHa of rank r has a matrix of up to r²: one rank for all is a truncation of it."""
    one, other = PLAIN[model.family], SQUARE[model.family]
    modules = {one: loha(model.weight(one).shape, rank=2), other: loha(model.weight(other).shape, rank=4)}
    with pytest.raises(CannotConvertError, match="--rank 4 makes LoRAs of them, and says what that costs") as caught:
        model.write(modules, "onetrainer")
    assert "exact" not in str(caught.value)
    assert model.write(modules, "onetrainer", rank=4).errors[other] > 0.1


@pytest.mark.parametrize("rank", [2, 40])
def test_factors_whose_products_leave_fp32_are_one_error_with_a_rank(rank, model):
    """Infinite products once were a LinAlgError."""
    name = PLAIN[model.family]
    change = loha(model.weight(name).shape, rank=12 if rank == 40 else 3)
    change = replace(change, w1_a=change.w1_a * 1e20, w2_a=change.w2_a * 1e20)
    with pytest.raises(CannotConvertError, match=f"{name}: .* beyond what fp32 can hold"):
        model.write({name: change}, "comfyui", rank=rank)


def test_what_no_dtype_holds_is_not_said_to_want_another_dtype(model):
    """A strength folded in may leave fp32."""
    name = PLAIN[model.family]
    module = lora(model.weight(name).shape, alpha=1e38)
    with pytest.raises(CannotConvertError, match=f"{name} has values up to inf, .* is it broken"):
        model.write({name: replace(module, up=module.up * 1e10)}, "diffusers")


# ---- SimpleTuner


def test_simpletuner_settings_are_in_the_header(model):
    written = model.write(model.everything(lambda s, seed: lora(s, seed=seed, rank=2)), "simpletuner")
    settings = json.loads(written.metadata["lora_adapter_metadata"])
    assert settings["transformer.use_dora"] is False
    stems = {k.rsplit(".", 2)[0].removeprefix("transformer.") for k in written.state}
    assert set(settings["transformer.target_modules"]) == stems
    ranks = {
        k.rsplit(".", 2)[0].removeprefix("transformer."): t.shape[0] for k, t in written.state.items() if "_A" in k
    }
    pattern = settings["transformer.rank_pattern"]
    assert {s: pattern.get(f"^{s}", settings["transformer.r"]) for s in stems} == ranks
    assert pattern == settings["transformer.alpha_pattern"]


class Named(nn.Module):
    """A Linear under a dotted name."""

    def __init__(self, name, weight):
        super().__init__()
        owner = self
        parts = name.split(".")
        for part, following in pairwise(parts):
            owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
            del following
        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data.copy_(weight)
        owner.add_module(parts[-1], linear)
        self.linear = [linear]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lycoris_computes_the_weight(kind, dora, model):
    """What SimpleTuner loads with LyCORIS; a LoRA goes along with another kind."""
    if kind == "diff" and dora:
        pytest.skip("a full change has no lengths")
    lycoris = pytest.importorskip("lycoris")
    name = SQUARE[model.family]
    spelled = {"krea2": "transformer_blocks.0.attn.to_out.0", "ideogram4": "layers.0.attention.o"}[model.family]
    weight = model.weight(name)
    module = KINDS[kind](tuple(weight.shape))
    if dora:
        module = with_magnitudes(model, name, module)
    modules = {name: module, PLAIN[model.family]: lokr(tuple(model.weight(PLAIN[model.family]).shape))}
    state = model.write(modules, "simpletuner").state
    assert all(key.startswith("lycoris_") for key in state)
    own = "lycoris_" + spelled.replace(".", "_")
    host = Named(spelled, weight)
    network, _ = lycoris.create_lycoris_from_weights(
        1.0, None, host, weights_sd={k: v for k, v in state.items() if k.startswith(f"{own}.")}
    )
    # Not `merge_to`, which multiplies by the scale of a LoHa and a LoKr twice (4.1.3).
    network.apply_to()
    with torch.no_grad():
        found = host.linear[0](torch.eye(weight.shape[1])).T
    assert tiny.relative(found, module.merged(weight)) < 1e-5


# ---- rank, headers, gathering


def test_rank_is_the_least_error_and_is_said(model):
    """Eckart and Young: the error is what is left of the singular values."""
    name, small = PLAIN[model.family], SQUARE[model.family]
    modules = {name: lora(model.weight(name).shape, rank=6), small: lora(model.weight(small).shape, rank=2)}
    written = model.write(modules, "comfyui", rank=3)
    values = torch.linalg.svdvals(modules[name].delta().double())
    wanted = (values[3:].square().sum() / values.square().sum()).sqrt().item()
    assert written.errors.keys() == {name}
    assert written.errors[name] == pytest.approx(wanted, rel=1e-4)
    whole = sum(m.delta().double().square().sum().item() for m in modules.values())
    assert written.error == pytest.approx((values[3:].square().sum().item() / whole) ** 0.5, rel=1e-4)
    found = read_low_rank(written)
    assert torch.allclose(found[f"diffusion_model.{small}"], modules[small].delta(), atol=1e-6)
    assert tiny.relative(found[f"diffusion_model.{name}"], modules[name].delta()) == pytest.approx(wanted, rel=1e-3)


def test_rank_leaves_vectors_tables_and_embeddings_alone():
    norm = {"blocks.0.prenorm.scale": diff((256,)), "last.modulation.lin": diff((2, 256))}
    written = Tiny("krea2").write(norm, "comfyui", rank=1)
    assert {k.rsplit(".", 1)[1] for k in written.state} == {"diff"}
    written = Tiny("ideogram4").write({"embed_image_indicator": diff((2, 256))}, "comfyui", rank=1)
    assert list(written.state) == ["diffusion_model.embed_image_indicator.diff"]


def test_comfyui_header_says_what_dora_scale_is(model):
    name = PLAIN[model.family]
    module = lora(model.weight(name).shape, magnitude_over_base=torch.ones(len(model.weight(name))))
    metadata = model.write({name: module}, "comfyui", {"graft": '{"base": "x"}', "lycoris_config": "{}"}).metadata
    assert json.loads(metadata["graft"]) == {"base": "x", "dora_scale": "over the norm of W"}
    assert "lycoris_config" not in metadata
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "6")
    plain = model.write({name: lora(model.weight(name).shape)}, "comfyui", metadata).metadata
    assert json.loads(plain["graft"]) == {"base": "x"}


def test_gather_brings_q_k_and_v_together_and_nothing_else(model):
    changes = {n: lora(tuple(w.shape), seed=i) for i, (n, w) in enumerate(model.weights.items())}
    found = gather(changes, model.family, model.sizes)
    flat = {}
    for name, entry in found.items():
        members = TABLES[model.family].members(name)
        flat |= dict(zip(members, entry.members, strict=True)) if isinstance(entry, Split) else {name: entry}
    assert flat == changes
    assert isinstance(found[JOINT[model.family]], Split) == (model.family == "krea2")


def test_gather_leaves_a_member_out_that_is_not_there():
    model = Tiny("krea2")
    found = gather({"blocks.0.attn.wk": lora(model.weight("blocks.0.attn.wk").shape)}, "krea2", model.sizes)
    q, _, v = found["blocks.0.attn.qkv"].members
    assert q is None
    assert v is None
    assert found["blocks.0.attn.qkv"].rows == (256, 128, 128)
    assert set(model.write(found, "comfyui").state) == {
        f"diffusion_model.blocks.0.attn.wk.{s}" for s in ("lora_down.weight", "lora_up.weight", "alpha")
    }


# ---- there and back


def made(model, kind, axis, fused=None):
    """A file of one kind on every Linear that the kind fits, q, k and v apart or as one, or by turns."""
    modules = {}
    for index, name in enumerate(model.everything()):
        whole = model.weight(name)
        rows = model.sizes.rows(name) if model.sizes.is_joint(name) else None
        apart = index % 2 if fused is None else not fused
        pieces = whole.split(rows) if rows and apart else [whole]
        changes = []
        for number, piece in enumerate(pieces):
            if kind.endswith("lokr") and (piece.shape[0] % 4 or piece.shape[1] % 4):
                break
            lengths = {}
            if axis is not None:
                lengths = {axis: piece.norm(dim=0 if axis == "column_magnitude" else 1) * 1.1}
            own = {"seed": index + number} if kind == "lora" else {}
            changes.append(KINDS[kind](tuple(piece.shape), **own, **lengths))
        else:
            modules[name] = changes[0] if len(changes) == 1 else Split(tuple(changes), rows)
    return modules


ALL_LOKR = {"lokr", "whole lokr"}
LYCORIS = {"lora", "loha", *ALL_LOKR}
TAKEN = {  # target → kinds, then axis of a DoRA without a base → kinds
    "comfyui": (LYCORIS | {"diff"}, {"magnitude_over_base": LYCORIS}),
    "diffusers": ({"lora"}, {"magnitude": {"lora"}}),
    "kohya": (LYCORIS, {}),
    "ai-toolkit": ({"lora", "diff"} | ALL_LOKR, {}),
    "onetrainer": (LYCORIS, {"magnitude": {"lora"} | ALL_LOKR}),
    "simpletuner": (LYCORIS | {"diff"}, {"magnitude": LYCORIS}),
}


@pytest.mark.parametrize("axis", [None, "magnitude", "magnitude_over_base"])
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "whole lokr", "diff"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_reads_back_as_the_same(layout, kind, axis, model):
    """dW and lengths of every module, and a second conversion changes not a bit; or it is refused."""
    # A LoKr may not have the same cuts as q, k and v, and then is none any more, which not every target takes; LoHa of
    # q, k and v in one has another rank.
    own = kind.endswith("lokr") or (kind, layout) == ("loha", "onetrainer")
    modules = made(model, kind, axis, fused=model.family in FUSED[layout] if own else None)
    taken = kind in (TAKEN[layout][0] if axis is None else TAKEN[layout][1].get(axis, ()))
    options = {"rank": 12} if layout == "onetrainer" and kind == "lora" else {}
    if not taken:
        with pytest.raises(CannotConvertError):
            model.write(modules, layout)
        return
    written = model.write(modules, layout, **options)
    file = read_lora(written.state, written.metadata, model.sizes)
    assert file.family == model.family
    assert file.modules.keys() == modules.keys()
    for name, entry in modules.items():
        assert difference(entry, file.modules[name]) < 2e-6
    again = write_lora(file, layout, sizes=model.sizes)
    assert again.metadata == written.metadata
    assert again.state.keys() == written.state.keys()
    assert all(torch.equal(again.state[key], tensor) for key, tensor in written.state.items())


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lora_goes_through_every_pair_of_layouts(source, layout, model):
    modules = model.everything()
    options = {"rank": 12} if "onetrainer" in (source, layout) else {}
    first = model.write(modules, source, **options)
    file = read_lora(first.state, first.metadata, model.sizes)
    second = write_lora(file, layout, sizes=model.sizes, **options)
    found = read_lora(second.state, second.metadata, model.sizes)
    assert found.modules.keys() == modules.keys()
    for name, entry in modules.items():
        assert difference(entry, found.modules[name]) < 2e-6
