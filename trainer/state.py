"""A run's state on disk, and whether a run may continue from it.

The state is one file, written whole or not at all. With it goes a fingerprint of everything that decides what the next
step computes: a run that differs in any of it is refused, with the difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..lora_convert import atomic_file
from .errors import SettingsError, some
from .loop import TrainSession
from .samples import Sample
from .settings import RunSettings
from .tensor_files import add_tensor, samples_of

STATE = "state.pt"
# Settings that change when something is done or how much memory it takes, not what a step computes.
FREE = {"checkpointing", "save_every", "keep", "held_out_every", "save_dtype", "log_every"}
PLACES = 8  # of a base's file, at each of which a MiB is hashed


def fingerprint(settings: RunSettings, base: Sequence[Path], samples: Sequence[Sample]) -> dict[str, Any]:
    """What the mathematics of a run depends on, as flat names and values. `base` is all the files of the base."""
    train = {key: value for key, value in asdict(settings.train).items() if key not in FREE}
    if settings.train.schedule == "constant":
        train.pop("steps")  # a constant rate does not know where it ends: a run may be made longer
    if train["compile"] is not True:
        train.pop("compile")  # a mark of its own where the last digits differ
    return {
        "base": " ".join(file_digest(file) for file in base),
        "precision": settings.model.precision,
        "compute_dtype": settings.model.compute_dtype,
        "eight_bit_compute": settings.model.eight_bit_compute,
        "samples": samples_digest(samples),
        "caption_dropout": settings.dataset.caption_dropout,
        **{f"lora.{key}": value for key, value in asdict(settings.lora).items()},
        **{f"train.{key}": value for key, value in train.items()},
    }


def file_digest(path: Path) -> str:
    """A hash of the file's size and of pieces spread over it: 8 MiB read, whatever the size.

    It tells models apart, not copies of one model of which a few weights were changed.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for sample in samples_of(file, size, PLACES):
            digest.update(sample)
    return digest.hexdigest()


def samples_digest(samples: Sequence[Sample]) -> str:
    """A hash of every tensor, caption and repeat, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.name, sample.caption, sample.repeats]).encode())
        for tensor in sample.tensors:
            add_tensor(digest, tensor)
    return digest.hexdigest()


def save(folder: Path, session: TrainSession, marks: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Writes the session's state into `folder`, in place of the former one.

    Args:
        folder: made if it is not there.
        session: between two steps.
        marks: the run's fingerprint.
        extra: plain values of the caller's, given back by `read`.

    Raises:
        OSError: it cannot be written, such as on a full disk; the former state is then still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"session": session.state_dict(), "fingerprint": dict(marks), "extra": dict(extra)}
    with atomic_file(folder / STATE, overwrite=True) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:  # what torch's archive writer makes of a full disk
            raise OSError(f"{folder / STATE} cannot be written ({str(error).splitlines()[0]})") from error


def read(folder: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of a run with this fingerprint: `session`, for `TrainSession.load_state_dict`, and `extra`.

    Raises:
        SettingsError: there is no state, it is damaged, or the run differs from the one that it belongs to.
    """
    content = _content(folder / STATE)
    _compare(content, marks)
    return content


def steps_done(folder: Path, marks: Mapping[str, Any]) -> int:
    """How many steps the saved run with this fingerprint has done. Its tensors are not read.

    Raises:
        SettingsError: as `read`.
    """
    content = _content(folder / STATE, mapped=True)
    _compare(content, marks)
    return content["session"]["done"]


def saved_precision(folder: Path) -> str:
    """The precision of the run whose state is saved there.

    Raises:
        SettingsError: there is no state, or it is damaged.
    """
    return _content(folder / STATE, mapped=True)["fingerprint"]["precision"]


def _compare(content: Mapping[str, Any], marks: Mapping[str, Any]) -> None:
    kept = content["fingerprint"]
    changed = [
        f"{name} was {_short(kept.get(name))}, is {_short(marks.get(name))}"
        for name in sorted({*kept, *marks})
        if kept.get(name) != marks.get(name)
    ]
    if changed:
        raise SettingsError(f"this run cannot continue the saved one: {some(changed, 6)}")


def _content(path: Path, mapped: bool = False) -> dict[str, Any]:
    """What is in the file.

    Args:
        mapped: for a caller that lets go of it at once and uses no tensor: their bytes are not read.
    """
    if not path.is_file():
        raise SettingsError(f"{path.parent} holds no saved state: there is nothing to resume")
    try:
        # Plain tensors and containers only: a state file cannot run code.
        content = _load(path, mapped)
        content["fingerprint"]["precision"]
    except Exception as error:  # torch raises many kinds for a damaged archive
        raise SettingsError(f"{path} is damaged and cannot be resumed from ({type(error).__name__})") from error
    return content


def _load(path: Path, mapped: bool) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception:
        if not mapped:
            raise
        # Not every file system can map a file.
        return torch.load(path, map_location="cpu", weights_only=True)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
