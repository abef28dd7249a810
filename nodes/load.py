"""Load Model for LoRA Training."""

from __future__ import annotations

import threading
from typing import Any

from comfy_api.latest import io

from ..lora_convert.errors import LoraError
from ..trainer.errors import GraftError
from ..trainer.families import FAMILIES
from ..trainer.formats import PRECISIONS
from ..trainer.settings import AUTO
from . import host
from .guard import for_graph, guarded
from .kinds import CATEGORY, SWITCH


class LoadModel(io.ComfyNode):
    """A model file as a MODEL that can be trained and sampled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoadModel",
            display_name="Load Model for LoRA Training",
            category=CATEGORY,
            description=(
                "Loads Krea 2 or Ideogram 4 so that Train LoRA can train on it and samplers can use it. "
                "The file is checked now; its weights are read when they are first needed."
            ),
            search_aliases=["graft", "lora training", "train krea2", "train ideogram4", "trainable model"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=host.model_files(),
                    tooltip="A file of models/diffusion_models: the base of Krea 2 or Ideogram 4, in bf16, fp16, fp32, "
                    "fp8, int8 or nf4. Which of the two it is, the file itself tells.",
                ),
                io.Combo.Input("precision", options=[AUTO, *PRECISIONS], default=AUTO, tooltip=precision_tooltip()),
                io.Combo.Input(
                    "compute_dtype",
                    options=["bf16", "fp32"],
                    default="bf16",
                    advanced=True,
                    tooltip="What the model calculates in. bf16, unless the card has no native bf16 (older than "
                    "NVIDIA's RTX 30 series): then fp32.",
                ),
                io.Int.Input(
                    "blocks_on_cpu",
                    default=-1,
                    min=-1,
                    max=100,
                    advanced=True,
                    tooltip="How many of the model's blocks wait in main memory and come to the card in turn: slower, "
                    "but fits into less. -1 takes as few as the card's memory allows.",
                ),
                io.Boolean.Input(
                    "allow_distilled",
                    default=False,
                    advanced=True,
                    tooltip="Permits a distilled model, such as Krea 2 Turbo, as the base. Training undoes its "
                    "distillation: train on the base model, then use the LoRA on Turbo.",
                ),
                io.Boolean.Input(
                    "keep_quantized",
                    default=False,
                    advanced=True,
                    tooltip="Keeps the quantised weights on disk (output/graft/quantized), so that the next session "
                    "loads them in seconds. Takes as much disk as the model takes memory.",
                ),
                io.Combo.Input(
                    "eight_bit_compute",
                    options=list(SWITCH),
                    default="off",
                    optional=True,
                    advanced=True,
                    tooltip="Trains an fp8, int8 or mxfp8 model with products in 8 bits, a little coarser. auto: where "
                    "a short measurement at the start of a run finds them faster. on: refused where they cannot be. "
                    "Not yet seen on a card.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="For Train LoRA, and for samplers as it is. Apply LoRAs to it with Load LoRA (any layout).",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None) -> bool | str:
        """Reads the file's header before anything is queued."""
        from ..trainer.checkpoints import open_model_file

        if model_name is None:  # it comes from another node
            return True
        try:
            # The second one of a pair too: previews use it, and a run on it is refused by its own checks.
            open_model_file(host.model_path(model_name), unconditional=True)
        except (GraftError, LoraError, OSError) as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None, **_others: Any) -> str:
        """Changes with the file, which may be downloaded anew under its name."""
        return "" if model_name is None else host.file_mark(host.model_path(model_name))

    @classmethod
    @guarded
    def execute(
        cls,
        model_name: str,
        precision: str,
        compute_dtype: str,
        blocks_on_cpu: int,
        allow_distilled: bool,
        keep_quantized: bool,
        eight_bit_compute: str = "off",
    ) -> io.NodeOutput:
        kept = host.output_directory() / "graft" / "quantized" if keep_quantized else None
        return io.NodeOutput(
            host.load_base_model(
                host.model_path(model_name),
                precision=precision,
                compute_dtype=compute_dtype,
                allow_distilled=allow_distilled,
                blocks_on_cpu=AUTO if blocks_on_cpu < 0 else blocks_on_cpu,
                quantized_cache="" if kept is None else str(kept),
                eight_bit_compute=SWITCH[eight_bit_compute],
            )
        )


PRECISION = (
    "How the frozen weights are kept in memory while training; the LoRA itself is trained in fp32. auto takes the best "
    "that fits the card. bf16: as published. fp8 and int8: half of that. nf4: a quarter, coarsest. mxfp8: like "
    "fp8, for eight_bit_compute on Blackwell cards. as-stored: an fp8 or int8 file of ComfyUI's as it is, without "
    "quantising it anew."
)
PENDING = "Which of them this machine can run is being tried: reload the page to read it."
_asked, _found = 0, PENDING


def precision_tooltip() -> str:
    """What the precisions are, and which of them this machine can train in.

    Trying them imports torchao, for seconds in which ComfyUI would neither start nor answer: a thread does it, when it
    is asked for the second time, by a page.
    """
    global _asked
    _asked += 1
    if _asked == 2:
        threading.Thread(target=_try, name="graft-precisions", daemon=True).start()
    return f"{PRECISION}\n{_found}"


def _try() -> None:
    global _found
    _found = _verdicts()


def _verdicts() -> str:
    """One line for all precisions that can be used, and one for each reason against one."""
    try:
        faults = precision_faults()
    except Exception as error:  # whatever a driver or a broken install raises: a tooltip must not break the node
        return f"Which of them this machine can run could not be found out: {error}"
    able = [name for name, found in faults.items() if len(found) < len(FAMILIES)]
    lines = [f"This machine can run: {', '.join(able) or 'none of them'}."]
    for name, found in faults.items():
        lines += [f"Not {name}: {for_graph(fault)}." for fault in dict.fromkeys(found.values())]
    return "\n".join(lines)


def precision_faults() -> dict[str, dict[str, str]]:
    """Precision → family → why it cannot be used there."""
    from ..trainer.devices import read_device
    from ..trainer.modes import modes

    device = read_device(host.device())
    found = {name: modes(device, family) for name, family in FAMILIES.items()}
    return {
        precision: {name: fault for name, faults in found.items() if (fault := faults[precision])}
        for precision in PRECISIONS
    }
