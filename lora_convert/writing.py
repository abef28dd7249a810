"""A LoRA in the one form → the tensors and the header of a file, in the layout that was asked for.

What the layout's readers cannot take is refused, with the module, the reason and the way out; nothing is left out or
changed in silence. What each of them takes stands in targets.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import headers
from .acceptance import at_one_rank, refuse_kinds, with_lengths
from .advice import notes
from .canonical import Change, LohaModule, LokrModule, LoraModule, members_of
from .errors import CannotConvertError
from .folding import fold, fold_lokr, whole_w1
from .naming import spell
from .passes import copied, largest
from .pieces import Base, Piece, Weights, baked, fields, gather, kind, shaped, truncated
from .reading import LoraFile
from .sizes import Sizes
from .targets import COLUMN, LAYOUTS, LORA, ROW_OVER_BASE, SIMPLETUNER_LYCORIS, TARGETS, Target

__all__ = ["LAYOUTS", "Written", "gather", "write_lora"]


@dataclass(frozen=True)
class Written:
    """What a file is made of.

    Attributes:
        state: contiguous tensors, none of which shares storage with another.
        metadata: the header.
        notes: what a user should know: settings that the reader wants, what a rounding has cost.
        errors: official module name (that of q, k or v where they are written apart) → relative Frobenius error of
            its dW, of those that were brought to a rank.
        error: the same of all of them together, 0 where nothing was.
    """

    state: dict[str, Tensor]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0


def write_lora(
    file: LoraFile,
    layout: str,
    *,
    dtype: torch.dtype | None = None,
    rank: int | None = None,
    bake: bool = False,
    base: Base | None = None,
    sizes: Sizes | None = None,
) -> Written:
    """A LoRA in one of the LAYOUTS.

    Args:
        file: as it was read.
        layout: the target's name.
        dtype: of the factors; None leaves each as it is in the source. Alpha and the lengths of a DoRA are always fp32.
        rank: every matrix that has more, or is no LoRA, becomes a LoRA of this rank: the one with the least error.
        bake: every DoRA becomes a full change of its weight; wants the base.
        base: official module name → its weight (out, in), for what cannot be said without it.
        sizes: of the base where it is not the published one.

    Raises:
        CannotConvertError: what the layout's readers do not take, or what asks for the base.
        ValueError: no such layout, or a rank below 1.
    """
    if layout not in TARGETS:
        raise ValueError(f"there is no layout {layout!r}; wanted one of {', '.join(LAYOUTS)}")
    if rank is not None and rank < 1:
        raise ValueError(f"a rank of {rank}; wanted 1 or more")
    weights = Weights(file.family, base, sizes or Sizes.published(file.family))
    target = TARGETS[layout]
    pieces = [piece for name, entry in file.modules.items() for piece in shaped(name, entry, target, weights)]
    pieces = baked(pieces, weights, every=bake)
    errors: dict[str, float] = {}
    error = 0.0
    if rank is not None:
        pieces, errors, error = truncated(pieces, rank)
    if layout == "simpletuner" and any(kind(piece) != LORA for piece in pieces):
        target = SIMPLETUNER_LYCORIS
    refuse_kinds(pieces, file.biases, target)
    pieces = with_lengths(pieces, target, weights)
    pieces = at_one_rank(pieces, target, rank)
    pieces, cost = _folded(pieces, target, dtype)
    read = [t for entry in file.modules.values() for change in members_of(entry) for t in change.factors().values()]
    state = _state(pieces, file.biases, target, file.family, dtype, read)
    return Written(
        state,
        _header(file.metadata, pieces, target, file.family),
        tuple(notes(pieces, target, file.family, cost)),
        errors,
        error,
    )


def _folded(pieces: list[Piece], target: Target, dtype: torch.dtype | None) -> tuple[list[Piece], dict[str, float]]:
    """The scales where the reader wants them, and what that has cost, by module, where it has cost anything."""
    found, cost = [], {}
    for piece in pieces:
        change, lost = piece.change, 0.0
        if isinstance(change, LoraModule) and not target.alpha:
            change, lost = fold(change, dtype or piece.dtype)
        elif isinstance(change, LokrModule):
            if target.whole_w1:
                change = whole_w1(change)
            if target.folds_lokr:
                change, lost = fold_lokr(change, dtype or piece.dtype)
        if lost:
            cost[piece.name] = lost
        found.append(replace(piece, change=change))
    return found, cost


def _state(
    pieces: Iterable[Piece],
    biases: Mapping[str, Tensor],
    target: Target,
    family: str,
    dtype: torch.dtype | None,
    read: Iterable[Tensor],
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    storages: set[int] = set()
    # Reading has seen these to be finite; what shares their storage is a cut of them.
    sound = {tensor.untyped_storage().data_ptr() for tensor in read}

    def put(key: str, tensor: Tensor, wanted: torch.dtype | None, name: str) -> None:
        converted = tensor.detach().to(wanted or tensor.dtype).contiguous()
        storage = converted.untyped_storage().data_ptr()
        if storage not in sound and converted.numel() and not math.isfinite(largest(converted)):
            way = "write bf16 or fp32" if converted.dtype == torch.float16 else "is it broken? take an earlier save"
            raise CannotConvertError(
                f"{name} has values up to {largest(tensor):.3g}, which "
                f"{str(converted.dtype).removeprefix('torch.')} cannot hold; {way}"
            )
        # safetensors refuses keys that share storage.
        if storage in storages:
            converted = copied(converted)
        storages.add(converted.untyped_storage().data_ptr())
        state[key] = converted

    for piece in pieces:
        stem = _stem(piece, target, family)
        for suffix, tensor in _tensors(piece.change, target):
            put(f"{stem}.{suffix}", tensor, dtype or piece.dtype, piece.name)
        for suffix, tensor in _fp32(piece.change, target):
            put(f"{stem}.{suffix}", tensor, torch.float32, piece.name)
    for name, bias in biases.items():
        put(f"{target.prefix}{spell(family, name, None, target.naming[family], target.flat)}.diff_b", bias, dtype, name)
    return state


def _stem(piece: Piece, target: Target, family: str) -> str:
    return target.prefix + spell(family, piece.module, piece.member, target.naming[family], target.flat)


def _tensors(change: Change, target: Target) -> Iterator[tuple[str, Tensor]]:
    names = dict(zip(("lora_down", "lora_up"), target.low_rank, strict=True))
    return ((names.get(name, name), tensor) for name, tensor in change.factors().items())


def _fp32(change: Change, target: Target) -> Iterator[tuple[str, Tensor]]:
    """Alpha and lengths."""
    if isinstance(change, LoraModule | LohaModule | LokrModule) and (
        target.alpha or not isinstance(change, LoraModule)
    ):
        yield "alpha", torch.tensor(change.alpha, dtype=torch.float32)
    for axis in fields(change):
        length = getattr(change, axis).float()
        if axis == COLUMN:
            length = length.reshape(1, -1)
        elif target.magnitude_columns:
            # As a vector ComfyUI would spread it over the columns of a square weight.
            length = length.reshape(-1, 1)
        yield target.magnitudes[axis], length


def _header(metadata: Mapping[str, str], pieces: list[Piece], target: Target, family: str) -> dict[str, str]:
    axes = {axis for piece in pieces for axis in fields(piece.change)}
    meaning = None
    if axes and "dora_scale" in target.magnitudes.values():
        meaning = headers.OVER_BASE if ROW_OVER_BASE in axes else headers.PAPER
    found = headers.fresh(metadata, meaning)
    loras = {_stem(p, target, family).removeprefix(target.prefix): p.change for p in pieces}
    modules = {name: change for name, change in loras.items() if isinstance(change, LoraModule)}
    if target.peft and modules:
        doras = [name for name, change in modules.items() if change.has_magnitude]
        ranks = {name: change.rank for name, change in modules.items()}
        found |= headers.peft_entry(ranks, doras, target.prefix.removesuffix("."))
    pairs = {(change.rank, change.alpha) for change in modules.values()}
    if target.alpha and len(modules) == len(pieces) and len(pairs) == 1:
        found |= headers.kohya_entries(*pairs.pop())
    return found
