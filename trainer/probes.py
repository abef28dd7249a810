"""What only a try shows: whether torchao quantises, whether its optimiser steps, whether a folder takes files.

Each probe is small, leaves nothing behind, and answers with None or one line: what is wrong and what to do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..lora_convert import atomic_file
from . import compiling, eight_bit, optimizers
from .elementwise import rms_normed
from .errors import first_line
from .formats import NF4, format_of
from .pointwise import pointwise
from .quantization import FrozenLinear, input_gradient, matmul

# Of the whole tensor, |found - wanted| / |wanted|. nf4, the coarsest, is at about 0.1 on evenly spread values; a stub
# that keeps zeros is at 1.
TOLERANCE = 0.25


def precision_fault(precision: str, device: torch.device | str) -> str | None:
    """Quantises a tiny tensor on the device and dequantises it; for a precision that torchao quantises.

    A torchao whose symbols import and whose quantising does nothing has been seen on Windows under ROCm.
    """
    mend = (
        f"install the torchao that goes with torch {torch.__version__} (python -m pip install -U torchao), or set "
        '[model] precision = "bf16"'
    )
    try:
        format = format_of(precision)
        with torch.inference_mode(False), torch.no_grad():
            wanted = torch.linspace(-1, 1, 4 * NF4.block, dtype=torch.float32, device=device).view(4, -1)
            stored = format.quantize(wanted)
            found = format.dequantize(stored, (4, NF4.block), torch.float32)
        error = ((found - wanted).norm() / wanted.norm()).item()
        width = stored["data"].element_size()
    except Exception as fault:  # an import, a missing kernel, a driver: whatever it is, this precision fails
        return f"{precision} does not work on {device} ({first_line(fault)}); {mend}"
    if width != 1 or torch.equal(found, wanted):
        return f"{precision} does not work on {device} (torchao quantises nothing, as a stub does); {mend}"
    if not error <= TOLERANCE:  # NaN too
        return f"{precision} does not work on {device} (values come back wrong by {error:.0%}); {mend}"
    return None


def eight_bit_fault(format: str, device: torch.device | str) -> str | None:
    """A product and a gradient in 8 bits of a small matrix, whose numbers are exact in them or nearly so.

    torch is built without some of these kernels on some systems, such as Windows. The matrix has tiles of numbers of
    different size, so that scales in a wrong place are found. torchao is not asked: a file of ComfyUI's needs none.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            tile = torch.ones(32, 32, dtype=torch.bfloat16, device=device).triu()
            factors = 2.0 ** (torch.arange(25, device=device, dtype=torch.bfloat16) * 2 % 3).view(5, 5)
            x = torch.kron(factors, tile)
            layer, stored = FrozenLinear(*x.shape), format_of(format)
            if format in eight_bit.DTYPES:
                data, scale = eight_bit.quantize_rows(x, eight_bit.DTYPES[format])
                layer.restore({"data": data, "scale": scale}, stored)
            else:
                layer.store(x, stored)
            layer.eight_bit = True
            found = matmul(x, layer), input_gradient(x, layer)
            wanted = x.float() @ x.T.float(), x.float() @ x.float()
            wrong = not all(
                torch.allclose(y.float(), exact, rtol=0.02, atol=0) for y, exact in zip(found, wanted, strict=True)
            )
    except Exception as fault:  # a missing kernel, a driver: whatever it is, this way of multiplying fails
        return f"{format} matmuls do not work on {device} with torch {torch.__version__} ({first_line(fault)})"
    return f"{format} matmuls give wrong numbers on {device} with torch {torch.__version__}" if wrong else None


def optimizer_fault(optimizer: str, device: torch.device | str) -> str | None:
    """One step of adamw8bit on a tiny weight.

    torchao compiles that step: on a CPU with a C++ compiler, on a card with Triton; either may be missing.
    """
    needs = "Triton" if torch.device(device).type == "cuda" else "a C++ compiler"
    try:
        with torch.inference_mode(False):
            # The fewest values of which the moments are kept in 8 bits.
            weight = nn.Parameter(torch.zeros(64, 64, device=device))
            weight.grad = torch.ones_like(weight)
            optimizers.build(optimizer, [weight], 1e-2, 0.0).step()
        moved = bool((weight.detach() < 0).all())
    except Exception as fault:  # the compiler's errors have no common kind
        return (
            f"{optimizer} needs torchao and {needs} that work with torch {torch.__version__} on {device} "
            f'({first_line(fault)}); install what is missing, or set [train] optimizer = "adamw"'
        )
    if not moved:
        return f'{optimizer} steps without effect on {device}; set [train] optimizer = "adamw"'
    return None


def compile_fault(device: torch.device | str) -> str | None:
    """Compiles a tiny function and its gradient: on a CPU that takes a C++ compiler, on a card Triton.

    Either may be missing, on Windows usually.
    """
    needs = "Triton" if torch.device(device).type == "cuda" else "a C++ compiler"
    mend = "install what is missing, or set [train] compile = false"
    try:
        with torch.inference_mode(False), torch.enable_grad(), compiling.compiled() as compiler:
            x, shift = (torch.linspace(low, 2, 64, device=device).view(1, 4, 16).requires_grad_() for low in (-2, 1))
            gain = torch.linspace(1, 2, 16, device=device)
            # Recomputed, so that it also runs in the thread that a card's backward pass has. Of all pieces a norm asks
            # the most of a compiler.
            found = checkpoint(pointwise(rms_normed), x, gain, shift, 1e-5, use_reentrant=False)
            wanted = torch.nn.functional.rms_norm(x, (16,), gain, 1e-5) + shift
            gradients = [torch.autograd.grad(made.square().sum(), (x, shift)) for made in (found, wanted)]
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(*gradients, strict=True))
    except Exception as fault:  # the compiler's errors have no common kind
        return (
            f"compile needs {needs} that works with torch {torch.__version__} on {device} ({first_line(fault)}); {mend}"
        )
    if not compiler.made or not error <= 1e-5:
        return f"what torch {torch.__version__} compiles on {device} is wrong; set [train] compile = false"
    return None


def standing(folder: Path) -> Path:
    """The folder itself, or the nearest of its parents that is there.

    Raises:
        OSError: a name that the file system cannot take.
    """
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def folder_fault(folder: Path) -> str | None:
    """Makes a folder and writes, renames and removes a file in it, in `folder` or where that would be made.

    A try, because `os.access` says yes on Windows and on network shares where writing fails.
    """
    try:
        parent = standing(folder)
        if not parent.is_dir():
            return f"{parent} is no folder"
        with (
            tempfile.TemporaryDirectory(prefix=".graft-trial-", dir=parent) as trial,
            atomic_file(Path(trial) / "trial") as temporary,
        ):
            temporary.write_bytes(b"trial")
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})"
    return None
