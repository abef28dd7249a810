"""The training objective: how noise levels are drawn, and the loss.

`x_sigma = (1 - sigma)·data + sigma·noise`; the model predicts the velocity `noise - data`; the loss is its mean squared
error. Each distribution of sigma is given by its quantile function, so one uniform draw serves them all and a test can
compare each with its formula.

Every random number of a run comes from one generator, on the CPU, so a run is the same on every device and can be
continued where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import SettingsError
from .families import Family
from .families.family import expit_of_normal, resolution_mu, shift

Quantile = Callable[[Family, Tensor, Sequence[int]], Tensor]

DISTRIBUTIONS: dict[str, Quantile] = {
    "family": lambda family, u, shape: family.sigma_quantile(u, shape),
    "uniform": lambda family, u, shape: u,
    "logit-normal": lambda family, u, shape: expit_of_normal(u, 0.0, 1.0),
    "shifted": lambda family, u, shape: shift(u, resolution_mu(family.image_tokens(shape))),
}


def sigma_quantiles(family: Family, distribution: str, u: Tensor, latent_shape: Sequence[int]) -> Tensor:
    """Sigmas at the quantiles `u` in (0, 1): fp64 in, fp64 out, same shape.

    Args:
        family: whose own distribution `family` means.
        distribution: a key of `DISTRIBUTIONS`.
        u: fp64.
        latent_shape: (…, h, w) of the latents, for distributions that depend on resolution.

    Raises:
        SettingsError: an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise SettingsError(
            f"timestep distribution {distribution!r} is not known; choose one of {', '.join(DISTRIBUTIONS)}"
        )
    return DISTRIBUTIONS[distribution](family, u, latent_shape)


def draw_sigmas(
    family: Family, distribution: str, count: int, latent_shape: Sequence[int], generator: torch.Generator
) -> Tensor:
    """(count,) fp32 noise levels on the CPU."""
    # A uniform draw may be exactly 0, where the normal quantile is infinite: half a spacing keeps it inside.
    u = torch.rand(count, dtype=torch.float64, generator=generator) + 2**-54
    return sigma_quantiles(family, distribution, u, latent_shape).float()


def draw_noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal noise, fp32, on the CPU."""
    return torch.randn(tuple(shape), generator=generator)


def add_noise(data: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    """(1 - sigma)·data + sigma·noise in fp32; sigma (B,) broadcasts over (B, C, h, w)."""
    sigma = sigma_B.float().view(-1, *(1,) * (data.ndim - 1))
    return (1 - sigma) * data.float() + sigma * noise.float()


def velocity_loss(predicted: Tensor, data: Tensor, noise: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean squared error of the velocity per sample, (B,) fp32.

    With weights (B, 1, h, w) it is the weighted mean over the cells, so that a small mask counts as much as a large.
    """
    error = (predicted.float() - (noise.float() - data.float())).square()
    if weights is None:
        return error.flatten(1).mean(1)
    return (error.mean(1, keepdim=True) * weights).flatten(1).sum(1) / weights.flatten(1).sum(1)
