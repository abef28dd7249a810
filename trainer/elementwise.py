"""Element-wise work of a transformer between its matrix products: norms, rotations, gates, with backward by hand.

Autograd's own graph of a norm holds half a dozen fp32 tensors for one in bf16, and its backward pass reads and writes
each of them. Here a Function keeps its arguments, and as few tensors are made as there are values to hold. A norm
counts as element-wise: it reduces over the last axis, and mixes no tokens.

Everything is computed in fp32 and rounded once at the end, unless it says otherwise. The gradient of a gain or shift
sums over tokens, in fp32.

Shape suffixes: B batch, L tokens, D features, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import on_cpu
from .pointwise import pointwise


def rms_normed(x: Tensor, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """gain · x / √(mean(x²) + eps) + shift in x's dtype (RMSNorm, arXiv 1910.07467, and a modulation).

    Args:
        x: (…, D).
        gain: fp32, (D,) or of a shape that broadcasts to x's.
        shift: likewise, or None.
        eps: added to the mean.
    """
    return _RmsNormed.apply(x, gain, shift, eps)


def rms_normed_and_rotated(
    x_BLHK: Tensor, gain_K: Tensor, eps: float, cos: Tensor, sin: Tensor, neighbours: bool
) -> Tensor:
    """The same without a shift, then pairs of each head rotated (RoPE, arXiv 2104.09864), in x's dtype.

    Args:
        x_BLHK: queries or keys.
        gain_K: fp32.
        eps: as above.
        cos: fp32 (1, L, 1, K/2).
        sin: likewise.
        neighbours: a pair is two numbers side by side, or else one of the first half and one of the second.

    Raises:
        ValueError: the tables are to be trained.
    """
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("the tables of a rotation have no gradient here")
    return _RmsNormedAndRotated.apply(x_BLHK, gain_K, eps, cos, sin, neighbours)


@pointwise
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """sigmoid(gate) · x, each rounded to the dtype that both have."""
    return _Gated.apply(x, gate)


@pointwise
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202), each rounded to the dtype that both have."""
    return _Swiglu.apply(gate, up)


def _fp32(x: Tensor) -> Tensor:
    """A copy in one piece that may be written to."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor in fp32, a tensor of its own; the factor is fp32. A card reads x as it is."""
    return _fp32(x).mul_(factor) if on_cpu.is_cpus(x) else x * factor


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / √(mean(x²) + eps) in fp32, and 1 / √(mean(x²) + eps), (…, 1)."""
    if on_cpu.is_cpus(x):
        unit = _fp32(x)
        inverse = unit.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return unit.mul_(inverse), inverse
    # A norm makes no copy, and is the slowest reduction that a CPU has.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * inverse, inverse


def _from_unit(grad: Tensor, x: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x in its dtype, from that of unit = x · inverse, which is written to."""
    along = (grad * unit).mean(-1, keepdim=True)
    grad.addcmul_(unit, along, value=-1)
    if on_cpu.is_cpus(x) or torch.compiler.is_compiling():
        return grad.mul_(inverse).to(x.dtype)
    return torch.mul(grad, inverse, out=torch.empty_like(x))  # rounded on the way


class _RmsNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
        y, inverse = _unit(x, eps)
        ctx.save_for_backward(x, gain, inverse)
        ctx.shift_shape = None if shift is None else shift.shape
        y = y.mul_(gain) if shift is None else torch.addcmul(shift, y, gain)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        for_x, for_gain, for_shift = ctx.needs_input_grad[:3]
        unit = _times(x, inverse)
        grad_shift = grad.float().sum_to_size(ctx.shift_shape) if for_shift else None
        grad_gain = _times(grad, unit).sum_to_size(gain.shape) if for_gain else None
        grad_x = _from_unit(_times(grad, gain), x, unit, inverse) if for_x else None
        return grad_x, grad_gain, grad_shift, None


class _RmsNormedAndRotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLHK: Tensor, gain_K: Tensor, eps: float, cos: Tensor, sin: Tensor, neighbours: bool
    ) -> Tensor:
        unit, inverse = _unit(x_BLHK, eps)
        ctx.save_for_backward(x_BLHK, gain_K, inverse, cos, sin)
        ctx.neighbours = neighbours
        return _rotated(unit.mul_(gain_K), cos, sin, neighbours).to(x_BLHK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_BLHK, gain_K, inverse, cos, sin = ctx.saved_tensors
        # Rotating back is the transpose of rotating.
        turned, unit = _rotated(_fp32(grad), cos, -sin, ctx.neighbours), _times(x_BLHK, inverse)
        for_x, for_gain = ctx.needs_input_grad[:2]
        grad_gain = (turned * unit).sum_to_size(gain_K.shape) if for_gain else None
        grad_x = _from_unit(turned.mul_(gain_K), x_BLHK, unit, inverse) if for_x else None
        return grad_x, grad_gain, None, None, None, None


def _rotated(x_BLHK: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Pairs rotated; x is fp32, and may be written to."""
    pairs = x_BLHK.contiguous().unflatten(-1, (-1, 2) if neighbours else (2, -1))
    if neighbours and not torch.compiler.is_compiling():
        # One pass over numbers that lie side by side, where the lines below take strides; inductor knows no complex
        # numbers, and makes one pass of those lines.
        return torch.view_as_real(torch.view_as_complex(pairs).mul_(torch.complex(cos, sin))).flatten(-2)
    axis = -1 if neighbours else -2
    first, second = pairs.unbind(axis)
    turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    return torch.stack(turned, dim=axis).flatten(-2)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return gate.sigmoid().mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, gate = ctx.saved_tensors
        for_x, for_gate = ctx.needs_input_grad
        share = gate.sigmoid()
        grad_gate = torch.ops.aten.sigmoid_backward(grad * x, share) if for_gate else None
        return share.mul_(grad) if for_x else None, grad_gate


class _Swiglu(torch.autograd.Function):
    """Its backward has the least alive: the two arguments, the gradient, and the two that are wanted."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        for_gate, for_up = ctx.needs_input_grad
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate) if for_gate else None
        return grad_gate, F.silu(gate).mul_(grad) if for_up else None
