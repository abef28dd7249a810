"""Train LoRA: the run in a graph, its progress on the node, and what comes out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui
from PIL import Image

from . import host
from .guard import guarded
from .kinds import (
    CATEGORY,
    Dataset,
    EncodedDataset,
    LoraModel,
    LoraSettingsKind,
    Preview,
    PreviewRequest,
    Run,
    RunHandle,
    TrainSettingsKind,
)
from .pictures import loss_curve, read_image
from .runs import CONTINUE, EITHER, NEW, begin, name_fault, previews

log = logging.getLogger(__name__)

REDRAW = 2.0  # seconds between two drawings of the loss curve


def run_inputs() -> list[Any]:
    """The inputs that a run has, for Train LoRA and for Check Run."""
    return [
        io.Model.Input("model", tooltip="From Load Model for LoRA Training. Its own weights are never changed."),
        Dataset.Input("dataset", tooltip="From Encode Dataset or Dataset from Latents."),
        io.String.Input(
            "name",
            default="my_lora",
            tooltip="Names the run's folder, output/graft/name, and its LoRA file. A further run is called name_2: "
            "nothing is overwritten.",
        ),
        io.Combo.Input(
            "resume",
            options=[EITHER, NEW, CONTINUE],
            default=EITHER,
            tooltip="continue or new goes on with the last run of this name where it was stopped, exactly as if it had "
            "not been, or takes its result where it has ended; where anything that it depends on was changed, it "
            "begins a new run. new run always begins anew. continue never does, and says what is different.",
        ),
        LoraSettingsKind.Input("lora_settings", optional=True, tooltip="Left out: rank 32 on attention and MLP."),
        TrainSettingsKind.Input(
            "train_settings", optional=True, tooltip="Left out: 1500 steps, AdamW, learning rate 0.0001."
        ),
        Preview.Input("preview", optional=True, tooltip="Left out: no pictures while it trains."),
    ]


class OfRun(io.ComfyNode):
    """A node with `run_inputs`."""

    @classmethod
    def validate_inputs(cls, name: str | None) -> bool | str:
        """A name that can be a folder's."""
        return True if name is None else name_fault(name) or True


class Train(OfRun):
    """A run, from the checks to the LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrain",
            display_name="Train LoRA",
            category=CATEGORY,
            description=(
                "Trains a LoRA on the loaded model and gives the trained model out, ready for KSampler. Everything is "
                "checked first. Stop (ComfyUI's own) saves where it is, to be continued; the button Finish now ends "
                "the run early with its results."
            ),
            search_aliases=["graft", "train lora", "lora training", "finetune", "fine-tune", "trainer"],
            is_output_node=True,
            inputs=run_inputs(),
            outputs=[
                io.Model.Output(display_name="model", tooltip="The trained model, for KSampler and other samplers."),
                LoraModel.Output(display_name="lora", tooltip="For Save LoRA, or ComfyUI's Load LoRA Model."),
                io.Image.Output(display_name="loss", tooltip="The loss of every step, and its running mean."),
                Run.Output(display_name="run", tooltip="For Save LoRA and Plot Loss."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(
        cls,
        model: Any,
        dataset: EncodedDataset,
        name: str,
        resume: str,
        lora_settings: Any = None,
        train_settings: Any = None,
        preview: PreviewRequest | None = None,
    ) -> io.NodeOutput:
        from ..trainer.errors import TrainingError
        from ..trainer.preflight import check
        from ..trainer.run import train
        from ..trainer.watcher import STOP

        node = cls.hidden.unique_id
        settings, continuing, note, checked = begin(
            resume, model, dataset, name, lora_settings, train_settings, preview
        )
        if note:
            tell(node, note)
        shown = None if preview is None else previews(preview, model, dataset)
        if checked is None:
            checked = check(settings, None, continuing, memory=host.memory(), previews=shown is not None)
        guides = [] if preview is None or preview.unconditional is None else [preview.unconditional]
        with host.training(model, node, *guides) as finish:
            host.free_others(model, *guides)
            base = host.hosted_base(model).load(checked)
            if shown is not None and guides:
                shown = replace(shown, guide=host.hosted_base(guides[0]).guide(checked))
            try:
                watcher = graph_watcher(node, settings.train.steps, finish)
                result = train(checked, base, shown, watcher, continuing)
            except TrainingError as error:
                if not host.interrupted():
                    raise
                tell(node, str(error))  # stopped before the first step
                host.raise_interrupt()
            # Within the run, as long as the base is not moved: it holds the adapter on the base from now on.
            trained = host.trained_model(model, result.name)
        if result.ended == STOP:
            tell(
                node,
                f"Stopped after step {len(result.losses)}. The LoRA so far is {result.lora}. To go on, queue "
                "again: with resume at new run it would begin anew.",
            )
            host.raise_interrupt()
        return cls._outputs(node, result, trained, watcher)

    @classmethod
    def _outputs(cls, node: str | None, result: Any, trained: Any, watcher: Any) -> io.NodeOutput:
        from ..lora_convert import read_state

        early = " early, as asked," if result.ended else ""
        tell(node, f"Finished{early} after step {len(result.losses)}: {result.lora}")
        state, _ = read_state(result.lora)
        loss = read_image(result.folder / "loss.png")
        grid = result.folder / "preview.png"
        shown = grid if grid.is_file() else result.folder / "loss.png"
        # The page keeps showing the last picture of a node that was live, in the place of its output.
        watcher.show(len(result.losses), shown)
        handle = RunHandle(result.folder, result.lora)
        return io.NodeOutput(trained, state, loss, handle, ui=ui.PreviewImage(read_image(shown), cls=cls))


def graph_watcher(node: str | None, steps: int, finish: threading.Event) -> Any:
    """The engine's watcher that shows a run on its node.

    Args:
        node: the node's id.
        steps: of the run.
        finish: an event that the button "Finish now" sets.
    """
    from ..trainer.watcher import FINISH, SMOOTHED, STOP, Watcher, recent

    class GraphWatcher(Watcher):
        """Progress bar, preview picture and text of the node; ComfyUI's Stop and the button are its wishes."""

        def __init__(self) -> None:
            self.bar = host.progress(node, steps)
            self.previews = False  # there was one, which the node keeps showing
            self.drawn = 0.0
            self.seconds: list[float] = []

        def show(self, done: int, path: Path) -> None:
            """A picture in the place of the newest preview, at the end of the bar."""
            with Image.open(path) as file:
                self.bar.update(done, done, file.convert("RGB"))

        def say(self, sentence: str) -> None:
            tell(node, sentence)

        def stepped(self, logs: Sequence[Any], total: int, losses: Sequence[float]) -> None:
            step = logs[-1].step
            self.seconds = [*self.seconds, *(log.seconds for log in logs)][-SMOOTHED:]
            host.show_text(node, progress_text(step, total, recent(losses), recent(self.seconds)))
            picture = None
            if not self.previews and (time.monotonic() - self.drawn > REDRAW or step == total):
                self.drawn = time.monotonic()
                picture = loss_curve(losses)
            self.bar.update(step, total, picture)

        def previewed(self, step: int, path: Path) -> None:
            self.previews = True
            with Image.open(path) as file:
                self.bar.update(step, steps, file.convert("RGB"))

        def wish(self) -> str:
            if host.interrupted():
                return STOP
            return FINISH if finish.is_set() else ""

    return GraphWatcher()


def tell(node: str | None, words: str) -> None:
    """Words on the node, and in the log, where they stay."""
    log.info("Graft: %s", words)
    host.show_text(node, words)


def progress_text(step: int, total: int, loss: float, seconds: float) -> str:
    """One line: step, loss, speed, time left."""
    left = round((total - step) * seconds)
    hours, minutes = divmod(left // 60, 60)
    time_left = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{left} s"
    return f"step {step} of {total} · loss {loss:.4f} · {seconds:.2f} s/step · {time_left} left"
