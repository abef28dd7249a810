"""Encoded samples: what a picture and its caption become, made once and kept on disk.

The encoders are callables given by the caller; this file knows neither VAE nor text encoder.

Shape suffixes: C latent channels, T tokens, W conditioning width.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from ..lora_convert import read_state, write_state
from .errors import DatasetError, some
from .families import Family
from .pictures import CaptionedPicture, bucket, to_pixels, to_weights

SAMPLE_FORMAT = "graft-sample-1"
REQUIRED, OPTIONAL = ("latents", "conditioning"), ("flipped", "weights")  # the tensors of a `Sample`
CACHE_FORMAT = "graft-cache-1"
EMPTY, EMPTY_FORMAT = "empty-prompt.safetensors", "graft-empty-1"  # beside the samples of a folder
KEY = "key of "  # in a sample's header, before the tensor's name: a hash of everything that it depends on

T = TypeVar("T")
Key = tuple[object, ...]  # all that an encoded tensor depends on


@dataclass(frozen=True)
class Encoders:
    """What turns pictures and words into the family's latents and conditioning, and latents back into pictures.

    Everything that they are given is on the CPU.

    Attributes:
        picture: (1, 3, h, w) in [-1, 1] → (1, C, h', w') latents in the family's normalised space.
        text: caption → (T, W).
        decode: (1, C, h', w') → (1, 3, h, w).
        picture_id: names the VAE and its weights; another one makes other cache entries.
        text_id: names the text encoder and its weights, likewise.
    """

    picture: Callable[[Tensor], Tensor]
    text: Callable[[str], Tensor]
    decode: Callable[[Tensor], Tensor]
    picture_id: str
    text_id: str


@dataclass(frozen=True)
class Sample:
    """One encoded picture.

    Attributes:
        name: of the picture's file, within the dataset's folder.
        caption: what the conditioning was encoded from.
        latents: (C, h, w).
        conditioning: (T, W).
        flipped: latents of the mirrored picture; None where it is not to be mirrored.
        weights: (h, w) in [0, 1] of the loss; None where all of the picture counts.
        repeats: visits in one epoch.
        after_trunk: the conditioning has been through the transformer's text trunk and is (T, D).
    """

    name: str
    caption: str
    latents: Tensor
    conditioning: Tensor
    flipped: Tensor | None = None
    weights: Tensor | None = None
    repeats: int = 1
    after_trunk: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        found = (self.latents, self.conditioning, self.flipped, self.weights)
        return [tensor for tensor in found if tensor is not None]


class Cache:
    """Encoded tensors on disk, one file each, named by a hash of everything that they depend on.

    Attributes:
        made: how many were encoded by this object.
        found: how many were there already.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.made = self.found = 0

    def _path(self, dependencies: Key) -> Path | None:
        return None if self.folder is None else self.folder / f"{_name_of(dependencies)}.safetensors"

    def has(self, dependencies: Key) -> bool:
        """Whether the tensor for these dependencies is on disk."""
        path = self._path(dependencies)
        return path is not None and path.is_file()

    def get(self, what: str, dependencies: Key, make: Callable[[], Tensor]) -> Tensor:
        """The tensor for these dependencies, from disk or made now and written, on the CPU and free of any graph.

        Raises:
            DatasetError: a damaged cache file, or an encoder that gave values which are not finite for `what`.
        """
        path = self._path(dependencies)
        if path is not None and path.is_file():
            self.found += 1
            return _read_cached(path)
        tensor = _made(what, make)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_state(path, {"tensor": tensor}, {"format": CACHE_FORMAT}, overwrite=True)
        self.made += 1
        return tensor


def _name_of(dependencies: Key) -> str:
    return hashlib.sha256(json.dumps([CACHE_FORMAT, *dependencies]).encode()).hexdigest()[:40]


def _made(what: str, make: Callable[[], Tensor]) -> Tensor:
    """What an encoder gives, on the CPU and free of any graph.

    Raises:
        DatasetError: it has values that are not finite.
    """
    with torch.no_grad():
        made = make()
    # Under ComfyUI's inference mode an encoder gives tensors that cannot be trained on; copies made outside can.
    with torch.inference_mode(False):
        tensor = made.detach().cpu().clone().contiguous()
    if not tensor.isfinite().all():
        raise DatasetError(f"the encoder gave values that are not finite for {what}; use it in bf16 or fp32")
    return tensor


def _read_cached(path: Path) -> Tensor:
    try:
        return read_state(path)[0]["tensor"]
    except Exception as error:  # safetensors raises its own, undocumented kinds
        raise DatasetError(f"{path} in the cache is damaged ({error}); remove it to have it made again") from error


@dataclass(frozen=True)
class PlacedPicture:
    """A picture at its bucket.

    Attributes:
        picture: as it was read.
        size: width and height of the bucket, in pixels.
        weights: (h, w) of its mask at the latents' cells; None where all of it counts.
    """

    picture: CaptionedPicture
    size: tuple[int, int]
    weights: Tensor | None


def check_held_out(held_out: int, count: int, what: str = "samples") -> None:
    """Something is left to train on.

    Raises:
        DatasetError: nothing is.
    """
    if held_out >= count:
        raise DatasetError(f"held_out is {held_out} of {count} {what}: nothing would be left to train on")


def place_pictures(pictures: Sequence[CaptionedPicture], family: Family, resolution: int) -> list[PlacedPicture]:
    """Chooses each picture's bucket and crops its mask to it; no encoder is needed.

    Raises:
        DatasetError: a resolution below the family's least, or a mask of which the crop leaves nothing.
    """
    multiple = family.latent_downscale * family.latent_multiple
    if resolution < multiple:
        raise DatasetError(f"resolution is {resolution}; {family.title} needs at least {multiple}")
    placed = []
    for picture in pictures:
        width, height = bucket(picture.size, resolution, multiple)
        cells = (height // family.latent_downscale, width // family.latent_downscale)
        placed.append(PlacedPicture(picture, (width, height), to_weights(picture, (width, height), cells)))
    return placed


def encode_pictures(
    pictures: Sequence[CaptionedPicture],
    family: Family,
    resolution: int,
    encoders: Encoders,
    cache: Cache | None = None,
    flip: bool = False,
) -> list[Sample]:
    """Encodes each picture at its bucket, mirrored too if asked, and each caption, unless the cache has them.

    Raises:
        DatasetError: what `place_pictures` refuses, before an encoder is called, or latents of another shape than the
            family's.
    """
    cache = cache or Cache()
    samples = []
    for placed in place_pictures(pictures, family, resolution):
        picture = placed.picture
        digest = _digest(picture)
        latents = [
            cache.get(
                picture.name,
                _latents_key(placed, digest, flipped, family, encoders),
                partial(_latents, placed, flipped, family, encoders),
            )
            for flipped in _orientations(flip)
        ]
        conditioning = cache.get(
            f"the caption of {picture.name}",
            _conditioning_key(picture.caption, family, encoders),
            partial(encoders.text, picture.caption),
        )
        mirrored = latents[1] if flip else None
        samples.append(
            Sample(picture.name, picture.caption, latents[0], conditioning, mirrored, placed.weights, picture.repeats)
        )
    return samples


def unencoded(
    placed: Sequence[PlacedPicture], family: Family, encoders: Encoders, cache: Cache, flip: bool
) -> tuple[list[tuple[int, int]], list[str]]:
    """What the cache lacks: the sizes of pictures, of mirrored ones too if asked, and the captions, each one once."""
    sizes: dict[Key, tuple[int, int]] = {}
    captions: dict[Key, str] = {}
    for entry in placed:
        digest = _digest(entry.picture)
        for flipped in _orientations(flip):
            sizes[_latents_key(entry, digest, flipped, family, encoders)] = entry.size
        caption = entry.picture.caption
        captions[_conditioning_key(caption, family, encoders)] = caption
    return (
        [size for key, size in sizes.items() if not cache.has(key)],
        [caption for key, caption in captions.items() if not cache.has(key)],
    )


def _orientations(flip: bool) -> tuple[bool, ...]:
    return (False, True) if flip else (False,)


def _digest(picture: CaptionedPicture) -> str:
    return hashlib.sha256(picture.path.read_bytes()).hexdigest()


def _latents_key(placed: PlacedPicture, digest: str, flipped: bool, family: Family, encoders: Encoders) -> Key:
    return ("latents", family.name, encoders.picture_id, digest, placed.size, flipped)


def _conditioning_key(caption: str, family: Family, encoders: Encoders) -> Key:
    return ("conditioning", family.name, encoders.text_id, caption)


def _latents(placed: PlacedPicture, flipped: bool, family: Family, encoders: Encoders) -> Tensor:
    pixels = to_pixels(placed.picture, placed.size)
    latents = encoders.picture(pixels.flip(-1) if flipped else pixels)[0]
    width, height = (side // family.latent_downscale for side in placed.size)
    if latents.shape != (family.latent_channels, height, width):
        raise DatasetError(
            f"the VAE gives latents {list(latents.shape)} for {placed.picture.name} at {placed.size[0]} × "
            f"{placed.size[1]}, {family.title} wants {[family.latent_channels, height, width]}: another VAE?"
        )
    return latents


# --- whole samples on disk ------------------------------------------------------------------------------------------


def write_sample(
    folder: str | Path,
    sample: Sample,
    family: Family,
    overwrite: bool = False,
    keys: Mapping[str, str] | None = None,
) -> Path:
    """Writes one encoded sample as `name.safetensors`, atomically; `keys` goes into its header."""
    path = _sample_path(folder, sample.name)
    tensors = {
        name: tensor.contiguous() for name in (*REQUIRED, *OPTIONAL) if (tensor := getattr(sample, name)) is not None
    }
    metadata = _header(sample.name, sample.caption, sample.repeats, family)
    write_state(path, tensors, {**metadata, **(keys or {})}, overwrite)
    return path


def _sample_path(folder: str | Path, name: str) -> Path:
    # The name's ending stays: a.png and a.jpg are two pictures.
    return Path(folder) / f"{name.replace('/', '__')}.safetensors"


def _header(name: str, caption: str, repeats: int, family: Family) -> dict[str, str]:
    return {
        "format": SAMPLE_FORMAT,
        "family": family.name,
        "name": name,
        "caption": caption,
        "repeats": str(repeats),
    }


@dataclass(frozen=True)
class EncodedFolder:
    """What `encode_into` did.

    Attributes:
        count: samples in the folder.
        made: tensors that were encoded.
        found: tensors that were there already.
        bytes: of the folder's files.
        buckets: (width, height) in pixels → how many pictures.
    """

    count: int
    made: int
    found: int
    bytes: int
    buckets: dict[tuple[int, int], int] = field(default_factory=dict)


def encode_into(
    folder: str | Path,
    pictures: Sequence[CaptionedPicture],
    family: Family,
    resolution: int,
    encoders: Encoders,
    flip: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedFolder:
    """Makes the folder hold the encoded samples of these pictures and the empty prompt, and no other sample.

    A tensor that stands in one of its files already, from the same picture, bucket and VAE, or the same caption and
    text encoder, is not encoded again.

    Args:
        folder: made where it is not there; files that are no samples are left alone.
        pictures: from `read_folder`.
        family: whose latents and conditioning they become.
        resolution: see `place_pictures`.
        encoders: of the family.
        flip: encode the mirrored pictures too.
        progress: called with the number of encodings done and of all; a sample is two.

    Raises:
        DatasetError: what `encode_pictures` refuses.
    """
    folder = Path(folder)
    placed = place_pictures(pictures, family, resolution)
    folder.mkdir(parents=True, exist_ok=True)
    store = _Store(folder, family, encoders, flip)
    done = iter(range(1, 2 * len(placed) + 1))

    def told(made: T) -> T:
        if progress is not None:
            progress(next(done), 2 * len(placed))
        return made

    # First all latents, which are small: VAE and text encoder must not take turns on a card that holds one of them.
    latents = [told(store.latents(entry)) for entry in placed]
    store.empty()
    written = {told(store.sample(entry, *made)) for entry, made in zip(placed, latents, strict=True)}
    for path, metadata in _sample_headers(folder):
        if path not in written and metadata.get("format") == SAMPLE_FORMAT:
            path.unlink()
    size = sum(path.stat().st_size for path in (*written, folder / EMPTY))
    buckets = Counter(entry.size for entry in placed)
    return EncodedFolder(len(placed), store.made, store.found, size, dict(buckets))


class _Store:
    """A folder of samples, and which of their tensors can be used again."""

    def __init__(self, folder: Path, family: Family, encoders: Encoders, flip: bool) -> None:
        self.folder, self.family, self.encoders, self.flip = folder, family, encoders, flip
        self.made = self.found = 0
        self.places: dict[str, tuple[Path, str]] = {}
        for path, metadata in _sample_headers(folder):
            for entry, key in metadata.items():
                if entry.startswith(KEY):
                    self.places[key] = path, entry.removeprefix(KEY)

    def latents(self, entry: PlacedPicture) -> tuple[dict[str, Key], dict[str, Tensor]]:
        """What each tensor of a picture's sample depends on, and its latents: none where the whole sample is there."""
        picture, digest = entry.picture, _digest(entry.picture)
        keys = {"latents": _latents_key(entry, digest, False, self.family, self.encoders)}
        if self.flip:
            keys["flipped"] = _latents_key(entry, digest, True, self.family, self.encoders)
        keys["conditioning"] = _conditioning_key(picture.caption, self.family, self.encoders)
        if entry.weights is not None:
            keys["weights"] = ("weights", hashlib.sha256(entry.weights.numpy().tobytes()).hexdigest())
        if self._is_there(picture, keys):
            return keys, {}
        return keys, {
            part: self._tensor(
                _name_of(keys[part]),
                picture.name,
                partial(_latents, entry, part == "flipped", self.family, self.encoders),
            )
            for part in ("latents", "flipped")
            if part in keys
        }

    def sample(self, entry: PlacedPicture, keys: dict[str, Key], latents: dict[str, Tensor]) -> Path:
        """The file of one picture, written unless it is there with all its tensors; the rest is from `latents`."""
        picture = entry.picture
        path = _sample_path(self.folder, picture.name)
        if not latents:
            self.found += len(keys) - ("weights" in keys)
            return path
        names = self._names(keys)
        conditioning = self._tensor(
            names[KEY + "conditioning"],
            f"the caption of {picture.name}",
            partial(self.encoders.text, picture.caption),
        )
        sample = Sample(
            picture.name,
            picture.caption,
            latents["latents"],
            conditioning,
            latents.get("flipped"),
            entry.weights,
            picture.repeats,
        )
        write_sample(self.folder, sample, self.family, overwrite=True, keys=names)
        self.places |= {name: (path, part.removeprefix(KEY)) for part, name in names.items()}
        return path

    def _is_there(self, picture: CaptionedPicture, keys: dict[str, Key]) -> bool:
        path = _sample_path(self.folder, picture.name)
        wanted = {**_header(picture.name, picture.caption, picture.repeats, self.family), **self._names(keys)}
        return path.is_file() and _metadata(path) == wanted

    @staticmethod
    def _names(keys: dict[str, Key]) -> dict[str, str]:
        """As they stand in a sample's header."""
        return {KEY + part: _name_of(key) for part, key in keys.items()}

    def empty(self) -> None:
        """The file of the empty prompt."""
        name = _name_of(_conditioning_key("", self.family, self.encoders))
        tensor = self._tensor(name, "the empty prompt", partial(self.encoders.text, ""))
        write_empty(self.folder, tensor, {KEY + "conditioning": name})

    def _tensor(self, key: str, what: str, make: Callable[[], Tensor]) -> Tensor:
        place = self.places.get(key)
        # A file of the folder may have been replaced since it was looked through.
        if place is not None and place[0].is_file() and _metadata(place[0]).get(KEY + place[1]) == key:
            with safe_open(place[0], framework="pt") as file:
                self.found += 1
                return file.get_tensor(place[1])
        self.made += 1
        return _made(what, make)


def _metadata(path: Path) -> dict[str, str]:
    """The header of a file; empty for one that cannot be read, which is then as if it were not there."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except Exception:  # safetensors raises its own, undocumented kinds
        return {}


def _sample_headers(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield path, _metadata(path)


def write_empty(folder: str | Path, conditioning_TW: Tensor, keys: Mapping[str, str] | None = None) -> None:
    """Writes the empty prompt's conditioning beside the samples of a folder, in place of a former one."""
    metadata = {"format": EMPTY_FORMAT, **(keys or {})}
    write_state(Path(folder) / EMPTY, {"conditioning": conditioning_TW.contiguous()}, metadata, overwrite=True)


def has_empty(folder: str | Path) -> bool:
    """Whether `read_empty` finds something."""
    return _metadata(Path(folder) / EMPTY).get("format") == EMPTY_FORMAT


def read_empty(folder: str | Path) -> Tensor:
    """(T, W) of the empty prompt beside the samples of a folder.

    Raises:
        DatasetError: it is not there, or damaged.
    """
    if not has_empty(folder):
        raise DatasetError(f"{folder} does not hold the empty prompt ({EMPTY}): encode the pictures again")
    return read_state(Path(folder) / EMPTY)[0]["conditioning"]


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
    paths = [path for path in paths if path.name != EMPTY]
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
            repeats = int(metadata.get("repeats", 1))
            latents, conditioning = (tensors[name] for name in REQUIRED)
            flipped, weights = (tensors.get(name) for name in OPTIONAL)
            name, caption = metadata["name"], metadata["caption"]
            samples.append(Sample(name, caption, latents, conditioning, flipped, weights, repeats))
    if faults:
        raise DatasetError(f"{folder}: {some(faults, 5)}")
    return samples


def _sample_fault(tensors: dict[str, Tensor], metadata: dict[str, str], family: Family, width: int) -> str | None:
    known = set(REQUIRED) <= tensors.keys() <= {*REQUIRED, *OPTIONAL}
    complete = {"name", "caption"} <= metadata.keys() and known
    if metadata.get("format") != SAMPLE_FORMAT or not complete:
        return f"is no encoded sample ({SAMPLE_FORMAT})"
    if metadata.get("family") != family.name:
        return f"was encoded for {metadata.get('family')}, the base is {family.title}"
    repeats = metadata.get("repeats", "1")
    if not repeats.isdigit() or int(repeats) < 1:
        return f"has repeats {repeats!r}, wanted 1 or more"
    latents, conditioning = tensors["latents"], tensors["conditioning"]
    if latents.ndim != 3 or latents.shape[0] != family.latent_channels:
        return f"has latents {list(latents.shape)}, wanted [{family.latent_channels}, h, w]"
    if any(side % family.latent_multiple for side in latents.shape[1:]):
        return f"has latents {list(latents.shape)}, wanted sides that are multiples of {family.latent_multiple}"
    if conditioning.ndim != 2 or conditioning.shape[1] != width or not len(conditioning):
        return f"has conditioning {list(conditioning.shape)}, the base wants [tokens, {width}]: another text encoder?"
    flipped, weights = tensors.get("flipped", latents), tensors.get("weights", latents[0])
    if flipped.shape != latents.shape or weights.shape != latents.shape[1:]:
        return f"has flipped {list(flipped.shape)} and weights {list(weights.shape)} for latents {list(latents.shape)}"
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        return "has values that are not finite: encode it again"
    return None
