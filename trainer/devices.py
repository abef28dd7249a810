"""Facts of the device that is trained on, and of the host: read from torch and the system here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from .errors import SettingsError, first_line


class Memory(NamedTuple):
    """Bytes, at the time of reading."""

    total: int
    free: int


@dataclass(frozen=True)
class Device:
    """What the checks and the plans go by.

    Attributes:
        place: the device as torch names it.
        name: as its maker names it.
        capability: NVIDIA's compute capability, such as (8, 9). None for a CPU, and under ROCm, whose numbers look
            alike but mean AMD's generations.
        rocm: an AMD card.
        native_bf16: whether bf16 is computed by the hardware. A CPU counts as native: its kernels are right with and
            without instructions for bf16, and no slower than its other ways by the factors at which a card emulates.
        memory: of the card; of the host for a CPU.
    """

    place: torch.device
    name: str
    capability: tuple[int, int] | None
    rocm: bool
    native_bf16: bool
    memory: Memory

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, which ROCm goes by too."""
        return self.place.type


def chosen_device(device: str) -> torch.device:
    """The device of the settings, or with an empty one CUDA where there is one.

    Raises:
        SettingsError: no device that is known, trained on, or there.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise SettingsError(f"device {device!r} is not known; use cpu, cuda or cuda:0") from error
    if place.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {device!r} is not one that Graft trains on; use cpu, cuda or cuda:0")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f'device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use device = "cpu"'
        )
    return place


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether that is what torch's error says: of the device, or of main memory that is pinned for it.

    `torch.OutOfMemoryError` is one; a failed pinning has no kind of its own.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def host_memory() -> Memory:
    """The host's memory; free is what can be had without swapping."""
    memory = psutil.virtual_memory()
    return Memory(memory.total, memory.available)


def read_device(device: str = "") -> Device:
    """The facts of the device that the settings choose.

    Raises:
        SettingsError: there is no such device, or its driver does not answer.
    """
    place = chosen_device(device)
    if place.type == "cpu":
        return Device(place, "CPU", None, False, True, host_memory())
    try:
        properties = torch.cuda.get_device_properties(place)
        free, total = torch.cuda.mem_get_info(place)
        rocm = torch.version.hip is not None
        # NVIDIA's cards before Ampere emulate bf16, many times slower, and torch says of them that they support it;
        # AMD's answer for themselves.
        native = torch.cuda.is_bf16_supported() if rocm else properties.major >= 8
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        raise SettingsError(
            f'device {str(place)!r} does not answer ({first_line(error)}); mend its driver, or use device = "cpu"'
        ) from error
    capability = None if rocm else (properties.major, properties.minor)
    return Device(place, properties.name, capability, rocm, native, Memory(total, free))
