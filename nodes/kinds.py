"""What travels between Graft's nodes, and the socket types that it travels by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..trainer.settings import AUTO

CATEGORY = "model/training/graft"
SWITCH: dict[str, bool | str] = {AUTO: AUTO, "on": True, "off": False}

Pictures = io.Custom("GRAFT_PICTURES")
Dataset = io.Custom("GRAFT_DATASET")
LoraSettingsKind = io.Custom("GRAFT_LORA_SETTINGS")
TrainSettingsKind = io.Custom("GRAFT_TRAIN_SETTINGS")
Preview = io.Custom("GRAFT_PREVIEW")
Run = io.Custom("GRAFT_RUN")
LoraModel = io.Custom("LORA_MODEL")  # ComfyUI's own: a state dict with its keys

Conditioning = list[list[Any]]  # ComfyUI's: [[(1, T, W), options], …]


@dataclass(frozen=True)
class PictureFolder:
    """Pictures with captions that are not encoded yet.

    Attributes:
        folder: where they are.
        trigger: a word put before each caption that does not hold it yet.
        default_caption: of pictures that have none.
        resolution: pictures are cropped to buckets of about resolution² pixels.
        flip: whether the mirrored pictures are encoded too.
        caption_dropout: share of visits that see the empty prompt.
        held_out: so many pictures are not trained on but measured.
    """

    folder: Path
    trigger: str
    default_caption: str
    resolution: int
    flip: bool
    caption_dropout: float
    held_out: int


@dataclass(frozen=True)
class EncodedDataset:
    """Encoded samples on disk, one file each, as the command line's `[dataset] cache` takes them.

    Attributes:
        folder: where they are.
        family: the name of the family that they are encoded for.
        count: how many.
        caption_dropout: as in `PictureFolder`.
        held_out: as in `PictureFolder`.
    """

    folder: Path
    family: str
    count: int
    caption_dropout: float
    held_out: int


@dataclass(frozen=True)
class PreviewRequest:
    """Pictures to be sampled while a run trains.

    Attributes:
        prompts: the conditioning of one picture each.
        negative: conditioning of the unconditional pass; None for the family's own way.
        vae: ComfyUI's, which decodes them.
        width, height: pixels; both 0 for the size of the dataset's first picture.
        steps, guidance, every, seed: see `trainer.settings.PreviewSettings`.
        unconditional: a MODEL of the transformer for the unconditional pass; None for the trained one.
    """

    prompts: tuple[Conditioning, ...]
    negative: Conditioning | None
    vae: Any
    width: int
    height: int
    steps: int
    guidance: float
    every: int
    seed: int
    unconditional: Any


@dataclass(frozen=True)
class RunHandle:
    """A run's folder, and the LoRA that it wrote."""

    folder: Path
    lora: Path
