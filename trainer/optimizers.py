"""Optimisers of the adapter's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .errors import SettingsError
from .quiet import quiet_torchao

OPTIMIZERS = ("adamw", "adamw8bit")
FP32 = 4  # bytes
# torchao's 8-bit moments: one byte each and an fp32 scale per 256, for weights of at least 4096 in whole such blocks.
BLOCK_8BIT, LEAST_8BIT, LEVELS_8BIT = 256, 4096, 256


def build(
    name: str, parameters: Sequence[nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimiser over the parameters.

    Args:
        name: `adamw`, or `adamw8bit` (torchao's, after arXiv 2110.02861): moments in 8 bits with a scale per 256
            values, for weights of at least 4096 elements; smaller ones keep fp32 moments.
        parameters: fp32 master weights.
        learning_rate: the peak; `set_learning_rate` sets that of a step.
        weight_decay: decoupled.
    """
    if name == "adamw":
        # Fused: one kernel, and no temporary as large as the parameters.
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
    if name == "adamw8bit":
        with quiet_torchao():
            from torchao.optim import AdamW8bit
        return AdamW8bit(parameters, lr=learning_rate, weight_decay=weight_decay)
    raise SettingsError(f"optimizer {name!r} is not known; choose one of {', '.join(OPTIMIZERS)}")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of the next step."""
    for group in optimizer.param_groups:
        # torchao keeps the rate in a tensor, so that a new value does not recompile its step.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def moments_bytes(sizes: Sequence[int], optimizer: str) -> int:
    """Both moments of AdamW: fp32, or torchao's 8 bits with an fp32 scale per 256 and an fp32 table of 256 levels."""
    if optimizer != "adamw8bit":
        return 2 * FP32 * sum(sizes)
    return sum(2 * _moment_8bit(size) for size in sizes)


def _moment_8bit(size: int) -> int:
    if size < LEAST_8BIT or size % BLOCK_8BIT:
        return FP32 * size
    return size + FP32 * (size // BLOCK_8BIT + LEVELS_8BIT)
