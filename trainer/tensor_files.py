"""Tensors of safetensors files by plain reads and writes, one at a time.

safetensors' own reader maps the file into memory: each page that was read counts as the process's until the file is
closed, and on Windows the whole file counts against the commit limit from the start. Its writer takes all tensors as
bytes at once, a second copy. Here memory holds the tensor at hand.

The format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, little-endian; the header, JSON,
which gives each tensor's dtype, shape and place; the tensors' bytes without gaps. Whether a file is one, and whole, is
`checkpoints.read_header`'s and safetensors' own to check before.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import TruncatedFileError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
CODES = {dtype: code for code, dtype in DTYPES.items()}

PIECE = 2**24  # bytes of one read or write: a system call takes 2 GiB at most, and a small one stays in the cache

SAMPLE = 2**20  # bytes of one sample of a file

Shape = tuple[int, ...]
Entry = tuple[torch.dtype, Shape]
Layout = Mapping[str, Entry]


def add_tensor(digest: Any, tensor: Tensor) -> None:
    """Feeds a tensor's shape and bytes, not its dtype, to a hash of hashlib's."""
    digest.update(str(tuple(tensor.shape)).encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


class Arena:
    """Memory that is used again for the next tensor: fresh memory costs as much time as the reading itself.

    What was taken is valid until `reset`.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """`size` bytes, aligned for any dtype."""
        if self._used + size > len(self._memory):
            # What was taken before lives on by itself.
            self._memory, self._used = torch.empty(0), 0
            self._memory = torch.empty(size, dtype=torch.uint8)
        taken = self._memory[self._used : self._used + size]
        self._used += math.ceil(size / 64) * 64
        return taken

    def reset(self) -> None:
        self._used = 0


class TensorFile:
    """An open safetensors file."""

    def __init__(self, path: Path, arena: Arena | None = None) -> None:
        """`arena`: where tensors are read to; without one each has memory of its own."""
        self.path = path
        self._arena = arena
        self._file = path.open("rb", buffering=0)
        length = struct.unpack("<Q", self._file.read(8))[0]
        self._entries = json.loads(self._file.read(length))
        self._start = 8 + length
        self.metadata: dict[str, str] = self._entries.pop("__metadata__", {})
        # A dtype that torch does not know may stand in a file beside the tensors that are wanted.
        self.layout = {
            key: (DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for key, entry in self._entries.items()
            if entry["dtype"] in DTYPES
        }

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def reset(self) -> None:
        """Lets the memory of the tensors so far be used again, if there is an arena."""
        if self._arena is not None:
            self._arena.reset()

    def get_tensor(self, key: str) -> Tensor:
        """The tensor as stored, on the CPU.

        Raises:
            TruncatedFileError: the file ends inside it.
        """
        begin, end = self._entries[key]["data_offsets"]
        dtype, shape = self.layout[key]
        size = end - begin
        data = torch.empty(size, dtype=torch.uint8) if self._arena is None else self._arena.take(size)
        view = data.numpy().data
        self._file.seek(self._start + begin)
        done = 0
        while done < size:
            got = self._file.readinto(view[done : done + PIECE])
            if not got:
                raise TruncatedFileError(f"{self.path.name} ends inside {key}; was it changed while it was read?")
            done += got
        return data.view(dtype).view(shape)


def write_tensors(
    path: Path, layout: Layout, tensor: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, one tensor in memory at a time.

    Args:
        path: is overwritten.
        layout: key → dtype and shape. Wide dtypes stand first in the file, so that every tensor is aligned.
        tensor: key → tensor of that dtype and shape, on any device; asked for in the order of the file.
        metadata: for the header.

    Raises:
        OSError: it cannot be written, such as on a full disk.
    """
    keys = file_order(layout)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in keys:
        dtype, shape = layout[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file.write, memoryview(struct.pack("<Q", len(text)) + text))
        for key in keys:
            value = tensor(key).detach()
            if (value.dtype, tuple(value.shape)) != layout[key]:
                raise ValueError(f"{key} is {value.dtype} {tuple(value.shape)}, the layout says {layout[key]}")
            _write(file.write, as_bytes(value.cpu()).numpy().data)


def file_order(layout: Layout) -> list[str]:
    """The order in which a file holds its tensors: wide dtypes first, else as they stand in the layout."""
    return sorted(layout, key=lambda key: -layout[key][0].itemsize)


def samples_of(file: BinaryIO, size: int, count: int) -> Iterator[bytes]:
    """`count` pieces of a MiB, spread evenly over a file of `size` bytes, its first and last among them."""
    for place in range(count):
        file.seek(max(0, (size - SAMPLE) * place // (count - 1)))
        yield file.read(SAMPLE)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, as a flat view of a contiguous one."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _write(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += write(data[done : done + PIECE]) or 0
