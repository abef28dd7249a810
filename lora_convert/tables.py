"""Module names of both families: what the official weights call them, what diffusers does, and their shapes.

Each name stands here and nowhere else; the trainer asks. The numbers behind the shapes are in sizes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Row(NamedTuple):
    """One module, or one parameter that is no module's `weight`.

    Attributes:
        diffusers: its name there; a fused module has several, its members in row order.
        shape: of the weight, (out, in) or that of a vector, in the words of sizes.py: `width`, `6*width`, `2`.
        bias: whether the module has one, of shape (out,).
    """

    diffusers: str | tuple[str, ...]
    shape: tuple[str, ...]
    bias: bool = False


class Joint(NamedTuple):
    """q, k and v of an attention as one matrix, rows of q first; its names stand inside a container.

    Attributes:
        name: that of the whole, whether the official model has such a module or not.
        official: official names of q, k and v, or None where the official model holds only the whole.
        fused: other names of the whole: diffusers' after `fuse_qkv_projections()`, of which trainers save LoRAs too.
    """

    name: str
    official: tuple[str, str, str] | None
    fused: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Official names ↔ diffusers' names of one family.

    Attributes:
        family: the family's name.
        title: as people write it.
        outer: numbered containers, official → diffusers; `{}` stands for the number.
        inside: what stands inside each of them, by official name.
        alone: everything that is not numbered, by official name.
        joint: q, k and v, in each of the containers.
        main_blocks: pattern of a transformer block, or of a module inside one, whose group 1 is the block's number.
        groups: (what people call some modules, pattern of their official or joint names); the first that fits counts.
    """

    family: str
    title: str
    outer: Mapping[str, str]
    inside: Mapping[str, Row]
    alone: Mapping[str, Row]
    joint: Joint
    main_blocks: str
    groups: tuple[tuple[str, str], ...]

    @cached_property
    def inner(self) -> Mapping[str, str | tuple[str, ...]]:
        """What stands inside a container, official → diffusers."""
        return {official: row.diffusers for official, row in self.inside.items()}

    @cached_property
    def single(self) -> Mapping[str, str]:
        """What is not numbered, official → diffusers."""
        return {official: row.diffusers for official, row in self.alone.items() if isinstance(row.diffusers, str)}

    def inside_of(self, name: str) -> tuple[str, int, str] | None:
        """Container, number and the rest of an official or joint name that stands in a container; None otherwise."""
        for container in self.outer:
            found = re.fullmatch(re.escape(container).replace(r"\{\}", r"([0-9]+)") + r"\.(.+)", name)
            if found:
                return container, int(found[1]), found[2]
        return None

    def row(self, name: str) -> Row | None:
        """What is known of an official name, whatever its number is; None for a name that is not official."""
        if name in self.alone:
            return self.alone[name]
        place = self.inside_of(name)
        return self.inside.get(place[2]) if place else None

    def is_joint(self, name: str) -> bool:
        """Whether a name is that of q, k and v together."""
        place = self.inside_of(name)
        return place is not None and place[2] == self.joint.name

    def members(self, joint: str) -> tuple[str, str, str] | None:
        """Official names of q, k and v under a joint name; None where it is no joint name, or official itself."""
        place = self.inside_of(joint)
        if place is None or not self.is_joint(joint) or self.joint.official is None:
            return None
        q, k, v = (f"{place[0].format(place[1])}.{member}" for member in self.joint.official)
        return q, k, v

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
    title="Krea 2",
    outer={
        "blocks.{}": "transformer_blocks.{}",
        "txtfusion.layerwise_blocks.{}": "text_fusion.layerwise_blocks.{}",
        "txtfusion.refiner_blocks.{}": "text_fusion.refiner_blocks.{}",
    },
    inside={
        "attn.wq": Row("attn.to_q", ("width", "width")),
        "attn.wk": Row("attn.to_k", ("kv_width", "width")),
        "attn.wv": Row("attn.to_v", ("kv_width", "width")),
        "attn.gate": Row("attn.to_gate", ("width", "width")),
        "attn.wo": Row("attn.to_out.0", ("width", "width")),
        "mlp.gate": Row("ff.gate", ("mlp", "width")),
        "mlp.up": Row("ff.up", ("mlp", "width")),
        "mlp.down": Row("ff.down", ("width", "mlp")),
        "attn.qknorm.qnorm.scale": Row("attn.norm_q.weight", ("head_width",)),
        "attn.qknorm.knorm.scale": Row("attn.norm_k.weight", ("head_width",)),
        "prenorm.scale": Row("norm1.weight", ("width",)),
        "postnorm.scale": Row("norm2.weight", ("width",)),
        # The text-fusion blocks have none.
        "mod.lin": Row("scale_shift_table", ("modulation",)),
    },
    alone={
        "first": Row("img_in", ("width", "latent_features"), bias=True),
        "tmlp.0": Row("time_embed.linear_1", ("width", "time_features"), bias=True),
        "tmlp.2": Row("time_embed.linear_2", ("width", "width"), bias=True),
        "tproj.1": Row("time_mod_proj", ("6*width", "width"), bias=True),
        "txtfusion.projector": Row("text_fusion.projector", ("1", "text_layers")),
        "txtmlp.0.scale": Row("txt_in.norm.weight", ("text_width",)),
        "txtmlp.1": Row("txt_in.linear_1", ("width", "text_width"), bias=True),
        "txtmlp.3": Row("txt_in.linear_2", ("width", "width"), bias=True),
        "last.linear": Row("final_layer.linear", ("latent_features", "width"), bias=True),
        "last.norm.scale": Row("final_layer.norm.weight", ("width",)),
        "last.modulation.lin": Row("final_layer.scale_shift_table", ("2", "width")),
    },
    joint=Joint("attn.qkv", ("attn.wq", "attn.wk", "attn.wv"), ("attn.to_qkv",)),
    main_blocks=r"blocks\.(\d+)(\..+)?",
    groups=(("text fusion", r"txt(fusion|mlp)\..+"), ("attention", r".+\.attn\..+"), ("mlp", r".+\.mlp\..+")),
)


def _same(*rows: tuple[str, ...], bias: bool = False) -> dict[str, Row]:
    """Rows of (name, *shape) whose diffusers names are the official ones."""
    return {name: Row(name, tuple(shape), bias) for name, *shape in rows}


IDEOGRAM4 = Table(
    family="ideogram4",
    title="Ideogram 4",
    outer={"layers.{}": "layers.{}"},
    inside={
        # Thirds of contiguous rows: q, then k, then v.
        "attention.qkv": Row(("attention.to_q", "attention.to_k", "attention.to_v"), ("3*width", "width")),
        "attention.o": Row("attention.to_out.0", ("width", "width")),
        **_same(
            ("feed_forward.w1", "mlp", "width"),
            ("feed_forward.w2", "width", "mlp"),
            ("feed_forward.w3", "mlp", "width"),
        ),
        **_same(("adaln_modulation", "4*width", "time_width"), bias=True),
        **_same(
            ("attention.norm_q", "head_width"),
            ("attention.norm_k", "head_width"),
            ("attention_norm1", "width"),
            ("attention_norm2", "width"),
            ("ffn_norm1", "width"),
            ("ffn_norm2", "width"),
        ),
    },
    alone={
        **_same(
            ("input_proj", "width", "patch_features"),
            ("llm_cond_proj", "width", "text_features"),
            ("t_embedding.mlp_in", "width", "width"),
            ("t_embedding.mlp_out", "width", "width"),
            ("adaln_proj", "time_width", "width"),
            ("final_layer.linear", "patch_features", "width"),
            ("final_layer.adaln_modulation", "width", "time_width"),
            bias=True,
        ),
        **_same(("llm_cond_norm", "text_features"), ("embed_image_indicator", "2", "width")),
    },
    joint=Joint("attention.qkv", None, ("attention.to_qkv",)),
    main_blocks=r"layers\.(\d+)(\..+)?",
    groups=(("attention", r".+\.attention\..+"), ("mlp", r".+\.feed_forward\..+")),
)

TABLES: dict[str, Table] = {table.family: table for table in (KREA2, IDEOGRAM4)}
