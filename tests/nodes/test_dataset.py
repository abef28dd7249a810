"""Image Folder Dataset, Encode Dataset, Dataset from Latents."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import tiny
import torch
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.samples import has_empty, read_samples


def test_a_folder_is_counted_and_shown(graph, pictures):
    chosen, sheet, report = graph.run("GraftImageFolder", folder="zorb", resolution=64, trigger=" zorb ").args
    assert chosen.folder == pictures
    assert chosen.trigger == "zorb"
    assert sheet.ndim == 4
    assert sheet.shape[-1] == 3
    assert 0 <= sheet.min() < sheet.max() <= 1
    assert "4 pictures" in report
    assert "2 of 80 × 48" in report
    assert "2 of 48 × 80" in report
    assert graph.host.texts == [report]


def test_every_bad_file_is_named(graph, pictures):
    (pictures / "0.txt").unlink()
    (pictures / "1.png").write_bytes(b"no picture")
    with pytest.raises(RuntimeError, match=r"0\.png has no caption.*1\.png cannot be read"):
        graph.run("GraftImageFolder", folder="zorb", resolution=64)


def test_a_missing_caption_is_refused_before_anything_is_queued(graph, pictures):
    node = graph.classes["GraftImageFolder"]
    assert node.validate_inputs("zorb", "") is True
    (pictures / "2.txt").unlink()
    assert "no caption for 2.png" in node.validate_inputs("zorb", "")
    assert node.validate_inputs("zorb", "a zorb") is True
    assert "no folder" in node.validate_inputs("gone", "")
    assert node.validate_inputs(None, "") is True


def test_an_edited_caption_is_a_change_and_the_command_lines_cache_is_none(graph, pictures):
    node = graph.classes["GraftImageFolder"]
    before = node.fingerprint_inputs(folder="zorb", trigger="", resolution=64)
    (pictures / ".graft-cache").mkdir()
    (pictures / ".graft-cache" / "x.safetensors").write_bytes(b"x")
    assert node.fingerprint_inputs(folder="zorb", trigger="", resolution=64) == before
    caption = pictures / "0.txt"
    size = caption.stat()
    caption.write_text("a zorb number 9")
    os.utime(caption, ns=(size.st_atime_ns, size.st_mtime_ns + 1))
    assert node.fingerprint_inputs(folder="zorb", trigger="", resolution=64) != before


def test_held_out_pictures_leave_some_to_train_on(graph, pictures):
    with pytest.raises(RuntimeError, match="held_out is 4 of 4"):
        graph.run("GraftImageFolder", folder="zorb", resolution=64, held_out=4)


def test_encoded_samples_are_those_of_the_command_line(graph, dataset, family_name):
    samples = read_samples(dataset.folder, FAMILIES[family_name], tiny.WIDTHS[family_name])
    assert len(samples) == dataset.count == 4
    assert {sample.caption for sample in samples} == {f"a zorb number {index}" for index in range(4)}
    assert has_empty(dataset.folder)
    assert not any(tensor.is_inference() for sample in samples for tensor in sample.tensors)


def test_vae_and_clip_leave_the_card_and_nothing_is_encoded_twice(graph, dataset, model, clip):
    assert graph.host.calls[-1] == "release"
    graph.host.calls.clear()
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64)[0]
    again = graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=clip, model=model)[0]
    assert again == dataset
    assert graph.host.calls == ["release"]
    assert "0 tensors encoded now" in graph.host.texts[-1]
    assert "MiB in " in graph.host.texts[-1]


def test_two_datasets_of_a_folder_never_share_their_files(graph, dataset, model, clip):
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64, trigger="other")[0]
    other = graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=clip, model=model)[0]
    assert other.folder != dataset.folder


def test_what_acts_while_training_alone_encodes_nothing_again(graph, dataset, model, clip):
    graph.host.calls.clear()
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64, caption_dropout=0.1, held_out=1)[0]
    other = graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=clip, model=model)[0]
    assert other.folder == dataset.folder
    assert (other.caption_dropout, other.held_out) == (0.1, 1)
    assert graph.host.calls == ["release"]


def test_the_wrong_clip_is_refused_by_name_and_the_card_freed(graph, pictures, model, family_name):
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64)[0]
    width = tiny.WIDTHS[family_name]
    with pytest.raises(RuntimeError, match=f"gives 8 features per token.*wants {width}.*type {family_name}"):
        graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=SimpleNamespace(width=8), model=model)
    assert graph.host.calls[-1] == "release"


def test_a_stock_model_is_refused_with_the_node_to_use(graph, pictures):
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64)[0]
    with pytest.raises(RuntimeError, match="Load Model for LoRA Training"):
        graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=None, model=object())


# --- latents of other nodes ------------------------------------------------------------------------------------------


def latents(name, count=1):
    return {"samples": torch.ones(count, *tiny.LATENTS[name])}


def conditioning(name, value=1.0, tokens=3):
    return [[torch.full((1, tokens, tiny.WIDTHS[name]), value), {}]]


def from_latents(graph, model, name, given, texts, **more):
    inputs = {"caption_dropout": [0.0], "held_out": [0], **more}
    return graph.run("GraftDatasetFromLatents", latents=given, conditioning=texts, model=[model], **inputs)[0]


def test_latents_are_normalised_and_keep_their_own_conditioning(graph, model, family_name):
    """ComfyUI's own bucket mode skips the normalisation, and its batches mix the captions."""
    wide = {"samples": torch.full((1, FAMILIES[family_name].latent_channels, 4, 4), 3.0)}
    texts = [conditioning(family_name, value) for value in (0.0, 1.0, 2.0)]
    made = from_latents(graph, model, family_name, [latents(family_name, 2), wide], texts, captions=["a", "b", "c"])
    samples = read_samples(made.folder, FAMILIES[family_name], tiny.WIDTHS[family_name])
    assert [sample.caption for sample in samples] == ["a", "b", "c"]
    assert [sample.conditioning.mean().item() for sample in samples] == [0.0, 1.0, 2.0]
    assert [sample.latents.mean().item() for sample in samples] == [2.0, 2.0, 6.0]
    assert not has_empty(made.folder)


def test_the_empty_prompt_is_kept_where_it_is_given(graph, model, family_name):
    texts = [conditioning(family_name)]
    made = from_latents(graph, model, family_name, [latents(family_name)], texts, empty=texts)
    assert has_empty(made.folder)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"texts": 2}, "1 latents and 2 conditionings"),
        ({"captions": ["a", "b"]}, "1 latents and 2 captions"),
        ({"mask": True}, "noise mask"),
        ({"channels": 4}, "the model's own VAE"),
        ({"width": 8}, "conditioning 1 has 8 features"),
    ],
)
def test_latents_that_do_not_fit_are_refused(graph, model, family_name, change, word):
    given, texts = latents(family_name), [conditioning(family_name)] * change.get("texts", 1)
    if change.get("mask"):
        given["noise_mask"] = torch.ones(1, 8, 8)
    if "channels" in change:
        given["samples"] = given["samples"][:, : change["channels"]]
    if "width" in change:
        texts = [[[torch.ones(1, 3, change["width"]), {}]]]
    more = {"captions": change["captions"]} if "captions" in change else {}
    with pytest.raises(RuntimeError, match=word):
        from_latents(graph, model, family_name, [given], texts, **more)
