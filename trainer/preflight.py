"""Everything that can be known to fail, refused before anything is loaded or written.

Each check is one line of `CHECKS`, in the order in which they are made: what costs nothing first, then what reads
files, then what tries the device, then what asks the encoders; all of them before the base is loaded.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from . import adapters, as_stored, disk, modes, plan, probes, state
from .checkpoints import ModelFile, open_model_file, telling_name
from .devices import Device, Memory, host_memory, read_device
from .errors import DatasetError, GraftError, SettingsError
from .formats import AS_STORED
from .pictures import CaptionedPicture, read_folder
from .samples import (
    Cache,
    Encoders,
    PlacedPicture,
    Sample,
    check_held_out,
    has_empty,
    place_pictures,
    read_samples,
    unencoded,
)
from .settings import AUTO, RunSettings


class Verdict(NamedTuple):
    """What one check says.

    Attributes:
        name: of the check.
        ok: None where it was not made, because one that it depends on failed.
        message: what was found; where it failed, what is wrong and what to do.
    """

    name: str
    ok: bool | None
    message: str


@dataclass(frozen=True)
class Checked:
    """What the checks have read, so that the run need not read it again.

    Attributes:
        settings: the run's, with nothing left to `auto`.
        file: the base's, checked.
        device: what is trained on.
        pictures: of the folder; empty where the dataset is a cache.
        samples: of the cache; empty where the dataset is a folder of pictures.
        memory: the memory plan in a sentence; empty where none was made.
        compiled: whether the element-wise work is compiled, and if not why, in a sentence.
        unconditional: the file of the transformer for the previews' unconditional pass, if there is one.
    """

    settings: RunSettings
    file: ModelFile
    device: Device
    pictures: list[CaptionedPicture]
    samples: list[Sample]
    memory: str
    compiled: str
    unconditional: ModelFile | None


class _Subject:
    """A run that is checked, and what the checks made so far have found."""

    device: Device
    file: ModelFile
    lora_sizes: list[int]
    placed: list[PlacedPicture]
    conditioning: torch.Tensor
    resolved: RunSettings
    unconditional: ModelFile | None = None
    encoded_bytes = 0

    def __init__(
        self, settings: RunSettings, encoders: Encoders | None, resume: bool, memory: Memory | None, previews: bool
    ) -> None:
        self.settings, self.encoders, self.resume = settings, encoders, resume
        self.free, self.previews = memory, previews
        self.pictures: list[CaptionedPicture] = []
        self.samples: list[Sample] = []
        self.memory = self.compiled = ""
        self.compiles = False


class _Check(NamedTuple):
    """`make` returns what it found, or raises; it is not made where one that it `needs` failed."""

    name: str
    make: Callable[[_Subject], str]
    needs: tuple[str, ...] = ()


def check(
    settings: RunSettings,
    encoders: Encoders | None,
    resume: bool = False,
    memory: Memory | None = None,
    previews: bool = False,
) -> Checked:
    """Makes the checks up to the first that fails.

    Args:
        settings: of the run.
        encoders: None for a dataset that is encoded already.
        resume: the run in the output folder is to be continued.
        memory: of the device, where its driver's answer would mislead, since what is in the way will have gone by then.
        previews: the prompts come encoded, by `Previews`.

    Raises:
        GraftError: what is wrong, and what to do.
        OSError: a file that cannot be read.
    """
    subject = _Subject(settings, encoders, resume, memory, previews)
    for _, error in _judge(subject):
        if error is not None:
            raise error
    train = replace(subject.resolved.train, compile=subject.compiles)
    found = subject.pictures, subject.samples, subject.memory, subject.compiled, subject.unconditional
    return Checked(replace(subject.resolved, train=train), subject.file, subject.device, *found)


def verdicts(
    settings: RunSettings,
    encoders: Encoders | None,
    resume: bool = False,
    memory: Memory | None = None,
    previews: bool = False,
) -> list[Verdict]:
    """Makes all the checks that can be made and says what each found; the arguments are those of `check`."""
    return [verdict for verdict, _ in _judge(_Subject(settings, encoders, resume, memory, previews))]


def _judge(subject: _Subject) -> Iterator[tuple[Verdict, Exception | None]]:
    failed: set[str] = set()
    for name, make, needs in CHECKS:
        missing = [other for other in needs if other in failed]
        if missing:
            failed.add(name)
            yield Verdict(name, None, f"not checked, because of what is wrong with: {', '.join(missing)}"), None
            continue
        try:
            verdict, error = Verdict(name, True, make(subject)), None
        except (GraftError, OSError) as caught:
            failed.add(name)
            verdict, error = Verdict(name, False, str(caught)), caught
        yield verdict, error


# --- settings --------------------------------------------------------------------------------------------------------


def _dataset_settings(subject: _Subject) -> str:
    check_dataset(subject.settings, subject.encoders, subject.previews)
    dataset = subject.settings.dataset
    return f"pictures from {dataset.pictures}" if dataset.pictures else f"encoded samples from {dataset.cache}"


def check_dataset(settings: RunSettings, encoders: Encoders | None, previews: bool = False) -> None:
    dataset = settings.dataset
    if bool(dataset.pictures) == bool(dataset.cache):
        raise SettingsError(
            "the dataset is missing: give [dataset] pictures (a folder, with encoders) or cache (encoded samples)"
            if not dataset.pictures
            else "give [dataset] pictures or cache, not both"
        )
    if encoders is None and (dataset.pictures or (settings.preview.prompts and not previews)):
        what = "pictures" if dataset.pictures else "previews"
        raise SettingsError(
            f'{what} need encoders: give [dataset] encoders = "demo" with the demonstration base, or a cache of '
            "encoded samples and no preview prompts"
        )
    if dataset.cache and (dataset.trigger or dataset.default_caption or dataset.flip):
        raise SettingsError("trigger, default_caption and flip act when pictures are encoded; a cache has them or not")


def _base(subject: _Subject) -> str:
    if not subject.settings.model.path:
        raise SettingsError("the base is missing: give [model] path, or family with the demonstration parts")
    return subject.settings.model.path


# --- folders ---------------------------------------------------------------------------------------------------------


def _output(subject: _Subject) -> str:
    check_output(subject.settings, subject.resume)
    return str(Path(subject.settings.output).resolve())


def check_output(settings: RunSettings, resume: bool = False) -> None:
    """The run's folder is empty or can be made, and its name can be a file's; to resume, a run is there."""
    if not settings.output:
        raise SettingsError("the output folder is missing: give output")
    folder = Path(settings.output).resolve()
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise SettingsError(f"the output folder {folder} cannot be used ({error.strerror})") from error
    if used and not resume:
        raise SettingsError(
            f"{folder} exists and is not empty; choose another output, or resume the run in it: "
            "nothing there is overwritten"
        )
    if resume and not (folder / "state").is_dir():
        raise SettingsError(f"{folder} holds no saved state: there is nothing to resume")
    name = settings.name or folder.name
    if not name or name != Path(name).name or name in (".", "..") or len(os.fsencode(name)) > 180:
        raise SettingsError(f"name {name!r} cannot be a file's name; give a short one without folders")
    if fault := probes.folder_fault(folder):
        raise SettingsError(f"the output folder cannot be used: {fault}; choose another output")


def _encoded(subject: _Subject) -> str:
    folder = encoded_folder(subject.settings)
    if folder is None:
        return "none is needed"
    if fault := probes.folder_fault(folder):
        raise SettingsError(f"the folder of encoded tensors cannot be used: {fault}; set [dataset] encoded to another")
    return str(folder)


def encoded_folder(settings: RunSettings) -> Path | None:
    """Where encoded tensors are cached; None where the dataset is encoded already."""
    dataset = settings.dataset
    if not dataset.pictures:
        return None
    return Path(dataset.encoded or Path(dataset.pictures) / ".graft-cache").resolve()


# --- the device ------------------------------------------------------------------------------------------------------


def _device(subject: _Subject) -> str:
    device = read_device(subject.settings.model.device)
    if subject.free is not None:
        device = replace(device, memory=subject.free)
    subject.device = device
    total, free = device.memory
    return f"{device.name}, {disk.gib(free)} of {disk.gib(total)} free"


def _compute_dtype(subject: _Subject) -> str:
    compute_dtype = subject.settings.model.compute_dtype
    if fault := modes.compute_fault(compute_dtype, subject.device):
        raise SettingsError(fault)
    return compute_dtype


def _precision(subject: _Subject) -> str:
    precision = subject.settings.model.precision
    if precision == AUTO:
        return "left to the memory plan"
    if fault := modes.precision_fault(precision, subject.device, subject.file.family):
        raise SettingsError(fault)
    as_stored.formats_for(precision, subject.file)  # raises where the file is not stored so
    return precision


def _eight_bit(subject: _Subject) -> str:
    """Only whether it can be done: where it is left open, what is faster is measured on the loaded base."""
    model = subject.resolved.model
    if model.eight_bit_compute is False:
        return "off"
    formats = eight_bit_formats(model.precision, subject.file)
    if not formats:
        fault: str | None = f"the weights are kept in {model.precision}, wanted int8 or fp8"
    else:
        faults = (modes.eight_bit_fault(format, model.compute_dtype, subject.device) for format in formats)
        fault = next(filter(None, faults), None)
    if fault and model.eight_bit_compute is True:
        raise SettingsError(f'eight_bit_compute is true, but {fault}; set [model] eight_bit_compute = "auto"')
    return f"off: {fault}" if fault else "on" if model.eight_bit_compute is True else "where it is measured faster"


def eight_bit_formats(precision: str, file: ModelFile) -> tuple[str, ...]:
    """The formats, of those that can be multiplied in 8 bits, in which a base of this file is kept."""
    if precision != AS_STORED:
        return (precision,) if precision in modes.EIGHT_BIT_NEEDS else ()
    found = [format.eight_bit for format in as_stored.formats(file).values()]
    return tuple(dict.fromkeys(format for format in found if format is not None))


def _optimizer(subject: _Subject) -> str:
    optimizer = subject.settings.train.optimizer
    if optimizer == "adamw8bit" and (fault := probes.optimizer_fault(optimizer, subject.device.place)):
        raise SettingsError(fault)
    return optimizer


def _compile(subject: _Subject) -> str:
    asked, device = subject.settings.train.compile, subject.device
    if asked is True and (fault := probes.compile_fault(device.place)):
        raise SettingsError(fault)
    if asked is True:
        subject.compiles, reason = True, "as set"
    elif asked is False:
        reason = "as set"
    elif device.kind == "cpu":
        reason = "on a CPU compiling takes minutes; set [train] compile = true for a long run"
    elif fault := probes.compile_fault(device.place):
        reason = fault
    else:
        subject.compiles, reason = True, f"it works on {device.place}"
    subject.compiled = f"element-wise work is {'' if subject.compiles else 'not '}compiled: {reason}"
    return subject.compiled


# --- the base --------------------------------------------------------------------------------------------------------


def _model_file(subject: _Subject) -> str:
    file = subject.file = open_model_file(subject.settings.model.path)
    return f"{file.path.name} is {file.family.title}"


def _variant(subject: _Subject) -> str:
    check_variant(subject.file, subject.settings.model.allow_distilled)
    return "a base to train on"


def check_variant(file: ModelFile, allow_distilled: bool) -> None:
    """A distilled variant has the same keys as the base: only the file's name can tell, or its diffusers folder's."""
    name = telling_name(file.path)
    if re.search(file.family.distilled, name, re.IGNORECASE) and not allow_distilled:
        raise SettingsError(
            f"{name} looks like a distilled variant of {file.family.title}, on which training undoes the "
            "distillation: train on the base model's file, or set [model] allow_distilled = true"
        )


def _family(subject: _Subject) -> str:
    file, family = subject.file, subject.settings.model.family
    if family not in ("", file.family.name):
        raise SettingsError(f"{file.path.name} is {file.family.title}, but family is {family!r}")
    return file.family.title


def _unconditional(subject: _Subject) -> str:
    path, base = subject.settings.preview.unconditional, subject.file
    if not path or not subject.settings.preview.prompts:
        return "none is used"
    if not base.family.image_only_pass:
        raise SettingsError(
            f"{base.family.title} has no unconditional transformer, the empty prompt guides it: leave [preview] "
            "unconditional empty"
        )
    file = subject.unconditional = open_model_file(path, unconditional=True)
    as_stored.formats_for(subject.settings.model.precision, file)
    if (file.family, file.config) != (base.family, base.config):
        raise SettingsError(
            f"{file.path.name} is {file.family.title} of other sizes than {base.path.name}: they are no pair"
        )
    return f"{file.path.name} gives the unconditional pass"


def _targets(subject: _Subject) -> str:
    file, lora = subject.file, subject.settings.lora
    with torch.device("meta"):
        linears = adapters.linears(file.family.build(file.config))
    targets = adapters.resolve_targets(file.family, linears, lora)
    subject.lora_sizes = adapters.weight_sizes(linears, targets, lora)
    return f"{len(targets)} Linears, {sum(subject.lora_sizes):,} parameters"


# --- the dataset -----------------------------------------------------------------------------------------------------


def _caption_dropout(subject: _Subject) -> str:
    family, share = subject.file.family, subject.settings.dataset.caption_dropout
    cache = subject.settings.dataset.cache
    if share and subject.encoders is None and not family.image_only_pass and not has_empty(cache):
        raise SettingsError(
            f"caption_dropout needs the empty prompt of {family.title}, which {cache} does not hold: encode the "
            "pictures again, or set it to 0"
        )
    return f"{share:.0%}"


def _dataset(subject: _Subject) -> str:
    """Every picture is opened, every caption read and every mask cropped, or every encoded sample read."""
    dataset, file = subject.settings.dataset, subject.file
    if dataset.cache:
        width = file.family.conditioning_width(file.config)
        subject.samples = read_samples(dataset.cache, file.family, width)
        check_held_out(dataset.held_out, len(subject.samples))
        return f"{len(subject.samples)} encoded samples"
    subject.pictures = read_folder(dataset.pictures, file.family, dataset.trigger, dataset.default_caption)
    check_held_out(dataset.held_out, len(subject.pictures))
    subject.placed = place_pictures(subject.pictures, file.family, dataset.resolution)
    return f"{len(subject.pictures)} pictures in {len({entry.size for entry in subject.placed})} buckets"


def _conditioning_width(subject: _Subject) -> str:
    file, encoders = subject.file, subject.encoders
    width = file.family.conditioning_width(file.config)
    if encoders is None:
        return f"{width} features per token, as the encoded samples have"
    subject.conditioning = encoders.text("")
    if (found := subject.conditioning.shape[-1]) != width:
        raise DatasetError(
            f"the text encoder gives {found} features per token, {file.path.name} wants {width}; "
            "the demonstration encoders fit the demonstration bases only"
        )
    return f"{width} features per token"


def _disk_space(subject: _Subject) -> str:
    settings, encoders = subject.settings, subject.encoders
    output = Path(settings.output).resolve()
    count = disk.run_bytes(subject.lora_sizes, settings.train, settings.preview, settings.dataset.held_out > 0)
    if subject.resume:  # what is there is replaced or kept, not written once more
        count = max(0, count - sum(path.stat().st_size for path in output.rglob("*") if path.is_file()))
    demands = [disk.Demand(output, "LoRAs, state and previews", "output", count)]
    folder = encoded_folder(settings)
    if folder is not None and encoders is not None:
        family, empty = subject.file.family, subject.conditioning
        sizes, captions = unencoded(subject.placed, family, encoders, Cache(folder), settings.dataset.flip)
        count = disk.latents_bytes(family, sizes)
        count += disk.conditioning_bytes(captions, empty.shape[-1], empty.element_size(), len(empty))
        demands.append(disk.Demand(folder, "encoded tensors", "[dataset] encoded", count))
        subject.encoded_bytes = _dataset_bytes(subject)
    return disk.check_room(demands)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(subject: _Subject) -> str:
    settings, device = subject.settings, subject.device
    family, config = subject.file.family, subject.file.config
    blocks, most = settings.model.blocks_on_cpu, family.block_count(config)
    if blocks != AUTO and int(blocks) > most:
        raise SettingsError(f"blocks_on_cpu is {blocks}; {subject.file.path.name} has {most} blocks")
    how_many = settings.train.checkpointing
    if how_many is not True and how_many != AUTO and int(how_many) > most:
        raise SettingsError(f"checkpointing is {how_many}; {subject.file.path.name} has {most} blocks")
    if subject.resume and settings.model.precision == AUTO:
        # Another precision would be another run: the one that was chosen then holds.
        precision = state.saved_precision(Path(settings.output).resolve() / "state")
        if fault := modes.precision_fault(precision, device, family):
            raise SettingsError(f"the run was begun in {precision}: {fault}")
        settings = replace(settings, model=replace(settings.model, precision=precision))
    if device.kind == "cpu":
        subject.resolved = on_cpu(settings)
        return "not planned: it trains on the CPU, in main memory"
    wanted = _workload(subject, settings)
    # Each is tried on the device, which is not done for a precision that is chosen already.
    usable = modes.modes(device, family) if wanted.precision == AUTO else None
    chosen = plan.choose(wanted, _budget(wanted, device), usable)
    model = replace(settings.model, precision=chosen.precision, blocks_on_cpu=chosen.blocks_on_cpu)
    train = replace(settings.train, checkpointing=chosen.checkpointing)
    subject.resolved = replace(settings, model=model, train=train)
    subject.memory = plan.describe(chosen)
    return subject.memory


def on_cpu(settings: RunSettings) -> RunSettings:
    """What `auto` means where the CPU trains: bf16 weights, checkpointing, no block elsewhere."""
    model, train = settings.model, settings.train
    model = replace(
        model,
        precision="bf16" if model.precision == AUTO else model.precision,
        blocks_on_cpu=0 if model.blocks_on_cpu == AUTO else model.blocks_on_cpu,
    )
    train = replace(train, checkpointing=True if train.checkpointing == AUTO else train.checkpointing)
    return replace(settings, model=model, train=train)


def _budget(wanted: plan.Workload, device: Device) -> plan.Budget:
    """What can be used; all that is free where the settings leave nothing to choose."""
    total, free = device.memory
    chosen = AUTO not in (wanted.precision, wanted.checkpointing, wanted.blocks_on_cpu)
    return plan.Budget(free if chosen else plan.usable(total, free), host_memory().free)


def _workload(subject: _Subject, settings: RunSettings) -> plan.Workload:
    """The run's largest picture and longest caption; of captions that are not encoded yet, a bound."""
    family = subject.file.family
    dataset_bytes = subject.encoded_bytes
    if subject.samples:
        dataset_bytes = sum(tensor.nbytes for sample in subject.samples for tensor in sample.tensors)
        shapes = [(c, h, w) for c, h, w in (sample.latents.shape for sample in subject.samples)]
        tokens = max(len(sample.conditioning) for sample in subject.samples)
    else:
        side = family.latent_downscale
        sizes = [entry.size for entry in subject.placed]
        shapes = [(family.latent_channels, height // side, width // side) for width, height in sizes]
        longest = max(len(picture.caption.encode()) for picture in subject.pictures)
        tokens = len(subject.conditioning) + disk.tokens_of(longest)
    return plan.Workload(
        family,
        subject.file.config,
        max(shapes, key=math.prod),
        tokens,
        lora=settings.lora,
        precision=settings.model.precision,
        stored=as_stored.formats_for(settings.model.precision, subject.file),
        compute_dtype=settings.model.compute_dtype,
        batch_size=settings.train.batch_size,
        optimizer=settings.train.optimizer,
        ema=settings.train.ema > 0,
        checkpointing=settings.train.checkpointing,
        blocks_on_cpu=settings.model.blocks_on_cpu,
        preview=bool(settings.preview.prompts),
        unconditional=subject.unconditional is not None,
        dataset_bytes=dataset_bytes,
    )


def _dataset_bytes(subject: _Subject) -> int:
    """Of all the pictures and captions when they are encoded, in the cache already or not."""
    family, empty = subject.file.family, subject.conditioning
    flips = 2 if subject.settings.dataset.flip else 1
    latents = flips * disk.latents_bytes(family, [entry.size for entry in subject.placed])
    captions = [picture.caption for picture in subject.pictures]
    return latents + disk.conditioning_bytes(captions, empty.shape[-1], empty.element_size(), len(empty))


CHECKS = (
    _Check("dataset settings", _dataset_settings),
    _Check("base", _base),
    _Check("output folder", _output),
    _Check("encoded folder", _encoded, ("dataset settings",)),
    _Check("device", _device),
    _Check("compute dtype", _compute_dtype, ("device",)),
    _Check("model file", _model_file, ("base",)),
    _Check("variant", _variant, ("model file",)),
    _Check("family", _family, ("model file",)),
    _Check("unconditional transformer", _unconditional, ("model file",)),
    _Check("targets", _targets, ("model file",)),
    _Check("caption dropout", _caption_dropout, ("dataset settings", "model file")),
    _Check("dataset", _dataset, ("dataset settings", "model file")),
    _Check("precision", _precision, ("device", "model file")),
    _Check("optimizer", _optimizer, ("device",)),
    _Check("compile", _compile, ("device",)),
    _Check("conditioning width", _conditioning_width, ("dataset settings", "model file")),
    _Check(
        "disk space",
        _disk_space,
        ("output folder", "encoded folder", "targets", "dataset", "conditioning width"),
    ),
    _Check("memory", _memory, ("unconditional transformer", "precision", "disk space")),
    _Check("8-bit compute", _eight_bit, ("memory",)),
)
