"""diffusers + PEFT as they are used to train a LoRA: the peer that Graft's step is measured against.

Quantised weights are torchao's weight-only ones, the modules that are adapted and quantised those that Graft takes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from graft_lora.trainer import adapters
from graft_lora.trainer.families import FAMILIES, Transformer
from graft_lora.trainer.lora_settings import LoraSettings
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_, to_nf4

CONFIGS = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}
ADAPTER = "default"  # as diffusers names the first


def prepare(name: str, twin: nn.Module, precision: str, lora: LoraSettings, dtype: torch.dtype) -> list[nn.Parameter]:
    """Quantises and adapts diffusers' transformer in place.

    Args:
        name: of the family.
        twin: in the dtype that it computes in, on any device, the meta device included.
        precision: `int8`, `fp8` or `nf4`; with any other nothing is quantised.
        lora: rank, alpha and targets.
        dtype: of the adapter's weights.

    Returns:
        The adapter's weights, which train.
    """
    twin.requires_grad_(False)
    linears = {name: module for name, module in twin.named_modules() if isinstance(module, nn.Linear)}
    official = {linear: official_module(name, linear)[0] for linear in linears}
    quantised = {n for n in linears if not re.fullmatch(FAMILIES[name].never_quantised, official[n])}
    if precision in CONFIGS:
        quantize_(twin, CONFIGS[precision](), lambda _, name: name in quantised)
    elif precision == "nf4":
        for linear in quantised:
            linears[linear].weight = nn.Parameter(to_nf4(linears[linear].weight), requires_grad=False)
    targets = [linear for linear in linears if re.fullmatch(FAMILIES[name].presets[lora.targets], official[linear])]
    with warnings.catch_warnings():
        # That merging, which nobody does here, needs more.
        warnings.simplefilter("ignore")
        twin.add_adapter(peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets), ADAPTER)
    parameters = [parameter for owner, parameter in twin.named_parameters() if ".lora_" in owner]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    twin.train()
    return parameters


def official_module(name: str, module: str) -> tuple[str, int | None]:
    """Official name of diffusers' module, and which third of it this is, where the official one is fused."""
    official, member = FAMILIES[name].official_name(f"{module}.weight")
    return official.removesuffix(".weight"), member


def set_checkpointing(twin: Any, on: bool) -> None:
    """diffusers' own, of each block."""
    if on:
        twin.enable_gradient_checkpointing()
    else:
        twin.disable_gradient_checkpointing()


def pairs(name: str, twin: nn.Module, model: Transformer, adapter: str) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """(peer's B, Graft's B, which third of its rows) for each module that the peer adapts; A comes with `copy`."""
    layers = adapters.adapted(model, adapter)
    for module, layer in twin.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            official, member = official_module(name, module)
            yield layer.lora_B[ADAPTER].weight, layers[official].lora_B[adapter].weight, member


@torch.no_grad()
def copy_adapter(name: str, twin: nn.Module, model: Transformer, adapter: str) -> None:
    """Gives the peer Graft's adapter. Where Graft has one of a fused qkv, each of q, k and v gets its A."""
    layers = adapters.adapted(model, adapter)
    for module, layer in twin.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.lora_A[ADAPTER].weight.copy_(layers[official_module(name, module)[0]].lora_A[adapter].weight)
    for theirs, ours, member in pairs(name, twin, model, adapter):
        theirs.copy_(third(ours, member))


def third(rows: Tensor, member: int | None) -> Tensor:
    """All rows, or the rows of q, k or v."""
    return rows if member is None else rows.chunk(3)[member]


# --- without data -----------------------------------------------------------------------------------------------------


def leaves(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of torchao's is made of; a plain one is its own."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [leaf for part in tensor.__tensor_flatten__()[0] for leaf in leaves(getattr(tensor, part))]


def give_storages(twin: nn.Module) -> list[Tensor]:
    """Puts tensors on the CPU in the place of those on the meta device, and returns them all."""
    made: list[Tensor] = []

    def empty(tensor: Tensor) -> Any:
        if not is_traceable_wrapper_subclass(tensor):
            made.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            return made[-1]
        parts, context = tensor.__tensor_flatten__()
        inner = {part: empty(getattr(tensor, part)) for part in parts}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())

    for module in twin.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(empty(parameter), requires_grad=parameter.requires_grad)
                made += leaves(module._parameters[key])
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = empty(buffer)
    return made


@contextmanager
def cpu_attention() -> Iterator[None]:
    """While it lasts SDPA takes the kernel that it takes on the CPU, also for tensors without data.

    For those it would take the formula, which keeps L × L numbers for each head.
    """
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = _sdpa
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if dropout_p or is_causal or enable_gqa:
        raise NotImplementedError("diffusers calls SDPA in another way than this stands in for")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, attn_mask=attn_mask, scale=scale)[0]
