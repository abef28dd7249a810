"""Adapters on a frozen base: PEFT injects and configures, Graft chooses the targets and the dtypes.

Each run is a named adapter. PEFT makes a second adapter active in silence and leaves the first trainable; here one
context manager decides which is active and which is trained.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lora_convert import Canonical, LoraModule
from .errors import SettingsError, some
from .families import Family
from .quantization import described_weights
from .quiet import quiet_torchao

with quiet_torchao():
    import peft
    from peft.tuners.lora import Linear as PeftLinear


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is.

    Attributes:
        rank: rows of A and columns of B.
        alpha: strength; the change is alpha / rank · B · A.
        rslora: divide alpha by the square root of the rank instead, so that high ranks are not held back (arXiv
            2312.03732). In the file alpha is scaled up to match, since readers divide by the rank.
        targets: a preset of the family (`attention`, `attention+mlp`, `all`) or a regular expression that must match
            an official module name whole.
        blocks: which transformer blocks, such as `all`, `0-13` or `0,4,8-11`; modules outside the blocks are left out
            when a range is given.
        dropout: share of the adapter's inputs that is zeroed in training.
    """

    rank: int = 32
    alpha: float = 32.0
    rslora: bool = False
    targets: str = "attention+mlp"
    blocks: str = "all"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 4096:
            raise SettingsError(f"rank is {self.rank}; wanted 1 to 4096, 16 or 32 being usual")
        if not self.alpha > 0:
            raise SettingsError(f"alpha is {self.alpha}; wanted a positive number, the rank being usual")
        if self.alpha == math.inf:
            raise SettingsError("alpha is infinite; wanted a positive number, the rank being usual")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"dropout is {self.dropout}; wanted a share from 0 up to, but not, 1")

    @property
    def file_alpha(self) -> float:
        """The alpha that gives this strength to a reader which divides by the rank, as all do."""
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha


def resolve_targets(family: Family, linears: dict[str, nn.Linear], settings: LoraSettings) -> list[str]:
    """Official names of the Linears that the settings choose, in the model's order.

    Raises:
        SettingsError: a range that cannot be read, or a choice that matches nothing.
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
    return chosen


def _block_range(text: str) -> set[int]:
    """`0,4,8-11` → {0, 4, 8, 9, 10, 11}."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise SettingsError(f"blocks {text!r} cannot be read; wanted `all`, or numbers and ranges such as 0-13,20")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return numbers


class LoraLinear(PeftLinear):
    """PEFT's LoRA layer with fp32 (or any) master weights that computes in the base's compute dtype, without autocast.

    The sum has the dtype of the base's output, so an fp32 adapter on k alone cannot make k differ from q.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.lora_A:
                result = result + self._change(name, x).to(result.dtype)
        return result

    def _change(self, name: str, x: Tensor) -> Tensor:
        down = self.lora_A[name].weight.to(x.dtype)
        up = self.lora_B[name].weight.to(x.dtype)
        return self.scaling[name] * F.linear(F.linear(self.lora_dropout[name](x), down), up)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Keeps PEFT from casting the master weights to the base's dtype."""


def inject(
    model: nn.Module,
    name: str,
    settings: LoraSettings,
    targets: list[str],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Adds a named adapter whose change is zero: A drawn from the generator as PEFT does (Kaiming uniform), B zero.

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
    config = peft.LoraConfig(
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
    # That of the norms: a Linear's own weight may be on the CPU while its block computes elsewhere.
    device = next(model.parameters()).device
    with torch.no_grad():
        for layer in layers.values():
            for part in (layer.lora_A[name], layer.lora_B[name]):
                part.to(device, dtype)
            initial = torch.empty(layer.lora_A[name].weight.shape)
            bound = 1 / math.sqrt(initial.shape[1])  # kaiming_uniform with a = sqrt(5)
            layer.lora_A[name].weight.copy_(initial.uniform_(-bound, bound, generator=generator))
            layer.lora_B[name].weight.zero_()
    for layer in layers.values():
        layer.set_adapter([], inference_mode=True)
        layer.lora_dropout[name].eval()
    _restore(before)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear of the bare model by official name: the adapters' own are left out, adapted ones are in."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name.removesuffix(".base_layer"): module for name, module in found.items() if ".lora_" not in name}


def _layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapted(model: nn.Module, name: str) -> dict[str, LoraLinear]:
    """Official module name → the layer that carries the adapter."""
    return {module: layer for module, layer in _layers(model).items() if name in layer.lora_A}


def adapter_names(model: nn.Module) -> list[str]:
    """Every adapter on the model, sorted."""
    return sorted({name for layer in _layers(model).values() for name in layer.lora_A})


def parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The adapter's A and B, module by module."""
    return [part.weight for layer in adapted(model, name).values() for part in (layer.lora_A[name], layer.lora_B[name])]


@contextmanager
def active(model: nn.Module, name: str | None, train: bool = False) -> Iterator[None]:
    """Makes one adapter active, or with None the bare base, and trainable if asked; the rest is off and frozen.

    Dropout acts while the adapter is trained, and only then.

    At the end everything is as it was, also after an exception.
    """
    layers = _layers(model)
    if name is not None and name not in adapter_names(model):
        raise KeyError(f"no adapter named {name!r} on this model; there are {adapter_names(model)}")
    before = _state(model)
    try:
        for layer in layers.values():
            layer._disable_adapters = name is None
            layer._active_adapter = [name] if name is not None and name in layer.lora_A else []
        for parameter, _ in before.flags:
            parameter.requires_grad_(False)
        for dropout, _ in before.dropouts:
            dropout.eval()
        if name is not None and train:
            for layer in adapted(model, name).values():
                layer.lora_dropout[name].train()
            for parameter in parameters(model, name):
                parameter.requires_grad_(True)
        yield
    finally:
        _restore(before)


class _State(NamedTuple):
    """Which adapter every layer applies, and which parameters train."""

    layers: list[tuple[LoraLinear, list[str], bool]]
    flags: list[tuple[nn.Parameter, bool]]
    dropouts: list[tuple[nn.Module, bool]]


def _state(model: nn.Module) -> _State:
    layers = [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in _layers(model).values()]
    flags = [(p, p.requires_grad) for name in adapter_names(model) for p in parameters(model, name)]
    dropouts = [(d, d.training) for layer in _layers(model).values() for d in layer.lora_dropout.values()]
    return _State(layers, flags, dropouts)


def _restore(state: _State) -> None:
    for layer, names, disabled in state.layers:
        layer._disable_adapters = disabled
        layer._active_adapter = names
    for parameter, flag in state.flags:
        parameter.requires_grad_(flag)
    for dropout, flag in state.dropouts:
        dropout.train(flag)


def to_canonical(model: nn.Module, name: str) -> Canonical:
    """The adapter's weights, copied to the CPU, by official module name."""
    modules: Canonical = {}
    for module, layer in adapted(model, name).items():
        # Not copied on the device, where there may be no room for it.
        down, up = (part[name].weight.detach().to("cpu", copy=True) for part in (layer.lora_A, layer.lora_B))
        settings = LoraSettings(layer.r[name], layer.lora_alpha[name], layer.use_rslora[name])
        modules[module] = LoraModule(down, up, settings.file_alpha)
    return modules


def remove(model: nn.Module, name: str) -> None:
    """Takes the adapter off the base and frees its weights; layers without any adapter become plain Linears again."""
    for module, layer in list(_layers(model).items()):
        if name in layer.lora_A:
            # PEFT would activate and train another adapter in place of an active one that goes.
            layer._active_adapter = [other for other in layer.active_adapters if other != name]
            layer.delete_adapter(name)
        if not layer.lora_A:
            owner, _, leaf = module.rpartition(".")
            setattr(model.get_submodule(owner), leaf, layer.base_layer)
    model.peft_config.pop(name, None)  # type: ignore[operator, union-attr]  # PEFT's note of what it injected
