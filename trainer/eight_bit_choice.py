"""Whether a run multiplies in 8 bits: as the settings say, or as a short measurement on the device finds.

Layers multiply so only while `computing` lasts: what is sampled from a base before and after a run has the numbers of
its stored weights, without activations being quantised.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import eight_bit, modes
from .base_model import Base
from .devices import Device
from .errors import SettingsError
from .families import Family
from .quantization import FrozenLinear, input_gradient, matmul
from .settings import AUTO

SHAPES = 2  # measured: the largest, and the largest of the others
REPEATS = 5
# Most tokens and most features that are measured: a CPU would take minutes for as many as it is to train with.
MOST = {"cpu": (64, 1024), "cuda": (8192, 65536)}


class Choice(NamedTuple):
    """Whether layers multiply in 8 bits, and a sentence on it for the user; empty where there is nothing to say."""

    used: bool
    note: str


class Measured(NamedTuple):
    """Seconds that the measured layers' forward and input gradient take together."""

    eight_bit: float
    dequantised: float


def eligible(model: nn.Module, family: Family) -> dict[str, FrozenLinear]:
    """The Linears that can multiply in 8 bits: stored so, not of those that the family never quantises, and of fitting
    size.
    """
    enough = eight_bit.FEW_ROWS + 1
    return {
        name: layer
        for name, layer in frozen_linears(model).items()
        if layer.format is not None
        and layer.format.eight_bit is not None
        and not re.fullmatch(family.never_quantised, name)
        and eight_bit.fits(enough, layer.in_features, layer.out_features)
    }


def frozen_linears(model: nn.Module) -> dict[str, FrozenLinear]:
    """By the names that they have without adapters."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, FrozenLinear)
    }


def choose(base: Base, wanted: bool | str, tokens: int, device: Device) -> Choice:
    """Whether this base is to multiply in 8 bits while it trains.

    Args:
        base: loaded.
        wanted: as in the settings; with `auto` it is measured, unless something is against it.
        tokens: of the run's largest batch, which its Linears are called with.
        device: that computes.

    Raises:
        SettingsError: it is wanted and cannot be done.
    """
    if wanted is False:
        idle = 'mxfp8 is there for matmuls in 8 bits, which are off; set [model] eight_bit_compute = "auto", or use fp8'
        return Choice(False, idle if base.precision == "mxfp8" else "")
    layers = eligible(base.model, base.family)
    if fault := _fault(base, layers, tokens, device):
        if wanted is True:
            raise SettingsError(f'eight_bit_compute is true, but {fault}; set [model] eight_bit_compute = "auto"')
        # Of a base that is not in 8 bits there is nothing to say.
        return Choice(False, f"matmuls are not in 8 bits: {fault}" if layers else "")
    which = (
        f"{len(layers)} Linears; those called with {eight_bit.FEW_ROWS} tokens or fewer and the others stay as they are"
    )
    if wanted is True:
        return Choice(True, f"matmuls in 8 bits, as set, in {which}")
    found = measure(list(layers.values()), tokens, base.model.compute_dtype, device.place)
    times = f"{1000 * found.eight_bit:.3g} ms, dequantised {1000 * found.dequantised:.3g} ms"
    if found.eight_bit < found.dequantised:
        return Choice(True, f"matmuls in 8 bits, measured faster ({times}), in {which}")
    return Choice(False, f"matmuls are not in 8 bits, measured slower ({times})")


def _fault(base: Base, layers: dict[str, FrozenLinear], tokens: int, device: Device) -> str | None:
    if not layers:
        wanted = ", ".join(modes.EIGHT_BIT_NEEDS)
        return f"no Linear of the base in {base.precision} can be multiplied in 8 bits: wanted precision {wanted}"
    if tokens <= eight_bit.FEW_ROWS:
        return f"the largest batch has {tokens} tokens, wanted more than {eight_bit.FEW_ROWS}"
    compute = "fp32" if base.model.compute_dtype == torch.float32 else "bf16"
    formats = dict.fromkeys(layer.format.eight_bit for layer in layers.values() if layer.format is not None)
    faults = (modes.eight_bit_fault(format, compute, device) for format in formats if format is not None)
    return next(filter(None, faults), None)


@contextmanager
def computing(base: Base, used: bool) -> Iterator[None]:
    """While it lasts, and if it is used, the base's eligible Linears multiply in 8 bits.

    Must stay open until the backward pass has ended.
    """
    layers = eligible(base.model, base.family).values() if used else ()
    for layer in layers:
        layer.eight_bit = True
    try:
        yield
    finally:
        for layer in layers:
            layer.eight_bit = False


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(layers: Sequence[FrozenLinear], tokens: int, dtype: torch.dtype, place: torch.device) -> Measured:
    """Times the largest shapes among the layers in both ways, in turns; the median of each counts."""
    rows, features = MOST[place.type]
    rows = max(eight_bit.FEW_ROWS + 1, min(tokens, rows))
    largest: dict[tuple[int, int], FrozenLinear] = {}
    for layer in sorted(layers, key=lambda layer: layer.in_features * layer.out_features, reverse=True):
        largest.setdefault((layer.in_features, layer.out_features), layer)
    totals = [0.0, 0.0]
    with torch.inference_mode(False), torch.autocast(place.type, enabled=False):
        for layer in list(largest.values())[:SHAPES]:
            sample = _part(layer, features, place)
            x = torch.ones(rows, sample.in_features, dtype=dtype, device=place)
            grad = torch.ones(rows, sample.out_features, dtype=dtype, device=place)
            tries: list[list[float]] = [[], []]
            for turn in range(REPEATS + 1):
                for way, used in enumerate((True, False)):
                    sample.eight_bit = used
                    taken = _seconds(functools.partial(_both, sample, x, grad), place)
                    if turn:  # the first one chooses kernels
                        tries[way].append(taken)
            totals = [total + statistics.median(found) for total, found in zip(totals, tries, strict=True)]
    return Measured(*totals)


def _part(layer: FrozenLinear, features: int, place: torch.device) -> FrozenLinear:
    """The layer's first rows and columns on the device, in a layer of their own; whole where it is small enough."""
    assert layer.format is not None
    rows, columns = min(layer.out_features, features), min(layer.in_features, features)
    part = FrozenLinear(columns, rows)
    buffers = layer.format.part({name: layer.get_buffer(name) for name in layer.format.buffers}, rows, columns)
    return part.restore({name: buffer.to(place) for name, buffer in buffers.items()}, layer.format)


def _both(layer: FrozenLinear, x: Tensor, grad: Tensor) -> None:
    matmul(x, layer)
    input_gradient(grad, layer)


def _seconds(work: Callable[[], None], place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    started = time.perf_counter()
    work()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - started


__all__ = ["AUTO", "Choice", "Measured", "choose", "computing", "eligible", "frozen_linears", "measure"]
