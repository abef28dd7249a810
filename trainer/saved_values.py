"""What an autograd Function keeps for its backward where tensors stand among other values.

Autograd counts and checkpoints what it saves itself, which is tensors alone; the others stay on the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_TENSOR = object()


def save(ctx: Any, values: Iterable[Any]) -> None:
    """Keeps the values, of which any may be a tensor, in a Function's forward."""
    values = tuple(values)
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.values = [_TENSOR if isinstance(value, Tensor) else value for value in values]


def saved(ctx: Any) -> list[Any]:
    """The same values, in its backward."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if value is _TENSOR else value for value in ctx.values]
