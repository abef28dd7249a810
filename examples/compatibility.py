"""The README's table of LoRA files: who loads what, as it is and converted. Made of small files in each layout.

    python -m graft_lora.examples.compatibility

Each file is written as its producer writes it, inspected, converted to each reader's layout and inspected again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..lora_convert.convert import convert_state
from ..lora_convert.errors import LoraError
from ..lora_convert.inspect import inspect_state
from ..lora_convert.naming import DIFFUSERS, OFFICIAL, spell
from ..lora_convert.sizes import Sizes
from ..lora_convert.tables import TABLES

LAYOUTS = {
    "ComfyUI": "comfyui",
    "diffusers": "diffusers",
    "ai-toolkit": "ai-toolkit",
    "musubi-tuner": "kohya",
    "OneTrainer": "onetrainer",
    "SimpleTuner": "simpletuner",
}
"""Reader → the layout that is written for it."""

_SHRUNK = 64  # sides of the published weights are divided by this
_RANK, _ALPHA = 4, 2.0
_MODULES = {
    "krea2": ("blocks.0.attn.qkv", "blocks.0.attn.wo", "blocks.0.mlp.up"),
    "ideogram4": ("layers.0.attention.qkv", "layers.0.attention.o", "layers.0.feed_forward.w1"),
}
_TEXT_FUSION = ("txtfusion.layerwise_blocks.0.attn.qkv", "txtfusion.refiner_blocks.1.mlp.down")

Parts = Callable[[int, int], dict[str, Tensor]]
"""(out, in) → what follows a module's name → tensor."""


def _lora(a: str, b: str, alpha: bool = False, **lengths: Callable[[int, int], tuple[int, ...]]) -> Parts:
    """A and B, an `.alpha` or none, and lengths of the shapes that are asked for."""

    def parts(out: int, columns: int) -> dict[str, Tensor]:
        found = {a: torch.randn(_RANK, columns), b: torch.randn(out, _RANK)}
        if alpha:
            found[".alpha"] = torch.tensor(_ALPHA)
        return found | {f".{name}": 1 + torch.rand(shape(out, columns)) for name, shape in lengths.items()}

    return parts


def _lokr(lengths: bool = False) -> Parts:
    """w1 (2, 2) and w2, both whole."""

    def parts(out: int, columns: int) -> dict[str, Tensor]:
        found = {".lokr_w1": torch.randn(2, 2), ".lokr_w2": torch.randn(out // 2, columns // 2)}
        found[".alpha"] = torch.tensor(1.0)
        return found | ({".dora_scale": 1 + torch.rand(out, 1)} if lengths else {})

    return parts


_A_B = (".lora_A.weight", ".lora_B.weight")
_DOWN_UP = (".lora_down.weight", ".lora_up.weight")


@dataclass(frozen=True)
class Style:
    """How a producer writes the files of one family.

    Attributes:
        prefix: before the modules' names.
        naming: `official` or `diffusers`.
        fused: whether q, k and v are one.
        parts: of each module.
        flat: whether underscores stand for dots.
        text_fusion: whether the text-fusion blocks are trained too.
        metadata: of the header.
    """

    prefix: str
    naming: str
    fused: bool
    parts: Parts
    flat: bool = False
    text_fusion: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def _row(out: int, columns: int) -> tuple[int, ...]:
    return (out,)


def _by_column(out: int, columns: int) -> tuple[int, ...]:
    return (1, columns)


def _peft(alpha: float) -> dict[str, str]:
    settings = {"transformer.r": _RANK, "transformer.lora_alpha": alpha}
    return {"lora_adapter_metadata": json.dumps(settings)}


def _official(prefix: str, parts: Parts, text_fusion: bool = True, **more) -> dict[str, Style]:
    """Official names, as both families' trainers that work on the official model have them."""
    return {
        "krea2": Style(prefix, OFFICIAL, False, parts, text_fusion=text_fusion, **more),
        "ideogram4": Style(prefix, OFFICIAL, True, parts, **more),
    }


def _diffusers(prefix: str, parts: Parts, **more) -> dict[str, Style]:
    return {family: Style(prefix, DIFFUSERS, False, parts, **more) for family in TABLES}


def _simpletuner(prefix: str, parts: Parts, **more) -> dict[str, Style]:
    """Fused, by diffusers' names for Krea 2 and by official ones for Ideogram 4."""
    return {
        "krea2": Style(prefix, DIFFUSERS, True, parts, **more),
        "ideogram4": Style(prefix, OFFICIAL, True, parts, **more),
    }


PRODUCERS: dict[str, dict[str, Style]] = {
    "diffusers": _diffusers("transformer.", _lora(*_A_B), metadata=_peft(_ALPHA)),
    "diffusers, DoRA": _diffusers("transformer.", _lora(*_A_B, lora_magnitude_vector=_row), metadata=_peft(_RANK)),
    "ai-toolkit": _official("diffusion_model.", _lora(*_A_B)),
    "ai-toolkit, LoKr": _official("diffusion_model.", _lokr()),
    "ai-toolkit, DoRA": _official("diffusion_model.", _lora(*_A_B, magnitude=_row)),
    "fal": {
        "krea2": Style(
            "base_model.model.", OFFICIAL, False, _lora(*_A_B), text_fusion=True,
            metadata={"lora_rank": str(_RANK), "lora_alpha": str(_ALPHA)},
        ),
        "ideogram4": Style("conditional_transformer.", OFFICIAL, True, _lora(*_A_B, alpha=True)),
    },
    "SimpleTuner": _simpletuner("transformer.", _lora(*_A_B), metadata=_peft(_ALPHA)),
    "SimpleTuner, `comfyui`": _simpletuner("diffusion_model.", _lora(*_A_B, alpha=True)),
    "SimpleTuner, LyCORIS LoKr": _simpletuner("lycoris_", _lokr(), flat=True, metadata={"lycoris_config": "{}"}),
    "SimpleTuner, LyCORIS LoKr + DoRA": _simpletuner(
        "lycoris_", _lokr(lengths=True), flat=True, metadata={"lycoris_config": "{}"}
    ),
    "musubi-tuner": _official("lora_unet_", _lora(*_DOWN_UP, alpha=True), flat=True, metadata={"ss_network_dim": "4"}),
    "OneTrainer, DIFFUSERS": _diffusers("transformer.", _lora(*_A_B), metadata={"ot_branch": "master"}),
    "OneTrainer, ORIGINAL": _official("", _lora(*_A_B), text_fusion=False, metadata={"ot_branch": "master"}),
    "OneTrainer, COMFY": _official(
        "diffusion_model.", _lora(*_A_B, alpha=True), text_fusion=False, metadata={"ot_branch": "master"}
    ),
    "OneTrainer, COMFY, DoRA": _official(
        "diffusion_model.", _lora(*_A_B, alpha=True, dora_scale=_by_column), text_fusion=False,
        metadata={"ot_branch": "master"},
    ),
    "OneTrainer, old": _diffusers("transformer.", _lora(*_DOWN_UP, alpha=True)),
    "ComfyUI TrainLoraNode": _official("diffusion_model.", _lora(*_DOWN_UP, alpha=True)),
}  # fmt: skip


def sizes(family: str) -> Sizes:
    """Those of a small model, in the published proportions."""
    published = Sizes.published(family)
    shapes = {
        name: tuple(max(1, side // _SHRUNK) for side in shape)
        for name, shape in published.shapes.items()
        if (place := published.table.inside_of(name)) is None or place[1] < 2
    }
    return Sizes(family, shapes, {name: shapes[name][0] for name in published.biases if name in shapes})


def made(family: str, style: Style) -> dict[str, Tensor]:
    """The tensors of a file in a producer's layout."""
    torch.manual_seed(0)
    shapes, state = sizes(family), {}
    for module in (*_MODULES[family], *(_TEXT_FUSION if style.text_fusion else ())):
        out, columns = shapes.shape(module)
        members: list[tuple[int | None, int]] = [(None, out)]
        if shapes.is_joint(module) and not style.fused:
            members = list(enumerate(shapes.rows(module)))
        for member, rows in members:
            name = style.prefix + spell(family, module, member, style.naming, style.flat)
            state.update({name + part: tensor for part, tensor in style.parts(rows, columns).items()})
    return state


def converted(family: str, state: dict[str, Tensor], metadata: dict[str, str], reader: str) -> str:
    """What the reader makes of the file once it is converted for it, by the least that makes it load fully."""
    shapes = sizes(family)
    torch.manual_seed(1)
    weights = {name: torch.randn(shapes.shape(name)) for name in shapes.modules()}
    base = weights.__getitem__
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        (" (base)", {"base": base}),
        (" (base, bake)", {"base": base, "bake": True}),
        (" (rank)", {"rank": 64}),
        (" (base, bake, rank)", {"base": base, "bake": True, "rank": 64}),
    )
    best = "refused"
    for word, options in ways:
        try:
            found, header, _ = convert_state(state, metadata, LAYOUTS[reader], sizes=shapes, **options)
        except LoraError:
            continue
        loads = inspect_state(found, header, shapes).verdicts[reader].loads
        if loads == "fully":
            return loads + word
        best = loads + word if best == "refused" else best
    return best


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"| producer | family | {' | '.join(LAYOUTS)} |",
        "|---" * (2 + len(LAYOUTS)) + "|",
    ]
    for producer, styles in PRODUCERS.items():
        for family, style in styles.items():
            state = made(family, style)
            before = inspect_state(state, style.metadata, sizes(family)).verdicts
            cells = []
            for reader in LAYOUTS:
                loads, after = before[reader].loads, converted(family, state, style.metadata, reader)
                cells.append(loads if loads == "fully" and after.startswith(loads) else f"{loads} → {after}")
            lines.append(f"| {producer} | {TABLES[family].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
