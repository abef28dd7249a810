"""Pictures of a run: the loss curve and preview grids, as PNG files.

matplotlib is imported when a picture is drawn: ComfyUI imports this file at its start.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from ..lora_convert import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, ACCENT = "#22262b", "#9aa3ad", "#2f6fde"
GRID_DPI = 120


def loss_plot(path: str | Path, losses: Sequence[float], title: str, overwrite: bool = False) -> None:
    """Loss per step, faint, under its running mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=MUTED, linewidth=0.7, alpha=0.6, label="each step")
    axes.plot(steps, smoothed(losses), color=ACCENT, linewidth=2, label="running mean")
    axes.set_xlabel("step")
    axes.set_ylabel("velocity loss")
    axes.set_title(title, loc="left", color=INK, parse_math=False)
    axes.set_xlim(1, max(2, len(losses)))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _write(figure, path, overwrite)


def smoothed(losses: Sequence[float], share: float = 0.05) -> list[float]:
    """Exponential running mean without the bias of its start."""
    weight = 1 / max(1.0, len(losses) * share)
    mean, total, means = 0.0, 0.0, []
    for loss in losses:
        mean = (1 - weight) * mean + weight * loss
        total = (1 - weight) * total + weight
        means.append(mean / total)
    return means


def preview_grid(
    path: str | Path, rows: Mapping[str, Sequence[Tensor]], prompts: Sequence[str], overwrite: bool = False
) -> None:
    """A grid with a named row of pictures for each state and a column for each prompt.

    Args:
        path: the PNG file.
        rows: label → one picture (3, h, w) in [-1, 1] per prompt.
        prompts: the column heads.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=grid_inches(len(rows), len(prompts)), dpi=GRID_DPI, layout="constrained")
    cells = figure.subplots(len(rows), len(prompts), squeeze=False)
    for row, (label, pictures) in enumerate(rows.items()):
        for column, picture in enumerate(pictures):
            axes = cells[row][column]
            pixels = ((picture.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
            # Small pictures stay crisp, large ones are scaled smoothly.
            smoothing = "nearest" if picture.shape[-1] <= 128 else "antialiased"
            axes.imshow(pixels.permute(1, 2, 0).cpu().numpy(), interpolation=smoothing)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if column == 0:
                axes.set_ylabel(label, color=INK, fontsize=11, parse_math=False)
            if row == 0:
                axes.set_title(textwrap.fill(prompts[column], 24), color=INK, fontsize=8, parse_math=False)
    _write(figure, path, overwrite)


def grid_inches(rows: int, columns: int) -> tuple[float, float]:
    """Width and height of a preview grid."""
    return 0.5 + 2 * columns, 0.7 + 2 * rows


def stack(path: str | Path, pictures: Sequence[Path]) -> None:
    """Pictures of one width, one under the other."""
    images = [Image.open(picture).convert("RGB") for picture in pictures]
    strip = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    top = 0
    for image in images:
        strip.paste(image, (0, top))
        top += image.height
    with atomic_file(path, overwrite=True) as temporary:
        strip.save(temporary, format="PNG")


def _write(figure: Figure, path: str | Path, overwrite: bool) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with atomic_file(path, overwrite) as temporary:
        figure.savefig(temporary, format="png")
