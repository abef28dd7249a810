"""A base in a host: loaded when needed, moved whole, its LoRAs shown by token and gone with the last one."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, devices, hosting, modes, plan
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.applied import AppliedLora
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.devices import Memory
from graft_lora.trainer.errors import DoesNotFitError, SettingsError, TrainingError
from graft_lora.trainer.hosting import AdapterToken, HostedBase
from graft_lora.trainer.settings import ModelSettings
from lora_files import lora, sizes, write

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=tiny.NAMES)
def path(request, tmp_path_factory):
    return tiny.write(tiny.build(request.param), tmp_path_factory.mktemp("base") / f"{request.param}.safetensors")


def hosted_at(path, precision="int8", blocks=0, memory=lambda: Memory(2**40, 2**40)):
    settings = ModelSettings(str(path), precision=precision, compute_dtype="fp32", blocks_on_cpu=blocks)
    return HostedBase(settings, open_model_file(path), CPU, memory)


def checked(hosted, precision="int8", blocks=0):
    """What of a checked run a base is told."""
    from dataclasses import replace

    from graft_lora.trainer.preflight import Checked
    from graft_lora.trainer.settings import RunSettings

    model = replace(hosted.settings, precision=precision, blocks_on_cpu=blocks)
    return Checked(RunSettings(model=model), hosted.file, devices.read_device("cpu"), [], [], "", "", None)


def add_adapter(hosted, name, seed=0):
    base = hosted.load()
    settings = LoraSettings(rank=2, alpha=2)
    targets = adapters.resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, name, settings, targets, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    for layer in adapters.adapted(base.model, name).values():
        torch.nn.init.normal_(layer.zero_at_start(name), std=0.1, generator=generator)


def velocity(hosted, shown=()):
    given = tiny.inputs(hosted.file.family.name)
    with torch.inference_mode():
        return hosted.velocity(*given.values(), shown)


def leave(hosted):
    """As if the CPU were a device: its memory is the host's, so the base has no need to leave it."""
    hosted._leave()


def test_it_computes_what_the_loaded_base_does(path):
    base = load_base(path, "int8", "fp32")
    with torch.no_grad():
        wanted = base.model(**tiny.inputs(base.family.name))
    found = velocity(hosted_at(path))
    assert torch.equal(found, wanted)
    assert not found.is_inference()


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_it_leaves_and_comes_back_the_same(path, blocks):
    hosted = hosted_at(path, blocks=blocks)
    assert hosted.base is None
    predicted = hosted.bytes
    before = velocity(hosted)
    assert hosted.bytes == predicted
    with torch.inference_mode():
        leave(hosted)
    assert not hosted.on_device
    assert hosted.base.on_cpu is None or hosted.base.on_cpu.parked
    assert torch.equal(velocity(hosted), before)
    assert hosted.on_device
    # What was moved under inference mode could not be trained on.
    assert not any(tensor.is_inference() for tensor in (*hosted.base.model.parameters(), *hosted.base.model.buffers()))


def test_a_run_settles_what_was_left_to_auto(path):
    hosted = hosted_at(path, "auto", "auto")
    assert hosted.settings.precision == "auto"
    hosted.load(checked(hosted, "nf4", 2))
    assert hosted.base.precision == "nf4"
    assert hosted.base.on_cpu.count == 2
    assert hosted.settings.precision == "auto"
    add_adapter(hosted, "a")
    assert hosted.settings.precision == "nf4"
    assert hosted.settings.blocks_on_cpu == "auto"


def test_another_run_may_keep_other_blocks_on_the_cpu_but_not_change_the_precision_under_a_lora(path):
    hosted = hosted_at(path)
    add_adapter(hosted, "a")
    token = hosted.token("a")
    before, model = velocity(hosted, [(token, 1.0)]), hosted.base.model
    for blocks in (2, 1, 0, 2):
        base = hosted.load(checked(hosted, "int8", blocks))
        assert base.model is model
        assert (base.on_cpu.count if base.on_cpu else 0) == blocks
        assert torch.equal(velocity(hosted, [(token, 1.0)]), before)
    with pytest.raises(SettingsError, match="loaded in int8 with the LoRA a on it, and the run wants nf4"):
        hosted.load(checked(hosted, "nf4"))
    del token
    gc.collect()
    assert hosted.load(checked(hosted, "nf4")).precision == "nf4"


def test_a_guide_is_as_little_on_the_device_as_can_be(path, monkeypatch):
    """On a GPU: its blocks and its text trunk wait on the CPU, and come back when it is sampled for itself."""
    hosted, counts = hosted_at(path), []
    hosted.load()
    moved = []
    monkeypatch.setattr(hosted, "place", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(hosted, "load", lambda run: counts.append(run.settings.model.blocks_on_cpu) or hosted.base)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: moved.append((module, device)))
    hosted.guide(checked(hosted))
    assert counts == [2]
    trunk = [hosted.base.model.get_submodule(name) for name in hosted.file.family.text_trunk]
    assert [module for module, _ in moved] == trunk
    monkeypatch.undo()
    moved.clear()
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: moved.append(module))
    hosted.to_device()
    assert moved == [hosted.base.model]


def test_tokens_of_one_adapter_are_one(path):
    hosted = hosted_at(path)
    add_adapter(hosted, "a")
    token = hosted.token("a")
    assert hosted.token("a") is token
    with pytest.raises(KeyError, match="no adapter named 'b'"):
        hosted.token("b")


def test_an_adapter_does_not_leave_in_the_middle_of_a_pass(path):
    """A collection of Python's may end its token's life at any moment: modules that are being run must stay."""
    hosted = hosted_at(path)
    add_adapter(hosted, "a")
    token = hosted.token("a")
    wanted = velocity(hosted, [(token, 1.0)])
    block = hosted.base.family.main_blocks(hosted.base.model)[0]
    hook = block.register_forward_hook(lambda *_: hosted.forget("a"))
    found = velocity(hosted, [(token, 1.0)])
    hook.remove()
    assert torch.equal(found, wanted)
    assert adapters.adapter_names(hosted.base.model) == []


def test_an_adapter_whose_token_dies_in_a_run_leaves_after_it(path):
    hosted = hosted_at(path)
    add_adapter(hosted, "a")
    token = hosted.token("a")
    with hosted.run():
        assert hosted.in_use
        del token
        gc.collect()
        assert adapters.adapter_names(hosted.base.model) == ["a"]
    assert not hosted.in_use
    assert adapters.adapter_names(hosted.base.model) == []


def test_what_a_stopped_run_has_left_is_gone_when_the_next_begins(path):
    """Continued, it has the same name."""
    hosted = hosted_at(path)
    with hosted.run():
        add_adapter(hosted, "a")
    add_adapter(hosted, "b", 3)
    kept = hosted.token("b")
    with hosted.run():
        assert adapters.adapter_names(hosted.base.model) == ["b"]
        add_adapter(hosted, "a")
    assert kept.name == "b"


def test_loras_from_files_are_on_the_device_only_while_they_are_shown(path, monkeypatch):
    hosted = hosted_at(path)
    family = hosted.file.family.name
    file = write(family, lora(".lora_A.weight", ".lora_B.weight"), "diffusion_model.", "official")
    from graft_lora.lora_convert import read_lora

    loras = [AppliedLora.of(read_lora(file.state, None, sizes(family)), sizes(family), None)[0] for _ in range(2)]
    one, two = (AdapterToken(f"file {i}", entry) for i, entry in enumerate(loras))
    plain = velocity(hosted)
    assert not torch.equal(velocity(hosted, [(one, 0.1)]), plain)
    assert [entry._here is not None for entry in loras] == [True, False]
    velocity(hosted, [(one, 0.0), (two, 0.1)])
    assert [entry._here is not None for entry in loras] == [False, True]
    assert tiny.relative(velocity(hosted, [(one, 0.1), (two, -0.1)]), plain) < 1e-5
    leave(hosted)
    assert [entry._here is not None for entry in loras] == [False, False]
    assert torch.equal(velocity(hosted), plain)


def test_what_the_machine_cannot_do_is_refused_before_anything_is_read(path, monkeypatch):
    monkeypatch.setattr(modes, "precision_fault", lambda precision, *_: f"no {precision} here")
    with pytest.raises(SettingsError, match="no int8 here"):
        hosted_at(path)
    monkeypatch.setattr(modes, "compute_fault", lambda dtype, *_: f"no {dtype} here")
    with pytest.raises(SettingsError, match="no fp32 here"):
        hosted_at(path)


def test_running_out_of_memory_says_what_to_do(path, monkeypatch):
    def full(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(hosting, "load_base", full)
    with pytest.raises(TrainingError, match=r"out of memory while loading .*; choose a lower precision"):
        hosted_at(path).load()


def test_auto_leaves_room_for_a_run_on_the_largest_pictures_that_fit(path, monkeypatch):
    """Nothing has been trained yet, and nothing says what will be."""
    hosted, tried = hosted_at(path, "auto", "auto"), []

    def choose(wanted, budget, usable):
        tried.append((wanted.latent_shape[1] * hosted.file.family.latent_downscale, budget.device))
        if len(tried) < 3:
            raise DoesNotFitError("too large")
        return plan.replace(wanted, precision="int8", blocks_on_cpu=1)

    monkeypatch.setattr(plan, "choose", choose)
    monkeypatch.setattr(hosted, "place", SimpleNamespace(type="cuda", __str__=lambda _: "cpu"))
    monkeypatch.setattr(hosting, "read_device", lambda _: devices.read_device("cpu"))
    chosen = hosted.choose()
    assert (chosen.precision, chosen.blocks_on_cpu) == ("int8", 1)
    assert [side for side, _ in tried] == [1024, 768, 512]
    assert {budget for _, budget in tried} == {plan.usable(2**40, 2**40)}
