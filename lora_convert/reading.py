"""Any LoRA file of the families → official module names and what is done to their weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .canonical import Change, DiffModule, Factor, LohaModule, LokrModule, LoraModule, Split
from .errors import BrokenModuleError, LoraError, NotALoraError
from .files import read_state
from .header import Header
from .headers import OVER_BASE
from .keys import Key, refuse_strangers, shown, some, sort_keys
from .naming import title
from .passes import largest
from .producers import COMFYUI_TRAINER, layout_of, producer_of, style_of
from .sizes import Shape, Sizes
from .tables import TABLES

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = tuple(t for t in (getattr(torch, n, None) for n in ("float8_e4m3fn", "float8_e5m2")) if t is not None)
NUMBERS = (*FLOATS, *FLOAT8, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""What an alpha may be; of other dtypes torch cannot make numbers."""
_MOST = torch.finfo(torch.float32).max
_AGAIN = "export it again from the program that trained it"

_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True)
class LoraFile:
    """What a file does to a model.

    Attributes:
        family: the family's name.
        modules: official module name → its change. q, k and v of an attention stand under their joint name: a `Change`
            where the file has them as one, a `Split` where it has them apart. Norms and other vectors stand under the
            parameter's name without `.weight`, with a `DiffModule` of one dimension.
        biases: official module name → change (out,) of its bias.
        producer: who wrote the file, as far as that can be told.
        layout: one of the layouts of writing.py, or `other: ` and how the keys are written.
        fused: whether q, k and v are one; None where the file changes none of them.
        metadata: of the header.
        notes: what a user should know.
        left_out: keys that were left out on request.
    """

    family: str
    modules: dict[str, Change | Split]
    biases: dict[str, Tensor]
    producer: str
    layout: str
    fused: bool | None
    metadata: dict[str, str]
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass
class _Group:
    """The tensors of one module, or of one of its members."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)


Name = tuple[str, int | None]  # official or joint name, and which member of it


def open_lora(path: str | Path, skip_unknown: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, on the CPU, and header metadata of a LoRA file. Of anything else no tensor is read.

    Args:
        path: a safetensors file.
        skip_unknown: read the file also where it has keys that are not understood.

    Raises:
        LoraError: there is no such file, it cannot be read, is no safetensors file or not whole, or no LoRA.
    """
    path = Path(path)
    if path.is_dir():
        raise NotALoraError(f"{path} is a folder; wanted a safetensors file")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if not start:
            raise NotALoraError(f"{path} is empty; wanted a safetensors file; was it copied whole?")
        # The header's length may begin with any byte: what follows it tells a safetensors file.
        if start[8:] != b"{" and (start[:1] == b"\x80" or start[:4] == b"PK\x03\x04"):
            raise NotALoraError(f"{path} is a pickle, which can run code as it is read; wanted a safetensors file")
        with safe_open(path, framework="pt") as header:
            found = sort_keys(header.keys())
        if not skip_unknown:
            refuse_strangers(found)
        return read_state(path)
    except LoraError:
        raise
    except OSError as error:
        raise NotALoraError(f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # safetensors and torch have kinds of their own for a file that is not as it says
        raise NotALoraError(
            f"{path} is no sound safetensors file ({shown(str(error))}); was it copied whole?"
        ) from error


def read_lora(
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    sizes: Sizes | None = None,
    skip_unknown: bool = False,
) -> LoraFile:
    """Reads a LoRA whatever its layout.

    Args:
        state: its tensors, which are kept as they are, without a copy.
        metadata: of its header.
        sizes: shapes of the base that it is for; the family's published ones by default.
        skip_unknown: leave out, with a note, keys that are not understood or of a text encoder.

    Raises:
        NotALoraError: a base model, a text encoder, a LoRA of both families or of none.
        UnknownKeysError: keys that are not understood.
        BrokenModuleError: a module of which a part is missing, of another shape, not finite or there twice.
        LoraError: a kind of adapter, or a header, that cannot be read.
    """
    metadata = dict(metadata or {})
    found = sort_keys(state)
    notes: list[str] = []
    if not skip_unknown:
        refuse_strangers(found)
    if left := found.unknown + found.text_encoder:
        notes.append(f"{len(left)} keys were left out: {some(left)}")
    sizes = sizes or _sizes(found.keys, state)
    groups = _grouped(found.keys, state, sizes.family)
    notes += _without_placeholders(groups)
    fused = _fused(groups, sizes)
    style = style_of(found.keys, sizes.family, fused)
    alphas = [_scalar(key.text, state[key.text]) for key in found.keys if key.part == "alpha"]
    producer = producer_of(style, metadata, alphas, (key.part for key in found.keys))
    said = _says_over_base(metadata)
    reader = _Reader(sizes, Header(metadata), said, not said and producer == COMFYUI_TRAINER)
    modules, biases = reader.read(groups)
    notes += reader.notes()
    return LoraFile(
        sizes.family, modules, biases, producer, layout_of(style), fused, metadata, tuple(notes), tuple(left)
    )


def _sizes(keys: list[Key], state: Mapping[str, Tensor]) -> Sizes:
    """Published sizes of the family that has all the names; the shapes decide where both have."""
    names = {family: [key for key in keys if any(p.family == family for p in key.places)] for family in TABLES}
    whole = [family for family, known in names.items() if len(known) == len(keys)]
    if not whole:
        first, second = ([key for key in keys if key not in known] for known in names.values())
        raise NotALoraError(
            f"the file has modules of both families, such as {shown(second[0].text)} and {shown(first[0].text)}; "
            "wanted a LoRA of one"
        )
    for family in whole[:-1]:
        sizes = Sizes.published(family)
        try:
            if all(_fits(key, state[key.text], sizes) for key in keys):
                return sizes
        except BrokenModuleError:
            continue
    return Sizes.published(whole[-1])


def _fits(key: Key, tensor: Tensor, sizes: Sizes) -> bool:
    """Whether a factor of a LoRA has a side of its module; other parts fit any."""
    place = next(place for place in key.places if place.family == sizes.family)
    shape = sizes.shape(place.module)
    if key.part == "down":
        return tensor.ndim == 2 and tensor.shape[1] == shape[-1]
    if key.part in ("up", "diff"):
        return tensor.ndim >= 1 and tensor.shape[0] == shape[0]
    return True


def _grouped(keys: list[Key], state: Mapping[str, Tensor], family: str) -> dict[Name, _Group]:
    groups: dict[Name, _Group] = {}
    for key in keys:
        place = next((place for place in key.places if place.family == family), None)
        if place is None:
            raise NotALoraError(f"{shown(key.text)} is no module of {TABLES[family].title}, which the base is of")
        group = groups.setdefault((place.module, place.member), _Group())
        spelled = next(iter(group.keys.values()), key)
        if key.part in group.parts or (spelled.prefix, spelled.stem) != (key.prefix, key.stem):
            other = group.keys.get(key.part, spelled)
            raise BrokenModuleError(
                f"{title(family, place.module, place.member)} is spelled in two ways, {shown(other.text)} and "
                f"{shown(key.text)}; wanted one; take the other out"
            )
        group.parts[key.part], group.keys[key.part] = state[key.text], key
    return groups


def _without_placeholders(groups: dict[Name, _Group]) -> list[str]:
    """Takes out changes of zero beside others of the same rows, and says so.

    After `fuse_qkv_projections()` SimpleTuner's LyCORIS writes, beside the fused projection that was trained, the
    unused q, k and v, with zeros and a `dora_scale` that would rescale the base.

    Raises:
        BrokenModuleError: both are there and neither is zero.
    """
    left = 0
    joints = {module for module, member in groups if member is not None}
    for module in sorted(joints):
        if (module, None) not in groups:
            continue
        members = [(module, member) for member in range(3) if (module, member) in groups]
        taken = next((names for names in (members, [(module, None)]) if all(_is_zero(groups[n]) for n in names)), None)
        if taken is None:
            raise BrokenModuleError(f"{module} is there as one and as q, k, v apart; wanted either; take one out")
        left += len(taken)
        for name in taken:
            del groups[name]
    return [f"{left} placeholders of zero beside the q, k, v that were trained were left out"] if left else []


def _is_zero(group: _Group) -> bool:
    """Whether one of the factors, of which dW is a product, is zero."""
    strengths = ("alpha", "dora_scale", "magnitude", "diff_b")
    factors = [tensor for part, tensor in group.parts.items() if part not in strengths]
    # What is no number is refused later, by name.
    return any(tensor.dtype in NUMBERS and not tensor.float().any() for tensor in factors)


def _fused(groups: dict[Name, _Group], sizes: Sizes) -> bool | None:
    kinds = {member is None for module, member in groups if sizes.is_joint(module)}
    return None if not kinds else kinds == {True}


def _says_over_base(metadata: Mapping[str, str]) -> bool:
    """Whether the header says that a `dora_scale` per row stands over ‖W‖, as ComfyUI computes, not over ‖W + dW‖."""
    try:
        ours = json.loads(metadata.get("graft", "{}"))
    except (ValueError, RecursionError):
        ours = {}
    return isinstance(ours, dict) and ours.get("dora_scale") == OVER_BASE


def _scalar(key: str, tensor: Tensor) -> float:
    """The value of an `alpha`.

    Raises:
        BrokenModuleError: it is not one finite number.
    """
    if tensor.numel() != 1 or tensor.dtype not in NUMBERS:
        raise BrokenModuleError(f"{shown(key)} is {_described(tensor)}; wanted one number; write it as one in fp32")
    value = tensor.float().item()
    if not math.isfinite(value):
        raise BrokenModuleError(f"{shown(key)} is {value}; wanted a finite number; the file is damaged, {_AGAIN}")
    return value


def _ending(key: Key) -> str:
    """What follows the module's name."""
    return key.text[len(key.prefix) + len(key.stem) :]


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass
class _Reader:
    """Tensors of modules → changes.

    Attributes:
        sizes: of the model.
        header: what it says of strengths.
        over_base: it says that a `dora_scale` by row stands over ‖W‖.
        guessed_over_base: it says nothing, but the keys are like those of a program whose `dora_scale` does.
        endings: those of a lora_A that has its lora_B, anywhere in the file.
        counted: what is to be noted → how many modules it is about.
    """

    sizes: Sizes
    header: Header
    over_base: bool
    guessed_over_base: bool
    endings: set[str] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)

    @cached_property
    def longest(self) -> int:
        """The longest side of any of the model's weights, which no sensible rank is above."""
        return max(side for shape in self.sizes.shapes.values() for side in shape)

    def notes(self) -> list[str]:
        return [*self.header.notes, *(f"{count} modules {what}" for what, count in self.counted.items())]

    def read(self, groups: dict[Name, _Group]) -> tuple[dict[str, Change | Split], dict[str, Tensor]]:
        modules: dict[str, Change | Split] = {}
        biases: dict[str, Tensor] = {}
        self.endings = {
            _ending(group.keys["down"]) for group in groups.values() if {"down", "up"} <= group.parts.keys()
        }
        for (module, member), group in groups.items():
            called = title(self.sizes.family, module, member)
            shape = self._shape(module, member)
            bias = group.parts.pop("diff_b", None)
            if bias is not None and (bias := self._bias(called, module, bias)) is not None:
                biases[module] = bias
            if not group.parts:
                continue
            change = self._change(called, group, shape)
            if member is None:
                modules[module] = change
                continue
            split = modules.get(module, Split((None, None, None), self.sizes.rows(module)))
            assert isinstance(split, Split)
            q, k, v = (change if i == member else other for i, other in enumerate(split.members))
            modules[module] = replace(split, members=(q, k, v))
        return modules, biases

    def _shape(self, module: str, member: int | None) -> Shape:
        whole = self.sizes.shape(module)
        return whole if member is None else (self.sizes.rows(module)[member], whole[1])

    def _bias(self, called: str, module: str, bias: Tensor) -> Tensor | None:
        bias = self._sound(called, "diff_b", bias, (1,))
        length = self.sizes.biases.get(module)
        if length is None:
            if bias.float().any():
                raise BrokenModuleError(
                    f"{called} has a diff_b, but the model has no bias there; is it another model's? give the base "
                    "that it is for, or take that key out"
                )
            self.counted["have a diff_b of zero where the model has no bias; it was left out"] += 1
            return None
        if len(bias) != length:
            raise BrokenModuleError(
                f"{called} has a diff_b of {len(bias)}; the model's bias has {length}; give the base that it is for"
            )
        return bias

    def _change(self, called: str, group: _Group, shape: Shape) -> Change:
        parts = {
            part: tensor if part == "alpha" else self._sound(called, part, tensor, (1, 2))
            for part, tensor in group.parts.items()
        }
        there = ", ".join(parts)
        change = self._of_kind(called, group, parts, shape)
        if parts:
            raise BrokenModuleError(
                f"{called} has {there}; {', '.join(parts)} cannot go with the rest; wanted parts of one kind of "
                "adapter; take those of the other out"
            )
        if change.shape != shape:
            raise BrokenModuleError(
                f"{called} has a change of {list(change.shape)}; wanted {list(shape)}; is it for another base? give "
                "the one that it is for"
            )
        if change.scale == 0:
            self.counted["have alpha 0 and change nothing"] += 1
        if change.scale < 0:
            self.counted["have a negative alpha, which is kept"] += 1
        return change

    def _of_kind(self, called: str, group: _Group, parts: dict[str, Tensor], shape: Shape) -> Change:
        """Takes the parts of one kind, and what goes with them, out of `parts`."""
        there = ", ".join(parts) or "nothing"
        magnitudes = self._magnitudes(called, parts, shape)
        if "down" in parts and "up" not in parts and "alpha" not in parts and tuple(parts["down"].shape) == shape:
            # ai-toolkit's full rank, whose lora_A is dW itself: of every module, and never beside pairs.
            if (ending := _ending(group.keys["down"])) in self.endings:
                raise BrokenModuleError(
                    f"{called} has a {ending.lstrip('._')} of the weight's own shape without its other half, which "
                    f"others in the file have; was it lost? {_AGAIN}, or call the key .diff if it is a full change"
                )
            return DiffModule(parts.pop("down"), **magnitudes)
        if {"down", "up"} <= parts.keys():
            down, up = self._product(called, "lora_up and lora_down", parts.pop("up"), parts.pop("down"))[::-1]
            return LoraModule(down, up, self._alpha(called, group, parts, len(down)), **magnitudes)
        if set(_LOHA) <= parts.keys():
            w1 = self._product(called, "hada_w1", parts.pop("hada_w1_a"), parts.pop("hada_w1_b"))
            w2 = self._product(called, "hada_w2", parts.pop("hada_w2_a"), parts.pop("hada_w2_b"))
            if w1[0].shape != w2[0].shape or w1[1].shape != w2[1].shape:
                raise BrokenModuleError(
                    f"{called} has hada_w1 and hada_w2 of different shapes; wanted the same; it is damaged, {_AGAIN}"
                )
            return LohaModule(*w1, *w2, self._alpha(called, group, parts, len(w1[1])), **magnitudes)
        first, second = (self._factor(called, parts, name) for name in ("lokr_w1", "lokr_w2"))
        if first is not None and second is not None:
            rank = LokrModule(first, second, 1.0).rank
            return LokrModule(first, second, self._alpha(called, group, parts, rank), **magnitudes)
        if "diff" in parts:
            # Its alpha has no meaning in any reader.
            parts.pop("alpha", None)
            return DiffModule(parts.pop("diff"), **magnitudes)
        raise BrokenModuleError(
            f"{called} has only {there}; wanted lora_down and lora_up, the four of hada, lokr_w1 and lokr_w2, or diff; "
            f"{_AGAIN}, or take the module out"
        )

    def _factor(self, called: str, parts: dict[str, Tensor], name: str) -> Factor | None:
        if name in parts:
            self._two_dimensions(called, name, parts[name])
            return parts.pop(name)
        if f"{name}_a" in parts and f"{name}_b" in parts:
            return self._product(called, name, parts.pop(f"{name}_a"), parts.pop(f"{name}_b"))
        return None

    def _product(self, called: str, name: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, rank) and (rank, columns)."""
        self._two_dimensions(called, name, left)
        self._two_dimensions(called, name, right)
        rank = right.shape[0]
        if left.shape[1] != rank:
            raise BrokenModuleError(
                f"{called} has {name} of {list(left.shape)} and {list(right.shape)}; wanted one rank; it is damaged, "
                f"{_AGAIN}"
            )
        if not 1 <= rank <= self.longest:
            raise BrokenModuleError(
                f"{called} has {name} of rank {rank}; wanted 1 to {self.longest}, the model's longest side; is it for "
                "another base? give the one that it is for"
            )
        return left, right

    def _two_dimensions(self, called: str, name: str, tensor: Tensor) -> None:
        if tensor.ndim != 2:
            raise BrokenModuleError(
                f"{called} has {name} of shape {list(tensor.shape)}; wanted two dimensions, as of a Linear; take the "
                "module out, or merge the file into its base"
            )

    def _alpha(self, called: str, group: _Group, parts: dict[str, Tensor], rank: int | None) -> float:
        """The module's own, else the header's, else that of strength 1."""
        if "alpha" in parts:
            return _scalar(f"{called}.alpha", parts.pop("alpha"))
        if rank is None:
            return 1.0
        key = next(key for part, key in group.keys.items() if part in ("down", *_LOHA) or part.startswith("lokr"))
        alpha = self.header.alpha(key, rank)
        return float(rank) if alpha is None else alpha

    def _magnitudes(self, called: str, parts: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """DoRA's lengths, by the names that `Change` gives them."""
        given = [(part, parts.pop(part)) for part in ("magnitude", "dora_scale") if part in parts]
        if not given:
            return {}
        if len(given) > 1:
            raise BrokenModuleError(f"{called} has a magnitude and a dora_scale; wanted one of them; take one out")
        part, tensor = given[0]
        lengths = self._lengths(called, part, tensor, shape)
        if self.guessed_over_base and "magnitude_over_base" in lengths:
            self.counted[
                f"have a dora_scale that is taken as over the norm of W, since the file is like {COMFYUI_TRAINER}'s; "
                "if another program wrote it, its strength is another"
            ] += 1
        return lengths

    def _lengths(self, called: str, part: str, tensor: Tensor, shape: Shape) -> dict[str, Tensor]:
        over_base = part == "dora_scale" and (self.over_base or self.guessed_over_base)
        kind = "magnitude_over_base" if over_base else "magnitude"
        dims = tuple(tensor.shape)
        if len(shape) == 2:
            out, columns = shape
            if dims == (out, 1):
                return {kind: tensor[:, 0]}
            if dims == (1, columns) and part == "dora_scale":
                return {"column_magnitude": tensor[0]}
            if dims == (out,) or (dims == (1, out) and part == "magnitude"):
                if dims == (columns,) and part == "dora_scale":
                    self.counted[
                        "have a dora_scale of one dimension on a square weight; it is taken as by output row"
                    ] += 1
                return {kind: tensor.flatten()}
            if dims == (columns,) and part == "dora_scale":
                return {"column_magnitude": tensor}
        raise BrokenModuleError(
            f"{called} has a {part} of {list(dims)}; for a weight of {list(shape)} wanted one number a row or a "
            "column; is it for another base? give the one that it is for"
        )

    def _sound(self, called: str, part: str, tensor: Tensor, dimensions: tuple[int, ...]) -> Tensor:
        """The tensor, if it is one of finite numbers; of fp8 in bf16, which holds it exactly."""
        if tensor.dtype in FLOAT8:
            self.counted["have parts in fp8; they are held in bf16, which is exact"] += 1
            tensor = tensor.to(torch.bfloat16)
        if tensor.dtype not in FLOATS:
            raise BrokenModuleError(
                f"{called} has {part} of {_described(tensor)}; wanted floating point numbers; {_AGAIN} in bf16 or fp32"
            )
        if tensor.ndim not in dimensions or not tensor.numel():
            raise BrokenModuleError(
                f"{called} has {part} of shape {list(tensor.shape)}; wanted {' or '.join(map(str, dimensions))} "
                f"dimensions, none of them 0; it is damaged, {_AGAIN}"
            )
        most = largest(tensor)
        if not math.isfinite(most):
            raise BrokenModuleError(
                f"{called} has {part} with values that are not finite (NaN or inf); it is broken: take an earlier save"
            )
        if most > _MOST:
            raise BrokenModuleError(
                f"{called} has {part} with values up to {most:.1e}; wanted what fp32 can hold; it is broken: take an "
                "earlier save"
            )
        return tensor
