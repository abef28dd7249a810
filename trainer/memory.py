"""Recomputation of a model's blocks in the backward pass, applied from outside.

A block that recomputes everything keeps its input alone between forward and backward. A slim one also keeps what its
matrix products and its attention gave (`kept.py`), and recomputes the element-wise work between them alone: that is the
least memory without a matrix product being computed twice. Loss and gradients are bit-identical either way, and to
those without (a test shows it): no autocast, one attention dtype, pinned SDPA kernels and a restored random state make
the second run the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kept import Tape


@contextmanager
def checkpointed(blocks: Iterable[nn.Module], slim: Iterable[nn.Module] = ()) -> Iterator[None]:
    """While it lasts, each block recomputes its activations in the backward pass.

    Must stay open until the backward pass has ended. Without gradients the blocks run as they are.

    Args:
        blocks: those that recompute everything.
        slim: those that recompute element-wise work alone.
    """
    chosen = [*((block, False) for block in blocks), *((block, True) for block in slim)]
    before = [block.__dict__.get("forward") for block, _ in chosen]
    try:
        for block, keeps in chosen:
            # An instance attribute hides the class's method; deleting it brings the method back.
            block.forward = functools.partial(_recomputing, block.forward, block, keeps)
        yield
    finally:
        for (block, _), former in zip(chosen, before, strict=True):
            block.__dict__.pop("forward", None)
            if former is not None:
                block.forward = former


def _recomputing(forward: Any, block: nn.Module, keeps: bool, x: Tensor, *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(x, *args)
    return checkpoint(forward, x, *args, use_reentrant=False, context_fn=Tape(keeps, _unneeded(block, args)).contexts)


def _unneeded(block: nn.Module, args: tuple[Any, ...]) -> nn.Module | None:
    """The block's last Linear, where the block only scales its output and adds it: no gradient depends on it then, but
    for that of the scale."""
    name = getattr(block, "ends_with", None)
    trains_scale = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
    return None if name is None or trains_scale else block.get_submodule(name)
