"""Tiny models of both families, with random weights, and their twins in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from graft_lora.trainer import adapters, attention, memory
from graft_lora.trainer.base_model import Base, load_base
from graft_lora.trainer.families import FAMILIES, Transformer
from graft_lora.trainer.families.ideogram4 import IMAGE_POSITION, Ideogram4Config, from_tokens, to_tokens
from graft_lora.trainer.families.krea2 import Krea2Config, patchify, unpatchify
from graft_lora.trainer.lora_settings import LoraSettings
from safetensors.torch import save_file
from torch import Tensor, nn

NAMES = ("krea2", "ideogram4")
CONFIGS = {
    "krea2": Krea2Config(
        width=256, heads=2, kv_heads=1, mlp=256, blocks=2, text_width=40, text_layers=3,
        text_heads=2, text_kv_heads=2, text_mlp=64,
    ),
    "ideogram4": Ideogram4Config(width=256, heads=2, mlp=320, layers=2, time_width=64, text_features=96),
}  # fmt: skip
WIDTHS = {"krea2": 120, "ideogram4": 96}
# Not square: rows and columns taken for one another would show.
LATENTS = {"krea2": (16, 6, 10), "ideogram4": (128, 3, 5)}


def build(name: str, seed: int = 0, config: Any = None) -> Transformer:
    """A model, by default the tiny one, whose every parameter is random, norms and tables too, so that none can be left
    out unnoticed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[name].build(config or CONFIGS[name])
        for parameter_name, parameter in model.named_parameters():
            std = 1 / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 0.2
            nn.init.normal_(parameter, std=std)
            if parameter.ndim == 1 and "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.data += 1
    return model


def write(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32, prefix: str = "") -> Path:
    """The model as an official file."""
    save_file({prefix + k: v.detach().to(dtype).contiguous() for k, v in model.state_dict().items()}, path)
    return path


def loaded(folder: Path, name: str, precision: str = "int8", compute: str = "fp32") -> Base:
    """The tiny model from its file, which is written once into the folder."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        write(build(name), path)
    return load_base(path, precision, compute)


def adapt(base: Base, settings: LoraSettings, name: str = "a") -> None:
    """Puts an adapter on the base, with weights as after some training."""
    targets = adapters.resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, name, settings, targets, torch.Generator().manual_seed(0))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in adapters.parameters(base.model, name):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def dtypes_in_training(base: Base, adapter: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """dtypes of every adapted layer's input and output in one forward pass, whose backward pass is run too."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for layer in adapters.adapted(base.model, adapter).values():
        layer.register_forward_hook(lambda _m, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    with adapters.active(base.model, adapter, train=True):
        base.model(**inputs(base.family.name)).sum().backward()
    assert seen
    return seen


def loss_and_gradients(base: Base, adapter: str, recomputing: bool) -> list[Tensor]:
    """A loss, and the gradients of the adapter's weights, with or without activation checkpointing."""
    blocks = base.family.blocks(base.model).values() if recomputing else []
    with adapters.active(base.model, adapter, train=True), attention.training_backends(), memory.checkpointed(blocks):
        loss = base.model(**inputs(base.family.name)).square().mean()
        loss.backward()
    weights = adapters.parameters(base.model, adapter)
    found = [loss.detach(), *(weight.grad for weight in weights)]
    for weight in weights:
        weight.grad = None
    return found


def inputs(name: str, batch: int = 2, tokens: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Arguments of a forward pass with unequal text lengths. Sigmas are exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    if batch > 1:
        mask[1, tokens - 3 :] = False
    conditioning = torch.randn(batch, tokens, WIDTHS[name], generator=generator) * mask[..., None]
    return {
        "latents": torch.randn(batch, *LATENTS[name], generator=generator),
        "sigma_B": torch.tensor([0.25, 0.75][:batch]),
        "conditioning": conditioning,
        "mask_BT": mask,
    }


def diffusers_model(name: str, config: Any = None) -> nn.Module:
    """diffusers' transformer of the same sizes, on the current default device."""
    import diffusers

    c = config or CONFIGS[name]
    if name == "krea2":
        return diffusers.Krea2Transformer2DModel(
            num_layers=c.blocks, num_attention_heads=c.heads, attention_head_dim=c.head_width,
            num_key_value_heads=c.kv_heads, intermediate_size=c.mlp, text_hidden_dim=c.text_width,
            num_text_layers=c.text_layers, text_num_attention_heads=c.text_heads,
            text_num_key_value_heads=c.text_kv_heads, text_intermediate_size=c.text_mlp,
        )  # fmt: skip
    return diffusers.Ideogram4Transformer2DModel(
        num_layers=c.layers, attention_head_dim=c.head_width, num_attention_heads=c.heads,
        intermediate_size=c.mlp, adaln_dim=c.time_width, llm_features_dim=c.text_features,
    )  # fmt: skip


def diffusers_twin(name: str, model: nn.Module, config: Any = None) -> nn.Module:
    """diffusers' transformer with the same weights, mapped by name."""
    twin = diffusers_model(name, config)
    own = dict(model.named_parameters())
    used = set()
    with torch.no_grad():
        for twin_name, parameter in twin.named_parameters():
            official, member = FAMILIES[name].official_name(twin_name)
            used.add(official)
            value = own[official] if member is None else own[official].chunk(3)[member]
            parameter.copy_(value.reshape(parameter.shape))
    assert used == set(own), f"left out: {set(own) - used}"
    return twin


def diffusers_velocity(
    name: str,
    twin: nn.Module,
    latents: Tensor,
    sigma_B: Tensor,
    conditioning: Tensor,
    mask_BT: Tensor | None,
    config: Any = None,
) -> Tensor:
    """diffusers' forward in Graft's convention: its packing, positions, indicators and sign, written out here."""
    batch, texts = conditioning.shape[:2]
    dtype = next(twin.parameters()).dtype
    if mask_BT is None:
        mask_BT = torch.ones(batch, texts, dtype=torch.bool)
    rows, columns = (side // 2 if name == "krea2" else side for side in latents.shape[-2:])
    grid = torch.stack(
        [
            torch.zeros(rows * columns, dtype=torch.long),
            torch.arange(rows).repeat_interleave(columns),
            torch.arange(columns).repeat(rows),
        ],
        dim=1,
    )
    if name == "krea2":
        ids = torch.cat([torch.zeros(texts, 3, dtype=torch.long), grid]).float()
        stacked = conditioning.unflatten(-1, ((config or CONFIGS[name]).text_layers, -1))
        out = twin(patchify(latents).to(dtype), stacked.to(dtype), sigma_B.to(dtype), ids, mask_BT).sample
        return unpatchify(out, rows, columns)
    length = texts + rows * columns
    tokens = torch.zeros(batch, length, latents.shape[1], dtype=dtype)
    tokens[:, texts:] = to_tokens(latents).to(dtype)
    features = torch.zeros(batch, length, conditioning.shape[-1], dtype=dtype)
    features[:, :texts] = conditioning.to(dtype)
    text_ids = torch.arange(texts)[:, None].expand(texts, 3)
    ids = torch.cat([text_ids, grid + IMAGE_POSITION]).expand(batch, -1, -1)
    segments = torch.ones(batch, length, dtype=torch.long)
    indicator = torch.full((batch, length), 2)
    indicator[:, :texts] = torch.where(mask_BT, 3, 0)
    segments[:, :texts] = torch.where(mask_BT, 1, -1)
    out = twin(tokens, (1 - sigma_B).to(dtype), features, ids, segments, indicator).sample
    return -from_tokens(out[:, texts:], rows, columns)


def relative(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in fp64."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
