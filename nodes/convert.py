"""Convert LoRA, Inspect LoRA."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..lora_convert import LAYOUTS, convert_file, inspect_file
from ..lora_convert.convert import DTYPES
from ..trainer.errors import SettingsError
from . import host
from .bases import NONE, base_input, base_options
from .guard import guarded
from .kinds import CATEGORY
from .lora import AS_IT_IS, OfLoraFile, free, lora_target


class ConvertLora(OfLoraFile):
    """A LoRA file in another layout."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftConvertLora",
            display_name="Convert LoRA",
            category=CATEGORY,
            description=(
                "Brings a LoRA file into the layout of another program. Nothing is lost: every module is compared, and "
                "a file that would differ is not written. The original stays as it is."
            ),
            search_aliases=["graft", "lora converter", "diffusers to comfyui", "kohya to diffusers", "resize lora"],
            is_output_node=True,
            inputs=[
                io.Combo.Input("lora_name", options=host.lora_files(), tooltip="A file of models/loras."),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default="comfyui",
                    tooltip="The program that shall read the new file.",
                ),
                io.String.Input(
                    "name",
                    default="",
                    tooltip="The new file's name in models/loras, without ending. Empty: the old name and the layout.",
                ),
                io.Int.Input(
                    "rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Brings every module to this rank, which loses something: the report says how much. 0 "
                    "keeps everything.",
                ),
                io.Combo.Input(
                    "dtype", options=[AS_IT_IS, *DTYPES], default=AS_IT_IS, tooltip="bf16 and fp16 halve an fp32 file."
                ),
                io.Boolean.Input(
                    "bake",
                    default=False,
                    advanced=True,
                    tooltip="Makes a DoRA the full change that it is to the base, which must be chosen: a large file "
                    "that programs without DoRA can read.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    tooltip="Replaces a file of this name. Off, the new one is called name_2.",
                ),
                base_input(),
            ],
            outputs=[
                io.String.Output(display_name="path", tooltip="Where the new file is."),
                io.String.Output(display_name="report", tooltip="What was converted, and how exact it is."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, name: str | None) -> bool | str:
        """A name inside the folder of LoRAs, or none."""
        try:
            return True if not name else bool(lora_target(name))
        except SettingsError as error:
            return str(error)

    @classmethod
    @guarded
    def execute(
        cls,
        lora_name: str,
        layout: str,
        name: str,
        rank: int,
        dtype: str,
        bake: bool,
        overwrite: bool,
        base: str = NONE,
    ) -> io.NodeOutput:
        target = lora_target(name.strip() or f"{lora_name.removesuffix('.safetensors')}-{layout}")
        if not overwrite:
            target = free(target)
        report = convert_file(
            host.lora_path(lora_name),
            target,
            layout,
            rank=rank or None,
            dtype=None if dtype == AS_IT_IS else dtype,
            bake=bake,
            force=overwrite,
            **base_options(base),
        )
        text = "\n".join([*report.lines(), *report.notes])
        host.show_text(cls.hidden.unique_id, f"{target}\n{text}")
        return io.NodeOutput(str(target), text, ui=ui.PreviewText(text))


class InspectLora(OfLoraFile):
    """What a LoRA file holds."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftInspectLora",
            display_name="Inspect LoRA",
            category=CATEGORY,
            description=(
                "Says who made a LoRA file, its rank, how much it changes block by block, and which programs would "
                "load it."
            ),
            search_aliases=["graft", "lora info", "lora metadata", "lora rank", "analyse lora"],
            is_output_node=True,
            inputs=[
                io.Combo.Input("lora_name", options=host.lora_files(), tooltip="A file of models/loras."),
                base_input(),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="Everything found, as text.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @guarded
    def execute(cls, lora_name: str, base: str = NONE) -> io.NodeOutput:
        text = inspect_file(host.lora_path(lora_name), base_options(base).get("sizes")).text()
        host.show_text(cls.hidden.unique_id, text)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
