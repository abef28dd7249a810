"""What the trainer saves: ComfyUI's layout of the kinds that it trains, and back, strictly and by official names alone.

Files of others, and other layouts, are read and written by reading.py and writing.py. These two stay apart from them on
purpose: the trainer checks what it saved by reading it back, and a reader that takes any ending, guesses a strength
from the header and leaves out placeholders of zero would take the result of a faulty writer too. They also ask for no
sizes of the base, and before the first step, when a save is tried, every change is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .canonical import Factor, LokrModule, LoraModule, Trained

PREFIX_COMFYUI = "diffusion_model."
FP32_PARTS = (".alpha", ".dora_scale")
"""Keys of ComfyUI's layout that stay in fp32 whatever the dtype of the file."""

_LORA = (".lora_down.weight", ".lora_up.weight")
_LOKR = (".lokr_w1", ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b")


def write_comfyui(modules: Trained) -> dict[str, Tensor]:
    """ComfyUI's own form: official names, the factors as they are, and an fp32 `alpha` per module.

    A DoRA has an fp32 `dora_scale` (out, 1) besides; with one dimension ComfyUI would spread it over the columns of a
    square weight. ComfyUI 0.33 computes dora_scale · (W + dW) / (‖W‖ + eps), the paper has ‖W + dW‖ there: so what is
    written is the magnitude times ‖W‖ / ‖W + dW‖, from which ComfyUI makes the trained weight, up to its eps (1e-7 in
    fp32, 1e-3 in fp16, 8e-3 in bf16, by the dtype that it merges in) and for the same base. LyCORIS and OneTrainer,
    which compute as the paper, would want the magnitude itself; ComfyUI's bypass loader takes neither.

    Raises:
        ValueError: a DoRA whose magnitude over the base's norm is not known.
    """
    state: dict[str, Tensor] = {}
    for name, module in modules.items():
        stem = PREFIX_COMFYUI + name
        if module.has_magnitude and module.magnitude_over_base is None:
            raise ValueError(
                f"{name} is a DoRA, which ComfyUI's layout holds relative to a base that is not known here"
            )
        for part, tensor in module.factors().items():
            state[f"{stem}.{part}.weight" if part.startswith("lora_") else f"{stem}.{part}"] = tensor.contiguous()
        state[f"{stem}.alpha"] = torch.tensor(float(module.alpha))
        if module.magnitude_over_base is not None:
            state[f"{stem}.dora_scale"] = module.magnitude_over_base.float().reshape(-1, 1)
    return state


def read_comfyui(state: Mapping[str, Tensor]) -> Trained:
    """Inverse of `write_comfyui`. A `dora_scale` is read as ComfyUI takes it: over the norm of the base's rows.

    Raises:
        ValueError: a key of another layout, a module of which a part is missing, a `dora_scale` that is not (out, 1).
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        for suffix in (*_LORA, *_LOKR, *FP32_PARTS):
            if key.startswith(PREFIX_COMFYUI) and key.endswith(suffix):
                name = key.removeprefix(PREFIX_COMFYUI).removesuffix(suffix)
                parts.setdefault(name, {})[suffix] = tensor
                break
        else:
            raise ValueError(f"{key} is not a key of ComfyUI's LoRA layout")
    return {name: _module(name, found) for name, found in parts.items()}


def _module(name: str, parts: dict[str, Tensor]) -> LoraModule | LokrModule:
    there = ", ".join(sorted(part.lstrip(".") for part in parts))
    magnitude = parts.pop(".dora_scale", None)
    if magnitude is not None:
        if magnitude.ndim != 2 or magnitude.shape[1] != 1:
            raise ValueError(f"{name} has a dora_scale of {list(magnitude.shape)}; wanted (out, 1)")
        magnitude = magnitude[:, 0]
    if set(parts) == {*_LORA, ".alpha"}:
        down, up, alpha = (parts[part] for part in (*_LORA, ".alpha"))
        return LoraModule(down, up, alpha.item(), magnitude_over_base=magnitude)
    w1, w2 = (_factor(parts, part) for part in (".lokr_w1", ".lokr_w2"))
    if w1 is not None and w2 is not None and set(parts) == {".alpha"}:
        return LokrModule(w1, w2, parts[".alpha"].item(), magnitude_over_base=magnitude)
    raise ValueError(
        f"{name} has only {there}; wanted lora_down, lora_up and alpha, or lokr_w1, lokr_w2 (or _a and _b of either) "
        "and alpha"
    )


def _factor(parts: dict[str, Tensor], name: str) -> Factor | None:
    """Takes a whole factor, or both parts of a decomposed one, out of the parts; None where neither is there."""
    if name in parts:
        return parts.pop(name)
    if f"{name}_a" in parts and f"{name}_b" in parts:
        return parts.pop(f"{name}_a"), parts.pop(f"{name}_b")
    return None
