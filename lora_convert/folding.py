"""Scales put into factors, for readers that know of no alpha; ranks made equal, for those that know of one only."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .canonical import Factor, LokrModule, LoraModule
from .low_rank import alpha_at


def fold(module: LoraModule, dtype: torch.dtype | None) -> tuple[LoraModule, float]:
    """The scale in B, alpha the rank.

    The product is formed in fp32 and rounded once, to `dtype`, or to B's own where that is None.

    Returns:
        The module, and what the rounding to B's own dtype has cost, relative (2/3 in bf16: 1.6e-3; a power of two: 0);
        0 where another dtype was asked for, whose rounding there is anyhow.
    """
    if module.scale == 1:
        return module, 0.0
    up, cost = _scaled(module.up, module.scale, dtype)
    return replace(module, up=up, alpha=float(module.rank)), cost


def fold_lokr(module: LokrModule, dtype: torch.dtype | None) -> tuple[LokrModule, float]:
    """The scale in the second factor, alpha the rank, and what the rounding has cost, as in `fold`."""
    if module.scale == 1 or module.rank is None:
        return module, 0.0
    folded, cost = _scaled(module.w2[0] if isinstance(module.w2, tuple) else module.w2, module.scale, dtype)
    w2: Factor = (folded, module.w2[1]) if isinstance(module.w2, tuple) else folded
    return replace(module, w2=w2, alpha=float(module.rank)), cost


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype | None) -> tuple[Tensor, float]:
    """The product, formed in fp32 and rounded once, and what that has cost in the tensor's own dtype."""
    exact = tensor.float() * scale
    scaled = exact.to(dtype or tensor.dtype)
    return scaled, 0.0 if dtype not in (None, tensor.dtype) else _relative(scaled, exact)


def whole_w1(module: LokrModule) -> LokrModule:
    """The first factor multiplied out, in fp32: it is the small one. The scale stays what it is."""
    if not isinstance(module.w1, tuple):
        return module
    w1 = module.w1[0].float() @ module.w1[1].float()
    if isinstance(module.w2, tuple):
        return replace(module, w1=w1)
    # With both whole there is no scale any more.
    return replace(module, w1=w1 * module.scale)


def pad(module: LoraModule, rank: int) -> LoraModule:
    """The same dW at a larger rank, by zero rows of A and zero columns of B; alpha grows with it."""
    more = rank - module.rank
    if more == 0:
        return module
    down = torch.nn.functional.pad(module.down, (0, 0, 0, more))
    up = torch.nn.functional.pad(module.up, (0, more))
    return replace(module, down=down, up=up, alpha=alpha_at(module.alpha, module.rank, rank))


def _relative(found: Tensor, wanted: Tensor) -> float:
    if torch.equal(found.to(wanted.dtype), wanted):
        return 0.0
    norm = wanted.double().norm()
    return ((found.double() - wanted.double()).norm() / norm).item() if norm > 0 else 0.0
