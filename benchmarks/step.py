"""A training step of Graft beside one of diffusers + PEFT: FLOPs, bytes and time, on the same weights.

    python benchmarks/step.py [--tokens 1024] [--rounds 5] [--output benchmarks/RESULTS.md]

Runs from a clone, since it takes the twins in diffusers from `tests/`. With `COMFYUI_PATH`, the folder of a ComfyUI,
and on the Python that it runs on, ComfyUI's TrainLoraNode stands beside both. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import measure
import peer
import sides
import tiny
import torch
from graft_lora.trainer import adapters, attention, eight_bit_choice, memory
from graft_lora.trainer.base_model import Base, choose_format, compute_dtype_of
from graft_lora.trainer.families import FAMILIES, Transformer
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.objective import add_noise, draw_noise, draw_sigmas, velocity_loss
from graft_lora.trainer.quantization import quantize_model
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from measure import BLOCKS, LATENTS, LEAST_GFLOP, RANK, SIZES, TEXT, Counts, count_step, graft_counts, least_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

LORA = LoraSettings(rank=RANK, alpha=RANK)
QUANTISED = ("int8", "fp8", "nf4")
# Instructions that decide what a CPU can be measured in.
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")
FLAGS = ("avx2", "avx512f", *BF16_FLAGS, *INT8_FLAGS)

# --- targets ----------------------------------------------------------------------------------------------------------

MOST_BYTES = 1.10  # times the least, without checkpointing
MOST_PEAK = 0.8  # times the peer's, with it
# Times the least: without checkpointing, with it. Ideogram 4 needs the output of its last Linear, which a norm follows.
MOST_FLOPS = {"krea2": (1.03, 1.03), "ideogram4": (1.03, 1.07)}
# Seconds by the peer's: eager, compiled.
MOST_TIME = {"off": (1.00, 0.95), "on": (0.95, 0.85), "quantised": (None, 0.90)}
# In fp32, relative: of the loss, and of the gradients of all B together.
SAME_LOSS, SAME_GRADIENT = 1e-5, 1e-4
# Rounding's share of the gradient may be so many times the peer's.
MOST_ERROR = 1.5


@dataclass
class Targets:
    """Collects what is met and what is not."""

    met: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)

    def at_most(self, what: str, value: float, most: float | None) -> str:
        """Notes whether the value keeps to the limit, if there is one; its mark in the table."""
        if most is None:
            return ""
        if value <= most:
            self.met += 1
            return ""
        self.missed.append(f"{what}: {value:.3g}, wanted at most {most:.3g}")
        return " ✗"


# --- FLOPs and bytes, without data, in bf16, at the published size ----------------------------------------------------


def peer_counts(name: str, precision: str, recomputing: bool, adapter: torch.dtype = torch.bfloat16) -> Counts:
    """An fp32 adapter computes under autocast, as in diffusers' own training scripts."""
    with torch.device("meta"):
        twin = tiny.diffusers_model(name, SIZES[name])
        for parameter in twin.parameters():
            parameter.data = parameter.data.bfloat16()
        peer.prepare(name, twin, precision, LORA, adapter)
    peer.set_checkpointing(twin, recomputing)
    with torch.enable_grad(), FakeTensorMode(), peer.cpu_attention():
        alive = peer.give_storages(twin)
        noisy, sigma_B = torch.empty(1, *LATENTS[name]), torch.empty(1)
        text = torch.empty(1, TEXT, FAMILIES[name].conditioning_width(SIZES[name]), dtype=torch.bfloat16)

        def step() -> Iterator[None]:
            with torch.autocast("cpu", torch.bfloat16, enabled=adapter != torch.bfloat16):
                out = tiny.diffusers_velocity(name, twin, noisy, sigma_B, text, None, SIZES[name])
            loss = out.float().square().mean()
            yield
            loss.backward()

        return count_step(step, alive)


def recomputing(how_many: bool | int) -> Callable[[list[nn.Module]], AbstractContextManager[None]]:
    """The blocks as the setting `checkpointing` has them."""
    return lambda blocks: memory.recomputing(blocks, (), how_many)


def counted(name: str, targets: Targets) -> list[str]:
    title, least = FAMILIES[name].title, least_bytes(name)
    without, with_all = LEAST_GFLOP[name]
    # What the last block keeps is there when the backward pass begins: it needs no recomputation.
    least_flops = without, without + (with_all - without) * (BLOCKS - 1) / BLOCKS
    lines = [
        f"### {title}: FLOPs and bytes",
        "",
        "| base | checkpointing | side | GFLOP | × least | kept per block, MiB | × least | peak, MiB | × peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense_kept = {}
    for precision in ("bf16", *QUANTISED):
        for index, way in enumerate(("off", "on")):
            ours = graft_counts(name, precision, recomputing(way == "on"))
            theirs = peer_counts(name, precision, way == "on")
            sides = {"Graft": ours, "diffusers + PEFT": theirs}
            if precision == "bf16":
                sides["the same, fp32 adapter, autocast"] = peer_counts(name, precision, way == "on", torch.float32)
                dense_kept[way] = ours.kept
            for side, counts in sides.items():
                flops, kept = counts.gflop / least_flops[index], counts.kept / BLOCKS
                peak = counts.peak / theirs.peak
                marks = ["", "", ""]
                if side == "Graft":
                    where = f"{title}, {precision}, checkpointing {way}"
                    marks[0] = targets.at_most(f"{where}: FLOPs by the least", flops, MOST_FLOPS[name][index])
                    if way == "off":
                        marks[1] = targets.at_most(f"{where}: bytes by the least", kept / least, MOST_BYTES)
                    else:
                        marks[2] = targets.at_most(f"{where}: peak by the peer's", peak, MOST_PEAK)
                    more = counts.kept - dense_kept[way]
                    targets.at_most(f"{where}: MiB of dequantised weights kept", more, 0.0)
                by_least = f"{kept / least:.2f}{marks[1]}" if way == "off" else ""
                lines.append(
                    f"| {precision} | {way} | {side} | {counts.gflop:.1f} | {flops:.3f}{marks[0]} | {kept:.1f} | "
                    f"{by_least} | {counts.peak:.0f} | {peak:.2f}{marks[2]} |"
                )
            if way == "off":
                between = graft_counts(name, precision, recomputing(BLOCKS // 2))
                lines.append(
                    f"| {precision} | {BLOCKS // 2} of {BLOCKS} blocks | Graft | {between.gflop:.1f} | | "
                    f"{between.kept / BLOCKS:.1f} | | {between.peak:.0f} | |"
                )
    return lines


# --- time, on this machine --------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Both sides on the same weights, with the same input.

    Attributes:
        sample: latents, and the caption after the text trunk, which Graft has cached.
        text: the caption (1, T, W) before the trunk, which diffusers runs in each step.
    """

    name: str
    base: Base
    twin: nn.Module
    weights: list[nn.Parameter]
    sample: Sample
    text: Tensor

    def peer_loss(self, noise: Tensor, sigma_B: Tensor) -> Tensor:
        data = self.sample.latents[None]
        noisy = add_noise(data, noise, sigma_B)
        found = tiny.diffusers_velocity(self.name, self.twin, noisy, sigma_B, self.text, None, SIZES[self.name])
        return velocity_loss(found, data, noise).mean()

    def graft_loss(self, noise: Tensor, sigma_B: Tensor) -> Tensor:
        data = self.sample.latents[None]
        found = self.base.model(add_noise(data, noise, sigma_B), sigma_B, text=self.sample.conditioning[None])
        return velocity_loss(found, data, noise).mean()


@functools.cache
def originals(name: str) -> tuple[Transformer, nn.Module]:
    """Graft's transformer and diffusers', in fp32, of the same random weights."""
    model = tiny.build(name, config=SIZES[name]).requires_grad_(False)
    for parameter in model.parameters():
        # As in a model file: what is never quantised then is the same on both sides.
        parameter.copy_(parameter.bfloat16())
    return model, tiny.diffusers_twin(name, model, SIZES[name])


def make_pair(name: str, precision: str, compute: str, tokens: int) -> Pair:
    family, dtype, generator = FAMILIES[name], compute_dtype_of(compute), torch.Generator().manual_seed(1)
    model, twin = copy.deepcopy(originals(name))
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    weights = peer.prepare(name, twin, precision, LORA, dtype)
    quantize_model(model, lambda linear: choose_format(family, precision, linear))
    model.compute_dtype = dtype
    side = math.isqrt(tokens) * family.latent_multiple
    latents = torch.randn(LATENTS[name][0], side, side, generator=generator)
    text = torch.randn(1, TEXT, family.conditioning_width(SIZES[name]), generator=generator)
    sample = Sample("a", "", latents, model.encode_text(text)[0], after_trunk=True)
    return Pair(name, Base(model.eval(), family, Path(name), precision, ()), twin, weights, sample, text)


def session_of(pair: Pair, way: str, compiled: bool) -> TrainSession:
    """A session whose adapter has some weights, and the peer with the same ones."""
    adapter = adapters.unused_name(pair.base.model, way)
    settings = TrainSettings(checkpointing=way == "on", compile=compiled)
    session = TrainSession(pair.base, [pair.sample], LORA, settings, adapter)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in session.parameters:
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    peer.copy_adapter(pair.name, pair.twin, pair.base.model, session.name)
    peer.set_checkpointing(pair.twin, way == "on")
    return session


def draws(pair: Pair, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (1, *pair.sample.latents.shape)
    sigma_B = draw_sigmas(pair.base.family, "family", 1, shape, generator)
    return draw_noise(shape, generator), sigma_B


def compared_draws(pair: Pair) -> tuple[Tensor, Tensor]:
    """The same each time, at a noise level that bf16 holds from either end, since diffusers rounds it."""
    noise, sigma_B = draws(pair, torch.Generator().manual_seed(3))
    return noise, sigma_B.mul(256).round().clamp(1, 255) / 256


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


class Found(NamedTuple):
    """A side's loss, and the gradients of all B in one vector, fp32."""

    loss: float
    gradient: Tensor

    def off(self, true: Found) -> tuple[float, float]:
        """How far loss and gradient are from the true ones, relative."""
        return abs(self.loss - true.loss) / true.loss, relative(self.gradient, true.gradient)


def both(pair: Pair, session: TrainSession) -> tuple[Found, Found]:
    """What Graft finds and what the peer does for the same noise; the session is open."""
    noise, sigma_B = compared_draws(pair)
    ours, theirs = pair.graft_loss(noise, sigma_B), pair.peer_loss(noise, sigma_B)
    ours.backward()
    theirs.backward()
    own, others = [], []
    for weight, mine, member in peer.pairs(pair.name, pair.twin, pair.base.model, session.name):
        own.append(peer.third(mine.grad, member).flatten().float())
        others.append(weight.grad.flatten().float())
    for weight in (*session.parameters, *pair.weights):
        weight.grad = None
    return Found(ours.item(), torch.cat(own)), Found(theirs.item(), torch.cat(others))


@contextmanager
def plain(pair: Pair, adapter: str) -> Iterator[None]:
    """Graft without its memory techniques: SDPA's own backward, and autograd's own graph of a block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "KERNELS", {}))
        stack.enter_context(attention.training_backends())
        stack.enter_context(adapters.active(pair.base.model, adapter, train=True))
        yield


def equals_plain(pair: Pair, session: TrainSession) -> bool:
    """Whether loss and gradients of A and B are those of the plain path to the bit."""
    noise, sigma_B = compared_draws(pair)
    found = []
    for around in (session, plain(pair, session.name)):
        with around:
            loss = pair.graft_loss(noise, sigma_B)
            loss.backward()
            found.append([loss.detach(), *(weight.grad.clone() for weight in session.parameters)])
            for weight in session.parameters:
                weight.grad = None
    return all(map(torch.equal, *found))


def compared(name: str, tokens: int, targets: Targets) -> tuple[list[str], Found]:
    """In fp32, where rounding hides nothing: the loss is the peer's, and loss and gradients are the plain path's.

    Returns:
        The table, and the true loss and gradient of this family.

    Raises:
        SystemExit: the loss is another one, so that nothing else could be compared.
    """
    title = FAMILIES[name].title
    lines = [
        f"### {title}: the same numbers, in fp32",
        "",
        "| checkpointing | loss differs from the peer's by | gradient by | bits of the plain path's |",
        "|---|---|---|---|",
    ]
    pair = make_pair(name, "fp32", "fp32", tokens)
    for way in ("off", "on"):
        session = session_of(pair, way, compiled=False)
        same = equals_plain(pair, session)
        where = f"{title}, fp32, checkpointing {way}"
        mark = targets.at_most(f"{where}: loss or gradient is not the plain one to the bit", float(not same), 0.0)
        with session:
            ours, theirs = both(pair, session)
        loss, gradient = ours.off(theirs)
        if loss > SAME_LOSS or gradient > SAME_GRADIENT:
            raise SystemExit(f"{where}: not the same loss ({loss:.1e}) and gradients ({gradient:.1e})")
        lines.append(f"| {way} | {loss:.1e} | {gradient:.1e} | {'identical' if same else 'differs'}{mark} |")
    return lines, ours


def peer_step(pair: Pair) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(pair.weights, lr=1e-4, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(4)

    def step() -> None:
        pair.peer_loss(*draws(pair, generator)).backward()
        torch.nn.utils.clip_grad_norm_(pair.weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


class Row(NamedTuple):
    """Of one configuration: seconds per step of both sides, the median ratio of two that stood side by side, and how
    far each gradient is from the one in fp32.
    """

    own: float
    others: float
    ratio: float
    own_off: float
    others_off: float

    def line(self, what: str, mark: str) -> str:
        """Of the table; it is also said at once."""
        line = (
            f"| {what} | {self.own:.2f} | {self.others:.2f} | {self.ratio:.2f}{mark} | {self.own_off:.1%} | "
            f"{self.others_off:.1%} |"
        )
        print(line, file=sys.stderr, flush=True)
        return line


def _turns(where: str, pair: Pair, session: TrainSession, true: Found, rounds: int, same: bool = True) -> Row:
    """Steps of both sides by turns, so that what else the machine does falls on both.

    Args:
        same: both sides compute the same, so that Graft's numbers must be no worse.

    Raises:
        SystemExit: Graft's gradient is further off than the peer's.
    """
    theirs = peer_step(pair)
    with session:
        # The first pass of both, which is not timed.
        (_, own), (_, others) = (found.off(true) for found in both(pair, session))
        if same and own > MOST_ERROR * others + SAME_GRADIENT:
            raise SystemExit(f"{where}: the gradient is {own:.1%} off, the peer's {others:.1%}")
        turns = [(seconds(session.step), seconds(theirs)) for _ in range(rounds)]
    columns = *zip(*turns, strict=True), [mine / other for mine, other in turns]
    return Row(*map(statistics.median, columns), own, others)


def timed(name: str, compute: str, tokens: int, rounds: int, true: Found, targets: Targets) -> list[str]:
    title, dense = FAMILIES[name].title, compute
    lines = [
        f"### {title}: seconds per step",
        "",
        "| base | checkpointing | | Graft | diffusers + PEFT | Graft / peer | Graft's gradient is off | the peer's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fastest = {}
    whole = ((way, compiled) for way in ("off", "on") for compiled in (False, True))
    for precision, ways in (
        (dense, tuple(whole)),
        *((precision, (("on", False), ("on", True))) for precision in QUANTISED),
    ):
        pair = make_pair(name, precision, compute, tokens)
        for way, compiled in ways:
            how = "compiled" if compiled else "eager"
            where = f"{title}, {precision}, checkpointing {way}, {how}"
            limit = MOST_TIME[way if precision == dense else "quantised"][compiled]
            row = _turns(where, pair, session_of(pair, way, compiled), true, rounds)
            mark = targets.at_most(f"{where}: seconds by the peer's", row.ratio, limit)
            lines.append(row.line(f"{precision} | {way} | {how}", mark))
            if way == "on":
                fastest[precision] = min(row.own, fastest.get(precision, math.inf))
        if precision == "int8" and compute == "bf16" and cpu_flags().intersection(INT8_FLAGS):
            with eight_bit_choice.computing(pair.base, True):
                where = f"{title}, {precision}, checkpointing on, 8-bit products"
                row = _turns(where, pair, session_of(pair, "on", True), true, rounds, same=False)
            lines.append(row.line(f"{precision}, 8-bit products | on | compiled", ""))
            fastest["8-bit products"] = row.own
    if "8-bit products" in fastest:
        ratio = fastest["8-bit products"] / fastest[dense]
        mark = targets.at_most(f"{title}: 8-bit products by {dense}'s seconds", ratio, 1.0)
        lines += ["", f"int8 with 8-bit products takes {ratio:.2f}{mark} of {dense}'s time."]
    return lines


# --- the report -------------------------------------------------------------------------------------------------------


def cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def legend(compute: str, tokens: int, rounds: int) -> str:
    has = [flag for flag in FLAGS if flag in cpu_flags()]
    load = os.getloadavg()[0]
    lacks = [flag for flag in FLAGS if flag not in cpu_flags()]
    return f"""\
Krea 2 and Ideogram 4 with {BLOCKS} blocks of hidden width {measure.WIDTH}, rank {RANK} on the blocks' attention and MLP
linears, batch 1, {TEXT} text tokens; diffusers' models have the same weights, mapped by name.

**FLOPs and bytes** are counted in bf16 with {measure.IMAGE} tokens of the picture, of tensors without data: exact, and
the same on every machine. FLOPs are those of matrix products and attention; with checkpointing the least is without
recomputing the last block, whose tensors are there when the backward pass begins. Bytes are storages alive, weights and
adapter excluded: **kept** between forward and backward, by block; **peak** over both. The peer's adapter is bf16, the
least it can do; its fp32 adapter under autocast is shown beside.

**Seconds** are medians of {rounds} whole steps by turns, optimiser included, in {compute} with {tokens} tokens of the
picture; the gradient, of all B together, is compared with the one in fp32 of the same base before it was quantised.
torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores, load {load:.1f}.
The CPU has {", ".join(has) or "none of the instructions asked for"}; it has not {", ".join(lacks) or "missed any"}.
{"Without instructions for bf16 the CPU emulates it, so time is taken in fp32." if compute == "fp32" else ""}
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, help="of the picture, a square number, for times; 1024, or 256 in fp32")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--compute", choices=("bf16", "fp32"), help="dtype for times; by the CPU's instructions")
    parser.add_argument("--family", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    parsed = parser.parse_args()
    native = any(flag in cpu_flags() for flag in BF16_FLAGS)
    compute = parsed.compute or ("bf16" if native else "fp32")
    tokens = parsed.tokens or (measure.IMAGE if compute == "bf16" else 256)
    if math.isqrt(tokens) ** 2 != tokens:
        parser.error(f"--tokens is {tokens}; wanted a square number, such as 256")
    targets = Targets()
    parts = [f"# benchmarks/step.py\n\n{legend(compute, tokens, parsed.rounds)}"]
    for name in parsed.family:
        parts.append("\n".join(counted(name, targets)))
        print(parts[-1], flush=True)
        lines, true = compared(name, tokens, targets)
        parts.append("\n".join(lines))
        print(parts[-1], flush=True)
        parts.append("\n".join(timed(name, compute, tokens, parsed.rounds, true, targets)))
        print(parts[-1], flush=True)
    if os.environ.get("COMFYUI_PATH"):
        version = sides.open_comfyui()
        # Only now: importing ComfyUI sets some of torch's switches.
        import node_step

        for name in parsed.family:
            parts.append("\n".join(node_step.lines(name, parsed.rounds, version)))
            print(parts[-1], flush=True)
    missed = [f"- missed: {line}" for line in targets.missed]
    parts.append("\n".join(["### Targets", "", f"- met: {targets.met}", *missed]))
    print(parts[-1])
    parsed.output.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 1 if targets.missed else 0


if __name__ == "__main__":
    sys.exit(main())
