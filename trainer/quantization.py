"""Frozen Linears at a chosen precision.

A frozen weight lives as plain buffers (data, scales) of an `nn.Linear` subclass: plain buffers move, copy, list and run
under inference mode, which torchao's tensor subclasses do not. torchao does the quantising; what is kept are its
numbers. The weight is dequantised for one matmul and dropped: its autograd Function keeps no copy for backward, it
dequantises again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import SettingsError
from .quiet import quiet_torchao

Buffers = Mapping[str, Tensor]

# --- formats ---------------------------------------------------------------------------------------------------------


class Format(ABC):
    """How a weight (out, in) is stored. `buffers` names what is stored; `quantize` makes it, `dequantize` undoes it."""

    name: ClassVar[str]
    buffers: ClassVar[tuple[str, ...]] = ("data", "scale")

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """Whether a weight of this shape can be stored so."""
        return True

    def fits(self, weight: Tensor) -> bool:
        """Whether this weight can be stored so."""
        return self.fits_shape(weight.shape)

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """fp32 (out, in) → the buffers."""

    @abstractmethod
    def empty(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Buffers as `quantize` would make them for a weight of this shape, uninitialised, on the default device."""

    @abstractmethod
    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The buffers → (out, in) in `dtype`, computed in fp32 and rounded once."""


class Dense(Format):
    """The weight as it is, in one floating dtype."""

    buffers = ("data",)

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]
        self.dtype = dtype

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return {"data": weight.to(self.dtype)}

    def empty(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        return {"data": torch.empty(shape, dtype=self.dtype)}

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return buffers["data"].to(dtype)


class _PerRow(Format):
    """8-bit data and one fp32 scale per output row (out, 1)."""

    dtype: ClassVar[torch.dtype]

    def empty(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        return {"data": torch.empty(shape, dtype=self.dtype), "scale": torch.empty(shape[0], 1)}

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        # 8-bit data are exact in bf16; the in-place product is formed in fp32 and rounded once.
        return buffers["data"].to(dtype).mul_(buffers["scale"])


class Int8(_PerRow):
    """Symmetric int8, scale = max|row| / 127.5 (torchao `Int8WeightOnlyConfig`)."""

    name = "int8"
    dtype = torch.int8

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        with quiet_torchao():
            from torchao.quantization import Int8Tensor, PerRow
        quantized = Int8Tensor.from_hp(weight, PerRow())
        return {"data": quantized.qdata, "scale": quantized.scale}


class Float8(_PerRow):
    """float8_e4m3fn, scale = max|row| / 448 (torchao `Float8WeightOnlyConfig`)."""

    name = "fp8"
    dtype = torch.float8_e4m3fn

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        with quiet_torchao():
            from torchao.quantization import Float8Tensor, PerRow
        quantized = Float8Tensor.from_hp(weight, torch.float8_e4m3fn, PerRow())
        return {"data": quantized.qdata, "scale": quantized.scale}


class NF4(Format):
    """4-bit NormalFloat in blocks of 64 with twice-quantised scales (QLoRA, arXiv 2305.14314; torchao `to_nf4`)."""

    name = "nf4"
    buffers = ("data", "scale", "scale_factor", "scale_mean", "levels")
    block = 64
    scale_block = 256
    # Weights dequantised at once: the fp32 copy and the int32 index of one chunk take 96 MiB.
    chunk = 2**24

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """In whole blocks."""
        return math.prod(shape) % self.block == 0

    def fits(self, weight: Tensor) -> bool:
        """Also not of zeros alone, whose scales would be 0 / 0."""
        return super().fits(weight) and bool(weight.any())

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        with quiet_torchao():
            from torchao.quantization import to_nf4
        if not self.fits(weight):
            raise ValueError(f"nf4 stores blocks of {self.block} weights, not all zero; got {weight.numel()} weights")
        scale_block = self._scale_block(weight.numel())
        quantized = to_nf4(weight.contiguous(), self.block, scale_block)
        levels = quantized.nf4
        return {
            "data": quantized.quantized_data,
            "scale": quantized.quantized_scalers,
            "scale_factor": quantized.quantization_factor,
            "scale_mean": quantized.scaler_mean,
            # Both weights of every possible byte, so that one lookup by the byte yields two weights.
            "levels": torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1),
        }

    def _scale_block(self, numel: int) -> int:
        """Scales that share a factor: 256 in the published models; a smaller weight takes the largest divisor."""
        return math.gcd(numel // self.block, self.scale_block)

    def empty(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        blocks = math.prod(shape) // self.block
        return {
            "data": torch.empty(math.prod(shape) // 2, dtype=torch.uint8),
            "scale": torch.empty(blocks, dtype=torch.int8),
            "scale_factor": torch.empty(blocks // self._scale_block(math.prod(shape))),
            "scale_mean": torch.empty(()),
            "levels": torch.empty(256, 2),
        }

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        factor = buffers["scale_factor"]
        scales = (buffers["scale"].view(len(factor), -1) / factor[:, None]).flatten() + buffers["scale_mean"]
        weight = torch.empty(math.prod(shape), dtype=dtype, device=scales.device)
        for start in range(0, weight.numel(), self.chunk):
            part = weight[start : start + self.chunk].view(-1, self.block)
            index = buffers["data"][start // 2 : start // 2 + part.numel() // 2].int()
            pairs = buffers["levels"].index_select(0, index).view(-1, self.block)
            blocks = slice(start // self.block, start // self.block + len(part))
            part.copy_(pairs.mul_(scales[blocks, None]))
        return weight.view(shape)


FP32, BF16 = Dense("fp32", torch.float32), Dense("bf16", torch.bfloat16)
FORMATS: dict[str, Format] = {format.name: format for format in (FP32, BF16, Float8(), Int8(), NF4())}
PRECISIONS = tuple(FORMATS)


def format_of(precision: str) -> Format:
    if precision not in FORMATS:
        raise SettingsError(f"precision {precision!r} is not known; choose one of {', '.join(FORMATS)}")
    return FORMATS[precision]


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
    """

    placed = False

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
        """Keeps `weight` (out, in), any floating dtype, in `format`; quantised in fp32, on the given device."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight is {tuple(weight.shape)}, layer is {(self.out_features, self.in_features)}")
        with torch.inference_mode(False):
            # A dense weight is copied, so that none is shared with the caller; a quantised one is new anyway.
            if isinstance(format, Dense):
                stored = {"data": weight.detach().to(device, format.dtype, copy=True)}
            else:
                stored = format.quantize(weight.detach().to(device, torch.float32))
        self.format = format
        for name in format.buffers:
            self.register_buffer(name, stored[name].contiguous())
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
        return _matmul(x, self)

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


def _matmul(x: Tensor, layer: FrozenLinear) -> Tensor:
    bias = layer.bias
    return F.linear(x, layer.dequantized(x.dtype), None if bias is None else bias.to(x.dtype))


class _FrozenMatmul(torch.autograd.Function):
    """`x @ Wᵀ + b` whose backward dequantises W again, so that nothing of it is kept between forward and backward.

    The layer is held rather than its tensors: weights that were loaded under inference mode cannot be saved for
    backward, and weights that were moved in between are found where they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return _matmul(x, layer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantized(grad.dtype), None


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
