"""Ideogram 4's conditional transformer: all that is particular to it.

Facts: reference/models.md, ComfyUI 0.33 `comfy/ldm/ideogram4`, diffusers 0.42 `Ideogram4Transformer2DModel`.

Its own time runs the other way (0 is noise) and its raw output is `data - noise`; both are turned round here, so that
nothing outside this file knows of it.

Shape suffixes: B batch, T text tokens, I image tokens, L = T + I, D width, H heads, K head width, C patch features,
R width of the time vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...lora_convert.tables import IDEOGRAM4
from ..attention import attention
from ..elementwise import rms_normed, rms_normed_and_rotated, swiglu
from ..pointwise import pointwise
from .family import Family, Preview, Transformer, expit_of_normal, sinusoid

# --- facts -----------------------------------------------------------------------------------------------------------

PATCH = 2
ROPE_THETA = 5_000_000
ROPE_SECTIONS = (24, 20, 20)  # frequencies of the (frame, row, column) axes, interleaved
IMAGE_POSITION = 65536  # image positions start here, so that they never meet a text position
NORM_EPS = 1e-5
TEXT_NORM_EPS = 1e-6

REFERENCE_PIXELS = 512**2  # the noise distribution is centred at this resolution
TRAIN_STD = 1.5
# The official sampler bounds its own time t = 1 - sigma by 1 / (1 + e^9) and 1 / (1 + e^-7.5): in terms of sigma that
# is a log SNR, 2·log((1 - sigma) / sigma), between these two.
LOG_SNR = (-18.0, 15.0)


@dataclass(frozen=True)
class Ideogram4Config:
    """Sizes of the transformer. The defaults are the published 9.28e9 parameters."""

    width: int = 4608
    heads: int = 18
    mlp: int = 12288
    layers: int = 34
    patch_features: int = 128
    time_width: int = 512
    text_features: int = 53248

    @property
    def head_width(self) -> int:
        return self.width // self.heads


# --- the transformer, written for training ---------------------------------------------------------------------------


@pointwise
def normed(x: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    return rms_normed(x, weight.float() if scale is None else weight.float() * scale, None, eps)


@pointwise
def normed_and_rotated(x_BLHK: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """A norm, then the first half of each head rotated against the second by tables (1, L, 1, K/2)."""
    return rms_normed_and_rotated(x_BLHK, weight.float(), eps, cos, sin, False)


@pointwise
def added(x: Tensor, change: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """x + gate · norm(change)."""
    return x + rms_normed(change, weight.float() * gate, None, eps)


class RMSNorm(nn.Module):
    """Ordinary RMSNorm, computed in fp32, returned in the input's dtype."""

    def __init__(self, width: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`norm(x)`, or `scale · norm(x)`, rounded once at the end."""
        return normed(x, self.weight, self.eps, *(() if scale is None else (scale,)))


class Attention(nn.Module):
    """Self-attention over one fused projection, with RMSNorm on q and k."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = RMSNorm(self.head_width)
        self.norm_k = RMSNorm(self.head_width)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], key_mask_BL: Tensor | None) -> Tensor:
        q_BLHK, k_BLHK, v_BLHK = self.qkv(x_BLD).unflatten(-1, (3, -1, self.head_width)).unbind(-3)
        tables = [table[None, :, None, :] for table in rope]
        q_BLHK = normed_and_rotated(q_BLHK, self.norm_q.weight, self.norm_q.eps, *tables)
        k_BLHK = normed_and_rotated(k_BLHK, self.norm_k.weight, self.norm_k.eps, *tables)
        return self.o(attention(q_BLHK, k_BLHK, v_BLHK, key_mask_BL))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class Layer(nn.Module):
    """One single-stream block over [text, image], with a norm before and after each half and tanh gates."""

    worth_keeping = "feed_forward.w2"

    def __init__(self, config: Ideogram4Config) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads)
        self.feed_forward = FeedForward(config.width, config.mlp)
        self.attention_norm1 = RMSNorm(config.width)
        self.ffn_norm1 = RMSNorm(config.width)
        self.attention_norm2 = RMSNorm(config.width)
        self.ffn_norm2 = RMSNorm(config.width)
        self.adaln_modulation = nn.Linear(config.time_width, 4 * config.width)

    def forward(
        self, x_BLD: Tensor, time_B1R: Tensor, rope: tuple[Tensor, Tensor], key_mask_BL: Tensor | None
    ) -> Tensor:
        scale1, gate1, scale2, gate2 = self.adaln_modulation(time_B1R).float().chunk(4, dim=-1)
        attended = self.attention(self.attention_norm1(x_BLD, 1.0 + scale1), rope, key_mask_BL)
        x_BLD = self._added(x_BLD, attended, self.attention_norm2, gate1)
        fed = self.feed_forward(self.ffn_norm1(x_BLD, 1.0 + scale2))
        return self._added(x_BLD, fed, self.ffn_norm2, gate2)

    def _added(self, x_BLD: Tensor, change: Tensor, norm: RMSNorm, gate: Tensor) -> Tensor:
        return added(x_BLD, change, norm.weight, norm.eps, torch.tanh(gate))


class TimeEmbedding(nn.Module):
    """Sinusoid of the model's own time and a two-layer MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mlp_in = nn.Linear(width, width)
        self.mlp_out = nn.Linear(width, width)

    def forward(self, time_B: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.width // 2
        frequencies = torch.arange(half, dtype=torch.float32, device=time_B.device) * -(math.log(1e4) / (half - 1))
        angles = (1e4 * time_B.float())[:, None] * torch.exp(frequencies)
        return self.mlp_out(F.silu(self.mlp_in(sinusoid(angles, torch.sin, torch.cos).to(dtype))))


class FinalLayer(nn.Module):
    def __init__(self, config: Ideogram4Config) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.patch_features)
        self.adaln_modulation = nn.Linear(config.time_width, config.width)

    def forward(self, x_BID: Tensor, time_B1R: Tensor) -> Tensor:
        scale = 1.0 + self.adaln_modulation(F.silu(time_B1R)).float()
        normed = F.layer_norm(x_BID.float(), (x_BID.shape[-1],), eps=1e-6)
        return self.linear((normed * scale).to(x_BID.dtype))


class Ideogram4Transformer(Transformer):
    """Ideogram 4's transformer under its official parameter names."""

    def __init__(self, config: Ideogram4Config) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.patch_features, config.width)
        self.llm_cond_norm = RMSNorm(config.text_features, TEXT_NORM_EPS)
        self.llm_cond_proj = nn.Linear(config.text_features, config.width)
        self.t_embedding = TimeEmbedding(config.width)
        self.adaln_proj = nn.Linear(config.width, config.time_width)
        self.embed_image_indicator = nn.Embedding(2, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_layer = FinalLayer(config)

    def text_tokens(self, conditioning: Tensor, mask_BT: Tensor | None) -> Tensor:
        """(B, T, W) → (B, T, D); padding becomes zero."""
        if conditioning.shape[-1] != self.config.text_features:
            raise ValueError(
                f"Ideogram 4 takes conditioning of {self.config.text_features} features per token, got "
                f"{conditioning.shape[-1]}: was it encoded for another model?"
            )
        x_BTW = conditioning.to(self.compute_dtype)
        text_BTD = self.llm_cond_proj(self.llm_cond_norm(x_BTW))
        return text_BTD if mask_BT is None else text_BTD * mask_BT[..., None].to(text_BTD.dtype)

    def rope_tables(self, texts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return rope_tables(self.config.head_width, texts, rows, columns)

    def velocity(self, latents: Tensor, sigma_B: Tensor, text_BTD: Tensor | None, mask_BT: Tensor | None) -> Tensor:
        if latents.ndim != 4:
            raise ValueError(f"Ideogram 4 takes latents (B, C, h, w), got {tuple(latents.shape)}")
        rows, columns = latents.shape[-2:]
        dtype = self.compute_dtype
        indicator = self.embed_image_indicator.weight.to(dtype)  # 0 for text, 1 for image
        x_BLD = self.input_proj(to_tokens(latents).to(dtype)) + indicator[1]
        texts, key_mask_BL = 0, None
        if text_BTD is not None:
            texts = text_BTD.shape[1]
            x_BLD = torch.cat([text_BTD + indicator[0], x_BLD], dim=1)
            if mask_BT is not None:
                key_mask_BL = F.pad(mask_BT.bool(), (0, rows * columns), value=True)

        time_B1R = F.silu(self.adaln_proj(self.t_embedding(1.0 - sigma_B.float(), dtype))).unsqueeze(1)
        rope = self.rope(texts, rows, columns, latents.device)
        for layer in self.layers:
            x_BLD = layer(x_BLD, time_B1R, rope, key_mask_BL)
        return -from_tokens(self.final_layer(x_BLD[:, texts:], time_B1R), rows, columns)


def to_tokens(latents: Tensor) -> Tensor:
    """(B, c·4, r, w) with features (channel, row, column), as the VAE packs them → (B, r·w, 4·c) with (row, column,
    channel), as the transformer reads them."""
    cut = latents.unflatten(1, (-1, PATCH, PATCH))
    return cut.permute(0, 4, 5, 2, 3, 1).flatten(3).flatten(1, 2)


def from_tokens(tokens_BIC: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `to_tokens`."""
    cut = tokens_BIC.unflatten(1, (rows, columns)).unflatten(-1, (PATCH, PATCH, -1))
    return cut.permute(0, 5, 3, 4, 1, 2).flatten(1, 3)


def rope_tables(head_width: int, texts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (L, K/2), fp32, of interleaved 3-axis RoPE, formed in fp32 as the official model does.

    At image positions near 65536 the rounding of fp32 is part of what the model learned, and bf16, with a spacing of
    512 there, would collapse the picture to grey: the arithmetic stays fp32 whatever the compute dtype.
    """
    exponent = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width
    frequency_F = 1.0 / (ROPE_THETA**exponent)
    text = torch.arange(texts, device="cpu")[:, None].expand(texts, 3)
    row = torch.arange(rows, device="cpu").repeat_interleave(columns)
    column = torch.arange(columns, device="cpu").repeat(rows)
    image = torch.stack([torch.zeros_like(row), row, column], dim=1) + IMAGE_POSITION
    position_3L = torch.cat([text, image]).T.float()
    angles_3LF = position_3L[:, :, None] * frequency_F
    # Frequencies 1, 4, 7, … belong to rows and 2, 5, 8, … to columns, each up to its section's length.
    angles_LF = angles_3LF[0].clone()
    for axis in (1, 2):
        chosen = slice(axis, 3 * ROPE_SECTIONS[axis], 3)
        angles_LF[:, chosen] = angles_3LF[axis][:, chosen]
    return angles_LF.cos(), angles_LF.sin()


# --- the family ------------------------------------------------------------------------------------------------------


class Ideogram4(Family):
    name = "ideogram4"
    title = "Ideogram 4"
    table = IDEOGRAM4
    published = Ideogram4Config()
    marker = "embed_image_indicator.weight"
    latent_channels = 128
    latent_downscale = 16
    latent_multiple = 1
    presets = {
        "attention": r"layers\.\d+\.attention\.(qkv|o)",
        "attention+mlp": r"layers\.\d+\.(attention\.(qkv|o)|feed_forward\.w[123])",
        "all": r".*",
    }
    never_quantised = (
        r"input_proj|llm_cond_proj|t_embedding\.mlp_(in|out)|adaln_proj|layers\.\d+\.adaln_modulation"
        r"|final_layer\.(linear|adaln_modulation)"
    )
    text_trunk = ("llm_cond_norm", "llm_cond_proj")
    preview = Preview(steps=20, guidance=7.0)
    distilled = r"turbo|distilled"
    json_captions = True
    image_only_pass = True

    def config(self, shapes: Mapping[str, Sequence[int]]) -> Ideogram4Config:
        width, patch_features = shapes["input_proj.weight"]
        return Ideogram4Config(
            width=width,
            heads=width // shapes["layers.0.attention.norm_q.weight"][0],
            mlp=shapes["layers.0.feed_forward.w1.weight"][0],
            layers=1 + max(int(found[1]) for name in shapes if (found := re.match(r"layers\.(\d+)\.", name))),
            patch_features=patch_features,
            time_width=shapes["adaln_proj.weight"][0],
            text_features=shapes["llm_cond_proj.weight"][1],
        )

    def block_count(self, config: Ideogram4Config) -> int:
        return config.layers

    def with_blocks(self, config: Ideogram4Config, blocks: int) -> Ideogram4Config:
        return replace(config, layers=blocks)

    def build(self, config: Ideogram4Config) -> Ideogram4Transformer:
        return Ideogram4Transformer(config)

    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {name: module for name, module in model.named_modules() if isinstance(module, Layer)}

    def mean(self, latent_shape: Sequence[int]) -> float:
        """Centre of the noise distribution: half the log of pixels over 512²."""
        pixels = latent_shape[-2] * latent_shape[-1] * self.latent_downscale**2
        return 0.5 * math.log(pixels / REFERENCE_PIXELS)

    def sigma_quantile(self, u: Tensor, latent_shape: Sequence[int]) -> Tensor:
        return clamp_log_snr(expit_of_normal(u, self.mean(latent_shape), TRAIN_STD))

    def schedule(self, steps: int, latent_shape: Sequence[int], mu: float = 0.0, std: float = 1.75) -> Tensor:
        u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        sigmas = clamp_log_snr(expit_of_normal(u, mu + self.mean(latent_shape), std))
        sigmas[-1] = 0.0  # the clamp leaves about 6e-4 of noise there
        return sigmas

    def conditioning_width(self, config: Ideogram4Config) -> int:
        return config.text_features


def clamp_log_snr(sigma: Tensor) -> Tensor:
    """Keeps 2·log((1 - sigma) / sigma) within `LOG_SNR`."""
    low, high = (1.0 / (1.0 + math.exp(0.5 * bound)) for bound in reversed(LOG_SNR))
    return sigma.clamp(low, high)
