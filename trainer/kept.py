"""What a block keeps of its forward pass, for its recomputation to take instead of making it again.

Between forward and backward a recomputing block keeps its input, and of what it makes on the way what this file is told
to: the outputs of matrix products and of attention, which cost much, and nothing of the element-wise work around them,
which costs little. The recomputation then runs through the same operations, so that loss and gradients are the same to
the bit, but takes from here what is here.

The recomputation may run in a thread of autograd's own: what is known here is so in the thread that it is set in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


class Tape:
    """Tensors of one pass through one block, in the order in which they were made.

    The first recomputation takes them away; where a graph is gone through twice, the second makes them again.

    Attributes:
        keeps: True for everything, False for nothing, or the one module whose output alone is kept; what is not kept
            is made again.
        unneeded: a module whose output no gradient depends on: it is neither kept nor made again.
    """

    def __init__(self, keeps: bool | nn.Module, unneeded: nn.Module | None = None) -> None:
        self.keeps, self.unneeded = keeps, unneeded
        self.replaying = False
        self._tensors: list[Tensors | None] = []
        self._next = 0

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass and for its recomputations, as `torch.utils.checkpoint` wants them."""
        return _Pass(self, replaying=False), _Pass(self, replaying=True)

    def rewind(self, replaying: bool) -> None:
        """To the beginning, for another pass."""
        self.replaying, self._next = replaying, 0

    def take(self, make: Callable[[], Tensors], owner: nn.Module | None = None) -> Tensors:
        """The tensors that come next: made and kept, or in a recomputation those that were kept.

        Args:
            make: forms them.
            owner: the module whose output they are, if they are one's.
        """
        if self.keeps is not True and (owner is None or owner is not self.keeps):
            return make()
        if not self.replaying:
            made = make()
            self._tensors.append(made)
            return made
        # From here on the graph keeps what it needs, and lets it go as the backward pass moves on.
        found, self._tensors[self._next] = self._tensors[self._next], None
        self._next += 1
        return make() if found is None else found


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)


class _Pass(AbstractContextManager[None]):
    """While it is open, a tape is the one that is recorded on or replayed; it opens for every recomputation."""

    def __init__(self, tape: Tape, replaying: bool) -> None:
        self._tape, self._replaying = tape, replaying

    def __enter__(self) -> None:
        self._tape.rewind(self._replaying)
        self._token = _TAPE.set(self._tape)

    def __exit__(self, *_: object) -> None:
        _TAPE.reset(self._token)


def once(make: Callable[[], Tensors], owner: nn.Module | None = None) -> Tensors:
    """What `make` gives, which is the output of `owner` if that is said, taken from the forward pass where it was kept.

    For use inside of an autograd Function's forward, where tensors carry no graph.
    """
    tape = _TAPE.get()
    return make() if tape is None else tape.take(make, owner)


def output(owner: nn.Module, x: Tensor, features: int, make: Callable[[], Tensor]) -> Tensor:
    """A module's output (…, features) for an input (…, in): as `once`, or zeros where nothing depends on it."""
    tape = _TAPE.get()
    if tape is not None and tape.unneeded is owner:
        # It fills no memory: one zero in the shape of the output.
        return x.new_zeros(()).expand(*x.shape[:-1], features) if tape.replaying else make()
    return once(lambda: (make(),), owner)[0]
