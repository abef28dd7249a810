"""A folder of pictures: verified, captioned, cropped to buckets."""

from __future__ import annotations

import json

import numpy as np
import pytest
from graft_lora.trainer.errors import DatasetError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.pictures import bucket, read_folder, to_pixels, to_weights
from PIL import Image


def picture(folder, name, size=(80, 64), mode="RGB", caption="a cat", color=None, **save):
    image = Image.new(mode, size, color if color is not None else 0)
    image.save(folder / name, **save)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption)
    return folder / name


def test_reads_pictures_and_captions(tmp_path):
    picture(tmp_path, "b.png", caption="two  ")
    picture(tmp_path, "a.jpg", (64, 100), caption="one\n")
    found = read_folder(tmp_path)
    assert [(p.path.name, p.caption, p.size) for p in found] == [
        ("a.jpg", "one", (64, 100)),
        ("b.png", "two", (80, 64)),
    ]


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
    (tmp_path / "more" / "still").mkdir(parents=True)
    picture(tmp_path / "more" / "still", "deep.png")
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
    frames = [Image.new("RGB", (80, 64), color) for color in ("red", "blue")]
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
    Image.fromarray(np.zeros((80, 80), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "deep.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"deep\.png cannot be read .*8 bits per channel"):
        read_folder(tmp_path)


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90° to see it upright
    picture(tmp_path, "turned.jpg", (80, 70), exif=exif)
    assert read_folder(tmp_path)[0].size == (70, 80)


def test_the_middle_is_kept(tmp_path):
    image = Image.new("RGB", (210, 70))
    image.paste((255, 255, 255), (70, 0, 140, 70))
    image.save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    assert to_pixels(read_folder(tmp_path)[0], (32, 32)).min() > 0.8


@pytest.mark.parametrize("size", [(1024, 1024), (1920, 1080), (1080, 1920), (3000, 1000), (640, 480), (501, 499)])
@pytest.mark.parametrize(("resolution", "multiple"), [(1024, 16), (512, 16), (768, 64)])
def test_buckets_fit_the_multiple_the_resolution_and_the_aspect(size, resolution, multiple):
    width, height = bucket(size, resolution, multiple)
    assert width % multiple == height % multiple == 0
    assert width * height <= resolution**2
    assert width * height > 0.85 * resolution**2
    # The next bucket is up to one multiple away on each side.
    assert abs(np.log(width / height / (size[0] / size[1]))) < 2 * multiple / min(width, height)


def test_small_pictures_are_named(tmp_path):
    picture(tmp_path, "icon.png", (80, 32))
    with pytest.raises(DatasetError, match=r"icon\.png is 80 × 32; wanted at least 64 per side"):
        read_folder(tmp_path)


def test_subfolders_say_how_often_they_are_repeated(tmp_path):
    for name in ("3_cat", "1_rest"):
        (tmp_path / name).mkdir()
        picture(tmp_path / name, "a.png")
    picture(tmp_path, "a.png")
    found = {p.name: p.repeats for p in read_folder(tmp_path)}
    assert found == {"a.png": 1, "3_cat/a.png": 3, "1_rest/a.png": 1}


def test_trigger_and_default_caption(tmp_path):
    picture(tmp_path, "a.png", caption="a cat")
    picture(tmp_path, "b.png", caption="a Zorb on a wall")
    picture(tmp_path, "c.png", caption=None)
    picture(tmp_path, "d.png", caption="zorbing {red|blue}")
    found = read_folder(tmp_path, trigger="zorb", default_caption="a thing")
    wanted = ["zorb, a cat", "a Zorb on a wall", "zorb, a thing", "zorb, zorbing {red|blue}"]
    assert [p.caption for p in found] == wanted
    with pytest.raises(DatasetError, match=r"c\.png has no caption c\.txt"):
        read_folder(tmp_path, trigger="zorb")


def test_an_empty_caption_is_a_fault_unless_there_is_a_default(tmp_path):
    picture(tmp_path, "a.png", caption="  ")
    with pytest.raises(DatasetError, match=r"a\.txt is empty"):
        read_folder(tmp_path)
    assert read_folder(tmp_path, default_caption="x")[0].caption == "x"


GOOD = {"high_level_description": "a cat", "compositional_deconstruction": {"background": "a wall", "elements": []}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"a\.json is not JSON"),
        ("[]", "holds no JSON object"),
        (json.dumps({"high_level_description": "a cat"}), "lacks compositional_deconstruction"),
        (json.dumps({**GOOD, "mood": "calm"}), "has the unknown field mood"),
    ],
)
def test_structured_captions_are_checked(tmp_path, text, message):
    picture(tmp_path, "a.png", caption=None)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_folder(tmp_path, FAMILIES["ideogram4"])


def test_structured_captions_are_for_ideogram4_and_hold_the_trigger(tmp_path):
    picture(tmp_path, "a.png", caption=None)
    (tmp_path / "a.json").write_text(json.dumps({**GOOD, "style_description": "ink – brush"}, indent=2))
    (found,) = read_folder(tmp_path, FAMILIES["ideogram4"], trigger="zorb")
    assert json.loads(read_folder(tmp_path, FAMILIES["ideogram4"], "style")[0].caption) == json.loads(
        found.caption.replace("zorb,", "style,")
    ), "a field's name is no trigger"
    fields = json.loads(found.caption)
    assert fields["high_level_description"] == "zorb, a cat"
    assert fields["style_description"] == "ink – brush"
    assert "–" in found.caption
    assert "\n" not in found.caption
    with pytest.raises(DatasetError, match="Krea 2 takes no structured captions"):
        read_folder(tmp_path, FAMILIES["krea2"])
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(DatasetError, match=r"a\.png has two captions"):
        read_folder(tmp_path, FAMILIES["ideogram4"])


def test_a_mask_is_cropped_like_its_picture_and_averaged_over_cells(tmp_path):
    picture(tmp_path, "a.png", (128, 64))
    mask = Image.new("L", (128, 64), 0)
    mask.paste(255, (64, 0, 128, 64))
    mask.save(tmp_path / "a.mask.png")
    (found,) = read_folder(tmp_path)
    weights = to_weights(found, (64, 64), (4, 4))
    assert weights.tolist() == [[0.0, 0.0, 1.0, 1.0]] * 4


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (128, 64), 0), "is black: nothing of"),
        (Image.new("RGBA", (128, 64), (255, 255, 255, 0)), "is black: nothing of"),  # transparent all over
        (Image.new("L", (64, 64), 255), "wanted the same size"),
        (Image.fromarray(np.zeros((64, 128), np.uint16)), "8 bits per channel"),
        (None, "cannot be read"),
    ],
)
def test_masks_are_verified_with_the_pictures(tmp_path, mask, message):
    picture(tmp_path, "a.png", (128, 64))
    if mask is None:
        (tmp_path / "a.mask.png").write_bytes(b"broken")
    else:
        mask.save(tmp_path / "a.mask.png")
    with pytest.raises(DatasetError, match=rf"a\.mask\.png.*{message}"):
        read_folder(tmp_path)


def test_a_mask_of_no_picture_is_named(tmp_path):
    picture(tmp_path, "a.png")
    Image.new("L", (80, 64)).save(tmp_path / "b.mask.png")
    Image.new("L", (80, 64)).save(tmp_path / "a.mask.jpg")
    with pytest.raises(DatasetError, match=r"a\.mask\.jpg is the mask of no picture.*b\.mask\.png is the mask"):
        read_folder(tmp_path)
