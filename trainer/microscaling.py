"""Microscaling: fp8 numbers of which 32 share a power of two (OCP Microscaling Formats 1.0), and their products.

Blackwell's matrix units multiply such numbers as they are, with a scale for every 32 summed ones of either operand. A
weight is multiplied along both of its axes, forward and for the gradient of its input. So its scales here belong to
tiles of 32 × 32: either way each row of a tile has the one scale, and the stored numbers are multiplied as they are
both times. Since fp8 has exponents of its own, a tile loses next to nothing to rows of 32 (a test measures it).

Activations get a scale per token and 32 numbers. No dequantised weight exists at any time; the gradient takes an 8-bit
copy in the order that CUDA wants.

Shape suffixes: M tokens, I inputs, O outputs; K the summed dimension, N that of the result; i, o, k, m: a 32nd of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eight_bit import FP8, INT8, LARGEST, MULTIPLE, in_parts, operands_fault, turned
from .on_cpu import one_dtype

BLOCK = 32
CHUNK = 2**22  # numbers of the input that are worked on at a time, which bounds the fp32 temporaries
# A scale's 8 bits are fp32's exponent (e8m0): 2^(bits - 127), the last of them NaN. That of fp32's smallest normal
# number is the least used.
_MANTISSA, _LEAST, _NAN = 23, 1, 255
# The rows and columns of scales that lie together in memory as cuBLAS reads them, and how the rows are cut.
_ROWS, _COLUMNS, _CUT = 128, 4, 32


def exponents(largest: Tensor) -> Tensor:
    """The least powers of two that bring numbers to at most 448, as bits of e8m0 in uint8.

    cuBLAS's own rule: log2(largest / 448), rounded up, so that nothing is cut off. NaN and infinity give NaN.

    Args:
        largest: fp32, ≥ 0.
    """
    bits = (largest / LARGEST[FP8]).view(torch.int32)
    rounded_up = (bits >> _MANTISSA) + ((bits & ((1 << _MANTISSA) - 1)) != 0)
    return rounded_up.clamp_(_LEAST, _NAN).to(torch.uint8)


def powers(exponent: Tensor) -> Tensor:
    """Those bits → the powers of two in fp32; NaN comes as infinity."""
    return (exponent.int() << _MANTISSA).view(torch.float32)


def inverse_powers(exponent: Tensor) -> Tensor:
    """The same for 1 / power."""
    return ((2 * 127 - exponent.int()) << _MANTISSA).view(torch.float32)


def quantize_blocks(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) in any floating dtype → float8_e4m3fn numbers (M, K), and bits of their scales (M, K / 32)."""
    blocks_MkB = x_MK.unflatten(1, (-1, BLOCK))
    exponent_Mk = exponents(blocks_MkB.abs().amax(-1).float())
    scaled = one_dtype(blocks_MkB) * inverse_powers(exponent_Mk)[..., None]
    return scaled.to(FP8).flatten(1), exponent_Mk


def in_order(scale_Mk: Tensor) -> Tensor:
    """Scales (rows, columns) in the order in which cuBLAS reads them, in one row, filled up with zeros.

    Pieces of 128 × 4, row after row of pieces; in each, rows r, r + 32, r + 64 and r + 96 stand side by side (cuBLAS
    documentation, "1D block scaling factors layout").
    """
    rows, columns = scale_Mk.shape
    padded = scale_Mk.new_zeros(-(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS)
    padded[:rows, :columns] = scale_Mk
    pieces = padded.view(-1, _ROWS // _CUT, _CUT, padded.shape[1] // _COLUMNS, _COLUMNS)
    return pieces.permute(0, 3, 2, 1, 4).flatten()


def cuda_fault(a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> str | None:
    """Why CUDA would refuse a product of these operands; None where it would not.

    By torch 2.13's `ScaledBlas.cpp`. Only dtypes, shapes and strides are looked at.
    """
    if a_MK.dtype != FP8 or b_KN.dtype != FP8:
        return f"the operands are {a_MK.dtype} and {b_KN.dtype}, wanted both in float8_e4m3fn"
    if fault := operands_fault(a_MK, b_KN, _fit, f"{BLOCK} to divide the second, and {MULTIPLE} the third"):
        return fault
    summed = len(b_KN)
    for scale, lines in ((scale_a, len(a_MK)), (scale_b, b_KN.shape[1])):
        size = -(-lines // _ROWS) * _ROWS * (-(-summed // BLOCK // _COLUMNS) * _COLUMNS)
        if scale.dtype != torch.float8_e8m0fnu or scale.numel() != size or not scale.is_contiguous():
            return f"scales are {scale.dtype} {tuple(scale.shape)}, wanted {size} of float8_e8m0fnu in one piece"
    if out_dtype != torch.bfloat16:
        return f"the result is {out_dtype}; it is made in bf16 alone"
    return None


def _fit(rows: int, summed: int, columns: int) -> bool:
    return min(rows, summed, columns) > 0 and summed % BLOCK == 0 and columns % MULTIPLE == 0


def forward(x_MI: Tensor, data_OI: Tensor, scale_oi: Tensor) -> Tensor:
    """x @ (scale · data)ᵀ, (M, O) in bf16.

    Args:
        x_MI: bf16.
        data_OI: float8_e4m3fn, row after row.
        scale_oi: bits of the tiles' scales, uint8 (O / 32, I / 32).

    Raises:
        ValueError: CUDA's rules do not allow it.
    """
    return _product(x_MI, data_OI.T, scale_oi)


def input_gradient(grad_MO: Tensor, data_OI: Tensor, scale_oi: Tensor) -> Tensor:
    """grad @ (scale · data), (M, I) in bf16; arguments and errors are as for `forward`."""
    return _product(grad_MO, turned(data_OI).T, scale_oi.T)


def _product(x_MK: Tensor, b_KN: Tensor, scale_nk: Tensor) -> Tensor:
    a_MK, scale_Mk = _quantized(x_MK)
    scale_a, scale_b = (
        in_order(scale).view(torch.float8_e8m0fnu) for scale in (scale_Mk, scale_nk.repeat_interleave(BLOCK, dim=0))
    )
    if fault := cuda_fault(a_MK, b_KN, scale_a, scale_b, x_MK.dtype):
        raise ValueError(f"this product cannot be made in mxfp8: {fault}")
    return torch._scaled_mm(a_MK, b_KN, scale_a, scale_b, out_dtype=x_MK.dtype)


def _quantized(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, so many numbers at a time that the temporaries stay small."""
    rows, summed = x_MK.shape
    split = in_parts(x_MK, summed, CHUNK)
    data_MK = torch.empty(rows, summed, dtype=FP8, device=x_MK.device)
    scale_Mk = torch.empty(rows, summed // BLOCK, dtype=torch.uint8, device=x_MK.device)
    for x, data, scale in zip(split, *(whole.tensor_split(len(split)) for whole in (data_MK, scale_Mk)), strict=True):
        numbers, bits = quantize_blocks(x)
        data.view(INT8).copy_(numbers.view(INT8))  # as integers, which every device can copy
        scale.copy_(bits)
    return data_MK, scale_Mk
