"""A folder of pictures and captions: every file opened and verified first, then cropped to aspect-ratio buckets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .errors import DatasetError, some
from .families import Family

PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif")
MASK = ".mask"  # cat.mask.png weighs the loss on cat.jpg
SMALLEST = 64  # pixels per side; less is a thumbnail, not a picture to learn from

# Ideogram 4's structured captions; the first two are always there, as in diffusers' own prompt enhancer.
JSON_FIELDS = ("high_level_description", "compositional_deconstruction", "style_description")
JSON_REQUIRED = JSON_FIELDS[:2]


@dataclass(frozen=True)
class CaptionedPicture:
    """A verified picture of the dataset's folder: its size is that of the upright picture."""

    path: Path
    name: str
    caption: str
    size: tuple[int, int]
    mask: Path | None = None
    repeats: int = 1


def read_folder(
    folder: str | Path, family: Family | None = None, trigger: str = "", default_caption: str = ""
) -> list[CaptionedPicture]:
    """Opens and decodes every picture of a folder, its caption (`name.txt`, or `name.json`) and its mask.

    Args:
        folder: of pictures. Subfolders named `N_something` are read too, their pictures N times an epoch.
        family: whose structured captions a `.json` may be; None where there can be none.
        trigger: a word put before each caption that does not hold it yet.
        default_caption: of pictures without a caption; empty, such pictures are faults.

    Raises:
        DatasetError: no folder, no pictures, or the names of all that are bad, lack a caption or would be left out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a folder; wanted one with pictures and a .txt caption beside each")
    pictures: list[CaptionedPicture] = []
    faults: list[str] = []
    for place, repeats in _places(folder):
        paths = [path for path in sorted(place.iterdir()) if _is_picture(path)]
        faults += _left_out(place, paths, top=place == folder)
        for path in paths:
            try:
                caption = read_caption(path, family, default_caption, trigger)
                size = _open(path).size
                if min(size) < SMALLEST:
                    raise DatasetError(f"{path.name} is {size[0]} × {size[1]}; wanted at least {SMALLEST} per side")
                mask = _mask_of(path, size)
                name = path.relative_to(folder).as_posix()
                pictures.append(CaptionedPicture(path, name, caption, size, mask, repeats))
            except DatasetError as error:
                faults.append(str(error))
            except Exception as error:  # Pillow's readers raise whatever their formats' parsers do
                faults.append(f"{path.name} cannot be read ({error})")
    if faults:
        raise DatasetError(f"{folder}: {some(faults, 5)}; mend or remove them")
    if not pictures:
        raise DatasetError(f"{folder} holds no picture ({', '.join(PICTURES)})")
    return pictures


def read_caption(picture: Path, family: Family | None, default: str, trigger: str) -> str:
    """The caption beside a picture; a structured one as compact JSON, which is what the text encoder reads.

    The trigger is put before it, or before a structured one's first field, unless it is there already.
    """
    text_file, json_file = picture.with_suffix(".txt"), picture.with_suffix(".json")
    path = json_file if json_file.is_file() else text_file
    if not path.is_file():
        if default:
            return _with_trigger(default, trigger)
        raise DatasetError(f"{picture.name} has no caption {text_file.name}")
    if json_file.is_file() and text_file.is_file():
        raise DatasetError(f"{picture.name} has two captions, {text_file.name} and {json_file.name}")
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path.name} cannot be read as UTF-8 text ({error})") from error
    if path == text_file:
        if not text and not default:
            raise DatasetError(f"{path.name} is empty; write a caption or set a default one")
        return _with_trigger(text or default, trigger)
    if family is None or not family.json_captions:
        raise DatasetError(f"{path.name}: {family.title if family else 'this model'} takes no structured captions")
    return _structured(path, text, trigger)


def _structured(path: Path, text: str, trigger: str) -> str:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{path.name} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise DatasetError(f"{path.name} holds no JSON object with the fields {', '.join(JSON_FIELDS)}")
    missing = [name for name in JSON_REQUIRED if not fields.get(name)]
    unknown = [name for name in fields if name not in JSON_FIELDS]
    if missing or unknown:
        fault = f"lacks {some(missing)}" if missing else f"has the unknown field {some(unknown)}"
        raise DatasetError(f"{path.name} {fault}; wanted {', '.join(JSON_FIELDS)} (the last one may be left out)")
    if not re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", json.dumps(list(fields.values())), re.IGNORECASE):
        fields[JSON_FIELDS[0]] = _with_trigger(str(fields[JSON_FIELDS[0]]), trigger)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _with_trigger(text: str, trigger: str) -> str:
    """The trigger before a text that does not hold it as a word of its own."""
    holds = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE)
    return text if not trigger or holds else f"{trigger}, {text}"


def _places(folder: Path) -> list[tuple[Path, int]]:
    """The folder itself, and its subfolders whose name says how often they are repeated."""
    places = [(folder, 1)]
    for path in sorted(folder.iterdir()):
        found = re.match(r"(\d+)_", path.name)
        if path.is_dir() and found and int(found[1]) > 0:
            places.append((path, int(found[1])))
    return places


def _is_picture(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in PICTURES and not path.stem.endswith(MASK)


def _mask_of(picture: Path, size: tuple[int, int]) -> Path | None:
    """The mask beside a picture of this size, if there is one.

    Raises:
        DatasetError: it cannot be read, is of another size, or black all over.
    """
    path = picture.with_name(f"{picture.stem}{MASK}.png")
    if not path.is_file():
        return None
    try:
        mask = _open_mask(path)
    except Exception as error:  # Pillow's readers raise whatever their formats' parsers do
        raise DatasetError(f"{path.name} cannot be read ({error})") from error
    if mask.size != size:
        raise DatasetError(f"{path.name} is {mask.size}, its picture is {size}; wanted the same size")
    if mask.getextrema() == (0, 0):
        raise DatasetError(f"{path.name} is black: nothing of {picture.name} would be learned")
    return path


def _open_mask(path: Path) -> Image.Image:
    """A mask in 8-bit grey; what is transparent in it is left out, like black."""
    return _open(path, "black").convert("L")


def _left_out(folder: Path, paths: Sequence[Path], top: bool) -> list[str]:
    """What looks meant for training and would be left out: pictures of other kinds or in subfolders, idle captions."""
    stems = {path.stem for path in paths}
    read = {place for place, _ in _places(folder)} if top else set()
    faults = []
    for path in sorted(folder.iterdir()):
        kind = path.suffix.lower()
        if path.is_dir():
            if path not in read and not path.name.startswith(".") and any(map(_is_picture, path.rglob("*"))):
                faults.append(
                    f"the subfolder {path.name} holds pictures, which are not read: move them up, or name it "
                    "1_something to have them read"
                )
        elif path.stem.endswith(MASK) and kind in Image.registered_extensions():
            if kind != ".png" or path.stem.removesuffix(MASK) not in stems:
                faults.append(f"{path.name} is the mask of no picture; wanted name{MASK}.png beside name")
        elif kind not in PICTURES and kind in Image.registered_extensions():
            faults.append(f"{path.name} is a picture of a kind that is not read ({', '.join(PICTURES)})")
        elif kind in (".txt", ".json") and path.stem not in stems:
            faults.append(f"{path.name} is the caption of no picture")
    return faults


def _open(path: Path, behind: str = "white") -> Image.Image:
    """A picture, upright, in RGB, with a colour behind what is transparent. Decodes all of it, so that a damaged file
    is found here."""
    with Image.open(path) as file:
        # A phone's JPEG may carry a second, smaller frame (MPO): the first is the picture.
        if getattr(file, "n_frames", 1) > 1 and file.format != "MPO":
            raise ValueError("it is animated")
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I") or image.mode == "F":
            raise ValueError(f"it has {image.mode} pixels; save it with 8 bits per channel")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, behind), image)
        return image.convert("RGB")


def bucket(size: tuple[int, int], resolution: int, multiple: int) -> tuple[int, int]:
    """The width and height, multiples of `multiple` and of at most resolution² pixels, nearest in aspect to `size`."""
    aspect = size[0] / size[1]
    best = (multiple, multiple)
    for width in range(multiple, 4 * resolution + 1, multiple):
        height = min(resolution**2 // width, round(4 * resolution)) // multiple * multiple
        if height < multiple:
            break
        if _misfit((width, height), aspect, resolution) < _misfit(best, aspect, resolution):
            best = (width, height)
    return best


def _misfit(size: tuple[int, int], aspect: float, resolution: int) -> float:
    """How far a bucket is from the aspect, and how much of the resolution it leaves unused."""
    return abs(math.log(size[0] / size[1] / aspect)) + (1 - size[0] * size[1] / resolution**2)


def to_pixels(picture: CaptionedPicture, size: tuple[int, int]) -> Tensor:
    """The middle of a picture at a bucket's size: (1, 3, h, w) in [-1, 1]."""
    return pixels_of(ImageOps.fit(_open(picture.path), size, Image.Resampling.LANCZOS))


def pixels_of(image: Image.Image) -> Tensor:
    """An RGB image as (1, 3, h, w) in [-1, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1


def to_weights(picture: CaptionedPicture, size: tuple[int, int], cells: tuple[int, int]) -> Tensor | None:
    """The picture's mask, cropped like the picture, as weights (h, w) in [0, 1] of its latents' cells.

    Raises:
        DatasetError: the crop left nothing of it.
    """
    if picture.mask is None:
        return None
    fitted = ImageOps.fit(_open_mask(picture.mask), size, Image.Resampling.BOX).resize(
        (cells[1], cells[0]), Image.Resampling.BOX
    )
    weights = torch.from_numpy(np.array(fitted)).float() / 255
    if not weights.any():
        raise DatasetError(f"{picture.mask.name} is black where {picture.name} is cropped to: nothing would be learned")
    return weights
