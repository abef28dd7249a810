"""Frozen Linears at a chosen precision.

A frozen weight lives as plain buffers (data, scales) of an `nn.Linear` subclass: plain buffers move, copy, list and run
under inference mode, which torchao's tensor subclasses do not. The weight is dequantised for one matmul and dropped:
its autograd Function keeps no copy for backward, it dequantises again. Layers that are told to multiply in 8 bits
(`eight_bit`) never dequantise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import eight_bit, kept, microscaling
from .formats import Buffers, Dense, Format

_DESCRIBED: ContextVar[bool] = ContextVar("described", default=False)


@contextmanager
def described_weights() -> Iterator[None]:
    """While it lasts, `FrozenLinear.weight` has its shape and device but no data, for callers that ask for no more.

    PEFT reads it 19 times for each layer that it adapts, and each read would dequantise.
    """
    token = _DESCRIBED.set(True)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


# --- the layer -------------------------------------------------------------------------------------------------------


class FrozenLinear(nn.Linear):
    """A Linear whose weight and bias are buffers in some `Format` and are never trained.

    `weight` reads as the dequantised tensor, made anew at each access.

    Attributes:
        format: how the weight is stored; None while it is not.
        placed: something else decides where the buffers lie, and `.to(device)` leaves them there.
        eight_bit: whether it multiplies in 8 bits, which its format must be able to, where its input has enough rows.
    """

    placed = False
    eight_bit = False

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.format: Format | None = None
        self.register_buffer("bias", None)

    @classmethod
    def like(cls, linear: nn.Linear) -> FrozenLinear:
        """An empty layer of the same size, whose weight and bias are still to be stored."""
        return cls(linear.in_features, linear.out_features)

    @torch.no_grad()
    def store(self, weight: Tensor, format: Format, device: torch.device | str | None = None) -> FrozenLinear:
        """Keeps a copy of `weight` (out, in), any floating dtype, in `format`; quantised in fp32 on the device."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight is {tuple(weight.shape)}, layer is {(self.out_features, self.in_features)}")
        with torch.inference_mode(False):
            # Moved as it is stored, which is never wider than fp32.
            return self.restore(format.quantize(weight.detach().to(device)), format)

    def restore(self, buffers: Buffers, format: Format) -> FrozenLinear:
        """Takes the very buffers that `format` made of a weight of this layer's size."""
        if self.format is not None:
            for name in self.format.buffers:
                del self._buffers[name]
        self.format = format
        for name in format.buffers:
            self.register_buffer(name, buffers[name].contiguous())
        return self

    @torch.no_grad()
    def store_bias(self, bias: Tensor, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        with torch.inference_mode(False):
            self.register_buffer("bias", bias.detach().to(device, dtype, copy=True))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if self.format is None or _DESCRIBED.get():
            device = "meta" if self.format is None else self.get_buffer("data").device
            return torch.empty((), device=device).expand(self.out_features, self.in_features)
        return self.dequantized(torch.float32 if not isinstance(self.format, Dense) else self.format.dtype)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in) in `dtype`. For a dense layer of that dtype this is the buffer itself: do not write."""
        assert self.format is not None, "no weight has been stored"
        buffers = {name: self.get_buffer(name) for name in self.format.buffers}
        return self.format.dequantize(buffers, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out) in x's dtype, which is the compute dtype."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _FrozenMatmul.apply(x, self)
        return matmul(x, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear:
        # `.to(dtype)` and `.half()` are meant for parameters that train; here they would spoil data and scales.
        for name, buffer in self._buffers.items():
            if buffer is not None and not self.placed:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        stored = None if self.format is None else self.format.name
        return f"in_features={self.in_features}, out_features={self.out_features}, format={stored}"


def matmul(x: Tensor, layer: FrozenLinear) -> Tensor:
    """(…, in) → (…, out) in x's dtype, without a graph to the weight."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if not _in_8_bits(x, layer):
        return F.linear(x, layer.dequantized(x.dtype), bias)
    y = _products(layer).forward(x.flatten(0, -2), layer.get_buffer("data"), layer.get_buffer("scale"))
    y = y.view(*x.shape[:-1], layer.out_features)
    return y if bias is None else y.add_(bias)


def input_gradient(grad: Tensor, layer: FrozenLinear) -> Tensor:
    """(…, out) → (…, in), grad @ W in grad's dtype."""
    if not _in_8_bits(grad, layer):
        return grad @ layer.dequantized(grad.dtype)
    x = _products(layer).input_gradient(grad.flatten(0, -2), layer.get_buffer("data"), layer.get_buffer("scale"))
    return x.view(*grad.shape[:-1], layer.in_features)


def _in_8_bits(rows: Tensor, layer: FrozenLinear) -> bool:
    """Whether the layer multiplies these rows (…, n) in 8 bits; too few of them it does not, such as one time token."""
    return layer.eight_bit and eight_bit.fits(rows.shape[:-1].numel(), layer.in_features, layer.out_features)


_PRODUCTS = {"int8": eight_bit, "fp8": eight_bit, "mxfp8": microscaling}


def _products(layer: FrozenLinear) -> ModuleType:
    """What multiplies in the layer's format, which has an `eight_bit`."""
    assert layer.format is not None
    assert layer.format.eight_bit is not None
    return _PRODUCTS[layer.format.eight_bit]


class _FrozenMatmul(torch.autograd.Function):
    """`x @ Wᵀ + b` whose backward reads the stored W again: nothing dequantised is kept between forward and backward.

    The layer is held rather than its tensors: weights that were loaded under inference mode cannot be saved for
    backward, and weights that were moved in between are found where they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return kept.output(layer, x, layer.out_features, lambda: matmul(x, layer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return input_gradient(grad, ctx.layer), None


# --- a whole model ---------------------------------------------------------------------------------------------------


def replace_linears(model: nn.Module, make: Callable[[str, nn.Linear], nn.Linear]) -> None:
    """Replaces every frozen Linear of the model, named as without adapters, by `make(name, linear)`.

    The Linears of adapters stay: an adapted layer's own Linear is its `base_layer`.
    """
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}".lstrip(".")
            if isinstance(child, nn.Linear) and ".lora_" not in path:
                setattr(module, child_name, make(path.removesuffix(".base_layer"), child))


def quantize_model(model: nn.Module, formats: Callable[[str], Format]) -> nn.Module:
    """Freezes a model that is in memory: every Linear becomes a `FrozenLinear` in the format that its name gets."""

    def freeze(name: str, linear: nn.Linear) -> FrozenLinear:
        format = formats(name)
        layer = FrozenLinear.like(linear).store(linear.weight, format)
        if linear.bias is not None:
            layer.store_bias(linear.bias, linear.bias.dtype)
        return layer

    replace_linears(model, freeze)
    return model
