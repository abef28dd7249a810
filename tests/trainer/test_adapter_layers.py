"""LoRA, DoRA and LoKr against PEFT, LyCORIS and the formulas, on plain and quantised bases."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import tiny
import torch
from graft_lora.lora_convert import read_comfyui, write_comfyui
from graft_lora.trainer import adapters
from graft_lora.trainer.adapter_layers import factorization
from graft_lora.trainer.adapters import LoraSettings, resolve_targets
from graft_lora.trainer.formats import FORMATS
from graft_lora.trainer.quantization import FrozenLinear
from lycoris.functional.general import factorization as lycoris_factorization
from lycoris.modules.lokr import LokrModule as LycorisLokr
from torch import nn

PRECISIONS = ["fp32", "bf16", "fp8", "int8", "nf4", "mxfp8"]
# LoKr's second factor: of low rank, and whole.
VARIANTS = {
    "lora": LoraSettings("lora", 4, 6),
    "dora": LoraSettings("dora", 4, 6),
    "dora, rslora": LoraSettings("dora", 4, 6, rslora=True),
    "lokr": LoraSettings("lokr", 2, 6, factor=4),
    "lokr, whole": LoraSettings("lokr", 64, 64, factor=4),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def linear(rows=32, columns=64, bias=True, precision="fp32", seed=0):
    """A frozen Linear, as every base has them."""
    generator = torch.Generator().manual_seed(seed)
    layer = FrozenLinear(columns, rows).store(torch.randn(rows, columns, generator=generator), FORMATS[precision])
    if bias:
        layer.store_bias(torch.randn(rows, generator=generator), torch.float32)
    return layer


def model_of(base):
    """A model of one Linear. PEFT wants a parameter somewhere, as the norms of a real one."""
    model = nn.Sequential(base)
    model.norm = nn.Parameter(torch.ones(1), requires_grad=False)
    return model


def adapted(settings, base=None, name="a", seed=1, trained=True):
    """A Linear with an adapter that has weights as after some training."""
    model = model_of(base or linear())
    adapters.inject(model, name, settings, ["0"], torch.Generator().manual_seed(seed))
    if trained:
        disturb(model, name)
    return model


def disturb(model, name, size=0.2, seed=2):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapters.parameters(model, name):
            weight += size * torch.randn(weight.shape, generator=generator)


def dense(base):
    """The same Linear as PyTorch has it, with the dequantised weight."""
    layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
    layer.weight.data = base.weight.float().clone()
    if base.bias is not None:
        layer.bias.data = base.bias.clone()
    return layer.requires_grad_(False)


def gradients(model, parameters, x, name="a"):
    """Output, and gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    assert out.dtype == x.dtype
    out.square().mean().backward()
    found = [out.detach(), x.grad, *(p.grad.clone() for p in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return found


def ours(model, x, name="a"):
    with adapters.active(model, name, train=True):
        return gradients(model, adapters.parameters(model, name), x)


def add(base, name, variant, trained=True, targets="attention+mlp"):
    settings = replace(VARIANTS[variant], targets=targets)
    chosen = resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, name, settings, chosen, torch.Generator().manual_seed(0))
    if trained:
        disturb(base.model, name, 0.05)


@pytest.fixture
def x():
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(7))


# --- DoRA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dora_and_all_its_gradients_are_those_of_peft_own_layer(x, precision, rslora, bias):
    """PEFT's forms W + s · B A densely; its base is the dequantised weight of ours."""
    base = linear(bias=bias, precision=precision)
    model = adapted(LoraSettings("dora", 4, 6, rslora=rslora), base)
    theirs = nn.Sequential(dense(base))
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, use_dora=True, target_modules=["0"])
    peft.inject_adapter_in_model(config, theirs, "a")
    assert torch.allclose(theirs[0].lora_magnitude_vector["a"].weight, base.weight.float().norm(dim=1))
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not [key for key in (*missing, *unexpected) if "lora" in key]
    layer = theirs[0]
    parameters = [layer.lora_A["a"].weight, layer.lora_B["a"].weight, layer.lora_magnitude_vector["a"].weight]
    for found, wanted in zip(ours(model, x), gradients(theirs, parameters, x), strict=True):
        assert tiny.relative(found, wanted) < 1e-6


def test_dora_starts_from_the_lengths_of_the_base_and_survives_rows_of_zeros(x):
    """0 / 0 makes PEFT's output NaN."""
    weight = torch.randn(32, 64)
    weight[3] = 0
    base = FrozenLinear(64, 32).store(weight, FORMATS["fp32"])
    model = adapted(LoraSettings("dora", 4, 6), base, trained=False)
    assert torch.allclose(adapters.to_canonical(model, "a")["0"].magnitude, weight.norm(dim=1))
    assert all(part.isfinite().all() for part in ours(model, x))
    disturb(model, "a")
    assert all(part.isfinite().all() for part in ours(model, x))


def test_dora_keeps_a_small_change_of_the_length_in_bf16():
    """g = 1.001 is 1 in bf16: the change would be lost."""
    model = adapted(LoraSettings("dora", 4, 6), linear(bias=False), trained=False)
    with torch.no_grad():
        model[0].lora_magnitude_vector["a"].weight *= 1.001
    x = torch.randn(4, 64).bfloat16()
    base = torch.ones(4, 32, dtype=torch.bfloat16)
    assert tiny.relative(model[0]._change("a", x, base), 0.001 * base) < 0.01


def test_dora_drops_the_input_of_the_low_rank_branch_alone(x):
    """With a magnitude of twice the norm and B of zeros nothing is left to drop."""
    model = adapted(LoraSettings("dora", 4, 6, dropout=0.5), linear(bias=False), trained=False)
    with torch.no_grad():
        model[0].lora_magnitude_vector["a"].weight *= 2
    with adapters.active(model, None):
        plain = model(x)
    with adapters.active(model, "a", train=True):
        assert tiny.relative(model(x), 2 * plain) < 1e-6
        disturb(model, "a")
        assert not torch.equal(model(x), model(x))


# --- LoKr ------------------------------------------------------------------------------------------------------------


def test_factorization_is_that_of_lycoris():
    for dimension in (1, 2, 12, 97, 127, 250, 360, 512, 2560, 6144, 7680, 9216, 13824, 16384):
        for factor in (-1, 1, 2, 3, 4, 5, 6, 8, 16, 20, 64, 100):
            assert factorization(dimension, factor) == lycoris_factorization(dimension, factor), (dimension, factor)


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 64])
@pytest.mark.parametrize("factor", [-1, 1, 2, 4, 5, 8])
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (64, 32), (30, 7), (1, 12)])
def test_shapes_gradients_and_scale_are_those_of_lycoris(rows, columns, factor, rank):
    """In fp64: the terms of a gradient of one element may all but cancel, and what fp32 leaves of it is chance."""
    base = linear(rows, columns)
    model = adapted(LoraSettings("lokr", rank, 6, factor=factor), base).double()
    theirs = LycorisLokr("a", dense(base).double(), 1.0, rank, 6, factor=factor).double()
    parameters = dict(theirs.named_parameters())
    weights = adapters.adapted(model, "a")["0"].weights("a")
    assert {f"lokr_{part}": w.shape for part, w in weights.items()} == {n: p.shape for n, p in parameters.items()}
    with torch.no_grad():
        for part, weight in weights.items():
            parameters[f"lokr_{part}"].copy_(weight)
    x = torch.randn(3, 5, columns, dtype=torch.float64)
    found, wanted = ours(model, x), gradients(theirs, [parameters[f"lokr_{part}"] for part in weights], x)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        # Were anything rounded to fp32 on either side, it would be 1e-8 at the least; sums that cancel reach 1e-13.
        assert tiny.relative(ours_, theirs_) < 1e-10


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", ["lokr", "lokr, whole"])
def test_lokr_is_the_kronecker_product(x, variant, precision):
    """In fp64, see above."""
    base = linear(precision=precision)
    model = adapted(VARIANTS[variant], base).double()
    weights = adapters.adapted(model, "a")["0"].weights("a")
    twins = {part: w.detach().clone().requires_grad_() for part, w in weights.items()}
    w2 = twins["w2"] if "w2" in twins else 6 / 2 * twins["w2_a"] @ twins["w2_b"]
    assert ("w2" in twins) == (variant == "lokr, whole")

    def formula(x):
        return nn.functional.linear(x, base.dequantized(x.dtype) + torch.kron(twins["w1"], w2), base.bias.double())

    x = x.double()
    for found, wanted in zip(ours(model, x), gradients(formula, list(twins.values()), x), strict=True):
        assert tiny.relative(found, wanted) < 1e-10


def test_lokr_starts_as_in_lycoris():
    """w1 and w2_a Kaiming uniform, w2_b or w2 zero; PEFT has w1 zero."""
    low, whole = (adapted(VARIANTS[v], linear(512, 768), trained=False) for v in ("lokr", "lokr, whole"))
    weights = adapters.adapted(low, "a")["0"].weights("a")
    assert not weights["w2_b"].any()
    for part in ("w1", "w2_a"):
        bound = 1 / weights[part].shape[1] ** 0.5
        assert 0.8 * bound < weights[part].abs().max() <= bound
    model = model_of(linear(512, 768))
    adapters.inject(model, "a", LoraSettings("lokr", 128, 128, factor=4), ["0"], torch.Generator().manual_seed(0))
    weights = adapters.adapted(model, "a")["0"].weights("a")
    assert weights["w1"].any()
    assert not weights["w2"].any()
    assert adapters.adapted(whole, "a")["0"].weights("a")["w1"].any()


def test_lokr_keeps_nothing_of_the_size_of_the_weight(x):
    """PEFT's and LyCORIS' own layers form w1 ⊗ w2, and keep it."""
    kept = []
    for variant in ("lokr", "lokr, whole"):
        model = adapted(VARIANTS[variant], linear(512, 64))
        with (
            adapters.active(model, "a", train=True),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
        ):
            model(x[0, :2])
    assert kept
    assert max(kept) < 512 * 64


# --- every kind ------------------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_adapter_keeps_a_dequantised_weight(variant, precision):
    """Tensors that autograd packs for backward, parameters and the base's buffers excluded."""
    model = adapted(VARIANTS[variant], linear(512, 64, precision=precision))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(2, 64).requires_grad_()
    with adapters.active(model, "a", train=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    assert kept
    assert (512, 64) not in kept
    assert (64, 512) not in kept


@variants
@pytest.mark.parametrize("precision", ["fp32", "int8", "nf4"])
def test_a_new_adapter_changes_nothing(tmp_path, family_name, variant, precision):
    base = tiny.loaded(tmp_path, family_name, precision)
    arguments = tiny.inputs(family_name)
    plain = base.model(**arguments)
    add(base, "a", variant, trained=False)
    with adapters.active(base.model, "a"):
        assert torch.equal(base.model(**arguments), plain)


@variants
def test_masters_are_fp32_and_the_computation_is_bf16_without_autocast(tmp_path, family_name, variant):
    base = tiny.loaded(tmp_path, family_name, "int8", "bf16")
    add(base, "a", variant, targets=r".*\.(wk|qkv)")
    assert set(tiny.dtypes_in_training(base, "a")) == {(torch.bfloat16, torch.bfloat16)}
    for parameter in adapters.parameters(base.model, "a"):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.any()


@variants
@pytest.mark.parametrize("precision", ["fp32", "nf4"])
def test_checkpointing_is_bit_identical_in_fp32(tmp_path, family_name, variant, precision):
    base = tiny.loaded(tmp_path, family_name, precision)
    add(base, "a", variant)
    plain, recomputed = (tiny.loss_and_gradients(base, "a", recomputing) for recomputing in (False, True))
    assert all(torch.equal(found, wanted) for found, wanted in zip(recomputed, plain, strict=True))


def test_several_kinds_on_one_base(tmp_path, family_name):
    """Each alone gives what it gives beside the others; PEFT has no model with two tuners."""
    arguments, outputs = tiny.inputs(family_name), {}
    for variant in VARIANTS:
        base = tiny.loaded(tmp_path, family_name)
        add(base, "a", variant)
        with adapters.active(base.model, "a"):
            outputs[variant] = base.model(**arguments)
    base = tiny.loaded(tmp_path, family_name)
    plain, modules = base.model(**arguments), [n for n, _ in base.model.named_modules()]
    names = {variant: f"n{index}" for index, variant in enumerate(VARIANTS)}
    for variant, name in names.items():
        add(base, name, variant)
    assert adapters.adapter_names(base.model) == sorted(names.values())
    assert len(adapters.linears(base.model)) == len(adapters.linears(tiny.build(family_name)))
    for variant, name in names.items():
        with adapters.active(base.model, name, train=True):
            trained = {id(p) for p in base.model.parameters() if p.requires_grad}
        assert trained == {id(p) for p in adapters.parameters(base.model, name)}
        assert tiny.relative(outputs[variant], plain) > 0.01
    assert not any(p.requires_grad for p in base.model.parameters())
    for variant, name in names.items():
        with adapters.active(base.model, name):
            assert torch.equal(base.model(**arguments), outputs[variant]), variant
        adapters.remove(base.model, name)
        assert torch.equal(base.model(**arguments), plain)
    assert [n for n, _ in base.model.named_modules()] == modules


@variants
def test_initial_weights_come_from_the_generator_alone(variant):
    weights = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        weights.append(adapters.parameters(adapted(VARIANTS[variant], trained=False), "a"))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@variants
def test_injection_under_inference_mode_can_be_trained(variant, x):
    """ComfyUI runs nodes so."""
    with torch.inference_mode():
        base = linear()
        model = adapted(VARIANTS[variant], base, trained=False)
    assert all(part.isfinite().all() for part in ours(model, x))


# --- files -----------------------------------------------------------------------------------------------------------


def comfyui(state, stem, weight):
    """What ComfyUI 0.33 makes of a weight, after comfy/weight_adapter/{lora,lokr,base}.py, in fp64."""
    part = {key.removeprefix(f"{stem}."): t.double() for key, t in state.items() if key.startswith(f"{stem}.")}
    weight = weight.double()
    if "lora_up.weight" in part:
        delta = part["alpha"] / part["lora_down.weight"].shape[0] * part["lora_up.weight"] @ part["lora_down.weight"]
    elif "lokr_w2" in part:
        delta = torch.kron(part["lokr_w1"], part["lokr_w2"])
    else:
        rank = part["lokr_w2_b"].shape[0]
        delta = part["alpha"] / rank * torch.kron(part["lokr_w1"], part["lokr_w2_a"] @ part["lokr_w2_b"])
    changed = weight + delta
    if "dora_scale" in part:
        changed = changed * (part["dora_scale"] / (weight.norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps))
    return changed


@variants
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("shape", [(32, 64), (64, 64)])
def test_comfyui_makes_the_trained_weight_of_the_file(variant, precision, shape):
    """Its DoRA divides by the norm of W: with the paper's magnitude the weight would be another."""
    base = linear(*shape, bias=False, precision=precision)
    model = adapted(VARIANTS[variant], base)
    modules = adapters.to_canonical(model, "a")
    with adapters.active(model, "a"), torch.no_grad():
        trained = model(torch.eye(shape[1])).T
    found = comfyui(write_comfyui(modules), "diffusion_model.0", base.weight)
    assert tiny.relative(found, trained) < 1e-6
    assert tiny.relative(modules["0"].merged(base.weight), trained) < 1e-6
    read = read_comfyui(write_comfyui(modules))["0"]
    assert tiny.relative(read.merged(base.weight), trained) < 1e-6
    if "dora" in variant:
        state = write_comfyui(modules)
        state["diffusion_model.0.dora_scale"] = modules["0"].magnitude[:, None]
        assert tiny.relative(comfyui(state, "diffusion_model.0", base.weight), trained) > 0.01
