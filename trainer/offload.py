"""Blocks on the CPU: their frozen weights live in host memory and visit the device while they are needed.

The blocks are entered one after the other in the forward pass, and in the opposite order in the backward pass, where a
checkpointed block runs again just before its gradients are formed. Two slots on the device, each as large as a block,
take turns: while one block computes, the next one's weights are copied into the other slot on a stream of their own.
The numbers are the same as with all blocks on the device: only where a weight lies changes.

Adapters, norms and modulation tables stay on the device.

Who shares the device with others can ask for the slots' memory: `park` gives it back, `unpark` takes it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .quantization import FrozenLinear

SLOTS = 2
ALIGNMENT = 256  # bytes, what CUDA kernels want of a tensor's start


def aligned(bytes: int) -> int:
    """What a tensor of so many bytes takes in a block's one piece of memory."""
    return math.ceil(bytes / ALIGNMENT) * ALIGNMENT


def slots_bytes(blocks: Sequence[Sequence[int]]) -> int:
    """What the slots take on the device for blocks whose tensors have so many bytes."""
    return min(SLOTS, len(blocks)) * max((sum(map(aligned, tensors)) for tensors in blocks), default=0)


@dataclass(frozen=True)
class Place:
    """Where one buffer of one layer stands in its block's bytes."""

    layer: FrozenLinear
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    bytes: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


class HostBlock:
    """One block's frozen weights in one piece of host memory, pinned where it will be copied to a GPU."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.places, size = [], 0
        for layer in (module for module in block.modules() if isinstance(module, FrozenLinear)):
            for name, buffer in layer.named_buffers():
                bytes = buffer.numel() * buffer.element_size()
                self.places.append(Place(layer, name, buffer.dtype, buffer.shape, size, bytes))
                size += aligned(bytes)
        self.flat = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for place in self.places:
            place.view(self.flat).copy_(place.layer.get_buffer(place.name))
            place.layer.placed = True
        self.bind(self.flat)

    def bind(self, flat: Tensor) -> None:
        """Lets the layers read their weights from these bytes, which are laid out as the block's own."""
        for place in self.places:
            place.layer._buffers[place.name] = place.view(flat)


class Slot:
    """Room for one block on the device, and which block is in it."""

    def __init__(self, bytes: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.flat = torch.empty(bytes, dtype=torch.uint8, device=device)
        if stream is not None:
            # A copy may be under way when the base is freed: its memory then waits for that.
            self.flat.record_stream(stream)
        self.block: int | None = None
        self.copied: torch.cuda.Event | None = None


class BlocksOnCPU:
    """Keeps the weights of some blocks of a model in host memory and brings each to the device when it is entered.

    Attributes:
        count: how many blocks.
        host_bytes: what they take in host memory, before an allocator's rounding.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device | str) -> None:
        """
        Args:
            blocks: in the order in which they run, their Linears frozen, on whatever device.
            device: where they compute.
        """
        self.device = device = torch.device(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.inference_mode(False), torch.no_grad():
            self.host = [HostBlock(block, device) for block in blocks]
        self.slots: list[Slot] = []
        self.unpark()
        self._hooks = []
        for index, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(partial(self._before, index)))
            self._hooks.append(block.register_forward_hook(partial(self._after, index)))

    @property
    def count(self) -> int:
        return len(self.host)

    @property
    def host_bytes(self) -> int:
        return sum(block.flat.numel() for block in self.host)

    @property
    def device_bytes(self) -> int:
        """What the slots take on the device, parked or not."""
        return slots_bytes([[place.bytes for place in block.places] for block in self.host])

    @property
    def parked(self) -> bool:
        """Whether the slots' memory has been given back: no block can compute on the device."""
        return not self.slots

    def park(self) -> None:
        """Gives the slots' memory on the device back; every block is read from host memory until `unpark`."""
        for block in self.host:
            block.bind(block.flat)
        self.slots = []

    def unpark(self) -> None:
        """Takes the slots' memory again; nothing where they have it."""
        if self.parked:
            size = max(block.flat.numel() for block in self.host)
            with torch.inference_mode(False):
                self.slots = [Slot(size, self.device, self.stream) for _ in range(min(SLOTS, self.count))]

    def dissolve(self) -> None:
        """Ends it: the weights are ordinary ones of their layers, in host memory, and follow the model's moves."""
        self.park()
        for hook in self._hooks:
            hook.remove()
        for place in (place for block in self.host for place in block.places):
            place.layer.placed = False
            # A copy each, since the block's one piece of memory is pinned.
            place.layer._buffers[place.name] = place.layer.get_buffer(place.name).clone()

    # A module's hooks stand outside its `forward`, which checkpointing replaces: they run once in the forward pass, and
    # the hook on the output's gradient runs once in the backward pass, before the block is run again.

    def _before(self, index: int, block: nn.Module, arguments: Any) -> None:
        self.enter(index, 1, wrap=not torch.is_grad_enabled())

    def _after(self, index: int, block: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.enter(index, -1, wrap=False))

    def enter(self, index: int, step: int, wrap: bool) -> None:
        """Brings a block's weights to the device, and begins to copy those of the one that comes after it.

        Args:
            index: of the block.
            step: 1 in a forward pass, -1 in a backward pass.
            wrap: the first block comes after the last, as when sampling.

        Raises:
            RuntimeError: the slots are parked.
        """
        if self.parked:
            raise RuntimeError("the blocks on the CPU are parked; unpark them before the model computes")
        with torch.inference_mode(False), torch.no_grad():
            slot = self._holding(index) or self._copy(index, self._free(keep=None))
            if slot.copied is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.copied)
            self.host[index].bind(slot.flat)
            following = index + step
            if wrap:
                following %= self.count
            if 0 <= following < self.count and self._holding(following) is None:
                self._copy(following, self._free(keep=slot))

    def _holding(self, index: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.block == index), None)

    def _free(self, keep: Slot | None) -> Slot:
        """A slot that may be overwritten: an empty one, or the one that is not kept."""
        candidates = [slot for slot in self.slots if slot is not keep]
        return next((slot for slot in candidates if slot.block is None), candidates[0])

    def _copy(self, index: int, slot: Slot) -> Slot:
        if slot.block is not None:
            # Whoever reads the former block's weights by another way finds them where they always are.
            self.host[slot.block].bind(self.host[slot.block].flat)
        source = self.host[index].flat
        if self.stream is None:
            slot.flat[: source.numel()].copy_(source)
        else:
            # The slot's former block has been given all its work by now: the copy waits until that is done.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                slot.flat[: source.numel()].copy_(source, non_blocking=True)
                slot.copied = self.stream.record_event()
        slot.block = index
        return slot


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` blocks, evenly over the depth, so that a copy has as many resident blocks' time as can be."""
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]
