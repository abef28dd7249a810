"""Held-out loss: the training objective on samples that were not trained on, with noise that is always the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import attention
from .batches import Visit, collate
from .families import Family, Transformer
from .objective import add_noise, draw_noise, sigma_quantiles, velocity_loss
from .samples import Sample


@torch.no_grad()
def held_out_loss(
    model: Transformer,
    family: Family,
    samples: Sequence[Sample],
    draws: int = 4,
    seed: int = 0,
    distribution: str = "family",
) -> float:
    """Mean velocity loss over the samples, each at `draws` noise levels that cover the distribution evenly.

    The levels are the middles of equal shares of probability, turned by a random offset per sample; with the same
    seed two calls see the same noise, so their difference is the model's.
    """
    generator = torch.Generator().manual_seed(seed)
    losses = []
    with attention.training_backends():
        for sample in samples:
            batch = collate([sample], [Visit(0, flipped=False, captioned=True)], None)
            offset = torch.rand((), dtype=torch.float64, generator=generator)
            u = (torch.arange(draws, dtype=torch.float64) + offset) / draws
            sigma_B = sigma_quantiles(family, distribution, u.clamp(1e-9, 1 - 1e-9), batch.latents.shape).float()
            noise = draw_noise((draws, *batch.latents.shape[1:]), generator)
            # One at a time: a measurement takes no more memory than a step.
            for level, one in zip(sigma_B.split(1), noise.split(1), strict=True):
                noisy = add_noise(batch.latents, one, level)
                predicted = batch.velocity(model, noisy.to(model.device), level.to(model.device))
                losses.append(velocity_loss(predicted.cpu(), batch.latents, one, batch.weights).mean())
    return torch.stack(losses).mean().item()
