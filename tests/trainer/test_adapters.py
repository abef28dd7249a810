"""Targets, names, dtypes; one adapter active and trainable at a time."""

from __future__ import annotations

import re

import pytest
import tiny
import torch
from graft_lora.lora_convert import read_comfyui, write_comfyui
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings, resolve_targets
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.ideogram4 import Ideogram4Config
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.quantization import FrozenLinear
from torch import nn

FULL = {"krea2": Krea2Config(), "ideogram4": Ideogram4Config()}


def full_linears(name):
    with torch.device("meta"):
        return adapters.linears(FAMILIES[name].build(FULL[name]))


@pytest.mark.parametrize(
    ("name", "targets", "blocks", "count"),
    [
        ("krea2", "attention", "all", 28 * 5),
        ("krea2", "attention+mlp", "all", 28 * 8),
        ("krea2", "all", "all", 264),
        ("krea2", "attention+mlp", "0-3,27", 5 * 8),
        ("krea2", "all", "0-3", 4 * 8),
        ("krea2", r".*\.wk", "all", 28 + 4),
        ("ideogram4", "attention", "all", 34 * 2),
        ("ideogram4", "attention+mlp", "all", 34 * 5),
        ("ideogram4", "all", "all", 211),
        ("ideogram4", "attention", "33", 2),
    ],
)
def test_targets_at_full_size(name, targets, blocks, count):
    settings = LoraSettings(targets=targets, blocks=blocks)
    assert len(resolve_targets(FAMILIES[name], full_linears(name), settings)) == count


def test_ideogram4_trains_the_fused_projection():
    chosen = resolve_targets(FAMILIES["ideogram4"], full_linears("ideogram4"), LoraSettings())
    assert "layers.0.attention.qkv" in chosen
    assert not any(re.search(r"to_[qkv]", name) for name in chosen)


@pytest.mark.parametrize(("name", "count"), [("krea2", 107e6), ("ideogram4", 95e6)])
def test_parameters_at_rank_32_are_those_of_the_reference(name, count):
    """reference/peer-benchmark.md counts diffusers' modules: Ideogram 4's q, k, v apart, each with an A of its own."""
    linears = full_linears(name)
    chosen = resolve_targets(FAMILIES[name], linears, LoraSettings())
    members = {n: len(FAMILIES[name].table.to_diffusers(n)) for n in chosen}
    found = sum(32 * (members[n] * linears[n].in_features + linears[n].out_features) for n in chosen)
    assert found == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": "atention"}, "'atention' is none of attention, attention.mlp, all, and as a regular expression"),
        ({"targets": "("}, "is no regular expression"),
        ({"blocks": "0-99"}, "has the blocks 0 to 27"),
        ({"blocks": "5-2"}, "cannot be read"),
        ({"blocks": "first"}, "cannot be read"),
        ({"targets": "first", "blocks": "0-3"}, "matches nothing in the blocks"),
        # No reader scales a LoKr of whole factors.
        (
            {"kind": "lokr", "alpha": 16.0, "targets": "all"},
            r"alpha is 16 and rank 32, but \d+ of 264 modules get whole LoKr factors.*make alpha 32",
        ),
    ],
)
def test_unusable_targets_are_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        resolve_targets(FAMILIES["krea2"], full_linears("krea2"), LoraSettings(**settings))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"alpha": -1.0}, "alpha"),
        ({"dropout": 1.0}, "share"),
        ({"kind": "loha"}, "kind 'loha' is not known; choose one of lora, dora, lokr"),
        ({"kind": "lokr", "rslora": True}, "rslora cannot be used with kind lokr"),
        ({"factor": 8}, "factor is 8, which belongs to kind lokr; kind is lora"),
        ({"kind": "lokr", "factor": 0}, "factor is 0; wanted a positive number"),
    ],
)
def test_unusable_lora_settings_are_named(values, message):
    with pytest.raises(SettingsError, match=message):
        LoraSettings(**values)


def add(base, name, seed=0, random_b=True, **settings):
    lora = LoraSettings(rank=4, alpha=6, **settings)
    targets = resolve_targets(base.family, adapters.linears(tiny.build(base.family.name)), lora)
    adapters.inject(base.model, name, lora, targets, torch.Generator().manual_seed(seed))
    if random_b:
        generator = torch.Generator().manual_seed(seed + 100)
        for layer in adapters.adapted(base.model, name).values():
            nn.init.normal_(layer.lora_B[name].weight, std=0.2, generator=generator)
    return targets


def test_a_new_adapter_changes_nothing_and_is_neither_active_nor_trainable(tmp_path, family_name):
    base, arguments = tiny.loaded(tmp_path, family_name), tiny.inputs(family_name)
    plain = base.model(**arguments)
    targets = add(base, "a", random_b=False)
    assert set(adapters.adapted(base.model, "a")) == set(targets)
    assert torch.equal(base.model(**arguments), plain)
    assert not any(p.requires_grad for p in base.model.parameters())
    with adapters.active(base.model, "a"):
        assert torch.equal(base.model(**arguments), plain)


def test_initial_weights_come_from_the_generator_alone(tmp_path):
    """ComfyUI's TrainLoraNode does not seed them."""
    weights = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        base = tiny.loaded(tmp_path, "krea2")
        add(base, "a", seed=5, random_b=False)
        weights.append(adapters.parameters(base.model, "a"))
    assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))
    down = weights[0][0]
    bound = 1 / down.shape[1] ** 0.5
    assert 0.9 * bound < down.abs().max() <= bound  # PEFT's kaiming_uniform(a=sqrt(5))


def test_a_second_adapter_leaves_the_first_as_it_was(tmp_path, family_name):
    """PEFT makes a second adapter active in silence and leaves the first trainable."""
    base, arguments = tiny.loaded(tmp_path, family_name), tiny.inputs(family_name)
    plain = base.model(**arguments)
    add(base, "a", seed=1)
    with adapters.active(base.model, "a"):
        first = base.model(**arguments)
    with adapters.active(base.model, "a", train=True):
        add(base, "b", seed=2, targets="all")
        assert all(p.requires_grad for p in adapters.parameters(base.model, "a"))
        assert not any(p.requires_grad for p in adapters.parameters(base.model, "b"))
        assert torch.equal(base.model(**arguments), first)
    with adapters.active(base.model, "a"):
        assert torch.equal(base.model(**arguments), first)
    with adapters.active(base.model, "b"):
        second = base.model(**arguments)
    with adapters.active(base.model, None):
        assert torch.equal(base.model(**arguments), plain)
    assert tiny.relative(first, plain) > 0.01
    assert tiny.relative(second, first) > 0.01
    assert adapters.adapter_names(base.model) == ["a", "b"]


def test_only_the_active_adapter_is_trained_and_all_is_restored_after_an_error(tmp_path):
    base = tiny.loaded(tmp_path, "krea2")
    add(base, "a")
    add(base, "b")
    with pytest.raises(RuntimeError, match="broken"), adapters.active(base.model, "b", train=True):
        base.model(**tiny.inputs("krea2")).sum().backward()
        raise RuntimeError("broken")
    assert all(p.grad is None for p in adapters.parameters(base.model, "a"))
    assert all(p.grad is not None for p in adapters.parameters(base.model, "b"))
    assert not any(p.requires_grad for p in base.model.parameters())
    with pytest.raises(KeyError, match="no adapter named 'c'"), adapters.active(base.model, "c"):
        pass


def test_a_removed_adapter_leaves_no_trace(tmp_path, family_name):
    base, arguments = tiny.loaded(tmp_path, family_name), tiny.inputs(family_name)
    plain, names = base.model(**arguments), [n for n, _ in base.model.named_modules()]
    add(base, "a")
    add(base, "b", targets="all")
    adapters.remove(base.model, "a")
    with adapters.active(base.model, "b"):
        assert not torch.equal(base.model(**arguments), plain)
    adapters.remove(base.model, "b")
    assert [n for n, _ in base.model.named_modules()] == names
    assert torch.equal(base.model(**arguments), plain)


def test_names_that_are_taken_or_unusable(tmp_path):
    base = tiny.loaded(tmp_path, "krea2")
    add(base, "a")
    for name, message in (("a", "on this base already"), ("a.b", "wanted letters")):
        with pytest.raises(SettingsError, match=message):
            add(base, name)


def test_output_equals_peft_own_lora_layer(tmp_path, family_name):
    """The same weights in PEFT's own layer, on a plain fp32 model."""
    import peft

    base, arguments = tiny.loaded(tmp_path, family_name, "fp32"), tiny.inputs(family_name)
    targets = add(base, "a")
    with adapters.active(base.model, "a"):
        found = base.model(**arguments)
    plain = tiny.build(family_name).requires_grad_(False)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="|".join(map(re.escape, targets)))
    peft.inject_adapter_in_model(config, plain, "a")
    ours = {k: v for k, v in base.model.state_dict().items() if ".lora_" in k}
    missing, unexpected = plain.load_state_dict(ours, strict=False)
    assert not unexpected
    assert not any("lora" in key for key in missing)
    assert tiny.relative(found, plain(**arguments)) < 1e-6


def test_bf16_base_and_fp32_master_weights_without_autocast(tmp_path, family_name):
    base = tiny.loaded(tmp_path, family_name, "bf16", "bf16")
    add(base, "a", targets=r".*\.(wk|qkv)")
    assert set(tiny.dtypes_in_training(base, "a")) == {(torch.bfloat16, torch.bfloat16)}
    for parameter in adapters.parameters(base.model, "a"):
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_canonical_form_has_the_true_scale_and_survives_the_layout(tmp_path, family_name):
    base = tiny.loaded(tmp_path, family_name)
    add(base, "a")
    modules = adapters.to_canonical(base.model, "a")
    layer = adapters.adapted(base.model, "a")[next(iter(modules))]
    module = next(iter(modules.values()))
    assert module.alpha == 6
    assert tiny.relative(module.delta(), layer.get_delta_weight("a")) < 1e-6
    back = read_comfyui(write_comfyui(modules))
    assert all(torch.equal(back[n].up, m.up) and back[n].alpha == 6.0 for n, m in modules.items())


@pytest.mark.parametrize("name", ["train", "keys", "type", "eval", "to"])
def test_names_that_would_hide_a_method_of_peft_are_refused(tmp_path, name):
    with pytest.raises(SettingsError, match=f"adapter name '{name}' cannot be used"):
        add(tiny.loaded(tmp_path, "krea2"), name)


def test_dropout_acts_in_training_alone(tmp_path):
    base, arguments = tiny.loaded(tmp_path, "krea2"), tiny.inputs("krea2")
    add(base, "a", dropout=0.5)
    state = torch.get_rng_state()
    with adapters.active(base.model, "a"):
        assert torch.equal(base.model(**arguments), base.model(**arguments))
    assert torch.equal(torch.get_rng_state(), state)
    with adapters.active(base.model, "a", train=True):
        assert not torch.equal(base.model(**arguments), base.model(**arguments))
    with adapters.active(base.model, "a"):
        assert torch.equal(base.model(**arguments), base.model(**arguments))


def test_injection_dequantises_nothing(tmp_path, monkeypatch):
    """PEFT reads a layer's weight 19 times: 26 minutes of dequantising for Krea 2 in nf4 on a CPU."""
    base = tiny.loaded(tmp_path, "krea2", "nf4")
    calls = []
    monkeypatch.setattr(FrozenLinear, "dequantized", lambda self, dtype: calls.append(self))
    add(base, "a")
    assert not calls
    assert all(p.device.type == "cpu" and p.any() for p in adapters.parameters(base.model, "a"))


def test_removing_the_active_adapter_activates_no_other(tmp_path):
    base, arguments = tiny.loaded(tmp_path, "krea2"), tiny.inputs("krea2")
    plain = base.model(**arguments)
    add(base, "a")
    add(base, "b")
    with adapters.active(base.model, "a", train=True):
        adapters.remove(base.model, "a")
        assert torch.equal(base.model(**arguments), plain)
        assert not any(p.requires_grad for p in adapters.parameters(base.model, "b"))
    assert list(base.model.peft_config) == ["b"]


class Widens(nn.Linear):
    """A base whose output has another dtype than the adapter's."""

    def forward(self, x):
        return super().forward(x.float())


def test_the_adapter_output_has_the_dtype_of_the_base_output():
    """One of the two casts that end ai-toolkit 1041; the other is in attention."""
    model = nn.Sequential(Widens(8, 8))
    adapters.inject(model, "a", LoraSettings(rank=2, alpha=2), ["0"], torch.Generator())
    seen = []
    original = adapters.LoraLinear._change
    with pytest.MonkeyPatch.context() as patch, adapters.active(model, "a"):
        patch.setattr(adapters.LoraLinear, "_change", lambda *a: seen.append(original(*a).double()) or seen[-1])
        assert model(torch.randn(2, 8)).dtype == torch.float32
    assert seen[0].dtype == torch.float64


def test_rslora_is_that_of_peft_and_keeps_its_strength_in_the_file(tmp_path, family_name):
    """Readers compute alpha / rank: alpha in the file is scaled up by the root of the rank."""
    import peft

    base, arguments = tiny.loaded(tmp_path, family_name, "fp32"), tiny.inputs(family_name)
    targets = add(base, "a", rslora=True)
    with adapters.active(base.model, "a"):
        found = base.model(**arguments)
    plain = tiny.build(family_name).requires_grad_(False)
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules="|".join(map(re.escape, targets)))
    peft.inject_adapter_in_model(config, plain, "a")
    plain.load_state_dict({k: v for k, v in base.model.state_dict().items() if ".lora_" in k}, strict=False)
    assert tiny.relative(found, plain(**arguments)) < 1e-6
    name, module = next(iter(adapters.to_canonical(base.model, "a").items()))
    assert module.scale == pytest.approx(6 / 4**0.5)
    assert tiny.relative(module.delta(), plain.get_submodule(name).get_delta_weight("a")) < 1e-6


def with_adapter(base, name, seed=0, kind="lora", targets="attention+mlp"):
    """A rank-2 adapter whose change is not zero."""
    settings = LoraSettings(kind, rank=2, alpha=2, targets=targets)
    chosen = resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, name, settings, chosen, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    for layer in adapters.adapted(base.model, name).values():
        nn.init.normal_(layer.zero_at_start(name), std=0.1, generator=generator)


def shown(base, name):
    with torch.no_grad(), adapters.active(base.model, name):
        return base.model(**tiny.inputs(base.family.name))


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_strength_1_is_the_adapter_and_0_the_base_bit_for_bit(tmp_path, family_name, kind):
    base = tiny.loaded(tmp_path, family_name, "int8")
    with_adapter(base, "a", kind=kind)
    plain, whole = shown(base, None), shown(base, "a")
    assert torch.equal(shown(base, {"a": 1.0}), whole)
    assert torch.equal(shown(base, {"a": 0.0}), plain)
    assert torch.equal(shown(base, {}), plain)
    half = shown(base, {"a": 0.5})
    assert not torch.equal(half, whole)
    assert not torch.equal(half, plain)
    assert torch.equal(shown(base, "a"), whole)


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_a_strength_multiplies_the_change_of_the_weight(kind):
    """Against the change that the file would hold, merged."""
    layer = nn.Linear(12, 8)
    model = nn.Sequential(layer)
    settings = LoraSettings(kind, rank=2, alpha=2)
    adapters.inject(model, "a", settings, ["0"], torch.Generator().manual_seed(0))
    adapted = adapters.adapted(model, "a")["0"]
    nn.init.normal_(adapted.zero_at_start("a"), generator=torch.Generator().manual_seed(1))
    change = adapted.canonical("a", settings.file_alpha, torch.float32)
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(2))
    for strength in (1.0, 0.3, -2.0):
        with torch.no_grad(), adapters.active(model, {"a": strength}):
            found = model(x)
        wanted = x @ (layer.weight + strength * (change.merged(layer.weight) - layer.weight)).T + layer.bias
        assert tiny.relative(found, wanted.detach()) < 1e-5


def test_several_adapters_add_up_with_their_strengths(tmp_path, family_name):
    base = tiny.loaded(tmp_path, family_name, "int8")
    with_adapter(base, "a", 0)
    with_adapter(base, "b", 5, targets="attention")
    with_adapter(base, "c", 9)
    before = shown(base, "a")
    layer = next(iter(adapters.adapted(base.model, "b").values()))
    x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(0))

    def change(names):
        with torch.no_grad(), adapters.active(base.model, names):
            return layer(x) - layer.base_layer(x)

    wanted = 0.5 * change("a") - 2 * change("b")
    assert tiny.relative(change({"a": 0.5, "b": -2.0, "c": 0.0}), wanted) < 1e-5
    assert torch.equal(shown(base, "a"), before)


def test_strengths_are_put_back_and_only_one_whole_adapter_is_trained(tmp_path):
    base = tiny.loaded(tmp_path, "krea2")
    with_adapter(base, "a")
    with_adapter(base, "b", 5)
    whole = shown(base, "a")
    with adapters.active(base.model, "a"):
        with pytest.raises(RuntimeError), adapters.active(base.model, {"a": 0.5}):
            raise RuntimeError
        with torch.no_grad():
            assert torch.equal(base.model(**tiny.inputs("krea2")), whole)
    for names in ({"a": 0.5}, {"a": 1.0, "b": 1.0}):
        with (
            pytest.raises(ValueError, match="one adapter at strength 1"),
            adapters.active(base.model, names, train=True),
        ):
            pass
    with adapters.active(base.model, {"a": 1.0}, train=True):
        trained = [p.requires_grad for p in adapters.parameters(base.model, "a")]
    assert all(trained)
    with pytest.raises(KeyError, match="no adapter named 'c'"), adapters.active(base.model, {"a": 1.0, "c": 1.0}):
        pass


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_an_adapter_moves_without_the_others_and_without_the_base(tmp_path, kind):
    """Also the squares that a DoRA keeps; and where the base computes does not depend on a parked adapter."""
    base = tiny.loaded(tmp_path, "krea2")
    with_adapter(base, "a", kind=kind, targets="all")
    with_adapter(base, "b", 5, kind=kind, targets="all")
    before = shown(base, "a")
    adapters.move(base.model, "b", "meta")
    assert all(parameter.is_meta for parameter in adapters.parameters(base.model, "b"))
    for layer in adapters.adapted(base.model, "b").values():
        magnitudes = layer.lora_magnitude_vector.named_buffers()
        assert all(buffer.is_meta == name.startswith("b.") for name, buffer in magnitudes)
    assert base.model.device == torch.device("cpu")
    assert torch.equal(shown(base, "a"), before)
    with_adapter(base, "c", 7, targets="all")
    assert not any(parameter.is_meta for parameter in adapters.parameters(base.model, "c"))
