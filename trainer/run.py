"""A whole run, from settings to a folder: check, encode, load, train, save, measure, preview.

The folder holds `config.json`, `log.jsonl`, `state/`, `previews/`, the plots and the LoRA.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from torch import Tensor
from tqdm import tqdm

from ..lora_convert import atomic_file
from . import adapters, attention, state
from .base_model import Base, load_base
from .checkpoints import ModelFile
from .errors import DatasetError, GraftError
from .evaluate import held_out_loss
from .loop import StepLog, TrainSession
from .pictures import read_folder
from .plots import loss_plot, preview_grid
from .preflight import check
from .samples import Cache, Encoders, Sample, encode_pictures, read_samples
from .sampling import sample
from .settings import RunSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """Where a run left its files, and what is needed to look further into it."""

    folder: Path
    lora: Path
    base: Base
    name: str
    losses: tuple[float, ...]


def run(settings: RunSettings, encoders: Encoders | None = None, say: Say = print, resume: bool = False) -> RunResult:
    """Checks, then trains, or continues a run that was stopped.

    Args:
        settings: everything about the run.
        encoders: needed where the dataset is a folder of pictures, and for previews.
        say: takes each sentence for the user.
        resume: continue the run in the output folder, bit-exactly, from its last saved state.

    Raises:
        GraftError: what is wrong; where a check failed, nothing has been written.
    """
    file = check(settings, encoders, resume)
    samples = read_dataset(settings, file, encoders, say)
    device = settings.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = load_base(file, settings.model.precision, settings.model.compute_dtype, device)
    for note in base.notes:
        say(note)
    return Run(settings, encoders, say, base, samples, resume).finish()


def read_dataset(settings: RunSettings, file: ModelFile, encoders: Encoders | None, say: Say) -> list[Sample]:
    """The run's encoded samples, of a width that the base takes."""
    dataset, family = settings.dataset, file.family
    if dataset.cache:
        samples = read_samples(dataset.cache, family, family.conditioning_width(file.config))
        say(f"{len(samples)} encoded samples")
        return samples
    assert encoders is not None
    pictures = read_folder(dataset.pictures, family, dataset.trigger, dataset.default_caption)
    cache = Cache(dataset.encoded or Path(dataset.pictures) / ".graft-cache")
    samples = encode_pictures(pictures, family, dataset.resolution, encoders, cache, dataset.flip)
    shapes = len({tuple(sample.latents.shape) for sample in samples})
    say(f"{len(samples)} pictures in {shapes} buckets; {cache.made} tensors encoded, {cache.found} found in the cache")
    return samples


class Run:
    """One run on a loaded base."""

    def __init__(
        self,
        settings: RunSettings,
        encoders: Encoders | None,
        say: Say,
        base: Base,
        samples: Sequence[Sample],
        resume: bool,
    ) -> None:
        self.settings, self.encoders, self.say, self.base = settings, encoders, say, base
        self.folder = Path(settings.output).resolve()
        self.name = settings.name or self.folder.name
        self.training, self.held_out = split(samples, settings.dataset.held_out, settings.train.seed)
        empty = None if encoders is None or base.family.image_only_pass else encoders.text("")
        self.session = TrainSession(
            base,
            self.training,
            settings.lora,
            settings.train,
            adapter_name(self.name),
            settings.dataset.caption_dropout,
            empty,
        )
        count = sum(parameter.numel() for parameter in self.session.parameters)
        say(f"rank {settings.lora.rank} on {len(self.session.targets)} Linears: {count:,} parameters")
        self.marks = state.fingerprint(settings, base.source, self.training)
        self.best = float("inf")
        self.rows: dict[str, list[Tensor]] = {}
        if resume:
            self._resume()
        else:
            self._begin()

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / "config.json") as temporary:
            temporary.write_text(json.dumps(asdict(self.settings), indent=1), encoding="utf-8")
        self.session.try_saving(self.folder)

    def _resume(self) -> None:
        extra = state.load(self.folder / "state", self.session, self.marks)
        self.best = extra["best"]
        # What was logged after that state will be done, and logged, again.
        lines = [line for line in self._log() if line["step"] <= self.session.done]
        with atomic_file(self.folder / "log.jsonl", overwrite=True) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self.say(f"continuing after step {self.session.done}")

    def _log(self) -> list[dict[str, float]]:
        path = self.folder / "log.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        # A kill may have left the last line unfinished.
        return [json.loads(line) for line in lines if line.endswith("}")]

    def finish(self) -> RunResult:
        """Trains to the end, or until Ctrl-C, and writes the results."""
        lora = self.folder / f"{self.name}.safetensors"
        self.rows["base"] = self.preview(None)
        with self.session, stop_after_step() as stop:
            self._train(stop)
        if not stop.is_set():
            self.session.check_trained()
        self.session.save(lora, overwrite=True)
        losses = tuple(line["loss"] for line in self._log())
        loss_plot(self.folder / "loss.png", losses, f"{self.name} on {self.base.source.name}", overwrite=True)
        self._preview_grid()
        return RunResult(self.folder, lora, self.base, self.session.name, losses)

    def _train(self, stop: threading.Event) -> None:
        """The steps, each logged, with what is due after it. A step that fails leaves the state before it saved."""
        session = self.session
        steps = session.train.steps
        with (
            (self.folder / "log.jsonl").open("a", encoding="utf-8") as log,
            tqdm(total=steps, initial=session.done, unit="step", dynamic_ncols=True, mininterval=0.5) as progress,
        ):
            recent: list[float] = []
            while session.done < steps and not stop.is_set():
                try:
                    entry = session.step()
                except GraftError:
                    if session.done:
                        self._save_state()
                        self.say(f"the state after step {session.done} is saved")
                    raise
                self._write(log, entry)
                recent = [*recent[-19:], entry.loss]
                progress.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", refresh=False)
                progress.update()
                self._due(entry.step, steps)
            self._save_state()
        if stop.is_set() and session.done < steps:
            self.say(f"stopped after {session.done} of {steps} steps, as asked; resume to go on")

    def _write(self, log: IO[str], entry: StepLog) -> None:
        log.write(json.dumps(asdict(entry)) + "\n")
        log.flush()

    def _due(self, step: int, steps: int) -> None:
        """Measurements, previews and saves, none of which draws from the run's generator."""
        train = self.settings.train
        if self.held_out and _is_due(step, steps, train.held_out_every):
            self._measure(step)
        if _is_due(step, steps, self.settings.preview.every) and step < steps:
            self._preview(step)
        if train.save_every and step % train.save_every == 0 and step < steps:
            self.session.save(self.folder / f"{self.name}-{step:06}.safetensors", overwrite=True)
            self._save_state()
            kept = sorted(self.folder.glob(f"{self.name}-??????.safetensors"))
            for old in kept[: -train.keep]:
                old.unlink()

    def _save_state(self) -> None:
        state.save(self.folder / "state", self.session, self.marks, {"best": self.best})

    def _measure(self, step: int) -> None:
        """Held-out loss; the LoRA with the lowest one is kept beside the others."""
        with self.session.result():
            loss = held_out_loss(self.base.model, self.base.family, self.held_out, seed=self.settings.train.seed)
        with (self.folder / "held_out.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self.say(f"held-out loss after step {step}: {loss:.4f}")
        if loss < self.best:
            self.best = loss
            self.session.save(self.folder / f"{self.name}-best.safetensors", overwrite=True)

    def _preview(self, step: int) -> None:
        """Pictures of the adapter as it is; a preview that runs out of memory is left out with a word."""
        if not self.settings.preview.prompts:
            return
        try:
            with self.session.result():
                pictures = self.preview(self.session.name)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.say(f"the preview after step {step} did not fit into memory and is left out; the training goes on")
            return
        self.rows[f"step {step}"] = pictures
        (self.folder / "previews").mkdir(exist_ok=True)
        path = self.folder / "previews" / f"{step:06}.png"
        preview_grid(path, {f"step {step}": pictures}, self.settings.preview.prompts, overwrite=True)

    def _preview_grid(self) -> None:
        """Before and after, and the whole way between them."""
        if self.encoders is None or not self.settings.preview.prompts:
            return
        prompts = self.settings.preview.prompts
        with self.session.result():
            self.rows["with LoRA"] = self.preview(self.session.name)
        ends = {label: self.rows[label] for label in ("base", "with LoRA")}
        preview_grid(self.folder / "preview.png", ends, prompts, overwrite=True)
        if len(self.rows) > 2:
            preview_grid(self.folder / "previews" / "strip.png", self.rows, prompts, overwrite=True)

    def preview(self, adapter: str | None) -> list[Tensor]:
        """One picture (3, h, w) per prompt, each from the same noise whatever the adapter."""
        if self.encoders is None:
            return []
        pictures = []
        base, encoders, settings = self.base, self.encoders, self.settings.preview
        device = next(base.model.parameters()).device
        unconditional = None if base.family.image_only_pass else encoders.text("")[None].to(device)
        with adapters.active(base.model, adapter), attention.training_backends():
            for index, prompt in enumerate(settings.prompts):
                latents = sample(
                    base.model,
                    base.family,
                    encoders.text(prompt)[None].to(device),
                    unconditional,
                    self.training[0].latents.shape,
                    torch.Generator().manual_seed(settings.seed + index),
                    settings.steps or None,
                    settings.guidance or None,
                )
                pictures.append(encoders.decode(latents.cpu())[0])
        return pictures


def split(samples: Sequence[Sample], held_out: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on and samples to measure with, drawn by the seed.

    Raises:
        DatasetError: nothing would be left to train on.
    """
    if held_out >= len(samples):
        raise DatasetError(f"held_out is {held_out} of {len(samples)} samples: nothing would be left to train on")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:held_out])
    groups: tuple[list[Sample], list[Sample]] = ([], [])
    for index, entry in enumerate(samples):
        groups[index in chosen].append(entry)
    return groups


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


def adapter_name(name: str) -> str:
    """A run's name with what an adapter's name cannot hold replaced."""
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
    return f"{plain}_" if hasattr(torch.nn.ModuleDict, plain) else plain


def _is_due(step: int, steps: int, every: int) -> bool:
    """Every so many steps, and after the last."""
    return step == steps or (every > 0 and step % every == 0)
