"""What the CPU wants otherwise than a card.

torch's CPU kernels take numbers of one dtype many at a time, and of two dtypes, or of fp8, one by one: the product of a
bf16 weight and its fp32 scales takes 25 times as long as that of an fp32 copy. And what fits its caches is worked on
several times as fast as what does not. A card knows neither, and would pay for the copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FITS_CACHES = 2**19  # numbers, 2 MiB in fp32

_NAN, _NEGATIVE_NAN = 0x7F, 0xFF
_KEPT = -(2**15) | 0x7F << 7  # the sign, and the seven other bits where they are put


def is_cpus(tensor: Tensor) -> bool:
    """Whether the CPU works on it. A tensor without data stands for a card's."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def one_dtype(x: Tensor) -> Tensor:
    """An operand for an operation with an fp32 one: on the CPU in fp32, elsewhere as it is."""
    return x.float() if is_cpus(x) else x


def largest_of_rows(x_MK: Tensor) -> Tensor:
    """max|row|, (M, 1) in fp32. A norm makes no copy, and is the slowest reduction that the CPU has."""
    if is_cpus(x_MK):
        return x_MK.abs().amax(1, keepdim=True).float()
    return torch.linalg.vector_norm(x_MK, math.inf, dim=1, keepdim=True).float()


def widened(data: Tensor) -> Tensor:
    """8-bit numbers → fp32, the same to the bit as `.float()`.

    The bits of a float8_e4m3fn, put where fp16 has sign, exponent and mantissa, are the number over 2⁸, subnormal ones
    included: fp16's exponent counts from 15, fp8's from 7.
    """
    if data.dtype != torch.float8_e4m3fn or not data.numel() or _has_nan(data):
        return data.float()
    bits = data.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(_KEPT)
    return bits.view(torch.float16).float().mul_(2.0**8)


def _has_nan(data: Tensor) -> bool:
    """Of the numbers of either sign NaN has the largest bits."""
    return bool(data.view(torch.int8).max() == _NAN) or bool(data.view(torch.uint8).max() == _NEGATIVE_NAN)
