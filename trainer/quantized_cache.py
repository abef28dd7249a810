"""A quantised base kept on disk, so that the next session reads it instead of quantising again.

One safetensors file per source, precision and kind of device. It is trusted only where all of this holds:

- Its name has the source's key (`source_key`): sizes, times of change, complete headers and samples of the content.
  That tells apart: other files, other versions of a file, a file that was written again. It cannot tell: bytes changed
  between the samples by something that also put size and time of change back. A copy whose time of change is its own
  counts as another source; the path and the name do not count, so a renamed or moved file finds its cache again.
- Its metadata name the same maker: `VERSION` below, torchao and torch, whose numbers these are.
- Every tensor that the model needs is there, with the right dtype and shape for its format, and no other.
- Each tensor's checksum is right. It finds any single change and any cut; it is no protection against intent.

Anything else is said in one sentence, and the file is made anew. Files of sources that are gone stay until they are
deleted by hand: nothing here deletes a file that it does not replace.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..lora_convert import atomic_file
from .checkpoints import ModelFile, read_header
from .errors import CheckpointError
from .formats import Dense, Format
from .quantization import FrozenLinear
from .tensor_files import Arena, Entry, Layout, Shape, TensorFile, as_bytes, file_order, samples_of, write_tensors

# Of everything between a source's bytes and the buffers: raise it when decoding, quantising or the layout here changes.
VERSION = 1
SAMPLES = 16
SUMS = "~checksums"
SPARE = 2**28  # bytes that stay free on the disk
SUMMED = 2**20  # words of 8 bytes that share one weight in a checksum


class StaleError(Exception):
    """Why a kept file is not used, as the rest of a sentence."""


def source_key(file: ModelFile) -> str:
    """SHA-256 over each file's size, time of change in ns, complete header and samples: 16 MiB are read of each."""
    digest = hashlib.sha256()
    for path in file.files:
        status = path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as opened:
            length = opened.read(8)
            digest.update(length + opened.read(int.from_bytes(length, "little")))
            for sample in samples_of(opened, status.st_size, SAMPLES):
                digest.update(sample)
    return digest.hexdigest()


Settle = Callable[[str, FrozenLinear], None]
"""Takes a Linear, by name, that has just been filled: it may be moved."""


class QuantizedCache:
    """The kept form of one source at one precision.

    Attributes:
        path: where it is kept, whether it is there or not.
    """

    def __init__(self, folder: str | Path, file: ModelFile, precision: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        name = f"{file.family.name}-{precision}-{self.device.type}-{source_key(file)[:32]}.safetensors"
        self.path = Path(folder) / name
        self.shapes = file.shapes
        self.marks = {
            "graft": f"quantised base {VERSION}",
            "made by": f"torchao {version('torchao')}, torch {torch.__version__}",
        }

    def read(
        self, model: nn.Module, formats: Mapping[str, Format], dense: Dense, settle: Settle = lambda *_: None
    ) -> list[str]:
        """Fills the model from the kept file.

        Args:
            model: its Linears are `FrozenLinear`s, empty or not.
            formats: each Linear's format, unless the kept file says that it could not be stored so.
            dense: the format of those.
            settle: called with each Linear as soon as it is filled.

        Returns:
            The Linears that their format could not store.

        Raises:
            StaleError: the file cannot be trusted; the model may have been filled in part.
        """
        try:
            read_header(self.path)
            with safe_open(self.path, framework="np"):
                pass
            # On the CPU each tensor is read to where it stays.
            with TensorFile(self.path, None if self.device.type == "cpu" else Arena()) as file:
                misfits = self._misfits(file.metadata, formats)
                actual = {name: dense if name in misfits else format for name, format in formats.items()}
                wanted = layout_of(self.shapes, actual, dense)
                if file.layout != with_sums(wanted):
                    raise StaleError("does not hold the tensors that this base needs")
                self._fill(model, file, actual, file_order(wanted), settle)
        except (CheckpointError, SafetensorError) as error:
            raise StaleError(f"is damaged ({error})") from error
        except OSError as error:
            raise StaleError(f"cannot be read ({error.strerror or error})") from error
        return misfits

    def _misfits(self, metadata: Mapping[str, str], formats: Mapping[str, Format]) -> list[str]:
        for mark, wanted in self.marks.items():
            if metadata.get(mark) != wanted:
                raise StaleError(f"was made by another version ({metadata.get(mark)}; wanted {wanted})")
        try:
            misfits = list(json.loads(metadata["misfits"]))
        except (KeyError, ValueError, TypeError) as error:
            raise StaleError("is damaged (its metadata cannot be read)") from error
        if not all(name in formats for name in misfits):
            raise StaleError("does not hold the tensors that this base needs")
        return misfits

    def _fill(
        self, model: nn.Module, file: TensorFile, formats: Mapping[str, Format], order: list[str], settle: Settle
    ) -> None:
        sums = dict(zip(order, file.get_tensor(SUMS).clone().view(torch.int64).tolist(), strict=True))

        def read(key: str) -> Tensor:
            file.reset()
            tensor = file.get_tensor(key)
            if checksum(tensor) != sums[key]:
                raise StaleError(f"is damaged (in {key})")
            return tensor.to(self.device)

        for name in self.shapes:
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            if not isinstance(owner, FrozenLinear):
                setattr(owner, leaf, nn.Parameter(read(name), requires_grad=False))
            elif leaf == "bias":
                owner.register_buffer("bias", read(name))
            else:
                format = formats[owner_name]
                owner.restore({buffer: read(f"{owner_name}.{buffer}") for buffer in format.buffers}, format)
            if isinstance(owner, FrozenLinear):
                settle(owner_name, owner)

    def write(self, model: nn.Module, formats: Mapping[str, Format], dense: Dense, misfits: Collection[str]) -> str:
        """Keeps a loaded model; whatever goes wrong costs no more than that. Returns what became of it, one sentence.

        `formats`, `dense`, `misfits`: as for `read`.
        """
        actual = {name: dense if name in misfits else format for name, format in formats.items()}
        layout = layout_of(self.shapes, actual, dense)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        sums: list[int] = []

        def tensor(key: str) -> Tensor:
            if key == SUMS:  # the last of the file
                return torch.tensor(sums, dtype=torch.int64).view(torch.uint8)
            value = tensors[key].detach().cpu()
            sums.append(checksum(value))
            return value

        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < size + SPARE:
                return (
                    f"the quantised base is not kept: it takes {size / 2**30:.2f} GiB and {SPARE / 2**30:.2f} GiB to "
                    f"spare, {folder} has {free / 2**30:.2f} GiB free"
                )
            with atomic_file(self.path, overwrite=True) as temporary:
                metadata = {**self.marks, "misfits": json.dumps(list(misfits))}
                write_tensors(temporary, with_sums(layout), tensor, metadata)
        except OSError as error:
            return f"the quantised base is not kept: {folder} cannot be written to ({error.strerror or error})"
        return f"the quantised base is kept for the next time: {self.path} ({size / 2**30:.2f} GiB)"


def layout_of(shapes: Mapping[str, Shape], formats: Mapping[str, Format], dense: Dense) -> dict[str, Entry]:
    """Key → dtype and shape of every tensor of a loaded base whose parameters have these names and shapes."""
    layout: dict[str, Entry] = {}
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        if owner not in formats:
            layout[name] = (torch.float32, shape)
        elif leaf == "bias":
            layout[name] = (dense.dtype, shape)
        else:
            stored = formats[owner].layout((shape[0], shape[1]))
            layout |= {f"{owner}.{buffer}": stored[buffer] for buffer in formats[owner].buffers}
    return layout


def with_sums(layout: Layout) -> dict[str, Entry]:
    """The layout and, as its last tensor, a checksum of each before it, int64 by its bytes."""
    return {**layout, SUMS: (torch.uint8, (8 * len(layout),))}


def checksum(tensor: Tensor) -> int:
    """A sum over the words of 8 bytes, modulo 2^64, at the speed of memory.

    Each 8 MiB has an odd weight of its own, so that large pieces that changed places are found too.
    """
    data = as_bytes(tensor)
    whole = len(data) // 8 * 8
    total = int.from_bytes(data[whole:].numpy().tobytes(), "little")
    # A copy only where the tensor is a part of another at an odd place.
    words = (data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()).view(torch.int64)
    for number, piece in enumerate(words.split(SUMMED)):
        total += (2 * number + 1) * int(piece.sum())
    return (total + 2**63) % 2**64 - 2**63


__all__ = ["QuantizedCache", "Settle", "StaleError", "source_key"]
