"""Converted files through ComfyUI's own key map, loader and weight adapters: every key taken, every weight ours."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tiny
import torch
from graft_lora.lora_convert.convert import convert_state
from lora_files import MODULES, loha, lokr, lora, sizes, write
from torch import nn

A_B = (".lora_A.weight", ".lora_B.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")
# Source → parts, prefix, naming of either family, flat.
SOURCES = {
    "diffusers": (lora(*A_B, alpha=2.0), "transformer.", ("diffusers", "diffusers"), False),
    "ai-toolkit": (lora(*A_B), "diffusion_model.", ("official", "official"), False),
    "fal": (lora(*A_B, alpha=2.0), "base_model.model.", ("official", "official"), False),
    "SimpleTuner": (lora(*A_B, alpha=2.0), "transformer.", ("fused", "official"), False),
    "SimpleTuner, LyCORIS": (lokr(rank=2, alpha=3.0), "lycoris_", ("fused", "official"), True),
    "musubi-tuner": (lora(*DOWN_UP, alpha=2.0), "lora_unet_", ("official", "official"), True),
    "OneTrainer, old": (lora(*DOWN_UP, alpha=2.0), "transformer.", ("diffusers", "diffusers"), False),
    "LoHa": (loha(alpha=0.5), "diffusion_model.", ("official", "official"), False),
    "LoKr": (lokr(), "diffusion_model.", ("official", "official"), False),
}


def host_of(comfy, name):
    """ComfyUI's model class of the family around our tiny transformer, whose names are the official ones."""
    kind = next(
        getattr(comfy.model_base, attribute)
        for attribute in dir(comfy.model_base)
        if attribute.lower() in (name, f"{name}base") or attribute.lower().startswith(name)
    )
    host = kind.__new__(kind)
    nn.Module.__init__(host)
    host.diffusion_model = tiny.build(name)
    host.model_config = SimpleNamespace(unet_config={"layers": 2})
    return host


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_is_taken_and_the_patched_weights_are_ours(comfy, family_name, source, caplog):
    parts, prefix, naming, flat = SOURCES[source]
    file = write(family_name, parts, prefix, naming[family_name == "ideogram4"], flat)
    state, _, _ = convert_state(file.state, file.metadata, "comfyui", sizes=sizes(family_name))
    host = host_of(comfy, family_name)
    with caplog.at_level(logging.WARNING):
        patches = comfy.lora.load_lora(dict(state), comfy.lora.model_lora_keys_unet(host, {}), log_missing=True)
    assert not caplog.messages
    weights = host.state_dict()
    for module, wanted in file.wanted.items():
        official = MODULES[family_name][module][0]
        rows = [len(weights[f"diffusion_model.{name}.weight"]) for name in official]
        for name, change in zip(official, wanted.split(rows), strict=True):
            key = f"diffusion_model.{name}.weight"
            base = weights[key].detach().clone()
            found = comfy.lora.calculate_weight([(1.0, patches[key], 1.0, None, None)], base.clone(), key)
            assert tiny.relative(found, base + change) < 1e-6, name
            assert not torch.equal(found, base)
