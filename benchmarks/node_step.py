"""A training step of ComfyUI's TrainLoraNode beside Graft's: a part of `step.py`, for the Python that ComfyUI runs on.

The node cannot be told what to train, and trains every layer: here Graft does so too. The node's default checkpointing
is that of depth 1, which recomputes the whole model at once; depth 2 is the one that goes by blocks.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import sides
import tiny
import torch
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.live_bytes import LiveBytes, tensors_of
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from measure import GFLOP, LATENTS, MIB, RANK, SIZES, TEXT, Flops

HEAD = (
    "| checkpointing | side | GFLOP | peak, MiB | s/step |",
    "|---|---|---|---|---|",
)
DEPTHS = {"off": None, "on, the default": 1, "on, by blocks": 2}
NODE = {"training_dtype": "bf16", "lora_dtype": "bf16", "rank": RANK, "learning_rate": 1e-4}
LORA = LoraSettings(rank=RANK, alpha=RANK, targets="all")


class Found(NamedTuple):
    """Of one side: exact counts of a step, the bytes without the weights, and the median of its seconds."""

    gflop: float
    peak: float
    seconds: float

    def line(self, what: str) -> str:
        return f"| {what} | {self.gflop:.0f} | {self.peak:.0f} | {self.seconds:.2f} |"


def lines(name: str, rounds: int, version: str) -> list[str]:
    """The table for a family, in bf16; ComfyUI, whose version that is, can be imported."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(TEXT, family.conditioning_width(SIZES[name]), generator=generator)
    samples = [Sample("a", "", torch.randn(LATENTS[name], generator=generator), text)]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write(tiny.build(name, config=SIZES[name]), Path(folder) / f"{name}.safetensors", torch.bfloat16)
        stock = sides.Stock(name, path)
        base = load_base(path, "bf16", "bf16")
        found = [f"### {family.title}: beside ComfyUI {version}'s TrainLoraNode, every layer trained, eager", "", *HEAD]
        for way, depth in DEPTHS.items():
            how = {"gradient_checkpointing": depth is not None, "checkpoint_depth": depth or 1}
            train = TrainSettings(steps=rounds + 2, checkpointing=depth is not None)
            session = TrainSession(base, samples, LORA, train, f"depth_{depth}")
            found.append(_of_node(stock, samples, rounds, how).line(f"{way} | TrainLoraNode"))
            found.append(_of_graft(session, rounds).line(f"{way} | Graft"))
    return found


def _of_node(stock: sides.Stock, samples: list[Sample], rounds: int, how: dict[str, Any]) -> Found:
    from comfy_extras.nodes_train import TrainSampler

    starts: list[float] = []
    with sides.watched(TrainSampler, "fwd_bwd", lambda *_, **__: starts.append(time.perf_counter())):
        stock.train(samples, steps=rounds + 2, **NODE, **how)
    # The first one makes what the others find.
    taken = [later - sooner for sooner, later in itertools.pairwise(starts[1:])]
    counts: list[tuple[float, float]] = []
    with LiveBytes(elsewhere=tensors_of(stock.model.model)) as live, Flops() as flops:

        def before(*_: Any, **__: Any) -> None:
            live.reset()
            counts.append((live.now, flops.total))

        def after(*_: Any, **__: Any) -> None:
            counts.append((live.peak, flops.total))

        with sides.watched(TrainSampler, "fwd_bwd", before, after):
            stock.train(samples, steps=1, **NODE, **how)
    (alive, none), (peak, total) = counts
    return Found((total - none) / GFLOP, (peak - alive) / MIB, statistics.median(taken))


def _of_graft(session: TrainSession, rounds: int) -> Found:
    with session:
        session.step()
        taken = [_seconds(session.step) for _ in range(rounds)]
        with LiveBytes(elsewhere=tensors_of(session.base.model)) as live, Flops() as flops:
            start = live.now
            session.step()
    return Found(flops.total / GFLOP, (live.peak - start) / MIB, statistics.median(taken))


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
