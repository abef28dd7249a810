"""LoRA files on a loaded base: what the layers give is what the merged weights would."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from graft_lora.lora_convert import DiffModule, LohaModule, LokrModule, LoraModule, Sizes, read_lora
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.applied import AppliedLora, applied
from lora_files import MODULES, lora, sizes, write

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=tiny.NAMES)
def base(request, tmp_path_factory):
    return tiny.loaded(tmp_path_factory.mktemp("base"), request.param, "fp32")


def run(base):
    with torch.no_grad():
        return base.model(**tiny.inputs(base.family.name))


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def change_of(kind, out, columns):
    """A random change of a weight (out, in), not small beside it."""
    if kind == "lora":
        return LoraModule(noise(3, columns), 0.1 * noise(out, 3), alpha=1.5)
    if kind == "loha":
        return LohaModule(0.2 * noise(out, 2), noise(2, columns), noise(out, 2, seed=1), noise(2, columns, seed=1), 1.0)
    if kind == "diff":
        return DiffModule(0.05 * noise(out, columns))
    first = (noise(4, 1), noise(1, 2)) if kind == "lokr, both low" else noise(4, 2)
    second = (
        0.05 * noise(out // 4, columns // 2) if kind == "lokr" else (0.1 * noise(out // 4, 2), noise(2, columns // 2))
    )
    return LokrModule(first, second, alpha=1.0)


KINDS = ("lora", "loha", "diff", "lokr", "lokr, low", "lokr, both low")
LENGTHS = ("", "magnitude", "magnitude_over_base", "column_magnitude")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_the_output_is_that_of_the_merged_weight(base, kind, lengths, strength):
    """On every Linear, with and without a bias, against `Change.merged`."""
    linears = adapters.linears(base.model)
    changes, before = {}, {}
    for name, layer in linears.items():
        if layer.out_features % 4 or layer.in_features % 2:
            continue
        change = change_of(kind, layer.out_features, layer.in_features)
        if lengths:
            norm = layer.weight.norm(dim=0 if lengths == "column_magnitude" else 1)
            change = dataclasses.replace(change, **{lengths: norm * (1 + 0.1 * noise(len(norm)))})
        changes[name], before[name] = change, layer.weight.clone()
    plain = run(base)
    with applied(base.model, [(AppliedLora(changes, {}), strength)], CPU):
        found = run(base)
    try:
        for name, change in changes.items():
            merged = before[name] + strength * (change.merged(before[name]) - before[name])
            linears[name].get_buffer("data").copy_(merged)
        wanted = run(base)
    finally:
        for name, weight in before.items():
            linears[name].get_buffer("data").copy_(weight)
    assert tiny.relative(wanted, plain) > 1e-3
    assert tiny.relative(found, wanted) < 2e-5
    assert torch.equal(run(base), plain)


def test_norms_tables_embeddings_and_biases(base):
    """Every parameter that is no Linear's weight, in the base's own place for a while."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(base.model.named_parameters())
    changes = {
        name.removesuffix(".weight"): DiffModule(0.05 * torch.randn(p.shape, generator=generator))
        for name, p in parameters.items()
    }
    biases = {
        name: torch.randn(layer.out_features, generator=generator)
        for name, layer in adapters.linears(base.model).items()
        if layer.bias is not None
    }
    assert changes
    assert biases
    plain = run(base)
    with applied(base.model, [(AppliedLora(changes, biases), 0.5)], CPU):
        found = run(base)
        assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert torch.equal(run(base), plain)
    assert all(parameter is parameters[name] for name, parameter in base.model.named_parameters())
    layers = adapters.linears(base.model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.add_(changes[name.removesuffix(".weight")].diff, alpha=0.5)
        for name, bias in biases.items():
            layers[name].bias.add_(bias, alpha=0.5)
        wanted = run(base)
        for name, parameter in parameters.items():
            parameter.sub_(changes[name.removesuffix(".weight")].diff, alpha=0.5)
        for name, bias in biases.items():
            layers[name].bias.sub_(bias, alpha=0.5)
    assert tiny.relative(wanted, plain) > 1e-3
    assert tiny.relative(found, wanted) < 1e-5


@pytest.mark.parametrize("naming", ["official", "diffusers", "fused"])
def test_a_file_in_any_layout_is_the_same_lora(base, naming):
    """q, k and v fused or apart: the dW that the file stands for, on the base's own modules."""
    family = base.family.name
    prefix = "diffusion_model." if naming == "official" else "transformer."
    file = write(family, lora(".lora_A.weight", ".lora_B.weight", alpha=2.0), prefix, naming)
    found, missing = AppliedLora.of(read_lora(file.state, file.metadata, sizes(family)), sizes(family), _no_weight)
    assert missing == []
    for module, wanted in file.wanted.items():
        names = MODULES[family][module][0]
        assert tiny.relative(torch.cat([found.changes[name].delta() for name in names]), wanted) < 1e-6
    assert found.count == sum(len(MODULES[family][module][0]) for module in file.wanted)
    assert found.bytes > 0


def _no_weight(module):
    raise AssertionError(f"the weight of {module} is not needed")


def test_modules_that_the_base_has_not_are_named(base):
    family = base.family.name
    file = write(family, lora(".lora_A.weight", ".lora_B.weight"), "diffusion_model.", "official")
    read = read_lora(file.state, None, sizes(family))
    left_out = {"krea2": "blocks.0.attn.gate", "ideogram4": "layers.0.attention.o"}[family]
    whole = sizes(family)
    fewer = Sizes(family, {name: shape for name, shape in whole.shapes.items() if name != left_out}, whole.biases)
    found, missing = AppliedLora.of(read, fewer, _no_weight)
    assert missing == [left_out]
    assert left_out not in found.changes


def test_strength_0_leaves_it_out_bit_for_bit(base):
    name, layer = next(iter(adapters.linears(base.model).items()))
    one = AppliedLora({name: change_of("lora", layer.out_features, layer.in_features)}, {})
    plain = run(base)
    with applied(base.model, [(one, 0.0)], CPU):
        assert torch.equal(run(base), plain)


def test_several_add_up_beside_a_trained_one(base):
    """Each sees the base as it is, so that the order does not matter, and no adapter hides what is below it."""
    settings = LoraSettings(rank=2, alpha=2)
    targets = adapters.resolve_targets(base.family, adapters.linears(base.model), settings)
    name = targets[0]
    layer = adapters.linears(base.model)[name]
    shape = layer.out_features, layer.in_features
    one, two = (AppliedLora({name: change_of(kind, *shape)}, {}) for kind in ("lora", "loha"))
    x = noise(2, 5, shape[1])
    adapters.inject(base.model, "t", settings, targets, torch.Generator().manual_seed(0))
    adapted = adapters.adapted(base.model, "t")[name]
    torch.nn.init.normal_(adapted.zero_at_start("t"), generator=torch.Generator().manual_seed(1))
    try:
        with torch.no_grad(), adapters.active(base.model, "t"):
            trained = adapted(x)
            with applied(base.model, [(one, 0.5), (two, 2.0)], CPU):
                found = adapted(x)
            with applied(base.model, [(two, 2.0), (one, 0.5)], CPU):
                assert tiny.relative(adapted(x), found) < 1e-6
    finally:
        adapters.remove(base.model, "t")
    wanted = trained + x @ (0.5 * one.changes[name].delta() + 2.0 * two.changes[name].delta()).T
    assert tiny.relative(found, wanted) < 1e-5


def test_everything_is_as_it_was_after_an_exception(base):
    name, layer = next(iter(adapters.linears(base.model).items()))
    table = next(name for name, _ in base.model.named_parameters())
    changes = {name: change_of("lora", layer.out_features, layer.in_features)}
    before = base.model.get_parameter(table)
    changes[table.removesuffix(".weight")] = DiffModule(torch.ones(before.shape))
    plain = run(base)
    with pytest.raises(RuntimeError, match="sampling"), applied(base.model, [(AppliedLora(changes, {}), 1.0)], CPU):
        raise RuntimeError("sampling")
    assert base.model.get_parameter(table) is before
    assert torch.equal(run(base), plain)


def test_a_module_that_is_not_there_is_an_error(base):
    lora = AppliedLora({"blocks.99.nothing": DiffModule(torch.ones(2))}, {})
    with pytest.raises(KeyError, match=r"no blocks\.99\.nothing"), applied(base.model, [(lora, 1.0)], CPU):
        pass


def test_the_copy_on_the_device_is_put_away():
    lora = AppliedLora({"a": change_of("lora", 8, 4)}, {"a": torch.ones(8)})
    meta = torch.device("meta")
    placed = lora.on(meta)
    assert placed.changes["a"].down.is_meta
    assert placed.biases["a"].is_meta
    assert lora.on(meta) is placed
    lora.put_away()
    assert lora.on(meta) is not placed
    assert not lora.changes["a"].down.is_meta


@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_quantised_weight_is_as_it_computes(family_name, tmp_path, precision, lengths):
    """Lengths are those of the dequantised weight."""
    base = tiny.loaded(tmp_path, family_name, precision)
    name = adapters.resolve_targets(base.family, adapters.linears(base.model), LoraSettings())[0]
    layer = adapters.linears(base.model)[name]
    weight = layer.weight
    change = change_of("lora", *weight.shape)
    if lengths:
        norm = weight.norm(dim=0 if lengths == "column_magnitude" else 1)
        change = dataclasses.replace(change, **{lengths: 1.1 * norm})
    x = noise(2, 5, weight.shape[1])
    with torch.no_grad(), applied(base.model, [(AppliedLora({name: change}, {}), 1.0)], CPU):
        assert tiny.relative(layer(x), x @ change.merged(weight).T) < 1e-5
