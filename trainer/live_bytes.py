"""Counting the bytes of live tensors: every storage from the operation that makes it until the last reference is gone.

It counts what an allocator is asked for, on any device and also under `FakeTensorMode`, where tensors have no data: so
the memory of a training step is known without the card that it would need. Workspaces inside a kernel and an
allocator's rounding are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is open, counts the storages that operations make.

    Attributes:
        now: bytes alive.
        peak: the most there were since it was made or `reset`.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), elsewhere: Iterable[Tensor] = ()) -> None:
        """
        Args:
            tensors: those that are alive already and shall count.
            elsewhere: those that shall not, such as what lies in main memory while a device is counted.
        """
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._elsewhere = {tensor.untyped_storage()._cdata for tensor in elsewhere}
        for tensor in tensors:
            self._add(tensor)

    def reset(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._elsewhere:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Every parameter and buffer."""
    return [*module.parameters(), *module.buffers()]
