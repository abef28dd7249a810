"""Element-wise work of a transformer, told apart from its matrix products and attention, so that it can be compiled.

Such a function is marked with `pointwise`; whether it runs as it is written or compiled is for `compiling.py` to
say, while a session is open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]
Runner = Callable[[Function, tuple[Any, ...]], Tensor]

# Not a context variable: a recomputation may run in a thread of autograd's own, and must run as its forward pass did.
_runners: list[Runner] = []


def pointwise(function: Function) -> Function:
    """Marks a pure function of tensors, and of plain values, by position.

    Of a tensor with three axes or more the first two, batch and tokens, may be of any size; the others are of the
    model's.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        # Without a graph to be made, as in previews, it runs as written.
        if _runners and torch.is_grad_enabled() and any(_has_graph(value) for value in args):
            return _runners[-1](function, args)
        return function(*args)

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
