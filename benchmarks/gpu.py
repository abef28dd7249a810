"""Training steps of both full-size models on one GPU, with random weights: no model file is needed.

    python benchmarks/gpu.py [--minutes 7] [--output benchmarks/RESULTS-gpu.md]

First it checks on the device that slim and recomputing steps have the gradients of SDPA's own autograd. Then each
precision that fits trains at 1024² and 512², with its weights dequantised and, where the card can, multiplied in 8
bits: seconds per step, the share of the measured peak of bf16 matmuls, and the peak of memory beside what the plan
predicts and what others have published. Exits with 1 where a check fails or a run takes more than was predicted, and
with 2 where there is no GPU.

`--device cpu --small` goes the same way in seconds, with tiny models in fp32, and the CPU in place of a card.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from graft_lora.trainer import adapters, attention, eight_bit_choice, memory, modes, on_cpu, plan
from graft_lora.trainer.base_model import Base, compute_dtype_of
from graft_lora.trainer.devices import Device, read_device
from graft_lora.trainer.families import FAMILIES, Family
from graft_lora.trainer.families.ideogram4 import Ideogram4Config
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.live_bytes import LiveBytes, tensors_of
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.plan import GIB, Workload
from graft_lora.trainer.quantization import FrozenLinear
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from measure import Flops
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

PRECISIONS = ("bf16", "int8", "fp8", "nf4", "mxfp8")
SMALL = {
    "krea2": Krea2Config(
        width=256, heads=2, kv_heads=1, mlp=256, blocks=2, text_width=40, text_layers=3, text_heads=2,
        text_kv_heads=2, text_mlp=64,
    ),
    "ideogram4": Ideogram4Config(width=512, heads=2, mlp=320, layers=2, time_width=64, text_features=96),
}  # fmt: skip
# (family, precision, side) → who, s/step where it is known, GiB (reference: peer-benchmark.md).
PUBLISHED = {
    ("krea2", "bf16", 1024): "SimpleTuner on an H100: 0.99 s, 33.3 GiB",
    ("krea2", "int8", 1024): "SimpleTuner on an H100: 20.4 GiB",
    ("ideogram4", "fp8", 1024): "SimpleTuner on an H100: 15.6 GiB",
}
Lines = Iterator[tuple[str, bool]]
STEPS = 3  # timed, after one that is not
# Kernels on CUDA add gradients in an order that varies, in fp32 before they round to bf16: its spacing is 0.004.
SAME = {"cuda": 1e-2, "cpu": 0.0}
# What the allocator rounds up, and kernels' workspaces, which the plan does not count.
OVER_PLAN, OVER_PLAN_BYTES = 1.02, {"cuda": GIB // 4, "cpu": 0}


@dataclass(frozen=True)
class Setup:
    """Where and at which size everything runs."""

    device: torch.device
    small: bool

    @property
    def compute(self) -> str:
        return "fp32" if self.small else "bf16"

    def memory(self, bytes: float) -> str:
        return f"{bytes / 2**20:.2f} MiB" if self.small else f"{bytes / GIB:.2f} GiB"

    @property
    def sides(self) -> tuple[int, ...]:
        return (128, 64) if self.small else (1024, 512)

    @property
    def text_tokens(self) -> int:
        return 8 if self.small else plan.ASSUMED_TOKENS

    def config(self, family: Family) -> Any:
        return SMALL[family.name] if self.small else family.published

    def workload(self, family: Family, precision: str, side: int, checkpointing: bool) -> Workload:
        cells = side // family.latent_downscale
        return Workload(
            family,
            self.config(family),
            (family.latent_channels, cells, cells),
            text_tokens=self.text_tokens,
            lora=LoraSettings(rank=4, alpha=4) if self.small else LoraSettings(),
            precision=precision,
            compute_dtype=self.compute,
            checkpointing=checkpointing,
            blocks_on_cpu=0,
            preview=False,
        )


# --- models with random weights ---------------------------------------------------------------------------------------


@torch.no_grad()
def random_base(work: Workload, device: torch.device) -> Base:
    """A base as `load_base` makes it, quantised on the device from weights that are drawn there one at a time.

    Without the text trunk, which waits on the CPU in a run, since its output is cached.
    """
    model = plan.skeleton(work)
    for name in work.family.text_trunk:
        delattr(model, name)
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Sequence[int], std: float, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(std).add_(mean)

    for module in model.modules():
        if isinstance(module, FrozenLinear):
            weight = draw((module.out_features, module.in_features), module.in_features**-0.5)
            assert module.format is not None
            bias = module.bias
            module.store(weight, module.format)
            if bias is not None:
                module.store_bias(draw(bias.shape, 0.02), bias.dtype, device)
        else:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    value = draw(parameter.shape, 0.02, mean=1.0 if parameter.ndim == 1 else 0.0)
                    module._parameters[name] = nn.Parameter(value.to(parameter.dtype), requires_grad=False)
    return Base(model, work.family, Path("random"), work.precision, ())


def random_sample(work: Workload) -> Sample:
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(work.text_tokens, work.config.width, generator=generator)
    return Sample("random", "", torch.randn(work.latent_shape, generator=generator), text, after_trunk=True)


# --- are the gradients right on this device? --------------------------------------------------------------------------


def relative(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest |found - wanted| / |wanted|."""
    pairs = zip(found, wanted, strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def check_attention(device: torch.device) -> Iterator[tuple[str, float | None]]:
    """Of each of Graft's kernels with a backward of its own, the difference from SDPA's; None where it is not used."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for (kind, backend), kernel in attention.KERNELS.items():
        # As in Krea 2, and as in Ideogram 4.
        for heads, groups, width in ((8, 2, 128), (4, 4, 256)):
            if kind != device.type:
                continue
            generator = torch.Generator(device).manual_seed(0)
            shapes = ((2, 200, heads, width), (2, 200, groups, width), (2, 200, groups, width))
            leaves = [torch.randn(s, generator=generator, device=device, dtype=dtype).requires_grad_() for s in shapes]
            what = f"{backend.name} with {heads} heads of {width}"
            with sdpa_kernel(backend):
                if attention._kernel(*leaves, None) is not kernel:
                    yield what, None
                    continue
                found = _with_gradients(leaves)
                with mock.patch.object(attention, "KERNELS", {}):
                    wanted = _with_gradients(leaves)
            yield what, relative(found, wanted)


def _with_gradients(leaves: Sequence[Tensor]) -> list[Tensor]:
    out = attention.attention(*leaves)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def check_steps(family: Family, device: torch.device) -> Iterator[tuple[str, float]]:
    """Of each way to save memory, the difference of a small model's loss and gradients from those without it."""
    work = Setup(device, small=True).workload(family, "int8", 128, True)
    base = random_base(work, device)
    base.model.compute_dtype = compute_dtype_of("bf16" if device.type == "cuda" else "fp32")
    targets = adapters.resolve_targets(family, adapters.linears(base.model), work.lora)
    adapters.inject(base.model, "check", work.lora, targets, torch.Generator().manual_seed(0))
    weights = adapters.parameters(base.model, "check")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in weights:
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(device)
    sample = random_sample(work)
    noisy, text = sample.latents[None].to(device), sample.conditioning[None].to(device)
    blocks = list(family.blocks(base.model).values())

    def step(*ways: Any) -> list[Tensor]:
        with ExitStack() as stack:
            for way in (attention.training_backends(), adapters.active(base.model, "check", train=True), *ways):
                stack.enter_context(way)
            loss = base.model(noisy, torch.full((1,), 0.5, device=device), text=text).float().square().mean()
            return [loss.detach(), *torch.autograd.grad(loss, weights)]

    wanted = step(mock.patch.object(attention, "KERNELS", {}))
    for name, way in (
        ("its own attention", nullcontext()),
        ("recomputing", memory.checkpointed(blocks)),
        ("slim", memory.checkpointed((), slim=blocks)),
    ):
        yield f"{family.title}, {name}", relative(step(way), wanted)


def checked(device: torch.device, families: Sequence[str]) -> tuple[list[str], bool]:
    """Lines of the report, and whether all is well."""
    found: list[tuple[str, float | None]] = [*check_attention(device)]
    for name in families:
        found += check_steps(FAMILIES[name], device)
    lines = ["| gradients against SDPA's own autograd | relative difference |", "|---|---|"]
    most = SAME[device.type]
    well = True
    for what, difference in found:
        if difference is None:
            lines.append(f"| {what} | this device takes another kernel |")
            continue
        # Not `> most`, which a NaN is not either.
        fault = not difference <= most
        well &= not fault
        lines.append(f"| {what} | {difference:.1e}{f' ✗ wanted at most {most:g}' if fault else ''} |")
    return lines, well


# --- speed and memory -------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def matmul_peak(setup: Setup) -> float:
    """FLOP/s of a large matmul in the compute dtype: the best of some."""
    side = 512 if setup.small else 8192
    dtype = compute_dtype_of(setup.compute)
    a, b = (torch.randn(side, side, device=setup.device, dtype=dtype) for _ in range(2))
    best = min(seconds(lambda: a @ b, setup.device) for _ in range(20))
    return 2 * side**3 / best


@contextmanager
def peak_memory(device: torch.device, alive: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
    """A function that gives the most bytes so far: the allocator's, or on the CPU those of live tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
    else:
        with LiveBytes(alive) as live:
            yield lambda: live.peak


@dataclass(frozen=True)
class Measured:
    """Of one case: seconds and FLOPs of a step, and bytes at most."""

    seconds: float
    flops: float
    peak: int


def measured(base: Base, work: Workload, device: torch.device) -> Measured:
    train = TrainSettings(checkpointing=bool(work.checkpointing))
    session = TrainSession(base, [random_sample(work)], work.lora, train, "gpu")
    try:
        with session, Flops() as flops:
            session.step()
        # The optimiser's state is there from now on.
        state = [value for entry in session.optimizer.state.values() for value in entry.values()]
        with session, peak_memory(device, [*tensors_of(base.model), *state]) as peak:
            session.step()
            most = peak()
        with session:
            taken = [seconds(session.step, device) for _ in range(STEPS)]
    finally:
        adapters.remove(base.model, "gpu")
    return Measured(statistics.median(taken), flops.total, most)


def ways(precision: str, facts: Device, setup: Setup) -> tuple[bool, ...]:
    """Whether weights are multiplied in 8 bits: as they are dequantised, and so where both can."""
    can = precision in modes.EIGHT_BIT_NEEDS and not modes.eight_bit_fault(precision, setup.compute, facts)
    return (False, True) if can else (False,)


def usable(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return plan.usable(total, free)
    return sys.maxsize


HEAD = (
    "| model | base | pictures | checkpointing | s/step | TFLOP | of that peak | peak | planned | published |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def cases(setup: Setup, families: Sequence[str], precisions: Sequence[str], peak: float, deadline: float) -> Lines:
    """A line of the table for each case, and whether it keeps to the plan."""
    facts = read_device(str(setup.device))
    for name in families:
        for precision in precisions:
            family, base, room = FAMILIES[name], None, usable(setup.device)
            if fault := modes.precision_fault(precision, facts, family):
                yield f"| {family.title} | {precision} | {fault} | | | | | | | |", True
                continue
            for side, on, products in itertools.product(setup.sides, (True, False), ways(precision, facts, setup)):
                work = setup.workload(family, precision, side, on)
                planned = plan.predict(work).device
                stored = f"{precision}, 8-bit products" if products else precision
                start = f"| {family.title} | {stored} | {side}² | {'on' if on else 'off'} |"
                why = "does not fit" if planned > room else "no time left" if time.monotonic() > deadline else ""
                if why:
                    yield f"{start} {why} | | | | {setup.memory(planned)} | |", True
                    continue
                base = base or random_base(work, setup.device)
                with eight_bit_choice.computing(base, products):
                    found = measured(base, work, setup.device)
                well = found.peak <= OVER_PLAN * planned + OVER_PLAN_BYTES[setup.device.type]
                beside = "" if products else PUBLISHED.get((name, precision, side), "")
                share = found.flops / found.seconds / peak
                yield (
                    f"{start} {found.seconds:.3f} | {found.flops / 1e12:.1f} | {share:.0%} | {setup.memory(found.peak)}"
                    f"{'' if well else ' ✗'} | {setup.memory(planned)} | {beside} |",
                    well,
                )
            del base
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models in fp32, to see that it works")
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--minutes", type=float, default=7.0, help="no case starts later than this")
    parser.add_argument("--output", type=Path, help="write the tables there")
    parsed = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * parsed.minutes
    device = torch.device(parsed.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu --small shows that the benchmark works")
        return 2
    if device.type == "cpu":
        # It stands for a card, whose memory the plan predicts: without the wide copies that are faster on a CPU.
        with mock.patch.object(on_cpu, "is_cpus", nothing_is):
            return report(parsed, Setup(device, parsed.small), deadline)
    return report(parsed, Setup(device, parsed.small), deadline)


def nothing_is(tensor: Tensor) -> bool:
    """In place of `on_cpu.is_cpus`; a mock would keep each tensor that it is asked about."""
    return False


def report(parsed: argparse.Namespace, setup: Setup, deadline: float) -> int:
    """Prints the checks and the table; the exit code."""
    device = setup.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    lines, well = checked(device, parsed.family)
    print("\n".join(lines), flush=True)
    if not well:
        print("the gradients are not those of SDPA's own autograd: nothing else was measured")
        return 1
    peak = matmul_peak(setup)
    said = f"torch {torch.__version__} on {name}; a large {setup.compute} matmul reaches {peak / 1e12:.1f} TFLOP/s"
    lines = [said, "", *lines, "", HEAD]
    print(f"{said}\n\n{HEAD}", flush=True)
    for line, kept in cases(setup, parsed.family, parsed.precision, peak, deadline):
        print(line, flush=True)
        lines.append(line)
        well &= kept
    if parsed.output:
        parsed.output.write_text("\n".join(["# benchmarks/gpu.py", "", *lines, ""]), encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
