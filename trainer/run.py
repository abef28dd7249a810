"""A whole run, from settings to a folder: check, encode, load, train, save, plot, preview."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

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
from .loop import TrainSession
from .plots import loss_plot, preview_grid
from .sampling import sample
from .settings import RunSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Encoders:
    """What turns pictures and words into the family's latents and conditioning, and latents back into pictures.

    Everything that they are given is on the CPU.
    """

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
    if encoders is None and (dataset.pictures or settings.preview.prompts):
        what = "pictures" if dataset.pictures else "previews"
        raise SettingsError(
            f'{what} need encoders: give [dataset] encoders = "demo" with the demonstration base, or a cache of '
            "encoded samples and no preview prompts"
        )
    if not settings.model.path:
        raise SettingsError("the base is missing: give [model] path, or family with the demonstration parts")
    check_output(settings)
    check_device(settings.model.device)
    file = open_model_file(settings.model.path)
    if settings.model.family not in ("", file.family.name):
        raise SettingsError(f"{file.path.name} is {file.family.title}, but family is {settings.model.family!r}")
    width = file.family.conditioning_width(file.config)
    if encoders is not None and (found := encoders.text("").shape[-1]) != width:
        raise DatasetError(
            f"the text encoder gives {found} features per token, {file.path.name} wants {width}; "
            "the demonstration encoders fit the demonstration bases only"
        )
    with torch.device("meta"):
        linears = adapters.linears(file.family.build(file.config))
    resolve_targets(file.family, linears, settings.lora)
    return file


def check_output(settings: RunSettings) -> None:
    """The run's folder is empty or can be made, and its name can be a file's."""
    if not settings.output:
        raise SettingsError("the output folder is missing: give output")
    folder = Path(settings.output).resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(f"{folder} exists and is not empty; choose another, nothing there is overwritten")
        standing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        raise SettingsError(f"the output folder {folder} cannot be used ({error.strerror})") from error
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise SettingsError(
            f"the output folder {folder} cannot be made: {standing} is no folder that can be written to"
        )
    name = settings.name or folder.name
    if not name or name != Path(name).name or name in (".", "..") or len(name) > 100:
        raise SettingsError(f"name {name!r} cannot be a file's name; give a short one without folders")


def check_device(device: str) -> None:
    if not device:
        return
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise SettingsError(f"device {device!r} is not known; use cpu, cuda or cuda:0") from error
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f'device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use device = "cpu"'
        )


def read_dataset(settings: RunSettings, file: ModelFile, encoders: Encoders | None) -> list[Sample]:
    """The run's encoded samples, of a width that the base takes."""
    width = file.family.conditioning_width(file.config)
    if settings.dataset.cache:
        return read_samples(settings.dataset.cache, file.family, width)
    assert encoders is not None
    pictures = read_folder(settings.dataset.pictures)
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

    folder = Path(settings.output).resolve()
    name = settings.name or folder.name
    session = TrainSession(base, samples, settings.lora, settings.train, adapter_name(name))
    say(f"rank {settings.lora.rank} on {len(session.targets)} Linears: {_count(session.parameters):,} parameters")
    folder.mkdir(parents=True, exist_ok=True)
    lora = folder / f"{name}.safetensors"
    with atomic_file(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=1), encoding="utf-8")
    session.try_saving(folder)

    shape = samples[0].latents.shape
    rows = {"base": preview(base, None, settings, encoders, shape)}
    losses = train(session, folder / "log.jsonl", say)
    session.check_trained()
    session.save(lora)
    loss_plot(folder / "loss.png", losses, f"{name} on {file.path.name}")
    if encoders is not None and settings.preview.prompts:
        rows["with LoRA"] = preview(base, session.name, settings, encoders, shape)
        preview_grid(folder / "preview.png", rows, settings.preview.prompts)
    return RunResult(folder, lora, base, session.name, tuple(losses))


def train(session: TrainSession, log: Path, say: Say) -> list[float]:
    """Runs the session to its end, or until it is stopped, writing one line per step.

    Ctrl-C finishes the step and ends the training early, with its results; a second Ctrl-C ends it at once.
    """
    losses: list[float] = []
    with session, log.open("a", encoding="utf-8") as lines, stop_after_step() as stop:
        progress = tqdm(session.steps(), total=session.train.steps, unit="step", dynamic_ncols=True, mininterval=0.5)
        for entry in progress:
            lines.write(json.dumps(asdict(entry)) + "\n")
            lines.flush()
            losses.append(entry.loss)
            progress.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}", refresh=False)
            if stop.is_set():
                progress.close()
                say(f"stopped after {entry.step} of {session.train.steps} steps, as asked")
                break
    return losses


@contextmanager
def stop_after_step() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the handler that was there before gets the second, and is put back."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread receives signals
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


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
                settings.preview.guidance or None,
            )
            pictures.append(encoders.decode(latents.cpu())[0])
    return pictures


def adapter_name(name: str) -> str:
    """A run's name with what an adapter's name cannot hold replaced."""
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
    return f"{plain}_" if hasattr(torch.nn.ModuleDict, plain) else plain


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
