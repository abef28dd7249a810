"""Check Run, Estimate Memory, Plot Loss."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..trainer.errors import DatasetError, GraftError
from ..trainer.families import FAMILIES
from ..trainer.formats import FORMATS
from ..trainer.settings import AUTO
from . import host
from .guard import for_graph, guarded
from .kinds import CATEGORY, EncodedDataset, PreviewRequest, Run, RunHandle
from .pictures import loss_plot_image
from .runs import begin, previews
from .train import OfRun, run_inputs

BOTH = "both"
MARKS = {True: "✓", False: "✗", None: "–"}


class CheckRun(OfRun):
    """Every check of a run, before anything is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftCheckRun",
            display_name="Check Run",
            category=CATEGORY,
            description=(
                "Makes every check that Train LoRA makes, with the same inputs, and says what each found: what is "
                "wrong and what to do, and how the model will fit into memory. Nothing is loaded or written."
            ),
            search_aliases=["graft", "preflight", "dry run", "validate training", "will it fit"],
            is_output_node=True,
            inputs=run_inputs(),
            outputs=[
                io.Model.Output(display_name="model", tooltip="The same model: Train LoRA then waits for the checks."),
                io.String.Output(display_name="report", tooltip="One line for each check."),
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
        from ..trainer.preflight import verdicts

        begun = begin(resume, model, dataset, name, lora_settings, train_settings, preview)
        found = verdicts(begun.settings, None, begun.resume, memory=host.memory(), previews=preview is not None)
        if preview is not None:
            found.append(_previews(preview, model, dataset))
        wrong = sum(verdict.ok is False for verdict in found)
        head = (
            f"{wrong} of {len(found)} checks failed" if wrong else f"All {len(found)} checks passed: it can be trained"
        )
        lines = [f"{MARKS[verdict.ok]} {verdict.name}: {for_graph(verdict.message)}" for verdict in found]
        notes = [f"{MARKS[None]} {note}" for note in (begun.note, *host.option_notes()) if note]
        text = "\n".join([head, *lines, *notes])
        host.show_text(cls.hidden.unique_id, text)
        return io.NodeOutput(model, text, ui=ui.PreviewText(text))


def _previews(request: PreviewRequest, model: Any, dataset: EncodedDataset) -> Any:
    """The verdict on what the engine is given ready made."""
    from ..trainer.preflight import Verdict

    try:
        made = previews(request, model, dataset)
    except GraftError as error:
        return Verdict("previews", False, str(error))
    return Verdict("previews", True, f"{len(made.prompts)} pictures")


class EstimateMemory(io.ComfyNode):
    """What a run takes on a card."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftEstimateMemory",
            display_name="Estimate Memory",
            category=CATEGORY,
            description="How training fits on a card of a given size, before you download a model or buy a card.",
            search_aliases=["graft", "vram", "memory estimate", "will it fit", "gpu memory"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "family",
                    options=[BOTH, *FAMILIES],
                    default=BOTH,
                    tooltip="The model, in its published size.",
                ),
                io.Float.Input(
                    "card_gb",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=1.0,
                    tooltip="Memory of the card. 0 for a table of 8, 12, 16 and 24 GB.",
                ),
                io.Float.Input(
                    "main_memory_gb", default=24.0, min=1.0, max=4096.0, step=1.0, tooltip="Free main memory."
                ),
                io.Int.Input(
                    "resolution",
                    default=0,
                    min=0,
                    max=4096,
                    step=16,
                    tooltip="Side of the pictures. 0 for 1024, or 512 on cards below 12 GB.",
                ),
                io.Int.Input("rank", default=32, min=1, max=4096, tooltip="Of the LoRA."),
                io.Combo.Input(
                    "precision", options=[AUTO, *FORMATS], default=AUTO, tooltip="auto takes the best that fits."
                ),
            ],
            outputs=[io.String.Output(display_name="table", tooltip="In Markdown.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(
        cls, family: str, card_gb: float, main_memory_gb: float, resolution: int, rank: int, precision: str
    ) -> io.NodeOutput:
        from ..trainer.estimate import CARDS, Question, rows, table

        families = list(FAMILIES.values()) if family == BOTH else [FAMILIES[family]]
        question = Question(main_memory_gb, resolution or None, rank, precision)
        text = table(rows(families, [card_gb] if card_gb else CARDS, question))
        host.show_text(cls.hidden.unique_id, text)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


class PlotLoss(io.ComfyNode):
    """The loss of a run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftPlotLoss",
            display_name="Plot Loss",
            category=CATEGORY,
            description=(
                "Draws the loss of every step and its running mean. A single step says little: the noise levels "
                "differ. Watch the mean, and the previews more than that."
            ),
            search_aliases=["graft", "loss graph", "loss curve", "training chart"],
            is_output_node=True,
            inputs=[Run.Input("run", tooltip="From Train LoRA.")],
            outputs=[io.Image.Output(display_name="plot", tooltip="The curve as a picture.")],
        )

    @classmethod
    @guarded
    def execute(cls, run: RunHandle) -> io.NodeOutput:
        from ..trainer.run import LOG, logged

        path = run.folder / LOG
        if not path.is_file():
            raise DatasetError(f"{path} is not there: the run's folder was moved or removed")
        lines = logged(path)
        if not lines:
            raise DatasetError(f"{path} is empty: the run has not made a step yet")
        plot = loss_plot_image([line["loss"] for line in lines], run.folder.name)
        return io.NodeOutput(plot, ui=ui.PreviewImage(plot, cls=cls))
