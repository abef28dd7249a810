"""Graft's MODEL in a real ComfyUI, in process on the CPU: the same pictures as its own, moved and shown as its own."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from types import SimpleNamespace

import pytest
import tiny
import torch
from graft_lora.lora_convert import Sizes, read_lora
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.errors import DatasetError, SettingsError, StoppedError
from graft_lora.trainer.families import FAMILIES
from lora_files import loha, lokr, lora, write

# ComfyUI reads no sizes of Krea 2's text blocks from a file, and rounds its MLPs up to multiples of 128.
CONFIGS = {
    "krea2": dataclasses.replace(tiny.CONFIGS["krea2"], mlp=768, text_heads=20, text_kv_heads=20, text_mlp=128),
    "ideogram4": tiny.CONFIGS["ideogram4"],
}
IDEOGRAM_SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 128, "intermediate_size": 320, "adaln_dim": 64,
    "llm_features_dim": 96,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    monkeypatch.setattr(tiny, "CONFIGS", CONFIGS)


@pytest.fixture
def host(comfy, monkeypatch):
    """Graft's host, with a ComfyUI that knows the tiny Ideogram 4's sizes, and forgets its models afterwards."""
    monkeypatch.syspath_prepend(os.environ["COMFYUI_PATH"])
    import comfy.sd
    from graft_lora.nodes import host

    import nodes

    config = comfy.supported_models.Ideogram4
    monkeypatch.setattr(config, "unet_extra_config", {**config.unet_extra_config, **IDEOGRAM_SIZES})
    host.nodes = nodes
    before = (comfy.model_management.in_training, comfy.model_management.training_fp8_bwd)
    yield host
    assert (comfy.model_management.in_training, comfy.model_management.training_fp8_bwd) == before
    comfy.model_management.unload_all_models()
    comfy.model_management.current_loaded_models.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def path_of(folder, name):
    path = folder / f"{name}.safetensors"
    return path if path.exists() else tiny.write(tiny.build(name), path)


def graft_model(host, folder, name, precision="fp32", **how):
    return host.load_base_model(path_of(folder, name), precision, "fp32", **how)


def stock_model(comfy, folder, name):
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(path_of(folder, name)), model_options={"dtype": torch.float32})


def conditioning(name, tokens=5, seed=0, mask=None):
    tensor = torch.randn(1, tokens, tiny.WIDTHS[name], generator=torch.Generator().manual_seed(seed))
    return [[tensor, {} if mask is None else {"attention_mask": mask}]]


def latents(name, batch=1, cells=None):
    channels, *own = tiny.LATENTS[name]
    sides = cells or own
    return torch.zeros(batch, channels, *([1] if name == "krea2" else []), *sides)


def sampled(host, model, name, cfg=1.0, steps=2, positive=None, negative=None, batch=1, cells=None):
    """What KSampler gives, under inference mode as in a graph."""
    with torch.inference_mode():
        (out,) = host.nodes.KSampler().sample(
            model, 7, steps, cfg, "euler", "simple",
            positive or conditioning(name), negative or conditioning(name, 3, 1),
            {"samples": latents(name, batch, cells)},
        )  # fmt: skip
    return out["samples"].clone()


def trained(host, model, name="a", seed=0, kind="lora"):
    """An adapter with random weights on the MODEL's base, as a run leaves it."""
    hosted = host.hosted_base(model)
    base = hosted.load()
    settings = LoraSettings(kind, rank=2, alpha=2)
    targets = adapters.resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, name, settings, targets, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    for layer in adapters.adapted(base.model, name).values():
        torch.nn.init.normal_(layer.zero_at_start(name), std=0.3, generator=generator)
    return host.trained_model(model, name)


def velocity(model, name, batch=2, mask=True):
    """Through ComfyUI's `apply_model`, whose own conditions it gets."""
    given = tiny.inputs(name, batch)
    conditions = {"attention_mask": given["mask_BT"]} if mask and name == "ideogram4" else {}
    x = given["latents"].unsqueeze(2) if name == "krea2" else given["latents"]
    with torch.inference_mode():
        return model.model.apply_model(x, given["sigma_B"], c_crossattn=given["conditioning"], **conditions)


# --- the same pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_apply_model_is_comfyuis_own(comfy, host, folder, family_name, batch):
    graft, stock = graft_model(host, folder, family_name), stock_model(comfy, folder, family_name)
    comfy.model_management.load_models_gpu([stock])
    assert tiny.relative(velocity(graft, family_name, batch), velocity(stock, family_name, batch)) < 1e-5


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_the_sampler_gives_what_it_gives_on_the_stock_model(comfy, host, folder, family_name, cfg):
    found = sampled(host, graft_model(host, folder, family_name), family_name, cfg, batch=2)
    wanted = sampled(host, stock_model(comfy, folder, family_name), family_name, cfg, batch=2)
    assert tiny.relative(found, wanted) < 1e-5


def test_a_patched_sampling_is_each_clones_own(comfy, host, folder):
    """Nodes such as ModelSamplingFlux put another object in the model's place."""
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    graft, stock = graft_model(host, folder, "krea2"), stock_model(comfy, folder, "krea2")
    shifted, wanted = (ModelSamplingFlux().patch(model, 3.0, 0.5, 512, 512)[0] for model in (graft, stock))
    plain = sampled(host, graft, "krea2")
    found = sampled(host, shifted, "krea2")
    assert tiny.relative(found, sampled(host, wanted, "krea2")) < 1e-5
    assert not torch.equal(found, plain)
    assert torch.equal(sampled(host, graft, "krea2"), plain)


def test_latents_of_odd_sides_are_padded_as_comfyui_does(comfy, host, folder):
    found = sampled(host, graft_model(host, folder, "krea2"), "krea2", cells=(5, 7))
    assert tiny.relative(found, sampled(host, stock_model(comfy, folder, "krea2"), "krea2", cells=(5, 7))) < 1e-5


def test_a_pass_without_text_is_comfyuis_own(comfy, host, folder):
    """The unconditional pass of the stock guider: conditioning without a tensor."""
    nothing = [[None, {}]]
    found = sampled(host, graft_model(host, folder, "ideogram4"), "ideogram4", 4.0, negative=nothing)
    wanted = sampled(host, stock_model(comfy, folder, "ideogram4"), "ideogram4", 4.0, negative=nothing)
    assert tiny.relative(found, wanted) < 1e-5


def test_padding_is_masked_as_comfyui_does(comfy, host, folder):
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    positive = conditioning("ideogram4", mask=mask)
    found = sampled(host, graft_model(host, folder, "ideogram4"), "ideogram4", positive=positive)
    wanted = sampled(host, stock_model(comfy, folder, "ideogram4"), "ideogram4", positive=positive)
    assert tiny.relative(found, wanted) < 1e-5
    assert tiny.relative(found, sampled(host, graft_model(host, folder, "ideogram4"), "ideogram4")) > 1e-3


@pytest.mark.parametrize("precision", ["int8", "nf4", "fp8", "bf16"])
def test_quantised_bases_sample(host, folder, family_name, precision):
    model = graft_model(host, folder, family_name, precision)
    exact = sampled(host, graft_model(host, folder, family_name), family_name, 3.0)
    found = sampled(host, model, family_name, 3.0)
    assert 0 < tiny.relative(found, exact) < 0.5
    assert torch.equal(found, sampled(host, model, family_name, 3.0))


def test_the_custom_sampler_takes_it(comfy, host, folder, family_name):
    from comfy_extras import nodes_custom_sampler as custom

    model = trained(host, graft_model(host, folder, family_name, "int8"))
    with torch.inference_mode():
        guider = custom.CFGGuider.execute(model, conditioning(family_name), conditioning(family_name, 3, 1), 2.0)[0]
        out = custom.SamplerCustomAdvanced.execute(
            custom.RandomNoise.execute(7)[0],
            guider,
            custom.KSamplerSelect.execute("euler")[0],
            custom.BasicScheduler.execute(model, "simple", 2, 1.0)[0],
            {"samples": latents(family_name)},
        )
    assert torch.equal(out[0]["samples"], sampled(host, model, family_name, 2.0))


# --- LoRAs -----------------------------------------------------------------------------------------------------------


def test_strength_0_is_the_base_bit_for_bit(host, folder, family_name):
    model = graft_model(host, folder, family_name, "int8")
    plain = sampled(host, model, family_name)
    shown = trained(host, model)
    assert not torch.equal(sampled(host, shown, family_name), plain)
    assert torch.equal(sampled(host, host.with_strength(shown, 0.0), family_name), plain)
    assert torch.equal(sampled(host, model, family_name), plain)


def test_two_runs_on_one_base_each_show_their_own(comfy, host, folder, family_name):
    """Injecting a second PEFT adapter makes it active in silence and leaves the first trainable."""
    model = graft_model(host, folder, family_name, "int8")
    first = trained(host, model, "a", 0)
    before = sampled(host, first, family_name)
    second = trained(host, model, "b", 5)
    assert not torch.equal(sampled(host, second, family_name), before)
    assert torch.equal(sampled(host, first, family_name), before)
    assert first.is_clone(second)
    assert first.is_clone(model)
    assert len(comfy.model_management.current_loaded_models) == 1
    base = host.hosted_base(model).base
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_adapters_that_are_not_shown_wait_on_the_cpu(host, folder, monkeypatch):
    """On a CPU both are there, so it is looked at who was moved."""
    model = graft_model(host, folder, "krea2", "int8")
    first, _second = trained(host, model, "a", 0), trained(host, model, "b", 5)
    moved = []
    monkeypatch.setattr(adapters, "move", lambda _model, name, device: moved.append((name, str(device))))
    hosted = host.hosted_base(model)
    hosted.place = torch.device("cpu", 0)
    sampled(host, first, "krea2", steps=2)
    assert moved == [("a", "cpu:0"), ("b", "cpu")]


def test_an_adapter_leaves_the_base_when_its_last_model_is_gone(host, folder):
    model = graft_model(host, folder, "krea2", "int8")
    hosted = host.hosted_base(model)
    shown = trained(host, model)
    weaker = host.with_strength(shown, 0.5)
    sampled(host, weaker, "krea2")
    del shown
    gc.collect()
    assert adapters.adapter_names(hosted.base.model) == ["a"]
    with torch.inference_mode():
        del weaker
        gc.collect()
    assert adapters.adapter_names(hosted.base.model) == []
    assert torch.equal(
        sampled(host, model, "krea2"), sampled(host, graft_model(host, folder, "krea2", "int8"), "krea2")
    )


def test_a_base_that_nobody_holds_is_freed(comfy, host, folder):
    """A cycle of references would keep its memory until Python's collector comes by, which may be never."""
    import weakref

    model = trained(host, graft_model(host, folder, "krea2", "int8"))
    sampled(host, model, "krea2")
    gone = weakref.ref(host.hosted_base(model).base.model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert comfy.model_management.current_loaded_models == []


def test_a_second_model_of_another_base_shows_its_own_loras(host, folder):
    """DualModelGuider gives its second model the first one's options."""
    from comfy_extras import nodes_custom_sampler as custom

    name = "ideogram4"
    bases = [graft_model(host, folder, name, "int8") for _ in range(2)]

    def guided(positive, negative):
        with torch.inference_mode():
            guider = custom.DualModelGuider.execute(positive, conditioning(name), 3.0, negative)[0]
            out = custom.SamplerCustomAdvanced.execute(
                custom.RandomNoise.execute(7)[0],
                guider,
                custom.KSamplerSelect.execute("euler")[0],
                custom.BasicScheduler.execute(positive, "simple", 2, 1.0)[0],
                {"samples": latents(name)},
            )
        return out[0]["samples"].clone()

    plain = guided(*bases)
    assert torch.equal(plain, sampled(host, bases[0], name, 3.0, negative=[[None, {}]]))
    first, second = trained(host, bases[0], "a", 0), trained(host, bases[1], "b", 5)
    found = [guided(first, bases[1]), guided(bases[0], second), guided(first, second), plain]
    assert all(not torch.equal(x, y) for i, x in enumerate(found) for y in found[:i])
    with pytest.raises(SettingsError, match="two MODELs of one Graft base with different LoRAs"):
        guided(first, bases[0])
    assert torch.equal(guided(*bases), plain)


KINDS = {
    "LoRA": lora(".lora_A.weight", ".lora_B.weight", alpha=2.0),
    "LoHa": loha(alpha=0.1),
    "LoKr": lokr(),
    "LoKr of low rank": lokr(rank=2, alpha=1.0),
}


def both(comfy, host, folder, name, state, metadata=None, strength=0.7):
    """Latents of the Graft MODEL with the LoRA, and of the stock MODEL with what ComfyUI's own loader made of it."""
    model = graft_model(host, folder, name)
    file = host.hosted_base(model).file
    read = read_lora(state, metadata, Sizes.of(name, file.shapes))
    shown, count, missing = host.with_lora(model, read, strength)
    assert missing == []
    stock, taken, left = host.stock_with_lora(stock_model(comfy, folder, name), state, metadata or {}, strength)
    assert left == []
    assert count == taken
    found, plain = sampled(host, shown, name), sampled(host, model, name)
    assert tiny.relative(found, plain) > 1e-3
    return found, sampled(host, stock, name)


def small(state, factor=0.05):
    """A change that leaves the picture finite: the factors are random and of unit size."""
    scaled = ("lora_B.weight", "hada_w1_a", "lokr_w1")
    return {key: tensor * factor if key.endswith(scaled) else tensor for key, tensor in state.items()}


@pytest.mark.parametrize("naming", ["official", "diffusers", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_load_lora_is_the_stock_loader(comfy, host, folder, family_name, kind, naming):
    """q, k and v fused or split, in either family: the same picture without a converted file."""
    file = write_for(host, folder, family_name, KINDS[kind], naming)
    found, wanted = both(comfy, host, folder, family_name, small(file.state))
    assert tiny.relative(found, wanted) < 2e-5


def write_for(host, folder, name, parts, naming="official", only=None):
    """A file for the model at hand, whose sizes are not those of the other tests."""
    import lora_files

    lora_files.sizes.cache_clear()
    prefix = "diffusion_model." if naming == "official" else "transformer."
    try:
        return write(name, parts, prefix, naming, only=only)
    finally:
        lora_files.sizes.cache_clear()


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dora_is_the_stock_loaders(comfy, host, folder, family_name, kind, axis):
    """ComfyUI divides the lengths of rows by ‖W‖, those of columns by ‖W + dW‖."""
    file = write_for(host, folder, family_name, KINDS[kind])
    weights = dict(tiny.build(family_name).named_parameters())
    state = small(file.state, 0.2)
    generator = torch.Generator().manual_seed(3)
    for stem in {key.rsplit(".", 2 if "lora_" in key else 1)[0] for key in state}:
        weight = weights[f"{stem.removeprefix('diffusion_model.')}.weight"]
        norm = weight.norm(dim=1 if axis == "row" else 0, keepdim=True).detach()
        state[f"{stem}.dora_scale"] = norm * (1 + 0.1 * torch.randn(norm.shape, generator=generator))
    found, wanted = both(comfy, host, folder, family_name, state, {"graft": '{"dora_scale": "over base"}'})
    assert tiny.relative(found, wanted) < 2e-5


@pytest.mark.parametrize("naming", ["diffusers", "fused"])
def test_a_dora_of_peft_is_what_the_converter_makes_of_it(comfy, host, folder, family_name, naming):
    """Its lengths stand over ‖W + dW‖, which takes the base's weights to write for ComfyUI, and none to show here."""
    file = write_for(host, folder, family_name, KINDS["LoRA"], naming)
    state = small(file.state, 0.2)
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in state if key.endswith("lora_B.weight")]:
        length = 1 + 0.2 * torch.randn(len(state[key]), generator=generator)
        state[key.replace("lora_B.weight", "lora_magnitude_vector")] = length
    found, wanted = both(comfy, host, folder, family_name, state)
    assert tiny.relative(found, wanted) < 2e-5


def test_full_changes_biases_and_tables_are_the_stock_loaders(comfy, host, folder, family_name):
    """ComfyUI's `diff` of matrices, norms and modulation tables, and `diff_b` of biases."""
    generator = torch.Generator().manual_seed(2)
    state = {}
    for name, weight in tiny.build(family_name).named_parameters():
        change = 0.02 * torch.randn(weight.shape, generator=generator)
        stem, _, leaf = name.rpartition(".")
        key = (
            f"diffusion_model.{stem}.diff_b"
            if leaf == "bias"
            else f"diffusion_model.{name.removesuffix('.weight')}.diff"
        )
        state[key] = change
    found, wanted = both(comfy, host, folder, family_name, state)
    assert tiny.relative(found, wanted) < 2e-5


def test_loras_from_files_and_trained_ones_add_up(comfy, host, folder, family_name):
    model = graft_model(host, folder, family_name)
    file = write_for(host, folder, family_name, KINDS["LoRA"])
    read = read_lora(small(file.state), None, Sizes.of(family_name, host.hosted_base(model).file.shapes))
    shown = trained(host, model)
    with_both, *_ = host.with_lora(shown, read, 0.5)
    twice, *_ = host.with_lora(with_both, read, -0.5)
    assert tiny.relative(sampled(host, twice, family_name), sampled(host, shown, family_name)) < 1e-5
    stronger = host.with_strength(twice, 0.0)
    assert torch.equal(sampled(host, stronger, family_name), sampled(host, with_both, family_name))
    assert not torch.equal(sampled(host, with_both, family_name), sampled(host, shown, family_name))


def test_the_other_familys_lora_is_refused(host, folder):
    file = write_for(host, folder, "ideogram4", KINDS["LoRA"])
    shapes = dict(tiny.build("ideogram4").named_parameters())
    read = read_lora(file.state, None, Sizes.of("ideogram4", {name: tuple(p.shape) for name, p in shapes.items()}))
    with pytest.raises(SettingsError, match="is a LoRA for Ideogram 4, the model is Krea 2"):
        host.with_lora(graft_model(host, folder, "krea2"), read)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def leaving(host, monkeypatch):
    """Lets a base on the CPU leave the "device", which is the same memory, and notes that it did."""
    from graft_lora.trainer.hosting import HostedBase

    left = []

    def to_host(hosted):
        if hosted.base is not None and hosted.on_device:
            left.append(hosted)
            hosted._leave()

    monkeypatch.setattr(HostedBase, "to_host", to_host)
    # The offload device must differ from the load device for a move to be asked for, which on this host are one.
    elsewhere = property(lambda self: torch.device("meta"), lambda self, device: None)
    monkeypatch.setattr(host.GraftPatcher, "offload_device", elsewhere, raising=False)
    return left


@pytest.mark.parametrize("blocks", [0, 2])
def test_it_is_evicted_and_comes_back(comfy, host, folder, family_name, blocks, leaving):
    management = comfy.model_management
    model = trained(host, graft_model(host, folder, family_name, "int8", blocks_on_cpu=blocks))
    before, hosted = sampled(host, model, family_name), host.hosted_base(model)
    assert management.current_loaded_models[0].model_loaded_memory() == hosted.bytes
    for evict in (management.unload_all_models, lambda: management.free_memory(1e30, management.get_torch_device())):
        with torch.inference_mode():
            evict()
        assert not hosted.on_device
        assert model.loaded_size() == 0
        assert management.current_loaded_models == []
        assert hosted.base.on_cpu is None or hosted.base.on_cpu.parked
        assert torch.equal(sampled(host, model, family_name), before)
        assert hosted.on_device
    assert leaving == [hosted, hosted]


def test_a_training_base_stays_where_it_is_and_says_so(comfy, host, folder, leaving, caplog):
    """The VAE of a preview may ask for memory: the run would go on with weights that are not there."""
    management = comfy.model_management
    model = graft_model(host, folder, "krea2", "int8")
    sampled(host, model, "krea2")
    hosted = host.hosted_base(model)
    with host.training(model, "3"), caplog.at_level(logging.INFO):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        hosted.load()
        management.unload_all_models()
        assert hosted.on_device
        assert "it is training" in caplog.text
    assert leaving == []
    # It can be evicted again.
    assert [entry.model for entry in management.current_loaded_models] == [model]
    management.unload_all_models()
    assert leaving == [hosted]


def test_a_run_has_the_device_to_itself(comfy, host, folder, leaving):
    """Other models are unloaded, their own base's other MODELs stay, and the VAE and CLIP go when they are released."""
    management = comfy.model_management
    model, other, third = (graft_model(host, folder, "krea2", "int8") for _ in range(3))
    for each in (model, other, third):
        sampled(host, each, "krea2")
    shown = trained(host, model)
    assert len(management.current_loaded_models) == 3
    host.free_others(shown)
    assert [entry.model for entry in management.current_loaded_models] == [model]
    assert set(leaving) == {host.hosted_base(other), host.hosted_base(third)}
    sampled(host, third, "krea2")
    host.release(SimpleNamespace(patcher=third))
    assert [entry.model for entry in management.current_loaded_models] == [model]


def test_a_run_that_fails_leaves_no_adapter_behind(comfy, host, folder):
    model = graft_model(host, folder, "krea2", "int8")
    kept = trained(host, model, "kept")
    for error in (ValueError, comfy.model_management.InterruptProcessingException):
        with torch.inference_mode():
            with pytest.raises(error), host.training(model, "3"):
                base = host.hosted_base(model).load()
                targets = adapters.resolve_targets(base.family, adapters.linears(base.model), LoraSettings())
                adapters.inject(base.model, "half_way", LoraSettings(), targets, torch.Generator())
                raise error
            assert torch.is_inference_mode_enabled()
        assert adapters.adapter_names(base.model) == ["kept"]
    assert host.with_strength(kept, 0.0).shown


def test_nothing_is_read_before_it_is_needed(host, folder, family_name):
    model = graft_model(host, folder, family_name, "int8")
    hosted = host.hosted_base(model)
    predicted = model.model_size()
    assert hosted.base is None
    assert model.loaded_size() == 0
    hosted.load()
    assert model.model_size() == predicted == model.loaded_size()


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_size_is_what_is_on_the_device(host, folder, family_name, blocks):
    model = graft_model(host, folder, family_name, "nf4", blocks_on_cpu=blocks)
    predicted = model.model_size()
    trained(host, model)
    assert model.model_size() == predicted


# --- what is refused -------------------------------------------------------------------------------------------------


def test_stock_nodes_that_change_weights_say_one_clear_word(comfy, host, folder, family_name, tmp_path, monkeypatch):
    import folder_paths
    from comfy_extras import nodes_model_merging as merging

    model = trained(host, graft_model(host, folder, family_name))
    stock = stock_model(comfy, folder, family_name)
    file = write_for(host, folder, family_name, KINDS["LoRA"])
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path))
    attempts = [
        lambda: comfy.sd.load_lora_for_models(model, None, file.state, 1.0, 0.0),
        lambda: comfy.sd.load_bypass_lora_for_models(model, None, file.state, 1.0, 0.0),
        lambda: merging.ModelMergeSimple().merge(stock, model, 0.5),
        lambda: merging.ModelMergeSimple().merge(model, stock, 0.5),
        lambda: merging.ModelSave().save(model, "saved"),
    ]
    for attempt in attempts:
        with torch.inference_mode(), pytest.raises(SettingsError, match="'Load LoRA \\(any layout\\)', save one"):
            attempt()


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"reference_latents": True}, "ref_latents"), ({"cross_attn_controlnet": True}, "crossattn_controlnet")],
)
def test_a_condition_that_cannot_be_taken_is_not_left_out(host, folder, extra, named):
    positive = conditioning("krea2")
    given = {"reference_latents": [latents("krea2")], "cross_attn_controlnet": positive[0][0]}
    positive[0][1].update({name: given[name] for name in extra})
    with pytest.raises(SettingsError, match=f"cannot take {named}"):
        sampled(host, graft_model(host, folder, "krea2"), "krea2", positive=positive)


def test_a_patch_of_the_transformer_is_not_left_out(host, folder):
    model = graft_model(host, folder, "krea2").clone()
    model.set_model_attn1_patch(lambda *_: None)
    with pytest.raises(SettingsError, match="cannot take patches attn1_patch"):
        sampled(host, model, "krea2")


def test_a_wrapper_of_the_transformer_is_called(comfy, host, folder):
    model, seen = graft_model(host, folder, "krea2").clone(), []

    def wrapper(executor, *arguments, **options):
        seen.append(arguments[0].shape)
        return executor(*arguments, **options)

    model.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, wrapper)
    sampled(host, model, "krea2", steps=2)
    assert len(seen) == 2


def test_a_stock_model_has_no_base(comfy, host, folder):
    with pytest.raises(SettingsError, match="'Load Model for LoRA Training'"):
        host.hosted_base(stock_model(comfy, folder, "krea2"))


# --- encoders --------------------------------------------------------------------------------------------------------


class StandInVAE:
    """Halves, so that neither pixels in the wrong range nor a missing normalisation can pass."""

    def __init__(self, frames):
        self.frames, self.first_stage_model = frames, torch.nn.Linear(2, 2)

    def encode(self, pixels):
        assert pixels.min() >= 0
        assert pixels.max() <= 1
        out = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).mean(1, keepdim=True).expand(-1, 16, -1, -1)
        return out.unsqueeze(2) if self.frames else out

    def decode(self, latents):
        pictures = latents.reshape(-1, *latents.shape[-2:]).unsqueeze(-1).expand(-1, -1, -1, 3)
        return pictures[:1].unsqueeze(0) if self.frames else pictures[:1]


def test_latents_are_normalised_and_back(comfy, host):
    """The stock trainer's buckets train on raw latents."""
    family = FAMILIES["krea2"]
    clip = SimpleNamespace(
        cond_stage_model=torch.nn.Linear(2, 2), layer_idx=None, tokenizer_options={},
        patcher=SimpleNamespace(patches={}),
    )  # fmt: skip
    encoders = host.encoders_of(StandInVAE(True), clip, family)
    with torch.inference_mode():
        found = encoders.picture(torch.zeros(1, 3, 16, 24))
    format = comfy.latent_formats.Wan21()
    wanted = format.process_in(torch.full((1, 16, 1, 2, 3), 0.5))[:, :, 0]
    assert torch.allclose(found, wanted)
    assert not found.is_inference()
    back = encoders.decode(found)
    assert back.shape == (1, 3, 2, 3)
    assert torch.allclose(back, torch.zeros(1, 3, 2, 3), atol=1e-6)  # 0.5 of [0, 1] is 0 of [-1, 1]


def test_ids_tell_weights_apart(host):
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    assert host.weights_id(one) == host.weights_id(one)
    assert host.weights_id(one) != host.weights_id(other)
    assert host.weights_id(one) != host.weights_id(one.half())


def test_conditioning_is_one_caption_without_its_padding(host):
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    with torch.inference_mode():
        entry = conditioning("krea2", mask=mask)
        found = host.conditioning_tensor(entry, "a caption", tiny.WIDTHS["krea2"])
    assert torch.equal(found, entry[0][0][0][[0, 1, 3]])
    assert not found.is_inference()
    with pytest.raises(DatasetError, match="a caption has 2 parts"):
        host.conditioning_tensor(conditioning("krea2") * 2, "a caption")
    with pytest.raises(DatasetError, match="a caption has area"):
        host.conditioning_tensor([[entry[0][0], {"area": (1, 1, 0, 0)}]], "a caption")
    with pytest.raises(DatasetError, match="120 features per token, the base wants 96"):
        host.conditioning_tensor(conditioning("krea2"), "a caption", 96)


# --- interruption ----------------------------------------------------------------------------------------------------


def test_a_stop_is_left_for_the_run_to_see_and_then_passed_on(comfy, host):
    """ComfyUI's progress bar raises a Stop, which clears it, in the middle of a step's report."""
    management = comfy.model_management

    def hook(*_arguments, **_options):
        management.throw_exception_if_processing_interrupted()

    former = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(hook)
    try:
        bar = host.progress("3", 10)
        management.interrupt_current_processing(True)
        bar.update(1, 10)
        assert host.interrupted()
        with pytest.raises(management.InterruptProcessingException):
            host.raise_interrupt()
        assert not host.interrupted()
    finally:
        comfy.utils.set_progress_bar_global_hook(former)
        management.interrupt_current_processing(False)


def test_the_button_of_a_node_in_a_subgraph_ends_it_too(host):
    """The page calls it 3, ComfyUI runs it as 12:3."""
    with host.finishing("12:3") as event:
        assert not host.finish("2")
        assert host.finish("3")
        assert event.is_set()


def test_options_of_comfyui_that_do_not_act_are_said(host, monkeypatch):
    monkeypatch.setattr(host.args, "cpu", False)
    assert host.option_notes() == []
    for option in ("lowvram", "use_sage_attention"):
        monkeypatch.setattr(host.args, option, True)
    monkeypatch.setattr(host.args, "fast", {"fp16_accumulation"})
    assert [note.split(" do")[0] for note in host.option_notes()] == ["--lowvram", "--use-sage-attention, --fast"]


def test_datasets_are_folders_and_hidden_ones_are_none(host, tmp_path, monkeypatch):
    import folder_paths

    for name in ("a/b", ".hidden/c", "d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "picture.png").write_bytes(b"")
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path))
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {})
    assert list(host.datasets().items()) == [(name, tmp_path / name) for name in ("a", "a/b", "d")]


def test_a_stop_in_the_vae_of_a_preview_is_left_for_the_run_to_see(comfy, host):
    """Every layer of ComfyUI's raises a Stop, which clears it: the run would end without saving."""
    management = comfy.model_management

    class Interrupted(StandInVAE):
        def decode(self, latents):
            management.throw_exception_if_processing_interrupted()

    decode = host.decoder_of(Interrupted(True), FAMILIES["krea2"])
    management.interrupt_current_processing(True)
    try:
        with pytest.raises(StoppedError):
            decode(torch.zeros(1, 16, 2, 2))
        assert host.interrupted()
    finally:
        management.interrupt_current_processing(False)


def test_the_button_ends_the_node_that_runs(host, folder):
    model = graft_model(host, folder, "krea2", "int8")
    assert not host.finish("3")
    with host.training(model, "3") as event:
        assert not event.is_set()
        assert host.finish("3")
        assert event.is_set()
    assert not host.finish("3")
