"""Loading a base: file → transformer, frozen at the chosen precision, one tensor in memory at a time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from . import as_stored
from .checkpoints import ModelFile, open_model_file
from .errors import SettingsError, some
from .families import Family, Transformer
from .formats import AS_STORED, BF16, FP32, PRECISIONS, Dense, Format, format_of
from .offload import BlocksOnCPU, spread
from .quantization import FrozenLinear, replace_linears
from .quantized_cache import QuantizedCache, Settle, StaleError

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Base:
    """A loaded base: nothing of it requires a gradient.

    Attributes:
        model: the transformer.
        family: what it is.
        source: the file that it came from.
        precision: the mode that was asked for.
        notes: what the user should know of the loading, one sentence each.
        on_cpu: the blocks whose weights live in host memory; None where all are on the device.
    """

    model: Transformer
    family: Family
    source: Path
    precision: str
    notes: tuple[str, ...]
    on_cpu: BlocksOnCPU | None = None


def compute_dtype_of(name: str) -> torch.dtype:
    if name not in COMPUTE_DTYPES:
        raise SettingsError(f"compute dtype {name!r} is not known; choose one of {', '.join(COMPUTE_DTYPES)}")
    return COMPUTE_DTYPES[name]


def dense_format(precision: str) -> Dense:
    """How weights that are not quantised are stored: fp32 where that was asked for, else bf16."""
    return FP32 if precision == "fp32" else BF16


def choose_format(family: Family, precision: str, name: str) -> Format:
    """The format that one Linear should have: the mode's, unless the family never quantises it."""
    return dense_format(precision) if re.fullmatch(family.never_quantised, name) else format_of(precision)


def load_base(
    path: str | Path | ModelFile,
    precision: str = "bf16",
    compute_dtype: str = "bf16",
    device: torch.device | str = "cpu",
    blocks_on_cpu: int = 0,
    quantized_cache: str | Path = "",
) -> Base:
    """Reads a model file into a frozen transformer.

    Memory of the host: what is kept on the CPU, the tensor at hand as it is stored (and in fp32 where the file has a
    scale for it), and some MiB of the quantiser's.

    Args:
        path: the file, or what `open_model_file` made of it.
        precision: one of `PRECISIONS`: how the Linears of the blocks are stored. Norms and modulation tables are kept
            in fp32, the few Linears that the family never quantises in bf16 (or fp32). With `as-stored` every Linear
            is kept as the file has it.
        compute_dtype: `bf16` or `fp32`, the dtype of activations.
        device: where the weights go, each as soon as it is read, quantised there.
        blocks_on_cpu: so many of the transformer's blocks, spread over its depth, are kept in host memory as soon as
            they are quantised, and visit the device while they compute.
        quantized_cache: a folder in which the quantised base is kept for the next time; empty for none.

    Raises:
        CheckpointError: the file cannot be read as a base.
        SettingsError: an unknown precision or dtype, more blocks than there are, or a file that cannot be kept as it
            is stored.
    """
    quantised = precision != AS_STORED and not isinstance(format_of(precision), Dense)
    dtype = compute_dtype_of(compute_dtype)
    file = path if isinstance(path, ModelFile) else open_model_file(path)
    family = file.family
    notes = list(file.notes)
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            model = family.build(file.config)
        replace_linears(model, lambda name, linear: FrozenLinear.like(linear))
        waiting = choose_blocks(family, model, blocks_on_cpu)

        def settle(name: str, layer: FrozenLinear) -> None:
            if family.block_of(name) in waiting:
                layer.to("cpu")

        if quantized_cache and quantised:
            misfits = _cached(model, file, precision, device, settle, Path(quantized_cache), notes)
        else:
            if precision == AS_STORED:
                misfits = _as_stored(model, file, device, settle)
            else:
                misfits = _quantized(model, file, precision, device, settle)
            if quantized_cache:
                reason = "needs no quantising" if precision == AS_STORED else "is not quantised"
                notes.append(f"nothing is kept in {quantized_cache}: {precision} {reason}")
        on_cpu = BlocksOnCPU(list(waiting.values()), device) if waiting else None
    model.compute_dtype = dtype
    counts = Counter(layer.format.name for layer in _linears(model).values() if layer.format is not None)
    stored = ", ".join(f"{count} Linears in {name}" for name, count in counts.most_common())
    notes.append(f"{family.title}: {stored}; norms in fp32; computing in {compute_dtype}")
    if misfits:
        notes.append(f"{precision} cannot store {some(misfits)}, kept in {dense_format(precision).name}")
    if on_cpu is not None:
        notes.append(f"{on_cpu.count} blocks, {on_cpu.host_bytes / 2**30:.2f} GiB, are kept on the CPU")
    return Base(model.eval(), family, file.path, precision, tuple(notes), on_cpu)


def choose_blocks(family: Family, model: nn.Module, count: int) -> dict[int, nn.Module]:
    """`count` of the model's transformer blocks, spread over its depth, by number.

    Raises:
        SettingsError: there are not so many.
    """
    blocks = family.main_blocks(model)
    if not 0 <= count <= len(blocks):
        raise SettingsError(f"blocks_on_cpu is {count}; this {family.title} has {len(blocks)} blocks")
    return {number: blocks[number] for number in spread(count, len(blocks))}


def _quantized(
    model: nn.Module, file: ModelFile, precision: str, device: torch.device | str, settle: Settle
) -> list[str]:
    """Fills the model from its file; returns the Linears that the precision cannot store, kept dense."""
    misfits = []
    for name, tensor in file.tensors(reuse=True):
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        # Always a copy: the next tensor is read to where this one stands.
        if not isinstance(owner, FrozenLinear):
            _store_parameter(owner, leaf, tensor, device)
        elif leaf == "bias":
            owner.store_bias(tensor, dense_format(precision).dtype, device)
        else:
            format = choose_format(file.family, precision, owner_name)
            if not format.fits(tensor):
                misfits.append(owner_name)
                format = dense_format(precision)
            owner.store(tensor, format, device)
        if isinstance(owner, FrozenLinear):
            settle(owner_name, owner)
        del tensor
    return misfits


def _as_stored(model: nn.Module, file: ModelFile, device: torch.device | str, settle: Settle) -> list[str]:
    """As `_quantized`, with every Linear as the file has it."""
    formats = as_stored.formats(file)
    for name, buffers in as_stored.tensors(file, formats):
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        # Always a copy: the next tensor is read to where this one stands.
        if not isinstance(owner, FrozenLinear):
            _store_parameter(owner, leaf, buffers["data"], device)
            continue
        if leaf == "bias":
            owner.store_bias(buffers["data"], buffers["data"].dtype, device)
        else:
            copies = {buffer: tensor.to(device, copy=True) for buffer, tensor in buffers.items()}
            owner.restore(copies, formats[owner_name])
        settle(owner_name, owner)
    return []


def _store_parameter(owner: nn.Module, name: str, tensor: Tensor, device: torch.device | str) -> None:
    """A norm or a table, in fp32."""
    setattr(owner, name, nn.Parameter(tensor.to(device, torch.float32, copy=True), requires_grad=False))


def _cached(
    model: nn.Module,
    file: ModelFile,
    precision: str,
    device: torch.device | str,
    settle: Settle,
    folder: Path,
    notes: list[str],
) -> list[str]:
    """As `_quantized`, from the kept form of the file where there is one, else keeping it; `notes` says which."""
    cache = QuantizedCache(folder, file, precision, device)
    formats = {name: choose_format(file.family, precision, name) for name in _linears(model)}
    dense = dense_format(precision)
    if cache.path.exists():
        try:
            misfits = cache.read(model, formats, dense, settle)
            notes.append(f"the quantised base was read from {cache.path}")
            return misfits
        except StaleError as error:
            notes.append(f"{cache.path} {error}: the base was quantised anew")
    misfits = _quantized(model, file, precision, device, settle)
    notes.append(cache.write(model, formats, dense, misfits))
    return misfits


def _linears(model: nn.Module) -> dict[str, FrozenLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


__all__ = ["COMPUTE_DTYPES", "PRECISIONS", "Base", "choose_format", "compute_dtype_of", "load_base"]
