"""LoRA Settings, Training Settings, Preview Settings: each optional, since a run has good ones without."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..trainer.errors import GraftError
from ..trainer.families import FAMILIES
from ..trainer.lora_settings import KINDS, LoraSettings
from ..trainer.objective import DISTRIBUTIONS
from ..trainer.optimizers import OPTIMIZERS
from ..trainer.schedule import SCHEDULES
from ..trainer.settings import AUTO, SAVE_DTYPES, TrainSettings
from .guard import guarded
from .kinds import CATEGORY, SWITCH, LoraSettingsKind, Preview, PreviewRequest, TrainSettingsKind

PRESETS = tuple(dict.fromkeys(preset for family in FAMILIES.values() for preset in family.presets))
MOST_PROMPTS = 8
SEEDS = 2**53 - 1  # the largest whole number that a widget holds exactly


class LoraSettingsNode(io.ComfyNode):
    """What the LoRA is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftLoraSettings",
            display_name="LoRA Settings",
            category=CATEGORY,
            description="How large the LoRA is and which parts of the model it changes.",
            search_aliases=["graft", "rank", "alpha", "dora", "lokr", "target modules"],
            inputs=[
                io.Int.Input(
                    "rank",
                    default=32,
                    min=1,
                    max=4096,
                    tooltip="The LoRA's capacity, and with it the size of its file. 16 to 32 for a person or an "
                    "object, 32 to 64 for a style.",
                ),
                io.Float.Input(
                    "alpha",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=1.0,
                    tooltip="Strength of what is learned, relative to rank. 0 takes the rank's value, which is the "
                    "usual choice.",
                ),
                io.Combo.Input(
                    "targets",
                    options=list(PRESETS),
                    default="attention+mlp",
                    tooltip="Which layers learn. attention alone is lighter and changes less; all adds the text layers "
                    "and modulation, which is seldom needed.",
                ),
                io.String.Input(
                    "blocks",
                    default="all",
                    advanced=True,
                    tooltip="Which of the model's blocks learn, such as 0-13 or 0,4,8-11; all for every one.",
                ),
                io.String.Input(
                    "target_pattern",
                    default="",
                    advanced=True,
                    tooltip="A regular expression over the layers' official names, in place of targets, such as "
                    r"blocks\.\d+\.attn\.wq. Empty for none.",
                ),
                io.Combo.Input(
                    "adapter",
                    options=list(KINDS),
                    default="lora",
                    advanced=True,
                    tooltip="lora is read by every program. dora also learns the length of each row, a little slower. "
                    "lokr makes small files, which diffusers cannot read.",
                ),
                io.Boolean.Input(
                    "rslora",
                    default=False,
                    advanced=True,
                    tooltip="Keeps high ranks (64 and more) from learning too slowly. Not with lokr.",
                ),
                io.Int.Input(
                    "lokr_factor",
                    default=-1,
                    min=-1,
                    max=4096,
                    advanced=True,
                    tooltip="For lokr alone: the lower, the larger the adapter. -1 chooses.",
                ),
                io.Float.Input(
                    "dropout",
                    default=0.0,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    advanced=True,
                    tooltip="Share of the LoRA's inputs that is left out at random while training, against learning by "
                    "heart. 0 is usual.",
                ),
            ],
            outputs=[LoraSettingsKind.Output(display_name="lora_settings", tooltip="For Train LoRA and Check Run.")],
        )

    @classmethod
    def validate_inputs(cls, adapter: str | None, rslora: bool | None, lokr_factor: int | None) -> bool | str:
        """What does not go together, said before anything is queued; ranges are the widgets' own."""
        if adapter is None or rslora is None or lokr_factor is None:  # one that comes from another node
            return True
        if lokr_factor == 0:
            return "lokr_factor is 0; wanted a positive number, or -1 to have it chosen"
        try:
            LoraSettings(kind=adapter, rslora=rslora, factor=lokr_factor)
        except GraftError as error:
            return str(error)
        return True

    @classmethod
    @guarded
    def execute(
        cls,
        rank: int,
        alpha: float,
        targets: str,
        blocks: str,
        target_pattern: str,
        adapter: str,
        rslora: bool,
        lokr_factor: int,
        dropout: float,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            LoraSettings(
                kind=adapter,
                rank=rank,
                alpha=alpha or float(rank),
                rslora=rslora,
                factor=lokr_factor,
                targets=target_pattern.strip() or targets,
                blocks=blocks.strip() or "all",
                dropout=dropout,
            )
        )


class TrainSettingsNode(io.ComfyNode):
    """How it is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftTrainSettings",
            display_name="Training Settings",
            category=CATEGORY,
            description="How long and how fast is trained. The defaults suit 10 to 50 pictures.",
            search_aliases=["graft", "learning rate", "steps", "optimizer", "scheduler", "ema", "batch size"],
            inputs=[*cls._main(), *cls._fine()],
            outputs=[TrainSettingsKind.Output(display_name="train_settings", tooltip="For Train LoRA and Check Run.")],
        )

    @staticmethod
    def _main() -> list[Any]:
        """What most people set."""
        return [
            io.Int.Input(
                "steps",
                default=1500,
                min=1,
                max=1_000_000,
                tooltip="Training steps. 1000 to 2000 for 10 to 30 pictures; look at the previews and stop when they "
                "are good.",
            ),
            io.Float.Input(
                "learning_rate",
                default=1e-4,
                min=0.0,
                max=1.0,
                step=1e-6,
                round=False,
                tooltip="How much each step changes. 0.0001 is a safe start; 0.0002 and more ruins Ideogram 4.",
            ),
            io.Int.Input(
                "batch_size",
                default=1,
                min=1,
                max=256,
                tooltip="Pictures in one pass. More is steadier, and takes more memory and time.",
            ),
            io.Int.Input(
                "save_every",
                default=250,
                min=0,
                max=1_000_000,
                tooltip="The LoRA and the state to resume from are saved after so many steps. 0 for the end alone.",
            ),
            io.Int.Input(
                "seed",
                default=0,
                min=0,
                max=SEEDS,
                control_after_generate=io.ControlAfterGenerate.fixed,
                tooltip="Of every random choice: the same seed and settings train the same LoRA.",
            ),
        ]

    @staticmethod
    def _fine() -> list[Any]:
        """What is better left alone at first."""
        return [
            io.Int.Input(
                "accumulation",
                default=1,
                min=1,
                max=256,
                advanced=True,
                tooltip="Passes before each change of the weights: the effect of a larger batch, in time and not in "
                "memory.",
            ),
            io.Combo.Input(
                "optimizer",
                options=list(OPTIMIZERS),
                default="adamw",
                advanced=True,
                tooltip="adamw8bit keeps its state in a quarter of the memory; it compiles its step, which needs "
                "Triton on a card.",
            ),
            io.Combo.Input(
                "schedule",
                options=list(SCHEDULES),
                default="constant",
                advanced=True,
                tooltip="Learning rate over time: constant, or falling to zero. With constant a finished run can be "
                "made longer: raise steps and continue.",
            ),
            io.Int.Input(
                "warmup_steps",
                default=20,
                min=0,
                max=100_000,
                advanced=True,
                tooltip="The learning rate rises from zero over so many steps.",
            ),
            io.Float.Input(
                "weight_decay",
                default=1e-4,
                min=0.0,
                max=1.0,
                step=1e-5,
                round=False,
                advanced=True,
                tooltip="Pulls the LoRA's weights gently to zero.",
            ),
            io.Float.Input(
                "max_grad_norm",
                default=1.0,
                min=0.0,
                max=1000.0,
                step=0.1,
                advanced=True,
                tooltip="Gradients are scaled down to this length, so that one odd picture cannot do harm. 0 leaves "
                "them as they are.",
            ),
            io.Combo.Input(
                "timesteps",
                options=list(DISTRIBUTIONS),
                default="family",
                advanced=True,
                tooltip="Which noise levels are trained most. family: as the model itself was trained.",
            ),
            io.Combo.Input(
                "checkpointing",
                options=list(SWITCH),
                default=AUTO,
                advanced=True,
                tooltip="Calculates parts twice in place of keeping them: far less memory, about a third slower. auto: "
                "in as few blocks as it takes to fit.",
            ),
            io.Float.Input(
                "ema",
                default=0.0,
                min=0.0,
                max=0.9999,
                step=0.001,
                round=False,
                advanced=True,
                tooltip="Saves a moving average of the LoRA, which is smoother: 0.99 is usual, 0 for none.",
            ),
            io.Int.Input(
                "keep",
                default=3,
                min=1,
                max=1000,
                advanced=True,
                tooltip="So many of the LoRAs saved on the way are kept, the newest.",
            ),
            io.Int.Input(
                "held_out_every",
                default=250,
                min=0,
                max=1_000_000,
                advanced=True,
                tooltip="Steps between measurements on the held-out pictures, if there are any. 0 for the end alone.",
            ),
            io.Combo.Input(
                "save_dtype",
                options=list(SAVE_DTYPES),
                default="fp32",
                advanced=True,
                tooltip="Precision of the saved LoRA. bf16 and fp16 halve the file.",
            ),
            io.Combo.Input(
                "compile",
                options=list(SWITCH),
                default=AUTO,
                advanced=True,
                tooltip="Compiles the small calculations between the large ones: a slower first step, faster ones "
                "after it. auto: on a card where Triton works.",
            ),
            io.Int.Input(
                "log_every",
                default=1,
                min=1,
                max=1000,
                optional=True,
                advanced=True,
                tooltip="Steps between two looks at the loss, each of which waits for the card. More saves a little "
                "time with small pictures; every step is still logged.",
            ),
        ]

    @classmethod
    @guarded
    def execute(cls, checkpointing: str, compile: str, **settings: Any) -> io.NodeOutput:
        train = TrainSettings(checkpointing=SWITCH[checkpointing], compile=SWITCH[compile], **settings)
        return io.NodeOutput(train)


class PreviewSettingsNode(io.ComfyNode):
    """Pictures that are sampled while it trains."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        prompts = io.Autogrow.TemplatePrefix(
            io.Conditioning.Input("prompt", tooltip="One picture is made of each."), prefix="prompt", min=1,
            max=MOST_PROMPTS,
        )  # fmt: skip
        return io.Schema(
            node_id="GraftPreviewSettings",
            display_name="Preview Settings",
            category=CATEGORY,
            description=(
                "Pictures of your prompts while the LoRA is trained, always from the same noise, so that you see what "
                "has changed. The first is made without the LoRA."
            ),
            search_aliases=["graft", "sample while training", "validation", "training preview"],
            inputs=[
                io.Autogrow.Input(
                    "prompts",
                    template=prompts,
                    tooltip="Conditioning of the pictures, one each, as CLIP Text Encode gives it. Connect one and "
                    "the next socket appears.",
                ),
                io.Vae.Input("vae", tooltip="Decodes the pictures: the VAE of Encode Dataset."),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="What the pictures are steered away from. Left out: the empty prompt for Krea 2, no text "
                    "at all for Ideogram 4, as the models are meant.",
                ),
                io.Model.Input(
                    "unconditional",
                    optional=True,
                    tooltip="For Ideogram 4: its second transformer, from another Load Model for LoRA Training, which "
                    "makes the unconditional pass. Left out: the trained one, without text.",
                ),
                io.Int.Input(
                    "every",
                    default=250,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps between previews; 0 for before and after alone. Each takes as long as a picture "
                    "takes in KSampler.",
                ),
                io.Int.Input(
                    "width",
                    default=0,
                    min=0,
                    max=4096,
                    step=16,
                    tooltip="In pixels; 0 with height 0 for the size of the dataset's first picture.",
                ),
                io.Int.Input(
                    "height",
                    default=0,
                    min=0,
                    max=4096,
                    step=16,
                    tooltip="In pixels; 0 with width 0 for the size of the dataset's first picture.",
                ),
                io.Int.Input(
                    "sampling_steps",
                    default=0,
                    min=0,
                    max=200,
                    tooltip="Sampler steps of a preview; 0 for the model's own number.",
                ),
                io.Float.Input(
                    "guidance",
                    default=0.0,
                    min=0.0,
                    max=30.0,
                    step=0.1,
                    tooltip="CFG scale, 1 for none, which is twice as fast; 0 for the model's own.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=SEEDS,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Of the first picture's noise; the next pictures count on from it.",
                ),
            ],
            outputs=[Preview.Output(display_name="preview", tooltip="For Train LoRA and Check Run.")],
        )

    @classmethod
    def validate_inputs(cls, width: int | None, height: int | None, prompts: Any = None) -> bool | str:
        """One side alone says no size. ComfyUI 0.33 hands over an Autogrow input too, asked for or not."""
        if width is None or height is None:  # one that comes from another node
            return True
        if bool(width) != bool(height):
            return f"a preview of {width} × {height} pixels cannot be made: set both sides, or both to 0"
        return True

    @classmethod
    @guarded
    def execute(
        cls,
        prompts: dict[str, Any],
        vae: Any,
        every: int,
        width: int,
        height: int,
        sampling_steps: int,
        guidance: float,
        seed: int,
        negative: Any = None,
        unconditional: Any = None,
    ) -> io.NodeOutput:
        given = tuple(prompt for prompt in prompts.values() if prompt is not None)
        return io.NodeOutput(
            PreviewRequest(given, negative, vae, width, height, sampling_steps, guidance, every, seed, unconditional)
        )
