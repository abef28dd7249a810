"""`torch.compile` for the element-wise work of the blocks, applied from outside.

Matrix products and attention are library kernels already. What lies between them, norm and modulation, q and k's norm
and rotation, gates, SwiGLU's product and residuals, is what eager runs as many kernels that read and write everything,
and what compiling fuses. Each such function (`pointwise.py`) is compiled by itself, once for all blocks and buckets:
batch and tokens are dynamic from the first call on. So the autograd Functions of Linears and attention between them,
the tape and recomputation stay what they are; those of the pieces themselves (`elementwise.py`) are compiled with their
backward.

Each is compiled whole (`fullgraph`): what cannot be compiled is an error, and never runs eager in silence. No setting
of `torch._dynamo` or inductor is changed.

The numbers differ from eager's in the order of sums, by about 3e-7 of a gradient in fp32; in bf16 by its rounding,
since a fused kernel rounds once where eager rounds after each operation of gates, SwiGLU and residuals.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import pointwise
from .errors import TrainingError, first_line

DYNAMIC_AXES = (0, 1)  # batch and tokens


@contextmanager
def compiled() -> Iterator[Compiler]:
    """While it lasts, element-wise work that takes part in a graph runs compiled."""
    compiler = Compiler()
    with pointwise.run_by(compiler):
        yield compiler


class Compiler:
    """Compiles each function at its first call for a kind of arguments, and runs it.

    Attributes:
        made: what was compiled. Each entry is a function of its own to torch, so that none uses up another's share of
            recompilations.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Callable[..., Tensor]] = {}

    def __call__(self, function: pointwise.Function, args: tuple[Any, ...]) -> Tensor:
        for value in args:
            if isinstance(value, Tensor) and value.ndim > len(DYNAMIC_AXES):
                for axis in DYNAMIC_AXES:
                    if value.shape[axis] > 1:
                        torch._dynamo.mark_dynamic(value, axis)
        kind = (function, *(_kind(value) for value in args))
        known = self.made.get(kind)
        if known is not None:
            return known(*args)
        self.made[kind] = made = torch.compile(_copy(function), fullgraph=True, dynamic=False)
        try:
            return made(*args)
        except torch._dynamo.exc.TorchDynamoException as error:  # inductor's are of this kind too
            raise TrainingError(
                f"{function.__name__} cannot be compiled ({first_line(error)}); set [train] compile = false"
            ) from error


def _kind(value: Any) -> Any:
    """All that a compilation may depend on.

    Of the dynamic axes it is whether they are 1, and where both are the first stride too, which torch then takes as
    facts. The stand-in for an output that is not needed has strides of 0 (`kept.output`).
    """
    if not isinstance(value, Tensor):
        return value
    sizes, strides = tuple(value.shape), value.stride()
    if value.ndim > len(DYNAMIC_AXES):
        ones = [sizes[axis] == 1 for axis in DYNAMIC_AXES]
        sizes, strides = (*ones, *sizes[len(DYNAMIC_AXES) :]), strides if all(ones) else strides[1:]
    return sizes, strides, value.dtype, value.device, value.requires_grad


def _copy(function: Any) -> Any:
    """The function with a code object of its own, to which torch ties what it compiles."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
