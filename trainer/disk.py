"""How many bytes a run writes, from sizes alone, and whether the disks have room for them.

The sizes are those of the numbers; headers of files (some kilobytes each) and the log (about 150 bytes a step) are not
counted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import SettingsError
from .families import Family
from .optimizers import FP32, moments_bytes
from .plots import GRID_DPI, grid_inches
from .probes import standing
from .settings import SAVE_DTYPES, PreviewSettings, TrainSettings

# --- sizes -----------------------------------------------------------------------------------------------------------


def lora_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """One LoRA file in the save dtype; alphas are counted as header."""
    return sum(sizes) * dtype.itemsize


def state_bytes(sizes: Sequence[int], optimizer: str, ema: bool) -> int:
    """One saved state: fp32 master weights, the optimiser's moments, and the fp32 moving average if there is one."""
    return (2 if ema else 1) * FP32 * sum(sizes) + moments_bytes(sizes, optimizer)


def previews_bytes(prompts: int, every: int, steps: int) -> int:
    """At most, for all previews: grids of one row, RGBA before PNG compresses them, their strip, twice since a new one
    is written beside the old, and the last grid of two rows."""
    if not prompts:
        return 0
    one, two = (4 * math.prod(round(side * GRID_DPI) for side in grid_inches(rows, prompts)) for rows in (1, 2))
    grids = 2 + (steps - 1) // every if every else 0
    return 3 * grids * one + two


def run_bytes(sizes: Sequence[int], train: TrainSettings, preview: PreviewSettings, held_out: bool) -> int:
    """The most that a run's folder holds at once: the LoRAs (those kept and the next one, the best and the last), the
    state twice, since it is written whole under a temporary name before it replaces the former, and the previews."""
    saves = (train.steps - 1) // train.save_every if train.save_every else 0
    loras = min(saves, train.keep + 1) + (2 if held_out else 0) + 1
    return (
        loras * lora_bytes(sizes, SAVE_DTYPES[train.save_dtype])
        + 2 * state_bytes(sizes, train.optimizer, train.ema > 0)
        + previews_bytes(len(preview.prompts), preview.every, train.steps)
    )


def latents_bytes(family: Family, sizes: Sequence[tuple[int, int]]) -> int:
    """Encoded pictures of these widths and heights in pixels: C × h/downscale × w/downscale, in fp32 at most."""
    side = family.latent_downscale
    return sum(FP32 * family.latent_channels * (width // side) * (height // side) for width, height in sizes)


def tokens_of(bytes: int) -> int:
    """At most so many tokens has a caption of so many bytes of UTF-8.

    A token is taken to be 2 bytes: English has about 4 to a token, Chinese 2 to 3, and JSON, whose digits and brackets
    are tokens of their own, about 2.5.
    """
    return math.ceil(bytes / 2)


def conditioning_bytes(captions: Sequence[str], width: int, itemsize: int, empty_tokens: int) -> int:
    """At most, for encoded captions: (T, W) in the encoder's dtype, T from the caption's length.

    Args:
        captions: each one once.
        width: W.
        itemsize: bytes per feature, as the encoder gives them.
        empty_tokens: T of the empty prompt, which the template around every caption makes up.
    """
    tokens = sum(empty_tokens + tokens_of(len(caption.encode())) for caption in captions)
    return tokens * width * itemsize


# --- disks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """Bytes that are to be written into a folder, which need not be there yet; `setting` says where it is chosen."""

    folder: Path
    what: str
    setting: str
    bytes: int


def check_room(demands: Sequence[Demand]) -> str:
    """Compares what is to be written with what is free, folders on one disk together; returns that as a sentence.

    Raises:
        SettingsError: a disk that has not enough.
    """
    disks: dict[int, list[Demand]] = {}
    for demand in demands:
        disks.setdefault(disk_of(standing(demand.folder)), []).append(demand)
    said = []
    for group in disks.values():
        wanted = sum(demand.bytes for demand in group)
        free = shutil.disk_usage(standing(group[0].folder)).free
        parts = ", ".join(f"{demand.what} {gib(demand.bytes)}" for demand in group)
        if wanted > free:
            raise SettingsError(
                f"the run needs about {gib(wanted)} on the disk of {group[0].folder} ({parts}), which has {gib(free)} "
                f"free; make room, or set {' or '.join(demand.setting for demand in group)} to a folder on another disk"
            )
        said.append(f"about {gib(wanted)} of {gib(free)} free ({parts})")
    return "; ".join(said)


def disk_of(folder: Path) -> int:
    """A number that is the same for all folders on one disk."""
    return folder.stat().st_dev


def gib(count: int) -> str:
    """Bytes as people read them: `1.2 GiB`, or MiB below a tenth of that."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
