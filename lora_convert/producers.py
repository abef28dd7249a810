"""Who wrote a LoRA file and in which layout, as far as its keys and header tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .keys import A_B, DOWN_UP, Key
from .naming import DIFFUSERS, OFFICIAL

COMFYUI_TRAINER = "ComfyUI TrainLoraNode"


@dataclass(frozen=True)
class Style:
    """How most keys of a file are written.

    Attributes:
        prefix: before the module's name.
        naming: `official` or `diffusers`; Ideogram 4's common names count as what the file has besides.
        flat: underscores in place of dots.
        pair: `lora_A/lora_B`, `lora_down/lora_up`, or empty without LoRAs.
        alpha: some module has a key `alpha`.
        fused: q, k and v are one; None where the file has none.
        mixed: keys are written in several ways.
    """

    prefix: str
    naming: str
    flat: bool
    pair: str
    alpha: bool
    fused: bool | None
    mixed: bool


def style_of(keys: Iterable[Key], family: str, fused: bool | None) -> Style:
    """The most common way of writing."""
    keys = list(keys)
    places = [place for key in keys for place in key.places if place.family == family]
    named = Counter(place.naming for place in places if place.naming in (OFFICIAL, DIFFUSERS))
    pairs = Counter(key.pair for key in keys if key.pair)
    prefix = Counter(key.prefix for key in keys).most_common(1)[0][0]
    return Style(
        prefix=prefix,
        naming=named.most_common(1)[0][0] if named else OFFICIAL,
        # A name of one word tells nothing, a prefix does.
        flat=prefix.endswith("_") or Counter(place.flat for place in places).most_common(1)[0][0],
        pair=pairs.most_common(1)[0][0] if pairs else "",
        alpha=any(key.part == "alpha" for key in keys),
        fused=fused,
        mixed=max(len({key.prefix for key in keys}), len(named), len(pairs)) > 1,
    )


def layout_of(style: Style) -> str:
    """Name of the layout that writing.py would write so, or `other: ` and a description."""
    official = style.naming == OFFICIAL
    described = [style.prefix or "no prefix", f"{style.naming} names", "flat" if style.flat else "", style.pair]
    other = "other: " + ", ".join(filter(None, described))
    if style.mixed:
        return f"{other}, mixed"
    match style.prefix, style.flat:
        case "diffusion_model.", False if official:
            if style.pair == A_B:
                return "onetrainer" if style.alpha else "ai-toolkit"
            return "comfyui"
        case "lora_unet_", True if official and style.pair != A_B:
            return "kohya"
        case "transformer.", False if style.pair == A_B and not style.alpha:
            if style.fused:
                return "simpletuner"
            if not official or style.fused is None:
                return "diffusers"
    return other


def producer_of(style: Style, metadata: Mapping[str, str], alphas: Iterable[float], parts: Iterable[str]) -> str:
    """The program that wrote the file.

    Args:
        style: of its keys.
        metadata: of its header.
        alphas: values of its `alpha` keys.
        parts: names of the parts that occur.
    """
    alphas, parts = set(alphas), set(parts)
    if "graft" in metadata:
        return "Graft"
    if any(name.startswith("ot_") for name in metadata):
        return "OneTrainer"
    if "ai-toolkit" in metadata.get("software", ""):
        return "ai-toolkit"
    if "lycoris_config" in metadata or style.prefix == "lycoris_":
        return "SimpleTuner"
    if style.prefix == "conditional_transformer." or (
        style.prefix == "base_model.model." and "lora_alpha" in metadata and "lora_rank" in metadata
    ):
        return "fal"
    if style.prefix == "lora_unet_":
        if any(name.startswith(("ss_", "sshs_")) for name in metadata):
            return "musubi-tuner"
        return "unknown (musubi-tuner or OneTrainer)"
    if style.prefix == "transformer.":
        if style.pair == DOWN_UP:
            return "OneTrainer"
        return "SimpleTuner" if style.fused else "diffusers / PEFT"
    if style.prefix == "diffusion_model.":
        if style.naming == DIFFUSERS:
            return "SimpleTuner"
        if style.pair == A_B:
            return "unknown (OneTrainer or SimpleTuner)" if style.alpha else "ai-toolkit"
        if "magnitude" in parts:
            return "ai-toolkit"
        if style.pair == DOWN_UP and not metadata and alphas == {1.0}:
            return COMFYUI_TRAINER
    if style.prefix == "" and style.pair == A_B:
        return "OneTrainer"
    return f"unknown ({layout_of(style)})"
