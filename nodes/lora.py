"""Load LoRA (any layout), LoRA Strength, Save LoRA."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..lora_convert import LAYOUTS, Sizes, convert_state, open_lora, read_lora, write_state
from ..lora_convert.convert import DTYPES
from ..trainer.errors import SettingsError, some
from ..trainer.settings import CONFIG
from . import host
from .bases import NONE, base_input, base_options
from .guard import guarded
from .kinds import CATEGORY, LoraModel, Run, RunHandle

AS_IT_IS = "as it is"
STRENGTH = {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}


class OfLoraFile(io.ComfyNode):
    """A node whose input `lora_name` is a file of ComfyUI's list of LoRAs."""

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None, **_others: Any) -> str:
        """Changes with the file, which may be written anew under its name."""
        return "" if lora_name is None else host.file_mark(host.lora_path(lora_name))


class LoadLora(OfLoraFile):
    """A LoRA file of any producer on a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoadLora",
            display_name="Load LoRA (any layout)",
            category=CATEGORY,
            description=(
                "Applies a LoRA for Krea 2 or Ideogram 4, whichever program made it, without converting the file. Says "
                "how many of its modules took effect and names those that did not."
            ),
            search_aliases=["graft", "lora loader", "load lora", "diffusers lora", "kohya lora", "ai-toolkit lora"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="From Load Model for LoRA Training, Train LoRA, or ComfyUI's Load Diffusion Model."
                ),
                io.Combo.Input("lora_name", options=host.lora_files(), tooltip="A file of models/loras."),
                io.Float.Input(
                    "strength", tooltip="1 as trained, 0 for nothing, negative for the opposite.", **STRENGTH
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model with the LoRA."),
                io.String.Output(display_name="report", tooltip="How many modules took effect, and which did not."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(cls, model: Any, lora_name: str, strength: float) -> io.NodeOutput:
        path = host.lora_path(lora_name)
        state, metadata = open_lora(path, skip_unknown=True)
        notes: tuple[str, ...] = ()
        if host.is_hosted(model):
            file = host.hosted_base(model).file
            lora = read_lora(state, metadata, Sizes.of(file.family.name, file.shapes), skip_unknown=True)
            changed, applied, missing = host.with_lora(model, lora, strength, path.stem)
            notes = lora.notes
        else:
            changed, applied, missing = host.stock_with_lora(model, state, metadata, strength)
        report = f"{applied} modules of {lora_name} applied at strength {strength:g}"
        if missing:
            report += f"\n{len(missing)} keys or modules had no effect: {some(missing, 20)}"
        report = "\n".join([report, *notes])
        host.show_text(cls.hidden.unique_id, report)
        return io.NodeOutput(changed, report)


class AdapterStrength(io.ComfyNode):
    """The trained model with its LoRA stronger or weaker."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftAdapterStrength",
            display_name="LoRA Strength",
            category=CATEGORY,
            description="Makes the LoRA that was put on last stronger or weaker, without training or loading anything.",
            search_aliases=["graft", "lora weight", "adapter strength", "lora scale"],
            inputs=[
                io.Model.Input("model", tooltip="From Train LoRA or Load LoRA (any layout)."),
                io.Float.Input("strength", tooltip="1 as trained, 0 for the base model exactly.", **STRENGTH),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model at this strength.")],
        )

    @classmethod
    @guarded
    def execute(cls, model: Any, strength: float) -> io.NodeOutput:
        return io.NodeOutput(host.with_strength(model, strength))


class SaveLora(io.ComfyNode):
    """A trained LoRA among ComfyUI's."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveLora",
            display_name="Save LoRA",
            category=CATEGORY,
            description=(
                "Writes a trained LoRA into models/loras, in the layout of the program that shall read it. Every "
                "module is compared with the original before the file is put in place."
            ),
            search_aliases=["graft", "export lora", "save lora", "lora for diffusers"],
            is_output_node=True,
            inputs=[
                io.MultiType.Input(
                    "lora",
                    types=[Run, LoraModel],
                    tooltip="The run or the lora of Train LoRA. The run also knows its base and its notes.",
                ),
                io.String.Input(
                    "name",
                    default="graft/my_lora",
                    tooltip="The file's name in models/loras, without ending; folders are made.",
                ),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default="comfyui",
                    tooltip="How the file names its keys: comfyui for here, diffusers, kohya, ai-toolkit and others "
                    "for those programs.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AS_IT_IS, *DTYPES],
                    default=AS_IT_IS,
                    tooltip="bf16 and fp16 halve the file.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    tooltip="Replaces a file of this name. Off, the new one is called name_2.",
                ),
                base_input(),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where the file is.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, name: str | None) -> bool | str:
        """A name inside the folder of LoRAs."""
        try:
            return True if name is None else bool(lora_target(name))
        except SettingsError as error:
            return str(error)

    @classmethod
    @guarded
    def execute(
        cls, lora: RunHandle | dict[str, Any], name: str, layout: str, dtype: str, overwrite: bool, base: str = NONE
    ) -> io.NodeOutput:
        from ..trainer.checkpoints import converter_options

        options = base_options(base)
        if isinstance(lora, RunHandle):
            state, metadata = open_lora(lora.lora)
            if not options and (trained_on := _base_of(lora.folder)):
                options = converter_options(trained_on)
        else:
            state, metadata = lora, {}
        target = lora_target(name)
        if not overwrite:
            target = free(target)
        chosen = None if dtype == AS_IT_IS else dtype
        written, header, report = convert_state(state, metadata, layout, dtype=chosen, **options)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_state(target, written, header, overwrite=overwrite)
        notes = "".join(f"\n{note}" for note in report.notes)
        host.show_text(cls.hidden.unique_id, f"{len(report.modules)} modules in {target}{notes}")
        return io.NodeOutput(str(target))


def _base_of(run: Path) -> Path | None:
    """The base that a run was trained on, if its file is still there."""
    config = run / CONFIG
    path = json.loads(config.read_text(encoding="utf-8"))["model"]["path"] if config.is_file() else ""
    return Path(path) if path and Path(path).exists() else None


def lora_target(name: str) -> Path:
    """Where a LoRA of this name is written: in ComfyUI's first folder of LoRAs.

    Raises:
        SettingsError: no name, or one that leads out of that folder.
    """
    folder = Path(os.path.normpath(host.lora_folders()[0].absolute()))
    plain = name.strip().removesuffix(".safetensors").replace("\\", "/")
    # By its words: a folder in it may be a link to another disk.
    target = Path(os.path.normpath(folder / f"{plain}.safetensors"))
    if not plain or plain.endswith("/") or not target.is_relative_to(folder):
        raise SettingsError(f"name {name!r} is no file's in {folder}; give one such as graft/my_lora")
    return target


def free(path: Path) -> Path:
    """The path itself, or name_2, name_3, … where it is taken."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return found
