"""Single passes over tensors, each by small pieces.

torch divides any operation on more than 2¹⁵ numbers among its threads, and waits for the slowest of them. That is worth
nothing where memory is the limit, and costs a time slice of the system for each of some thousand operations where a
core has other work. Pieces below that stay on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 2**15 - 64
_HEAD = 64
"""Rows that tell of nearly every column whether it has anything but zeros."""


def largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN or inf where there is one. Faster than `isfinite`, and without a copy.

    Args:
        tensor: floating point, not empty.
    """
    ends = [end for piece in _pieces(tensor) for end in torch.aminmax(piece)]
    return torch.stack(ends).abs().amax().item()


def copied(tensor: Tensor) -> Tensor:
    """The same in storage of its own, contiguous."""
    tensor = tensor.contiguous()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for to, piece in zip(_pieces(copy), _pieces(tensor), strict=True):
        to.copy_(piece)
    return copy


def live_columns(tensor: Tensor) -> Tensor:
    """(n,) of a matrix (m, n): whether the column has anything but zeros."""
    head = tensor[:_HEAD].ne(0).any(0)
    return head if head.all() else tensor.any(0)


def is_zero(tensor: Tensor) -> bool:
    """Whether there is nothing but zeros."""
    return not tensor[:1].any() and not tensor.any()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.reshape(-1)
    return flat.split(_PIECE) if tensor.device.type == "cpu" and tensor.is_contiguous() else (flat,)
