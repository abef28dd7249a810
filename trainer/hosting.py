"""A base that lives in a host which shares the device and main memory with other models.

It is loaded when it is first needed, leaves the device when the host asks for the memory, and comes back. Several LoRAs
can be on it at once, each named by a token that whoever shows it holds: when the last holder is gone, the LoRA leaves
the base. What is not shown waits in main memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from . import adapters, as_stored, modes, plan
from .applied import AppliedLora, applied
from .base_model import Base, choose_blocks, compute_dtype_of, load_base
from .checkpoints import ModelFile
from .devices import Memory, host_memory, ran_out_of_memory, read_device
from .errors import DoesNotFitError, SettingsError, TrainingError, first_line
from .families import Transformer
from .offload import BlocksOnCPU, slots_bytes
from .preflight import Checked, on_cpu
from .quantization import FrozenLinear
from .settings import AUTO, ModelSettings, RunSettings

# A base that is shown before anything is trained on it leaves room for a run on pictures of the first size that fits.
ASSUMED_SIDES = (1024, 768, 512)


class AdapterToken:
    """Names a LoRA on a base; whoever holds the token can show it.

    Attributes:
        name: of the adapter on the base; of another LoRA, what the user calls it.
        lora: a LoRA that was read from a file; None for an adapter that is trained on the base.
    """

    def __init__(self, name: str, lora: AppliedLora | None = None) -> None:
        self.name, self.lora = name, lora

    def __repr__(self) -> str:
        return f"<{self.name}>"


Shown = Sequence[tuple[AdapterToken, float]]
"""LoRAs and their strengths."""


class HostedBase:
    """A base, loaded or not.

    Attributes:
        file: its model file, checked.
        place: the device that it computes on.
        base: as it was loaded; None before.
        on_device: whether its weights are on `place`; blocks that are kept on the CPU have their slots there.
        training: whether a run is under way, during which it must not be moved.
    """

    def __init__(
        self, settings: ModelSettings, file: ModelFile, place: torch.device, memory: Callable[[], Memory]
    ) -> None:
        """
        Args:
            settings: how it is to be loaded.
            file: of its weights.
            place: the device that it computes on.
            memory: of the device, which decides what is left to `auto`: free is what there is once others have left.

        Raises:
            SettingsError: a precision or compute dtype that this device, or the family, cannot be trained in.
        """
        self.file, self.place, self._memory = file, place, memory
        self._asked = settings
        self._chosen: ModelSettings | None = None
        self._predicted: tuple[ModelSettings, int] | None = None
        self.base: Base | None = None
        self.on_device = self.training = False
        self._whole = True  # whether no part of it, such as the text trunk, waits elsewhere
        self._busy = 0
        self._forgotten: set[str] = set()
        self._tokens: weakref.WeakValueDictionary[str, AdapterToken] = weakref.WeakValueDictionary()
        self._shown_loras: list[AppliedLora] = []
        self._placed: tuple[set[str], set[str]] | None = None  # adapters on the device, and all of them
        device = read_device(str(place))
        faults = [modes.compute_fault(settings.compute_dtype, device)]
        if settings.precision != AUTO:
            faults.append(modes.precision_fault(settings.precision, device, file.family))
        for fault in filter(None, faults):
            raise SettingsError(fault)
        as_stored.formats_for(settings.precision, file)  # raises where the file is not stored so

    # --- loading

    @property
    def settings(self) -> ModelSettings:
        """How it is loaded, as far as that is settled: with LoRAs on it the precision is, whatever was asked for."""
        if self.base is not None and adapters.adapter_names(self.base.model):
            return replace(self._asked, precision=self.base.precision)
        return self._asked

    def choose(self) -> ModelSettings:
        """How it is loaded where no run has decided that: `auto` leaves room for a usual run.

        Raises:
            DoesNotFitError: there is no such room.
        """
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> ModelSettings:
        asked, family = self._asked, self.file.family
        if self.place.type == "cpu":
            return on_cpu(RunSettings(model=asked)).model
        if AUTO not in (asked.precision, asked.blocks_on_cpu):
            return asked
        wanted = plan.Workload(
            family,
            self.file.config,
            (family.latent_channels, family.latent_multiple, family.latent_multiple),
            precision=asked.precision,
            stored=as_stored.formats_for(asked.precision, self.file),
            compute_dtype=asked.compute_dtype,
            blocks_on_cpu=asked.blocks_on_cpu,
        )
        usable = modes.modes(read_device(str(self.place)), family) if asked.precision == AUTO else None
        budget = plan.Budget(plan.usable(*self._memory()), host_memory().free)
        for side in ASSUMED_SIDES:
            try:
                chosen = plan.choose(plan.at_resolution(wanted, side), budget, usable)
            except DoesNotFitError:
                if side == ASSUMED_SIDES[-1]:
                    raise
            else:
                break
        return replace(asked, precision=chosen.precision, blocks_on_cpu=chosen.blocks_on_cpu)

    def prepare(self, checked: Checked) -> None:
        """Takes what a checked run has settled; nothing is loaded or moved to the device yet.

        Raises:
            SettingsError: LoRAs of earlier runs are on the base in another precision.
        """
        wanted = checked.settings.model
        self._chosen = replace(
            self._asked,
            precision=wanted.precision,
            compute_dtype=wanted.compute_dtype,
            blocks_on_cpu=wanted.blocks_on_cpu,
        )
        if self.base is None:
            return
        if self.base.precision != wanted.precision or self.base.model.compute_dtype != compute_dtype_of(
            wanted.compute_dtype
        ):
            names = adapters.adapter_names(self.base.model)
            if names:
                raise SettingsError(
                    f"the base is loaded in {self.base.precision} with the LoRA {names[0]} on it, and the run wants "
                    f"{wanted.precision}: load the model once more for it"
                )
            self.unload()
        elif (self.base.on_cpu.count if self.base.on_cpu else 0) != int(wanted.blocks_on_cpu):
            self._keep_on_cpu(int(wanted.blocks_on_cpu))

    def load(self, checked: Checked | None = None) -> Base:
        """The base, on its device; weights that have not been read yet are read now, each straight to where it goes.

        Args:
            checked: a run that has settled what was left to `auto`.

        Raises:
            GraftError: the file cannot be read, or there is no room for it.
        """
        if checked is not None:
            self.prepare(checked)
        self.to_device()
        assert self.base is not None
        if checked is not None:
            # The run has the device to itself.
            self._place(set())
            self._put_away([])
        return self.base

    def guide(self, checked: Checked) -> Transformer:
        """As the transformer that gives a run's previews their unconditional pass: as little of it as can be is on the
        device, all of its blocks and the text trunk, which it never runs, wait on the CPU.

        Args:
            checked: the run.
        """
        blocks = 0 if self.place.type == "cpu" else self.file.family.block_count(self.file.config)
        model = replace(checked.settings.model, blocks_on_cpu=blocks)
        base = self.load(replace(checked, settings=replace(checked.settings, model=model)))
        if self.place.type != "cpu":
            for name in self.file.family.text_trunk:
                base.model.get_submodule(name).to("cpu")
            self._whole = False
        return base.model

    def _read(self) -> None:
        chosen = self.choose()
        try:
            self.base = load_base(
                self.file,
                chosen.precision,
                chosen.compute_dtype,
                self.place,
                int(chosen.blocks_on_cpu),
                chosen.quantized_cache,
            )
        except RuntimeError as error:
            raise _no_room(error, self.file) from error
        self.on_device = self._whole = True

    def unload(self) -> None:
        """Drops the weights; they are read anew when they are next needed."""
        self.base, self.on_device = None, False

    def _keep_on_cpu(self, count: int) -> None:
        """Changes how many blocks wait on the CPU, of a base that is loaded."""
        assert self.base is not None
        self.to_host()
        if self.base.on_cpu is not None:
            self.base.on_cpu.dissolve()
        blocks = choose_blocks(self.base.family, self.base.model, count)
        waiting = BlocksOnCPU(list(blocks.values()), self.place) if blocks else None
        if waiting is not None:
            waiting.park()
        self.base = replace(self.base, on_cpu=waiting)
        self._whole = False

    # --- where it is

    @property
    def bytes(self) -> int:
        """What its weights take on the device: predicted before they are loaded."""
        if self.base is not None:
            own = sum(
                tensor.nbytes
                for name, module in self.base.model.named_modules()
                if not adapters.is_adapters_own(name) and not getattr(module, "placed", False)
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            )
            return own + (self.base.on_cpu.device_bytes if self.base.on_cpu else 0)
        chosen = self.choose()
        if self._predicted is None or self._predicted[0] != chosen:
            self._predicted = chosen, predicted_bytes(self.file, chosen)
        return self._predicted[1]

    def to_device(self) -> None:
        """Loads it, or brings it back.

        Raises:
            GraftError: there is no room, or the file cannot be read.
        """
        if self.base is None:
            self._read()
        elif not (self.on_device and self._whole):
            try:
                with torch.inference_mode(False), torch.no_grad():
                    if self.base.on_cpu is not None:
                        self.base.on_cpu.unpark()
                    self.base.model.to(self.place)
            except RuntimeError as error:
                self._leave()
                raise _no_room(error, self.file) from error
            self.on_device = self._whole = True
            self._placed = None

    def to_host(self) -> None:
        """Gives the device's memory back; on a host whose device is the CPU there is nothing to give."""
        if self.base is not None and self.on_device and self.place.type != "cpu":
            self._leave()

    def _leave(self) -> None:
        assert self.base is not None
        with torch.inference_mode(False), torch.no_grad():
            if self.base.on_cpu is not None:
                self.base.on_cpu.park()
            self.base.model.to(torch.device("cpu"))
        self._put_away([])
        self._placed = None
        self.on_device = False

    # --- LoRAs on it

    def token(self, adapter: str) -> AdapterToken:
        """The token of a trained adapter on the base: when nobody holds it any more the adapter leaves the base.

        Raises:
            KeyError: there is no such adapter.
        """
        if self.base is None or adapter not in adapters.adapter_names(self.base.model):
            raise KeyError(f"no adapter named {adapter!r} is on {self.file.path.name}")
        token = self._tokens.get(adapter)
        if token is None:
            token = self._tokens[adapter] = AdapterToken(adapter)
            weakref.finalize(token, _forget, weakref.ref(self), adapter).atexit = False
        return token

    def forget(self, adapter: str) -> None:
        """Takes an adapter off the base, as soon as the base is not computing."""
        self._forgotten.add(adapter)
        self._clear()

    def _clear(self) -> None:
        if self._busy or self.training or self.base is None:
            return
        for name in self._forgotten & set(adapters.adapter_names(self.base.model)):
            adapters.remove(self.base.model, name)
        self._forgotten.clear()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._clear()

    @property
    def in_use(self) -> bool:
        """Whether it is computing or training right now, and so must stay where it is."""
        return self.training or self._busy > 0

    @contextmanager
    def run(self) -> Iterator[None]:
        """A training run on the base: gradients are on, inference mode is off, and it is not moved meanwhile.

        Adapters that no token names, which a run that failed or was stopped has left, are taken off the base.
        """
        if self.base is not None:
            # Those that no token names are of runs that were stopped.
            self._forgotten |= set(adapters.adapter_names(self.base.model)) - set(self._tokens)
        self._clear()
        before = set() if self.base is None else set(adapters.adapter_names(self.base.model))
        self.training = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        except BaseException:
            if self.base is not None:
                self._forgotten |= set(adapters.adapter_names(self.base.model)) - before
            raise
        finally:
            self.training = False
            self._placed = None
            # A run that failed may have left its text trunk on the CPU.
            self._whole = False
            self._clear()

    # --- computing

    def velocity(
        self,
        latents: Tensor,
        sigma_B: Tensor,
        conditioning: Tensor | None,
        mask_BT: Tensor | None,
        shown: Shown = (),
    ) -> Tensor:
        """The transformer's velocity with some LoRAs, for inference; its arguments are those of `Transformer.forward`.

        It may be called under inference mode, under which weights could not be moved and trained afterwards: it leaves
        that mode for itself.
        """
        base = self.load()
        with torch.inference_mode(False), torch.no_grad(), self._computing(), self._showing(base, shown):
            # Copies made here are ordinary tensors, whatever mode the caller's were made in.
            given = [None if tensor is None else tensor.clone() for tensor in (latents, sigma_B, conditioning, mask_BT)]
            return base.model(*given)

    @contextmanager
    def _showing(self, base: Base, shown: Shown) -> Iterator[None]:
        trained: dict[str, float] = {}
        loras: list[tuple[AppliedLora, float]] = []
        for token, strength in shown:
            if token.lora is not None:
                loras.append((token.lora, strength))
            else:
                trained[token.name] = trained.get(token.name, 0.0) + strength
        self._place({name for name, strength in trained.items() if strength})
        self._put_away([lora for lora, strength in loras if strength])
        with adapters.active(base.model, trained), applied(base.model, loras, self.place):
            yield

    def _place(self, shown: set[str]) -> None:
        """Puts these adapters on the device and all others in main memory."""
        assert self.base is not None
        names = set(adapters.adapter_names(self.base.model))
        if self._placed != (shown, names):
            for name in sorted(names):
                adapters.move(self.base.model, name, self.place if name in shown else "cpu")
            self._placed = shown, names

    def _put_away(self, keep: list[AppliedLora]) -> None:
        for lora in self._shown_loras:
            if all(lora is not kept for kept in keep):
                lora.put_away()
        self._shown_loras = keep


def predicted_bytes(file: ModelFile, chosen: ModelSettings) -> int:
    """What a base's weights will take on the device, from its file's header."""
    family = file.family
    model = plan.skeleton(
        plan.Workload(
            family,
            file.config,
            (family.latent_channels, 2, 2),
            precision=chosen.precision,
            stored=as_stored.formats_for(chosen.precision, file),
            compute_dtype=chosen.compute_dtype,
        )
    )
    waiting = [
        [buffer.nbytes for layer in block.modules() if isinstance(layer, FrozenLinear) for buffer in layer.buffers()]
        for block in choose_blocks(family, model, int(chosen.blocks_on_cpu)).values()
    ]
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return whole - sum(map(sum, waiting)) + slots_bytes(waiting)


def _forget(reference: weakref.ref[HostedBase], adapter: str) -> None:
    hosted = reference()
    if hosted is not None:
        hosted.forget(adapter)


def _no_room(error: RuntimeError, file: ModelFile) -> Exception:
    """Torch's own error, or in its place, where memory ran out, what to do."""
    if not ran_out_of_memory(error):
        return error
    return TrainingError(
        f"out of memory while loading {file.path.name} ({first_line(error)}); choose a lower precision or more "
        "blocks_on_cpu, or close what else uses the memory"
    )
