"""Recomputation of a model's blocks in the backward pass, applied from outside.

A block that recomputes everything keeps its input alone between forward and backward. A slim one also keeps what its
matrix products and its attention gave (`kept.py`), and recomputes the element-wise work between them alone: that is the
least memory without a matrix product being computed twice. Between the two, a block whose last Linear is followed by a
norm can recompute everything but that Linear's output: for one hidden-width tensor the largest product is spared, which
is more work per byte than a slim block spares.

Loss and gradients are bit-identical either way, and to those without (a test shows it): no autocast, one attention
dtype, pinned SDPA kernels and a restored random state make the second run the first one.

Two facts of a block can be told by class attributes, each the name of its last Linear:
    ends_with: the block only scales that Linear's output and adds it: a recomputation does without it.
    worth_keeping: a norm follows it: a recomputation needs its output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kept import Tape

# Elements of a block's input below which a slim block keeps everything: it saves next to nothing there, and making the
# element-wise work again takes a quarter more time in the demonstration. A picture of 1024² has 28 million.
SMALL = 2**19


def recomputing(
    blocks: Sequence[nn.Module], others: Sequence[nn.Module], how_many: bool | int
) -> AbstractContextManager[None]:
    """`checkpointed` as the setting of that name says.

    It is the first blocks that recompute. The memory of a step is largest where the backward pass begins, and there the
    last block has everything alive in any case: kept, or recomputed a moment ago. So the last one costs nothing as a
    slim block, not even where the least memory is wanted, and each block before it costs what it keeps, wherever it
    stands.

    Args:
        blocks: in the order in which they run; those before the first one that is trained come last, since without
            gradients they keep nothing.
        others: blocks outside of that order, which are recomputed with the first of them.
        how_many: True lets each block but the last recompute everything, which is the least memory; False none; or so
            many blocks, each of which keeps the output of its last Linear where a norm follows.
    """
    if how_many is True:
        return checkpointed([*blocks[:-1], *others], slim=blocks[-1:], slim_from=0)
    trained = (index for index, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters()))
    first = next(trained, 0)
    order = [*blocks[first:], *blocks[:first]]
    rest = [*order[how_many:], *(() if how_many else others)]
    return checkpointed((), rest, [*order[:how_many], *(others if how_many else ())])


@contextmanager
def checkpointed(
    blocks: Iterable[nn.Module],
    slim: Iterable[nn.Module] = (),
    but_last: Iterable[nn.Module] = (),
    slim_from: int | None = None,
) -> Iterator[None]:
    """While it lasts, each block recomputes its activations in the backward pass.

    Must stay open until the backward pass has ended. Without gradients the blocks run as they are.

    Args:
        blocks: those that recompute everything.
        slim: those that recompute element-wise work alone.
        but_last: those that recompute everything but the Linear that is their `worth_keeping`, if they have one.
        slim_from: elements of its input from which on a slim block is one; `SMALL` by default.
    """
    chosen: list[tuple[nn.Module, bool | nn.Module]] = [(block, False) for block in blocks]
    chosen += [(block, True) for block in slim]
    chosen += [(block, _named(block, "worth_keeping") or False) for block in but_last]
    before = [block.__dict__.get("forward") for block, _ in chosen]
    try:
        for block, keeps in chosen:
            # An instance attribute hides the class's method; deleting it brings the method back.
            block.forward = functools.partial(
                _recomputing, block.forward, block, keeps, SMALL if slim_from is None else slim_from
            )
        yield
    finally:
        for (block, _), former in zip(chosen, before, strict=True):
            block.__dict__.pop("forward", None)
            if former is not None:
                block.forward = former


def _recomputing(forward: Any, block: nn.Module, keeps: bool | nn.Module, slim_from: int, x: Tensor, *args: Any) -> Any:
    if not torch.is_grad_enabled() or (keeps is True and x.numel() < slim_from):
        return forward(x, *args)
    tape = Tape(keeps, _unneeded(block, args))
    return checkpoint(forward, x, *args, use_reentrant=False, context_fn=tape.contexts)


def _unneeded(block: nn.Module, args: tuple[Any, ...]) -> nn.Module | None:
    """The block's last Linear, where the block only scales its output and adds it: no gradient depends on it then, but
    for that of the scale."""
    trains_scale = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
    return None if trains_scale else _named(block, "ends_with")


def _named(block: nn.Module, attribute: str) -> nn.Module | None:
    name = getattr(block, attribute, None)
    return None if name is None else block.get_submodule(name)
