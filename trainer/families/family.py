"""What a family file must tell the engine; the engine knows the two models through this alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...lora_convert.tables import Table


class Transformer(nn.Module, ABC):
    """A velocity model. `compute_dtype` is the dtype of activations; weights may be stored in any other.

    Attributes:
        compute_dtype: every activation that is not said to be fp32 has this dtype. No autocast is used: where it is
            on outside, the forward switches it off for itself.
    """

    compute_dtype: torch.dtype = torch.float32

    @abstractmethod
    def velocity(self, latents: Tensor, sigma_B: Tensor, conditioning: Tensor | None, mask_BT: Tensor | None) -> Tensor:
        """The forward pass proper; see `forward` for the arguments."""

    def forward(
        self,
        latents: Tensor,
        sigma_B: Tensor,
        conditioning: Tensor | None = None,
        mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity `noise - data`.

        Args:
            latents: (B, C, h, w), the noisy latents in the family's normalised latent space, any floating dtype.
            sigma_B: (B,), the share of noise in [0, 1]: 1 is pure noise.
            conditioning: (B, T, W), the text encoder's features of the family's width.
            mask_BT: (B, T) bool, False at padding. None where there is none.

        Returns:
            The velocity in the shape of `latents`, in `compute_dtype`.

        Raises:
            ValueError: a shape that the family cannot take.
        """
        with torch.autocast(latents.device.type, enabled=False):
            return self.velocity(latents, sigma_B, conditioning, mask_BT)


@dataclass(frozen=True)
class Preview:
    """How a family is sampled when the user says nothing else: steps, and guidance as the usual CFG scale."""

    steps: int
    guidance: float


class Family(ABC):
    """The facts of one model family. A subclass is a namespace of facts and small pure functions, without state.

    Attributes:
        name: the name in settings and file metadata.
        title: the name that people use.
        table: its module names.
        marker: an official parameter that exists in this family alone.
        latent_channels: C of the latents that the transformer takes.
        latent_downscale: picture pixels per latent cell, per side.
        latent_multiple: latents' sides must be multiples of this.
        presets: target preset → regular expression over official module names, matched whole.
        never_quantised: regular expression over official module names that stay in the dense dtype.
        forbidden_modes: precision → why this family must not be trained in it; such a one is refused with the reason.
        preview: how it is sampled by default.
        distilled: pattern of file names of distilled variants, which have the same keys and are no base to train on.
        json_captions: whether it was trained on structured captions, which a `.json` file may then hold.
        image_only_pass: whether the transformer also runs without any text, which then is its unconditional pass;
            else the empty prompt's conditioning is.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    table: ClassVar[Table]
    marker: ClassVar[str]
    latent_channels: ClassVar[int]
    latent_downscale: ClassVar[int]
    latent_multiple: ClassVar[int]
    presets: ClassVar[Mapping[str, str]]
    never_quantised: ClassVar[str]
    forbidden_modes: ClassVar[Mapping[str, str]] = {}
    preview: ClassVar[Preview]
    distilled: ClassVar[str]
    json_captions: ClassVar[bool]
    image_only_pass: ClassVar[bool]

    @abstractmethod
    def config(self, shapes: Mapping[str, Sequence[int]]) -> Any:
        """The transformer's sizes, read from the shapes of its official parameters."""

    @abstractmethod
    def build(self, config: Any) -> Transformer:
        """The transformer with uninitialised or freshly drawn weights, on the current default device."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks worth recomputing, by official name, in the order in which they run."""

    def official_name(self, name: str) -> tuple[str, int | None]:
        """Official name of a parameter that may bear diffusers' name, and which member of a fused one it is, if any.

        A name that diffusers does not use comes back as it is.
        """
        return self.table.from_diffusers(name) or (name, None)

    def image_tokens(self, latent_shape: Sequence[int]) -> int:
        """Tokens of a picture whose latents are (…, h, w)."""
        return (latent_shape[-2] // self.latent_multiple) * (latent_shape[-1] // self.latent_multiple)

    @abstractmethod
    def sigma_quantile(self, u: Tensor, latent_shape: Sequence[int]) -> Tensor:
        """The family's own training distribution as its quantile function: uniform `u` in (0, 1), fp64 → sigma."""

    @abstractmethod
    def schedule(self, steps: int, latent_shape: Sequence[int]) -> Tensor:
        """The sampler's sigmas, (steps + 1,) fp64, falling from about 1 to exactly 0."""

    @abstractmethod
    def conditioning_width(self, config: Any) -> int:
        """W: features of one text token, all tapped layers together."""


def sinusoid(angles: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Tensor:
    """Two halves of a sinusoidal embedding side by side: (B, n) angles → (B, 2n)."""
    return torch.cat([first(angles), second(angles)], dim=-1)


def expit_of_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """Quantile function of the logit-normal distribution: sigmoid(mean + std · Φ⁻¹(u)), in fp64."""
    return torch.special.expit(mean + std * torch.special.ndtri(u.double()))


# mu of the resolution shift is linear in image tokens through these two points (tokens, mu).
SHIFT_LOW = (256, 0.5)
SHIFT_HIGH = (6400, 1.15)


def resolution_mu(tokens: int) -> float:
    """The resolution shift of Krea 2 and of Flux before it: 4096 tokens (1024²) → 0.906."""
    slope = (SHIFT_HIGH[1] - SHIFT_LOW[1]) / (SHIFT_HIGH[0] - SHIFT_LOW[0])
    return SHIFT_LOW[1] + slope * (tokens - SHIFT_LOW[0])


def shift(sigma: Tensor, mu: float) -> Tensor:
    """Exponential time shift: e^mu·sigma / (1 + (e^mu - 1)·sigma), the one of SD3 and its descendants."""
    factor = math.exp(mu)
    return factor * sigma / (1 + (factor - 1) * sigma)
