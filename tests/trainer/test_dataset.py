"""Folders, buckets, batches, encoded samples on disk."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from graft_lora.lora_convert import write_state
from graft_lora.trainer import dataset
from graft_lora.trainer.dataset import (
    Sample,
    bucket,
    collate,
    encode_folder,
    epochs,
    read_folder,
    read_samples,
    to_pixels,
    write_sample,
)
from graft_lora.trainer.errors import DatasetError
from graft_lora.trainer.families import FAMILIES
from PIL import Image


def picture(folder, name, size=(40, 30), mode="RGB", caption="a cat", color=None, **save):
    image = Image.new(mode, size, color if color is not None else 0)
    image.save(folder / name, **save)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption)
    return folder / name


def test_reads_pictures_and_captions(tmp_path):
    picture(tmp_path, "b.png", caption="two  ")
    picture(tmp_path, "a.jpg", (30, 50), caption="one\n")
    found = read_folder(tmp_path)
    assert [(p.path.name, p.caption, p.size) for p in found] == [("a.jpg", "one", (30, 50)), ("b.png", "two", (40, 30))]


def test_bad_pictures_are_named_all_at_once(tmp_path):
    picture(tmp_path, "good.png")
    picture(tmp_path, "alone.png", caption=None)
    whole = picture(tmp_path, "cut.jpg", (400, 400)).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    picture(tmp_path, "empty.png")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(DatasetError) as caught:
        read_folder(tmp_path)
    message = str(caught.value)
    assert "alone.png has no caption alone.txt" in message
    assert "cut.jpg cannot be read" in message
    assert "empty.png cannot be read" in message
    assert "good.png" not in message
    assert "\n" not in message


def test_nothing_that_looks_meant_is_left_out_in_silence(tmp_path):
    picture(tmp_path, "good.png")
    (tmp_path / "notes.md").write_text("mine")
    picture(tmp_path, "old.ppm")
    (tmp_path / "alone.txt").write_text("a caption")
    (tmp_path / "more").mkdir()
    picture(tmp_path / "more", "deep.png")
    with pytest.raises(DatasetError) as caught:
        read_folder(tmp_path)
    for part in (
        "old.ppm is a picture of a kind that is not read",
        "alone.txt is the caption of no picture",
        "the subfolder more holds pictures, which are not read",
    ):
        assert part in str(caught.value)
    assert "notes.md" not in str(caught.value)


def test_a_picture_too_large_to_decode_and_a_caption_in_another_encoding_are_named(tmp_path, monkeypatch):
    picture(tmp_path, "bomb.png", (300, 300))
    picture(tmp_path, "latin.png")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.raises(DatasetError, match=r"bomb\.png cannot be read.*latin\.txt cannot be read as UTF-8"):
        read_folder(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_caption(tmp_path):
    picture(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa cat")
    assert read_folder(tmp_path)[0].caption == "a cat"


def test_an_animation_is_refused_and_a_phone_jpeg_of_two_frames_is_not(tmp_path):
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=frames[1:])
    (tmp_path / "phone.txt").write_text("x")
    pixels = to_pixels(read_folder(tmp_path)[0], (16, 16))
    assert pixels[0, 0].min() > 0.9 > -0.9 > pixels[0, 2].max(), "the first frame is the picture"
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "moves.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"moves\.gif cannot be read \(it is animated\)"):
        read_folder(tmp_path)


def test_no_folder_and_no_pictures(tmp_path):
    with pytest.raises(DatasetError, match="is not a folder"):
        read_folder(tmp_path / "nothing")
    with pytest.raises(DatasetError, match="holds no picture"):
        read_folder(tmp_path)


def test_modes_are_handled_or_refused_by_name(tmp_path):
    picture(tmp_path, "alpha.png", mode="RGBA", color=(255, 0, 0, 0))
    picture(tmp_path, "cmyk.jpg", mode="CMYK", color=(0, 0, 0, 0))
    picture(tmp_path, "grey.png", mode="L", color=255)
    picture(tmp_path, "palette.png", mode="P", color=0)
    found = {p.path.name: to_pixels(p, (16, 16)) for p in read_folder(tmp_path)}
    assert all(pixels.shape == (1, 3, 16, 16) for pixels in found.values())
    for name in ("alpha.png", "cmyk.jpg", "grey.png"):
        assert found[name].min() > 0.9, f"{name} should be white"
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "deep.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"deep\.png cannot be read .*8 bits per channel"):
        read_folder(tmp_path)


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90° to see it upright
    picture(tmp_path, "turned.jpg", (40, 20), exif=exif)
    assert read_folder(tmp_path)[0].size == (20, 40)


def test_the_middle_is_kept(tmp_path):
    image = Image.new("RGB", (90, 30))
    image.paste((255, 255, 255), (30, 0, 60, 30))
    image.save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    assert to_pixels(read_folder(tmp_path)[0], (32, 32)).min() > 0.9


@pytest.mark.parametrize("size", [(1024, 1024), (1920, 1080), (1080, 1920), (3000, 1000), (640, 480), (501, 499)])
@pytest.mark.parametrize(("resolution", "multiple"), [(1024, 16), (512, 16), (768, 64)])
def test_buckets_fit_the_multiple_the_resolution_and_the_aspect(size, resolution, multiple):
    width, height = bucket(size, resolution, multiple)
    assert width % multiple == height % multiple == 0
    assert width * height <= resolution**2
    assert width * height > 0.85 * resolution**2
    # The next bucket is up to one multiple away on each side.
    assert abs(np.log(width / height / (size[0] / size[1]))) < 2 * multiple / min(width, height)


def samples(shapes):
    return [
        Sample(
            str(index),
            f"caption {index}",
            torch.full(shape, float(index)),
            torch.full((1 + index % 3, 4), float(index)),
        )
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_an_epoch_visits_every_sample_once_each_with_its_own_caption(batch_size):
    """TrainLoraNode runs every image with every caption."""
    data = samples([(16, 8, 8)] * 7 + [(16, 4, 16)] * 4)
    stream = epochs(data, batch_size, torch.Generator().manual_seed(0))
    per_epoch = -(-7 // batch_size) + -(-4 // batch_size)
    orders = []
    for _ in range(3):
        groups = list(islice(stream, per_epoch))
        names = [s.name for group in groups for s in group]
        assert Counter(names) == Counter(s.name for s in data)
        orders.append(names)
        for group in groups:
            batch = collate(group)
            for row, name in enumerate(batch.names):
                length = 1 + int(name) % 3
                assert (batch.latents[row] == float(name)).all()
                assert (batch.conditioning[row, :length] == float(name)).all()
                assert (batch.conditioning[row, length:] == 0).all()
                if batch.mask is not None:
                    assert batch.mask[row].tolist() == [column < length for column in range(batch.mask.shape[1])]
    assert orders[0] != orders[1]


def test_equal_lengths_need_no_mask():
    assert collate(samples([(16, 8, 8)])).mask is None


def test_encodes_each_picture_once_at_its_bucket(tmp_path, family_name):
    family = FAMILIES[family_name]
    picture(tmp_path, "a.png", (100, 50), caption="one")
    picture(tmp_path, "b.png", (50, 100), caption="two")
    sizes, captions = [], []

    def encode(pixels):
        sizes.append(tuple(pixels.shape))
        down = family.latent_downscale
        return torch.zeros(1, family.latent_channels, pixels.shape[2] // down, pixels.shape[3] // down)

    def text(caption):
        captions.append(caption)
        return torch.zeros(2, 4)

    found = encode_folder(read_folder(tmp_path), family, 64, encode, text)
    assert captions == [s.caption for s in found] == ["one", "two"]
    assert sizes[0][3] > sizes[0][2]
    assert sizes[1][2] > sizes[1][3]
    with pytest.raises(DatasetError, match="needs at least 16"):
        encode_folder(read_folder(tmp_path), family, 8, encode, text)


def test_samples_hold_no_graph_and_no_inference_tensors(tmp_path):
    """An encoder whose weights require gradients, called under ComfyUI's inference mode."""
    picture(tmp_path, "a.png")
    conv = torch.nn.Conv2d(3, 16, 8, 8)
    table = torch.nn.Parameter(torch.ones(2, 4))
    with torch.inference_mode():
        (under,) = encode_folder(read_folder(tmp_path), FAMILIES["krea2"], 32, conv, lambda caption: table * 2)
    (plain,) = encode_folder(read_folder(tmp_path), FAMILIES["krea2"], 32, conv, lambda caption: table * 2)
    for tensor in (under.latents, under.conditioning, plain.latents, plain.conditioning):
        assert not tensor.requires_grad
        assert not tensor.is_inference()


def encoded(family, name="a", width=4):
    return Sample(name, "a cat", torch.randn(family.latent_channels, 4, 6), torch.randn(3, width))


def test_encoded_samples_come_back(tmp_path, family_name):
    family = FAMILIES[family_name]
    wanted = encoded(family, "a.png")
    path = write_sample(tmp_path, wanted, family)
    assert path.name == "a.safetensors"
    (found,) = read_samples(tmp_path, family, 4)
    assert (found.name, found.caption) == ("a.png", "a cat")
    assert torch.equal(found.latents, wanted.latents)
    assert torch.equal(found.conditioning, wanted.conditioning)
    with pytest.raises(FileExistsError):
        write_sample(tmp_path, wanted, family)


def test_encoded_samples_that_do_not_fit_are_named(tmp_path, monkeypatch):
    krea2, ideogram4 = FAMILIES["krea2"], FAMILIES["ideogram4"]
    write_sample(tmp_path, encoded(ideogram4, "other"), ideogram4)
    write_sample(tmp_path, encoded(krea2, "wide", width=5), krea2)
    write_sample(tmp_path, Sample("odd", "", torch.randn(16, 3, 4), torch.randn(3, 4)), krea2)
    write_sample(tmp_path, Sample("nan", "", torch.full((16, 4, 4), torch.nan), torch.randn(3, 4)), krea2)
    write_sample(tmp_path, Sample("mute", "", torch.randn(16, 4, 4), torch.randn(0, 4)), krea2)
    write_state(tmp_path / "nameless.safetensors", {"latents": torch.randn(16, 4, 4)}, {"format": "graft-sample-1"})
    (tmp_path / "text.safetensors").write_text("no")
    monkeypatch.setattr(dataset, "some", lambda names, most: "; ".join(names))
    with pytest.raises(DatasetError) as caught:
        read_samples(tmp_path, krea2, 4)
    for part in (
        "other.safetensors was encoded for ideogram4",
        "wide.safetensors has conditioning [3, 5], the base wants [tokens, 4]",
        "odd.safetensors has latents [16, 3, 4], wanted sides that are multiples of 2",
        "mute.safetensors has conditioning [0, 4]",
        "nameless.safetensors is no encoded sample",
        "nan.safetensors has values that are not finite",
        "text.safetensors cannot be read",
    ):
        assert part in str(caught.value)
    with pytest.raises(DatasetError, match="holds no encoded samples"):
        read_samples(tmp_path / "nothing", krea2, 4)
