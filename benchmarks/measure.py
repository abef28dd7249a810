"""What the benchmarks and the tests of memory share: the sizes of the published comparison, what a step takes there at
least, and how bytes and FLOPs are counted.

The sizes and the least are those of reference/peer-benchmark.md: four blocks, hidden width 1024, 64 text tokens and
1024 of the picture, rank 16, bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from graft_lora.trainer import adapters
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.ideogram4 import Ideogram4Config
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.live_bytes import LiveBytes, tensors_of
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.plan import Workload, _give_storages, skeleton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

MIB, GFLOP = 2**20, 1e9
BF16 = 2  # bytes

# --- the published comparison -----------------------------------------------------------------------------------------

BLOCKS, WIDTH, RANK = 4, 1024, 16
TEXT, IMAGE = 64, 1024
LENGTH = TEXT + IMAGE
MLP = 128 * -(-int(2 * 1024 / 3) * 4 // 128)
TEXT_MLP = 128 * -(-int(2 * 640 / 3) * 4 // 128)
SIZES = {
    "krea2": Krea2Config(
        width=WIDTH, heads=8, kv_heads=2, mlp=MLP, blocks=BLOCKS, text_width=640, text_heads=20, text_kv_heads=20,
        text_mlp=TEXT_MLP,
    ),
    "ideogram4": Ideogram4Config(
        width=WIDTH, heads=4, mlp=2816, layers=BLOCKS, time_width=128, text_features=13 * 256
    ),
}  # fmt: skip
LATENTS = {"krea2": (16, 64, 64), "ideogram4": (128, 32, 32)}
# GFLOP of a step at least: without recomputation, and with that of all blocks.
LEAST_GFLOP = {"krea2": (285.0, 389.2), "ideogram4": (292.8, 401.4)}


def least_bytes(name: str) -> float:
    """MiB that a block keeps at least: with h the hidden width, kv that of k or v, m the MLP's, by family."""
    hidden, row = LENGTH * WIDTH * BF16, LENGTH * BF16
    if name == "krea2":
        return (5 * hidden + 2 * 256 * row + 2 * MLP * row) / MIB
    return (8 * hidden + 2 * 2816 * row) / MIB


# --- counting ---------------------------------------------------------------------------------------------------------


def attention_flops(q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    """Two products of L · L · K for each head."""
    batch, heads, length, width = q
    return 2 * 2 * batch * heads * length * k[2] * width


def attention_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any
) -> float:
    """Five products: the scores once more, and the gradients of v, of the scores, of q and of k."""
    return 2.5 * attention_flops(q, k, v)


# Of the CPU's kernel; torch knows those of the others.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products and attention while it is open, by torch's own formulas.

    Unlike torch's `FlopCounterMode` it tracks no modules and so keeps no tensor alive.

    Attributes:
        total: so far.
    """

    formulas = {
        **flop_registry,
        torch.ops.aten._int_mm: flop_registry[torch.ops.aten.mm],
        **{kernel: shape_wrapper(formula) for kernel, formula in ATTENTION.items()},
    }

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := self.formulas.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


class Counts(NamedTuple):
    """Of one step: MiB kept between forward and backward, MiB alive at most, both without what was alive before; and
    GFLOP."""

    kept: float
    peak: float
    gflop: float


def count_step(step: Callable[[], Iterator[None]], alive: Iterable[Tensor]) -> Counts:
    """Carries out a step.

    Args:
        step: does the forward pass, yields, and does the backward pass.
        alive: the model's tensors, none of which counts.
    """
    with LiveBytes(alive) as live, Flops() as flops:
        before = live.now
        running = step()
        next(running)
        kept = live.now - before
        for _ in running:
            pass
    return Counts(kept / MIB, (live.peak - before) / MIB, flops.total / GFLOP)


def graft_counts(name: str, precision: str, way: Callable[[list[nn.Module]], AbstractContextManager[None]]) -> Counts:
    """Of a step of Graft at the published size, in bf16, its text trunk's output cached, without data.

    Args:
        name: of the family.
        precision: of the base.
        way: opens what its blocks keep and recompute, until the backward pass has ended.
    """
    family, lora = FAMILIES[name], LoraSettings(rank=RANK, alpha=RANK)
    model = skeleton(Workload(family, SIZES[name], LATENTS[name], TEXT, lora=lora, precision=precision))
    targets = adapters.resolve_targets(family, adapters.linears(model), lora)
    adapters.inject(model, "a", lora, targets, torch.Generator())
    for trunk in family.text_trunk:
        delattr(model, trunk)
    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode():
        _give_storages(model)
        noisy, sigma_B = torch.empty(1, *LATENTS[name]), torch.empty(1)
        text = torch.empty(1, TEXT, WIDTH, dtype=torch.bfloat16)
        blocks = list(family.blocks(model).values())

        def step() -> Iterator[None]:
            with adapters.active(model, "a", train=True), way(blocks):
                loss = model(noisy, sigma_B, text=text).float().square().mean()
                yield
                loss.backward()

        return count_step(step, tensors_of(model))
