"""What each target layout looks like, and what its readers can take, by their sources.

ComfyUI 0.33 `comfy/lora.py`, `comfy/weight_adapter`; diffusers `loaders/peft.py`, `loaders/lora_pipeline.py`;
musubi-tuner `utils/lora_utils.py`, `networks/{lora,loha,lokr}.py`; ai-toolkit `toolkit/network_mixins.py`,
`toolkit/lora_special.py`; OneTrainer `modules/util/load_lora_util.py`, `modules/module/LoRAModule.py`; SimpleTuner
`helpers/training/lora_format.py`, `helpers/models/{krea2,ideogram}`; LyCORIS 4.1 `lycoris/modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .naming import DIFFUSERS, OFFICIAL

LORA, LOKR, LOHA, DIFF, PARAMETER, BIAS = "a LoRA", "a LoKr", "a LoHa", "a full change", "a vector", "a bias"
"""Kinds of change, as messages call them: `PARAMETER` is a norm's scale or another weight of no Linear."""

ROW, ROW_OVER_BASE, COLUMN = "magnitude", "magnitude_over_base", "column_magnitude"
"""The lengths of a DoRA, by the names of `Change`'s fields."""

_AB = ("lora_A.weight", "lora_B.weight")
_DOWN_UP = ("lora_down.weight", "lora_up.weight")


@dataclass(frozen=True)
class Target:
    """One layout.

    Attributes:
        name: as it is asked for.
        reader: who reads it, for messages.
        prefix: before every module's name.
        naming: family → `official` or `diffusers`.
        fused: family → whether q, k and v are one module.
        flat: underscores stand for the dots of a module's name.
        low_rank: suffixes of A and B.
        alpha: whether `.alpha` is written; else the scale is folded into B.
        kinds: kinds that the reader takes.
        magnitudes: field of `Change` → suffix; the lengths of a DoRA that it takes.
        dora_kinds: kinds that can have them.
        magnitude_columns: whether lengths are written as a column (out, 1) and not as a vector (out,).
        one_kind: whether it takes one kind of adapter in a file, and a DoRA of one axis in every module or in none.
        one_rank: whether it takes one rank for all modules.
        folds_lokr: whether it takes the scale of a LoKr for 1.
        whole_w1: whether it takes the first factor of a LoKr whole only.
        peft: whether the header has PEFT's settings.
        axis_by_rows: whether it takes lengths for those of rows where there are as many as rows, one included.
    """

    name: str
    reader: str
    prefix: str
    naming: Mapping[str, str]
    fused: Mapping[str, bool]
    kinds: frozenset[str]
    magnitudes: Mapping[str, str]
    dora_kinds: frozenset[str]
    low_rank: tuple[str, str] = _AB
    flat: bool = False
    alpha: bool = True
    magnitude_columns: bool = True
    one_kind: bool = False
    one_rank: bool = False
    folds_lokr: bool = False
    whole_w1: bool = False
    peft: bool = False
    axis_by_rows: bool = False


_OFFICIAL = {"krea2": OFFICIAL, "ideogram4": OFFICIAL}
_AS_OFFICIAL = {"krea2": False, "ideogram4": True}

COMFYUI = Target(
    name="comfyui",
    reader="ComfyUI",
    prefix="diffusion_model.",
    naming=_OFFICIAL,
    fused=_AS_OFFICIAL,
    kinds=frozenset((LORA, LOKR, LOHA, DIFF, PARAMETER, BIAS)),
    magnitudes={ROW_OVER_BASE: "dora_scale", COLUMN: "dora_scale"},
    dora_kinds=frozenset((LORA, LOKR, LOHA)),
    low_rank=_DOWN_UP,
    axis_by_rows=True,
)
DIFFUSERS_LAYOUT = Target(
    name="diffusers",
    reader="diffusers",
    prefix="transformer.",
    naming={"krea2": DIFFUSERS, "ideogram4": DIFFUSERS},
    fused={"krea2": False, "ideogram4": False},
    kinds=frozenset((LORA,)),
    magnitudes={ROW: "lora_magnitude_vector"},
    dora_kinds=frozenset((LORA,)),
    magnitude_columns=False,
    alpha=False,
    one_kind=True,
    peft=True,
)
# No DoRA: OneTrainer would take it, but musubi-tuner passes over a `dora_scale` without a word.
KOHYA = Target(
    name="kohya",
    reader="musubi-tuner",
    prefix="lora_unet_",
    naming=_OFFICIAL,
    fused=_AS_OFFICIAL,
    kinds=frozenset((LORA, LOKR, LOHA)),
    magnitudes={},
    dora_kinds=frozenset(),
    low_rank=_DOWN_UP,
    flat=True,
    one_kind=True,
    whole_w1=True,
)
# No DoRA: it writes the lengths, but starts them anew when it loads such a file to train on.
AI_TOOLKIT = Target(
    name="ai-toolkit",
    reader="ai-toolkit",
    prefix="diffusion_model.",
    naming=_OFFICIAL,
    fused=_AS_OFFICIAL,
    kinds=frozenset((LORA, LOKR, DIFF)),
    magnitudes={},
    dora_kinds=frozenset(),
    alpha=False,
    one_kind=True,
    folds_lokr=True,
)
ONETRAINER = Target(
    name="onetrainer",
    reader="OneTrainer",
    prefix="diffusion_model.",
    naming=_OFFICIAL,
    fused=_AS_OFFICIAL,
    kinds=frozenset((LORA, LOKR, LOHA)),
    magnitudes={ROW: "dora_scale", COLUMN: "dora_scale"},
    dora_kinds=frozenset((LORA, LOKR)),
    one_kind=True,
    one_rank=True,
)
SIMPLETUNER = Target(
    name="simpletuner",
    reader="SimpleTuner",
    prefix="transformer.",
    naming={"krea2": DIFFUSERS, "ideogram4": OFFICIAL},
    fused={"krea2": True, "ideogram4": True},
    kinds=frozenset((LORA,)),
    magnitudes={ROW: "lora_magnitude_vector"},
    dora_kinds=frozenset((LORA,)),
    magnitude_columns=False,
    alpha=False,
    one_kind=True,
    peft=True,
)
SIMPLETUNER_LYCORIS = replace(
    SIMPLETUNER,
    reader="SimpleTuner's LyCORIS",
    prefix="lycoris_",
    kinds=frozenset((LORA, LOKR, LOHA, DIFF)),
    magnitudes={ROW: "dora_scale"},
    dora_kinds=frozenset((LORA, LOKR, LOHA)),
    low_rank=_DOWN_UP,
    flat=True,
    alpha=True,
    magnitude_columns=True,
    one_kind=False,
    whole_w1=True,
    peft=False,
)
"""Where not all of a file is LoRA. LyCORIS builds each module from its keys, with a DoRA by output row only, and fails
on a LoKr whose first factor is in two."""

TARGETS: dict[str, Target] = {
    target.name: target for target in (COMFYUI, DIFFUSERS_LAYOUT, KOHYA, AI_TOOLKIT, ONETRAINER, SIMPLETUNER)
}
LAYOUTS = tuple(TARGETS)
