"""q, k and v: one fused change into three, and three into one. Exact wherever the mathematics allows.

With s = alpha / rank and dW = s · B A, the members of a fused change are its rows. To make one, the rows of A are those
of the members, and B is block diagonal; a row that two members share stands once. So fused → split → fused gives the
same bits back, and split → fused → split does where no scale had to be folded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .canonical import Change, DiffModule, Factor, LohaModule, LokrModule, LoraModule, Split
from .dora import bake, with_row_magnitudes
from .errors import BrokenModuleError, CannotConvertError
from .low_rank import MAGNITUDES, alpha_at, as_lora, magnitudes, narrow, product_norm, truncate
from .passes import copied, is_zero, live_columns

__all__ = ["bake", "cut", "fuse", "split", "truncate"]

Base = Callable[[], Tensor] | None
"""Gives the fused base weight (q's, k's and v's rows, in), asked only where the mathematics needs it."""

_NAMES = ("q", "k", "v")
_EXACT = 2e-7
"""Relative error of dW, of each member, up to which a collapse of the rank counts as exact: some roundings of fp32."""


def split(change: Change, rows: tuple[int, int, int], base: Base = None) -> Split:
    """The members of a fused change, by their output rows.

    - LoRA, LoHa: rank and scale stay; each has its own copy of A. Where the fused one is a stack, such that columns of
      B are zero in a member's rows, the member gets its own rank back, unless fusing again would order the rows of A
      otherwise.
    - LoKr: a LoKr where w2's rows divide every cut; else LoRA, exact up to fp32 rounding, where that is smaller than
      dW; else dW's rows.
    - DoRA by row: the lengths are cut likewise. By column: needs the base, and becomes dW's rows.
    - A member whose rows are all zero is left out, unless all are, or lengths would still change its weight.

    Args:
        change: (out, in).
        rows: of q, k and v; their sum is out.
        base: the fused base weight, for DoRA by column.

    Raises:
        BrokenModuleError: `rows` are not those of the change.
        CannotConvertError: DoRA by column without the base.
    """
    if len(change.shape) != 2 or change.shape[0] != sum(rows):
        wanted = " + ".join(map(str, rows))
        raise BrokenModuleError(f"the change is {list(change.shape)}; q, k and v need {wanted} rows")
    if change.column_magnitude is not None:
        change = bake(change, _base(base, "is a DoRA by column, whose lengths span q, k and v", change.shape))
    bounds = list(pairwise(accumulate(rows, initial=0)))
    members = _members(change, bounds) or _members(
        as_lora(change, copies=len(rows)) or DiffModule(change.delta(), **magnitudes(change)), bounds
    )
    first, *others = _trimmed(members)
    # One A for each: a file cannot hold a tensor under two names.
    members = [first, *map(_copied, others)]
    all_stay = change.has_magnitude or all(map(_is_zero, members))
    q, k, v = (member if all_stay or not _is_zero(member) else None for member in members)
    return Split((q, k, v), rows)


def _members(change: Change, bounds: list[tuple[int, int]]) -> list[Change]:
    """The cuts of a change; none of them where one is not possible."""
    cuts = [cut(change, start, stop) for start, stop in bounds]
    members = [member for member in cuts if member is not None]
    return members if len(members) == len(cuts) else []


def cut(change: Change, start: int, stop: int) -> Change | None:
    """Rows of a change, of the same kind; None where a LoKr has no such cut. Tensors are shared with the whole.

    Lengths by column are handed on; they do not go with the rows alone, which is the caller's to know.
    """
    piece = _cut_delta(change, start, stop)
    if piece is None:
        return None
    lengths = {
        name: value if value is None or name == "column_magnitude" else value[start:stop]
        for name, value in magnitudes(change).items()
    }
    return replace(piece, **lengths)


def _cut_delta(change: Change, start: int, stop: int) -> Change | None:
    """`cut`, but for the lengths."""
    rows = slice(start, stop)
    if isinstance(change, LoraModule):
        return replace(change, up=change.up[rows])
    if isinstance(change, LohaModule):
        return replace(change, w1_a=change.w1_a[rows], w2_a=change.w2_a[rows])
    if isinstance(change, DiffModule):
        return replace(change, diff=change.diff[rows])
    if isinstance(change, LokrModule):
        block = _lokr_rows(change)
        if start % block or stop % block:
            return None
        blocks = slice(start // block, stop // block)
        w1 = (change.w1[0][blocks], change.w1[1]) if isinstance(change.w1, tuple) else change.w1[blocks]
        return replace(change, w1=w1)
    raise TypeError(f"{type(change).__name__} is no kind of change that can be cut")


def fuse(split: Split, base: Base = None) -> Change:
    """One change of the fused module, whose rows are the members'.

    - LoRA: rows of A that members share stand once, B's blocks below each other and otherwise zero. At equal scales
      only alpha changes (s · rank); at unequal ones the ratio to the strongest is folded into B, in fp32 unless the
      dtype holds it exactly. A rank above that of the members falls to the numerical rank of A, if dW of each stays
      within 1e-6.
    - LoHa: likewise, a row being that of w1_b and w2_b.
    - LoKr: a LoKr where all have the same w2, and the same second half of a decomposed w1.
    - Otherwise (kinds mixed, LoKr of unlike w2): LoRA where each has such a form that is smaller than its dW, exact up
      to fp32 rounding; else dW itself.
    - Members that are missing have zero rows. DoRA by row: the lengths are joined; where some member has none, and DoRA
      by column always, the base is needed, and by column the result is dW itself.

    Args:
        split: at least one member.
        base: the fused base weight.

    Raises:
        BrokenModuleError: no member, or shapes that do not go together.
        CannotConvertError: lengths that cannot be known without the base.
    """
    present = _checked(split)
    columns = present[0].shape[1]
    shape = (sum(split.rows), columns)
    if any(member.column_magnitude is not None for member in present):
        weight = _base(base, "has members that are DoRA by column, whose lengths span q, k and v once fused", shape)
        pieces = weight.split(split.rows)
        q, k, v = (m and bake(m, piece) for m, piece in zip(split.members, pieces, strict=True))
        split = Split((q, k, v), split.rows)
    joined = _fused(split, columns)
    return replace(joined, **{**dict.fromkeys(MAGNITUDES), **_joined_magnitudes(split, base, shape)})


def _fused(split: Split, columns: int) -> Change:
    """dW alone, of members that fit each other."""
    present = [member for member in split.members if member is not None]
    if all(isinstance(member, LohaModule) for member in present):
        return _fused_stacks(split)
    if all(isinstance(member, LokrModule) for member in present):
        same = _fused_lokr(split)
        if same is not None:
            return same
    if not any(isinstance(member, DiffModule) for member in present):
        low = [None if member is None else as_lora(member) for member in split.members]
        if sum(member is not None for member in low) == len(present):
            q, k, v = low
            return _collapsed(_fused_stacks(Split((q, k, v), split.rows)), split.rows, low)
    device = next(iter(present[0].factors().values())).device
    dtypes = {member.diff.dtype if isinstance(member, DiffModule) else torch.float32 for member in present}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    diff = torch.zeros(sum(split.rows), columns, dtype=dtype, device=device)
    for whole, part in zip(split.members, diff.split(split.rows), strict=True):
        if whole is not None:
            part.copy_(whole.diff if isinstance(whole, DiffModule) else whole.delta())
    return DiffModule(diff)


# LoRA and LoHa. Both are a sum over ranks; row i of `_downs` and column i of `_ups` are what belongs to one of them.


def _ups(member: Change) -> list[Tensor]:
    """(out, rank) each."""
    return [member.w1_a, member.w2_a] if isinstance(member, LohaModule) else [_lora(member).up]


def _downs(member: Change) -> list[Tensor]:
    """(rank, in) each."""
    return [member.w1_b, member.w2_b] if isinstance(member, LohaModule) else [_lora(member).down]


def _stack(like: Change, ups: Sequence[Tensor], downs: Sequence[Tensor], alpha: float) -> Change:
    if isinstance(like, LohaModule):
        return replace(like, w1_a=ups[0], w2_a=ups[1], w1_b=downs[0], w2_b=downs[1], alpha=alpha)
    return replace(_lora(like), up=ups[0], down=downs[0], alpha=alpha)


def _trimmed(members: list[Change]) -> list[Change]:
    """Each without the ranks that another member alone has, as in a stack; see `split`."""
    if not all(isinstance(member, LoraModule | LohaModule) for member in members):
        return members
    live = [_live(member) for member in members]
    if all(all(columns) for columns in live):
        return members
    # A rank that no member has belongs to whoever has the one before it, or at the start the one after.
    owners = list(zip(*live, strict=True))
    first = next((owner for owner in owners if any(owner)), None)
    if first is None:
        return members
    filled = [first]
    for owner in owners:
        filled.append(owner if any(owner) else filled[-1])
    ranks = [[i for i, owner in enumerate(filled[1:]) if owner[m]] for m in range(len(members))]
    merged: list[int] = []
    for kept in ranks:
        merged = _merged(merged, kept)
    if merged != sorted(merged):
        return members
    return [_with_ranks(member, kept) if kept else member for member, kept in zip(members, ranks, strict=True)]


def _live(member: Change) -> list[bool]:
    """Per rank: whether any of its columns is not zero."""
    return torch.stack([live_columns(up) for up in _ups(member)]).any(0).tolist()


def _with_ranks(member: Change, kept: list[int]) -> Change:
    before = len(_downs(member)[0])
    if len(kept) == before:
        return member
    ups, downs = [up[:, kept] for up in _ups(member)], [down[kept] for down in _downs(member)]
    return _stack(member, ups, downs, alpha_at(_alpha(member), before, len(kept)))


def _merged(known: list[int], new: list[int]) -> list[int]:
    """Both in one order: what is new stands before the next that is known, or at the end."""
    merged, waiting = list(known), []
    for one in new:
        if one not in known:
            waiting.append(one)
        elif waiting:
            place = merged.index(one)
            merged[place:place] = waiting
            waiting = []
    return merged + waiting


def _fused_stacks(split: Split) -> Change:
    """All LoRA, or all LoHa: the ranks of the members without repetition, their columns in blocks of rows."""
    present = [member for member in split.members if member is not None]
    strongest = max(present, key=lambda member: abs(member.scale))
    downs = [_common([_downs(member)[i] for member in present]) for i in range(len(_downs(present[0])))]
    rows = [torch.cat(parts, dim=1) for parts in zip(*downs, strict=True)]
    places, order = _places(rows)
    offsets = list(accumulate((len(part) for part in rows), initial=0))
    source = [offsets[member] + row for member, row in order]
    stacked = [torch.cat(parts)[source] for parts in downs]
    ups = []
    for i in range(len(downs)):
        # The ratio goes into one factor: a LoHa's others stay as they are.
        ratios = [_ratio(member, strongest) if i == 0 else 1.0 for member in present]
        found = _common([_folded(_ups(member)[i], ratio) for member, ratio in zip(present, ratios, strict=True)])
        up = found[0].new_zeros(sum(split.rows), len(order))
        blocks = [part for part, member in zip(up.split(split.rows), split.members, strict=True) if member is not None]
        for block, part, columns in zip(blocks, found, places, strict=True):
            block[:, columns] = part
        ups.append(up)
    alpha = alpha_at(_alpha(strongest), len(_downs(strongest)[0]), len(order))
    return _stack(strongest, ups, stacked, alpha)


def _places(rows: list[Tensor]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """For each member's rows (rank, n) their place in the merged order, and that order as (member, row).

    Rows are the same if their bits are; of rows that a member repeats, each is matched once.
    """
    if all(torch.equal(rows[0], other) for other in rows[1:]):
        whole = list(range(len(rows[0])))
        return [whole] * len(rows), [(0, i) for i in whole]
    known: list[tuple[int, int]] = []
    by_hash: dict[int, list[int]] = {}
    ids: list[list[int]] = []
    order: list[int] = []
    for member, part in enumerate(rows):
        taken: set[int] = set()
        mine = []
        for row, value in enumerate(_hashes(part)):
            for one in by_hash.get(value, []):
                other, at = known[one]
                if one not in taken and other != member and torch.equal(rows[other][at], part[row]):
                    break
            else:
                one = len(known)
                known.append((member, row))
                by_hash.setdefault(value, []).append(one)
            taken.add(one)
            mine.append(one)
        ids.append(mine)
        order = _merged(order, mine)
    place = {one: at for at, one in enumerate(order)}
    return [[place[one] for one in mine] for mine in ids], [known[one] for one in order]


def _hashes(rows: Tensor) -> list[int]:
    """One number per row, from its bits alone."""
    words = rows.contiguous().view(torch.uint8).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2**54, (words.shape[1],), generator=generator).to(words.device)
    return (words * weights).sum(1).tolist()


def _collapsed(fused: Change, rows: Sequence[int], members: Sequence[LoraModule | None]) -> Change:
    """A LoRA whose A has dependent rows, with only as many of them as are independent; B takes up the others.

    Only where the rank is above the members': what one member has in excess is its own. The rows that stay keep their
    bits; B is in fp32, unless its dtype holds the result exactly. Where dW of any member would change by more than
    `_EXACT` of its norm, the whole stays.
    """
    fused = _lora(fused)
    if fused.rank == max(member.rank for member in members if member is not None):
        return fused
    down = fused.down.double()
    unit = down / down.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    gram = unit @ unit.T
    # The smallest squared singular value, within fp64's rounding and the tolerance squared.
    if torch.linalg.eigvalsh(gram)[0] > 1e-11:
        return fused
    kept = _independent(gram)
    others = [i for i in range(fused.rank) if i not in set(kept)]
    if not kept or not others:
        return fused
    # Rows of the others as sums of those that stay: (others, kept).
    weights = torch.linalg.lstsq(down[kept].T, down[others].T).solution.T
    rest = down[others] - weights @ down[kept]
    for part in fused.up.double().split(list(rows)):
        if product_norm(part[:, others], rest) > _EXACT * product_norm(part, down):
            return fused
    exact = fused.up[:, kept].double() + fused.up[:, others].double() @ weights
    up = narrow(exact, fused.up.dtype)
    up = up.float() if up.dtype == torch.float64 and fused.up.dtype != torch.float64 else up
    return replace(fused, down=fused.down[kept], up=up, alpha=alpha_at(fused.alpha, fused.rank, len(kept)))


def _independent(gram: Tensor) -> list[int]:
    """Those rows of unit length that are not sums of those before them, by their Gram matrix (R, R); by Cholesky."""
    kept: list[int] = []
    lower = torch.zeros_like(gram)
    for i in range(len(gram)):
        part = lower[i, : len(kept)]
        left = (gram[i, i] - part.square().sum()).clamp_min(0).sqrt()
        if left > _EXACT:
            column = (gram[i] - lower[:, : len(kept)] @ part) / left
            lower[:, len(kept)] = column
            kept.append(i)
    return kept


# LoKr


def _lokr_rows(change: LokrModule) -> int:
    """Rows of w2: those of a block of dW."""
    return change.w2[0].shape[0] if isinstance(change.w2, tuple) else change.w2.shape[0]


def _fused_lokr(split: Split) -> LokrModule | None:
    """Members of one w2, their w1 below each other; None where there is no such form."""
    present = [member for member in split.members if isinstance(member, LokrModule)]
    strongest = max(present, key=lambda member: abs(member.scale))
    block = _lokr_rows(strongest)
    if any(count % block for count in split.rows) or not all(
        _same(member.w2, strongest.w2)
        and isinstance(member.w1, tuple) == isinstance(strongest.w1, tuple)
        and (not isinstance(member.w1, tuple) or _same(member.w1[1], strongest.w1[1]))
        for member in present
    ):
        return None
    tops = []
    for member, count in zip(split.members, split.rows, strict=True):
        if isinstance(member, LokrModule):
            top = member.w1[0] if isinstance(member.w1, tuple) else member.w1
            tops.append(_folded(top, _ratio(member, strongest)))
        else:
            like = strongest.w1[0] if isinstance(strongest.w1, tuple) else strongest.w1
            tops.append(like.new_zeros(count // block, like.shape[1]))
    joined = torch.cat(_common(tops))
    return replace(strongest, w1=(joined, strongest.w1[1]) if isinstance(strongest.w1, tuple) else joined)


def _same(one: Factor, other: Factor) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(_same, one, other))
    if isinstance(one, tuple) or isinstance(other, tuple):
        return False
    return one.dtype == other.dtype and torch.equal(one, other)


# DoRA


def _joined_magnitudes(split: Split, base: Base, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The lengths by row of all members, in those forms that all have; with the base in both."""
    members = split.members
    if not any(member is not None and member.has_magnitude for member in members):
        return {}
    found = {}
    for name in ("magnitude", "magnitude_over_base"):
        parts = [getattr(member, name) for member in members if member is not None]
        if None not in members and all(part is not None for part in parts):
            found[name] = torch.cat(_common(parts))
    if found:
        return found
    having = [name for name, m in zip(_NAMES, members, strict=True) if m is not None and m.has_magnitude]
    which = " and ".join(having)
    weight = _base(base, f"is a DoRA in {which}, which has no common form for q, k and v", shape)
    whole = [
        with_row_magnitudes(member or DiffModule(piece.new_zeros(1, 1).expand(piece.shape)), piece)
        for member, piece in zip(members, weight.split(split.rows), strict=True)
    ]
    for name in ("magnitude", "magnitude_over_base"):
        found[name] = torch.cat([getattr(member, name).float() for member in whole])
    return found


def _base(base: Base, reason: str, shape: tuple[int, ...]) -> Tensor:
    if base is None:
        raise CannotConvertError(f"{reason}; wanted the base model for it: give it, or keep q, k and v as they are")
    weight = base()
    if tuple(weight.shape) != tuple(shape):
        raise BrokenModuleError(f"the base weight is {list(weight.shape)}; wanted {list(shape)}: give the right base")
    return weight


# Small parts


def _checked(split: Split) -> list[Change]:
    """The members that are there."""
    present = [member for member in split.members if member is not None]
    if not present:
        raise BrokenModuleError("q, k and v are all missing; wanted at least one of them")
    for name, member, rows in zip(_NAMES, split.members, split.rows, strict=True):
        wanted = (rows, present[0].shape[-1])
        if member is not None and member.shape != wanted:
            raise BrokenModuleError(f"{name} is {list(member.shape)}; wanted {list(wanted)}")
    return present


def _ratio(member: Change, strongest: Change) -> float:
    return member.scale / strongest.scale if strongest.scale else 1.0


def _folded(factor: Tensor, ratio: float) -> Tensor:
    """A factor times a number: in its dtype where that is exact, as it is for a power of two, else in fp32."""
    if ratio == 1.0:
        return factor
    wide = torch.float64 if factor.dtype == torch.float64 else torch.float32
    scaled = factor.to(wide) * ratio
    narrowed = scaled.to(factor.dtype)
    return narrowed if torch.equal(narrowed.double(), factor.double() * ratio) else scaled


def _common(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In their dtype, or where they differ in fp32, which holds all narrower ones exactly (fp64 where one has it)."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        dtypes = {torch.float64 if torch.float64 in dtypes else torch.float32}
    dtype = dtypes.pop()
    return [tensor.to(dtype) for tensor in tensors]


def _is_zero(member: Change) -> bool:
    if isinstance(member, DiffModule):
        return is_zero(member.diff)
    if isinstance(member, LokrModule):
        return is_zero(member.w1[0] if isinstance(member.w1, tuple) else member.w1)
    return all(map(is_zero, _ups(member)))


def _copied(member: Change) -> Change:
    """With its own copy of what members share."""
    if isinstance(member, LoraModule | LohaModule):
        return _stack(member, _ups(member), [copied(down) for down in _downs(member)], _alpha(member))
    if isinstance(member, LokrModule):
        w1 = (member.w1[0], copied(member.w1[1])) if isinstance(member.w1, tuple) else member.w1
        w2 = (copied(member.w2[0]), copied(member.w2[1])) if isinstance(member.w2, tuple) else copied(member.w2)
        return replace(member, w1=w1, w2=w2)
    return member


def _alpha(member: Change) -> float:
    return member.alpha if isinstance(member, LoraModule | LohaModule) else member.scale


def _lora(member: Change) -> LoraModule:
    assert isinstance(member, LoraModule)
    return member
