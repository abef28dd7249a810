"""Adapters on a frozen base: PEFT injects and configures, Graft chooses the targets and the dtypes.

Each run is a named adapter. PEFT makes a second adapter active in silence and leaves the first trainable; here one
context manager decides which is active and which is trained.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ..lora_convert import Trained
from .adapter_layers import AdapterConfig, LoraLinear, lokr_shapes
from .errors import SettingsError, some
from .families import Family
from .lora_settings import LoraSettings
from .quantization import described_weights
from .quiet import quiet_torchao

with quiet_torchao():
    import peft


def resolve_targets(family: Family, linears: dict[str, nn.Linear], settings: LoraSettings) -> list[str]:
    """Official names of the Linears that the settings choose, in the model's order.

    Raises:
        SettingsError: a range that cannot be read, a choice that matches nothing, or a LoKr whose alpha would have no
            effect on some of the modules.
    """
    pattern = family.presets.get(settings.targets, settings.targets)
    try:
        chosen = [name for name in linears if re.fullmatch(pattern, name)]
    except re.error as error:
        raise SettingsError(f"targets {settings.targets!r} is no regular expression: {error}") from error
    if not chosen:
        raise SettingsError(
            f"targets {settings.targets!r} is none of {', '.join(family.presets)}, and as a regular expression it "
            f"matches no Linear of {family.title}, such as {some(list(linears), 2)}"
        )
    if settings.blocks.strip() != "all":
        wanted = _block_range(settings.blocks)
        numbers = {name: family.block_of(name) for name in linears}
        count = 1 + max(number for number in numbers.values() if number is not None)
        if max(wanted) >= count:
            raise SettingsError(f"blocks {settings.blocks!r}: {family.title} here has the blocks 0 to {count - 1}")
        chosen = [name for name in chosen if numbers[name] in wanted]
        if not chosen:
            raise SettingsError(f"targets {settings.targets!r} matches nothing in the blocks {settings.blocks!r}")
    if settings.kind == "lokr" and settings.alpha != settings.rank:
        whole = [name for name in chosen if _is_whole(linears[name], settings)]
        if whole:
            raise SettingsError(
                f"alpha is {settings.alpha:g} and rank {settings.rank}, but {len(whole)} of {len(chosen)} modules get "
                f"whole LoKr factors, which no reader scales: {some(whole)}; make alpha {settings.rank}"
            )
    return chosen


def _is_whole(linear: nn.Linear, settings: LoraSettings) -> bool:
    return lokr_shapes(linear.out_features, linear.in_features, settings.rank, settings.factor)[2]


def weight_sizes(linears: dict[str, nn.Linear], targets: list[str], settings: LoraSettings) -> list[int]:
    """Elements of each of the adapter's weights, module by module. The Linears may be on the meta device."""
    sizes = []
    for linear in (linears[name] for name in targets):
        rows, columns = linear.out_features, linear.in_features
        if settings.kind == "lokr":
            w1, w2, whole = lokr_shapes(rows, columns, settings.rank, settings.factor)
            sizes += [math.prod(w1), *([math.prod(w2)] if whole else [w2[0] * settings.rank, settings.rank * w2[1]])]
        else:
            sizes += [settings.rank * columns, rows * settings.rank, *([rows] if settings.kind == "dora" else [])]
    return sizes


def _block_range(text: str) -> set[int]:
    """`0,4,8-11` → {0, 4, 8, 9, 10, 11}."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise SettingsError(f"blocks {text!r} cannot be read; wanted `all`, or numbers and ranges such as 0-13,20")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return numbers


def inject(
    model: nn.Module,
    name: str,
    settings: LoraSettings,
    targets: list[str],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Adds a named adapter whose change is zero: one factor is zero, the others are drawn from the generator.

    The adapter is neither active nor trainable until `active` says so.

    Args:
        model: the base, whose Linears may be plain or `FrozenLinear`.
        name: letters, digits, `_` and `-`.
        settings: see `LoraSettings`.
        targets: from `resolve_targets`.
        generator: a CPU generator; the only source of the initial weights.
        dtype: dtype of the master weights.
    """
    if not re.fullmatch(r"[\w-]+", name) or hasattr(nn.ModuleDict(), name):
        # PEFT keeps adapters in module dictionaries, where `train` or `keys` would hide a method.
        raise SettingsError(f"adapter name {name!r} cannot be used; wanted letters, digits, _ and -, such as {name}_1")
    if name in adapter_names(model):
        raise SettingsError(f"an adapter named {name!r} is on this base already; choose another name")
    before = _state(model)
    config = AdapterConfig(
        kind=settings.kind,
        factor=settings.factor,
        r=settings.rank,
        lora_alpha=settings.alpha,  # PEFT takes any number and only divides it
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        target_modules="|".join(re.escape(target) for target in targets),
        init_lora_weights=False,
    )
    config._register_custom_module({nn.Linear: LoraLinear})
    # PEFT draws initial weights from torch's own generator; they are replaced below, and the generator is put back.
    quiet = warnings.catch_warnings()
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), described_weights(), quiet:
        # PEFT warns of a second adapter's shared configuration; every adapter has its own here.
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    layers = adapted(model, name)
    if set(layers) != set(targets):
        raise RuntimeError(f"PEFT adapted {len(layers)} modules where {len(targets)} were chosen")
    # To where the last norm is: a Linear's weight, a text trunk, or another adapter may wait on the CPU.
    *_, last = (parameter for owner, parameter in model.named_parameters() if not is_adapters_own(owner))
    with torch.inference_mode(False):
        for layer in layers.values():
            layer.start(name, generator, last.device, dtype)
    for layer in layers.values():
        layer.set_adapter([], inference_mode=True)
        layer.lora_dropout[name].eval()
    _restore(before)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear of the bare model by official name: the adapters' own are left out, adapted ones are in."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name.removesuffix(".base_layer"): module for name, module in found.items() if ".lora_" not in name}


def is_adapters_own(name: str) -> bool:
    """Whether a module or parameter of this name is part of an adapter, and not of the base."""
    return any(part.startswith("lora_") or part == "lokr" for part in name.split("."))


def _layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapted(model: nn.Module, name: str) -> dict[str, LoraLinear]:
    """Official module name → the layer that carries the adapter."""
    return {module: layer for module, layer in _layers(model).items() if name in layer.names}


def adapter_names(model: nn.Module) -> list[str]:
    """Every adapter on the model, sorted."""
    return sorted({name for layer in _layers(model).values() for name in layer.names})


def unused_name(model: nn.Module, name: str) -> str:
    """The name, or with the first number after it that no adapter on the model has."""
    taken, candidate, number = adapter_names(model), name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The adapter's trained weights in a fixed order, module by module."""
    return [weight for layer in adapted(model, name).values() for weight in layer.weights(name).values()]


@contextmanager
def active(model: nn.Module, name: str | Mapping[str, float] | None, train: bool = False) -> Iterator[None]:
    """Makes one adapter active, several with strengths, or with None the bare base; the rest is off and frozen.

    Dropout acts while the adapter is trained, and only then.

    At the end everything is as it was, also after an exception.

    Args:
        model: the base.
        name: of the adapter; or names with the number that each one's change is multiplied by, in the order in which
            they are added: at 1 the numbers are those of the name alone, at 0 the adapter is left out.
        train: make it trainable, which only one at strength 1 can be.

    Raises:
        KeyError: there is no adapter of that name.
        ValueError: several, or one at another strength than 1, are to be trained.
    """
    wanted = {} if name is None else {name: 1.0} if isinstance(name, str) else dict(name)
    unknown = [one for one in wanted if one not in adapter_names(model)]
    if unknown:
        raise KeyError(f"no adapter named {unknown[0]!r} on this model; there are {adapter_names(model)}")
    if train and list(wanted.values()) not in ([], [1.0]):
        raise ValueError(f"one adapter at strength 1 can be trained, not {wanted}")
    shown = {one: strength for one, strength in wanted.items() if strength}
    layers = _layers(model)
    before = _state(model)
    try:
        for layer in layers.values():
            layer._disable_adapters = not shown
            layer._active_adapter = [one for one in shown if one in layer.names]
            layer.strengths = shown
        for parameter, _ in before.flags:
            parameter.requires_grad_(False)
        for dropout, _ in before.dropouts:
            dropout.eval()
        if train:
            for one in shown:
                for layer in adapted(model, one).values():
                    layer.lora_dropout[one].train()
                for parameter in parameters(model, one):
                    parameter.requires_grad_(True)
        yield
    finally:
        _restore(before)


class _State(NamedTuple):
    """Which adapter every layer applies, and which parameters train."""

    layers: list[tuple[LoraLinear, list[str], bool, Mapping[str, float]]]
    flags: list[tuple[nn.Parameter, bool]]
    dropouts: list[tuple[nn.Module, bool]]


def _state(model: nn.Module) -> _State:
    layers = [
        (layer, list(layer.active_adapters), layer.disable_adapters, layer.strengths)
        for layer in _layers(model).values()
    ]
    flags = [(p, p.requires_grad) for name in adapter_names(model) for p in parameters(model, name)]
    dropouts = [(d, d.training) for layer in _layers(model).values() for d in layer.lora_dropout.values()]
    return _State(layers, flags, dropouts)


def _restore(state: _State) -> None:
    for layer, names, disabled, strengths in state.layers:
        layer._disable_adapters = disabled
        layer._active_adapter = names
        layer.strengths = strengths
    for parameter, flag in state.flags:
        parameter.requires_grad_(flag)
    for dropout, flag in state.dropouts:
        dropout.train(flag)


def to_canonical(model: nn.Module, name: str) -> Trained:
    """The adapter's weights, copied to the CPU, by official module name."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    modules: Trained = {}
    for module, layer in adapted(model, name).items():
        settings = LoraSettings("lora", layer.r[name], layer.lora_alpha[name], layer.use_rslora[name])
        modules[module] = layer.canonical(name, settings.file_alpha, dtype)
    return modules


def move(model: nn.Module, name: str, device: torch.device | str) -> None:
    """Puts the adapter's weights on a device, such as the CPU while it is not active."""
    with torch.inference_mode(False), torch.no_grad():
        for layer in adapted(model, name).values():
            layer.move(name, device)


def remove(model: nn.Module, name: str) -> None:
    """Takes the adapter off the base and frees its weights; layers without any adapter become plain Linears again."""
    for module, layer in list(_layers(model).items()):
        if name in layer.names:
            # PEFT would activate and train another adapter in place of an active one that goes.
            layer._active_adapter = [other for other in layer.active_adapters if other != name]
            layer.delete_adapter(name)
        if not layer.names:
            owner, _, leaf = module.rpartition(".")
            setattr(model.get_submodule(owner), leaf, layer.base_layer)
    model.peft_config.pop(name, None)  # type: ignore[operator, union-attr]  # PEFT's note of what it injected
