"""Verdicts on readers: diffusers against its own loader, ComfyUI against its rules written out, the others by file."""

from __future__ import annotations

import json

import lora_files
import pytest
import tiny
import torch
from graft_lora.lora_convert.readers import verdicts
from graft_lora.lora_convert.reading import read_lora
from lora_files import loha, lokr, lora
from safetensors.torch import save_file
from torch import nn

A_B = (".lora_A.weight", ".lora_B.weight")
DEFAULT_A_B = (".lora_A.default.weight", ".lora_B.default.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")


def judged(file, sizes=None):
    read = read_lora(file.state, file.metadata, sizes or lora_files.sizes(file.family))
    return verdicts(file.state, file.metadata, read)


def with_lengths(parts, name, shape=lambda out, columns: (out, 1)):
    """The same parts, and a tensor of lengths."""

    def more(out, columns, generator):
        tensors, change = parts(out, columns, generator)
        return tensors | {name: 1 + torch.rand(shape(out, columns), generator=generator)}, change

    return more


# ---- diffusers, against itself


def diffusers_computes(file, tmp_path):
    """What diffusers' own loader makes of a file: `not`, `fully`, or `else` where it computes something else."""
    from diffusers.loaders import lora_pipeline

    mixin = {"krea2": lora_pipeline.Krea2LoraLoaderMixin, "ideogram4": lora_pipeline.Ideogram4LoraLoaderMixin}
    model = tiny.build(file.family)
    twin = tiny.diffusers_twin(file.family, model)
    owner = mixin[file.family]()
    owner.transformer, owner.components, owner.hf_device_map = twin, {}, None
    path = tmp_path / "a.safetensors"
    save_file(file.state, path, {"format": "pt"} | file.metadata)
    arguments = tiny.inputs(file.family)
    with torch.no_grad():
        before = tiny.diffusers_velocity(file.family, twin, *arguments.values())
        try:
            owner.load_lora_weights(path)
        except (ValueError, LookupError, RuntimeError):
            return "not"
        found = tiny.diffusers_velocity(file.family, twin, *arguments.values())
        if tiny.relative(found, before) < 1e-6:
            return "not"
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        sizes = lora_files.sizes(file.family)
        for name, change in file.wanted.items():
            members = sizes.table.members(name) or (name,)
            for member, rows in zip(members, change.split([len(linears[m].weight) for m in members]), strict=True):
                linears[member].weight += rows
        return "fully" if tiny.relative(found, model(**arguments)) < 1e-4 else "else"


LEAVES = [
    "to_q", "to_k", "to_v", "to_out.0", "to_gate", "down", "up", "img_in", "linear_2", "time_mod_proj", "w2",
    "final_layer.linear", "adaln_modulation", "final_layer.adaln_modulation",
]  # fmt: skip


def peft(rank, alpha):
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": LEAVES}
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}


PLAIN = {
    "krea2": ("blocks.1.attn.qkv", "blocks.0.attn.wo", "blocks.1.mlp.down"),
    "ideogram4": ("layers.1.attention.qkv", "layers.0.attention.o", "layers.0.feed_forward.w2"),
}
DIFFUSERS = {  # what → prefix, naming, flat, parts, header, whether it is of the blocks alone
    "its own": ("transformer.", "diffusers", False, lora(*A_B), {}, False),
    "its own with alpha in the header": ("transformer.", "diffusers", False, lora(*A_B, scale=2.0), peft(3, 6), False),
    "its own with kohya's header": (
        "transformer.", "diffusers", False, lora(*A_B, scale=2.0), {"lora_rank": "3", "lora_alpha": "6"}, False,
    ),
    "its own with another's header": ("transformer.", "diffusers", False, lora(*A_B), peft(5, 5), False),
    "down and up": ("transformer.", "diffusers", False, lora(*DOWN_UP), {}, False),
    "official under transformer": ("transformer.", "official", False, lora(*A_B), {}, False),
    "fused under transformer": ("transformer.", "fused", False, lora(*A_B), {}, False),
    "ai-toolkit": ("diffusion_model.", "official", False, lora(*A_B), {}, False),
    "ai-toolkit, blocks": ("diffusion_model.", "official", False, lora(*A_B), {}, True),
    "with alpha": ("diffusion_model.", "official", False, lora(*A_B, alpha=1.5), {}, True),
    "ComfyUI": ("diffusion_model.", "official", False, lora(*DOWN_UP, alpha=1.5), {}, True),
    "default": ("diffusion_model.", "official", False, lora(*DEFAULT_A_B), {}, True),
    "fal, Krea 2": ("base_model.model.", "official", False, lora(*A_B), {}, True),
    "fal, Ideogram 4": ("conditional_transformer.", "official", False, lora(*A_B, alpha=6.0), {}, True),
    "bare": ("", "official", False, lora(*A_B), {}, True),
    "bare diffusers": ("", "diffusers", False, lora(*A_B), {}, True),
    "SimpleTuner comfyui": ("diffusion_model.", "diffusers", False, lora(*A_B, alpha=3.0), {}, True),
    "musubi-tuner": ("lora_unet_", "official", True, lora(*DOWN_UP, alpha=1.5), {}, True),
    "LyCORIS": ("lycoris_", "fused", True, lokr(), {}, True),
    "LoKr": ("diffusion_model.", "official", False, lokr(), {}, True),
    "LoHa": ("transformer.", "diffusers", False, loha(), {}, True),
    "dora_scale": ("diffusion_model.", "official", False, with_lengths(lora(*A_B), ".dora_scale"), {}, True),
    "magnitude": ("diffusion_model.", "official", False, with_lengths(lora(*A_B), ".magnitude"), {}, True),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFUSERS)
def test_diffusers_as_it_loads_itself(what, family_name, tmp_path):
    prefix, naming, flat, parts, metadata, blocks = DIFFUSERS[what]
    only = PLAIN[family_name] if blocks else None
    file = lora_files.write(family_name, parts, prefix, naming, flat, metadata, only)
    verdict = judged(file)["diffusers"]
    if what == "dora_scale":
        # Without it the LoRA is loaded, which is not what a DoRA says.
        assert diffusers_computes(file, tmp_path) == "fully"
        assert verdict.loads == "wrongly"
        return
    found = diffusers_computes(file, tmp_path)
    assert {"partly": "else", "wrongly": "else"}.get(verdict.loads, verdict.loads) == found, verdict
