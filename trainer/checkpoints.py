"""Reads model files: any known way of storing a base → official names, scales applied, one tensor at a time.

Understood: safetensors whose weights are stored in one of the ways of `stored_weights` (bf16, fp16, fp32; plain fp8
casts; ComfyUI's fp8, int8_tensorwise, nvfp4, mxfp8, marked by `comfy_quant` tensors or `_quantization_metadata` in the
header, or the older `scaled_fp8`; bitsandbytes' nf4, fp4, int8); the prefixes `model.diffusion_model.` and
`diffusion_model.`; diffusers' names, q, k and v split or not; a diffusers folder, a folder of shards with their index,
a folder that holds a single checkpoint. What cannot be read is refused by its name (`unreadable_formats`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..lora_convert.sizes import Sizes
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
from .stored_weights import (
    COMFY_FORMATS,
    IGNORED,
    WAY_OUT,
    Entry,
    Layer,
    Plain,
    Shape,
    StoredWeight,
    bytes_of,
    is_auxiliary,
    understand,
)
from .tensor_files import Arena, TensorFile
from .unreadable_formats import refuse_by_config, refuse_by_keys

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# The other parts of an all-in-one checkpoint, left aside with a word.
COMPANIONS = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.")

MAX_HEADER = 100_000_000  # bytes, the limit of safetensors itself


class OpenFiles(ExitStack):
    """Safetensors files that stay open while this context lasts, each opened at the first tensor that is read."""

    def __init__(self, arena: Arena | None = None) -> None:
        super().__init__()
        self._arena = arena
        self._files: dict[Path, TensorFile] = {}

    def read(self, entry: Entry) -> Tensor:
        if entry.file not in self._files:
            self._files[entry.file] = self.enter_context(TensorFile(entry.file, self._arena))
        return self._files[entry.file].get_tensor(entry.key)


@dataclass
class ModelFile:
    """A base's file, checked: every parameter of the family is there, with the right shape and its scale.

    Attributes:
        path: the file, or the folder that holds it.
        files: all the files that it consists of.
        family: detected from the keys.
        config: the transformer's sizes, read from the shapes.
        weights: official name → the stored weights that make it up, in row order (three for a split qkv).
        shapes: official name → shape.
        notes: what was left aside, one sentence each, for the user to read.
    """

    path: Path
    files: tuple[Path, ...]
    family: Family
    config: Any
    weights: dict[str, tuple[StoredWeight, ...]]
    shapes: dict[str, Shape]
    notes: list[str] = field(default_factory=list)

    def tensors(self, reuse: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields (official name, tensor) one at a time: dense ones as stored, others in fp32, all on the CPU.

        Args:
            reuse: each tensor is valid only until the next is asked for, whose memory is the same. Without, each
                belongs to the caller.
        """
        arena = Arena() if reuse else None
        with OpenFiles(arena) as files:
            for name in self.weights:
                if arena is not None:
                    arena.reset()
                tensor = self.read(files, name)
                yield name, tensor
                # Not to be held while the next one is read.
                del tensor

    def tensor(self, name: str) -> Tensor:
        """One parameter by its official name: dense ones as stored, others in fp32, on the CPU.

        Raises:
            KeyError: the family has no such parameter.
        """
        with OpenFiles() as files:
            return self.read(files, name)

    def read(self, files: OpenFiles, name: str) -> Tensor:
        """One parameter, as `tensors` yields it, from files that are open."""
        shape, members = self.shapes[name], self.weights[name]
        third = _member_shape(shape, len(members))
        pieces = [_decode(files, member, third) for member in members]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        # diffusers folds Krea 2's modulation tables to (6, D): the same numbers in the same order.
        return tensor.reshape(shape)


def open_model_file(path: str | Path, unconditional: bool = False) -> ModelFile:
    """Checks a file from its header alone and says how to read it.

    Args:
        path: of a file or a folder, see `find_files`.
        unconditional: the unconditional one of a pair of transformers is meant.

    Raises:
        CheckpointError: one of its kinds, before any tensor is read.
    """
    path = Path(path)
    files = find_files(path, unconditional)
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        _try_to_open(file)
        metadata |= header.pop("__metadata__", {})
        twice = sorted(header.keys() & entries.keys())
        if twice:
            raise UnexpectedKeysError(f"{path.name} has keys in two of its files: {some(twice)}")
        entries |= {key: Entry(file, key, str(v["dtype"]), tuple(v["shape"])) for key, v in header.items()}
    tensors, notes = _own_tensors(path, entries)
    if path.is_dir():
        refuse_by_config(path.name, files[0].parent)
    refuse_by_keys(path.name, tensors)
    family = _family(path, tensors)
    found = _by_official_name(path, family, tensors)
    stored = _stored_weights(path, tensors, metadata)

    shapes, misfits = _official_shapes({key: weight.shape for key, weight in stored.items()}, found)
    config = _config(path, family, shapes)
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in family.build(config).named_parameters()}
    # A stable order: the thirds of a split weight one after the other.
    weights = {
        name: tuple(stored[members[third]] for third in sorted(members, key=lambda third: third or 0))
        for name, members in found.items()
    }
    for name in shapes.keys() & wanted.keys():
        if all(weight.holds(_member_shape(wanted[name], len(weights[name]))) for weight in weights[name]):
            shapes[name] = wanted[name]
    _compare(path, family, shapes, wanted, misfits)
    return ModelFile(path, files, family, config, {name: weights[name] for name in wanted}, wanted, notes)


def read_shapes(path: str | Path) -> dict[str, Shape]:
    """Official name → shape of every parameter of a base's file."""
    return open_model_file(path).shapes


def find_files(path: Path, unconditional: bool = False) -> tuple[Path, ...]:
    """The safetensors files that a path means: itself, the shards of an index, or the one file of a folder.

    Of a diffusers folder that is the transformer, or the unconditional one if that is meant.

    Raises:
        NotAModelFileError: there is no such path, or a folder in which it is not clear what is meant.
        MissingKeysError: an index that names shards which are not there.
        WrongModelError: the unconditional one of a pair of transformers where the other is meant.
    """
    if not path.exists():
        raise NotAModelFileError(f"{path}: there is no such file")
    named = "unconditional" in path.name.lower() or path.parent.name == "unconditional_transformer"
    if named and not unconditional:
        raise WrongModelError(
            f"{path.name} is the unconditional transformer of a pair, which no trainer trains; give the other one"
        )
    if path.is_file():
        return (path,)
    part = path / ("unconditional_transformer" if unconditional else "transformer")
    if part.is_dir():
        return find_files(part, unconditional)
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


def telling_name(path: Path) -> str:
    """The name by which people know a model: its diffusers folder's where the path goes into one, else its own."""
    path = path.absolute()
    model = next((folder.parent for folder in (path, path.parent) if folder.name == "transformer"), path)
    # In the cache of huggingface_hub a model is models--owner--name/snapshots/commit.
    return model.parent.parent.name if model.parent.name == "snapshots" else model.name


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


def _own_tensors(path: Path, entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Key without prefix → tensor, and notes of what an all-in-one file holds beside the transformer."""
    for prefix in PREFIXES:
        inside = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
        if inside:
            outside = {key: entry for key, entry in entries.items() if not key.startswith(prefix)}
            # Anything else is neither transformer nor companion: it is kept, and will be found unexpected.
            strangers = {key: entry for key, entry in outside.items() if not key.startswith(COMPANIONS)}
            twice = sorted(inside.keys() & strangers.keys())
            if twice:
                raise UnexpectedKeysError(f"{path.name} has keys both with and without {prefix!r}: {some(twice)}")
            aside = len(outside) - len(strangers)
            notes = [f"left aside {aside} tensors of the VAE and text encoder"] if aside else []
            return {**inside, **strangers}, notes
    return dict(entries), []


def _by_official_name(path: Path, family: Family, keys: Iterable[str]) -> dict[str, dict[int | None, str]]:
    """Official name → member of a fused parameter (None where it is stored whole) → key."""
    found: dict[str, dict[int | None, str]] = {}
    for key in keys:
        if not is_auxiliary(key):
            name, member = family.official_name(key)
            members = found.setdefault(name, {})
            if member in members:
                raise UnexpectedKeysError(f"{path.name} has {name} twice: as {members[member]} and as {key}")
            members[member] = key
    return found


def _family(path: Path, keys: Collection[str]) -> Family:
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


def _stored_weights(path: Path, tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, StoredWeight]:
    """Key of each parameter → how it is stored. Everything beside the weights belongs to one of them."""
    with OpenFiles() as files:
        marks = _marks(path, tensors, metadata, files)
        weights = [key for key in tensors if not is_auxiliary(key)]
        unknown = {marks[name]["format"] for key in weights if (name := key.rpartition(".")[0]) in marks}
        unknown -= set(COMFY_FORMATS)
        if unknown:
            raise UnreadableFormatError(
                f"{path.name} is quantised as {some(sorted(map(str, unknown)))}, which cannot be read; {WAY_OUT}"
            )
        stores_scales = bool(marks) or any(key.rpartition(".")[2] in (*Plain.SCALES, "scaled_fp8") for key in tensors)
        stored = {}
        used: set[str] = set()
        for key in weights:
            layer = Layer(path.name, key, tensors)
            stored[key] = understand(layer, marks.get(layer.name), stores_scales, files.read)
            used |= layer.used
    idle = [key for key in tensors if is_auxiliary(key) and key.rpartition(".")[2] not in IGNORED and key not in used]
    if idle:
        raise UnexpectedKeysError(f"{path.name} has scales that belong to no weight: {some(sorted(idle))}")
    return stored


def _marks(
    path: Path, tensors: Mapping[str, Entry], metadata: Mapping[str, str], files: OpenFiles
) -> dict[str, dict[str, Any]]:
    """Layer → ComfyUI's settings for it, of which `format` is one; the tensor wins over the header."""
    marks: dict[str, dict[str, Any]] = {}
    if "_quantization_metadata" in metadata:
        try:
            for layer, settings in json.loads(metadata["_quantization_metadata"])["layers"].items():
                short = next((layer.removeprefix(prefix) for prefix in PREFIXES if layer.startswith(prefix)), layer)
                marks[short] = {**settings, "format": settings["format"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableFormatError(f"{path.name}: _quantization_metadata in its header is damaged") from error
    for key in (key for key in tensors if key.endswith(".comfy_quant")):
        try:
            settings = json.loads(bytes_of(files.read(tensors[key])))
            marks[key.removesuffix(".comfy_quant")] = {**settings, "format": settings["format"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableFormatError(f"{path.name}: {tensors[key].key} is damaged") from error
    return marks


def _member_shape(shape: Shape, members: int) -> Shape:
    """Shape of one of the members that make up a parameter, one below the other."""
    return shape if members == 1 else (shape[0] // members, *shape[1:])


def _decode(files: OpenFiles, weight: StoredWeight, shape: Shape) -> Tensor:
    return weight.decode(files.read, shape)


def _try_to_open(path: Path) -> None:
    """Lets safetensors check what the checks above do not, before anything is loaded."""
    try:
        # Its mapping for numpy is read-only; that for torch would reserve the whole file's size on Windows.
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise NotAModelFileError(f"{path.name} is damaged ({error}); download it again") from error


def converter_options(path: str | Path) -> dict[str, Any]:
    """What `lora_convert` is told about a base: its sizes, and its weights in fp32, each read when it is asked for.

    Raises:
        CheckpointError: the file is no base.
    """
    file = open_model_file(path)
    # A name of the converter is a module's, or that of a parameter which is no module's weight.
    weights = {name.removesuffix(".weight"): name for name in file.shapes}
    return {
        "sizes": Sizes.of(file.family.name, file.shapes),
        "base": lambda module: file.tensor(weights[module]).float(),
    }
