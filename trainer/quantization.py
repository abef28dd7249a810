"""Frozen Linears at a chosen precision.

A frozen weight lives as plain buffers (data, scales) of an `nn.Linear` subclass: plain buffers move, copy, list and run
under inference mode, which torchao's tensor subclasses do not. The numbers are torchao's. A weight is quantised in
pieces, so that neither its fp32 copy nor the quantiser's temporaries ever stand in memory whole: rows (int8, fp8) and
blocks (nf4) do not depend on one another, so the pieces' numbers are the whole's. The weight is dequantised for one
matmul and dropped: its autograd Function keeps no copy for backward, it dequantises again. Layers that are told to
multiply in 8 bits (`eight_bit`) never dequantise it.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import eight_bit, kept, on_cpu
from .errors import SettingsError
from .quiet import quiet_torchao

Buffers = Mapping[str, Tensor]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]

# Weights quantised at once. On the CPU as many as its caches hold: on two cores larger pieces take up to eight times as
# long. A GPU wants larger ones, so that starting its kernels does not count.
PIECE = {"cpu": on_cpu.FITS_CACHES, "cuda": 2**24}


def pieces(weight: Tensor, multiple: int) -> Iterator[tuple[slice, Tensor]]:
    """The weight as flat fp32 pieces and where they stand, each a multiple of `multiple` weights but for the last.

    They are read alone: a piece of an fp32 weight is the weight.
    """
    flat = weight.reshape(-1)
    size = max(1, PIECE.get(weight.device.type, PIECE["cuda"]) // multiple) * multiple
    for start in range(0, len(flat), size):
        place = slice(start, min(start + size, len(flat)))
        yield place, flat[place].float()


# --- formats ---------------------------------------------------------------------------------------------------------


class Format(ABC):
    """How a weight (out, in) is stored. `buffers` names what is stored; `quantize` makes it, `dequantize` undoes it."""

    name: ClassVar[str]
    buffers: ClassVar[tuple[str, ...]] = ("data", "scale")
    # The format whose 8-bit numbers can be multiplied as they are, with a scale per output row; see `eight_bit`.
    eight_bit: ClassVar[str | None] = None

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """Whether a weight of this shape can be stored so."""
        return True

    def fits(self, weight: Tensor) -> bool:
        """Whether this weight can be stored so."""
        return self.fits_shape(weight.shape)

    @abstractmethod
    def layout(self, shape: tuple[int, int]) -> Layout:
        """dtype and shape of the buffers of a weight (out, in)."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """(out, in) in any floating dtype → the buffers, on its device; computed in fp32."""

    @abstractmethod
    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The buffers → (out, in) in `dtype`, computed in fp32 and rounded once."""


class Dense(Format):
    """The weight as it is, in one floating dtype."""

    buffers = ("data",)

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]
        self.dtype = dtype

    def layout(self, shape: tuple[int, int]) -> Layout:
        return {"data": (self.dtype, shape)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        # A copy, so that none is shared with the caller.
        return {"data": weight.to(self.dtype, copy=True)}

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return buffers["data"].to(dtype)


class _PerRow(Format):
    """8-bit data and one fp32 scale per output row (out, 1)."""

    dtype: ClassVar[torch.dtype]

    @abstractmethod
    def row_quantizer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """torchao's function: fp32 (n, in) → 8-bit data (n, in) and scales (n, 1)."""

    def layout(self, shape: tuple[int, int]) -> Layout:
        return {"data": (self.dtype, shape), "scale": (torch.float32, (shape[0], 1))}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        data = torch.empty(rows, columns, dtype=self.dtype, device=weight.device)
        scale = torch.empty(rows, 1, device=weight.device)
        quantize_rows = self.row_quantizer()
        for place, piece in pieces(weight, columns):
            chosen = slice(place.start // columns, place.stop // columns)
            numbers, scales = quantize_rows(piece.view(-1, columns))
            if numbers.dtype != self.dtype:
                # A copy would cast whatever came back in silence.
                raise ValueError("torchao quantises nothing, as a stub does")
            data[chosen], scale[chosen] = numbers, scales
        return {"data": data, "scale": scale}

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        data, scale = buffers["data"], buffers["scale"]
        if not on_cpu.is_cpus(data):
            # 8-bit data are exact in bf16; the in-place product is formed in fp32 and rounded once.
            return data.to(dtype).mul_(scale)
        weight = torch.empty(shape, dtype=dtype, device=data.device)
        rows = max(1, on_cpu.FITS_CACHES // max(1, shape[1]))
        for out, *part in zip(weight.split(rows), data.split(rows), scale.split(rows), strict=True):
            out.copy_(on_cpu.widened(part[0]).mul_(part[1]))
        return weight


class Int8(_PerRow):
    """Symmetric int8, scale = max|row| / 127.5 (torchao `Int8WeightOnlyConfig`)."""

    name = "int8"
    eight_bit: ClassVar[str | None] = "int8"
    dtype = torch.int8

    def row_quantizer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        with quiet_torchao():
            from torchao.quantization import Int8Tensor, PerRow

        def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
            quantized = Int8Tensor.from_hp(rows, PerRow())
            return quantized.qdata, quantized.scale

        return quantize_rows


class Float8(_PerRow):
    """float8_e4m3fn, scale = max|row| / 448 (torchao `Float8WeightOnlyConfig`)."""

    name = "fp8"
    eight_bit: ClassVar[str | None] = "fp8"
    dtype = torch.float8_e4m3fn

    def row_quantizer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        with quiet_torchao():
            from torchao.quantization import Float8Tensor, PerRow

        def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
            quantized = Float8Tensor.from_hp(rows, torch.float8_e4m3fn, PerRow())
            return quantized.qdata, quantized.scale

        return quantize_rows


class NF4(Format):
    """4-bit NormalFloat in blocks of 64 with twice-quantised scales (QLoRA, arXiv 2305.14314; torchao `to_nf4`).

    torchao measures each weight's distance to all 16 levels. Here a weight finds its level by the bounds between them,
    which torchao's own distances give, so that the result is the same to the bit.
    """

    name = "nf4"
    buffers = ("data", "scale", "scale_factor", "scale_mean", "levels")
    block = 64
    scale_block = 256
    # Weights dequantised at once on a card: the fp32 copy and the int32 index of one chunk take 96 MiB.
    chunk = 2**24

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """In whole blocks."""
        return math.prod(shape) % self.block == 0

    def fits(self, weight: Tensor) -> bool:
        """Also not of zeros alone, whose scales would be 0 / 0."""
        return super().fits(weight) and any(bool(piece.any()) for _, piece in pieces(weight, self.block))

    def layout(self, shape: tuple[int, int]) -> Layout:
        blocks = math.prod(shape) // self.block
        return {
            "data": (torch.uint8, (math.prod(shape) // 2,)),
            "scale": (torch.int8, (blocks,)),
            "scale_factor": (torch.float32, (blocks // self._scale_block(blocks),)),
            "scale_mean": (torch.float32, ()),
            "levels": (torch.float32, (256, 2)),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        if not self.fits(weight):
            raise ValueError(f"nf4 stores blocks of {self.block} weights, not all zero; got {weight.numel()} weights")
        levels = _nf4_levels().to(weight.device)
        data = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
        largest = torch.empty(weight.numel() // self.block, device=weight.device)
        nearest = NearestLevel(levels)
        for place, piece in pieces(weight, self.block):
            blocks = piece.view(-1, self.block)
            largest_here = blocks.abs().amax(1)
            largest[place.start // self.block : place.stop // self.block] = largest_here
            # A block of zeros is 0 / 0, for which torchao's search ends at the first level.
            scaled = (blocks / largest_here[:, None]).nan_to_num_(nan=-1.0)
            index = nearest(scaled).view(-1, 2)
            data[place.start // 2 : place.stop // 2] = index[:, 0] << 4 | index[:, 1]
        scale, factor, mean = self._quantize_scales(largest)
        return {
            "data": data,
            "scale": scale,
            "scale_factor": factor,
            "scale_mean": mean,
            # Both weights of every possible byte, so that one lookup by the byte yields two weights.
            "levels": torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1),
        }

    def _scale_block(self, blocks: int) -> int:
        """The published models divide by 256 blocks; a smaller weight takes the largest divisor that it has."""
        return math.gcd(blocks, self.scale_block)

    def _quantize_scales(self, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each block's largest |weight|, fp32 → int8 difference from the mean, fp32 factor per scale block, mean."""
        mean = largest.mean()
        groups = (largest - mean).view(-1, self._scale_block(len(largest)))
        factor = 256 / (2 * groups.abs().amax(1))
        return (groups * factor[:, None]).round().clamp(-128, 127).flatten().to(torch.int8), factor, mean

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        factor = buffers["scale_factor"]
        scales = (buffers["scale"].view(len(factor), -1) / factor[:, None]).flatten() + buffers["scale_mean"]
        weight = torch.empty(math.prod(shape), dtype=dtype, device=scales.device)
        # Two fp32 as one number, which is looked up twice as fast as two.
        both = buffers["levels"].view(torch.int64).flatten()
        chunk = on_cpu.FITS_CACHES if on_cpu.is_cpus(weight) else self.chunk
        for start in range(0, weight.numel(), chunk):
            part = weight[start : start + chunk].view(-1, self.block)
            index = buffers["data"][start // 2 : start // 2 + part.numel() // 2].int()
            pairs = both.index_select(0, index).view(torch.float32).view(-1, self.block)
            blocks = slice(start // self.block, start // self.block + len(part))
            part.copy_(pairs.mul_(scales[blocks, None]))
        return weight.view(shape)


class NearestLevel:
    """fp32 numbers in [-1, 1] → index of the nearest of the ascending levels, uint8; of two alike the lower one.

    [-1, 1] is cut into cells so small that each holds one bound between two levels at most: a number's cell gives the
    bounds below it, and one comparison tells whether it lies above its cell's own. Rounding cannot spoil that: the cell
    never decreases as the number grows, and the bounds went through the same arithmetic.
    """

    cells = 64

    def __init__(self, levels: Tensor) -> None:
        bounds = upper_bounds(levels)
        cell = self._cell(bounds).long()
        self.bound = torch.full((self.cells + 1,), math.inf, device=levels.device)
        self.bound[cell] = bounds
        assert len(cell.unique()) == len(cell), "two bounds in one cell"
        held = torch.zeros(self.cells + 1, dtype=torch.uint8, device=levels.device)
        held[cell] = 1
        self.below = held.cumsum(0).sub(held).to(torch.uint8)

    def _cell(self, numbers: Tensor) -> Tensor:
        return numbers.add(1).mul_(self.cells / 2).to(torch.int32)

    def __call__(self, numbers: Tensor) -> Tensor:
        flat = numbers.flatten()
        cell = self._cell(flat)
        above = flat > self.bound.index_select(0, cell)
        return self.below.index_select(0, cell).add_(above.view(torch.uint8)).view(numbers.shape)


def upper_bounds(levels: Tensor) -> Tensor:
    """The largest fp32 number that is not nearer to the next level, for each level but the last.

    Nearer by distances that are rounded to fp32: found among the neighbours of the middle.
    """
    lower, upper = levels[:-1], levels[1:]
    candidate = (lower + upper) / 2
    for _ in range(64):
        candidate = candidate.nextafter(lower)
    bound = candidate
    for _ in range(128):
        candidate = candidate.nextafter(upper)
        bound = torch.where((candidate - lower).abs() <= (candidate - upper).abs(), candidate, bound)
    return bound


@functools.cache
def _nf4_levels() -> Tensor:
    """The 16 levels, ascending, fp32 (16,), as torchao has them."""
    with quiet_torchao():
        from torchao.quantization import to_nf4
    with torch.inference_mode(False):
        return to_nf4(torch.ones(64), 64, 1).nf4


FP32, BF16 = Dense("fp32", torch.float32), Dense("bf16", torch.bfloat16)
FORMATS: dict[str, Format] = {format.name: format for format in (FP32, BF16, Float8(), Int8(), NF4())}
AS_STORED = "as-stored"  # each weight in the format that its file has, see `as_stored`
PRECISIONS = (*FORMATS, AS_STORED)


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
    y = eight_bit.forward(x.flatten(0, -2), layer.get_buffer("data"), layer.get_buffer("scale"))
    y = y.view(*x.shape[:-1], layer.out_features)
    return y if bias is None else y.add_(bias)


def input_gradient(grad: Tensor, layer: FrozenLinear) -> Tensor:
    """(…, out) → (…, in), grad @ W in grad's dtype."""
    if not _in_8_bits(grad, layer):
        return grad @ layer.dequantized(grad.dtype)
    x = eight_bit.input_gradient(grad.flatten(0, -2), layer.get_buffer("data"), layer.get_buffer("scale"))
    return x.view(*grad.shape[:-1], layer.in_features)


def _in_8_bits(rows: Tensor, layer: FrozenLinear) -> bool:
    """Whether the layer multiplies these rows (…, n) in 8 bits; too few of them it does not, such as one time token."""
    return layer.eight_bit and eight_bit.fits(rows.shape[:-1].numel(), layer.in_features, layer.out_features)


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
