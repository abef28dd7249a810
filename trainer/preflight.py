"""Everything that can be known to fail, refused before anything is loaded or written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from . import adapters
from .adapters import resolve_targets
from .checkpoints import ModelFile, open_model_file, telling_name
from .errors import DatasetError, SettingsError
from .samples import Encoders
from .settings import RunSettings


def check(settings: RunSettings, encoders: Encoders | None, resume: bool = False) -> ModelFile:
    """Every verdict that needs no weight: raises the first that fails, else returns the checked model file.

    Raises:
        GraftError: what is wrong, and what to do.
    """
    check_dataset(settings, encoders)
    if not settings.model.path:
        raise SettingsError("the base is missing: give [model] path, or family with the demonstration parts")
    check_output(settings, resume)
    check_device(settings.model.device)
    check_compute_dtype(settings.model.compute_dtype, chosen_device(settings.model.device))
    file = open_model_file(settings.model.path)
    check_variant(file, settings.model.allow_distilled)
    if settings.model.family not in ("", file.family.name):
        raise SettingsError(f"{file.path.name} is {file.family.title}, but family is {settings.model.family!r}")
    width = file.family.conditioning_width(file.config)
    if encoders is not None and (found := encoders.text("").shape[-1]) != width:
        raise DatasetError(
            f"the text encoder gives {found} features per token, {file.path.name} wants {width}; "
            "the demonstration encoders fit the demonstration bases only"
        )
    if settings.dataset.caption_dropout and encoders is None and not file.family.image_only_pass:
        raise SettingsError(
            f"caption_dropout needs the empty prompt of {file.family.title}, which only encoders can give: set it to 0"
        )
    with torch.device("meta"):
        linears = adapters.linears(file.family.build(file.config))
    resolve_targets(file.family, linears, settings.lora)
    return file


def check_variant(file: ModelFile, allow_distilled: bool) -> None:
    """A distilled variant has the same keys as the base: only the file's name can tell, or its diffusers folder's."""
    name = telling_name(file.path)
    if re.search(file.family.distilled, name, re.IGNORECASE) and not allow_distilled:
        raise SettingsError(
            f"{name} looks like a distilled variant of {file.family.title}, on which training undoes the "
            "distillation: train on the base model's file, or set [model] allow_distilled = true"
        )


def check_dataset(settings: RunSettings, encoders: Encoders | None) -> None:
    dataset = settings.dataset
    if bool(dataset.pictures) == bool(dataset.cache):
        raise SettingsError(
            "the dataset is missing: give [dataset] pictures (a folder, with encoders) or cache (encoded samples)"
            if not dataset.pictures
            else "give [dataset] pictures or cache, not both"
        )
    if encoders is None and (dataset.pictures or settings.preview.prompts):
        what = "pictures" if dataset.pictures else "previews"
        raise SettingsError(
            f'{what} need encoders: give [dataset] encoders = "demo" with the demonstration base, or a cache of '
            "encoded samples and no preview prompts"
        )
    if dataset.cache and (dataset.trigger or dataset.default_caption or dataset.flip):
        raise SettingsError("trigger, default_caption and flip act when pictures are encoded; a cache has them or not")


def check_output(settings: RunSettings, resume: bool = False) -> None:
    """The run's folder is empty or can be made, and its name can be a file's; to resume, a run is there."""
    if not settings.output:
        raise SettingsError("the output folder is missing: give output")
    folder = Path(settings.output).resolve()
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        standing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        raise SettingsError(f"the output folder {folder} cannot be used ({error.strerror})") from error
    if used and not resume:
        raise SettingsError(
            f"{folder} exists and is not empty; choose another output, or resume the run in it: "
            "nothing there is overwritten"
        )
    if resume and not (folder / "state").is_dir():
        raise SettingsError(f"{folder} holds no saved state: there is nothing to resume")
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise SettingsError(
            f"the output folder {folder} cannot be made: {standing} is no folder that can be written to"
        )
    name = settings.name or folder.name
    if not name or name != Path(name).name or name in (".", "..") or len(os.fsencode(name)) > 180:
        raise SettingsError(f"name {name!r} cannot be a file's name; give a short one without folders")


def chosen_device(device: str) -> torch.device:
    """The device of the settings, or CUDA where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_compute_dtype(compute_dtype: str, device: torch.device) -> None:
    """bf16 must be native: NVIDIA cards before Ampere emulate it, many times slower, and say that they support it."""
    if compute_dtype != "bf16" or device.type != "cuda":
        return
    major, _ = torch.cuda.get_device_capability(device)
    # AMD's cards answer for themselves.
    if not (torch.cuda.is_bf16_supported() if torch.version.hip else major >= 8):
        raise SettingsError(
            f'{torch.cuda.get_device_name(device)} has no native bf16; set [model] compute_dtype = "fp32", which is '
            "slower, but right"
        )


def check_device(device: str) -> None:
    if not device:
        return
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise SettingsError(f"device {device!r} is not known; use cpu, cuda or cuda:0") from error
    if kind.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {device!r} is not one that Graft trains on; use cpu, cuda or cuda:0")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f'device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use device = "cpu"'
        )
