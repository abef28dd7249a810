"""Module names of both families: what the official weights call them, and what diffusers does.

Each name stands here and nowhere else; the trainer asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Official names ↔ diffusers' names of one family.

    Attributes:
        family: the family's name.
        outer: numbered containers, official → diffusers; `{}` stands for the number.
        inner: what stands inside each of them, official → diffusers. A fused module has several diffusers names,
            its members in row order.
        single: everything that is not numbered, official → diffusers.
        main_blocks: pattern of a transformer block, or of a module inside one, whose group 1 is the block's number.
    """

    family: str
    outer: Mapping[str, str]
    inner: Mapping[str, str | tuple[str, ...]]
    single: Mapping[str, str]
    main_blocks: str

    def from_diffusers(self, name: str) -> tuple[str, int | None] | None:
        """Official name of a diffusers module or parameter, and which member of a fused one it is; None if unknown.

        A trailing `.weight` or `.bias` of a Linear may be part of the name.
        """
        for official, diffusers in self.single.items():
            rest = _rest(name, diffusers)
            if rest is not None:
                return official + rest, None
        for container, number, tail in self._split(name):
            for official, names in self.inner.items():
                members = (names,) if isinstance(names, str) else names
                for member, diffusers in enumerate(members):
                    rest = _rest(tail, diffusers)
                    if rest is not None:
                        whole = f"{container.format(number)}.{official}{rest}"
                        return whole, None if isinstance(names, str) else member
        return None

    def to_diffusers(self, module: str) -> tuple[str, ...]:
        """Diffusers' names of an official module: one, or the members of a fused one in row order.

        Raises:
            KeyError: diffusers has no such module.
        """
        if module in self.single:
            return (self.single[module],)
        for official, diffusers in self.outer.items():
            found = re.fullmatch(re.escape(official).replace(r"\{\}", r"(\d+)") + r"\.(.+)", module)
            if found and found[2] in self.inner:
                names = self.inner[found[2]]
                return tuple(
                    f"{diffusers.format(found[1])}.{name}" for name in ((names,) if isinstance(names, str) else names)
                )
        raise KeyError(module)

    def _split(self, name: str) -> Iterator[tuple[str, str, str]]:
        for official, diffusers in self.outer.items():
            found = re.fullmatch(re.escape(diffusers).replace(r"\{\}", r"(\d+)") + r"\.(.+)", name)
            if found:
                yield official, found[1], found[2]


def _rest(name: str, stem: str) -> str | None:
    """What follows `stem` in `name`: nothing, `.weight` or `.bias`; None where the name is another."""
    rest = name.removeprefix(stem)
    return rest if name.startswith(stem) and rest in ("", ".weight", ".bias") else None


KREA2 = Table(
    family="krea2",
    outer={
        "blocks.{}": "transformer_blocks.{}",
        "txtfusion.layerwise_blocks.{}": "text_fusion.layerwise_blocks.{}",
        "txtfusion.refiner_blocks.{}": "text_fusion.refiner_blocks.{}",
    },
    inner={
        "attn.wq": "attn.to_q",
        "attn.wk": "attn.to_k",
        "attn.wv": "attn.to_v",
        "attn.gate": "attn.to_gate",
        "attn.wo": "attn.to_out.0",
        "mlp.gate": "ff.gate",
        "mlp.up": "ff.up",
        "mlp.down": "ff.down",
        "attn.qknorm.qnorm.scale": "attn.norm_q.weight",
        "attn.qknorm.knorm.scale": "attn.norm_k.weight",
        "prenorm.scale": "norm1.weight",
        "postnorm.scale": "norm2.weight",
        "mod.lin": "scale_shift_table",
    },
    single={
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtfusion.projector": "text_fusion.projector",
        "txtmlp.0.scale": "txt_in.norm.weight",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "last.linear": "final_layer.linear",
        "last.norm.scale": "final_layer.norm.weight",
        "last.modulation.lin": "final_layer.scale_shift_table",
    },
    main_blocks=r"blocks\.(\d+)(\..+)?",
)

IDEOGRAM4 = Table(
    family="ideogram4",
    outer={"layers.{}": "layers.{}"},
    inner={
        # Thirds of contiguous rows: q, then k, then v.
        "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
        "attention.o": "attention.to_out.0",
        **{
            name: name
            for name in (
                "feed_forward.w1",
                "feed_forward.w2",
                "feed_forward.w3",
                "adaln_modulation",
                "attention.norm_q",
                "attention.norm_k",
                "attention_norm1",
                "attention_norm2",
                "ffn_norm1",
                "ffn_norm2",
            )
        },
    },
    single={
        name: name
        for name in (
            "input_proj",
            "llm_cond_norm",
            "llm_cond_proj",
            "t_embedding.mlp_in",
            "t_embedding.mlp_out",
            "adaln_proj",
            "embed_image_indicator",
            "final_layer.linear",
            "final_layer.adaln_modulation",
        )
    },
    main_blocks=r"layers\.(\d+)(\..+)?",
)

TABLES: dict[str, Table] = {table.family: table for table in (KREA2, IDEOGRAM4)}
