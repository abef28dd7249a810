"""Sampling previews: Euler steps along the family's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .families import Family, Transformer


@torch.no_grad()
def sample(
    model: Transformer,
    family: Family,
    text: Tensor,
    unconditional: Tensor | None,
    latent_shape: Sequence[int],
    generator: torch.Generator,
    steps: int | None = None,
    guidance: float | None = None,
    unconditional_model: Callable[..., Tensor] | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Draws one picture's latents.

    Args:
        model: the transformer, with or without an active adapter.
        family: its family.
        text: (1, T, D) of the prompt, from the model's `encode_text`.
        unconditional: (1, T', D) of the empty prompt; None for the pass without text, where the family has one.
        latent_shape: (C, h, w).
        generator: CPU generator of the initial noise.
        steps: number of Euler steps; the family's by default.
        guidance: the usual CFG scale, `uncond + guidance·(cond - uncond)`; 1 leaves the unconditional pass out.
        unconditional_model: the transformer, or what is called like one, for the unconditional pass; the same model by
            default.
        before_step: called before each step; what it raises ends the sampling.

    Returns:
        (1, C, h, w) fp32 latents on the text's device.
    """
    steps = steps or family.preview.steps
    guidance = family.preview.guidance if guidance is None else guidance
    device = text.device
    sigmas = family.schedule(steps, latent_shape)
    x = (sigmas[0] * torch.randn((1, *latent_shape), generator=generator)).to(device, torch.float32)
    for step in range(steps):
        before_step()
        sigma_B = sigmas[step].float().expand(1).to(device)
        velocity = model(x, sigma_B, text=text).float()
        if guidance != 1:
            without = (unconditional_model or model)(x, sigma_B, text=unconditional).float()
            velocity = without + guidance * (velocity - without)
        x = x + (sigmas[step + 1] - sigmas[step]).item() * velocity
    return x
