"""From what a graph says to the engine's run: settings, folder, previews. Train LoRA and Check Run share it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..trainer.errors import DatasetError, SettingsError
from . import host
from .dataset import check_width
from .kinds import EncodedDataset, PreviewRequest

NEW, CONTINUE = "new run", "continue"


def runs_folder() -> Path:
    """Where the runs of graphs are."""
    return host.output_directory() / "graft"


def name_fault(name: str) -> str:
    """Why a run cannot have this name; empty where it can."""
    if not re.fullmatch(r"\w[\w. -]{0,99}", name) or name.endswith((".", " ")) or name.lower() in RESERVED:
        return f"name {name!r} cannot be a run's; give a short one of letters, digits, spaces, - and _, without folders"
    return ""


RESERVED = ("encoded", "quantized")  # folders beside the runs'


def run_folder(name: str, how: str) -> Path:
    """The run's folder: with `NEW` the first of name, name_2, … that is free, so that nothing is overwritten; with
    `CONTINUE` the last of them that is there.

    Raises:
        SettingsError: a name that cannot be a run's, or no run to continue.
    """
    if fault := name_fault(name):
        raise SettingsError(fault)
    folder, number, last = runs_folder() / name, 1, None
    while folder.exists():
        last, number = folder, number + 1
        folder = runs_folder() / f"{name}_{number}"
    if how == NEW:
        return folder
    if last is None:
        raise SettingsError(f"{folder} is not there: there is no run to continue; set resume to {NEW!r}")
    return last


def run_settings(
    model: Any,
    dataset: EncodedDataset,
    folder: Path,
    lora: Any = None,
    train: Any = None,
    preview: PreviewRequest | None = None,
) -> Any:
    """The engine's settings of a run.

    Args:
        model: a Graft MODEL.
        dataset: encoded for its family.
        folder: of the run.
        lora, train, preview: None for the defaults, and for no previews.

    Raises:
        GraftError: a MODEL of ComfyUI's own loader, or a dataset for another family.
    """
    from ..trainer.adapters import LoraSettings
    from ..trainer.settings import DatasetSettings, PreviewSettings, RunSettings, TrainSettings

    base = host.hosted_base(model)
    family = base.file.family
    if dataset.family != family.name:
        raise DatasetError(
            f"the dataset was encoded for {dataset.family}, the model is {family.title}: connect the same model to "
            "Encode Dataset"
        )
    shown = PreviewSettings()
    if preview is not None:
        second = None if preview.unconditional is None else host.hosted_base(preview.unconditional)
        shown = PreviewSettings(
            prompts=labels(preview),
            every=preview.every,
            seed=preview.seed,
            steps=preview.steps,
            guidance=preview.guidance,
            unconditional="" if second is None else str(second.file.path),
        )
    return RunSettings(
        output=str(folder),
        name=folder.name,
        model=base.settings,
        dataset=DatasetSettings(
            cache=str(dataset.folder), caption_dropout=dataset.caption_dropout, held_out=dataset.held_out
        ),
        lora=lora or LoraSettings(),
        train=train or TrainSettings(),
        preview=shown,
    )


def labels(preview: PreviewRequest) -> tuple[str, ...]:
    """What the pictures are called, since conditioning does not tell its words."""
    return tuple(f"prompt {index + 1}" for index in range(len(preview.prompts)))


def previews(request: PreviewRequest, model: Any, checked: Any, dataset: EncodedDataset) -> Any:
    """The engine's previews, which it samples itself.

    Raises:
        GraftError: conditioning that is not the family's, or a size that it cannot make.
    """
    from ..trainer.run import Previews

    file = host.hosted_base(model).file
    family, width = file.family, file.family.conditioning_width(file.config)

    def tokens(conditioning: Any, what: str) -> torch.Tensor:
        found = host.conditioning_tensor(conditioning, what)
        check_width(found, width, family, what)
        return found

    multiple = family.latent_downscale * family.latent_multiple
    if request.width % multiple or request.height % multiple:
        raise SettingsError(
            f"a preview of {request.width} × {request.height} pixels cannot be made: {family.title} takes multiples "
            f"of {multiple}"
        )
    guide = None
    if request.unconditional is not None:
        guide = host.hosted_base(request.unconditional).load().model
    return Previews(
        prompts=tuple(tokens(prompt, f"preview prompt {index + 1}") for index, prompt in enumerate(request.prompts)),
        unconditional=None if request.negative is None else tokens(request.negative, "the negative prompt"),
        decode=host.decoder_of(request.vae, family),
        labels=labels(request),
        size=(request.width, request.height) if request.width else None,
        steps=request.steps,
        guidance=request.guidance,
        every=request.every,
        seed=request.seed,
        guide=guide,
    )
