"""The modules of a LoRA as a target has them: q, k and v fused or split, DoRAs baked in, brought to a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .canonical import Canonical, Change, DiffModule, LohaModule, LokrModule, LoraModule, Split
from .dora import bake
from .errors import CannotConvertError, LoraError
from .fusing import fuse, split, truncate
from .low_rank import norm
from .naming import title
from .sizes import Sizes
from .tables import TABLES
from .targets import COLUMN, DIFF, LOHA, LOKR, LORA, PARAMETER, ROW, ROW_OVER_BASE, Target

Base = Callable[[str], Tensor]
"""Official module name → its weight, (out, in), dequantised."""


@dataclass(frozen=True)
class Piece:
    """One module as the target has it.

    Attributes:
        module: official or joint name.
        member: 0, 1, 2 for q, k, v written apart; else None.
        name: for messages, such as "blocks.0.attn.wq" or "q of layers.0.attention.qkv".
        change: what is done to its weight.
        dtype: of the source, where the change was computed from it in fp32.
    """

    module: str
    member: int | None
    name: str
    change: Change
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Weights:
    """Weights of the base, by module and member, whatever the base has fused."""

    family: str
    base: Base | None
    sizes: Sizes

    def of(self, module: str, member: int | None) -> Tensor:
        assert self.base is not None
        members = TABLES[self.family].members(module)
        if members is not None:
            return self.base(members[member]) if member is not None else torch.cat([self.base(m) for m in members])
        weight = self.base(module)
        if member is None:
            return weight
        third = len(weight) // 3
        return weight[member * third : (member + 1) * third]

    def rows(self, joint: str, change: Change) -> tuple[int, int, int]:
        """Output rows of q, k and v, of which a change holds all."""
        if TABLES[self.family].members(joint) is None:
            third = change.shape[0] // 3
            return third, third, third
        return self.sizes.rows(joint)


def gather(modules: Canonical, family: str, sizes: Sizes | None = None) -> dict[str, Change | Split]:
    """Modules by official name, as a trained model has them → the same with q, k and v of an attention together.

    Those of Krea 2, which are three modules, become a `Split` under the joint name; Ideogram 4's one stays as it is.

    Args:
        modules: by official name.
        family: the family's name.
        sizes: of the base where it is not the published one.
    """
    table, sizes = TABLES[family], sizes or Sizes.published(family)
    found: dict[str, Change | Split] = {}
    for name, change in modules.items():
        place = table.inside_of(name)
        official = table.joint.official or ()
        if place is None or place[2] not in official:
            found[name] = change
            continue
        joint = f"{place[0].format(place[1])}.{table.joint.name}"
        if joint not in found:
            q, k, v = (modules.get(f"{place[0].format(place[1])}.{member}") for member in official)
            rows = sizes.rows(joint)
            found[joint] = Split((q, k, v), rows)
    return found


def baked(pieces: list[Piece], weights: Weights, every: bool) -> list[Piece]:
    """DoRAs as full changes: every one, or those that are full changes already, whose lengths no reader takes.

    Raises:
        CannotConvertError: every one was asked for, and there is no base.
    """
    found = []
    for piece in pieces:
        full_already = isinstance(piece.change, DiffModule) and weights.base is not None
        if piece.change.has_magnitude and (every or full_already):
            if weights.base is None:
                raise CannotConvertError(f"{piece.name} is a DoRA; to bake it, give the base model")
            full = bake(piece.change, weights.of(piece.module, piece.member))
            piece = replace(piece, change=full, dtype=_dtype(piece.change))
        found.append(piece)
    return found


def _dtype(change: Change) -> torch.dtype:
    return next(iter(change.factors().values())).dtype


def shaped(name: str, entry: Change | Split, target: Target, weights: Weights) -> Iterator[Piece]:
    """A module, or q, k and v, fused or split as the target has them."""
    family = weights.family
    if not TABLES[family].is_joint(name):
        assert isinstance(entry, Change)
        yield Piece(name, None, name, entry)
        return
    base = None if weights.base is None else lambda: weights.of(name, None)
    try:
        if target.fused[family]:
            yield Piece(name, None, name, fuse(entry, base) if isinstance(entry, Split) else entry)
            return
        found = entry if isinstance(entry, Split) else split(entry, weights.rows(name, entry), base)
    except LoraError as error:
        # Which module it is, only the caller of these knows.
        raise type(error)(f"{name}: {error}") from error
    for member, change in enumerate(found.members):
        if change is not None:
            yield Piece(name, member, title(family, name, member), change)


def kind(piece: Piece) -> str:
    change = piece.change
    if isinstance(change, LoraModule):
        return LORA
    if isinstance(change, LokrModule):
        return LOKR
    if isinstance(change, LohaModule):
        return LOHA
    return DIFF if is_matrix(piece) else PARAMETER


def is_matrix(piece: Piece) -> bool:
    """Whether the weight is a Linear's: a norm's scale, a modulation table and an embedding are not."""
    return len(piece.change.shape) == 2 and not piece.module.endswith((".lin", ".scale", "_indicator"))


def fields(change: Change) -> tuple[str, ...]:
    return tuple(axis for axis in (ROW, ROW_OVER_BASE, COLUMN) if getattr(change, axis) is not None)


def truncated(pieces: list[Piece], rank: int) -> tuple[list[Piece], dict[str, float], float]:
    """Every matrix at no more than this rank, the relative error of each that had more, and that of all together."""
    found, errors = [], {}
    lost, whole = 0.0, 0.0
    for piece in pieces:
        change = piece.change
        if is_matrix(piece):
            square = norm(change) ** 2
            whole += square
            if not (isinstance(change, LoraModule) and change.rank <= rank):
                try:
                    low, error = truncate(change, rank)
                except LoraError as fault:
                    raise type(fault)(f"{piece.name}: {fault}") from fault
                errors[piece.name] = error
                lost += error**2 * square
                piece = replace(piece, change=low, dtype=piece.dtype or _dtype(change))
        found.append(piece)
    return found, errors, math.sqrt(lost / whole) if whole else 0.0
