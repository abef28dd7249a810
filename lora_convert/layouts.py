"""Layouts: how a LoRA file names its keys. Canonical form → state dict, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .canonical import Canonical, LoraModule
from .tables import TABLES

PREFIX_COMFYUI = "diffusion_model."
PREFIX_DIFFUSERS = "transformer."


def write_comfyui(modules: Canonical, family: str) -> dict[str, Tensor]:
    """ComfyUI's own form: official names, `lora_down`, `lora_up` as they are, and an fp32 `alpha` per module."""
    state: dict[str, Tensor] = {}
    for name, module in modules.items():
        stem = PREFIX_COMFYUI + name
        state[f"{stem}.lora_down.weight"] = module.down.contiguous()
        state[f"{stem}.lora_up.weight"] = module.up.contiguous()
        state[f"{stem}.alpha"] = torch.tensor(float(module.alpha))
    return state


def read_comfyui(state: Mapping[str, Tensor]) -> Canonical:
    """Inverse of `write_comfyui`.

    Raises:
        ValueError: a key of another layout, or a module of which a part is missing.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        for suffix in (".lora_down.weight", ".lora_up.weight", ".alpha"):
            if key.startswith(PREFIX_COMFYUI) and key.endswith(suffix):
                name = key.removeprefix(PREFIX_COMFYUI).removesuffix(suffix)
                parts.setdefault(name, {})[suffix] = tensor
                break
        else:
            raise ValueError(f"{key} is not a key of ComfyUI's LoRA layout")
    modules: Canonical = {}
    for name, found in parts.items():
        if len(found) != 3:
            raise ValueError(f"{name} has only {', '.join(sorted(found))}; wanted lora_down, lora_up and alpha")
        down, up, alpha = found[".lora_down.weight"], found[".lora_up.weight"], found[".alpha"]
        modules[name] = LoraModule(down, up, alpha.item())
    return modules


def write_diffusers(modules: Canonical, family: str) -> dict[str, Tensor]:
    """What diffusers' loaders take: its names, q, k and v split, the scale folded into B, no alpha.

    Raises:
        ValueError: a module that diffusers has no name for.
    """
    table = TABLES[family]
    state: dict[str, Tensor] = {}
    for name, module in modules.items():
        try:
            members = table.to_diffusers(name)
        except KeyError:
            raise ValueError(f"{name}: diffusers' {family} has no such module") from None
        # One member is the module itself; several are its rows, cut evenly.
        for member, rows in zip(members, module.up.chunk(len(members)), strict=True):
            stem = PREFIX_DIFFUSERS + member
            # Copies, since safetensors refuses two keys that share storage.
            state[f"{stem}.lora_A.weight"] = module.down.clone()
            state[f"{stem}.lora_B.weight"] = (rows.float() * module.scale).to(rows.dtype).contiguous()
    return state
