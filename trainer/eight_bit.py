"""Products of activations with an 8-bit weight, carried out in 8 bits: forward, and gradient of the input.

Activations get one scale per token, found from their values, and the weight has one per output row; the products of
8-bit numbers are summed in int32 (`torch._int_mm`) or fp32 (`torch._scaled_mm`) and scaled once at the end. In the
gradient of the input, G @ W, the weight's scales lie along the summed dimension: G is multiplied by them before it gets
scales of its own, so that the stored numbers are multiplied as they are. No dequantised weight exists at any time; that
gradient takes an 8-bit copy in the order that CUDA wants, for the one product.

The CPU takes shapes, orders and dtypes that CUDA refuses. So CUDA's rules (torch 2.13 `aten/src/ATen/native/cuda`,
`_int_mm_out_cuda` and `_scaled_mm`, and cuBLASLt's for int8) stand here as one function, and hold on every device.

Shape suffixes: M tokens, I inputs, O outputs; K the summed dimension, N that of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .on_cpu import largest_of_rows, one_dtype

INT8, FP8 = torch.int8, torch.float8_e4m3fn
DTYPES = {"int8": INT8, "fp8": FP8}  # by the format's name
LARGEST = {INT8: 127.0, FP8: 448.0}
FEW_ROWS = 16  # `_int_mm` wants more than that
MULTIPLE = 16  # of numbers in a row: 16 bytes, which all 8-bit kernels can read at once
# Numbers of the input or of the result that are worked on at a time, which bounds the fp32 and int32 temporaries. With
# this many they take no more than the dequantised weights of the published models would.
CHUNK = 2**23
_TINY = torch.finfo(torch.float32).tiny


def fits(rows: int, inputs: int, outputs: int) -> bool:
    """Whether a Linear of this size, called with so many tokens, can be multiplied in 8 bits, forward and backward."""
    return rows > FEW_ROWS and inputs > 0 and outputs > 0 and inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0


def cuda_fault(a_MK: Tensor, b_KN: Tensor, scale_M1: Tensor, scale_1N: Tensor, out_dtype: torch.dtype) -> str | None:
    """Why CUDA would refuse a product of these operands, or be wrong about it; None where it would not.

    Only dtypes, shapes and strides are looked at.
    """
    if a_MK.dtype != b_KN.dtype or a_MK.dtype not in LARGEST:
        return f"the operands are {a_MK.dtype} and {b_KN.dtype}, wanted both in int8 or both in float8_e4m3fn"
    wanted = f"more than {FEW_ROWS} rows, and multiples of {MULTIPLE} for the others"
    if fault := operands_fault(a_MK, b_KN, fits, wanted):
        return fault
    for scale, shape in ((scale_M1, (len(a_MK), 1)), (scale_1N, (1, b_KN.shape[1]))):
        if scale.dtype != torch.float32 or scale.shape != shape or not scale.is_contiguous():
            return f"a scale is {scale.dtype} {tuple(scale.shape)}, wanted fp32 {shape} in one piece"
    if a_MK.dtype == FP8 and out_dtype != torch.bfloat16:
        return f"the result is {out_dtype}; with a scale per row CUDA's fp8 product gives bf16 alone"
    return None


def operands_fault(a_MK: Tensor, b_KN: Tensor, fit: Callable[[int, int, int], bool], wanted: str) -> str | None:
    """Why no 8-bit kernel of CUDA takes these operands, of whatever dtype, by their shapes and strides.

    Args:
        a_MK: of any shape.
        b_KN: likewise.
        fit: whether M, K and N do.
        wanted: of M, K and N.
    """
    if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
        return f"{tuple(a_MK.shape)} and {tuple(b_KN.shape)} are no matrices that can be multiplied"
    (rows, summed), columns = a_MK.shape, b_KN.shape[1]
    if not fit(rows, summed, columns):
        return f"the product is {rows} × {summed} × {columns}, wanted {wanted}"
    if a_MK.stride() != (summed, 1):
        return f"the first operand has strides {a_MK.stride()}, wanted row after row, {(summed, 1)}"
    if b_KN.stride() != (1, summed):
        return f"the second operand has strides {b_KN.stride()}, wanted column after column, {(1, summed)}"
    return None


def forward(x_MI: Tensor, data_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """x @ (scale · data)ᵀ, (M, O) in x's dtype.

    Args:
        x_MI: bf16, or with int8 data any floating dtype.
        data_OI: int8 or float8_e4m3fn, row after row.
        scale_O1: fp32.

    Raises:
        ValueError: CUDA's rules do not allow it.
    """
    return _product(x_MI, data_OI.T, scale_O1.T)


def input_gradient(grad_MO: Tensor, data_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """grad @ (scale · data), (M, I) in grad's dtype; arguments and errors are as for `forward`."""
    return _product(grad_MO, turned(data_OI).T, None, scale_O1.T)


def turned(data_OI: Tensor) -> Tensor:
    """A copy (I, O), row after row."""
    # As integers, whose copy every device can make.
    return data_OI.view(INT8).T.contiguous().view(data_OI.dtype)


def quantize_rows(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(M, K) in any floating dtype → 8-bit numbers (M, K), and their scales (M, 1) in fp32, max|row| / 127 or 448.

    A row of zeros stays one. A row with a NaN or an infinity gets a scale that is not finite, so that its products are
    not either.
    """
    scale_M1 = (largest_of_rows(x_MK) / LARGEST[dtype]).clamp_min_(_TINY)
    scaled_MK = one_dtype(x_MK) / scale_M1
    rounded_MK = scaled_MK.round_() if dtype == INT8 else scaled_MK
    return rounded_MK.to(dtype, memory_format=torch.contiguous_format), scale_M1


def in_parts(x_MK: Tensor, widest: int, chunk: int) -> tuple[Tensor, ...]:
    """x cut by rows into parts of at most `chunk` numbers, `widest` in a row; none has too few rows for a product."""
    rows = len(x_MK)
    return x_MK.tensor_split(max(1, min(math.ceil(rows * widest / chunk), rows // (FEW_ROWS + 1))))


def _product(x_MK: Tensor, b_KN: Tensor, scale_1N: Tensor | None, input_scale_1K: Tensor | None = None) -> Tensor:
    """(x · input scale) @ b · scale, (M, N) in x's dtype; without a scale it is 1."""
    rows, columns = len(x_MK), b_KN.shape[1]
    ones_1N = torch.ones(1, columns, device=x_MK.device) if scale_1N is None else scale_1N

    split = in_parts(x_MK, max(x_MK.shape[1], columns), CHUNK)
    quantized = (
        quantize_rows(x if input_scale_1K is None else one_dtype(x) * input_scale_1K, b_KN.dtype) for x in split
    )
    if b_KN.dtype == FP8:
        # Its kernel scales by itself: nothing wider than the result is made.
        numbers, scales = zip(*quantized, strict=True)
        # As integers, which every device can put together.
        a_MK, scale_M1 = torch.cat([part.view(INT8) for part in numbers]).view(FP8), torch.cat(scales)
        _check(a_MK, b_KN, scale_M1, ones_1N, x_MK.dtype)
        return torch._scaled_mm(a_MK, b_KN, scale_M1, ones_1N, out_dtype=x_MK.dtype)
    out_MN = x_MK.new_empty(rows, columns)
    for (a_MK, scale_M1), out in zip(quantized, out_MN.tensor_split(len(split)), strict=True):
        _check(a_MK, b_KN, scale_M1, ones_1N, x_MK.dtype)
        product = one_dtype(torch._int_mm(a_MK, b_KN))
        if scale_1N is None:
            torch.mul(product, scale_M1, out=out)
        else:
            torch.mul(product * scale_M1, scale_1N, out=out)
    return out_MN


def _check(a_MK: Tensor, b_KN: Tensor, scale_M1: Tensor, scale_1N: Tensor, out_dtype: torch.dtype) -> None:
    if fault := cuda_fault(a_MK, b_KN, scale_M1, scale_1N, out_dtype):
        raise ValueError(f"this product cannot be made in 8 bits: {fault}")
