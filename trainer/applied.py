"""A LoRA file on a loaded base, for inference alone: its changes are added to what the layers give, weight by weight.

Any kind that can be read is applied exactly: LoRA, LoHa, LoKr, whole differences, DoRA by row and by column, biases,
norms and tables. Nothing of the base is changed: while a context lasts, hooks stand on its Linears and other parameters
in the place of a few small ones. Several LoRAs add up, each seeing the base as it is, so their order does not matter.
An adapter that is trained sees what is applied as part of the base: that matters to a DoRA alone, which scales it too.

The factors are kept in main memory; a copy is on the device while the LoRA is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lora_convert import Change, DiffModule, LohaModule, LokrModule, LoraFile, LoraModule, Sizes
from ..lora_convert.canonical import Factor
from ..lora_convert.pieces import Weights, shaped
from ..lora_convert.targets import COMFYUI
from .adapter_layers import LoraLinear
from .quantization import FrozenLinear

_TINY = torch.finfo(torch.float32).tiny
_ROWS = 1024  # of a weight in fp32 at once


class AppliedLora:
    """What a file does to a base, by the base's own names.

    Attributes:
        changes: official name of a Linear, or of another parameter without `.weight` → its change, on the CPU.
        biases: official name of a Linear → change (out,) of its bias, on the CPU.
    """

    def __init__(self, changes: Mapping[str, Change], biases: Mapping[str, Tensor]) -> None:
        self.changes, self.biases = dict(changes), dict(biases)
        self._here: _Placed | None = None

    @classmethod
    def of(cls, file: LoraFile, sizes: Sizes, weight: Callable[[str], Tensor]) -> tuple[AppliedLora, list[str]]:
        """A read file by the base's own names, and what it has for modules that the base has not.

        Args:
            file: as it was read, with q, k and v fused or apart.
            sizes: of the base that it is for.
            weight: official module name → weight (out, in) of the base, asked only where the mathematics needs it to
                cut or join q, k and v: a DoRA by column.

        Raises:
            LoraError: q, k and v cannot be brought into the base's form.
        """
        weights = Weights(file.family, weight, sizes)
        pieces = [piece for name, entry in file.modules.items() for piece in shaped(name, entry, COMFYUI, weights)]
        changes = {piece.name: piece.change for piece in pieces if piece.name in sizes.shapes}
        biases = {name: bias for name, bias in file.biases.items() if name in sizes.biases}
        missing = [piece.name for piece in pieces if piece.name not in changes]
        return cls(changes, biases), [*missing, *(f"{name}.bias" for name in file.biases if name not in biases)]

    @property
    def count(self) -> int:
        """How many modules of the base it changes."""
        return len(self.changes.keys() | self.biases.keys())

    @property
    def bytes(self) -> int:
        """Of its factors, which stand on the device while it is shown."""
        tensors = [tensor for change in self.changes.values() for tensor in _tensors(change)]
        return sum(tensor.nbytes for tensor in (*tensors, *self.biases.values()))

    def on(self, device: torch.device) -> _Placed:
        """Its copy on the device, made where there is none yet."""
        if self._here is None or self._here.device != device:
            with torch.inference_mode(False), torch.no_grad():
                self._here = _Placed(self, device)
        return self._here

    def put_away(self) -> None:
        """Frees the copy on the device."""
        self._here = None


class _Placed:
    """The factors on one device, and the lengths that follow from the base, once they are known."""

    def __init__(self, lora: AppliedLora, device: torch.device) -> None:
        self.device = device
        self.changes = {name: _moved(change, device) for name, change in lora.changes.items()}
        self.biases = {name: bias.to(device) for name, bias in lora.biases.items()}
        self.gains: dict[str, Tensor] = {}


def _tensors(change: Change) -> list[Tensor]:
    values = [getattr(change, entry.name) for entry in fields(change)]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in flat if isinstance(part, Tensor)]


def _moved(change: Change, device: torch.device) -> Change:
    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(put(part) for part in value)
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(change, **{entry.name: put(getattr(change, entry.name)) for entry in fields(change)})


# --- showing ---------------------------------------------------------------------------------------------------------


@contextmanager
def applied(model: nn.Module, loras: Sequence[tuple[AppliedLora, float]], device: torch.device) -> Iterator[None]:
    """While it lasts the model computes with the LoRAs, each multiplied by its strength; one of strength 0 is left out.

    At the end the model is as it was, also after an exception. Without gradients.

    Args:
        model: the base, whose Linears may carry adapters.
        loras: and their strengths.
        device: where it computes.

    Raises:
        KeyError: the model has no such module.
    """
    with ExitStack() as stack:
        linears: dict[str, list[tuple[_Placed, float]]] = defaultdict(list)
        for lora, strength in loras:
            if not strength:
                continue
            placed = lora.on(device)
            for name in {**placed.changes, **placed.biases}:
                linears[name].append((placed, strength))
        for name, changes in linears.items():
            layer = _linear(model, name)
            if layer is not None:
                hook = layer.register_forward_hook(partial(_add, name, changes))
                stack.callback(hook.remove)
            else:
                _change_parameter(stack, model, name, changes)
        yield


def _linear(model: nn.Module, name: str) -> nn.Linear | None:
    """The frozen Linear of an official name, below its adapters; None where the name is that of another parameter."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, LoraLinear):
        return module.base_layer
    return module if isinstance(module, nn.Linear) else None


def _change_parameter(stack: ExitStack, model: nn.Module, name: str, changes: Sequence[tuple[_Placed, float]]) -> None:
    """Puts a changed copy of a norm's scale, a table or an embedding in its place until the stack is closed."""
    for path in (name, f"{name}.weight"):
        owner_name, _, leaf = path.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:
            continue
        before = owner._parameters.get(leaf)
        if before is not None:
            break
    else:
        raise KeyError(f"the base has no {name}")
    value = before.detach().float()
    for placed, strength in changes:
        value = value + strength * placed.changes[name].delta().reshape(before.shape).to(value.device)
    owner._parameters[leaf] = nn.Parameter(value.to(before.dtype), requires_grad=False)
    stack.callback(owner._parameters.__setitem__, leaf, before)


def _add(
    name: str, changes: Sequence[tuple[_Placed, float]], layer: nn.Linear, inputs: tuple[Tensor, ...], out: Tensor
) -> Tensor:
    """A forward hook: the layer's output with every change of it added."""
    (x,) = inputs
    result = out
    for placed, strength in changes:
        if name in placed.changes:
            change = _effect(placed, name, layer, x, out)
            result = result + (change if strength == 1 else strength * change).to(out.dtype)
        if name in placed.biases:
            result = result + (strength * placed.biases[name]).to(out.dtype)
    return result


def _effect(placed: _Placed, name: str, layer: nn.Linear, x: Tensor, out: Tensor) -> Tensor:
    """What a change adds to W x, lengths included."""
    change = placed.changes[name]
    if not change.has_magnitude:
        return _product(change, x)
    if name not in placed.gains:
        placed.gains[name] = _gain(change, _weight(layer, x.dtype))
    gain = placed.gains[name]
    if _by_column(change):
        # (W + dW) (g ∘ x) - W x, where W (g ∘ x) - W x is one product.
        return F.linear((gain - 1).to(x.dtype) * x, _weight(layer, x.dtype)) + _product(change, gain.to(x.dtype) * x)
    without_bias = out if layer.bias is None else out - layer.bias.to(out.dtype)
    return (gain - 1).to(x.dtype) * without_bias + gain.to(x.dtype) * _product(change, x)


def _weight(layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    return layer.dequantized(dtype) if isinstance(layer, FrozenLinear) else layer.weight.to(dtype)


def _by_column(change: Change) -> bool:
    return change.magnitude is None and change.magnitude_over_base is None


def _gain(change: Change, weight: Tensor) -> Tensor:
    """What every row (out,), or column (in,), of W + dW is multiplied by, fp32: see `Change`."""
    columns, rows = torch.zeros(weight.shape[1], device=weight.device), []
    for start in range(0, len(weight), _ROWS):
        chosen = slice(start, min(start + _ROWS, len(weight)))
        piece = weight[chosen].float()
        if change.magnitude is not None or _by_column(change):
            piece = piece + change.delta(chosen)
        columns += piece.square().sum(dim=0)
        rows.append(piece.norm(dim=1))
    if _by_column(change):
        assert change.column_magnitude is not None
        return change.column_magnitude.float() / columns.sqrt().clamp_min(_TINY)
    lengths = change.magnitude if change.magnitude is not None else change.magnitude_over_base
    assert lengths is not None
    return lengths.float() / torch.cat(rows).clamp_min(_TINY)


# --- dW x ------------------------------------------------------------------------------------------------------------


def _product(change: Change, x: Tensor) -> Tensor:
    """(…, in) → (…, out) = dW x in x's dtype."""
    dtype = x.dtype
    if isinstance(change, LoraModule):
        return change.scale * F.linear(F.linear(x, change.down.to(dtype)), change.up.to(dtype))
    if isinstance(change, LokrModule):
        return _kronecker(change, x)
    if isinstance(change, LohaModule):
        first = change.w1_a.to(dtype) @ change.w1_b.to(dtype)
        return change.scale * F.linear(x, first.mul_(change.w2_a.to(dtype) @ change.w2_b.to(dtype)))
    assert isinstance(change, DiffModule)
    return F.linear(x, change.diff.to(dtype))


def _kronecker(change: LokrModule, x: Tensor) -> Tensor:
    """scale · (w1 ⊗ w2) x, by which nothing of the size of the weight is formed: w2 on in₂, then w1 on in₁."""
    last = change.w1[1] if isinstance(change.w1, tuple) else change.w1
    grouped = x.unflatten(-1, (last.shape[1], -1))
    inner = _through(change.w2, grouped)
    mixed = _through(change.w1, inner.transpose(-1, -2)).transpose(-1, -2)
    return change.scale * mixed.flatten(-2)


def _through(factor: Factor, x: Tensor) -> Tensor:
    for part in reversed(factor) if isinstance(factor, tuple) else (factor,):
        x = F.linear(x, part.to(x.dtype))
    return x
