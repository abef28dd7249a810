"""How a frozen weight is stored: the buffers of each precision, made and undone.

The numbers are torchao's. A weight is quantised in pieces, so that neither its fp32 copy nor the quantiser's
temporaries ever stand in memory whole: rows (int8, fp8) and blocks (nf4) do not depend on one another, so the pieces'
numbers are the whole's.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from . import microscaling, on_cpu
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


class Format(ABC):
    """How a weight (out, in) is stored. `buffers` names what is stored; `quantize` makes it, `dequantize` undoes it."""

    name: ClassVar[str]
    buffers: ClassVar[tuple[str, ...]] = ("data", "scale")
    # How its 8-bit numbers can be multiplied as they are, one of `modes.EIGHT_BIT_NEEDS`; see `eight_bit`.
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

    def part(self, buffers: Buffers, rows: int, columns: int) -> dict[str, Tensor]:
        """The buffers of the weight's first rows and columns; of a format that can multiply in 8 bits."""
        raise NotImplementedError(f"{self.name} cannot be cut")


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

    def part(self, buffers: Buffers, rows: int, columns: int) -> dict[str, Tensor]:
        return {"data": buffers["data"][:rows, :columns], "scale": buffers["scale"][:rows]}


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


class MXFP8(Format):
    """float8_e4m3fn and a power of two for each tile of 32 × 32 weights, see `microscaling`."""

    name = "mxfp8"
    eight_bit: ClassVar[str | None] = "mxfp8"

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """In whole tiles."""
        return all(size % microscaling.BLOCK == 0 for size in shape)

    def layout(self, shape: tuple[int, int]) -> Layout:
        tiles = shape[0] // microscaling.BLOCK, shape[1] // microscaling.BLOCK
        return {"data": (torch.float8_e4m3fn, shape), "scale": (torch.uint8, tiles)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        if not self.fits(weight):
            raise ValueError(f"mxfp8 stores tiles of 32 × 32 weights; got {tuple(weight.shape)}")
        rows, columns = weight.shape
        layout = self.layout((rows, columns))
        made = {name: torch.empty(size, dtype=dtype, device=weight.device) for name, (dtype, size) in layout.items()}
        for place, piece in pieces(weight, microscaling.BLOCK * columns):
            tiles = _tiles(piece.view(-1, columns))
            exponent = microscaling.exponents(tiles.abs().amax((1, 3)))
            chosen = slice(place.start // columns, place.stop // columns)
            made["scale"][chosen.start // microscaling.BLOCK : chosen.stop // microscaling.BLOCK] = exponent
            scaled = tiles * microscaling.inverse_powers(exponent)[:, None, :, None]
            made["data"][chosen] = scaled.to(torch.float8_e4m3fn).view(-1, columns)
        return made

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        data, scale = buffers["data"], microscaling.powers(buffers["scale"])[:, None, :, None]
        if not on_cpu.is_cpus(data):
            # 8-bit data are exact in bf16, and so is their product with a power of two.
            return _tiles(data.to(dtype)).mul_(scale).view(shape)
        weight = torch.empty(shape, dtype=dtype, device=data.device)
        tiles = max(1, on_cpu.FITS_CACHES // (microscaling.BLOCK * shape[1]))
        rows = tiles * microscaling.BLOCK
        for out, part, powers in zip(weight.split(rows), data.split(rows), scale.split(tiles), strict=True):
            out.copy_(_tiles(on_cpu.widened(part)).mul_(powers).view(part.shape))
        return weight

    def part(self, buffers: Buffers, rows: int, columns: int) -> dict[str, Tensor]:
        if not self.fits_shape((rows, columns)):
            raise ValueError(f"mxfp8 is cut by tiles of 32 × 32 weights; got {rows} × {columns}")
        tiles = rows // microscaling.BLOCK, columns // microscaling.BLOCK
        return {"data": buffers["data"][:rows, :columns], "scale": buffers["scale"][: tiles[0], : tiles[1]]}


def _tiles(weight: Tensor) -> Tensor:
    """(out, in) → a view (out / 32, 32, in / 32, 32)."""
    return weight.unflatten(1, (-1, microscaling.BLOCK)).unflatten(0, (-1, microscaling.BLOCK))


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
FORMATS: dict[str, Format] = {format.name: format for format in (FP32, BF16, Float8(), Int8(), NF4(), MXFP8())}
AS_STORED = "as-stored"  # each weight in the format that its file has, see `as_stored`
PRECISIONS = (*FORMATS, AS_STORED)


def format_of(precision: str) -> Format:
    if precision not in FORMATS:
        raise SettingsError(f"precision {precision!r} is not known; choose one of {', '.join(FORMATS)}")
    return FORMATS[precision]
