"""DoRA with the base weight at hand: its whole effect as dW, and its lengths in both forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .canonical import Change, DiffModule
from .errors import BrokenModuleError

_CHUNK_BYTES = 16 * 2**20
"""Of a temporary in fp64; a few stand at a time."""
_TINY = torch.finfo(torch.float32).tiny


def bake(change: Change, base_weight: Tensor | None = None) -> DiffModule:
    """Everything that a change does to its weight as one dW in fp32: merged weight − base weight.

    Without magnitudes that is dW, and no base is needed. Computed in fp64 in chunks of rows, since the difference of
    two weights loses the digits that they share.

    Args:
        change: (out, in), or of a vector.
        base_weight: (out, in), dequantised.

    Raises:
        BrokenModuleError: a DoRA without a base weight of its shape.
    """
    if not change.has_magnitude:
        return DiffModule(change.delta())
    if base_weight is None or tuple(base_weight.shape) != change.shape:
        found = "none" if base_weight is None else list(base_weight.shape)
        raise BrokenModuleError(f"the base weight is {found}; wanted {list(change.shape)}: give the right base")
    result = torch.empty(change.shape, dtype=torch.float32, device=base_weight.device)
    columns = torch.zeros(change.shape[1], dtype=torch.float64, device=base_weight.device)
    by_column = change.magnitude is None and change.magnitude_over_base is None
    if by_column:
        for rows in _chunks(change.shape):
            columns += _changed(change, base_weight, rows).square().sum(0)
    for rows in _chunks(change.shape):
        weight, changed = base_weight[rows].double(), _changed(change, base_weight, rows)
        if change.magnitude is not None:
            factor = (change.magnitude[rows].double() / changed.norm(dim=1).clamp_min(_TINY))[:, None]
        elif change.magnitude_over_base is not None:
            factor = (change.magnitude_over_base[rows].double() / weight.norm(dim=1).clamp_min(_TINY))[:, None]
        else:
            assert change.column_magnitude is not None
            factor = change.column_magnitude.double() / columns.sqrt().clamp_min(_TINY)
        result[rows] = (factor * changed - weight).float()
    return DiffModule(result)


def with_row_magnitudes(change: Change, base_weight: Tensor) -> Change:
    """The same change with its lengths by row in both forms, `magnitude` and `magnitude_over_base`, in fp32.

    A change without lengths gets those with which it stays what it is: ‖W + dW‖ and ‖W‖. One that has both, or lengths
    by column, is returned as it is.

    Raises:
        BrokenModuleError: the base weight has another shape.
    """
    if change.column_magnitude is not None:
        return change
    if change.magnitude is not None and change.magnitude_over_base is not None:
        return change
    if tuple(base_weight.shape) != change.shape:
        raise BrokenModuleError(f"the base weight is {list(base_weight.shape)}; wanted {list(change.shape)}")
    before = base_weight.new_empty(change.shape[0], dtype=torch.float64)
    after = torch.empty_like(before)
    for rows in _chunks(change.shape):
        before[rows] = base_weight[rows].double().norm(dim=1)
        after[rows] = _changed(change, base_weight, rows).norm(dim=1)
    magnitude = after
    if change.magnitude is not None:
        magnitude = change.magnitude.double()
    elif change.magnitude_over_base is not None:
        magnitude = change.magnitude_over_base.double() * after / before.clamp_min(_TINY)
    over_base = magnitude * before / after.clamp_min(_TINY)
    return replace(
        change,
        magnitude=magnitude.float() if change.magnitude is None else change.magnitude,
        magnitude_over_base=over_base.float() if change.magnitude_over_base is None else change.magnitude_over_base,
    )


def _changed(change: Change, base_weight: Tensor, rows: slice) -> Tensor:
    """W + dW, in fp64."""
    return base_weight[rows].double() + change.delta(rows).double()


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (8 * max(1, shape[1])))
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
