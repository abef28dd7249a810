"""The one form that every layout is read into and written from: official module name → what is done to its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

Factor = Tensor | tuple[Tensor, Tensor]
"""A matrix (rows, columns): whole, or as (rows, rank) and (rank, columns), whose product it is."""


def _matrix(factor: Factor) -> Tensor:
    """The matrix in fp32."""
    return factor[0].float() @ factor[1].float() if isinstance(factor, tuple) else factor.float()


@dataclass(frozen=True)
class Change(ABC):
    """A change dW of one official module, and where it is a DoRA (arXiv 2402.09353) the length of every output row.

    With a magnitude the weight becomes, row by row, one of

        magnitude · (W + dW) / ‖W + dW‖         the paper's, also PEFT's, LyCORIS' and OneTrainer's
        magnitude_over_base · (W + dW) / ‖W‖    what ComfyUI computes (0.33)

    One follows from the other where the base weight is at hand. A file holds one of them; the trainer, which has the
    base, gives both.

    Attributes:
        magnitude: (out,), or None where the change has none or it is not known.
        magnitude_over_base: (out,), the same divided by ‖W + dW‖ / ‖W‖, or None.
    """

    magnitude: Tensor | None = field(default=None, kw_only=True)
    magnitude_over_base: Tensor | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""

    @abstractmethod
    def delta(self) -> Tensor:
        """dW, (out, in) in fp32."""

    @abstractmethod
    def factors(self) -> dict[str, Tensor]:
        """The tensors of dW by the names that layouts give them: `lora_down`, `lokr_w1`, …"""

    @property
    def has_magnitude(self) -> bool:
        return self.magnitude is not None or self.magnitude_over_base is not None

    def merged(self, weight: Tensor) -> Tensor:
        """The changed weight (out, in) in fp32, of the base weight (out, in)."""
        weight = weight.float()
        changed = weight + self.delta()
        if self.magnitude is not None:
            return self.magnitude.float()[:, None] * torch.nn.functional.normalize(changed, dim=1)
        if self.magnitude_over_base is not None:
            norm = weight.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            return (self.magnitude_over_base.float() / norm)[:, None] * changed
        return changed


@dataclass(frozen=True)
class LoraModule(Change):
    """A low-rank change: dW = (alpha / rank) · up @ down.

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
        return self.scale * self.up.float() @ self.down.float()

    def factors(self) -> dict[str, Tensor]:
        return {"lora_down": self.down, "lora_up": self.up}


@dataclass(frozen=True)
class LokrModule(Change):
    """A Kronecker product (LyCORIS, arXiv 2309.14859): dW = scale · w1 ⊗ w2.

    The scale is alpha / rank where a factor is decomposed, and 1 where both are whole, whatever alpha is: so all
    readers have it.

    Attributes:
        w1: (out₁, in₁), where out = out₁ · out₂ and in = in₁ · in₂.
        w2: (out₂, in₂).
        alpha: the strength.
    """

    w1: Factor
    w2: Factor
    alpha: float

    @property
    def rank(self) -> int | None:
        """That of the decomposed factor, of w2 where both are; None where both are whole."""
        for factor in (self.w2, self.w1):
            if isinstance(factor, tuple):
                return factor[1].shape[0]
        return None

    @property
    def scale(self) -> float:
        return 1.0 if self.rank is None else self.alpha / self.rank

    def delta(self) -> Tensor:
        return self.scale * torch.kron(_matrix(self.w1), _matrix(self.w2))

    def factors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, factor in (("lokr_w1", self.w1), ("lokr_w2", self.w2)):
            if isinstance(factor, tuple):
                found[f"{name}_a"], found[f"{name}_b"] = factor
            else:
                found[name] = factor
        return found


Canonical = dict[str, LoraModule | LokrModule]
"""Official module name → its change."""
