"""From what a graph says to the engine's run: settings, folder, previews. Train LoRA and Check Run share it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..trainer.errors import DatasetError, GraftError, SettingsError
from . import host
from .kinds import EncodedDataset, PreviewRequest

EITHER, NEW, CONTINUE = "continue or new", "new run", "continue"
RESERVED = ("encoded", "quantized")  # folders beside the runs'


def runs_folder() -> Path:
    """Where the runs of graphs are."""
    return host.output_directory() / "graft"


def name_fault(name: str) -> str:
    """Why a run cannot have this name; empty where it can."""
    if not re.fullmatch(r"\w[\w. -]{0,99}", name) or name.endswith((".", " ")) or name.lower() in RESERVED:
        return f"name {name!r} cannot be a run's; give a short one of letters, digits, spaces, - and _, without folders"
    return ""


def run_folder(name: str, how: str) -> Path:
    """The run's folder: with `NEW` the first of name, name_2, … that is free, so that nothing is overwritten; with
    `CONTINUE` the last of them that can be continued.

    Raises:
        SettingsError: a name that cannot be a run's, or no run to continue.
    """
    if fault := name_fault(name):
        raise SettingsError(fault)
    folder, number, last = runs_folder() / name, 1, None
    while folder.exists():
        last, number = folder if (folder / "state").is_dir() else last, number + 1
        folder = runs_folder() / f"{name}_{number}"
    if how == NEW:
        return folder
    if last is None:
        raise SettingsError(f"no run called {name} is there to be continued; set resume to {NEW!r}")
    return last


class Begun(NamedTuple):
    """Which run a graph means.

    Attributes:
        settings: its own, with its folder.
        resume: it is there and goes on.
        note: what the user should know of that choice; empty for nothing.
        checked: what the checks found, where the choice needed them.
    """

    settings: Any
    resume: bool
    note: str = ""
    checked: Any = None


def begin(
    how: str,
    model: Any,
    dataset: EncodedDataset,
    name: str,
    lora: Any = None,
    train: Any = None,
    preview: PreviewRequest | None = None,
) -> Begun:
    """The run of a name: a new one, the last one, or with `EITHER` the last one where it is the same, else a new one.

    ComfyUI forgets a node's outputs when another workflow runs, and with the program: without `EITHER` an unchanged
    graph would then train anew for hours.

    Args:
        how: one of `EITHER`, `NEW` and `CONTINUE`.
        name: of the run.
        model, dataset, lora, train, preview: see `run_settings`.
    """
    from ..trainer.preflight import check
    from ..trainer.run import difference

    def settings_in(folder: Path) -> Any:
        return run_settings(model, dataset, folder, lora, train, preview)

    if how != EITHER:
        return Begun(settings_in(run_folder(name, how)), how == CONTINUE)
    new = run_folder(name, NEW)
    try:
        last = run_folder(name, CONTINUE)
    except SettingsError:
        return Begun(settings_in(new), False)
    settings = settings_in(last)
    try:
        checked = check(settings, None, True, memory=host.memory(), previews=preview is not None)
        other = difference(checked)
    except (GraftError, OSError) as error:
        other = str(error)
    if not other:
        return Begun(settings, True, f"going on with the run in {last}", checked)
    return Begun(settings_in(new), False, f"a new run in {new.name}, since it is not the one in {last.name}: {other}")


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
        GraftError: a MODEL of ComfyUI's own loader, or with LoRAs, or a dataset for another family.
    """
    from ..trainer.lora_settings import LoraSettings
    from ..trainer.settings import DatasetSettings, PreviewSettings, RunSettings, TrainSettings

    base = host.hosted_base(model)
    family = base.file.family
    if model.shown:
        raise SettingsError(
            f"the model has the LoRA {model.shown[0][0].name} on it, and a LoRA is trained on the base alone: connect "
            "Load Model for LoRA Training itself"
        )
    if dataset.family != family.name:
        raise DatasetError(
            f"the dataset was encoded for {dataset.family}, the model is {family.title}: connect the same model to "
            "Encode Dataset"
        )
    shown = PreviewSettings()
    if preview is not None:
        second = None if preview.unconditional is None else host.hosted_base(preview.unconditional)
        if second is base:
            raise SettingsError(
                "unconditional is the model that is trained: leave it out, or connect another Load Model for LoRA "
                "Training with the second transformer"
            )
        shown = PreviewSettings(
            prompts=_labels(preview),
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


def _labels(preview: PreviewRequest) -> tuple[str, ...]:
    """What the pictures are called, since conditioning does not tell its words."""
    return tuple(f"prompt {index + 1}" for index in range(len(preview.prompts)))


def previews(request: PreviewRequest, model: Any, dataset: EncodedDataset) -> Any:
    """The engine's previews, but for the second transformer, which is loaded when all checks have passed.

    Raises:
        GraftError: conditioning that is not the family's or is missing, or a size that it cannot make.
    """
    from ..trainer.run import Previews
    from ..trainer.samples import has_empty, read_empty

    file = host.hosted_base(model).file
    family, width = file.family, file.family.conditioning_width(file.config)
    if request.negative is not None and request.unconditional is not None:
        raise SettingsError("the unconditional model of a preview sees no text: leave out negative, or unconditional")
    multiple = family.latent_downscale * family.latent_multiple
    if request.width % multiple or request.height % multiple:
        raise SettingsError(
            f"a preview of {request.width} × {request.height} pixels cannot be made: {family.title} takes multiples "
            f"of {multiple}"
        )
    prompts = tuple(
        host.conditioning_tensor(prompt, f"preview prompt {index + 1}", width)
        for index, prompt in enumerate(request.prompts)
    )
    without = None
    if request.negative is not None:
        without = host.conditioning_tensor(request.negative, "the negative prompt", width)
    elif not family.image_only_pass and has_empty(dataset.folder):
        without = read_empty(dataset.folder)
    elif not family.image_only_pass and (request.guidance or family.preview.guidance) != 1:
        raise DatasetError(
            f"a preview of {family.title} needs a negative: connect one to Preview Settings, such as the conditioning "
            "of an empty prompt, or set its guidance to 1"
        )
    return Previews(
        prompts=prompts,
        labels=_labels(request),
        unconditional=without,
        decode=host.decoder_of(request.vae, family),
        size=(request.width, request.height) if request.width else None,
    )
