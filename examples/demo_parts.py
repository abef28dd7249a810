"""Demonstration codec and text encoder: small stand-ins for a family's VAE and text encoder.

They keep the shapes, the scales and the calling convention of the real ones (`Codec.encode`, `Codec.decode`,
`TextEncoder.__call__`), so that the engine cannot tell the difference; of real pictures and language they know little.

Shape suffixes: B batch, C latent channels, T tokens, W conditioning width.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ..trainer.checkpoints import read_shapes
from ..trainer.families import Family
from ..trainer.samples import Encoders

HERE = Path(__file__).parent
CODEC_DOWNSCALE = 8


def base_path(family: Family) -> Path:
    """The tiny base of a family: official names, bf16."""
    return HERE / f"{family.name}-demo-base.safetensors"


def codec_path(family: Family) -> Path:
    return HERE / f"{family.name}-demo-codec.safetensors"


class Codec(nn.Module):
    """A small convolutional autoencoder, 8 pixels to a latent cell, with the family's channels, packing and
    normalisation. Pictures are (B, 3, h, w) in [-1, 1]; latents have zero mean and unit variance per channel."""

    mean_C: Tensor
    std_C: Tensor

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.packing = family.latent_downscale // CODEC_DOWNSCALE
        channels = family.latent_channels // self.packing**2
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(32, 48, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(48, 64, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(64, channels, 3, 1, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, 96, 3, 1, 1), nn.SiLU(),
            nn.Conv2d(96, 4 * 48, 3, 1, 1), nn.PixelShuffle(2), nn.SiLU(),
            nn.Conv2d(48, 4 * 32, 3, 1, 1), nn.PixelShuffle(2), nn.SiLU(),
            nn.Conv2d(32, 4 * 3, 3, 1, 1), nn.PixelShuffle(2),
        )  # fmt: skip
        self.register_buffer("mean_C", torch.zeros(channels * self.packing**2))
        self.register_buffer("std_C", torch.ones(channels * self.packing**2))

    @classmethod
    def load(cls, family: Family) -> Codec:
        codec = cls(family)
        codec.load_state_dict({name: value.float() for name, value in load_file(codec_path(family)).items()})
        return codec.requires_grad_(False).eval()

    def pack(self, cells: Tensor) -> Tensor:
        """The encoder's cells → normalised latents of the family."""
        latents = F.pixel_unshuffle(cells, self.packing)
        return (latents - self.mean_C[:, None, None]) / self.std_C[:, None, None]

    def unpack(self, latents: Tensor) -> Tensor:
        """Inverse of `pack`."""
        return F.pixel_shuffle(latents * self.std_C[:, None, None] + self.mean_C[:, None, None], self.packing)

    def encode(self, pictures: Tensor) -> Tensor:
        """(B, 3, h, w) in [-1, 1] → (B, C, h / downscale, w / downscale)."""
        return self.pack(self.encoder(pictures))

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, h / downscale, w / downscale) → (B, 3, h, w) in [-1, 1]."""
        return self.decoder(self.unpack(latents.float())).clamp(-1, 1)


class TextEncoder:
    """Every word is a fixed random vector drawn from its spelling, plus half of the vector of the word before it.

    So it knows any word, without weights, and "red circle on a blue background" differs from its colours swapped.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._words: dict[str, Tensor] = {}

    def __call__(self, caption: str) -> Tensor:
        """(T, W) fp32; T is the number of words plus one for the start, which alone stands for the empty prompt."""
        words = ["<start>", *re.findall(r"[\w'-]+", caption.lower())]
        vectors_TW = torch.stack([self._word(word) for word in words])
        return vectors_TW + 0.5 * F.pad(vectors_TW, (0, 0, 1, 0))[:-1].roll(1, dims=1)

    def _word(self, word: str) -> Tensor:
        if word not in self._words:
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little", signed=True)
            self._words[word] = torch.randn(self.width, generator=torch.Generator().manual_seed(seed))
        return self._words[word]


def encoders(family: Family) -> Encoders:
    """Codec and text encoder that fit a family's demonstration base."""
    codec = Codec.load(family)
    shapes = read_shapes(base_path(family))
    text = TextEncoder(family.conditioning_width(family.config(shapes)))
    digest = hashlib.sha256(codec_path(family).read_bytes()).hexdigest()
    return Encoders(codec.encode, text, codec.decode, f"demo-codec-{digest[:16]}", f"demo-words-{text.width}")
