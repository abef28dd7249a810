"""Which samples make up which batch, in an order that can be saved and continued; and batches as tensors.

Shape suffixes: B batch, C latent channels, T tokens, W conditioning width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .families import Transformer
from .samples import Sample


class Visit(NamedTuple):
    """One sample's turn in an epoch: which one, mirrored or not, with its caption or with the empty prompt."""

    sample: int
    flipped: bool
    captioned: bool


@dataclass(frozen=True)
class Batch:
    """Samples of one latent shape, each with its own caption.

    Attributes:
        latents: (B, C, h, w).
        conditioning: (B, T, W), padded with zeros at the end.
        mask: (B, T) bool, False at padding; None where all are of one length.
        weights: (B, 1, h, w) of the loss; None where all of every picture counts.
        names: of the samples.
        after_trunk: the conditioning has been through the transformer's text trunk.
    """

    latents: Tensor
    conditioning: Tensor
    mask: Tensor | None
    weights: Tensor | None
    names: tuple[str, ...]
    after_trunk: bool = False

    def pinned(self) -> Batch:
        """The batch in memory from which a GPU copies while the CPU goes on."""
        moved = {
            name: value.pin_memory()
            for name in ("latents", "conditioning", "mask", "weights")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def velocity(self, model: Transformer, noisy: Tensor, sigma_B: Tensor) -> Tensor:
        """The model's prediction for noisy latents of this batch, which are on the model's device."""
        text = self.conditioning.to(noisy.device, non_blocking=True)
        mask = None if self.mask is None else self.mask.to(noisy.device, non_blocking=True)
        if self.after_trunk:
            return model(noisy, sigma_B, mask_BT=mask, text=text)
        return model(noisy, sigma_B, text, mask)


class BatchStream:
    """Endless batches. Each epoch visits every sample as often as its repeats say, in a new order.

    No batch mixes two latent shapes; one at the end of a shape may be smaller than `batch_size`, and none is dropped.
    Every draw comes from the generator, which the caller saves along with `state_dict`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        generator: torch.Generator,
        caption_dropout: float = 0.0,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.generator = generator
        self.caption_dropout = caption_dropout
        self.epoch = 0
        self._left: list[list[int]] = []

    def __next__(self) -> list[Visit]:
        if not self._left:
            self._left = self._plan()
            self.epoch += 1
        return [self._visit(index) for index in self._left.pop(0)]

    def _plan(self) -> list[list[int]]:
        """The batches of one epoch, as indices of samples."""
        turns = [index for index, sample in enumerate(self.samples) for _ in range(sample.repeats)]
        shapes: dict[tuple[int, ...], list[int]] = {}
        for turn in torch.randperm(len(turns), generator=self.generator).tolist():
            shapes.setdefault(tuple(self.samples[turns[turn]].latents.shape), []).append(turns[turn])
        size = self.batch_size
        batches = [group[start : start + size] for group in shapes.values() for start in range(0, len(group), size)]
        return [batches[index] for index in torch.randperm(len(batches), generator=self.generator).tolist()]

    def _visit(self, index: int) -> Visit:
        flipped = self.samples[index].flipped is not None and self._chance(0.5)
        captioned = not (self.caption_dropout and self._chance(self.caption_dropout))
        return Visit(index, flipped, captioned)

    def _chance(self, share: float) -> bool:
        return torch.rand((), generator=self.generator).item() < share

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, less the generator."""
        return {"epoch": self.epoch, "left": [list(batch) for batch in self._left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self._left = [list(batch) for batch in state["left"]]


def collate(samples: Sequence[Sample], visits: Sequence[Visit], empty: Tensor | None) -> Batch:
    """Visits of samples of one latent shape → a batch.

    Args:
        samples: all of the run's.
        visits: of one batch.
        empty: (T, W) conditioning of the empty prompt, which stands in for a dropped caption, through the trunk where
            the samples' is; None for a family that runs without text, whose text is then masked away.
    """
    latents, rows, lengths, names = [], [], [], []
    for visit in visits:
        sample = samples[visit.sample]
        latents.append(sample.flipped if visit.flipped and sample.flipped is not None else sample.latents)
        dropped = sample.conditioning[:0] if empty is None else empty
        rows.append(sample.conditioning if visit.captioned else dropped)
        lengths.append(len(rows[-1]))
        names.append(sample.name)
    longest = max(max(lengths), 1)
    conditioning = torch.stack([F.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    mask = None
    if min(lengths) < longest:
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    after_trunk = samples[visits[0].sample].after_trunk
    return Batch(torch.stack(latents), conditioning, mask, _weights(samples, visits), tuple(names), after_trunk)


def _weights(samples: Sequence[Sample], visits: Sequence[Visit]) -> Tensor | None:
    if all(samples[visit.sample].weights is None for visit in visits):
        return None
    rows = []
    for visit in visits:
        sample = samples[visit.sample]
        weights = torch.ones(sample.latents.shape[1:]) if sample.weights is None else sample.weights
        rows.append(weights.flip(-1) if visit.flipped else weights)
    return torch.stack(rows)[:, None]
