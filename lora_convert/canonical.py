"""The one form that every layout is read into and written from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoraModule:
    """A low-rank change of one official module: dW = (alpha / rank) · up @ down.

    Attributes:
        down: (rank, in), also called A.
        up: (out, rank), also called B.
        alpha: the strength; equal to the rank it leaves up @ down as it is.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> Tensor:
        """dW, (out, in) in fp32."""
        return self.scale * self.up.float() @ self.down.float()


Canonical = dict[str, LoraModule]
"""Official module name → its change."""
