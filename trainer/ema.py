"""Exponential moving average of an adapter's weights, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """`average ← decay · average + (1 - decay) · weight` after each step.

    The decay grows as (1 + n) / (10 + n) up to its value, so that a short run is not an average of its start
    (TensorFlow's `ExponentialMovingAverage`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        self.values = [p.detach().float().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, [p.detach().float() for p in self.parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts the parameters hold the average; afterwards their own values again, also after an error."""
        own = [p.detach().clone() for p in self.parameters]
        try:
            self._copy(self.values)
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.updates, "values": self.values}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        self.updates = int(state["updates"])  # type: ignore[call-overload]
        for value, kept in zip(self.values, state["values"], strict=True):  # type: ignore[call-overload]
            value.copy_(kept)
