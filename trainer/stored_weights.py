"""How a stored weight becomes numbers: one class per way of storing, checked from the header, decoded to fp32.

A class knows which tensors stand beside the weight and what shapes they must have, and refuses a file in which they do
not, before any weight is read. Decoding takes one weight at a time, in slabs of rows where a step needs temporaries.

Facts: ComfyUI 0.33 (`comfy/ops.py`, `comfy/quant_ops.py`) and comfy-kitchen 0.2.31 for its four formats; bitsandbytes
0.50 (`QuantState`, `Linear8bitLt`) for the others.

Shape suffixes: O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import UnreadableFormatError
from .tensor_files import as_bytes

Shape = tuple[int, ...]

DENSE = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of one number
FLOAT8 = {"F8_E4M3": 1, "F8_E5M2": 1}
BYTES = {**DENSE, **FLOAT8, "F8_E8M0": 1, "I8": 1, "U8": 1}

WAY_OUT = "use the bf16 file or ComfyUI's fp8 file"
# Numbers decoded at a time where a step needs temporaries: 16 MiB in fp32.
SLAB = 1 << 22


class Entry(NamedTuple):
    """One tensor of a header: the file that it stands in and its whole key there."""

    file: Path
    key: str
    dtype: str
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Read = Callable[[Entry], Tensor]


class Layer:
    """The tensors around one weight, by the short key that the weight has without the file's prefix."""

    def __init__(self, file: str, key: str, tensors: Mapping[str, Entry]) -> None:
        self.file = file
        self.key = key
        self.name = key.rpartition(".")[0]
        self.weight = tensors[key]
        self._tensors = tensors
        self.used: set[str] = set()

    def find(self, leaf: str, of_weight: bool = False) -> Entry | None:
        """The tensor `layer.leaf`, or `layer.weight.leaf`, which counts as used from now on."""
        key = f"{self.key if of_weight else self.name}.{leaf}"
        if key in self._tensors:
            self.used.add(key)
        return self._tensors.get(key)

    def need(self, leaf: str, what: str, of_weight: bool = False) -> Entry:
        found = self.find(leaf, of_weight)
        if found is None:
            raise self.error(f"is {what}, but its {leaf} is not there; download the file again, or {WAY_OUT}")
        return found

    def check(self, entry: Entry, dtypes: set[str], numels: set[int], what: str) -> Entry:
        """The entry, which must have one of the dtypes and one of the sizes."""
        if entry.dtype not in dtypes or entry.numel not in numels:
            sizes = " or ".join(str(size) for size in sorted(numels))
            raise self.error(
                f"is {what}, but {entry.key} is {entry.dtype} {list(entry.shape)}, "
                f"wanted {' or '.join(sorted(dtypes))} of {sizes} numbers; {WAY_OUT}"
            )
        return entry

    def error(self, text: str) -> UnreadableFormatError:
        return UnreadableFormatError(f"{self.file}: {self.key} {text}")


class StoredWeight(ABC):
    """A weight as a file stores it.

    Attributes:
        entry: the stored tensor itself.
        shape: the shape that it decodes to; where the format pads, with the padding.
    """

    def __init__(self, entry: Entry, shape: Shape) -> None:
        self.entry = entry
        self.shape = shape

    def holds(self, shape: Shape) -> bool:
        """Whether a weight of that shape may be stored so."""
        return shape == self.shape

    @abstractmethod
    def decode(self, read: Read, shape: Shape) -> Tensor:
        """The weight, of a shape that it `holds`, on the CPU."""


class Plain(StoredWeight):
    """Numbers as they are, bf16, fp16, fp32 or a cast to fp8, times a scale per tensor or per row if there is one.

    ComfyUI's `float8_e4m3fn` and `float8_e5m2`, its older `scaled_fp8`, and fp8 with a scale (O,) per row as in
    diffusers' `fp8r`.
    """

    SCALES = ("weight_scale", "scale_weight")

    def __init__(self, layer: Layer, stores_scales: bool) -> None:
        entry = layer.weight
        super().__init__(entry, entry.shape)
        # A norm's or table's `.scale` is a parameter of its own: only a Linear's weight has a scale beside it.
        names = self.SCALES if layer.key.endswith(".weight") else ()
        self.scale = next((scale for name in names if (scale := layer.find(name)) is not None), None)
        if self.scale is None:
            if entry.dtype in FLOAT8 and stores_scales:
                raise layer.error(
                    "is fp8 in a file that stores scales, but its own scale is not there; "
                    "reading it without would train on wrong weights"
                )
        elif self.scale.numel not in (1, *entry.shape[:1]) or self.scale.dtype not in DENSE:
            raise UnreadableFormatError(
                f"{layer.file}: the scale of {layer.key} is {list(self.scale.shape)}; wanted one number or one per "
                f"row of {list(entry.shape)}, in {' or '.join(DENSE)}, found {self.scale.dtype}"
            )

    def decode(self, read: Read, shape: Shape) -> Tensor:
        """As stored without a scale (fp8 in fp32), in fp32 with one."""
        stored = read(self.entry)
        if self.scale is None:
            return stored.float() if stored.dtype.itemsize == 1 else stored
        return stored.to(torch.float32, copy=True).mul_(_column(read(self.scale)))


class Int8(StoredWeight):
    """ComfyUI's `int8_tensorwise`: int8 (O, I) times `weight_scale`, one number or (O, 1).

    With `convrot`, groups of `convrot_groupsize` columns were turned by a regular Hadamard matrix before they were
    rounded (W_stored = W · Hᵀ); H is symmetric and orthogonal, so turning them once more undoes it.
    """

    WHAT = "int8_tensorwise"

    def __init__(self, layer: Layer, config: Mapping[str, Any]) -> None:
        entry = layer.weight
        super().__init__(entry, entry.shape)
        _check_matrix(layer, {"I8"}, self.WHAT)
        rows, columns = entry.shape
        self.scale = layer.check(layer.need("weight_scale", self.WHAT), set(DENSE), {1, rows}, self.WHAT)
        # ComfyUI takes both settings from either place.
        params = config["params"] if isinstance(config.get("params"), dict) else {}
        turned = config.get("convrot", params.get("convrot", False))
        size = config.get("convrot_groupsize", params.get("convrot_groupsize", 256)) if turned else 1
        if turned and not (isinstance(size, int) and _is_power_of_4(size) and columns % size == 0):
            raise layer.error(
                f"is {self.WHAT} turned in groups of {size} columns; wanted a power of 4 that divides {columns}; "
                f"{WAY_OUT}"
            )
        self.group = int(size)

    def decode(self, read: Read, shape: Shape) -> Tensor:
        stored_OI, scale = read(self.entry), _column(read(self.scale))
        if self.group == 1:
            return stored_OI.to(torch.float32, copy=True).mul_(scale)
        out_OI = torch.empty(shape)
        signs = hadamard(self.group)
        for rows in slabs(shape):
            # Sums of at most 4096 integers below 128: exact in fp32, in whatever order. The scale comes after.
            groups = stored_OI[rows].float().unflatten(-1, (-1, self.group))
            torch.matmul(groups, signs, out=out_OI[rows].unflatten(-1, (-1, self.group)))
        return out_OI.mul_(scale / math.sqrt(self.group))


class _Blockwise(StoredWeight):
    """A format of comfy-kitchen: blocks of columns share a scale, rows and columns are padded to whole blocks.

    The scales stand in cuBLAS's tiled order: 128 rows times 4 blocks after one another, padded to whole tiles, so that
    any 128 rows have their scales in one piece.
    """

    WHAT: str
    BLOCK: int
    SCALE_DTYPES: set[str]
    FUNCTION: str

    def __init__(self, layer: Layer, shape: Shape) -> None:
        super().__init__(layer.weight, shape)
        self.padded = rows, columns = shape
        if columns % self.BLOCK:
            raise layer.error(f"is {self.WHAT} of {columns} columns; wanted a multiple of {self.BLOCK}; {WAY_OUT}")
        if rows <= self.BLOCK or columns <= self.BLOCK:
            raise layer.error(
                f"is {self.WHAT} padded to {list(shape)}, from which its true shape cannot be told; {WAY_OUT}"
            )
        tiles = _round_up(rows, 128) * _round_up(columns // self.BLOCK, 4)
        scale = layer.need("weight_scale", self.WHAT)
        self.scale = layer.check(scale, self.SCALE_DTYPES, {tiles}, self.WHAT)
        self.function = _comfy_kitchen(layer, self.WHAT, self.FUNCTION)

    def holds(self, shape: Shape) -> bool:
        return len(shape) == 2 and all(
            wanted <= padded < wanted + self.BLOCK for wanted, padded in zip(shape, self.padded, strict=True)
        )

    def decode(self, read: Read, shape: Shape) -> Tensor:
        stored = read(self.entry)
        scales = read(self.scale).reshape(_round_up(self.padded[0], 128), -1)
        others = self._others(read)
        out_OI = torch.empty(shape)
        for rows in slabs(self.padded, 128):
            # The last slab's scales go on to the end of their tile.
            tile = slice(rows.start, _round_up(rows.stop, 128))
            decoded = self._decode(stored[rows].contiguous(), scales[tile].contiguous(), others)
            out_OI[rows] = decoded[: max(0, shape[0] - rows.start), : shape[1]]
        return out_OI

    def _others(self, read: Read) -> Any:
        return None

    @abstractmethod
    def _decode(self, stored: Tensor, scales: Tensor, others: Any) -> Tensor: ...


class Nvfp4(_Blockwise):
    """ComfyUI's `nvfp4`: two fp4 (e2m1) in a byte (O, I / 2), an fp8 scale for 16 columns, one fp32 scale for all.

    `pre_quant_scale` (I,), which ModelOpt's smoothing leaves, multiplies the layer's input: here its columns.
    """

    WHAT = "nvfp4"
    BLOCK = 16
    SCALE_DTYPES = {"F8_E4M3", "U8"}
    FUNCTION = "dequantize_nvfp4"

    def __init__(self, layer: Layer) -> None:
        _check_matrix(layer, {"U8"}, self.WHAT)
        rows, half = layer.weight.shape
        super().__init__(layer, (rows, 2 * half))
        self.second = layer.check(layer.need("weight_scale_2", self.WHAT), set(DENSE), {1}, self.WHAT)
        self.smoothing = layer.find("pre_quant_scale")
        if self.smoothing is not None:
            columns = set(range(2 * half - self.BLOCK + 1, 2 * half + 1))
            layer.check(self.smoothing, set(DENSE), columns, self.WHAT)
            self.shape = rows, self.smoothing.numel

    def holds(self, shape: Shape) -> bool:
        return super().holds(shape) and (self.smoothing is None or self.smoothing.numel == shape[1])

    def decode(self, read: Read, shape: Shape) -> Tensor:
        out_OI = super().decode(read, shape)
        return out_OI if self.smoothing is None else out_OI.mul_(read(self.smoothing).float().reshape(1, -1))

    def _others(self, read: Read) -> Any:
        return read(self.second).float().reshape(())

    def _decode(self, stored: Tensor, scales: Tensor, others: Any) -> Tensor:
        return self.function(stored, others, scales.view(torch.float8_e4m3fn), torch.float32)


class Mxfp8(_Blockwise):
    """ComfyUI's `mxfp8`: fp8 (e4m3) (O, I), a power of two (e8m0) for 32 columns."""

    WHAT = "mxfp8"
    BLOCK = 32
    SCALE_DTYPES = {"F8_E8M0", "U8"}
    FUNCTION = "dequantize_mxfp8"

    def __init__(self, layer: Layer) -> None:
        _check_matrix(layer, {"F8_E4M3"}, self.WHAT)
        super().__init__(layer, layer.weight.shape)

    def _decode(self, stored: Tensor, scales: Tensor, others: Any) -> Tensor:
        return self.function(stored, scales.view(torch.float8_e8m0fnu), torch.float32)


class Bitsandbytes4(StoredWeight):
    """bitsandbytes' nf4 and fp4: two codes in a byte, the first in the high half, in blocks that share their absmax.

    Beside `weight`: `weight.absmax`, `weight.quant_map` (16,), which gives a code's number, and the settings as JSON
    in `weight.quant_state.bitsandbytes__nf4`. Nested, absmax is itself stored as bytes: codes of `nested_quant_map`
    (256,) in blocks that share a `nested_absmax`, plus `nested_offset`.
    """

    KINDS = ("nf4", "fp4")

    def __init__(self, layer: Layer, read: Read) -> None:
        entry = layer.weight
        kind, state = self._state(layer, read)
        what = f"bitsandbytes {kind}"
        try:
            shape = tuple(int(size) for size in state["shape"])
            self.block = int(state["blocksize"])
            if self.block < 2 or self.block % 2 or state["quant_type"] != kind:
                raise ValueError("blocksize or quant_type")
        except (KeyError, TypeError, ValueError) as error:
            raise layer.error(f"is {what}, but its quant_state is damaged; download the file again") from error
        super().__init__(entry, shape)
        numbers = math.prod(shape)
        blocks = -(-numbers // self.block)
        # Any dtype can be the container of the codes (`bnb_4bit_quant_storage`).
        if entry.numel * BYTES.get(entry.dtype, 0) < -(-numbers // 2):
            raise layer.error(f"is {what} of {list(shape)}, but holds {list(entry.shape)} {entry.dtype}; {WAY_OUT}")
        self.absmax = layer.need("absmax", what, True)
        self.map = layer.check(layer.need("quant_map", what, True), {"F32"}, {16}, what)
        self.nested = None
        if "nested_blocksize" not in state:
            layer.check(self.absmax, {"F32"}, {blocks}, what)
            return
        layer.check(self.absmax, {"U8"}, {blocks}, what)
        try:
            size, self.offset = int(state["nested_blocksize"]), float(state["nested_offset"])
            outer = {-(-blocks // size)}
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise layer.error(f"is {what}, but its quant_state is damaged; download the file again") from error
        absmax = layer.check(layer.need("nested_absmax", what, True), {"F32"}, outer, what)
        self.nested = size, absmax, layer.check(layer.need("nested_quant_map", what, True), {"F32"}, {256}, what)

    def _state(self, layer: Layer, read: Read) -> tuple[str, dict[str, Any]]:
        for kind in self.KINDS:
            blob = layer.find(f"quant_state.bitsandbytes__{kind}", True)
            if blob is not None:
                try:
                    return kind, dict(json.loads(bytes_of(read(blob))))
                except (ValueError, TypeError) as error:
                    raise layer.error(
                        f"is bitsandbytes {kind}, but its quant_state is damaged; download the file again"
                    ) from error
        raise layer.error(
            "is quantised by bitsandbytes, but its quant_state.bitsandbytes__nf4 is not there; download the file "
            f"again, or {WAY_OUT}"
        )

    def decode(self, read: Read, shape: Shape) -> Tensor:
        codes = read(self.entry).flatten().view(torch.uint8)[: -(-math.prod(shape) // 2)]
        table = read(self.map)
        # One look-up for a byte's two codes.
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)
        out = torch.empty(len(codes), 2)
        for start in range(0, len(codes), SLAB // 2):
            slab = slice(start, start + SLAB // 2)
            torch.index_select(pairs, 0, codes[slab].int(), out=out[slab])
        flat = out.view(-1)[: math.prod(shape)]
        return _scale_blocks(flat, self._absmax(read), self.block).view(shape)

    def _absmax(self, read: Read) -> Tensor:
        absmax = read(self.absmax)
        if self.nested is None:
            return absmax
        size, nested_absmax, nested_map = self.nested
        return _scale_blocks(read(nested_map)[absmax.int()].flatten(), read(nested_absmax), size).add_(self.offset)


class BitsandbytesInt8(StoredWeight):
    """bitsandbytes' `Linear8bitLt`: int8 (O, I), and `SCB` (O,), the largest magnitude of each row, for 127."""

    WHAT = "bitsandbytes int8"

    def __init__(self, layer: Layer, read: Read) -> None:
        super().__init__(layer.weight, layer.weight.shape)
        _check_matrix(layer, {"I8"}, self.WHAT)
        self.scale = layer.check(layer.need("SCB", self.WHAT), set(DENSE), {self.shape[0]}, self.WHAT)
        order = layer.find("weight_format")
        # Older versions stored tiles for one generation of cards; 0 is row-major, the only one that is still read.
        if order is not None and read(order).flatten().tolist() != [0]:
            raise layer.error(
                f"is {self.WHAT} in an order of tiles that bitsandbytes itself no longer reads; {WAY_OUT}"
            )

    def decode(self, read: Read, shape: Shape) -> Tensor:
        scale = read(self.scale).float().reshape(-1, 1)
        return read(self.entry).to(torch.float32, copy=True).mul_(scale).mul_(1 / 127)


COMFY_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "nvfp4", "mxfp8")

# What stands beside weights and is no parameter, by the last part of its key.
AUXILIARIES = (
    *Plain.SCALES,
    "weight_scale_2",
    "pre_quant_scale",
    "SCB",
    "weight_format",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    *(f"bitsandbytes__{kind}" for kind in Bitsandbytes4.KINDS),
)
# Scales of activations calibrate 8-bit inference, and marks say how to read: they are not part of a weight.
IGNORED = ("input_scale", "scale_input", "comfy_quant", "scaled_fp8")


def is_auxiliary(key: str) -> bool:
    return key.rpartition(".")[2] in (*AUXILIARIES, *IGNORED)


def understand(layer: Layer, mark: Mapping[str, Any] | None, stores_scales: bool, read: Read) -> StoredWeight:
    """The way in which one tensor is stored.

    Args:
        layer: the tensor and what stands around it.
        mark: ComfyUI's settings for the layer, with its `format`.
        stores_scales: whether the file has scales at all, so that fp8 without one is a fault.
        read: reads a small tensor.

    Raises:
        UnreadableFormatError: a format that is not known, or something beside the weight that is missing or misshapen.
    """
    dtype = layer.weight.dtype
    if layer.key.endswith(".weight"):
        if layer.find("absmax", True) or any(
            layer.find(f"quant_state.bitsandbytes__{kind}", True) for kind in Bitsandbytes4.KINDS
        ):
            return Bitsandbytes4(layer, read)
        if layer.find("SCB"):
            return BitsandbytesInt8(layer, read)
        if mark is not None:
            match mark["format"]:
                case "int8_tensorwise":
                    return Int8(layer, mark)
                case "nvfp4":
                    return Nvfp4(layer)
                case "mxfp8":
                    return Mxfp8(layer)
        if dtype == "U8" and layer.find("weight_scale_2"):
            raise layer.error(
                "is nvfp4 without ComfyUI's mark (comfy_quant): ModelOpt's files order it otherwise; use ComfyUI's "
                "nvfp4 file or the bf16 file"
            )
    if dtype not in (*DENSE, *FLOAT8):
        raise layer.error(f"is stored as {dtype}, which cannot be read; {WAY_OUT}")
    return Plain(layer, stores_scales)


def bytes_of(tensor: Tensor) -> bytes:
    return as_bytes(tensor).numpy().tobytes()


def _check_matrix(layer: Layer, dtypes: set[str], what: str) -> None:
    if layer.weight.dtype not in dtypes or len(layer.weight.shape) != 2:
        raise layer.error(
            f"is marked as {what}, but is {layer.weight.dtype} {list(layer.weight.shape)}, wanted a matrix of "
            f"{' or '.join(sorted(dtypes))}; {WAY_OUT}"
        )


def _comfy_kitchen(layer: Layer, what: str, function: str) -> Callable[..., Tensor]:
    """A function of comfy-kitchen, the library that defines these formats; imported only where a file needs it."""
    try:
        library: ModuleType = importlib.import_module("comfy_kitchen")
        return getattr(library, function)
    except ImportError as error:
        raise layer.error(
            f"is {what}, which needs comfy-kitchen: it comes with ComfyUI, elsewhere `pip install comfy-kitchen`; "
            f"or {WAY_OUT}"
        ) from error
    except AttributeError as error:
        raise layer.error(
            f"is {what}, for which the installed comfy-kitchen is too old: `pip install -U comfy-kitchen`"
        ) from error


def slabs(shape: Shape, multiple: int = 1) -> Iterator[slice]:
    """Rows a slab at a time, a multiple of so many but for the last."""
    rows, columns = shape
    step = max(multiple, SLAB // columns // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _column(scale: Tensor) -> Tensor:
    """One number as it is, one per row as (O, 1); in fp32."""
    return scale.float().reshape(()) if scale.numel() == 1 else scale.float().reshape(-1, 1)


def _scale_blocks(flat: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiplies each block of a flat tensor by its scale, in place; the last block may be short."""
    whole = flat.numel() // block
    flat[: whole * block].view(whole, block).mul_(scales[:whole, None])
    flat[whole * block :].mul_(scales[whole:])
    return flat


def hadamard(size: int) -> Tensor:
    """The regular Hadamard matrix of ±1, (size, size), symmetric: the Kronecker power of J - 2 · antidiagonal(4)."""
    four = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    signs = torch.ones(1, 1)
    while len(signs) < size:
        signs = torch.kron(signs, four)
    return signs


def _is_power_of_4(number: int) -> bool:
    return number >= 4 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
