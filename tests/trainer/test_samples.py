"""Encoded once, kept on disk under a name that holds all that they depend on; whole samples on disk."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from graft_lora.lora_convert import write_state
from graft_lora.trainer import samples
from graft_lora.trainer.errors import DatasetError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.pictures import read_folder
from graft_lora.trainer.samples import (
    Cache,
    Encoders,
    Sample,
    encode_into,
    encode_pictures,
    has_empty,
    place_pictures,
    read_empty,
    read_samples,
    unencoded,
    write_sample,
)
from PIL import Image


def folder_of_two(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, size, color in (("a", (100, 70), "red"), ("b", (70, 100), "blue")):
        image = Image.new("RGB", size, color)
        image.paste((255, 255, 255), (0, 0, 20, size[1]))
        image.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"caption {name}")
    return folder


class Counting:
    """Encoders of a family's shapes that note what they are asked for."""

    def __init__(self, family, picture_id="vae", text_id="te"):
        self.asked = []
        down = family.latent_downscale

        def picture(pixels):
            self.asked.append(tuple(pixels.shape[2:]))
            cells = torch.nn.functional.avg_pool2d(pixels, down)
            return cells.mean(1, keepdim=True).expand(-1, family.latent_channels, -1, -1)

        def text(caption):
            self.asked.append(caption)
            return torch.full((2, 4), float(len(caption)))

        self.encoders = Encoders(picture, text, lambda latents: latents, picture_id, text_id)


def test_each_picture_at_its_bucket_and_its_mirror_image(tmp_path, family_name):
    family = FAMILIES[family_name]
    counting = Counting(family)
    found = encode_pictures(read_folder(folder_of_two(tmp_path)), family, 64, counting.encoders, flip=True)
    (wide, _), caption, (tall, _) = counting.asked[0], counting.asked[2], counting.asked[3]
    assert caption == "caption a"
    assert wide < counting.asked[0][1]
    assert tall > counting.asked[3][1]
    for sample in found:
        assert torch.allclose(sample.flipped, sample.latents.flip(-1), atol=1e-5)
        assert not torch.equal(sample.flipped, sample.latents)
    assert encode_pictures(read_folder(tmp_path / "pictures"), family, 64, counting.encoders)[0].flipped is None
    with pytest.raises(DatasetError, match="needs at least 16"):
        encode_pictures(read_folder(tmp_path / "pictures"), family, 8, counting.encoders)


def test_a_second_run_encodes_nothing_and_a_changed_dependency_does(tmp_path):
    family, folder = FAMILIES["krea2"], folder_of_two(tmp_path)

    def run(resolution=64, flip=False, **ids):
        counting, cache = Counting(family, **ids), Cache(tmp_path / "cache")
        found = encode_pictures(read_folder(folder), family, resolution, counting.encoders, cache, flip)
        assert cache.made == len(counting.asked)
        return found, counting.asked

    first, asked = run()
    assert len(asked) == 4
    second, asked = run()
    assert asked == []
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert torch.equal(one.conditioning, other.conditioning)
    assert run(picture_id="another vae")[1] == asked_pictures(64)
    assert run(text_id="another encoder")[1] == ["caption a", "caption b"]
    assert len(run(resolution=96)[1]) == 2
    assert len(run(flip=True)[1]) == 2
    (folder / "a.txt").write_text("another caption")
    assert run()[1] == ["another caption"]
    Image.new("RGB", (100, 70), "green").save(folder / "a.png")
    assert len(run()[1]) == 1


def asked_pictures(resolution):
    from graft_lora.trainer.pictures import bucket

    return [bucket(size, resolution, 16)[::-1] for size in ((100, 70), (70, 100))]


def test_what_is_still_to_be_encoded_is_exactly_what_will_be(tmp_path, family_name):
    """Each picture and its mirror image, and each caption once, less what the cache has."""
    folder, family = folder_of_two(tmp_path), FAMILIES[family_name]
    shutil.copy(folder / "a.png", folder / "c.png")
    shutil.copy(folder / "a.txt", folder / "c.txt")
    counting = Counting(family)
    cache = Cache(tmp_path / "cache")
    pictures = read_folder(folder)
    for flip, wanted in ((False, 4), (True, 2), (True, 0)):
        counting.asked.clear()
        sizes, captions = unencoded(place_pictures(pictures, family, 64), family, counting.encoders, cache, flip)
        encode_pictures(pictures, family, 64, counting.encoders, cache, flip)
        assert len(sizes) + len(captions) == wanted
        asked = [(entry[1], entry[0]) if isinstance(entry, tuple) else entry for entry in counting.asked]
        assert sorted([*sizes, *captions], key=str) == sorted(asked, key=str)


def test_a_damaged_cache_file_is_named(tmp_path):
    family, folder = FAMILIES["krea2"], folder_of_two(tmp_path)
    encode_pictures(read_folder(folder), family, 64, Counting(family).encoders, Cache(tmp_path / "cache"))
    broken = sorted((tmp_path / "cache").iterdir())[0]
    broken.write_bytes(b"x")
    with pytest.raises(DatasetError, match=f"{broken.name} in the cache is damaged .*remove it"):
        encode_pictures(read_folder(folder), family, 64, Counting(family).encoders, Cache(tmp_path / "cache"))


@pytest.mark.parametrize("which", ["picture", "text"])
def test_an_encoder_that_overflows_is_named_and_nothing_of_it_is_kept(tmp_path, which):
    """An fp16 VAE can give NaN; in the cache it would be found in every later run."""
    folder, family = folder_of_two(tmp_path), FAMILIES["krea2"]
    good = Counting(family).encoders
    bad = dataclasses.replace(good, **{which: lambda given: getattr(good, which)(given) * torch.nan})
    with pytest.raises(DatasetError, match=r"values that are not finite for (the caption of )?a\.png"):
        encode_pictures(read_folder(folder), family, 64, bad, Cache(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache")
    encode_pictures(read_folder(folder), family, 64, good, cache)
    assert cache.made == (4 if which == "picture" else 3)


def test_samples_hold_no_graph_and_no_inference_tensors(tmp_path):
    """Encoders whose weights require gradients, called under ComfyUI's inference mode."""
    folder, family = folder_of_two(tmp_path), FAMILIES["krea2"]
    conv, table = torch.nn.Conv2d(3, 16, 8, 8), torch.nn.Parameter(torch.ones(2, 4))
    encoders = Encoders(conv, lambda caption: table * 2, conv, "vae", "te")
    with torch.inference_mode():
        under = encode_pictures(read_folder(folder), family, 64, encoders)
    for sample in [*under, *encode_pictures(read_folder(folder), family, 64, encoders)]:
        for tensor in (sample.latents, sample.conditioning):
            assert not tensor.requires_grad
            assert not tensor.is_inference()


def test_encoded_samples_keep_mirror_image_weights_and_repeats(tmp_path):
    family = FAMILIES["krea2"]
    wanted = Sample(
        "3_cat/a.png", "x", torch.randn(16, 4, 6), torch.randn(3, 4), torch.randn(16, 4, 6), torch.rand(4, 6), 3
    )
    assert write_sample(tmp_path, wanted, family).name == "3_cat__a.png.safetensors"
    (found,) = read_samples(tmp_path, family, 4)
    assert found.repeats == 3
    assert torch.equal(found.flipped, wanted.flipped)
    assert torch.equal(found.weights, wanted.weights)


def encoded(family, name="a", width=4):
    return Sample(name, "a cat", torch.randn(family.latent_channels, 4, 6), torch.randn(3, width))


def test_encoded_samples_come_back(tmp_path, family_name):
    family = FAMILIES[family_name]
    wanted = encoded(family, "a.png")
    path = write_sample(tmp_path, wanted, family)
    assert path.name == "a.png.safetensors"
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
    never = Sample("never", "", torch.randn(16, 4, 4), torch.randn(3, 4), repeats=0)
    write_sample(tmp_path, never, krea2)
    (tmp_path / "text.safetensors").write_text("no")
    monkeypatch.setattr(samples, "some", lambda names, most: "; ".join(names))
    with pytest.raises(DatasetError) as caught:
        read_samples(tmp_path, krea2, 4)
    for part in (
        "other.safetensors was encoded for ideogram4",
        "wide.safetensors has conditioning [3, 5], the base wants [tokens, 4]",
        "odd.safetensors has latents [16, 3, 4], wanted sides that are multiples of 2",
        "mute.safetensors has conditioning [0, 4]",
        "never.safetensors has repeats '0', wanted 1 or more",
        "nameless.safetensors is no encoded sample",
        "nan.safetensors has values that are not finite",
        "text.safetensors cannot be read",
    ):
        assert part in str(caught.value)
    with pytest.raises(DatasetError, match="holds no encoded samples"):
        read_samples(tmp_path / "nothing", krea2, 4)


# --- a folder that is kept equal to the pictures ---------------------------------------------------------------------


def fill(folder, cache, family, **changes):
    """Encodes the pictures of a folder; what was asked of the encoders, and what came of it."""
    flip = changes.pop("flip", False)
    resolution = changes.pop("resolution", 64)
    counting = Counting(family, **changes)
    found = encode_into(cache, read_folder(folder), family, resolution, counting.encoders, flip)
    assert found.made == len(counting.asked)
    return counting.asked, found


def test_a_folder_of_samples_is_what_encoding_gives_and_a_second_time_encodes_nothing(tmp_path, family_name):
    family, folder = FAMILIES[family_name], folder_of_two(tmp_path)
    Image.new("L", (100, 70), 128).save(folder / "a.mask.png")
    (folder / "3_more").mkdir()
    Image.new("RGB", (64, 64), "green").save(folder / "3_more" / "a.png")
    (folder / "3_more" / "a.txt").write_text("caption a")
    asked, found = fill(folder, tmp_path / "cache", family, flip=True)
    assert asked.count("caption a") == 1  # two pictures share it
    assert (found.count, found.made, found.found) == (3, 3 * 2 + 2 + 1, 1)
    assert sum(found.buckets.values()) == 3
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    kept = read_samples(tmp_path / "cache", family, 4)
    wanted = encode_pictures(read_folder(folder), family, 64, Counting(family).encoders, flip=True)
    wanted = {sample.name: sample for sample in wanted}
    assert {sample.name for sample in kept} == set(wanted) == {"a.png", "b.png", "3_more/a.png"}
    for sample in kept:
        other = wanted[sample.name]
        assert (sample.caption, sample.repeats) == (other.caption, other.repeats)
        assert all(torch.equal(*pair) for pair in zip(sample.tensors, other.tensors, strict=True))
    assert torch.equal(read_empty(tmp_path / "cache"), torch.zeros(2, 4))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    asked, found = fill(folder, tmp_path / "cache", family, flip=True)
    assert (asked, found.made) == ([], 0)
    before.pop("empty-prompt.safetensors")  # small, and written each time
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}.items()


def test_vae_and_text_encoder_do_not_take_turns(tmp_path, family_name):
    """On a card that holds one of them, each turn would move gigabytes."""
    family, steps = FAMILIES[family_name], []
    counting = Counting(family)
    pictures = read_folder(folder_of_two(tmp_path))
    encode_into(tmp_path / "cache", pictures, family, 64, counting.encoders, True, lambda *step: steps.append(step))
    assert [isinstance(asked, str) for asked in counting.asked] == 4 * [False] + 3 * [True]
    assert steps == [(done, 4) for done in (1, 2, 3, 4)]


def test_a_folder_of_samples_encodes_what_changed_alone(tmp_path):
    family, folder, cache = FAMILIES["krea2"], folder_of_two(tmp_path), tmp_path / "cache"
    fill(folder, cache, family)
    (folder / "a.txt").write_text("another")
    assert fill(folder, cache, family)[0] == ["another"]
    assert {sample.caption for sample in read_samples(cache, family, 4)} == {"another", "caption b"}
    Image.new("RGB", (100, 70), "green").save(folder / "a.png")
    assert len(fill(folder, cache, family)[0]) == 1
    assert len(fill(folder, cache, family, flip=True)[0]) == 2
    assert len(fill(folder, cache, family, flip=True, picture_id="other")[0]) == 4
    assert sorted(fill(folder, cache, family, flip=True, picture_id="other", text_id="t")[0]) == [
        "", "another", "caption b"
    ]  # fmt: skip
    assert len(fill(folder, cache, family, resolution=128, text_id="t")[0]) == 2


def test_names_exchanged_between_pictures_give_each_its_own_latents(tmp_path):
    """The file that held the tensor is replaced before the other picture asks for it."""
    family, folder, cache = FAMILIES["krea2"], folder_of_two(tmp_path), tmp_path / "cache"
    fill(folder, cache, family)
    before = {sample.name: sample for sample in read_samples(cache, family, 4)}
    for ending in ("png", "txt"):
        (folder / f"a.{ending}").rename(folder / f"c.{ending}")
        (folder / f"b.{ending}").rename(folder / f"a.{ending}")
        (folder / f"c.{ending}").rename(folder / f"b.{ending}")
    fill(folder, cache, family)
    for sample in read_samples(cache, family, 4):
        other = before["b.png" if sample.name == "a.png" else "a.png"]
        assert sample.caption == other.caption
        assert torch.equal(sample.latents, other.latents)


def test_samples_of_pictures_that_are_gone_go_too_and_nothing_else(tmp_path):
    family, folder, cache = FAMILIES["krea2"], folder_of_two(tmp_path), tmp_path / "cache"
    fill(folder, cache, family)
    write_state(cache / "mine.safetensors", {"x": torch.ones(1)}, {})
    (cache / "notes.txt").write_text("mine")
    (folder / "b.png").unlink()
    (folder / "b.txt").unlink()
    fill(folder, cache, family)
    assert sorted(path.name for path in cache.iterdir()) == [
        "a.png.safetensors", "empty-prompt.safetensors", "mine.safetensors", "notes.txt"
    ]  # fmt: skip


def test_two_pictures_that_differ_in_their_ending_alone_are_two_samples(tmp_path):
    family, folder = FAMILIES["krea2"], folder_of_two(tmp_path)
    Image.new("RGB", (64, 64), "green").save(folder / "a.jpg")
    fill(folder, tmp_path / "cache", family)
    assert [sample.name for sample in read_samples(tmp_path / "cache", family, 4)] == ["a.jpg", "a.png", "b.png"]


def test_a_damaged_file_of_the_folder_is_made_again(tmp_path):
    family, folder, cache = FAMILIES["krea2"], folder_of_two(tmp_path), tmp_path / "cache"
    fill(folder, cache, family)
    for name in ("a.png", "empty-prompt"):
        path = cache / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:20])
    assert not has_empty(cache)
    with pytest.raises(DatasetError, match="does not hold the empty prompt"):
        read_empty(cache)
    asked, _ = fill(folder, cache, family)
    assert len(asked) == 3
    assert len(read_samples(cache, family, 4)) == 2
