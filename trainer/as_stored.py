"""A base kept as its file stores it: ComfyUI's fp8 and int8_tensorwise, with the file's own bytes as the weights.

Quantising such a file's weights once more would round twice and take time. What is kept is each Linear's stored numbers
and its scale, one per tensor or per row, here always written out per row. Linears that the file does not quantise stay
in the file's dtype. The other formats that can be read (`stored_weights`) are decoded and quantised, not kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .checkpoints import ModelFile, OpenFiles
from .errors import SettingsError, some
from .formats import AS_STORED, BF16, FORMATS, FP32, Buffers, Dense, Float8, Format, Int8
from .stored_weights import DENSE, Plain, Shape, StoredWeight, hadamard, slabs
from .stored_weights import Int8 as StoredInt8
from .tensor_files import Arena

_WAY_OUT = 'set [model] precision to "auto", or to one of ' + ", ".join(FORMATS)


class Float8E5M2(Float8):
    """float8_e5m2, of which torch has no product with a scale per row."""

    name = "fp8 (e5m2)"
    dtype = torch.float8_e5m2
    eight_bit = None

    def row_quantizer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        raise NotImplementedError("float8_e5m2 is read from files and made of nothing else")


class TurnedInt8(Int8):
    """int8 whose groups of columns were turned by a Hadamard matrix before they were rounded (ComfyUI's `convrot`).

    To be dequantised they are turned back, see `stored_weights.Int8`.
    """

    eight_bit = None

    def __init__(self, group: int) -> None:
        self.group = group
        self.name = f"int8 (convrot {group})"  # type: ignore[misc]

    def row_quantizer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        raise NotImplementedError("turned int8 is read from files and made of nothing else")

    def dequantize(self, buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        data, scale = buffers["data"], buffers["scale"] / math.sqrt(self.group)
        signs = hadamard(self.group).to(data.device)
        out = torch.empty(shape, dtype=dtype, device=data.device)
        for rows in slabs(shape):
            turned = (data[rows].float().unflatten(-1, (-1, self.group)) @ signs).flatten(-2)
            out[rows] = turned.mul_(scale[rows])
        return out


E5M2, FP16 = Float8E5M2(), Dense("fp16", torch.float16)
_BY_DTYPE: Mapping[str, Format] = {
    "F8_E4M3": FORMATS["fp8"], "F8_E5M2": E5M2, "BF16": BF16, "F16": FP16, "F32": FP32,
}  # fmt: skip
_turned = functools.cache(TurnedInt8)


def formats(file: ModelFile) -> dict[str, Format]:
    """Linear → the format in which the file stores its weight.

    Raises:
        SettingsError: the file stores no Linear in 8 bits, or one in a way that cannot be kept.
    """
    with torch.device("meta"):
        model = file.family.build(file.config)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found, misfits = {}, []
    for name in names:
        members = {_format(member) for member in file.weights[f"{name}.weight"]}
        format = members.pop()
        if members or format is None:
            misfits.append(name)
        else:
            found[name] = format
    if misfits:
        raise SettingsError(
            f"{file.path.name} stores {some(misfits)} in a way that cannot be kept as it is, wanted ComfyUI's fp8 with "
            f"a scale per tensor or row, or int8_tensorwise; {_WAY_OUT}"
        )
    if all(isinstance(format, Dense) for format in found.values()):
        dtypes = ", ".join(sorted({format.name for format in found.values()}))
        raise SettingsError(
            f"{file.path.name} is stored in {dtypes}, and precision {AS_STORED} wants ComfyUI's fp8 or int8 file; "
            f"{_WAY_OUT}"
        )
    return found


def formats_for(precision: str, file: ModelFile) -> tuple[tuple[str, Format], ...]:
    """The pairs of `formats` for a memory plan; none in another precision, of which the plan knows the formats."""
    return tuple(formats(file).items()) if precision == AS_STORED else ()


def tensors(file: ModelFile, formats: Mapping[str, Format]) -> Iterator[tuple[str, Buffers]]:
    """Yields each parameter by its official name: a Linear's weight as the buffers of its format, others as `data`.

    Each is valid only until the next is asked for, whose memory is the same.
    """
    arena = Arena()
    with OpenFiles(arena) as files:
        for name in file.weights:
            arena.reset()
            owner, _, leaf = name.rpartition(".")
            if leaf != "weight" or owner not in formats or isinstance(formats[owner], Dense):
                yield name, {"data": file.read(files, name)}
                continue
            members = file.weights[name]
            pieces = [(files.read(member.entry), _scale(files, member)) for member in members]
            data, scale = (part[0] if len(members) == 1 else torch.cat(part) for part in zip(*pieces, strict=True))
            yield name, {"data": data.reshape(file.shapes[name]), "scale": scale}
            del data, scale, pieces


def _format(stored: StoredWeight) -> Format | None:
    """None where it cannot be kept."""
    if isinstance(stored, StoredInt8):
        return FORMATS["int8"] if stored.group == 1 else _turned(stored.group)
    if not isinstance(stored, Plain) or (stored.scale is not None and stored.entry.dtype in DENSE):
        return None
    return _BY_DTYPE[stored.entry.dtype]


def _scale(files: OpenFiles, stored: StoredWeight) -> Tensor:
    """One per row, (O, 1) in fp32; 1 for a plain cast to fp8."""
    assert isinstance(stored, Plain | StoredInt8)
    rows: Shape = (stored.entry.shape[0], 1)
    if stored.scale is None:
        return torch.ones(rows)
    return files.read(stored.scale).float().reshape(-1, 1).expand(rows).contiguous()
