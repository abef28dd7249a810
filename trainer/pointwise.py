"""Element-wise work of a transformer, told apart from its matrix products and attention, so that it can be compiled.

A family marks such a function with `pointwise`; whether it runs as it is written or compiled is for `compiling.py` to
say, while a session is open. A norm counts too: it reduces over the last axis, and mixes no tokens.

Where blocks recompute for the least memory, the peak is the graph of one block, which the backward pass builds whole.
Half of that graph is fp32 on the way from one bf16 tensor to the next: it is made again instead of kept. What is
compiled keeps little by itself, and recomputes in its fused backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kept, saved_values

Function = Callable[..., Tensor]
Runner = Callable[[Function, tuple[Any, ...]], Tensor]

# Not a context variable: a recomputation may run in a thread of autograd's own, and must run as its forward pass did.
_runners: list[Runner] = []


def pointwise(function: Function) -> Function:
    """Marks a pure function of tensors, and of plain values, by position.

    In a lean block (`kept.Tape`), unless it is compiled, its graph keeps its arguments alone, and not what it makes on
    the way to the result.

    Of a tensor with three axes or more the first two, batch and tokens, may be of any size; the others are of the
    model's.
    """
    return _marked(function, lean=False)


def lean_pointwise(function: Function) -> Function:
    """Marks such a function that needs no help: its own graph keeps no more than its arguments."""
    return _marked(function, lean=True)


def _marked(function: Function, lean: bool) -> Function:
    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        # Without a graph to be made, as in previews, it runs as written.
        if not torch.is_grad_enabled() or not any(_has_graph(value) for value in args):
            return function(*args)
        if _runners:
            return _runners[-1](function, args)
        if lean:
            return function(*args)
        if kept.lean():
            return _FromArguments.apply(function, *args)
        # `_FromArguments` sums up an argument's gradient before others are added to it: the view makes it so here, too,
        # and so the same bits.
        return function(*(value.view_as(value) if _has_graph(value) else value for value in args))

    return call


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """While it lasts, marked functions that take part in a graph are handed to the runner with their arguments."""
    _runners.append(runner)
    try:
        yield
    finally:
        _runners.remove(runner)


class _FromArguments(torch.autograd.Function):
    """A function that keeps its arguments alone for backward, which runs it again."""

    @staticmethod
    def forward(ctx: Any, function: Function, *args: Any) -> Tensor:
        saved_values.save(ctx, args)
        ctx.function = function
        return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        args = [value.detach() if isinstance(value, Tensor) else value for value in saved_values.saved(ctx)]
        wanted = [
            value.requires_grad_() for value, needed in zip(args, ctx.needs_input_grad[1:], strict=True) if needed
        ]
        with torch.enable_grad():
            out = ctx.function(*args)
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])
