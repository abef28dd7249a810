"""Pictures and captions → verified, cropped to buckets, encoded once; and batches of what was encoded.

The encoders are callables given by the caller; this file knows neither VAE nor text encoder.

Shape suffixes: B batch, C latent channels, T tokens, W conditioning width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from ..lora_convert import read_state, write_state
from .errors import DatasetError, some
from .families import Family

PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif")
SAMPLE_FORMAT = "graft-sample-1"

EncodePicture = Callable[[Tensor], Tensor]
"""(1, 3, h, w) in [-1, 1] → (1, C, h', w') normalised latents of the family."""
EncodeText = Callable[[str], Tensor]
"""caption → (T, W)."""


@dataclass(frozen=True)
class Sample:
    """One encoded picture: latents (C, h, w) and conditioning (T, W), with the name and caption they came from."""

    name: str
    caption: str
    latents: Tensor
    conditioning: Tensor


@dataclass(frozen=True)
class CaptionedPicture:
    """A verified picture of the dataset's folder."""

    path: Path
    caption: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Samples of one latent shape, each with its own caption.

    Attributes:
        latents: (B, C, h, w).
        conditioning: (B, T, W), padded with zeros at the end.
        mask: (B, T) bool, False at padding; None where all are of one length.
        names: of the samples.
    """

    latents: Tensor
    conditioning: Tensor
    mask: Tensor | None
    names: tuple[str, ...]


# --- pictures --------------------------------------------------------------------------------------------------------


def read_folder(folder: str | Path) -> list[CaptionedPicture]:
    """Opens and decodes every picture of a folder and reads the caption beside it (`name.txt`).

    Raises:
        DatasetError: no folder, no pictures, or the names of all that are bad, lack a caption or would be left out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a folder; wanted one with pictures and a .txt caption beside each")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    if not paths:
        raise DatasetError(f"{folder} holds no picture ({', '.join(PICTURES)})")
    pictures, faults = [], _left_out(folder, paths)
    for path in paths:
        caption = path.with_suffix(".txt")
        if not caption.is_file():
            faults.append(f"{path.name} has no caption {caption.name}")
            continue
        try:
            text = caption.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            faults.append(f"{caption.name} cannot be read as UTF-8 text ({error})")
            continue
        try:
            pictures.append(CaptionedPicture(path, text, _open(path).size))
        except Exception as error:  # Pillow's readers raise whatever their formats' parsers do
            faults.append(f"{path.name} cannot be read ({error})")
    if faults:
        raise DatasetError(f"{folder}: {some(faults, 5)}; mend or remove them")
    return pictures


def _left_out(folder: Path, paths: Sequence[Path]) -> list[str]:
    """What looks meant for training and would be left out: pictures of other kinds or in subfolders, idle captions."""
    taken = set(paths)
    stems = {path.stem for path in paths}
    faults = []
    for path in sorted(folder.iterdir()):
        kind = path.suffix.lower()
        if path.is_dir() and any(entry.suffix.lower() in PICTURES for entry in path.iterdir()):
            faults.append(f"the subfolder {path.name} holds pictures, which are not read: move them up")
        elif path.is_file() and path not in taken and kind in Image.registered_extensions():
            faults.append(f"{path.name} is a picture of a kind that is not read ({', '.join(PICTURES)})")
        elif kind == ".txt" and path.stem not in stems:
            faults.append(f"{path.name} is the caption of no picture")
    return faults


def _open(path: Path) -> Image.Image:
    """A picture, upright, in RGB. Decodes all of it, so that a damaged file is found here."""
    with Image.open(path) as file:
        # A phone's JPEG may carry a second, smaller frame (MPO): the first is the picture.
        if getattr(file, "n_frames", 1) > 1 and file.format != "MPO":
            raise ValueError("it is animated")
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I") or image.mode == "F":
            raise ValueError(f"it has {image.mode} pixels; save it with 8 bits per channel")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
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
    image = ImageOps.fit(_open(picture.path), size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1


@torch.no_grad()
def encode_folder(
    pictures: Sequence[CaptionedPicture],
    family: Family,
    resolution: int,
    encode_picture: EncodePicture,
    encode_text: EncodeText,
) -> list[Sample]:
    """Encodes each picture at its bucket and its caption, once."""
    multiple = family.latent_downscale * family.latent_multiple
    if resolution < multiple:
        raise DatasetError(f"resolution is {resolution}; {family.title} needs at least {multiple}")
    samples = []
    for picture in pictures:
        latents = encode_picture(to_pixels(picture, bucket(picture.size, resolution, multiple)))[0]
        conditioning = encode_text(picture.caption)
        # Under ComfyUI's inference mode an encoder gives tensors that cannot be trained on; copies made outside can.
        with torch.inference_mode(False):
            latents, conditioning = latents.clone(), conditioning.clone()
        samples.append(Sample(picture.path.name, picture.caption, latents.detach(), conditioning.detach()))
    return samples


# --- encoded samples on disk -----------------------------------------------------------------------------------------


def write_sample(folder: str | Path, sample: Sample, family: Family, overwrite: bool = False) -> Path:
    """Writes one encoded sample as `name.safetensors`, atomically."""
    path = Path(folder) / f"{Path(sample.name).stem}.safetensors"
    tensors = {"latents": sample.latents.contiguous(), "conditioning": sample.conditioning.contiguous()}
    metadata = {"format": SAMPLE_FORMAT, "family": family.name, "name": sample.name, "caption": sample.caption}
    write_state(path, tensors, metadata, overwrite)
    return path


def read_samples(folder: str | Path, family: Family, width: int) -> list[Sample]:
    """Reads every encoded sample of a folder.

    Args:
        folder: of files that `write_sample` made.
        family: whose latents they must be.
        width: W of the base's conditioning.

    Raises:
        DatasetError: no samples, or the names of those that do not fit the family or the base.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise DatasetError(f"{folder} holds no encoded samples (.safetensors files)")
    samples, faults = [], []
    for path in paths:
        try:
            tensors, metadata = read_state(path)
        except Exception as error:  # safetensors raises its own, undocumented kinds
            faults.append(f"{path.name} cannot be read ({error})")
            continue
        fault = _sample_fault(tensors, metadata, family, width)
        if fault:
            faults.append(f"{path.name} {fault}")
        else:
            samples.append(Sample(metadata["name"], metadata["caption"], tensors["latents"], tensors["conditioning"]))
    if faults:
        raise DatasetError(f"{folder}: {some(faults, 5)}")
    return samples


def _sample_fault(tensors: dict[str, Tensor], metadata: dict[str, str], family: Family, width: int) -> str | None:
    complete = {"name", "caption"} <= metadata.keys() and set(tensors) == {"latents", "conditioning"}
    if metadata.get("format") != SAMPLE_FORMAT or not complete:
        return f"is no encoded sample ({SAMPLE_FORMAT})"
    if metadata.get("family") != family.name:
        return f"was encoded for {metadata.get('family')}, the base is {family.title}"
    latents, conditioning = tensors["latents"], tensors["conditioning"]
    if latents.ndim != 3 or latents.shape[0] != family.latent_channels:
        return f"has latents {list(latents.shape)}, wanted [{family.latent_channels}, h, w]"
    if any(side % family.latent_multiple for side in latents.shape[1:]):
        return f"has latents {list(latents.shape)}, wanted sides that are multiples of {family.latent_multiple}"
    if conditioning.ndim != 2 or conditioning.shape[1] != width or not len(conditioning):
        return f"has conditioning {list(conditioning.shape)}, the base wants [tokens, {width}]: another text encoder?"
    if not (latents.isfinite().all() and conditioning.isfinite().all()):
        return "has values that are not finite: encode it again"
    return None


# --- batches ---------------------------------------------------------------------------------------------------------


def epochs(samples: Sequence[Sample], batch_size: int, generator: torch.Generator) -> Iterator[list[Sample]]:
    """Endless batches. Each epoch visits every sample once, in a new order, and mixes no two latent shapes.

    A batch at the end of a shape may be smaller than `batch_size`; none is dropped.
    """
    while True:
        shapes: dict[tuple[int, ...], list[Sample]] = {}
        for index in torch.randperm(len(samples), generator=generator).tolist():
            shapes.setdefault(tuple(samples[index].latents.shape), []).append(samples[index])
        batches = [
            group[start : start + batch_size] for group in shapes.values() for start in range(0, len(group), batch_size)
        ]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of one latent shape → a batch; conditioning is padded to the longest, and masked if it is unequal."""
    lengths = [len(sample.conditioning) for sample in samples]
    longest = max(lengths)
    conditioning = torch.stack([F.pad(s.conditioning, (0, 0, 0, longest - len(s.conditioning))) for s in samples])
    mask = None
    if min(lengths) < longest:
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    latents = torch.stack([sample.latents for sample in samples])
    return Batch(latents, conditioning, mask, tuple(sample.name for sample in samples))
