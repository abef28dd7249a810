"""Modules as the readers of a target take them, or the word why they cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from .canonical import Change, LohaModule, LoraModule
from .dora import with_row_magnitudes
from .errors import CannotConvertError
from .folding import pad
from .pieces import Piece, Weights, fields, kind
from .targets import BIAS, COLUMN, DIFF, LOHA, LOKR, LORA, PARAMETER, ROW, ROW_OVER_BASE, Target


def refuse_kinds(pieces: Iterable[Piece], biases: Iterable[str], target: Target) -> None:
    """Raises where the reader does not take what a module is, or not together with what another is."""
    first: dict[str, Piece] = {}
    for piece in pieces:
        own = kind(piece)
        if own not in target.kinds:
            way = "" if own == PARAMETER else "make a LoRA of it with --rank N, or "
            raise CannotConvertError(f"{piece.name} is {own}, which {target.reader} cannot load; {way}write comfyui")
        if own in (LORA, LOKR, LOHA):
            first.setdefault(own, piece)
        if target.one_kind and len(first) > 1:
            (one, a), (other, b) = first.items()
            raise CannotConvertError(
                f"{a.name} is {one} and {b.name} {other}; {target.reader} takes one kind in a file; "
                "make LoRAs of all with --rank N, or write comfyui"
            )
        if piece.change.has_magnitude and own not in target.dora_kinds:
            raise CannotConvertError(
                f"{piece.name} is {own} with the lengths of a DoRA, which {target.reader} cannot load; bake them in "
                f"with the base model{'' if DIFF in target.kinds else ' and --rank N'}{_instead(target, own)}"
            )
    if BIAS not in target.kinds:
        for name in biases:
            raise CannotConvertError(f"{name} has {BIAS}, which {target.reader} cannot load; write comfyui")


def _instead(target: Target, kind: str) -> str:
    """The layout that takes a DoRA where the target does not: none takes that of a full change."""
    if kind not in (LORA, LOKR, LOHA):
        return ""
    return ", or write onetrainer" if target.name == "kohya" and kind != LOHA else ", or write comfyui"


def with_lengths(pieces: list[Piece], target: Target, weights: Weights) -> list[Piece]:
    """Every DoRA with the one kind of lengths that is written, and with none but it."""
    found = [
        replace(piece, change=_lengths(piece, target, weights)) if piece.change.has_magnitude else piece
        for piece in pieces
    ]
    doras = {axis: piece for piece in found for axis in fields(piece.change)}
    if not target.one_kind or not doras:
        return found
    if len(doras) > 1:
        a, b = (piece.name for piece in doras.values())
        raise CannotConvertError(
            f"{a} and {b} are DoRAs of different axes; {target.reader} takes one in a file; "
            "bake them in with the base model and --rank N, or write comfyui"
        )
    ((axis, dora),) = doras.items()
    for index, piece in enumerate(found):
        if not fields(piece.change) and kind(piece) in target.dora_kinds:
            if weights.base is None:
                raise CannotConvertError(
                    f"{piece.name} is no DoRA and {dora.name} is one; {target.reader} takes all or none in a file; "
                    "give the base model, or write comfyui"
                )
            found[index] = replace(piece, change=_neutral(piece.change, weights.of(piece.module, piece.member), axis))
    return found


def _neutral(change: Change, weight: Tensor, axis: str) -> Change:
    """A change that is no DoRA, as one that leaves the weight at W + dW."""
    if axis == ROW:
        return replace(change, magnitude=with_row_magnitudes(change, weight).magnitude)
    return replace(change, column_magnitude=(weight.float() + change.delta()).norm(dim=0))


def _lengths(piece: Piece, target: Target, weights: Weights) -> Change:
    """A DoRA with the lengths that the target takes, from those that are known.

    Raises:
        CannotConvertError: the other axis, or the base is wanted for it.
    """
    change = piece.change
    bare = replace(change, magnitude=None, magnitude_over_base=None, column_magnitude=None)
    baked = f"bake it in with the base model{'' if DIFF in target.kinds else ' and --rank N'}"
    for axis in target.magnitudes:
        value = getattr(change, axis)
        if value is not None:
            if axis == COLUMN and target.axis_by_rows and change.shape[0] == 1:
                raise CannotConvertError(
                    f"{piece.name} is a DoRA by column of one row, which {target.reader} takes for one by row; {baked}"
                )
            return replace(bare, **{axis: value})
    if change.column_magnitude is not None:
        raise CannotConvertError(
            f"{piece.name} is a DoRA by column, and {target.reader} loads those by row alone; {baked}, or write comfyui"
        )
    if weights.base is None:
        raise CannotConvertError(
            f"{piece.name} is a DoRA over the norm of {'W + dW' if change.magnitude is not None else 'W'}, and "
            f"{target.reader} wants it over that of {'W' if change.magnitude is not None else 'W + dW'}; "
            "give the base model, from which the one follows from the other"
        )
    both = with_row_magnitudes(change, weights.of(piece.module, piece.member))
    axis = ROW if ROW in target.magnitudes else ROW_OVER_BASE
    return replace(bare, **{axis: getattr(both, axis)})


def at_one_rank(pieces: list[Piece], target: Target, rank: int | None) -> list[Piece]:
    """Equal ranks where the reader has one for all: by zeros if a rank was asked for, else refused."""
    if not target.one_rank:
        return pieces
    ranks = {change.rank: piece.name for piece in pieces if isinstance(change := piece.change, LoraModule | LohaModule)}
    if len(ranks) < 2:
        return pieces
    most, least = max(ranks), min(ranks)
    if rank is None:
        exact = not any(isinstance(piece.change, LohaModule) for piece in pieces)
        raise CannotConvertError(
            f"{ranks[most]} has rank {most} and {ranks[least]} rank {least}; {target.reader} loads one rank for all "
            f"modules; --rank {most} "
            + ("is exact, by zeros in those of less" if exact else "makes LoRAs of them, and says what that costs")
        )
    return [
        replace(piece, change=pad(piece.change, most)) if isinstance(piece.change, LoraModule) else piece
        for piece in pieces
    ]
