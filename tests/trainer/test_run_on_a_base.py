"""Runs on a base that the caller has loaded, as ComfyUI's nodes make them: same LoRA, several on one base, wishes."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from graft_lora.lora_convert import read_state
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.devices import Memory
from graft_lora.trainer.errors import DatasetError, SettingsError, StoppedError, TrainingError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.preflight import check, verdicts
from graft_lora.trainer.run import Previews, run, train
from graft_lora.trainer.samples import Sample, write_empty, write_sample
from graft_lora.trainer.settings import (
    DatasetSettings,
    ModelSettings,
    PreviewSettings,
    RunSettings,
    TrainSettings,
    resume_settings,
)
from graft_lora.trainer.watcher import FINISH, STOP, Watcher


class Notes(Watcher):
    """Notes everything, and wishes what it was told to after some steps."""

    def __init__(self, wish="", after=0):
        self.said, self.steps, self.previews = [], [], []
        self._wish, self._after = wish, after

    def say(self, sentence):
        self.said.append(sentence)

    def stepped(self, logs, total, losses):
        assert [log.loss for log in logs] == losses[logs[0].step - 1 :]
        self.steps += [(log.step, total) for log in logs]

    def previewed(self, step, path):
        self.previews.append((step, path.name))

    def wish(self):
        return self._wish if len(self.steps) >= self._after else ""


@pytest.fixture
def settings(tmp_path, family_name):
    """A run on three encoded samples of a tiny base."""
    path = tiny.write(tiny.build(family_name), tmp_path / "base.safetensors")
    cache = tmp_path / "cache"
    cache.mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(3):
        latents = torch.randn(tiny.LATENTS[family_name], generator=generator)
        text = torch.randn(2 + index, tiny.WIDTHS[family_name], generator=generator)
        write_sample(cache, Sample(f"{index}", f"caption {index}", latents, text), FAMILIES[family_name])
    write_empty(cache, torch.randn(2, tiny.WIDTHS[family_name], generator=generator))
    return RunSettings(
        str(tmp_path / "out"),
        "cat",
        ModelSettings(str(path), "", "fp32", "fp32", "cpu"),
        DatasetSettings(cache=str(cache)),
        LoraSettings(rank=2, alpha=2),
        TrainSettings(steps=4, learning_rate=1e-2, warmup_steps=0, save_every=0),
        PreviewSettings(every=2, steps=2, guidance=2.0),
    )


def on_base(settings, base=None, previews=None, watcher=None, resume=False):
    checked = check(settings, None, resume, previews=previews is not None)
    base = base or load_base(checked.file, "fp32", "fp32")
    return train(checked, base, previews, watcher or Notes(), resume)


def previews_of(family, prompts=2, **changes):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(3, tiny.WIDTHS[family], generator=generator) for _ in range(prompts + 1)]
    decode = lambda latents: latents[:, :3].clamp(-1, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)  # noqa: E731
    values = {"prompts": tuple(texts[1:]), "labels": ("a", "b")[:prompts], "unconditional": texts[0], "decode": decode}
    return Previews(**{**values, **changes})


def same(one, other):
    wanted, found = read_state(one.lora)[0], read_state(other.lora)[0]
    return wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)


def with_output(settings, folder):
    return dataclasses.replace(settings, output=str(folder))


def test_the_lora_is_that_of_the_command_line(tmp_path, settings):
    whole = run(with_output(settings, tmp_path / "whole"), None, lambda _: None)
    notes = Notes()
    result = on_base(settings, watcher=notes)
    assert same(whole, result)
    assert result.losses == whole.losses
    assert result.ended == ""
    assert notes.steps == [(step, 4) for step in range(1, 5)]


def test_a_second_run_on_the_base_leaves_the_first_ones_adapter_as_it_was(tmp_path, settings):
    first = on_base(settings)
    model = first.base.model
    kept = [parameter.clone() for parameter in adapters.parameters(model, first.name)]
    second = on_base(with_output(settings, tmp_path / "again"), first.base)
    assert (first.name, second.name) == ("cat", "cat_2")
    assert second.lora.name == "cat.safetensors"
    assert same(first, second)
    assert all(map(torch.equal, kept, adapters.parameters(model, first.name)))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("where", ["sampling", "decoding"])
def test_a_stop_in_the_middle_of_a_preview_loses_no_step(settings, family_name, where):
    """A preview takes minutes, so a Stop comes in one; ComfyUI's VAE raises it by itself."""
    notes, prompts = Notes(), []
    own = previews_of(family_name)

    def decode(latents):
        prompts.append(len(notes.steps))
        if notes.steps:  # the first picture of the preview in the middle
            notes._wish = STOP
            if where == "decoding":
                raise StoppedError("stopped")
        return own.decode(latents)

    result = on_base(settings, previews=dataclasses.replace(own, decode=decode), watcher=notes)
    assert prompts == [0, 0, 2]
    assert result.ended == STOP
    assert result.lora.is_file()
    resumed = on_base(settings, previews=own, resume=True)
    assert len(resumed.losses) == 4
    assert notes.steps == [(1, 4), (2, 4)]


@pytest.mark.parametrize(("wish", "word"), [(STOP, "stopped after 2 of 4"), (FINISH, "finished early, after 2 of 4")])
def test_a_wish_ends_the_run_with_its_lora_and_the_command_line_goes_on_with_it(tmp_path, settings, wish, word):
    whole = on_base(with_output(settings, tmp_path / "whole"))
    notes = Notes(wish, after=2)
    ended = on_base(settings, previews=previews_of(settings_family(settings)), watcher=notes)
    assert ended.ended == wish
    assert ended.lora.is_file()
    assert len(ended.losses) == 2
    assert any(word in sentence for sentence in notes.said)
    # Who stops does not want to wait for pictures; who finishes early wants the run's results.
    assert (ended.folder / "preview.png").is_file() == (wish == FINISH)
    again = resume_settings(ended.folder)
    resumed = run(again, None, lambda _: None, resume=True)
    assert same(whole, resumed)


def settings_family(settings):
    return "krea2" if "krea2" in check(settings, None).file.family.name else "ideogram4"


def test_a_run_of_the_command_line_goes_on_on_a_loaded_base(tmp_path, settings):
    whole = run(with_output(settings, tmp_path / "whole"), None, lambda _: None)
    stopped = on_base(settings, watcher=Notes(STOP, after=3))
    notes = Notes()
    resumed = on_base(resume_settings(stopped.folder), stopped.base, watcher=notes, resume=True)
    assert "continuing after step 3" in notes.said
    assert resumed.name == "cat_2"  # the adapter of the stopped run is still on the base
    assert same(whole, resumed)


def test_stopped_before_the_first_step(settings):
    with pytest.raises(TrainingError, match="stopped before the first step"):
        on_base(settings, watcher=Notes(STOP), previews=previews_of(settings_family(settings)))


def test_previews_are_told_and_of_the_size_that_was_asked_for(settings):
    family = settings_family(settings)
    seen, notes = [], Notes()
    base_previews = previews_of(family)

    def decode(latents):
        seen.append(tuple(latents.shape))
        return base_previews.decode(latents)

    down = FAMILIES[family].latent_downscale * FAMILIES[family].latent_multiple
    size = (3 * down, 2 * down)
    result = on_base(settings, previews=dataclasses.replace(base_previews, decode=decode, size=size), watcher=notes)
    multiple = FAMILIES[family].latent_multiple
    assert set(seen) == {(1, FAMILIES[family].latent_channels, 2 * multiple, 3 * multiple)}
    assert notes.previews == [(0, "000000.png"), (2, "000002.png"), (4, "000004.png")]
    assert (result.folder / "previews" / "strip.png").is_file()
    assert (result.folder / "preview.png").is_file()


def test_a_guide_stands_in_for_the_unconditional_pass(settings):
    calls = []

    def guide(latents, sigma_B, text=None):
        calls.append(sigma_B.item())
        return torch.zeros_like(latents)

    on_base(settings, previews=previews_of(settings_family(settings), guide=guide, unconditional=None))
    assert len(calls) == 2 * 2 * 3  # prompts, Euler steps; of the base, after step 2 and after the last


def test_guidance_without_a_negative_is_refused_where_there_is_no_pass_without_text(settings, family_name):
    without = previews_of(family_name, unconditional=None)
    if family_name == "ideogram4":
        on_base(settings, previews=without)
        return
    with pytest.raises(SettingsError, match="a preview with guidance 2 needs a negative conditioning"):
        on_base(settings, previews=without)
    plain = dataclasses.replace(settings, preview=dataclasses.replace(settings.preview, guidance=1.0))
    on_base(plain, previews=without)


def test_caption_dropout_takes_the_folders_empty_prompt(tmp_path, settings, family_name):
    dropping = dataclasses.replace(
        settings, dataset=dataclasses.replace(settings.dataset, caption_dropout=0.7), output=str(tmp_path / "drop")
    )
    plain, dropped = on_base(settings), on_base(dropping)
    assert not same(plain, dropped)
    write_empty(settings.dataset.cache, torch.zeros(2, tiny.WIDTHS[family_name]))
    other = on_base(with_output(dropping, tmp_path / "other"))
    assert same(dropped, other) == FAMILIES[family_name].image_only_pass
    (tmp_path / "cache" / "empty-prompt.safetensors").unlink()
    if not FAMILIES[family_name].image_only_pass:
        with pytest.raises(SettingsError, match=r"needs the empty prompt of Krea 2, which .* does not hold"):
            check(with_output(dropping, tmp_path / "none"), None)


def test_memory_that_will_be_free_is_what_is_planned_with(settings, monkeypatch):
    """ComfyUI's other models fill the card, and will be gone when the run begins."""
    said = {v.name: v.message for v in verdicts(settings, None, memory=Memory(24 * 2**30, 20 * 2**30))}
    assert said["device"] == "CPU, 20.0 GiB of 24.0 GiB free"


def test_prompts_without_a_caller_who_encodes_them_are_refused(settings):
    asking = dataclasses.replace(settings, preview=PreviewSettings(("a cat",)))
    with pytest.raises(SettingsError, match="previews need encoders"):
        check(asking, None)
    check(asking, None, previews=True)


def test_an_empty_cache_is_refused(tmp_path, settings):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DatasetError, match="holds no encoded samples"):
        check(dataclasses.replace(settings, dataset=DatasetSettings(cache=str(tmp_path / "nothing"))), None)
