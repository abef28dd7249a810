"""A training step of ComfyUI's TrainLoraNode beside Graft's: a part of `step.py`, for the Python that ComfyUI runs on.

The node cannot be told what to train, and trains every layer: here Graft does so too. The node's default checkpointing
is that of depth 1, which recomputes the whole model at once; depth 2 is the one that goes by blocks.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import sides
import tiny
import torch
from graft_lora.trainer import adapters
from graft_lora.trainer.base_model import Base, load_base
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.lora_settings import LoraSettings
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from measure import LATENTS, RANK, SIZES, TEXT

HOW = """\
One picture with its caption, bf16, eager. FLOPs and bytes are counted in real steps: those of the node's forward and
backward pass, and of Graft's whole step, above what was alive before. Seconds are medians of whole steps, of runs that
take turns; each run's first step does not count."""
HEAD = (
    "| checkpointing | side | GFLOP | peak, MiB | s/step |",
    "|---|---|---|---|---|",
)
NODE = {"training_dtype": "bf16", "lora_dtype": "bf16", "rank": RANK, "learning_rate": 1e-4}
LORA = LoraSettings(rank=RANK, alpha=RANK, targets="all")
RUNS = 2  # of each side


class Side(NamedTuple):
    """A way to train.

    Attributes:
        checkpointing: as the table has it.
        depth: of the node's checkpointing, 0 for none; None for Graft.
    """

    checkpointing: str
    depth: int | None


SIDES = (Side("off", 0), Side("off", None), Side("on, the default", 1), Side("on, by blocks", 2), Side("on", None))


def lines(name: str, rounds: int, version: str) -> list[str]:
    """The table for a family; ComfyUI, whose version that is, can be imported."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1)
    text = torch.randn(TEXT, family.conditioning_width(SIZES[name]), generator=generator)
    samples = [Sample("a", "", torch.randn(LATENTS[name], generator=generator), text)]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write(tiny.build(name, config=SIZES[name]), Path(folder) / f"{name}.safetensors", torch.bfloat16)
        bench = Bench(sides.Stock(name, path), load_base(path, "bf16", "bf16"), samples)
        seconds: dict[Side, list[float]] = {side: [] for side in SIDES}
        for _ in range(RUNS):
            for side, taken in seconds.items():
                taken += bench.seconds(side, rounds)
        found = [
            f"### {family.title}: beside ComfyUI {version}'s TrainLoraNode, every layer trained",
            "",
            HOW,
            "",
            *HEAD,
        ]
        for side, taken in seconds.items():
            gflop, peak = bench.step(side)
            who = "Graft" if side.depth is None else "TrainLoraNode"
            found.append(
                f"| {side.checkpointing} | {who} | {gflop:.0f} | {peak:.0f} | {statistics.median(taken):.2f} |"
            )
    return found


class Bench(NamedTuple):
    """Both sides on the same weights and picture."""

    stock: sides.Stock
    base: Base
    samples: list[Sample]

    def session(self, side: Side, steps: int) -> TrainSession:
        train = TrainSettings(steps=steps, checkpointing=side.checkpointing != "off")
        return TrainSession(self.base, self.samples, LORA, train, adapters.unused_name(self.base.model, "node"))

    def node(self, side: Side, steps: int) -> None:
        """A run of the node."""
        how = {"gradient_checkpointing": bool(side.depth), "checkpoint_depth": side.depth or 1}
        self.stock.train(self.samples, steps=steps, **NODE, **how)

    def seconds(self, side: Side, rounds: int) -> list[float]:
        """Of each step of a run but the first."""
        if side.depth is None:
            session = self.session(side, rounds + 1)
            with session:
                marks = [time.perf_counter() for _ in session.steps()]
            adapters.remove(self.base.model, session.name)
        else:
            from comfy_extras.nodes_train import TrainSampler

            marks = []
            with sides.watched(TrainSampler, "fwd_bwd", lambda *_, **__: marks.append(time.perf_counter())):
                self.node(side, rounds + 2)
            marks = marks[1:]
        return [later - sooner for sooner, later in itertools.pairwise(marks)]

    def step(self, side: Side) -> sides.Step:
        """What a step takes."""
        if side.depth is not None:
            return sides.step_of_node(lambda: self.node(side, 1))
        session = self.session(side, 2)
        found = sides.step_of_graft(session)
        adapters.remove(self.base.model, session.name)
        return found
