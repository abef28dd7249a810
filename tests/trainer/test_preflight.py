"""Verdicts on runs: each check finds its fault, says it first, and costs nothing that a later one would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import cards
import pytest
import tiny
import torch
from graft_lora.examples.demo import draw_folder
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.trainer import disk, preflight, probes
from graft_lora.trainer import run as run_module
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.checkpoints import telling_name
from graft_lora.trainer.errors import DatasetError, GraftError, SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.preflight import check, verdicts
from graft_lora.trainer.run import run
from graft_lora.trainer.samples import Encoders, Sample, write_sample
from graft_lora.trainer.settings import DatasetSettings, ModelSettings, RunSettings, TrainSettings
from PIL import Image

NAMES = [
    "dataset settings", "base", "output folder", "encoded folder", "device", "compute dtype", "model file", "variant",
    "family", "unconditional transformer", "targets", "caption dropout", "dataset", "precision", "optimizer",
    "compile", "conditioning width", "disk space", "memory", "8-bit compute",
]  # fmt: skip
KREA2 = FAMILIES["krea2"]


@pytest.fixture
def settings(tmp_path):
    """A run that passes every check."""
    draw_folder(tmp_path / "pictures", seed=0, zorbs=2, known=1)
    return RunSettings(
        str(tmp_path / "out"),
        model=ModelSettings(str(base_path(KREA2)), "", "int8", "fp32", "cpu"),
        dataset=DatasetSettings(str(tmp_path / "pictures"), encoders="demo", resolution=64),
        lora=LoraSettings(rank=2),
    )


def changed(settings, part, **changes):
    return dataclasses.replace(settings, **{part: dataclasses.replace(getattr(settings, part), **changes)})


def untouched():
    """Encoders that must not be called."""

    def called(_):
        raise AssertionError("an encoder was called")

    return Encoders(called, called, called, "none", "none")


def refusal(settings, found=None):
    """The error of the first check that fails, which must be the first failed verdict too."""
    parts = found or untouched()
    with pytest.raises(GraftError) as caught:
        check(settings, parts)
    failed = next(verdict for verdict in verdicts(settings, encoders(KREA2)) if verdict.ok is False)
    assert str(caught.value) == failed.message
    assert "\n" not in failed.message
    return f"{failed.name}: {failed.message}"


def tree(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_every_verdict_of_a_sound_run(tmp_path, settings):
    before = tree(tmp_path)
    found = verdicts(settings, encoders(KREA2))
    assert [verdict.name for verdict in found] == NAMES
    assert all(verdict.ok for verdict in found)
    said = {verdict.name: verdict.message for verdict in found}
    assert said["model file"] == "krea2-demo-base.safetensors is Krea 2"
    assert said["dataset"] == "3 pictures in 1 buckets"
    assert said["targets"].endswith(" parameters")
    assert said["encoded folder"] == str(tmp_path / "pictures" / ".graft-cache")
    assert tree(tmp_path) == before


def test_checks_that_cannot_be_made_say_what_stands_in_their_way(tmp_path, settings):
    settings = changed(settings, "model", path=str(tmp_path / "missing.safetensors"), device="cuda:99")
    found = {verdict.name: verdict for verdict in verdicts(settings, encoders(KREA2))}
    assert [name for name, verdict in found.items() if verdict.ok is False] == ["device", "model file"]
    blocked = {name: verdict.message for name, verdict in found.items() if verdict.ok is None}
    reason = "not checked, because of what is wrong with: "
    assert blocked == {
        "compute dtype": f"{reason}device",
        "variant": f"{reason}model file",
        "family": f"{reason}model file",
        "unconditional transformer": f"{reason}model file",
        "targets": f"{reason}model file",
        "caption dropout": f"{reason}model file",
        "dataset": f"{reason}model file",
        "precision": f"{reason}device, model file",
        "optimizer": f"{reason}device",
        "compile": f"{reason}device",
        "conditioning width": f"{reason}model file",
        "disk space": f"{reason}targets, dataset, conditioning width",
        "memory": f"{reason}unconditional transformer, precision, disk space",
        "8-bit compute": f"{reason}memory",
    }


@pytest.mark.parametrize("card", [cards.T4, cards.RTX_2080_TI, cards.RADEON_VII])
def test_emulated_bf16_is_refused_and_fp32_is_not(monkeypatch, settings, card):
    cards.insert(monkeypatch, card)
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: None)
    settings = changed(settings, "model", device="", compute_dtype="bf16")
    said = refusal(settings)
    assert said.startswith(f"compute dtype: {card.name} has no native bf16")
    assert 'set [model] compute_dtype = "fp32"' in said
    settings = changed(settings, "model", compute_dtype="fp32")
    assert check(settings, encoders(KREA2)).device.name == card.name


def test_a_broken_torchao_is_refused_where_it_is_needed_alone(monkeypatch, settings):
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: f"{precision} does not work on {device}")
    assert refusal(settings) == "precision: int8 does not work on cpu"
    check(changed(settings, "model", precision="bf16"), encoders(KREA2))


def test_adamw8bit_is_tried_where_it_is_chosen_alone(monkeypatch, settings):
    monkeypatch.setattr(probes, "optimizer_fault", lambda optimizer, device: f"{optimizer} needs Triton")
    check(settings, encoders(KREA2))
    assert refusal(changed(settings, "train", optimizer="adamw8bit")) == "optimizer: adamw8bit needs Triton"


def test_a_mode_that_the_family_forbids_is_refused(monkeypatch, settings):
    monkeypatch.setattr(type(KREA2), "forbidden_modes", {"int8": "it diverges"})
    assert refusal(settings).startswith("precision: Krea 2 is not to be trained in int8: it diverges; set [model]")


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("output", "output folder: the output folder cannot be used: no; choose another output"),
        (
            "pictures",
            "encoded folder: the folder of encoded tensors cannot be used: no; set [dataset] encoded to another",
        ),
    ],
)
def test_folders_are_tried_before_anything_is_read(tmp_path, monkeypatch, settings, which, message):
    bad = tmp_path / {"output": "out", "pictures": "pictures/.graft-cache"}[which]
    monkeypatch.setattr(probes, "folder_fault", lambda folder: "no" if folder == bad else None)
    assert refusal(changed(settings, "model", path="missing")) == message
    if which == "pictures":
        moved = changed(settings, "dataset", encoded=str(tmp_path / "elsewhere"))
        assert {v.name: v.message for v in verdicts(moved, encoders(KREA2))}["encoded folder"] == str(
            tmp_path / "elsewhere"
        )


def test_a_full_disk_is_refused_with_the_numbers(monkeypatch, settings):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    said = refusal(settings, encoders(KREA2))
    assert said.startswith("disk space: the run needs about ")
    assert "(LoRAs, state and previews " in said
    assert ", encoded tensors " in said
    assert "which has 0.0 MiB free; make room, or set output or [dataset] encoded to a folder on another disk" in said


def test_a_resumed_run_needs_room_for_what_is_not_there_yet(tmp_path, monkeypatch, settings):
    settings = changed(settings, "train", steps=1, checkpointing=False)
    run(settings, encoders(KREA2), lambda _: None)
    asked = []
    monkeypatch.setattr(disk, "check_room", lambda demands: asked.append(demands) or "")
    verdicts(settings, encoders(KREA2), resume=True)
    fresh = dataclasses.replace(settings, output=str(tmp_path / "another"))
    verdicts(fresh, encoders(KREA2))
    (resumed, _), (whole, _) = asked
    there = sum(path.stat().st_size for path in Path(settings.output).rglob("*") if path.is_file())
    assert resumed.bytes == max(0, whole.bytes - there) < whole.bytes


def spoil_caption(folder):
    next(folder.glob("*.txt")).unlink()


def spoil_picture(folder):
    next(folder.glob("*.png")).write_bytes(b"")


def blacken_mask(folder):
    """White only at the end of a long strip, which the crop cuts off."""
    picture = sorted(folder.glob("*.png"))[-1]
    Image.open(picture).resize((2560, 64)).save(picture)
    mask = Image.new("L", (2560, 64))
    mask.paste(255, (0, 0, 8, 64))
    mask.save(picture.with_name(f"{picture.stem}.mask.png"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_caption, "has no caption"),
        (spoil_picture, "cannot be read"),
        (blacken_mask, "is black where"),
    ],
)
def test_pictures_are_verified_before_an_encoder_is_called_or_the_base_is_loaded(
    tmp_path, monkeypatch, settings, spoil, message
):
    spoil(tmp_path / "pictures")
    monkeypatch.setattr(run_module, "load_base", lambda *_: pytest.fail("the base was loaded"))
    assert message in refusal(settings)
    with pytest.raises(DatasetError, match=message):
        run(settings, untouched())
    assert not (tmp_path / "out").exists()


def test_faults_of_the_run_are_found_before_an_encoder_is_called(tmp_path, settings):
    for part, changes, name in (
        ("dataset", {"held_out": 3}, "dataset"),
        ("lora", {"targets": "nothing"}, "targets"),
        ("model", {"family": "ideogram4"}, "family"),
    ):
        assert refusal(changed(settings, part, **changes)).startswith(f"{name}: ")


def test_pictures_are_decoded_once_by_the_checks_and_not_again_by_the_run(monkeypatch, settings):
    """A folder of a thousand photographs takes minutes."""
    from graft_lora.trainer import preflight

    calls = []
    original = preflight.read_folder
    monkeypatch.setattr(preflight, "read_folder", lambda *args: calls.append(args) or original(*args))
    run(changed(settings, "train", steps=1, checkpointing=False), encoders(KREA2), lambda _: None)
    assert len(calls) == 1
    assert not hasattr(run_module, "read_folder")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 8, 8), r"latents \[4, 8, 8\]"),
        ((16, 4, 4), r"latents \[16, 4, 4\]"),
        ((128, 4, 4), r"latents \[128, 4, 4\]"),
    ],
)
def test_a_vae_of_another_family_is_refused_before_the_base_is_loaded(tmp_path, monkeypatch, settings, shape, message):
    parts = dataclasses.replace(encoders(KREA2), picture=lambda pixels: torch.zeros(1, *shape))
    monkeypatch.setattr(run_module, "load_base", lambda *_: pytest.fail("the base was loaded"))
    with pytest.raises(DatasetError, match=f"the VAE gives {message} for .*, Krea 2 wants .16, 8, 8.: another VAE?"):
        run(settings, parts, lambda _: None)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "pictures" / ".graft-cache").exists() or not tree(tmp_path / "pictures" / ".graft-cache")


def test_unsloth_6843_a_distilled_variant_needs_a_confirmation(tmp_path):
    """Krea 2 Raw and Turbo have the same keys: the file's name is all that tells."""
    (tmp_path / "cache").mkdir()
    sample = Sample("a", "a", torch.randn(tiny.LATENTS["krea2"]), torch.randn(2, tiny.WIDTHS["krea2"]))
    write_sample(tmp_path / "cache", sample, FAMILIES["krea2"])
    for place, name in (
        ("Krea2-Turbo-bf16.safetensors", "Krea2-Turbo-bf16.safetensors"),
        ("Krea-2-Turbo/transformer/diffusion_pytorch_model.safetensors", "Krea-2-Turbo"),
        ("krea2_raw.safetensors", None),
        ("Krea-2-Raw/transformer/diffusion_pytorch_model.safetensors", None),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        path = tiny.write(tiny.build("krea2"), tmp_path / place)
        model = ModelSettings(str(path), compute_dtype="fp32", device="cpu")
        settings = RunSettings(
            str(tmp_path / "out"), model=model, dataset=DatasetSettings(cache=str(tmp_path / "cache"))
        )
        if name is None:
            check(settings, None)
            continue
        with pytest.raises(SettingsError, match=f"{name} looks like a distilled variant of Krea 2"):
            check(settings, None)
        model = dataclasses.replace(model, allow_distilled=True)
        check(dataclasses.replace(settings, model=model), None)


def test_a_cache_of_samples_is_read_by_the_checks_and_needs_no_encoded_folder(tmp_path):
    (tmp_path / "cache").mkdir()
    path = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    settings = RunSettings(
        str(tmp_path / "out"),
        model=ModelSettings(str(path), compute_dtype="fp32", device="cpu"),
        dataset=DatasetSettings(cache=str(tmp_path / "cache")),
        train=TrainSettings(steps=1),
    )
    with pytest.raises(DatasetError, match="holds no encoded samples"):
        check(settings, None)
    sample = Sample("a", "a", torch.randn(tiny.LATENTS["krea2"]), torch.randn(2, tiny.WIDTHS["krea2"]))
    write_sample(tmp_path / "cache", sample, FAMILIES["krea2"])
    found = check(settings, None)
    assert [entry.name for entry in found.samples] == ["a"]
    assert found.pictures == []
    said = {verdict.name: verdict.message for verdict in verdicts(settings, None)}
    assert said["encoded folder"] == "none is needed"
    assert "encoded tensors" not in said["disk space"]


def test_auto_is_resolved_for_a_card_and_kept_by_a_resume(tmp_path, monkeypatch, settings):
    cards.insert(monkeypatch, cards.RTX_3090)
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: None)
    asked = changed(settings, "model", device="", precision="auto", compute_dtype="bf16")
    found = check(asked, encoders(KREA2))
    assert (found.settings.model.precision, found.settings.model.blocks_on_cpu) == ("bf16", 0)
    assert found.settings.train.checkpointing is False
    assert found.memory.startswith("memory plan: bf16, without checkpointing, 0 of 3 blocks on the CPU: ")
    monkeypatch.setattr(preflight.state, "saved_precision", lambda folder: "nf4")
    (tmp_path / "out" / "state").mkdir(parents=True)
    assert check(asked, encoders(KREA2), resume=True).settings.model.precision == "nf4"
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: "torchao is a stub")
    with pytest.raises(SettingsError, match="the run was begun in nf4: torchao is a stub"):
        check(asked, encoders(KREA2), resume=True)


def test_compile_is_said_and_never_off_in_silence(monkeypatch, settings):
    found = check(settings, encoders(KREA2))
    assert found.settings.train.compile is False
    assert found.compiled.startswith("element-wise work is not compiled: on a CPU compiling takes minutes")
    asked = changed(settings, "train", compile=True)
    monkeypatch.setattr(probes, "compile_fault", lambda device: None)
    found = check(asked, encoders(KREA2))
    assert (found.settings.train.compile, found.compiled) == (True, "element-wise work is compiled: as set")
    monkeypatch.setattr(probes, "compile_fault", lambda device: "compile needs Triton")
    with pytest.raises(SettingsError, match="compile needs Triton"):
        check(asked, encoders(KREA2))


@pytest.mark.parametrize("fault", [None, "compile needs Triton"])
def test_compile_auto_on_a_card_follows_the_try(monkeypatch, settings, fault):
    cards.insert(monkeypatch, cards.RTX_3090)
    monkeypatch.setattr(probes, "compile_fault", lambda device: fault)
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: None)
    found = check(changed(settings, "model", device=""), encoders(KREA2))
    assert found.settings.train.compile is (fault is None)
    assert found.compiled.endswith(fault or "compiled: it works on cuda")


def test_more_checkpointed_blocks_than_there_are_are_refused(settings):
    with pytest.raises(SettingsError, match=r"checkpointing is 4; krea2-demo-base\.safetensors has 3 blocks"):
        check(changed(settings, "train", checkpointing=4), encoders(KREA2))
    assert check(changed(settings, "train", checkpointing=3), encoders(KREA2)).settings.train.checkpointing == 3
    assert check(changed(settings, "train", checkpointing=True), encoders(KREA2)).settings.train.checkpointing is True


def test_a_card_without_room_is_refused_with_what_would_fit(monkeypatch, settings):
    cards.insert(monkeypatch, cards.RTX_3090, total=int(0.54 * 2**30), free=2**29)
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: None)
    said = refusal_on_card(changed(settings, "model", device="", precision="int8", compute_dtype="bf16"))
    assert said.startswith("Krea 2 at 64² with rank 2 takes ")
    assert "the device is too small" in said


def refusal_on_card(settings):
    with pytest.raises(SettingsError) as caught:
        check(settings, encoders(KREA2))
    return str(caught.value)


@pytest.mark.parametrize("device", ["", "cpu"])
def test_more_blocks_on_the_cpu_than_there_are_are_refused_before_anything_is_encoded(monkeypatch, settings, device):
    settings = changed(settings, "model", blocks_on_cpu=40, device=device)
    with pytest.raises(SettingsError, match=r"blocks_on_cpu is 40; krea2-demo-base\.safetensors has 3 blocks"):
        check(settings, encoders(KREA2))


@pytest.mark.parametrize("path", ["turbo", "turbo/transformer", "turbo/transformer/x.safetensors"])
def test_a_model_is_known_by_its_diffusers_folder(tmp_path, path):
    (tmp_path / "turbo" / "transformer").mkdir(parents=True)
    assert telling_name(tmp_path / path) == "turbo"
    assert telling_name(tmp_path / "turbo" / "x.safetensors") == "x.safetensors"
    cached = tmp_path / "models--krea--turbo" / "snapshots" / "0a1b2c"
    assert telling_name(cached) == telling_name(cached / "transformer") == "models--krea--turbo"
