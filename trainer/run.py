"""A whole run, from settings to a folder: check, encode, load, train, save, measure, preview.

The folder holds `config.json`, `log.jsonl`, `state/`, `previews/`, the plots and the LoRA. `run` does all of it;
`train` trains on a base that its caller has loaded, as ComfyUI's nodes do, with the same folder as its result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..lora_convert import atomic_file
from . import adapters, attention, eight_bit_choice, state
from .base_model import Base, load_base
from .devices import Device, ran_out_of_memory
from .errors import SettingsError, StoppedError, TrainingError, first_line
from .evaluate import held_out_loss
from .loop import NotFiniteError, StepLog, TrainSession
from .plots import loss_plot, preview_grid, stack
from .preflight import Checked, check, encoded_folder
from .samples import Cache, Encoders, Sample, check_held_out, encode_pictures, read_empty
from .sampling import sample
from .settings import CONFIG, RunSettings
from .text_trunk import TextTrunk
from .watcher import STOP, Say, Terminal, Watcher

LOG, HELD_OUT = "log.jsonl", "held_out.jsonl"


@dataclass(frozen=True)
class Previews:
    """What a run's previews are sampled from; everything is on the CPU.

    Attributes:
        prompts: conditioning (T, W) of each picture.
        labels: what the prompts are called in the grids.
        unconditional: conditioning (T, W) of the empty or negative prompt; None for the pass without text of a family
            that has one, or where the guidance is 1.
        decode: (1, C, h, w) latents → (1, 3, H, W) in [-1, 1]; may raise `StoppedError`.
        size: width and height in pixels; None for that of the first sample.
        guide: predicts the unconditional velocity in the trained transformer's place, called like one.
    """

    prompts: tuple[Tensor, ...]
    labels: tuple[str, ...]
    unconditional: Tensor | None
    decode: Callable[[Tensor], Tensor]
    size: tuple[int, int] | None = None
    guide: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class RunResult:
    """Where a run left its files, and what is needed to look further into it.

    Attributes:
        folder: the run's.
        lora: the LoRA's file.
        base: what was trained on; the adapter is still on it.
        name: of the adapter.
        losses: of all the run's steps.
        ended: empty where it trained to its end, else the wish that ended it, `watcher.STOP` or `watcher.FINISH`.
    """

    folder: Path
    lora: Path
    base: Base
    name: str
    losses: tuple[float, ...]
    ended: str = ""


def run(settings: RunSettings, encoders: Encoders | None = None, say: Say = print, resume: bool = False) -> RunResult:
    """Checks, then trains, or continues a run that was stopped. Ctrl-C finishes the step and keeps the result.

    Args:
        settings: everything about the run.
        encoders: needed where the dataset is a folder of pictures, and for previews.
        say: takes each sentence for the user.
        resume: continue the run in the output folder, bit-exactly, from its last saved state.

    Raises:
        GraftError: what is wrong; where a check failed, nothing has been written.
    """
    return _prepare(settings, encoders, Terminal(say), resume).finish()


def train(checked: Checked, base: Base, previews: Previews | None, watcher: Watcher, resume: bool = False) -> RunResult:
    """Trains a new adapter on a loaded base, or continues the run in the output folder.

    Args:
        checked: what `preflight.check` found, of a dataset that is encoded.
        base: loaded from `checked.file` at the precision of `checked.settings`; the adapters on it stay as they are.
        previews: None for none. When and how they are sampled stands in the settings.
        watcher: is told what happens, and asked after every step whether to go on.
        resume: as in `run`.

    Raises:
        GraftError: what is wrong.
    """
    settings = checked.settings
    if previews is not None and previews.unconditional is None and not base.family.image_only_pass:
        guidance = settings.preview.guidance or base.family.preview.guidance
        if guidance != 1 and previews.guide is None:
            raise SettingsError(
                f"a preview with guidance {guidance:g} needs a negative conditioning, that of the empty prompt being "
                f"usual: {base.family.title} has no pass without text. Give one, or set the guidance to 1"
            )
    dropout = settings.dataset.caption_dropout and not base.family.image_only_pass
    empty = read_empty(settings.dataset.cache) if dropout else None
    if checked.compiled:
        watcher.say(checked.compiled)
    training, held_out, marks, saved = _data(checked, checked.samples, resume)
    with _room_for("the adapter"):
        begun = Run(settings, base, checked.device, training, held_out, marks, saved, previews, empty, watcher)
    return begun.finish()


def difference(checked: Checked) -> str:
    """Why the run in the output folder cannot go on as this one, what is different; empty where it can.

    Args:
        checked: what `preflight.check` found with `resume`, of a dataset that is encoded.
    """
    *_, marks, _ = _data(checked, checked.samples, resume=False)
    try:
        done = state.steps_done(Path(checked.settings.output).resolve() / "state", marks)
    except SettingsError as error:
        return str(error)
    steps = checked.settings.train.steps
    return f"{done} steps are done, wanted {steps}" if done > steps else ""


def _data(
    checked: Checked, samples: Sequence[Sample], resume: bool
) -> tuple[list[Sample], list[Sample], dict[str, Any], dict[str, Any] | None]:
    """Samples to train on and to measure with, the run's fingerprint, and with `resume` what was saved of it."""
    settings = checked.settings
    training, held_out = split(samples, settings.dataset.held_out, settings.train.seed)
    marks = state.fingerprint(settings, checked.file.files, training)
    saved = state.read(Path(settings.output).resolve() / "state", marks) if resume else None
    return training, held_out, marks, saved


def _prepare(settings: RunSettings, encoders: Encoders | None, watcher: Watcher, resume: bool) -> Run:
    """The run, ready to train. What only it needed is free afterwards, such as conditioning that a trunk has read."""
    checked = check(settings, encoders, resume)
    file, settings, say = checked.file, checked.settings, watcher.say
    for sentence in (checked.memory, checked.compiled):
        if sentence:
            say(sentence)
    training, held_out, marks, saved = _data(checked, read_dataset(settings, checked, encoders, say), resume)
    model, place = settings.model, checked.device.place
    how = (model.precision, model.compute_dtype, place)
    with _room_for("the base and the adapter"):
        base = load_base(file, *how, int(model.blocks_on_cpu), model.quantized_cache)
        guide = None
        if checked.unconditional is not None:
            # It is in use for a preview now and then: all of its blocks wait on the CPU of a machine that has a GPU.
            waiting = 0 if checked.device.kind == "cpu" else file.family.block_count(file.config)
            guide = load_base(checked.unconditional, *how, waiting, model.quantized_cache)
            for name in file.family.text_trunk:  # it never sees text
                guide.model.get_submodule(name).to("cpu")
        for note in (*base.notes, *(guide.notes if guide else ())):
            say(note)
        empty = None if encoders is None or file.family.image_only_pass else _encoded(encoders, "")
        previews = _previews(settings, encoders, empty, guide)
        return Run(settings, base, checked.device, training, held_out, marks, saved, previews, empty, watcher)


def _previews(
    settings: RunSettings, encoders: Encoders | None, empty: Tensor | None, guide: Base | None
) -> Previews | None:
    prompts = settings.preview.prompts
    if encoders is None or not prompts:
        return None
    encoded = tuple(_encoded(encoders, prompt) for prompt in prompts)
    return Previews(encoded, prompts, empty, encoders.decode, guide=None if guide is None else guide.model)


@contextmanager
def _room_for(what: str) -> Iterator[None]:
    """Says in one line that memory ran out: on the device, or main memory that is pinned for it.

    Raises:
        TrainingError: in place of torch's own errors.
    """
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory while making room for {what} ({first_line(error)}); close what else uses the memory, or "
            "choose a lower precision, resolution or rank, or another number of blocks_on_cpu"
        ) from error


def read_dataset(settings: RunSettings, checked: Checked, encoders: Encoders | None, say: Say) -> list[Sample]:
    """The run's encoded samples: those of the cache, or those that the pictures become."""
    dataset, family = settings.dataset, checked.file.family
    if checked.samples:
        say(f"{len(checked.samples)} encoded samples")
        return checked.samples
    assert encoders is not None
    cache = cache_of(settings)
    samples = encode_pictures(checked.pictures, family, dataset.resolution, encoders, cache, dataset.flip)
    shapes = len({tuple(sample.latents.shape) for sample in samples})
    say(f"{len(samples)} pictures in {shapes} buckets; {cache.made} tensors encoded, {cache.found} found in the cache")
    return samples


def cache_of(settings: RunSettings) -> Cache:
    """Where encoded tensors are kept: nowhere for samples that came encoded."""
    return Cache(encoded_folder(settings))


def logged(path: Path) -> list[dict[str, float]]:
    """What a log of a run holds so far; nothing where it is not there yet."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    # A kill may have left the last line unfinished.
    return [json.loads(line) for line in lines if line.endswith("}")]


class Run:
    """One run on a loaded base."""

    def __init__(
        self,
        settings: RunSettings,
        base: Base,
        device: Device,
        training: Sequence[Sample],
        held_out: Sequence[Sample],
        marks: dict[str, Any],
        saved: dict[str, Any] | None,
        previews: Previews | None,
        empty: Tensor | None,
        watcher: Watcher,
    ) -> None:
        self.settings, self.base, self.previews, self.watcher = settings, base, previews, watcher
        self.say = watcher.say
        self.folder = Path(settings.output).resolve()
        self.name = settings.name or self.folder.name
        self.marks = marks
        targets = adapters.resolve_targets(base.family, adapters.linears(base.model), settings.lora)
        self.trunk = TextTrunk(base, targets, marks["base"], cache_of(settings))
        self.training, self.held_out = self.trunk.samples(training), self.trunk.samples(held_out)
        self.prompts = [self._after_trunk(prompt) for prompt in (previews.prompts if previews else ())]
        without = previews.unconditional if previews else None
        self.unconditional = None if without is None else self._after_trunk(without)
        if self.trunk.frozen:
            self.say("no adapter trains the text trunk: captions went through it once, and it waits on the CPU")
        self.session = TrainSession(
            base,
            self.training,
            settings.lora,
            settings.train,
            adapters.unused_name(base.model, adapter_name(self.name)),
            settings.dataset.caption_dropout,
            None if empty is None else self._after_trunk(empty),
        )
        widths = {int(getattr(module, "head_width", 0)) for module in base.model.modules()} - {0}
        for width in sorted(widths):
            for fault in attention.try_kernels(self.session.device, base.model.compute_dtype, width):
                self.say(fault)
        count = sum(parameter.numel() for parameter in self.session.parameters)
        self.say(f"rank {settings.lora.rank} on {len(self.session.targets)} Linears: {count:,} parameters")
        self.eight_bit = self._choose_eight_bit(device, saved)
        self.best = float("inf")
        if saved is not None:
            self._continue(saved)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / CONFIG, overwrite=True) as temporary:
            temporary.write_text(json.dumps(asdict(self.settings), indent=1), encoding="utf-8")
        if saved is None:
            self.session.try_saving(self.folder)
            # From here on the run can be resumed, whenever it ends.
            self._save_state()

    def _after_trunk(self, conditioning: Tensor) -> Tensor:
        """(T, W) → (T, D) where the trunk is frozen, else as it is."""
        return self.trunk.tokens(conditioning) if self.trunk.frozen else conditioning

    def _choose_eight_bit(self, device: Device, saved: dict[str, Any] | None) -> bool:
        """Whether matmuls are in 8 bits; a run that goes on computes as it began, whatever would be faster now."""
        wanted = self.settings.model.eight_bit_compute if saved is None else saved["extra"]["eight_bit"]
        choice = eight_bit_choice.choose(self.base, wanted, self._tokens_at_most(), device)
        if choice.note:
            self.say(choice.note)
        return choice.used

    def _tokens_at_most(self) -> int:
        """In a forward pass of a training step."""
        family = self.base.family
        longest = max(family.image_tokens(s.latents.shape) + len(s.conditioning) for s in self.training)
        return longest * self.settings.train.batch_size

    def _continue(self, saved: dict[str, Any]) -> None:
        self.session.load_state_dict(saved["session"])
        self.best = saved["extra"]["best"]
        # What was logged after that state will be done, and logged, again.
        for name in (LOG, HELD_OUT):
            lines = [line for line in logged(self.folder / name) if line["step"] <= self.session.done]
            if (self.folder / name).is_file():
                with atomic_file(self.folder / name, overwrite=True) as temporary:
                    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self.say(f"continuing after step {self.session.done}")

    def finish(self) -> RunResult:
        """Trains to the end, or until the watcher wishes otherwise, and writes the results."""
        with self.trunk.parked():
            return self._finish()

    def _finish(self) -> RunResult:
        lora = self.folder / f"{self.name}.safetensors"
        with self.watcher.watching(), eight_bit_choice.computing(self.base, self.eight_bit):
            before = self.preview(None)
            self._write_preview(0, before)
            with self.session:
                ended = self._train()
            if self.session.done == 0:
                raise TrainingError("stopped before the first step: there is no LoRA; resume to begin")
            if not ended:
                self.session.check_trained()
            self.session.save(lora, overwrite=True)
            losses = self._losses()
            loss_plot(self.folder / "loss.png", losses, f"{self.name} on {self.base.source.name}", overwrite=True)
            if ended != STOP:
                after = self.preview(self.session.name)
                self._write_preview(self.session.done, after)
                self._write_grid(before, after)
        return RunResult(self.folder, lora, self.base, self.session.name, tuple(losses), ended)

    def _losses(self) -> list[float]:
        return [line["loss"] for line in logged(self.folder / LOG)]

    def _train(self) -> str:
        """The steps, each logged, with what is due after it; returns the wish that ended them, if one did.

        Running out of memory leaves the state before that step saved. A loss that is not finite leaves the last state
        that was saved before, since the weights had probably gone astray already.
        """
        session, losses = self.session, self._losses()
        steps, wish = session.train.steps, self.watcher.wish()
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            while session.done < steps and not wish:
                if not self._advance(log, steps, losses):
                    self._log_unread(log, steps, losses)
                    self._save_state()
                    raise TrainingError(
                        f"out of memory in step {session.done + 1}; the state before it is saved: resume with "
                        "checkpointing, or begin anew with a lower resolution, batch size, rank or precision"
                    )
                try:
                    self._due(session.done, steps)
                except Exception:
                    # The step itself is done: what went wrong after it shall not cost it.
                    with suppress(Exception):
                        self._save_state()
                    raise
                wish = self.watcher.wish()
            self._log_unread(log, steps, losses)
            self._save_state()
        if session.done == steps:
            return ""
        how = "stopped" if wish == STOP else "finished early,"
        self.say(f"{how} after {session.done} of {steps} steps, as asked; resume to go on")
        return wish

    def _advance(self, log: IO[str], steps: int, losses: list[float]) -> bool:
        """One step, logged if it is read, and whether memory was enough for it.

        No error says so: it would keep the tensors of the step, and leave no room to read or save anything.
        """
        try:
            entries = self.session.advance(read=self._is_read(self.session.done + 1, steps))
        except torch.OutOfMemoryError:
            return False
        except NotFiniteError as error:
            self._log(log, error.logs, steps, losses)
            raise
        except BaseException:
            # Whatever it is, the steps before it are logged: they may tell why.
            with suppress(Exception):
                self._log_unread(log, steps, losses)
            raise
        self._log(log, entries, steps, losses)
        return True

    def _log(self, log: IO[str], entries: Sequence[StepLog], steps: int, losses: list[float]) -> None:
        """Writes and shows steps that were read."""
        if not entries:
            return
        log.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
        log.flush()
        losses += [entry.loss for entry in entries]
        self.watcher.stepped(entries, steps, losses)

    def _log_unread(self, log: IO[str], steps: int, losses: list[float]) -> None:
        """Reads what was not read, and logs it up to a step that is not finite, which is an error."""
        try:
            entries: Sequence[StepLog] = self.session.read()
        except NotFiniteError as error:
            self._log(log, error.logs, steps, losses)
            raise
        self._log(log, entries, steps, losses)

    def _is_read(self, step: int, steps: int) -> bool:
        """Whether a step's loss is waited for: at the interval, and wherever the adapter is used or saved."""
        train = self.settings.train
        used = (train.held_out_every, self.settings.preview.every, train.save_every)
        return step % train.log_every == 0 or any(_is_due(step, steps, every) for every in used)

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
            for old in self._saves()[: -train.keep]:
                old.unlink()

    def _saves(self) -> list[Path]:
        """The LoRAs that this run saved at intervals, oldest first; nothing else that may lie in the folder."""
        pattern = re.compile(re.escape(self.name) + r"-(\d{6,})\.safetensors")
        found = {path: pattern.fullmatch(path.name) for path in self.folder.iterdir()}
        return sorted((path for path in found if found[path]), key=lambda path: int(found[path][1]))  # type: ignore[index]

    def _save_state(self) -> None:
        state.save(self.folder / "state", self.session, self.marks, {"best": self.best, "eight_bit": self.eight_bit})

    def _measure(self, step: int) -> None:
        """Held-out loss; the LoRA with the lowest one is kept beside the others."""
        try:
            with self.session.result(), adapters.active(self.base.model, self.session.name):
                loss = held_out_loss(self.base.model, self.base.family, self.held_out, seed=self.settings.train.seed)
        except torch.OutOfMemoryError:
            self.say(f"the held-out loss after step {step} did not fit into memory and is left out")
            return
        with (self.folder / HELD_OUT).open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self.say(f"held-out loss after step {step}: {loss:.4f}")
        if loss < self.best:
            self.best = loss
            self.session.save(self.folder / f"{self.name}-best.safetensors", overwrite=True)

    def _preview(self, step: int) -> None:
        self._write_preview(step, self.preview(self.session.name))

    def _write_preview(self, step: int, pictures: list[Tensor]) -> None:
        """One picture file a time, and all of them under one another."""
        if self.previews is None or not pictures or not self.settings.preview.every:
            return
        folder = self.folder / "previews"
        folder.mkdir(exist_ok=True)
        label, path = f"step {step}" if step else "base", folder / f"{step:06}.png"
        preview_grid(path, {label: pictures}, self.previews.labels, overwrite=True)
        stack(folder / "strip.png", sorted(path for path in folder.glob("*.png") if path.stem.isdigit()))
        self.watcher.previewed(step, path)

    def _write_grid(self, before: list[Tensor], after: list[Tensor]) -> None:
        rows = {label: row for label, row in (("base", before), ("with LoRA", after)) if row}
        if self.previews is not None and rows:
            preview_grid(self.folder / "preview.png", rows, self.previews.labels, overwrite=True)

    def preview(self, adapter: str | None) -> list[Tensor]:
        """One picture (3, h, w) per prompt, each from the same noise whatever the adapter.

        None at all where they do not fit into memory: that is said, and never ends the run. None either where the user
        stops the run meanwhile, which previews of minutes must not keep waiting.
        """
        if self.previews is None or self.watcher.wish() == STOP:
            return []
        try:
            with self.session.result() if adapter else nullcontext():
                return self._sample(self.previews, adapter)
        except StoppedError:
            return []
        except torch.OutOfMemoryError:
            self.say(f"the preview after step {self.session.done} did not fit into memory and is left out")
        # Out of the handler, where the error no longer holds on to the tensors of the attempt.
        torch.cuda.empty_cache()
        return []

    def _sample(self, previews: Previews, adapter: str | None) -> list[Tensor]:
        pictures = []
        base, settings, family = self.base, self.settings.preview, self.base.family
        shape = tuple(self.training[0].latents.shape)
        if previews.size is not None:
            width, height = (side // family.latent_downscale for side in previews.size)
            shape = (family.latent_channels, height, width)
        with adapters.active(base.model, adapter), attention.training_backends():
            unconditional = None if self.unconditional is None else self._tokens(self.unconditional)
            for index, prompt in enumerate(self.prompts):
                latents = sample(
                    base.model,
                    family,
                    self._tokens(prompt),
                    unconditional,
                    shape,
                    torch.Generator().manual_seed(settings.seed + index),
                    settings.steps or None,
                    settings.guidance or None,
                    previews.guide,
                    self._go_on,
                )
                pictures.append(previews.decode(latents.cpu())[0])
        return pictures

    def _go_on(self) -> None:
        if self.watcher.wish() == STOP:
            raise StoppedError("stopped in the middle of a preview")

    def _tokens(self, text: Tensor) -> Tensor:
        """(1, T, D) on the device, of a prompt's conditioning or, with a frozen trunk, of its tokens."""
        text = text[None].to(self.session.device)
        return text if self.trunk.frozen else self.base.model.encode_text(text)


def _encoded(encoders: Encoders, text: str) -> Tensor:
    """(T, W) on the CPU, free of any graph, wherever the encoder works."""
    with torch.inference_mode(False):
        return encoders.text(text).detach().cpu().clone()


def split(samples: Sequence[Sample], held_out: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on and samples to measure with, drawn by the seed.

    Raises:
        DatasetError: nothing would be left to train on.
    """
    check_held_out(held_out, len(samples))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:held_out])
    groups: tuple[list[Sample], list[Sample]] = ([], [])
    for index, entry in enumerate(samples):
        groups[index in chosen].append(entry)
    return groups


def adapter_name(name: str) -> str:
    """A run's name with what an adapter's name cannot hold replaced."""
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
    return f"{plain}_" if hasattr(torch.nn.ModuleDict(), plain) else plain


def _is_due(step: int, steps: int, every: int) -> bool:
    """Every so many steps, and after the last."""
    return step == steps or (every > 0 and step % every == 0)
