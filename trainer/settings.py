"""The settings of a run, as a TOML file holds them; each unknown or ill-typed one is named."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .base_model import COMPUTE_DTYPES, PRECISIONS
from .errors import SettingsError
from .families import FAMILIES
from .lora_settings import LoraSettings
from .objective import DISTRIBUTIONS
from .optimizers import OPTIMIZERS
from .schedule import SCHEDULES

AUTO = "auto"  # the memory plan chooses
CONFIG = "config.json"  # a run's settings, in its folder
SAVE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def one_of(what: str, value: str, choices: typing.Iterable[str]) -> None:
    """Raises a `SettingsError` where the value is none of the choices."""
    if value not in choices:
        raise SettingsError(f"{what} {value!r} is not known; choose one of {', '.join(choices)}")


def _at_least(what: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise SettingsError(f"{what} is {value}; wanted at least {least}")


def _below_seeds(what: str, value: int) -> None:
    if not 0 <= value < 2**62:
        raise SettingsError(f"{what} is {value}; wanted 0 or more, and less than 2^62")


@dataclass(frozen=True)
class ModelSettings:
    """The base.

    Attributes:
        path: a model file; empty for the demonstration base of `family`.
        family: `krea2` or `ideogram4`; needed for the demonstration base only, else it is read off the file.
        precision: how the frozen weights are stored; `auto` for the best one that fits the device, `as-stored` for
            ComfyUI's fp8 or int8 file without quantising it anew.
        compute_dtype: dtype of activations; fp32 where bf16 is not native.
        device: `cpu`, `cuda`, or empty for CUDA where there is one.
        quantized_cache: a folder in which the quantised base is kept, so that it loads at reading speed the next time;
            empty for none.
        allow_distilled: train on a file whose name says that it is a distilled variant.
        blocks_on_cpu: so many of the transformer's blocks wait in main memory; `auto` for as few as fit.
        eight_bit_compute: multiply int8, fp8 and mxfp8 weights in 8 bits, activations and gradients being rounded to 8
            bits with a scale per token (mxfp8: for 32 numbers), in place of dequantising; `auto` measures at the start
            of a run and does so where it is faster. Off by default until it has been seen on a card.
    """

    path: str = ""
    family: str = ""
    precision: str = AUTO
    compute_dtype: str = "bf16"
    device: str = ""
    quantized_cache: str = ""
    allow_distilled: bool = False
    blocks_on_cpu: int | str = AUTO
    eight_bit_compute: bool | str = False

    def __post_init__(self) -> None:
        if isinstance(self.eight_bit_compute, str):
            one_of("eight_bit_compute", self.eight_bit_compute, (AUTO,))
        one_of("precision", self.precision, (AUTO, *PRECISIONS))
        if self.blocks_on_cpu != AUTO:
            if isinstance(self.blocks_on_cpu, str):
                raise SettingsError(f"blocks_on_cpu is {self.blocks_on_cpu!r}; wanted a number, or {AUTO!r}")
            _at_least("blocks_on_cpu", self.blocks_on_cpu, 0)
        one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        if self.family:
            one_of("family", self.family, FAMILIES)


@dataclass(frozen=True)
class DatasetSettings:
    """What is trained on: one of `pictures` and `cache`.

    Attributes:
        pictures: a folder of pictures with a `.txt` caption beside each; needs encoders.
        cache: a folder of encoded samples.
        encoders: `demo` for the demonstration codec and text encoder.
        resolution: pictures are cropped to buckets of about resolution² pixels.
        trigger: a word put before each caption that does not hold it yet.
        default_caption: of pictures that have none.
        flip: mirror every second visit, by chance; not for faces with a parting, or for writing.
        caption_dropout: share of visits that see the empty prompt instead of the caption.
        held_out: so many samples, drawn by the seed, are not trained on but measured.
        encoded: folder of the encoded tensors of `pictures`; `.graft-cache` inside it by default.
    """

    pictures: str = ""
    cache: str = ""
    encoders: str = ""
    resolution: int = 1024
    trigger: str = ""
    default_caption: str = ""
    flip: bool = False
    caption_dropout: float = 0.0
    held_out: int = 0
    encoded: str = ""

    def __post_init__(self) -> None:
        _at_least("resolution", self.resolution, 16)
        _at_least("held_out", self.held_out, 0)
        if not 0 <= self.caption_dropout <= 1:
            raise SettingsError(f"caption_dropout is {self.caption_dropout}; wanted a share from 0 to 1")
        if self.encoders:
            one_of("encoders", self.encoders, ("demo",))


@dataclass(frozen=True)
class TrainSettings:
    """How it is trained.

    Attributes:
        steps: optimiser steps.
        batch_size: pictures in one forward pass.
        accumulation: forward passes in one optimiser step.
        optimizer: `adamw`, or `adamw8bit`, whose state takes a quarter of the memory.
        learning_rate: the highest one, reached after `warmup_steps` of linear warm-up.
        schedule: what follows: `constant`, `cosine` or `linear`, the latter two down to zero.
        weight_decay: of the optimiser, decoupled.
        max_grad_norm: gradients are scaled down to this norm; 0 leaves them.
        timesteps: distribution of the noise level.
        checkpointing: recompute activations block by block: true for the least memory, in all of them but the last,
            where it would save none; false in none; a number in so many; `auto` in as few as it takes to fit.
        compile: compile the blocks' element-wise work; `auto` on a card where that works.
        ema: decay of the moving average that is saved and previewed in the weights' place; 0 for none.
        save_every: steps between saves of LoRA and state; 0 for the end alone.
        keep: so many of those LoRAs stay, the newest.
        held_out_every: steps between measurements of the held-out loss; 0 for the end alone.
        seed: of every random draw of the run.
        save_dtype: dtype of A and B in the file; alpha is always fp32.
        log_every: steps between two waits for the device, at which their losses are read, logged and checked; it also
            waits wherever the adapter is saved, measured or previewed.
    """

    steps: int = 1500
    batch_size: int = 1
    accumulation: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 20
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    timesteps: str = "family"
    checkpointing: bool | int | str = AUTO
    compile: bool | str = AUTO
    ema: float = 0.0
    save_every: int = 250
    keep: int = 3
    held_out_every: int = 250
    seed: int = 0
    save_dtype: str = "fp32"
    log_every: int = 1

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("accumulation", self.accumulation, 1)
        _at_least("learning_rate", self.learning_rate, 0)
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("weight_decay", self.weight_decay, 0)
        _at_least("max_grad_norm", self.max_grad_norm, 0)
        _below_seeds("seed", self.seed)
        _at_least("save_every", self.save_every, 0)
        _at_least("keep", self.keep, 1)
        _at_least("held_out_every", self.held_out_every, 0)
        _at_least("log_every", self.log_every, 1)
        if not 0 <= self.ema < 1:
            raise SettingsError(f"ema is {self.ema}; wanted a decay from 0 (none) up to, but not, 1, such as 0.99")
        if isinstance(self.checkpointing, str):
            if self.checkpointing != AUTO:
                raise SettingsError(
                    f"checkpointing is {self.checkpointing!r}; wanted true, false, {AUTO!r} or a number of blocks"
                )
        else:
            _at_least("checkpointing", self.checkpointing, 0)
        if isinstance(self.compile, str):
            one_of("compile", self.compile, (AUTO,))
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("timesteps", self.timesteps, DISTRIBUTIONS)
        one_of("save_dtype", self.save_dtype, SAVE_DTYPES)


@dataclass(frozen=True)
class PreviewSettings:
    """Pictures sampled before the run, during it, and after.

    Attributes:
        prompts: one picture each.
        every: steps between previews; 0 for before and after alone.
        seed: of the first prompt's noise; the next prompts count on from it.
        steps: Euler steps; 0 for the family's own number.
        guidance: the usual CFG scale, 1 for none; 0 for the family's own.
        unconditional: model file of the transformer for the unconditional pass, for a family that has a pair of them
            (Ideogram 4); empty for the trained one without text.
    """

    prompts: tuple[str, ...] = ()
    every: int = 250
    seed: int = 0
    steps: int = 0
    guidance: float = 0.0
    unconditional: str = ""

    def __post_init__(self) -> None:
        _below_seeds("preview.seed", self.seed)
        _at_least("preview.every", self.every, 0)
        _at_least("preview.steps", self.steps, 0)
        _at_least("preview.guidance", self.guidance, 0)


@dataclass(frozen=True)
class RunSettings:
    """Everything about a run.

    Attributes:
        output: the run's folder, which must not hold a run yet.
        name: of the adapter and of its file; the folder's name by default.
    """

    output: str = ""
    name: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    preview: PreviewSettings = field(default_factory=PreviewSettings)


def read_settings(path: str | Path) -> RunSettings:
    """Settings from a TOML file whose tables are `model`, `dataset`, `lora`, `train` and `preview`.

    Paths in it are relative to the file's folder.

    Raises:
        SettingsError: no such file, no TOML, an unknown setting, or a value of the wrong type or range.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    settings = _build(RunSettings, values, "")
    here = path.parent
    model, dataset, preview = settings.model, settings.dataset, settings.preview
    return dataclasses.replace(
        settings,
        output=_resolved(here, settings.output or f"runs/{path.stem}"),
        model=dataclasses.replace(
            model, path=_resolved(here, model.path), quantized_cache=_resolved(here, model.quantized_cache)
        ),
        dataset=dataclasses.replace(
            dataset,
            pictures=_resolved(here, dataset.pictures),
            cache=_resolved(here, dataset.cache),
            encoded=_resolved(here, dataset.encoded),
        ),
        preview=dataclasses.replace(preview, unconditional=_resolved(here, preview.unconditional)),
    )


def resume_settings(folder: str | Path) -> RunSettings:
    """Settings of the run in a folder, as it wrote them, to go on with it where it stands now.

    Raises:
        SettingsError: the folder holds no run, or its settings are damaged.
    """
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{folder} holds no run that could be continued ({CONFIG}: {error.strerror})") from error
    except ValueError as error:
        raise SettingsError(f"{path} is damaged ({error}); give the settings by --config instead") from error
    return dataclasses.replace(_build(RunSettings, values, ""), output=str(folder))


def _resolved(folder: Path, path: str) -> str:
    return str(folder / Path(path).expanduser()) if path else ""


def _build(kind: type, values: dict[str, Any], where: str) -> Any:
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    types_of = typing.get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in known:
            place = f" in [{where}]" if where else ""
            raise SettingsError(f"setting {name!r}{place} is not known; there are {', '.join(known)}")
        wanted = types_of[name]
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
            if not isinstance(value, dict):
                raise SettingsError(f"{name!r} is {value!r}; wanted a table [{name}]")
            arguments[name] = _build(wanted, value, name)
        else:
            arguments[name] = _typed(f"{where}.{name}".lstrip("."), value, wanted)
    return kind(**arguments)


def _typed(name: str, value: Any, wanted: Any) -> Any:
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise SettingsError(f"{name} is {value!r}; wanted a list")
        return tuple(_typed(f"{name}[{index}]", entry, typing.get_args(wanted)[0]) for index, entry in enumerate(value))
    if isinstance(wanted, types.UnionType):
        kinds = typing.get_args(wanted)
        fitting = next((kind for kind in kinds if type(value) is kind), None)
        if fitting is None:
            raise SettingsError(f"{name} is {value!r}; wanted {' or '.join(kind.__name__ for kind in kinds)}")
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise SettingsError(f"{name} is {value!r}; wanted {getattr(wanted, '__name__', wanted)}")
    return value
