"""How far two changes are apart: the check of a conversion, without dense products wherever factors allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .canonical import Change, LokrModule, LoraModule, Split, members_of
from .fusing import cut
from .low_rank import MAGNITUDES, as_lora, norm, product_norm, stacked_norm

_CHUNK_BYTES = 4 * 2**20
"""Of a temporary of rows of dW in fp32. About eight stand at a time."""


def difference(a: Change | Split, b: Change | Split, whole: bool = False) -> float:
    """‖dWa − dWb‖ / ‖dWa‖ (Frobenius), and where it is larger the relative difference of a DoRA's lengths.

    Where one is a `Split` this is the worst of its members, so that a small one that got lost shows; with `whole` it is
    that of the fused module. Factors of the same bits and scale are not computed with: 0. LoRA pairs go by

        s₁ B₁ A₁ − s₂ B₂ A₂ = (s₁ B₁ − s₂ B₂) A  where the A's are the same bits, else [s₁ B₁, −s₂ B₂] [A₁; A₂] by QR,

    in fp64. Ranks that are zero in the rows at hand are left out before. LoKr pairs of like shapes go by their factors
    too, and a LoKr beside a LoRA by its own form as one. All else goes by dW in chunks of rows, in fp32 with fp64 sums,
    whose floor is about 1e-7. Lengths are compared in the forms that both have, each by itself: |a − b| / |a|, the
    largest.

    Returns:
        0 if nothing differs. Infinite for other shapes, for a number that is not finite, for a difference from nothing,
        and where only one of both has lengths or they have no form in common.
    """
    if not _same_shape(a, b):
        return math.inf
    by_column = any(member.column_magnitude is not None for side in (a, b) for member in members_of(side))
    if by_column and isinstance(a, Split) != isinstance(b, Split):
        # Lengths of columns of q, k and v apart are not those of all rows together.
        return math.inf
    rows = a.rows if isinstance(a, Split) else b.rows if isinstance(b, Split) else None
    bounds = [None] if rows is None else list(pairwise(accumulate(rows, initial=0)))
    apart, norms, lengths = [], [], 0.0
    for index, bound in enumerate(bounds):
        one, other = _piece(a, index, bound), _piece(b, index, bound)
        lengths = max(lengths, _lengths(one, other))
        distance = _distance(one, other)
        apart.append(distance)
        # What does not differ is not measured, unless the others' share of the whole is asked for.
        norms.append(_norm(one) if distance or (whole and len(bounds) > 1) else 0.0)
    if whole:
        return max(lengths, _relative(math.hypot(*apart), math.hypot(*norms)))
    return max(lengths, *(_relative(distance, norm) for distance, norm in zip(apart, norms, strict=True)))


def _relative(distance: float, norm: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / norm if norm and math.isfinite(distance) and math.isfinite(norm) else math.inf


def _same_shape(a: Change | Split, b: Change | Split) -> bool:
    def shapes(side: Change | Split) -> tuple[tuple[int, ...] | int, set[tuple[int, ...]]]:
        """Rows in all, and the shapes of the rest."""
        if isinstance(side, Split):
            fits = all(m is None or m.shape[0] == rows for m, rows in zip(side.members, side.rows, strict=True))
            columns = {member.shape[1:] for member in side.members if member is not None}
            return sum(side.rows) if fits else -1, columns
        return side.shape[0], {side.shape[1:]}

    if isinstance(a, Split) and isinstance(b, Split) and a.rows != b.rows:
        return False
    (rows_a, columns_a), (rows_b, columns_b) = shapes(a), shapes(b)
    return rows_a == rows_b != -1 and len(columns_a | columns_b) <= 1


@dataclass(frozen=True)
class _Piece:
    """Rows of a change, which has no cut of its own kind at them."""

    change: Change
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stop - self.start, *self.change.shape[1:]

    def delta(self, rows: slice) -> Tensor:
        return self.change.delta(slice(self.start + rows.start, min(self.start + rows.stop, self.stop)))

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in MAGNITUDES:
            raise AttributeError(name)
        value = getattr(self.change, name)
        return None if value is None else value[self.start : self.stop]


_Side = Change | _Piece | None


def _piece(side: Change | Split, index: int, bound: tuple[int, int] | None) -> _Side:
    if isinstance(side, Split):
        return side.members[index]
    return side if bound is None else cut(side, *bound) or _Piece(side, *bound)


def _lengths(one: _Side, other: _Side) -> float:
    """The largest relative difference of the lengths; None has none."""
    mine, theirs = (
        {} if side is None else {name: getattr(side, name) for name in MAGNITUDES if getattr(side, name) is not None}
        for side in (one, other)
    )
    if not mine and not theirs:
        return 0.0
    common = mine.keys() & theirs.keys()
    if not common:
        return math.inf
    worst = 0.0
    for name in common:
        a, b = mine[name].double().flatten(), theirs[name].double().flatten()
        if a.shape != b.shape:
            return math.inf
        # 0 / 0 is no difference; anything else that is not finite is one.
        ratio = torch.where(a == b, 0.0, (a - b).abs() / a.abs()).nan_to_num(math.inf, math.inf)
        worst = max(worst, ratio.max().item())
    return worst


def _distance(one: _Side, other: _Side) -> float:
    """‖dW − dW'‖; None is no change."""
    if one is None or other is None:
        return _norm(other if one is None else one)
    if _same_bits(one, other):
        return 0.0
    if isinstance(one, LokrModule) and isinstance(other, LokrModule):
        (w1, w2), (w1_other, w2_other) = _factors(one), _factors(other)
        if w1.shape == w1_other.shape and w2.shape == w2_other.shape:
            return _kronecker_distance(w1, w2, w1_other, w2_other)
    if isinstance(one, LoraModule) or isinstance(other, LoraModule):
        low, low_other = _low_rank(one), _low_rank(other)
        if low is not None and low_other is not None:
            return _low_rank_distance(low, low_other)
    return _dense_norm(one, other)


def _same_bits(one: Change | _Piece, other: Change | _Piece) -> bool:
    if isinstance(one, _Piece) or isinstance(other, _Piece):
        return (
            isinstance(one, _Piece)
            and isinstance(other, _Piece)
            and (one.start, one.stop) == (other.start, other.stop)
            and _same_bits(one.change, other.change)
        )
    if type(one) is not type(other) or one.scale != other.scale:
        return False
    mine, theirs = one.factors(), other.factors()
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


def _low_rank_distance(one: LoraModule, other: LoraModule) -> float:
    (up_1, down_1), (up_2, down_2) = _live(one), _live(other)
    if torch.equal(down_1.double(), down_2.double()):
        apart = one.scale * up_1.double() - other.scale * up_2.double()
        # A difference of nothing but the place of the scale is none.
        return product_norm(apart, down_1) if apart.any() else 0.0
    return stacked_norm(
        torch.cat([one.scale * up_1.double(), -other.scale * up_2.double()], dim=1),
        torch.cat([down_1.double(), down_2.double()]),
    )


def _low_rank(side: Change | _Piece) -> LoraModule | None:
    """A LoRA, or a LoKr as one."""
    whole = side.change if isinstance(side, _Piece) else side
    low = as_lora(whole) if isinstance(whole, LoraModule | LokrModule) else None
    if low is None or not isinstance(side, _Piece):
        return low
    return replace(low, up=low.up[side.start : side.stop], magnitude=None, magnitude_over_base=None)


def _factors(change: LokrModule) -> tuple[Tensor, Tensor]:
    """w1 with the scale in it, and w2, in fp64."""
    w1, w2 = (
        factor[0].double() @ factor[1].double() if isinstance(factor, tuple) else factor.double()
        for factor in (change.w1, change.w2)
    )
    return change.scale * w1, w2


def _kronecker_distance(w1: Tensor, w2: Tensor, w1_other: Tensor, w2_other: Tensor) -> float:
    """‖w1 ⊗ w2 − w1' ⊗ w2'‖ as that of d1 ⊗ w2 + w1' ⊗ d2, with the differences d of the factors.

    Its square is ‖d1‖² ‖w2‖² + ‖w1'‖² ‖d2‖² + 2 ⟨d1, w1'⟩ ⟨w2, d2⟩, so that nothing large cancels where d is small.
    """
    d1, d2 = w1 - w1_other, w2 - w2_other
    square = (d1.norm() * w2.norm()) ** 2 + (w1_other.norm() * d2.norm()) ** 2
    return math.sqrt(max((square + 2 * (d1 * w1_other).sum() * (w2 * d2).sum()).item(), 0.0))


def _live(change: LoraModule) -> tuple[Tensor, Tensor]:
    """B and A without the ranks whose column of B is zero, as most are in a member's rows of a stack."""
    live = change.up.any(0)
    return (change.up, change.down) if live.all() else (change.up[:, live], change.down[live])


def _norm(side: _Side) -> float:
    """‖dW‖."""
    if side is None:
        return 0.0
    return norm(side) if isinstance(side, Change) else _dense_norm(side)


def _dense_norm(one: Change | _Piece, other: Change | _Piece | None = None) -> float:
    """‖dW − dW'‖, or ‖dW‖, in chunks of rows."""
    total = 0.0
    for rows in _chunks(one.shape):
        delta = one.delta(rows)
        if other is not None:
            delta = delta - other.delta(rows)
        total += torch.linalg.vector_norm(delta, dtype=torch.float64).item() ** 2
    return math.sqrt(total)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
