"""Small LoRA files as each producer writes them, with the change that each module's file stands for.

The names are written out here, apart from the converter's tables, as they stand in the producers' files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import tiny
import torch
from graft_lora.lora_convert.canonical import Change, Split
from graft_lora.lora_convert.sizes import Sizes
from torch import Tensor

# Official (joint) name → what the official model and diffusers call it; q, k and v are three.
KREA2 = {
    "blocks.1.attn.qkv": (
        ("blocks.1.attn.wq", "blocks.1.attn.wk", "blocks.1.attn.wv"),
        ("transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k", "transformer_blocks.1.attn.to_v"),
    ),
    "txtfusion.layerwise_blocks.1.attn.qkv": (
        tuple(f"txtfusion.layerwise_blocks.1.attn.w{m}" for m in "qkv"),
        tuple(f"text_fusion.layerwise_blocks.1.attn.to_{m}" for m in "qkv"),
    ),
    "blocks.0.attn.gate": (("blocks.0.attn.gate",), ("transformer_blocks.0.attn.to_gate",)),
    "blocks.0.attn.wo": (("blocks.0.attn.wo",), ("transformer_blocks.0.attn.to_out.0",)),
    "blocks.1.mlp.down": (("blocks.1.mlp.down",), ("transformer_blocks.1.ff.down",)),
    "txtfusion.refiner_blocks.0.mlp.up": (
        ("txtfusion.refiner_blocks.0.mlp.up",),
        ("text_fusion.refiner_blocks.0.ff.up",),
    ),
    "first": (("first",), ("img_in",)),
    "tmlp.2": (("tmlp.2",), ("time_embed.linear_2",)),
    "tproj.1": (("tproj.1",), ("time_mod_proj",)),
    "last.linear": (("last.linear",), ("final_layer.linear",)),
}
IDEOGRAM4 = {
    "layers.1.attention.qkv": (
        ("layers.1.attention.qkv",),
        ("layers.1.attention.to_q", "layers.1.attention.to_k", "layers.1.attention.to_v"),
    ),
    "layers.0.attention.o": (("layers.0.attention.o",), ("layers.0.attention.to_out.0",)),
    "layers.0.feed_forward.w2": (("layers.0.feed_forward.w2",), ("layers.0.feed_forward.w2",)),
    "layers.1.adaln_modulation": (("layers.1.adaln_modulation",), ("layers.1.adaln_modulation",)),
    "final_layer.adaln_modulation": (("final_layer.adaln_modulation",), ("final_layer.adaln_modulation",)),
}
MODULES = {"krea2": KREA2, "ideogram4": IDEOGRAM4}
FUSED = {
    "blocks.1.attn.qkv": "transformer_blocks.1.attn.to_qkv",
    "txtfusion.layerwise_blocks.1.attn.qkv": "text_fusion.layerwise_blocks.1.attn.to_qkv",
    "layers.1.attention.qkv": "layers.1.attention.qkv",
}


@cache
def sizes(family: str) -> Sizes:
    """Of the tiny model."""
    with torch.device("meta"):
        return Sizes.of(family, {name: tuple(p.shape) for name, p in tiny.build(family).named_parameters()})


def delta(change: Change | Split) -> Tensor:
    """dW as a whole, members that are not changed as zero."""
    if isinstance(change, Change):
        return change.delta()
    columns = next(member.shape[1] for member in change.members if member is not None)
    parts = zip(change.members, change.rows, strict=True)
    return torch.cat([torch.zeros(rows, columns) if member is None else member.delta() for member, rows in parts])


@dataclass
class File:
    """A file under construction.

    Attributes:
        family: whose modules it has.
        state: its tensors.
        metadata: of its header.
        wanted: official or joint module name → dW.
    """

    family: str
    state: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, Tensor] = field(default_factory=dict)


Parts = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""(out, in) → what follows the module's name → tensor, and dW."""


def lora(a: str, b: str, rank: int = 3, alpha: float | None = None, scale: float | None = None, dtype=torch.float32):
    """A pair with the given endings, with an `alpha` key or without; scale is what it comes to."""
    scale = (1.0 if alpha is None else alpha / rank) if scale is None else scale

    def parts(out: int, columns: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        down = torch.randn(rank, columns, generator=generator).to(dtype)
        up = torch.randn(out, rank, generator=generator).to(dtype)
        found = {a: down, b: up}
        if alpha is not None:
            found[".alpha"] = torch.tensor(alpha)
        return found, scale * (up.float() @ down.float())

    return parts


def lokr(rank: int | None = None, alpha: float = 1.0, first: int = 2):
    """A Kronecker product: w1 (first, first) and w2, which has a rank or is whole."""

    def parts(out: int, columns: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        w1 = torch.randn(first, first, generator=generator)
        rows, width = out // first, columns // first
        if rank is None:
            w2 = torch.randn(rows, width, generator=generator)
            return {".lokr_w1": w1, ".lokr_w2": w2, ".alpha": torch.tensor(alpha)}, torch.kron(w1, w2)
        a, b = torch.randn(rows, rank, generator=generator), torch.randn(rank, width, generator=generator)
        found = {".lokr_w1": w1, ".lokr_w2_a": a, ".lokr_w2_b": b, ".alpha": torch.tensor(alpha)}
        return found, alpha / rank * torch.kron(w1, a @ b)

    return parts


def loha(rank: int = 2, alpha: float = 1.0):
    def parts(out: int, columns: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        a, c = (torch.randn(out, rank, generator=generator) for _ in range(2))
        b, d = (torch.randn(rank, columns, generator=generator) for _ in range(2))
        found = {".hada_w1_a": a, ".hada_w1_b": b, ".hada_w2_a": c, ".hada_w2_b": d, ".alpha": torch.tensor(alpha)}
        return found, alpha / rank * (a @ b) * (c @ d)

    return parts


def write(
    family: str,
    parts: Parts,
    prefix: str,
    naming: str,
    flat: bool = False,
    metadata: dict[str, str] | None = None,
    only: tuple[str, ...] | None = None,
) -> File:
    """A file of the listed modules (or `only` some). `naming` is `official`, `diffusers` or `fused`: diffusers' names
    with q, k and v in one."""
    file = File(family, metadata=dict(metadata or {}))
    generator = torch.Generator().manual_seed(0)
    shapes = sizes(family)
    for module, (official, diffusers) in MODULES[family].items():
        if only is not None and module not in only:
            continue
        names = official if naming == "official" else diffusers
        if naming == "fused" and module in FUSED:
            names = (FUSED[module],)
        out, columns = shapes.shape(module)
        rows = (out,) if len(names) == 1 else shapes.rows(module)
        deltas = []
        for name, length in zip(names, rows, strict=True):
            tensors, change = parts(length, columns, generator)
            stem = prefix + (name.replace(".", "_") if flat else name)
            file.state.update({stem + part: tensor for part, tensor in tensors.items()})
            deltas.append(change)
        file.wanted[module] = torch.cat(deltas)
    return file
