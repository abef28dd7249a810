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


def _shape(factor: Factor) -> tuple[int, int]:
    return (factor[0].shape[0], factor[1].shape[1]) if isinstance(factor, tuple) else (factor.shape[0], factor.shape[1])


@dataclass(frozen=True)
class Change(ABC):
    """A change dW of one official module, and where it is a DoRA (arXiv 2402.09353) the lengths that go with it.

    With a magnitude the weight becomes one of

        magnitude · (W + dW) / ‖W + dW‖         by output row, the paper's, also PEFT's, LyCORIS' and OneTrainer's
        magnitude_over_base · (W + dW) / ‖W‖    by output row, what ComfyUI computes (0.33)
        column_magnitude · (W + dW) / ‖W + dW‖  by input column, OneTrainer's default, ComfyUI's too

    The first two follow from one another where the base weight is at hand. A file holds one of them; the trainer, which
    has the base, gives both.

    Attributes:
        magnitude: (out,), or None where the change has none or it is not known.
        magnitude_over_base: (out,), the same divided by ‖W + dW‖ / ‖W‖, or None.
        column_magnitude: (in,), or None.
    """

    magnitude: Tensor | None = field(default=None, kw_only=True)
    magnitude_over_base: Tensor | None = field(default=None, kw_only=True)
    column_magnitude: Tensor | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of dW: (out, in), or that of a vector."""

    @abstractmethod
    def delta(self, rows: slice = slice(None)) -> Tensor:
        """These rows of dW, (rows, in) in fp32."""

    @abstractmethod
    def factors(self) -> dict[str, Tensor]:
        """The tensors of dW by the names that layouts give them: `lora_down`, `lokr_w1`, …"""

    @property
    def has_magnitude(self) -> bool:
        return any(m is not None for m in (self.magnitude, self.magnitude_over_base, self.column_magnitude))

    def merged(self, weight: Tensor) -> Tensor:
        """The changed weight (out, in) in fp32, of the base weight (out, in)."""
        weight = weight.float()
        changed = weight + self.delta()
        tiny = torch.finfo(torch.float32).tiny
        if self.magnitude is not None:
            return self.magnitude.float()[:, None] * torch.nn.functional.normalize(changed, dim=1)
        if self.magnitude_over_base is not None:
            norm = weight.norm(dim=1).clamp_min(tiny)
            return (self.magnitude_over_base.float() / norm)[:, None] * changed
        if self.column_magnitude is not None:
            return self.column_magnitude.float() * changed / changed.norm(dim=0).clamp_min(tiny)
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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.up.shape[0], self.down.shape[1]

    def delta(self, rows: slice = slice(None)) -> Tensor:
        return self.scale * self.up[rows].float() @ self.down.float()

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

    @property
    def shape(self) -> tuple[int, ...]:
        (out_1, in_1), (out_2, in_2) = (_shape(factor) for factor in (self.w1, self.w2))
        return out_1 * out_2, in_1 * in_2

    def delta(self, rows: slice = slice(None)) -> Tensor:
        w1, w2 = _matrix(self.w1), _matrix(self.w2)
        chosen = torch.arange(self.shape[0])[rows]
        # Row i of a Kronecker product is that of row i // out₂ of w1 and row i % out₂ of w2.
        first, second = w1[chosen // len(w2)], w2[chosen % len(w2)]
        return self.scale * (first[:, :, None] * second[:, None, :]).flatten(1)

    def factors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, factor in (("lokr_w1", self.w1), ("lokr_w2", self.w2)):
            if isinstance(factor, tuple):
                found[f"{name}_a"], found[f"{name}_b"] = factor
            else:
                found[name] = factor
        return found


@dataclass(frozen=True)
class LohaModule(Change):
    """A Hadamard product of two low-rank matrices (FedPara, arXiv 2108.06098): dW = (alpha / rank) · (w1_a @ w1_b) ∘
    (w2_a @ w2_b).

    Attributes:
        w1_a: (out, rank), and w2_a likewise.
        w1_b: (rank, in), and w2_b likewise.
        alpha: the strength.
    """

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.w1_b.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w1_a.shape[0], self.w1_b.shape[1]

    def delta(self, rows: slice = slice(None)) -> Tensor:
        first = self.w1_a[rows].float() @ self.w1_b.float()
        return self.scale * first * (self.w2_a[rows].float() @ self.w2_b.float())

    def factors(self) -> dict[str, Tensor]:
        return {"hada_w1_a": self.w1_a, "hada_w1_b": self.w1_b, "hada_w2_a": self.w2_a, "hada_w2_b": self.w2_b}


@dataclass(frozen=True)
class DiffModule(Change):
    """dW itself, (out, in), or the change of a vector such as a norm's weight."""

    diff: Tensor

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.diff.shape)

    def delta(self, rows: slice = slice(None)) -> Tensor:
        return self.diff[rows].float()

    def factors(self) -> dict[str, Tensor]:
        return {"diff": self.diff}


@dataclass(frozen=True)
class Split:
    """q, k and v of one attention, each a change of its own or none; what the others call a fused one is one `Change`.

    Attributes:
        members: of q, k and v in this order; None for a member that the file does not change.
        rows: output rows of q, k and v.
    """

    members: tuple[Change | None, Change | None, Change | None]
    rows: tuple[int, int, int]


def members_of(change: Change | Split) -> list[Change]:
    """The changes that there are: of q, k and v apart those that are changed, else the one."""
    return [member for member in change.members if member is not None] if isinstance(change, Split) else [change]


Canonical = dict[str, Change]
"""Official module name → its change."""

Trained = dict[str, LoraModule | LokrModule]
"""The same of the kinds that Graft trains."""
