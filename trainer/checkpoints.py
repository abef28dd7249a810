"""Reads model files: any known way of storing a base → official names, scales applied, one tensor at a time.

Understood: safetensors in bf16, fp16, fp32; ComfyUI's fp8 (`weight_scale` per tensor or per row, marked by
`comfy_quant` tensors or `_quantization_metadata` in the header, or the older `scaled_fp8` with `scale_weight`); plain
fp8 casts, which have no scales; the prefixes `model.diffusion_model.` and `diffusion_model.`; diffusers' names, q, k
and v split or not; a diffusers folder, a folder of shards with their index, a folder that holds a single checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import (
    CheckpointError,
    MisshapedKeysError,
    MissingKeysError,
    NotAModelFileError,
    PickleFileError,
    TruncatedFileError,
    UnexpectedKeysError,
    UnreadableFormatError,
    WrongModelError,
    some,
)
from .families import FAMILIES, Family
from .tensor_files import Arena, TensorFile

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# The other parts of an all-in-one checkpoint, left aside with a word.
COMPANIONS = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.")
WEIGHT_SCALES = ("weight_scale", "scale_weight")
# Scales of activations: they calibrate 8-bit inference and do not belong to the weight.
ACTIVATION_SCALES = ("input_scale", "scale_input")
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
DENSE = {"BF16", "F16", "F32"}

MAX_HEADER = 100_000_000  # bytes, the limit of safetensors itself

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of a header, and the file that it stands in."""

    file: Path
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Part:
    """One stored tensor and the key of its scale, if it has one; each in its file, which shards make several."""

    file: Path
    key: str
    scale_file: Path | None = None
    scale_key: str | None = None


@dataclass
class ModelFile:
    """A base's file, checked: every parameter of the family is there, with the right shape and its scale.

    Attributes:
        path: the file, or the folder that holds it.
        files: all the files that it consists of.
        family: detected from the keys.
        config: the transformer's sizes, read from the shapes.
        parts: official name → the stored tensors that make it up, in row order (three for a split qkv).
        shapes: official name → shape.
        notes: what was left aside, one sentence each, for the user to read.
    """

    path: Path
    files: tuple[Path, ...]
    family: Family
    config: Any
    parts: dict[str, tuple[Part, ...]]
    shapes: dict[str, Shape]
    notes: list[str] = field(default_factory=list)

    def tensors(self, reuse: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields (official name, tensor) one at a time; scaled weights in fp32, others as stored, all on the CPU.

        Args:
            reuse: each tensor is valid only until the next is asked for, whose memory is the same. Without, each
                belongs to the caller.
        """
        arena = Arena() if reuse else None
        with ExitStack() as stack:
            open_files = {path: stack.enter_context(TensorFile(path, arena)) for path in self.files}
            for name, parts in self.parts.items():
                if arena is not None:
                    arena.reset()
                pieces = [_scaled(open_files, part) for part in parts]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                del pieces
                # diffusers folds Krea 2's modulation tables to (6, D): the same numbers in the same order.
                tensor = tensor.reshape(self.shapes[name])
                yield name, tensor
                # Not to be held while the next one is read.
                del tensor


def open_model_file(path: str | Path) -> ModelFile:
    """Checks a file from its header alone and says how to read it.

    Raises:
        CheckpointError: one of its kinds, before any tensor is read.
    """
    path = Path(path)
    files = find_files(path)
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        metadata |= header.pop("__metadata__", {})
        twice = sorted(header.keys() & entries.keys())
        if twice:
            raise UnexpectedKeysError(f"{path.name} has keys in two of its files: {some(twice)}")
        entries |= {key: Entry(file, str(v["dtype"]), tuple(v["shape"])) for key, v in header.items()}
    keys, notes = _own_keys(path, entries)
    family = _family(path, keys)
    markers = _format_markers(path, keys, entries, metadata)

    found = _by_official_name(path, family, keys)
    shapes, misfits = _official_shapes({key: entries[full].shape for key, full in keys.items()}, found)
    config = _config(path, family, shapes)
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in family.build(config).named_parameters()}
    _compare(path, family, shapes, wanted, misfits)

    scale_keys = {full for key, full in keys.items() if key.rpartition(".")[2] in WEIGHT_SCALES}
    parts = {}
    for name in wanted:
        members = found[name]
        # A stable order: the thirds of a split weight one after the other.
        ordered = [members[third] for third in sorted(members, key=lambda third: third or 0)]
        parts[name] = tuple(_part(path, key, keys, entries, bool(markers or scale_keys)) for key in ordered)
    idle = scale_keys - {part.scale_key for group in parts.values() for part in group}
    if idle:
        raise UnexpectedKeysError(f"{path.name} has scales that belong to no weight: {some(sorted(idle))}")
    for file in files:
        _try_to_open(file)
    return ModelFile(path, files, family, config, parts, wanted, notes)


def read_shapes(path: str | Path) -> dict[str, Shape]:
    """Official name → shape of every parameter of a base's file."""
    return open_model_file(path).shapes


def find_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files that a path means: itself, the shards of an index, or the one file of a folder.

    Raises:
        NotAModelFileError: there is no such path, or a folder in which it is not clear what is meant.
        MissingKeysError: an index that names shards which are not there.
        WrongModelError: the unconditional one of a pair of transformers.
    """
    if not path.exists():
        raise NotAModelFileError(f"{path}: there is no such file")
    if "unconditional" in path.name.lower():
        raise WrongModelError(
            f"{path.name} is the unconditional transformer of a pair, which no trainer trains; give the other one"
        )
    if path.is_file():
        return (path,)
    if (path / "transformer").is_dir():
        return find_files(path / "transformer")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _shards(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1 or indices:
        raise NotAModelFileError(
            f"{path} is a folder with {len(files)} .safetensors files and {len(indices)} indices; give the one file "
            "that is meant, or a diffusers folder"
        )
    return (files[0],)


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = tuple(index.parent / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAModelFileError(f"{index.name} is damaged; download it again") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise MissingKeysError(f"{index.name} names {len(files)} files, of which {some(missing)} are not there")
    return files


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, after checking that the file is one and is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        # This first: the length's own bytes may look like the start of another format.
        if not 2 <= length <= MAX_HEADER or file.read(1) != b"{":
            raise _not_safetensors(path, start, size)
        if 8 + length > size:
            raise TruncatedFileError(f"{path.name} ends inside its header at {size} bytes; download it again")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            entries = [entry for key, entry in header.items() if key != "__metadata__"]
            end = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
            assert all(isinstance(entry["dtype"], str) and isinstance(entry["shape"], list) for entry in entries)
        except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
            raise NotAModelFileError(f"{path.name}: the safetensors header is damaged ({error})") from error
    if 8 + length + end > size:
        raise TruncatedFileError(
            f"{path.name} is truncated: its header promises {8 + length + end} bytes, it has {size}; download it again"
        )
    return header


def _not_safetensors(path: Path, start: bytes, size: int) -> CheckpointError:
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return PickleFileError(
            f"{path.name} is a pickled checkpoint, which can run code on loading; "
            "convert it to safetensors with the tool that you trust, or download that version"
        )
    if start[:4] == b"GGUF":
        return UnreadableFormatError(f"{path.name} is a GGUF file, which cannot be trained on; use the bf16 file")
    return NotAModelFileError(
        f"{path.name} ({size} bytes) is not a safetensors file, whatever its name says; download it again"
    )


def _own_keys(path: Path, entries: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Key without prefix → key in the file, and notes of what an all-in-one file holds beside the transformer."""
    for prefix in PREFIXES:
        inside = {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)}
        if inside:
            outside = [key for key in entries if not key.startswith(prefix)]
            companions = [key for key in outside if key.startswith(COMPANIONS)]
            # Anything else is neither transformer nor companion: it is kept, and will be found unexpected.
            strangers = {key: key for key in outside if key not in set(companions)}
            twice = sorted(inside.keys() & strangers.keys())
            if twice:
                raise UnexpectedKeysError(f"{path.name} has keys both with and without {prefix!r}: {some(twice)}")
            notes = [f"left aside {len(companions)} tensors of the VAE and text encoder"] if companions else []
            return {**inside, **strangers}, notes
    return {key: key for key in entries}, []


def _is_auxiliary(key: str) -> bool:
    return key.rpartition(".")[2] in (*WEIGHT_SCALES, *ACTIVATION_SCALES, "comfy_quant", "scaled_fp8")


def _by_official_name(path: Path, family: Family, keys: Mapping[str, str]) -> dict[str, dict[int | None, str]]:
    """Official name → member of a fused parameter (None where it is stored whole) → key."""
    found: dict[str, dict[int | None, str]] = {}
    for key in keys:
        if not _is_auxiliary(key):
            name, member = family.official_name(key)
            members = found.setdefault(name, {})
            if member in members:
                raise UnexpectedKeysError(f"{path.name} has {name} twice: as {members[member]} and as {key}")
            members[member] = key
    return found


def _family(path: Path, keys: Mapping[str, str]) -> Family:
    for family in FAMILIES.values():
        if any(family.official_name(key)[0] == family.marker for key in keys):
            return family
    text = " ".join(list(keys)[:4000])
    wanted = " or ".join(family.title for family in FAMILIES.values())
    if "lora_" in text or "lokr_" in text or "hada_" in text:
        kind = "a LoRA; it goes on top of a base, it is none"
    elif "embed_tokens" in text or "self_attn.q_proj" in text or "text_model." in text:
        kind = "a text encoder"
    elif "decoder.conv_in" in text or "decoder.conv1" in text or "encoder.conv_in" in text:
        kind = "a VAE"
    else:
        kind = f"another model (its keys begin with {some(sorted(keys))})"
    raise WrongModelError(f"{path.name} is {kind}; wanted the diffusion model of {wanted}")


def _official_shapes(
    stored: Mapping[str, Shape], found: Mapping[str, Mapping[int | None, str]]
) -> tuple[dict[str, Shape], list[str]]:
    """Shape of each official parameter, and the fused parameters whose members are not all there or do not match."""
    shapes: dict[str, Shape] = {}
    misfits = []
    for name, members in found.items():
        if set(members) == {None}:
            shapes[name] = stored[members[None]]
        elif set(members) == {0, 1, 2}:
            rows = [stored[members[third]] for third in (0, 1, 2)]
            if len(set(rows)) > 1:
                misfits.append(f"{name} (its members are {some([str(list(shape)) for shape in rows])})")
            else:
                shapes[name] = (3 * rows[0][0], *rows[0][1:])
        else:
            misfits.append(f"{name} (from {some(sorted(members.values()))})")
    return shapes, misfits


def _config(path: Path, family: Family, shapes: Mapping[str, Shape]) -> Any:
    try:
        return family.config(shapes)
    except KeyError as error:
        raise MissingKeysError(
            f"{path.name} looks like {family.title} but has no {error.args[0]}; it is not the whole model"
        ) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise MisshapedKeysError(f"{path.name} looks like {family.title} but its shapes do not fit: {error}") from error


def _compare(
    path: Path, family: Family, shapes: Mapping[str, Shape], wanted: Mapping[str, Shape], misfits: list[str]
) -> None:
    missing = [name for name in wanted if name not in shapes] + misfits
    if missing:
        raise MissingKeysError(
            f"{path.name} lacks {len(missing)} of {len(wanted)} parameters of {family.title}: {some(missing)}"
        )
    unexpected = [name for name in shapes if name not in wanted]
    if unexpected:
        raise UnexpectedKeysError(
            f"{path.name} has {len(unexpected)} keys that {family.title} does not know: {some(unexpected)}"
        )
    misshaped = [
        f"{name} is {list(shapes[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if shapes[name] != shape and not _same_table(shapes[name], shape)
    ]
    if misshaped:
        raise MisshapedKeysError(f"{path.name} does not fit {family.title}: {some(misshaped)}")


def _same_table(found: Shape, wanted: Shape) -> bool:
    """A modulation table stored as (n, D) where n·D is wanted, or the reverse."""
    return (
        {len(found), len(wanted)} == {1, 2}
        and torch.Size(found).numel() == torch.Size(wanted).numel()
        and min(len(found), len(wanted)) == 1
    )


def _format_markers(
    path: Path, keys: Mapping[str, str], entries: Mapping[str, Entry], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Layer → quantisation format, from every marker that the file has; `scaled_fp8` marks the whole file as ''."""
    markers: dict[str, str] = {}
    if "_quantization_metadata" in metadata:
        try:
            layers = json.loads(metadata["_quantization_metadata"])["layers"]
            formats = {layer: settings["format"] for layer, settings in layers.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableFormatError(f"{path.name}: _quantization_metadata in its header is damaged") from error
        for layer, format in formats.items():
            short = next((layer.removeprefix(prefix) for prefix in PREFIXES if layer.startswith(prefix)), layer)
            markers[short] = format
    for key in (key for key in keys if key.endswith(".comfy_quant")):
        with safe_open(entries[keys[key]].file, framework="pt") as file:
            try:
                markers[key.removesuffix(".comfy_quant")] = json.loads(_bytes(file, keys[key]))["format"]
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableFormatError(f"{path.name}: {keys[key]} is damaged") from error
    if "scaled_fp8" in keys:
        markers[""] = "float8_e4m3fn"
    unreadable = {format for format in markers.values() if format not in FLOAT8.values()}
    if unreadable:
        raise UnreadableFormatError(
            f"{path.name} is quantised as {some(sorted(unreadable))}, which cannot be read yet; "
            "use the bf16 file or ComfyUI's fp8 file"
        )
    return markers


def _part(
    path: Path,
    key: str,
    keys: Mapping[str, str],
    entries: Mapping[str, Entry],
    stores_scales: bool,
) -> Part:
    file, dtype, shape = entries[keys[key]]
    layer = key.rpartition(".")[0]
    scales = [keys[f"{layer}.{suffix}"] for suffix in WEIGHT_SCALES if f"{layer}.{suffix}" in keys]
    if not key.endswith(".weight"):
        scales = []
    if dtype in FLOAT8:
        if not scales and stores_scales:
            raise UnreadableFormatError(
                f"{path.name}: {key} is fp8 in a file that stores scales, but its own scale is not there; "
                "reading it without would train on wrong weights"
            )
    elif dtype not in DENSE:
        raise UnreadableFormatError(f"{path.name}: {key} is stored as {dtype}, which cannot be read; use the bf16 file")
    if not scales:
        return Part(file, keys[key])
    scale_file, _, scale_shape = entries[scales[0]]
    if torch.Size(scale_shape).numel() not in (1, shape[0]):
        raise UnreadableFormatError(
            f"{path.name}: the scale of {key} is {list(scale_shape)}; wanted one number or one per row of {list(shape)}"
        )
    return Part(file, keys[key], scale_file, scales[0])


def _bytes(file: Any, key: str) -> bytes:
    return bytes(file.get_tensor(key).flatten().tolist())


def _try_to_open(path: Path) -> None:
    """Lets safetensors check what the checks above do not, before anything is loaded."""
    try:
        # Its mapping for numpy is read-only; that for torch would reserve the whole file's size on Windows.
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise NotAModelFileError(f"{path.name} is damaged ({error}); download it again") from error


def _scaled(open_files: Mapping[Path, Any], part: Part) -> Tensor:
    tensor = open_files[part.file].get_tensor(part.key)
    if part.scale_file is None:
        return tensor.float() if tensor.dtype.itemsize == 1 else tensor
    scale = open_files[part.scale_file].get_tensor(part.scale_key).float()
    return tensor.to(torch.float32, copy=True).mul_(scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1))
