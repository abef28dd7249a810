"""Whole runs on the demonstration base: killed and resumed, stopped, previewed, measured, saved at intervals."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from graft_lora.examples.demo import draw_folder
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.lora_convert import read_state, write_state
from graft_lora.trainer import run as run_module
from graft_lora.trainer import watcher
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.errors import DatasetError, SettingsError, TrainingError, WrongModelError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.loop import StepLog, TrainSession
from graft_lora.trainer.run import run, split
from graft_lora.trainer.settings import (
    DatasetSettings,
    ModelSettings,
    PreviewSettings,
    RunSettings,
    TrainSettings,
    resume_settings,
)
from graft_lora.trainer.watcher import STOP, Terminal
from PIL import Image


@pytest.fixture
def pictures(tmp_path):
    """Two buckets: half of the pictures are cut to half their height."""
    folder = tmp_path / "pictures"
    draw_folder(folder, seed=0, zorbs=3, known=3)
    for path in sorted(folder.glob("known-*.png")):
        Image.open(path).resize((128, 64)).save(path)
    return folder


def settings_of(tmp_path, family="krea2", **changes):
    """A run that uses everything that a resume must bring back."""
    train = {
        "steps": 8, "batch_size": 2, "learning_rate": 2e-3, "warmup_steps": 2, "schedule": "cosine", "ema": 0.8,
        "save_every": 3, "keep": 2, "held_out_every": 4, "checkpointing": False,
    }  # fmt: skip
    train.update({key.removeprefix("train_"): changes.pop(key) for key in list(changes) if key.startswith("train_")})
    values = {
        "output": str(tmp_path / "out"),
        "name": "zorb",
        "model": ModelSettings(str(base_path(FAMILIES[family])), "", "fp32", "fp32", "cpu"),
        "dataset": DatasetSettings(
            str(tmp_path / "pictures"), encoders="demo", resolution=64, flip=True, caption_dropout=0.2, held_out=1
        ),
        "lora": LoraSettings(rank=2, alpha=2, dropout=0.1),
        "train": TrainSettings(**train),
        "preview": PreviewSettings(("a large zorb",), every=4, steps=2, guidance=2.0),
    }
    return RunSettings(**{**values, **changes})


def start(settings, family="krea2", **arguments):
    said = []
    result = run(settings, encoders(FAMILIES[family]), said.append, **arguments)
    return result, said


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def weights_of(folder):
    return read_state(folder / "zorb.safetensors")[0]


def steps_logged(folder, name="log.jsonl"):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def assert_same_lora(one, other):
    wanted, found = weights_of(one), weights_of(other)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def interrupted_after(monkeypatch, step):
    """Ctrl-C during that step."""
    original = TrainSession.advance

    def interrupts(self, read):
        logs = original(self, read)
        if self.done == step:
            signal.raise_signal(signal.SIGINT)
        return logs

    monkeypatch.setattr(TrainSession, "advance", interrupts)


def test_a_run_is_a_folder_with_all_that_was_asked_for(tmp_path, pictures):
    result, said = start(settings_of(tmp_path))
    assert names(result.folder) == [
        "config.json", "held_out.jsonl", "log.jsonl", "loss.png", "preview.png", "previews/000000.png",
        "previews/000004.png", "previews/000008.png", "previews/strip.png", "state/state.pt", "zorb-000003.safetensors",
        "zorb-000006.safetensors", "zorb-best.safetensors", "zorb.safetensors",
    ]  # fmt: skip
    assert steps_logged(result.folder) == list(range(1, 9))
    measured = [json.loads(line) for line in (result.folder / "held_out.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in measured] == [4, 8]
    assert any("in 2 buckets" in sentence for sentence in said)
    for picture in result.folder.rglob("*.png"):
        Image.open(picture).verify()


def test_only_the_last_saves_are_kept(tmp_path, pictures):
    result, _ = start(settings_of(tmp_path, train_save_every=1, train_keep=3))
    assert [n for n in names(result.folder) if n.startswith("zorb-0")] == [
        f"zorb-{step:06}.safetensors" for step in (5, 6, 7)
    ]


@pytest.mark.parametrize("family", ["krea2", "ideogram4"])
def test_a_run_killed_in_the_middle_and_resumed_is_the_uninterrupted_one(tmp_path, pictures, family):
    """SIGKILL during step 6 of 8, the last save being after step 3: buckets, flips, dropouts, EMA, previews and all."""
    whole, _ = start(settings_of(tmp_path, family, output=str(tmp_path / "whole")), family)
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch; torch.set_num_threads(1)
from pathlib import Path
import test_run
from graft_lora.trainer.loop import TrainSession
original = TrainSession._loss
def dies(self, batch):
    if self.done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch)
TrainSession._loss = dies
test_run.start(test_run.settings_of(Path({str(tmp_path)!r}), {family!r}), {family!r})
"""
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    folder = tmp_path / "out"
    assert steps_logged(folder) == [1, 2, 3, 4, 5]
    assert not (folder / "zorb.safetensors").exists()
    resumed, said = start(settings_of(tmp_path, family), family, resume=True)
    assert "continuing after step 3" in said
    assert steps_logged(folder) == list(range(1, 9))
    assert steps_logged(folder, "held_out.jsonl") == [4, 8]
    assert (folder / "held_out.jsonl").read_text() == (whole.folder / "held_out.jsonl").read_text()
    wanted = weights_of(whole.folder)
    found = weights_of(folder)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert resumed.losses == whole.losses


@pytest.mark.parametrize("log_every", [1, 7])
def test_stopped_and_resumed_is_the_uninterrupted_run(tmp_path, pictures, monkeypatch, log_every):
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    settings = settings_of(tmp_path, train_log_every=log_every)
    with monkeypatch.context() as patch:
        interrupted_after(patch, 5)
        stopped, said = start(settings)
    assert any("stopped after 5 of 8 steps" in sentence for sentence in said)
    assert (stopped.folder / "zorb.safetensors").is_file()
    assert steps_logged(stopped.folder) == [1, 2, 3, 4, 5]
    resumed, _ = start(settings, resume=True)
    assert_same_lora(whole.folder, resumed.folder)


def test_the_interval_of_logging_changes_nothing_but_when_a_loss_is_read(tmp_path, pictures, monkeypatch):
    """Every step has its line; what is saved, measured or previewed has been read."""
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    original, reads = TrainSession.advance, []

    def noted(self, read):
        logs = original(self, read)
        reads.append((self.done, [log.step for log in logs]))
        return logs

    monkeypatch.setattr(TrainSession, "advance", noted)
    result, _ = start(settings_of(tmp_path, train_log_every=5))
    # Saves every 3 steps, previews and measurements every 4.
    assert [entry for entry in reads if entry[1]] == [(3, [1, 2, 3]), (4, [4]), (5, [5]), (6, [6]), (8, [7, 8])]
    assert steps_logged(result.folder) == list(range(1, 9))
    assert result.losses == whole.losses
    assert_same_lora(whole.folder, result.folder)


def test_a_longer_run_may_continue_under_a_constant_rate(tmp_path, pictures):
    start(settings_of(tmp_path, train_schedule="constant", train_steps=4))
    result, _ = start(settings_of(tmp_path, train_schedule="constant", train_steps=6), resume=True)
    assert steps_logged(result.folder) == list(range(1, 7))


CHANGES = [
    ({"train_learning_rate": 1e-3}, "train.learning_rate was 0.002, is 0.001"),
    ({"train_steps": 9}, "train.steps was 8, is 9"),
    ({"lora": LoraSettings(rank=2, alpha=4, dropout=0.1)}, "lora.alpha was 2, is 4"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_run_that_differs_is_refused_with_the_difference(tmp_path, pictures, change, message):
    start(settings_of(tmp_path))
    before = weights_of(tmp_path / "out")
    with pytest.raises(SettingsError, match=f"cannot continue the saved one: {message}"):
        start(settings_of(tmp_path, **change), resume=True)
    assert all(torch.equal(value, before[key]) for key, value in weights_of(tmp_path / "out").items())


def test_another_dataset_or_base_is_refused(tmp_path, pictures):
    start(settings_of(tmp_path))
    caption = pictures / "zorb-00.txt"
    caption.write_text("another caption")
    with pytest.raises(SettingsError, match="samples was"):
        start(settings_of(tmp_path), resume=True)
    other = ModelSettings(str(base_path(FAMILIES["krea2"])), "", "bf16", "fp32", "cpu")
    with pytest.raises(SettingsError, match="precision was 'fp32', is 'bf16'"):
        start(settings_of(tmp_path, model=other), resume=True)


def test_nothing_to_resume_and_a_damaged_state(tmp_path, pictures):
    with pytest.raises(SettingsError, match="holds no saved state: there is nothing to resume"):
        start(settings_of(tmp_path), resume=True)
    assert not (tmp_path / "out").exists()
    start(settings_of(tmp_path))
    path = tmp_path / "out" / "state" / "state.pt"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(SettingsError, match=r"state\.pt is damaged and cannot be resumed from"):
        start(settings_of(tmp_path), resume=True)


@pytest.mark.parametrize("given", ["the file", "its folder"])
def test_another_base_of_the_same_size_is_refused(tmp_path, pictures, given):
    (tmp_path / "base").mkdir()
    base = shutil.copy(base_path(FAMILIES["krea2"]), tmp_path / "base" / "base.safetensors")
    model = ModelSettings(str(base if given == "the file" else base.parent), "", "fp32", "fp32", "cpu")
    start(settings_of(tmp_path, model=model))
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    with pytest.raises(SettingsError, match="base was"):
        start(settings_of(tmp_path, model=model), resume=True)


@pytest.mark.parametrize("how", [True, 1])
def test_what_costs_memory_or_time_alone_may_change(tmp_path, pictures, monkeypatch, how):
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        start(settings_of(tmp_path))
    changed = settings_of(tmp_path, train_checkpointing=how, train_save_every=0, train_keep=9)
    result, _ = start(changed, resume=True)
    assert_same_lora(whole.folder, result.folder)
    assert resume_settings(result.folder).train.checkpointing is how


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_preview_that_runs_out_of_memory_is_left_out_with_a_word(tmp_path, pictures, monkeypatch, fails):
    """Fizgig 123: a preview pushed memory over the edge. That of the base, that on the way, and the last one."""
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    original = run_module.sample
    calls = []

    def full_card(*args):
        calls.append(args)
        if len(calls) == fails:
            raise torch.OutOfMemoryError("as on a full card")
        return original(*args)

    monkeypatch.setattr(run_module, "sample", full_card)
    result, said = start(settings_of(tmp_path))
    step = {1: 0, 2: 4, 3: 8}[fails]
    assert f"the preview after step {step} did not fit into memory and is left out" in said
    assert not (result.folder / "previews" / f"{step:06}.png").exists()
    assert (result.folder / "preview.png").is_file()
    assert_same_lora(whole.folder, result.folder)


def test_dropout_does_not_act_in_measurements_and_previews(tmp_path, pictures, monkeypatch):
    states = []
    original = run_module.held_out_loss

    def measured(model, *args, **kwargs):
        dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        states.append((any(m.training for m in dropouts), len(dropouts) > 0, torch.get_rng_state()))
        loss = original(model, *args, **kwargs)
        assert torch.equal(torch.get_rng_state(), states[-1][2]), "measuring drew from torch's own generator"
        return loss

    monkeypatch.setattr(run_module, "held_out_loss", measured)
    start(settings_of(tmp_path))
    assert [state[:2] for state in states] == [(False, True)] * 2


def test_pruning_leaves_what_is_not_the_runs_own(tmp_path, pictures):
    folder = tmp_path / "out"
    start(settings_of(tmp_path, train_steps=1, train_schedule="constant"))
    mine = [folder / name for name in ("zorb-chosen.safetensors", "zorb-12345.safetensors", "zorb-000001.bak")]
    for path in mine:
        path.write_text("mine")
    more = settings_of(tmp_path, train_steps=5, train_schedule="constant", train_save_every=1, train_keep=1)
    start(more, resume=True)
    assert all(path.read_text() == "mine" for path in mine)
    kept = [name for name in names(folder) if re.fullmatch(r"zorb-\d{6}\.safetensors", name)]
    assert kept == ["zorb-000004.safetensors"]


@pytest.mark.parametrize("prompt", ["a neon sign saying $$", "a $^$ b", "win $$$$ now"])
def test_a_dollar_in_a_prompt_or_name_is_no_mathematics(tmp_path, pictures, prompt):
    preview = PreviewSettings((prompt,), every=0, steps=1, guidance=1.0)
    start(settings_of(tmp_path, preview=preview, train_steps=1, name="ca$$h"))


@pytest.mark.parametrize("name", ["training", "_modules", "forward"])
def test_names_that_a_module_dictionary_has_already(tmp_path, pictures, name):
    result, _ = start(settings_of(tmp_path, name=name, train_steps=1))
    assert result.lora.name == f"{name}.safetensors"


def test_stopped_before_the_first_step_there_is_no_lora_and_the_run_can_be_resumed(tmp_path, pictures, monkeypatch):
    """All B are zero then: such a file would pass for a result."""
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    original = TrainSession.__enter__
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "wish", lambda self: STOP)
        with pytest.raises(TrainingError, match="stopped before the first step"):
            start(settings_of(tmp_path))
    assert TrainSession.__enter__ is original
    assert not (tmp_path / "out" / "zorb.safetensors").exists()
    result, _ = start(settings_of(tmp_path), resume=True)
    assert_same_lora(whole.folder, result.folder)


def test_previews_measurements_and_saves_change_nothing_of_the_training(tmp_path, pictures):
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    quiet = settings_of(tmp_path, train_save_every=0, train_held_out_every=0, preview=PreviewSettings())
    result, _ = start(quiet)
    assert result.losses == whole.losses
    assert_same_lora(whole.folder, result.folder)


@pytest.mark.parametrize("log_every", [1, 8])
@pytest.mark.parametrize(
    ("failure", "message", "continues"),
    [
        ("nan", "the loss became nan in step 5", 3),
        ("memory", "out of memory in step 5; the state before it is saved", 4),
        ("other", "a driver's error", 3),
    ],
)
def test_a_run_whose_step_fails_goes_on_as_if_it_had_not(
    tmp_path, pictures, monkeypatch, failure, message, continues, log_every
):
    """After a loss that is not finite from the last periodic save, out of memory from right before the step."""
    settings = settings_of(tmp_path, train_log_every=log_every, train_held_out_every=0, preview=PreviewSettings())
    whole, _ = start(settings_of(tmp_path, output=str(tmp_path / "whole")))
    original = TrainSession._loss

    def fails(self, batch):
        loss = original(self, batch)
        if self.done == 4 and failure == "memory":
            raise torch.OutOfMemoryError("as on a full card")
        if self.done == 4 and failure == "other":
            raise RuntimeError("a driver's error")
        return loss * torch.nan if self.done == 4 else loss

    with monkeypatch.context() as patch:
        patch.setattr(TrainSession, "_loss", fails)
        with pytest.raises(RuntimeError if failure == "other" else TrainingError, match=message):
            start(settings)
    assert steps_logged(tmp_path / "out") == [1, 2, 3, 4]
    result, said = start(settings, resume=True)
    assert f"continuing after step {continues}" in said
    assert steps_logged(result.folder) == list(range(1, 9))
    assert_same_lora(whole.folder, result.folder)


@pytest.mark.parametrize("ends", ["stop", "memory", "other"])
def test_a_loss_that_is_not_finite_and_was_not_read_is_found_however_the_run_ends(
    tmp_path, pictures, monkeypatch, ends
):
    """What was logged before it is kept; the state after it is not."""
    settings = settings_of(tmp_path, train_log_every=8, train_save_every=0, train_held_out_every=0)
    settings = dataclasses.replace(settings, preview=PreviewSettings())
    original = TrainSession._loss

    def fails(self, drawn):
        if self.done == 4 and ends == "memory":
            raise torch.OutOfMemoryError("as on a full card")
        if self.done == 4 and ends == "other":
            raise RuntimeError("a driver's error")
        return original(self, drawn) * (torch.nan if self.done == 2 else 1)

    monkeypatch.setattr(TrainSession, "_loss", fails)
    if ends == "stop":
        interrupted_after(monkeypatch, 4)
    # Of two faults the driver's is told.
    kind, words = (RuntimeError, "driver") if ends == "other" else (TrainingError, "the loss became nan in step 3")
    with pytest.raises(kind, match=words):
        start(settings)
    assert steps_logged(tmp_path / "out") == [1, 2]
    assert torch.load(tmp_path / "out" / "state" / "state.pt")["session"]["done"] == 0
    assert not (tmp_path / "out" / "zorb.safetensors").exists()


def test_a_bar_that_is_switched_off_has_no_clock(monkeypatch):
    """As TQDM_DISABLE does."""
    monkeypatch.setattr(watcher, "tqdm", functools.partial(watcher.tqdm, disable=True))
    bar = Terminal(print)
    with bar.watching():
        for step in (1, 2):
            bar.stepped([StepLog(step, 0.5, 1e-4, 0.1, 1.0)], 2, step * [0.5])


def test_held_out_samples_are_not_trained_on(tmp_path):
    everything = list(range(10))
    training, held_out = split(everything, 3, seed=1)
    assert sorted(training + held_out) == everything
    assert len(held_out) == 3
    assert split(everything, 3, seed=1) == (training, held_out)
    assert split(everything, 3, seed=2) != (training, held_out)
    with pytest.raises(DatasetError, match="held_out is 10 of 10 samples"):
        split(everything, 10, seed=0)


def test_settings_are_written_as_they_were_with_nothing_left_to_auto(tmp_path, pictures):
    result, _ = start(settings_of(tmp_path))
    kept = json.loads((result.folder / "config.json").read_text())
    asked = settings_of(tmp_path)
    assert asked.model.blocks_on_cpu == "auto"
    assert asked.train.compile == "auto"
    asked = dataclasses.replace(
        asked,
        model=dataclasses.replace(asked.model, blocks_on_cpu=0),
        train=dataclasses.replace(asked.train, compile=False),
    )
    assert kept == json.loads(json.dumps(dataclasses.asdict(asked)))


def test_an_unconditional_transformer_guides_the_previews_alone(tmp_path, pictures, monkeypatch):
    """Its file is refused as a base, and taken for the previews; the run trains the other one as ever."""
    path = tmp_path / "ideogram4_unconditional.safetensors"
    tensors, metadata = read_state(base_path(FAMILIES["ideogram4"]))
    write_state(path, {key: tensor * 0.5 for key, tensor in tensors.items()}, metadata)
    plain = settings_of(tmp_path, "ideogram4", train_steps=2)
    first = run(plain, encoders(FAMILIES["ideogram4"]), lambda _: None)
    paired = dataclasses.replace(
        plain, output=str(tmp_path / "paired"), preview=dataclasses.replace(plain.preview, unconditional=str(path))
    )
    said = []
    second = run(paired, encoders(FAMILIES["ideogram4"]), said.append)
    assert sum("Linears in fp32" in line for line in said) == 2
    weights, paired_weights = read_state(first.lora)[0], read_state(second.lora)[0]
    assert all(torch.equal(weights[key], paired_weights[key]) for key in weights)
    assert (first.folder / "preview.png").read_bytes() != (second.folder / "preview.png").read_bytes()
    wrong = dataclasses.replace(
        plain, output=str(tmp_path / "wrong"), model=dataclasses.replace(plain.model, path=str(path))
    )
    with pytest.raises(WrongModelError, match="unconditional transformer of a pair"):
        run(wrong, encoders(FAMILIES["ideogram4"]), lambda _: None)
    krea2 = settings_of(tmp_path, output=str(tmp_path / "krea2"), preview=paired.preview)
    with pytest.raises(SettingsError, match="Krea 2 has no unconditional transformer"):
        run(krea2, encoders(FAMILIES["krea2"]), lambda _: None)
