"""Krea 2: all that is particular to it.

Facts: reference/models.md, ComfyUI 0.33 `comfy/ldm/krea2`, diffusers 0.42 `Krea2Transformer2DModel`.

Shape suffixes: B batch, T text tokens, I image tokens, L = T + I, D width, H heads, G key/value heads, K head width,
N tapped text layers, E text width, S = 6 modulation vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...lora_convert.tables import KREA2
from ..attention import attention
from ..elementwise import gated, rms_normed, rms_normed_and_rotated, swiglu
from ..pointwise import pointwise
from .family import Family, Preview, Transformer, resolution_mu, shift, sinusoid

# --- facts -----------------------------------------------------------------------------------------------------------

PATCH = 2
ROPE_THETA = 1000.0
TIME_SCALE = 1000.0  # sigma is multiplied by this before its sinusoid
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Krea2Config:
    """Sizes of the transformer. The defaults are the published 12.82e9 parameters."""

    width: int = 6144
    heads: int = 48
    kv_heads: int = 12
    mlp: int = 16384
    blocks: int = 28
    latent_channels: int = 16
    time_features: int = 256
    text_width: int = 2560
    text_layers: int = 12
    text_heads: int = 20
    text_kv_heads: int = 20
    text_mlp: int = 6912

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """Widths of the (frame, row, column) axes: (32, 48, 48) at a head width of 128."""
        spatial = 6 * (self.head_width // 16)
        return self.head_width - 2 * spatial, spatial, spatial


# --- the transformer, written for training ---------------------------------------------------------------------------


@pointwise
def normed(x: Tensor, weight: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    gain = 1.0 + weight.float()
    return rms_normed(x, gain if scale is None else gain * (1.0 + scale), shift, NORM_EPS)


@pointwise
def normed_and_rotated(x_BLHK: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A norm, then neighbouring pairs of each head rotated by tables (1, L, 1, K/2)."""
    return rms_normed_and_rotated(x_BLHK, 1.0 + weight.float(), NORM_EPS, cos, sin, True)


@pointwise
def added(x: Tensor, gate: Tensor, change: Tensor) -> Tensor:
    """x + gate · change, for an fp32 gate."""
    return torch.addcmul(x, gate.to(x.dtype), change)


class RMSNorm(nn.Module):
    """RMSNorm with a zero-centred weight (multiplier 1 + scale), computed in fp32, returned in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, modulation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`norm(x)`, or `(1 + scale) · norm(x) + shift` for a modulation (scale, shift), rounded once at the end."""
        return normed(x, self.scale, *(modulation or ()))


class QKNorm(nn.Module):
    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.qnorm = RMSNorm(head_width)
        self.knorm = RMSNorm(head_width)


class Attention(nn.Module):
    """Grouped-query self-attention with RMSNorm on q and k and a sigmoid gate before the output projection."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, heads * self.head_width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.qknorm = QKNorm(self.head_width)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(
        self, x_BLD: Tensor, rope: tuple[Tensor, Tensor] | None = None, key_mask_BL: Tensor | None = None
    ) -> Tensor:
        q_BLHK, k_BLGK, v_BLGK = (
            linear(x_BLD).unflatten(-1, (-1, self.head_width)) for linear in (self.wq, self.wk, self.wv)
        )
        if rope is None:
            q_BLHK, k_BLGK = self.qknorm.qnorm(q_BLHK), self.qknorm.knorm(k_BLGK)
        else:
            tables = [table[None, :, None, :] for table in rope]
            q_BLHK = normed_and_rotated(q_BLHK, self.qknorm.qnorm.scale, *tables)
            k_BLGK = normed_and_rotated(k_BLGK, self.qknorm.knorm.scale, *tables)
        out_BLD = attention(q_BLHK, k_BLGK, v_BLGK, key_mask_BL)
        return self.wo(gated(out_BLD, self.gate(x_BLD)))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


class TextFusionBlock(nn.Module):
    """A pre-norm transformer block without rotary embedding and without time."""

    ends_with = "mlp.down"

    def __init__(self, width: int, heads: int, kv_heads: int, mlp: int) -> None:
        super().__init__()
        self.prenorm = RMSNorm(width)
        self.postnorm = RMSNorm(width)
        self.attn = Attention(width, heads, kv_heads)
        self.mlp = SwiGLU(width, mlp)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.prenorm(x), key_mask_BL=key_mask)
        return x + self.mlp(self.postnorm(x))


class TextFusion(nn.Module):
    """Fuses the tapped layers of each token into one (`layerwise_blocks`, `projector`), then refines the tokens."""

    def __init__(self, config: Krea2Config) -> None:
        super().__init__()
        sizes = (config.text_width, config.text_heads, config.text_kv_heads, config.text_mlp)
        self.layerwise_blocks = nn.ModuleList(TextFusionBlock(*sizes) for _ in range(2))
        self.projector = nn.Linear(config.text_layers, 1, bias=False)
        self.refiner_blocks = nn.ModuleList(TextFusionBlock(*sizes) for _ in range(2))

    def forward(self, x_BTNE: Tensor, mask_BT: Tensor | None) -> Tensor:
        tokens = x_BTNE.shape[:2]
        x = x_BTNE.flatten(0, 1)
        for block in self.layerwise_blocks:
            x = block(x)
        x_BTE = self.projector(x.unflatten(0, tokens).transpose(2, 3)).squeeze(-1)
        for block in self.refiner_blocks:
            x_BTE = block(x_BTE, mask_BT)
        return x_BTE


class BlockModulation(nn.Module):
    """A learned table added to the modulation that all blocks share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Parameter(torch.zeros(6 * width))

    def forward(self, shared_B1_6D: Tensor) -> tuple[Tensor, ...]:
        return (shared_B1_6D.float() + self.lin.float()).chunk(6, dim=-1)


class LastModulation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Parameter(torch.zeros(2, width))

    def forward(self, time_B1D: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = (time_B1D.float() + self.lin.float()).chunk(2, dim=1)
        return scale, shift


class Block(nn.Module):
    """One single-stream block over [text, image]."""

    ends_with = "mlp.down"

    def __init__(self, config: Krea2Config) -> None:
        super().__init__()
        self.mod = BlockModulation(config.width)
        self.prenorm = RMSNorm(config.width)
        self.postnorm = RMSNorm(config.width)
        self.attn = Attention(config.width, config.heads, config.kv_heads)
        self.mlp = SwiGLU(config.width, config.mlp)

    def forward(
        self, x_BLD: Tensor, shared_B1_6D: Tensor, rope: tuple[Tensor, Tensor], key_mask_BL: Tensor | None
    ) -> Tensor:
        prescale, preshift, pregate, postscale, postshift, postgate = self.mod(shared_B1_6D)
        attended = self.attn(self.prenorm(x_BLD, (prescale, preshift)), rope, key_mask_BL)
        x_BLD = added(x_BLD, pregate, attended)
        fed = self.mlp(self.postnorm(x_BLD, (postscale, postshift)))
        return added(x_BLD, postgate, fed)


class LastLayer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear = nn.Linear(width, out)
        self.modulation = LastModulation(width)

    def forward(self, x_BID: Tensor, time_B1D: Tensor) -> Tensor:
        return self.linear(self.norm(x_BID, self.modulation(time_B1D)))


class Krea2Transformer(Transformer):
    """Krea 2's transformer under its official parameter names."""

    def __init__(self, config: Krea2Config) -> None:
        super().__init__()
        self.config = config
        width, patch_features = config.width, config.latent_channels * PATCH**2
        self.first = nn.Linear(patch_features, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.tmlp = nn.Sequential(
            nn.Linear(config.time_features, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.txtfusion = TextFusion(config)
        self.txtmlp = nn.Sequential(
            RMSNorm(config.text_width),
            nn.Linear(config.text_width, width),
            nn.GELU(approximate="tanh"),
            nn.Linear(width, width),
        )
        self.last = LastLayer(width, patch_features)
        self.tproj = nn.Sequential(nn.GELU(approximate="tanh"), nn.Linear(width, 6 * width))

    def text_tokens(self, conditioning: Tensor, mask_BT: Tensor | None) -> Tensor:
        """(B, T, N·E) → (B, T, D)."""
        wanted = self.config.text_layers * self.config.text_width
        if conditioning.shape[-1] != wanted:
            raise ValueError(
                f"Krea 2 takes conditioning of {wanted} features per token ({self.config.text_layers} layers of "
                f"{self.config.text_width}), got {conditioning.shape[-1]}: was it encoded for another model?"
            )
        x_BTNE = conditioning.to(self.compute_dtype).unflatten(-1, (self.config.text_layers, -1))
        return self.txtmlp(self.txtfusion(x_BTNE, mask_BT))

    def rope_tables(self, texts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return rope_tables(self.config.rope_axes, texts, rows, columns)

    def velocity(self, latents: Tensor, sigma_B: Tensor, text_BTD: Tensor | None, mask_BT: Tensor | None) -> Tensor:
        if text_BTD is None:
            raise ValueError("Krea 2 has no pass without text: give the empty prompt's conditioning instead")
        frames = latents.shape[2:-2]
        if frames not in ((), (1,)):
            raise ValueError(f"Krea 2 takes latents (B, C, h, w) or (B, C, 1, h, w), got {tuple(latents.shape)}")
        rows, columns = latents.shape[-2] // PATCH, latents.shape[-1] // PATCH

        image_BID = self.first(patchify(latents.squeeze(2) if frames else latents).to(self.compute_dtype))
        time_B1D = self.tmlp(time_embedding(sigma_B, self.config.time_features).to(self.compute_dtype).unsqueeze(1))
        shared_B1_6D = self.tproj(time_B1D)

        texts = text_BTD.shape[1]
        rope = self.rope(texts, rows, columns, latents.device)
        key_mask_BL = None if mask_BT is None else F.pad(mask_BT.bool(), (0, rows * columns), value=True)
        x_BLD = torch.cat([text_BTD, image_BID], dim=1)
        for block in self.blocks:
            x_BLD = block(x_BLD, shared_B1_6D, rope, key_mask_BL)
        out = unpatchify(self.last(x_BLD[:, texts:], time_B1D), rows, columns)
        return out.unsqueeze(2) if frames else out


def patchify(latents: Tensor) -> Tensor:
    """(B, C, 2r, 2c) → (B, r·c, C·4), features in the order (channel, row, column)."""
    if latents.shape[-2] % PATCH or latents.shape[-1] % PATCH:
        raise ValueError(f"Krea 2 needs latents with even sides, got {latents.shape[-2]} × {latents.shape[-1]}")
    batch, channels, height, width = latents.shape
    cut = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(tokens_BIF: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `patchify`."""
    cut = tokens_BIF.unflatten(1, (rows, columns)).unflatten(-1, (-1, PATCH, PATCH))
    return cut.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def time_embedding(sigma_B: Tensor, features: int) -> Tensor:
    """Sinusoid of 1000·sigma, cosine first: (B,) → (B, features) fp32."""
    half = features // 2
    frequencies = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float32, device=sigma_B.device) / half)
    angles = (sigma_B.float() * TIME_SCALE)[:, None] * frequencies
    return sinusoid(angles, torch.cos, torch.sin)


def rope_tables(axes: tuple[int, int, int], texts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (L, K/2), fp32, of 3-axis RoPE; text stands at (0, 0, 0), image at (0, row, column).

    Angles are formed in fp64 and rounded once, as diffusers does.
    """
    position = torch.zeros(texts + rows * columns, 3, dtype=torch.float64, device="cpu")
    position[texts:, 1] = torch.arange(rows, device="cpu").repeat_interleave(columns)
    position[texts:, 2] = torch.arange(columns, device="cpu").repeat(rows)
    angles = []
    for axis, width in enumerate(axes):
        exponent = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
        angles.append(position[:, axis : axis + 1] / ROPE_THETA**exponent)
    angles_LK2 = torch.cat(angles, dim=1)
    return angles_LK2.cos().float(), angles_LK2.sin().float()


# --- the family ------------------------------------------------------------------------------------------------------


class Krea2(Family):
    name = "krea2"
    title = "Krea 2"
    table = KREA2
    published = Krea2Config()
    marker = "txtfusion.projector.weight"
    latent_channels = 16
    latent_downscale = 8
    latent_multiple = PATCH
    presets = {
        "attention": r"blocks\.\d+\.attn\.(wq|wk|wv|gate|wo)",
        "attention+mlp": r"blocks\.\d+\.(attn\.(wq|wk|wv|gate|wo)|mlp\.(gate|up|down))",
        "all": r".*",
    }
    never_quantised = r"first|last\.linear|tmlp\.\d|tproj\.1|txtmlp\.\d|txtfusion\.projector"
    text_trunk = ("txtfusion", "txtmlp")
    preview = Preview(steps=28, guidance=5.5)
    distilled = r"turbo"
    json_captions = False
    image_only_pass = False

    def config(self, shapes: Mapping[str, Sequence[int]]) -> Krea2Config:
        width, patch_features = shapes["first.weight"]
        head_width = shapes["blocks.0.attn.qknorm.qnorm.scale"][0]
        text_width = shapes["txtfusion.layerwise_blocks.0.prenorm.scale"][0]
        text_head_width = shapes["txtfusion.layerwise_blocks.0.attn.qknorm.qnorm.scale"][0]
        return Krea2Config(
            width=width,
            heads=shapes["blocks.0.attn.wq.weight"][0] // head_width,
            kv_heads=shapes["blocks.0.attn.wk.weight"][0] // head_width,
            mlp=shapes["blocks.0.mlp.gate.weight"][0],
            blocks=1 + max(int(found[1]) for name in shapes if (found := re.match(r"blocks\.(\d+)\.", name))),
            latent_channels=patch_features // PATCH**2,
            time_features=shapes["tmlp.0.weight"][1],
            text_width=text_width,
            text_layers=shapes["txtfusion.projector.weight"][1],
            text_heads=shapes["txtfusion.layerwise_blocks.0.attn.wq.weight"][0] // text_head_width,
            text_kv_heads=shapes["txtfusion.layerwise_blocks.0.attn.wk.weight"][0] // text_head_width,
            text_mlp=shapes["txtfusion.layerwise_blocks.0.mlp.gate.weight"][0],
        )

    def block_count(self, config: Krea2Config) -> int:
        return config.blocks

    def with_blocks(self, config: Krea2Config, blocks: int) -> Krea2Config:
        return replace(config, blocks=blocks)

    def build(self, config: Krea2Config) -> Krea2Transformer:
        return Krea2Transformer(config)

    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {name: module for name, module in model.named_modules() if isinstance(module, TextFusionBlock | Block)}

    def sigma_quantile(self, u: Tensor, latent_shape: Sequence[int]) -> Tensor:
        return shift(u.double(), resolution_mu(self.image_tokens(latent_shape)))

    def schedule(self, steps: int, latent_shape: Sequence[int]) -> Tensor:
        mu = resolution_mu(self.image_tokens(latent_shape))
        sigmas = shift(torch.linspace(1, 1 / steps, steps, dtype=torch.float64), mu)
        return torch.cat([sigmas, sigmas.new_zeros(1)])

    def conditioning_width(self, config: Krea2Config) -> int:
        return config.text_layers * config.text_width
