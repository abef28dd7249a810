"""The training loop. `TrainSession.step` is the only place that knows what a training step is."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..lora_convert import FP32_PARTS, LokrModule, LoraModule, read_comfyui, read_state, write_comfyui, write_state
from ..lora_convert.headers import OVER_BASE
from . import adapters, attention, compiling, memory, optimizers
from .base_model import Base
from .batches import Batch, BatchStream, collate
from .ema import Average
from .errors import TrainingError, some
from .lora_settings import LoraSettings
from .objective import add_noise, draw_noise, draw_sigmas, velocity_loss
from .samples import Sample
from .schedule import learning_rate
from .settings import SAVE_DTYPES, TrainSettings


@dataclass(frozen=True)
class StepLog:
    """One line of `log.jsonl`. The loss is the mean over the step's pictures; the norm is that before clipping.

    Where several steps were read together, each has the mean of their seconds.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float


Place = tuple[Tensor, dict[str, Any]]  # of the generator and of the stream


@dataclass(frozen=True)
class _Pass:
    """One forward pass before it is made: its batch and every random number of it, on the CPU.

    Attributes:
        batch: of samples.
        noise: in the shape of the latents, fp32.
        sigma_B: noise levels, fp32.
        seed: of dropout; None where there is none.
    """

    batch: Batch
    noise: Tensor
    sigma_B: Tensor
    seed: int | None


@dataclass(frozen=True)
class _Draw:
    """A step's passes, and where the generator and the stream stood before they were drawn."""

    place: Place
    passes: list[_Pass]


@dataclass(frozen=True)
class _Unread:
    """A step whose loss the device may still be at work on.

    Attributes:
        step: its number.
        values: its losses, one of each pass, and the gradient's norm, fp32, on the device.
        rate: the learning rate.
        names: of each pass's pictures.
    """

    step: int
    values: Tensor
    rate: float
    names: list[tuple[str, ...]]

    def check(self, values: list[float]) -> None:
        """Its values, now on the CPU, are all finite."""
        *losses, norm = values
        mend = "a lower learning rate or fp32 compute usually mends it"
        for loss, names in zip(losses, self.names, strict=True):
            if not math.isfinite(loss):
                raise NotFiniteError(f"the loss became {loss} in step {self.step} on {some(list(names))}; {mend}")
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient became {norm} in step {self.step}; {mend}")


class NotFiniteError(TrainingError):
    """A loss or gradient that is not finite.

    Attributes:
        logs: the steps before it that were read with it, which are.
    """

    logs: tuple[StepLog, ...] = ()


class TrainSession:
    """Trains one named adapter on a base, in place.

    Use it as a context: while it is open its adapter is active and trainable, blocks recompute if so set, and the SDPA
    kernels are pinned; afterwards all of that, and every global, is as it was, also after an exception.

        with TrainSession(base, samples, lora, train, "zorb") as session:
            for log in session.steps():
                ...
            session.save(path)

    Raises:
        SettingsError: targets that match nothing, or a name that the base has already.
    """

    def __init__(
        self,
        base: Base,
        samples: Sequence[Sample],
        lora: LoraSettings,
        train: TrainSettings,
        name: str,
        caption_dropout: float = 0.0,
        empty: Tensor | None = None,
    ) -> None:
        """
        Args:
            base: what is trained on; its weights do not change.
            samples: encoded pictures.
            lora: the adapter.
            train: everything else.
            name: of the adapter, new on this base.
            caption_dropout: share of visits without their caption.
            empty: conditioning of the empty prompt, like the samples', for those visits; None for a family that runs
                without text.
        """
        self.base = base
        self.samples = samples
        self.empty = empty
        self.lora = lora
        self.train = train
        self.name = name
        self.generator = torch.Generator().manual_seed(train.seed)
        self.targets = adapters.resolve_targets(base.family, adapters.linears(base.model), lora)
        adapters.inject(base.model, name, lora, self.targets, self.generator)
        self.parameters = adapters.parameters(base.model, name)
        self.device = self.parameters[0].device
        with torch.inference_mode(False):
            self.optimizer = optimizers.build(train.optimizer, self.parameters, train.learning_rate, train.weight_decay)
            self.average = Average(self.parameters, train.ema) if train.ema else None
        self.stream = BatchStream(samples, train.batch_size, self.generator, caption_dropout)
        self.done = 0
        self._ahead: _Draw | None = None
        self._unread: list[_Unread] = []
        self._since = 0.0  # the clock when the first of the unread steps began
        self._open: ExitStack | None = None

    def __enter__(self) -> TrainSession:
        with ExitStack() as stack:
            # ComfyUI runs nodes under inference mode, in which nothing can be saved for backward.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            # The forward is free of autocast by itself; the backward, which recomputes, is so by this.
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(attention.training_backends())
            stack.enter_context(adapters.active(self.base.model, self.name, train=True))
            # `auto` is settled by preflight; a session that was made without it takes the least memory.
            how_many = self.train.checkpointing
            how_many = True if isinstance(how_many, str) else how_many
            stack.enter_context(memory.recomputing(*self.base.family.by_place(self.base.model), how_many))
            if self.train.compile is True:
                stack.enter_context(compiling.compiled())
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._open is not None
        self.optimizer.zero_grad()
        self._open.__exit__(kind, error, trace)
        self._open = None

    def steps(self) -> Iterator[StepLog]:
        """The steps that are still to do, one at a time."""
        while self.done < self.train.steps:
            yield self.step()

    def step(self) -> StepLog:
        """One optimiser step, whose loss is waited for: as `advance`, with no step before it unread."""
        assert not self._unread, "read() the steps before this one first"
        return self.advance()[-1]

    def advance(self, read: bool = True) -> list[StepLog]:
        """One optimiser step over `accumulation` batches, in which every picture counts the same.

        Args:
            read: whether its loss is waited for, so that nothing that is not finite ever moves a weight. Else the CPU
                goes on while a GPU is at work, and its loss is read with a later step's, or by `read`.

        Returns:
            With `read` this step and those before it that were not read, else nothing.

        Raises:
            NotFiniteError: the loss or the gradient, of this step or of one before it that was not read: what such a
                one made of the weights must not be kept. After any other error in the forward or backward pass the
                session is as before the step, and what was not read can still be.
        """
        assert self._open is not None, "open the session first: with TrainSession(...) as session"
        place = self._place()
        try:
            return self._step(read)
        except BaseException:
            # A step that failed has not happened: another try, or a resume, sees the same pictures and noise.
            self._return_to(place)
            self.optimizer.zero_grad()
            raise

    def read(self) -> list[StepLog]:
        """The steps that were not read, after which it waits for the device.

        Raises:
            NotFiniteError: a loss or gradient among them.
        """
        logs = self._logs(self._waited(self._unread), len(self._unread))
        self._unread = []
        return logs

    def _waited(self, steps: list[_Unread]) -> list[tuple[_Unread, list[float]]]:
        """The steps with their values, which are all finite."""
        waited: list[tuple[_Unread, list[float]]] = []
        # Of each its own: where a device is full there is no room to put them together.
        for step in steps:
            values = step.values.tolist()
            try:
                step.check(values)
            except NotFiniteError as error:
                self._unread = []
                error.logs = tuple(self._logs(waited, len(steps)))
                raise
            waited.append((step, values))
        return waited

    def _logs(self, waited: list[tuple[_Unread, list[float]]], steps: int) -> list[StepLog]:
        """Steps that were waited for, of so many since the clock began."""
        seconds = (time.perf_counter() - self._since) / max(1, steps)
        return [StepLog(step.step, sum(losses), step.rate, norm, seconds) for step, (*losses, norm) in waited]

    def _step(self, read: bool) -> list[StepLog]:
        if not self._unread:
            self._since = time.perf_counter()
        passes = (self._ahead or self._draw()).passes
        self._ahead = None
        pictures = sum(len(entry.batch.names) for entry in passes)
        losses = []
        for entry in passes:
            loss = self._loss(entry).sum() / pictures
            loss.backward()
            losses.append(loss.detach())
        train = self.train
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, train.max_grad_norm or float("inf"))
        if self.done + 1 < train.steps:
            # A GPU is still at work on this step.
            self._ahead = self._draw()
        rate = learning_rate(train.schedule, self.done, train.steps, train.warmup_steps, train.learning_rate)
        values = torch.stack([*losses, norm.to(losses[0])])
        steps = [*self._unread, _Unread(self.done + 1, values, rate, [entry.batch.names for entry in passes])]
        # The one time that the CPU waits for the GPU.
        waited = self._waited(steps) if read else []
        optimizers.set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        self.done += 1
        self._unread = [] if read else steps
        return self._logs(waited, len(waited))

    def _place(self) -> Place:
        """Where the generator and the stream stand, less what was drawn ahead."""
        return self._ahead.place if self._ahead else (self.generator.get_state(), self.stream.state_dict())

    def _return_to(self, place: Place) -> None:
        generator, stream = place
        self.generator.set_state(generator)
        self.stream.load_state_dict(stream)
        self._ahead = None

    def _draw(self) -> _Draw:
        """All of a step's draws from the generator, in the order in which they always were."""
        place = self.generator.get_state(), self.stream.state_dict()
        groups = [next(self.stream) for _ in range(self.train.accumulation)]
        passes = []
        for group in groups:
            batch = collate(self.samples, group, self.empty)
            shape = batch.latents.shape
            sigma_B = draw_sigmas(self.base.family, self.train.timesteps, shape[0], shape, self.generator)
            noise = draw_noise(shape, self.generator)
            seed = int(torch.randint(2**62, (), generator=self.generator)) if self.lora.dropout else None
            if self.device.type == "cuda":
                batch, noise, sigma_B = batch.pinned(), noise.pin_memory(), sigma_B.pin_memory()
            passes.append(_Pass(batch, noise, sigma_B, seed))
        return _Draw(place, passes)

    def _loss(self, drawn: _Pass) -> Tensor:
        """Per-sample loss (B,) fp32."""
        batch = drawn.batch
        data, noise, sigma_B = (
            tensor.to(self.device, non_blocking=True) for tensor in (batch.latents, drawn.noise, drawn.sigma_B)
        )
        noisy = add_noise(data, noise, sigma_B)
        with ExitStack() as stack:
            if drawn.seed is not None:
                # Dropout takes torch's global generator: it is lent a state drawn from the run's own, and gets its
                # former one back.
                devices = [self.device] if self.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(drawn.seed)
            predicted = batch.velocity(self.base.model, noisy, sigma_B)
        weights = None if batch.weights is None else batch.weights.to(self.device, non_blocking=True)
        return velocity_loss(predicted, data, noise, weights)

    @contextmanager
    def result(self) -> Iterator[None]:
        """While it lasts the adapter holds what is saved and previewed: the moving average, where there is one."""
        with nullcontext() if self.average is None else self.average.applied():
            yield

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue bit-exactly. It shares the session's tensors: write it before a step."""
        assert not self._unread, "read() first: what was not checked is not to be kept"
        return {
            "done": self.done,
            "adapter": [parameter.detach() for parameter in self.parameters],
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self._place()[0],
            "stream": self._place()[1],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called, on a session with the same settings and samples."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter, value in zip(self.parameters, state["adapter"], strict=True):
                parameter.copy_(value)
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
        self._return_to((state["generator"], state["stream"]))
        self._unread = []
        self.done = state["done"]

    def try_saving(self, folder: Path) -> None:
        """Writes the LoRA once, reads it back and removes it: a save that cannot work is better known before step 1."""
        path = folder / f".{self.name}.trial.safetensors"
        try:
            self._write(path, overwrite=True)
        finally:
            path.unlink(missing_ok=True)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Writes the LoRA in ComfyUI's layout, atomically, then reads it back and compares.

        Raises:
            FileExistsError: the file exists and overwriting was not asked for.
            TrainingError: a weight is not finite, or what stands in the file is not what was trained.
        """
        self.check_finite()
        self._write(Path(path), overwrite)

    def _write(self, path: Path, overwrite: bool) -> None:
        dtype = SAVE_DTYPES[self.train.save_dtype]
        with self.result():
            trained = adapters.to_canonical(self.base.model, self.name)
        state = write_comfyui(trained)
        state = {key: tensor if key.endswith(FP32_PARTS) else tensor.to(dtype) for key, tensor in state.items()}
        write_state(path, state, self.metadata(), overwrite)
        kept = read_comfyui(read_state(path)[0])
        for name, module in trained.items():
            if not _same(kept.get(name), module, dtype):
                raise TrainingError(f"{path}: {name} reads back differently from what was written; is the disk sound?")

    def metadata(self) -> dict[str, str]:
        """The header of the LoRA's file, in the keys that ComfyUI, Civitai and other tools read."""
        family = self.base.family
        return {
            "format": "pt",
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": f"{family.name}/lora",
            "modelspec.title": self.name,
            **_network(self.lora),
            "ss_network_dim": str(self.lora.rank),
            "ss_network_alpha": str(self.lora.file_alpha),
            "ss_steps": str(self.done),
            "ss_learning_rate": str(self.train.learning_rate),
            "ss_seed": str(self.train.seed),
            "graft": json.dumps(
                {
                    "base": self.base.source.name,
                    "precision": self.base.precision,
                    "lora": asdict(self.lora),
                    **({"dora_scale": OVER_BASE} if self.lora.kind == "dora" else {}),
                    "train": asdict(self.train),
                }
            ),
        }

    def check_finite(self) -> None:
        """Every weight is finite.

        Raises:
            TrainingError: the modules for which that does not hold.
        """
        layers = adapters.adapted(self.base.model, self.name)
        weights = {name: layer.weights(self.name).values() for name, layer in layers.items()}
        broken = [name for name, parts in weights.items() if not all(part.isfinite().all() for part in parts)]
        if broken:
            raise TrainingError(
                f"{len(broken)} modules have weights that are not finite: {some(broken)}; lower the learning rate"
            )

    def check_trained(self) -> None:
        """After the run: every weight finite, and in every module the factor that was zero at the start changed.

        Raises:
            TrainingError: the modules for which that does not hold.
        """
        self.check_finite()
        layers = adapters.adapted(self.base.model, self.name)
        untrained = [name for name, layer in layers.items() if not layer.zero_at_start(self.name).any()]
        if untrained:
            raise TrainingError(
                f"{len(untrained)} of {len(layers)} modules learned nothing (B is still zero): {some(untrained)}"
            )


def _network(lora: LoraSettings) -> dict[str, str]:
    """What kohya's sd-scripts note of the adapter: LyCORIS and its arguments for what their own LoRA is not."""
    arguments = {
        "lora": {},
        "dora": {"algo": "lora", "dora_wd": "True"},
        "lokr": {"algo": "lokr", "factor": str(lora.factor)},
    }[lora.kind]
    if not arguments:
        return {"ss_network_module": "networks.lora"}
    return {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps(arguments)}


def _same(kept: LoraModule | LokrModule | None, trained: LoraModule | LokrModule, dtype: torch.dtype) -> bool:
    """Whether what was read back is what was trained, in the dtypes of the file."""
    if kept is None or type(kept) is not type(trained):
        return False
    found, wanted = kept.factors(), {part: tensor.to(dtype) for part, tensor in trained.factors().items()}
    # The file holds alpha in fp32, which a root, as rsLoRA has it, is not exact in.
    found["alpha"], wanted["alpha"] = torch.tensor(kept.alpha), torch.tensor(trained.alpha)
    for parts, module in ((found, kept), (wanted, trained)):
        if module.magnitude_over_base is not None:
            parts["magnitude"] = module.magnitude_over_base
    return found.keys() == wanted.keys() and all(torch.equal(found[part], wanted[part]) for part in wanted)
