"""A whole run, from settings to a folder: check, encode, load, train, save, plot, preview."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ..lora_convert import atomic_file
from . import adapters, attention
from .adapters import resolve_targets
from .base_model import Base, load_base
from .checkpoints import ModelFile, open_model_file
from .dataset import EncodePicture, EncodeText, Sample, encode_folder, read_folder, read_samples
from .errors import DatasetError, SettingsError
from .families import linear_modules
from .loop import TrainSession
from .plots import loss_plot, preview_grid
from .sampling import sample
from .settings import RunSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Encoders:
    """What turns pictures and words into the family's latents and conditioning, and latents back into pictures."""

    picture: EncodePicture
    text: EncodeText
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RunResult:
    """Where a run left its files, and what is needed to look further into it."""

    folder: Path
    lora: Path
    base: Base
    name: str
    losses: tuple[float, ...]


def check(settings: RunSettings, encoders: Encoders | None) -> ModelFile:
    """Every verdict that needs no weight: raises the first that fails, before anything is loaded or written.

    Raises:
        GraftError: what is wrong, and what to do.
    """
    dataset = settings.dataset
    if bool(dataset.pictures) == bool(dataset.cache):
        raise SettingsError(
            "the dataset is missing: give [dataset] pictures (a folder, with encoders) or cache (encoded samples)"
            if not dataset.pictures
            else "give [dataset] pictures or cache, not both"
        )
    if dataset.pictures and encoders is None:
        raise SettingsError(
            'pictures need encoders: give [dataset] encoders = "demo" with the demonstration base, or a cache of '
            "encoded samples"
        )
    if not settings.model.path:
        raise SettingsError("the base is missing: give [model] path, or family with the demonstration parts")
    folder = Path(settings.output)
    if not settings.output:
        raise SettingsError("the output folder is missing: give output")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} exists and is not empty; choose another output, nothing there is overwritten")
    if settings.model.device.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f'device is {settings.model.device!r}, but torch sees no CUDA device; use device = "cpu"')
    file = open_model_file(settings.model.path)
    if settings.model.family not in ("", file.family.name):
        raise SettingsError(f"{file.path.name} is {file.family.title}, but family is {settings.model.family!r}")
    with torch.device("meta"):
        linears = linear_modules(file.family.build(file.config))
    resolve_targets(file.family, linears, settings.lora)
    return file


def read_dataset(settings: RunSettings, file: ModelFile, encoders: Encoders | None) -> list[Sample]:
    """The run's encoded samples, of a width that the base takes."""
    width = file.family.conditioning_width(file.config)
    if settings.dataset.cache:
        return read_samples(settings.dataset.cache, file.family, width)
    assert encoders is not None
    pictures = read_folder(settings.dataset.pictures)
    found = encoders.text("").shape[-1]
    if found != width:
        raise DatasetError(
            f"the text encoder gives {found} features per token, {file.path.name} wants {width}; "
            "the demonstration encoders fit the demonstration bases only"
        )
    return encode_folder(pictures, file.family, settings.dataset.resolution, encoders.picture, encoders.text)


def run(settings: RunSettings, encoders: Encoders | None = None, say: Say = print) -> RunResult:
    """Checks, then trains.

    Args:
        settings: everything about the run.
        encoders: needed where the dataset is a folder of pictures, and for previews.
        say: takes each sentence for the user.

    Raises:
        GraftError: what is wrong; where a check failed, nothing has been written.
    """
    file = check(settings, encoders)
    samples = read_dataset(settings, file, encoders)
    device = settings.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    say(f"{len(samples)} samples, device {device}")
    base = load_base(file, settings.model.precision, settings.model.compute_dtype, device)
    for note in base.notes:
        say(note)

    folder = Path(settings.output)
    name = settings.name or folder.name
    session = TrainSession(base, samples, settings.lora, settings.train, adapter_name(name))
    say(f"rank {settings.lora.rank} on {len(session.targets)} Linears: {_count(session.parameters):,} parameters")
    folder.mkdir(parents=True, exist_ok=True)
    lora = folder / f"{name}.safetensors"
    with atomic_file(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=1), encoding="utf-8")
    # The save path is tried before the first step, so that it cannot fail after the last.
    session.save(lora)

    shape = samples[0].latents.shape
    rows = {"base": preview(base, None, settings, encoders, shape)}
    losses = train(session, folder / "log.jsonl")
    session.save(lora, overwrite=True)
    session.check_trained()
    loss_plot(folder / "loss.png", losses, f"{name} on {file.path.name}")
    if encoders is not None and settings.preview.prompts:
        rows["with LoRA"] = preview(base, session.name, settings, encoders, shape)
        preview_grid(folder / "preview.png", rows, settings.preview.prompts)
    return RunResult(folder, lora, base, session.name, tuple(losses))


def train(session: TrainSession, log: Path) -> list[float]:
    """Runs the session to its end, writing one line per step."""
    losses: list[float] = []
    with session, log.open("a", encoding="utf-8") as lines:
        progress = tqdm(session.steps(), total=session.train.steps, unit="step", dynamic_ncols=True, mininterval=0.5)
        for entry in progress:
            lines.write(json.dumps(asdict(entry)) + "\n")
            lines.flush()
            losses.append(entry.loss)
            progress.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}", refresh=False)
    return losses


def preview(
    base: Base, adapter: str | None, settings: RunSettings, encoders: Encoders | None, shape: Sequence[int]
) -> list[Tensor]:
    """One picture (3, h, w) per prompt, each from the same noise whatever the adapter."""
    if encoders is None:
        return []
    pictures = []
    device = next(base.model.parameters()).device
    unconditional = None if base.family.image_only_pass else encoders.text("")[None].to(device)
    with adapters.active(base.model, adapter), attention.training_backends():
        for index, prompt in enumerate(settings.preview.prompts):
            latents = sample(
                base.model,
                base.family,
                encoders.text(prompt)[None].to(device),
                unconditional,
                shape,
                torch.Generator().manual_seed(settings.preview.seed + index),
                settings.preview.steps or None,
                settings.preview.guidance,
            )
            pictures.append(encoders.decode(latents)[0])
    return pictures


def adapter_name(name: str) -> str:
    """A run's name with what PEFT does not take in an adapter's replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


__all__ = ["Encoders", "RunResult", "check", "preview", "read_dataset", "run", "train"]
