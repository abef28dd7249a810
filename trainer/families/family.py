"""What a family file must tell the engine; the engine knows the two models through this alone."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...lora_convert.tables import Table

ROPE_SHAPES = 16  # a few MB each: more than the buckets of most datasets


class Transformer(nn.Module, ABC):
    """A velocity model. `compute_dtype` is the dtype of activations; weights may be stored in any other.

    Attributes:
        compute_dtype: every activation that is not said to be fp32 has this dtype. No autocast is used: where it is
            on outside, the forward switches it off for itself.
    """

    compute_dtype: torch.dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self._rope: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where it computes: that of its last norm, since a text trunk, which comes first, and adapters may wait on the
        CPU."""
        *_, (_, last) = (entry for entry in self.named_parameters() if re.search(r"\.(lora_|lokr\.)", entry[0]) is None)
        return last.device

    @abstractmethod
    def text_tokens(self, conditioning: Tensor, mask_BT: Tensor | None) -> Tensor:
        """The text trunk: (B, T, W) → (B, T, D). It depends on neither time nor latents."""

    @abstractmethod
    def rope_tables(self, texts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (L, K/2) of the rotary embedding, fp32 on the CPU, for texts + rows·columns tokens."""

    def rope(self, texts: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rope_tables` on the device, kept for the next pass of the same shape."""
        key = (texts, rows, columns, device)
        if key not in self._rope:
            if len(self._rope) == ROPE_SHAPES:
                del self._rope[next(iter(self._rope))]
            # Made outside inference mode, under which a sampler may run, since training uses them too.
            with torch.inference_mode(False):
                cos, sin = self.rope_tables(texts, rows, columns)
                self._rope[key] = cos.to(device), sin.to(device)
        return self._rope[key]

    @abstractmethod
    def velocity(self, latents: Tensor, sigma_B: Tensor, text_BTD: Tensor | None, mask_BT: Tensor | None) -> Tensor:
        """The forward pass after the text trunk; see `forward` for the arguments."""

    @torch.no_grad()
    def encode_text(self, conditioning: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """The text trunk alone, (B, T, W) → (B, T, D) in `compute_dtype`: `forward` takes it as `text`.

        Where no adapter trains the trunk this can be done once for a whole run.
        """
        with torch.autocast(conditioning.device.type, enabled=False):
            return self.text_tokens(conditioning, mask_BT)

    def forward(
        self,
        latents: Tensor,
        sigma_B: Tensor,
        conditioning: Tensor | None = None,
        mask_BT: Tensor | None = None,
        text: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity `noise - data`.

        Args:
            latents: (B, C, h, w), the noisy latents in the family's normalised latent space, any floating dtype.
            sigma_B: (B,), the share of noise in [0, 1]: 1 is pure noise.
            conditioning: (B, T, W), the text encoder's features of the family's width.
            mask_BT: (B, T) bool, False at padding. None where there is none.
            text: (B, T, D), what `encode_text` made of the conditioning, in its place.

        Returns:
            The velocity in the shape of `latents`, in `compute_dtype`.

        Raises:
            ValueError: a shape that the family cannot take.
        """
        with torch.autocast(latents.device.type, enabled=False):
            if conditioning is not None:
                if text is not None:
                    raise ValueError("give conditioning or text, not both")
                text = self.text_tokens(conditioning, mask_BT)
            elif text is not None:
                text = text.to(self.compute_dtype)
            return self.velocity(latents, sigma_B, text, mask_BT)


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
        published: the sizes of the published model.
        marker: an official parameter that exists in this family alone.
        latent_channels: C of the latents that the transformer takes.
        latent_downscale: picture pixels per latent cell, per side.
        latent_multiple: latents' sides must be multiples of this.
        presets: target preset → regular expression over official module names, matched whole.
        never_quantised: regular expression over official module names that stay in the dense dtype.
        text_trunk: the transformer's children that `text_tokens` runs, and nothing else.
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
    published: ClassVar[Any]
    marker: ClassVar[str]
    latent_channels: ClassVar[int]
    latent_downscale: ClassVar[int]
    latent_multiple: ClassVar[int]
    presets: ClassVar[Mapping[str, str]]
    never_quantised: ClassVar[str]
    text_trunk: ClassVar[tuple[str, ...]]
    forbidden_modes: ClassVar[Mapping[str, str]] = {}
    preview: ClassVar[Preview]
    distilled: ClassVar[str]
    json_captions: ClassVar[bool]
    image_only_pass: ClassVar[bool]

    @abstractmethod
    def config(self, shapes: Mapping[str, Sequence[int]]) -> Any:
        """The transformer's sizes, read from the shapes of its official parameters."""

    @abstractmethod
    def block_count(self, config: Any) -> int:
        """How many transformer blocks a model of these sizes has, without those of a text trunk."""

    @abstractmethod
    def with_blocks(self, config: Any, blocks: int) -> Any:
        """The same sizes with another number of transformer blocks."""

    @abstractmethod
    def build(self, config: Any) -> Transformer:
        """The transformer with uninitialised or freshly drawn weights, on the current default device."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks worth recomputing, those of a text trunk too, by official name; `by_place` knows their order."""

    def block_of(self, module: str) -> int | None:
        """Number of the transformer block that a module, by official name, is or stands in; None outside of them."""
        found = re.fullmatch(self.table.main_blocks, module)
        return int(found[1]) if found else None

    def main_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer's blocks in the order in which they run, without those of a text trunk."""
        return self.by_place(model)[0]

    def by_place(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The blocks worth recomputing: `main_blocks`, and those of a text trunk."""
        main: list[nn.Module] = []
        trunk: list[nn.Module] = []
        for name, block in self.blocks(model).items():
            (trunk if self.block_of(name) is None else main).append(block)
        return main, trunk

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
