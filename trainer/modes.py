"""Which precisions and compute dtypes a device and a family can be trained in, and why not in the others.

A precision is how weights are stored, and asks for nothing more: a frozen weight can be dequantised to the compute
dtype and then multiplied in that. So fp8 asks for no fp8 hardware (torch converts float8_e4m3fn in software on any
card, a GTX as well as an H100), int8 for no int8 matmul, and bf16 weights for no bf16 arithmetic: on a card without
native bf16 all of them train in fp32. Multiplying in 8 bits (`eight_bit`) is another matter, which the hardware must be
able to; mxfp8, which is there for that alone, is the one exception. What a mode asks for stands in one line of the
tables below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import probes
from .devices import Device
from .families import Family


@dataclass(frozen=True)
class Need:
    """What a mode asks for.

    Attributes:
        native_bf16: bf16 arithmetic in hardware.
        torchao: a torchao that really quantises, which is tried.
        capability: NVIDIA's compute capability.
        cpu: whether a CPU will do, which has none.
        compute_dtype: that of activations; empty for any.
    """

    native_bf16: bool = False
    torchao: bool = False
    capability: tuple[int, int] | None = None
    cpu: bool = True
    compute_dtype: str = ""


PRECISION_NEEDS: Mapping[str, Need] = {
    "fp32": Need(),
    "bf16": Need(),
    "fp8": Need(torchao=True),
    "int8": Need(torchao=True),
    "nf4": Need(torchao=True),
    # Nothing but its products, for which Blackwell is needed, speaks for it; elsewhere fp8 is as good and less strange.
    "mxfp8": Need(capability=(10, 0), cpu=False),
    "as-stored": Need(),
}
COMPUTE_NEEDS: Mapping[str, Need] = {"bf16": Need(native_bf16=True), "fp32": Need()}
# Formats whose numbers can be multiplied as they are. The int8 units of tensor cores came with 7.5, those of fp8 with
# 8.9; torch's fp8 product with a scale per row gives bf16 alone.
EIGHT_BIT_NEEDS: Mapping[str, Need] = {
    "int8": Need(capability=(7, 5)),
    "fp8": Need(capability=(8, 9), compute_dtype="bf16"),
    "mxfp8": Need(capability=(10, 0), cpu=False, compute_dtype="bf16"),
}


def modes(device: Device, family: Family) -> dict[str, str | None]:
    """Each precision → why it cannot be used, None where it can. Quantises a tiny tensor on the device in each."""
    return {precision: precision_fault(precision, device, family) for precision in PRECISION_NEEDS}


def compute_dtypes(device: Device) -> dict[str, str | None]:
    """Each compute dtype → why it cannot be used, None where it can."""
    return {dtype: compute_fault(dtype, device) for dtype in COMPUTE_NEEDS}


def precision_fault(precision: str, device: Device, family: Family) -> str | None:
    """Why the frozen weights cannot be stored so, and what to do; None where they can."""
    if precision in family.forbidden_modes:
        others = ", ".join(name for name in PRECISION_NEEDS if name not in family.forbidden_modes)
        return (
            f"{family.title} is not to be trained in {precision}: {family.forbidden_modes[precision]}; set [model] "
            f"precision to one of {others}"
        )
    need = PRECISION_NEEDS[precision]
    if need.capability is not None and not (need.cpu and device.kind == "cpu"):
        wanted = f"{precision} is for NVIDIA cards of compute capability {_dotted(need.capability)} or newer"
        mend = 'set [model] precision = "fp8" or "int8"'
        if device.capability is None:
            return f"{wanted}, and {device.name} is none; {mend}"
        if device.capability < need.capability:
            return f"{wanted}, and {device.name} has {_dotted(device.capability)}; {mend}"
    return _fault(need, device) or (probes.precision_fault(precision, device.place) if need.torchao else None)


def compute_fault(compute_dtype: str, device: Device) -> str | None:
    """Why activations cannot be computed in this dtype, and what to do; None where they can."""
    return _fault(COMPUTE_NEEDS[compute_dtype], device)


def eight_bit_fault(format: str, compute_dtype: str, device: Device) -> str | None:
    """Why a device cannot multiply numbers of this format in 8 bits; None where it can. A tiny product is tried on it.

    Args:
        format: one of `EIGHT_BIT_NEEDS`.
        compute_dtype: of activations.
        device: that computes.
    """
    need = EIGHT_BIT_NEEDS[format]
    if need.compute_dtype not in ("", compute_dtype):
        return f"{format} matmuls give {need.compute_dtype}, and compute_dtype is {compute_dtype}"
    if device.kind == "cpu" and not need.cpu:
        return f"{format} matmuls are not offered on a CPU"
    if device.kind != "cpu" and need.capability is not None:
        if device.capability is None:
            return f"{format} matmuls are not offered on {device.name}: under ROCm they have not been tried"
        if device.capability < need.capability:
            return (
                f"{device.name} has no {format} matmul (compute capability {_dotted(device.capability)}, wanted "
                f"{_dotted(need.capability)})"
            )
    return probes.eight_bit_fault(format, device.place)


def _fault(need: Need, device: Device) -> str | None:
    if need.native_bf16 and not device.native_bf16:
        since = "" if device.capability is None else f" (compute capability {_dotted(device.capability)}, wanted 8.0)"
        return (
            f"{device.name} has no native bf16{since} and would emulate it many times slower; set [model] "
            'compute_dtype = "fp32", which is slower than bf16 in hardware, but right'
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
