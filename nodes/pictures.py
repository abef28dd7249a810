"""Pictures for a graph: files as IMAGE, a sheet of thumbnails, the loss curve while a run trains.

Shape suffixes: B batch, H height, W width, C colours.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

THUMBNAIL, GAP, COLUMNS, MOST = 160, 8, 8, 64
CURVE = (640, 360)
FRAME = 24


def to_image(picture: Image.Image) -> Tensor:
    """An IMAGE (1, H, W, 3), fp32 in [0, 1]."""
    return torch.from_numpy(np.array(picture.convert("RGB"))).float()[None] / 255


def read_image(path: Path) -> Tensor:
    """A picture file as an IMAGE."""
    with Image.open(path) as picture:
        return to_image(picture)


def thumbnails(paths: Sequence[Path]) -> Image.Image:
    """A sheet of the pictures, whole and upright; of more than `MOST`, some that are spread evenly over them."""
    shown = paths if len(paths) <= MOST else [paths[index * len(paths) // MOST] for index in range(MOST)]
    columns = min(COLUMNS, max(1, math.ceil(math.sqrt(len(shown)))))
    rows = math.ceil(len(shown) / columns)
    pitch = THUMBNAIL + GAP
    sheet = Image.new("RGB", (GAP + columns * pitch, GAP + rows * pitch), "#22262b")
    for index, path in enumerate(shown):
        with Image.open(path) as file:
            file.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # a large JPEG is decoded at a fraction of its size
            small = ImageOps.contain(ImageOps.exif_transpose(file).convert("RGB"), (THUMBNAIL, THUMBNAIL))
        row, column = divmod(index, columns)
        left, top = GAP + column * pitch, GAP + row * pitch
        sheet.paste(small, (left + (THUMBNAIL - small.width) // 2, top + (THUMBNAIL - small.height) // 2))
    return sheet


def loss_curve(losses: Sequence[float]) -> Image.Image:
    """The losses so far, faint, under their running mean: drawn in milliseconds, since it is drawn while training."""
    from ..trainer.plots import ACCENT, INK, MUTED, smoothed

    width, height = CURVE
    picture = Image.new("RGB", CURVE, "white")
    draw = ImageDraw.Draw(picture)
    draw.line([(FRAME, FRAME), (FRAME, height - FRAME), (width - FRAME, height - FRAME)], fill=INK)
    if not losses:
        return picture
    most = max(losses) or 1.0
    means = smoothed(losses)
    # More points than pixels would not be seen.
    every = max(1, len(losses) // (2 * width))
    for values, colour, thickness in ((losses, MUTED, 1), (means, ACCENT, 3)):
        points = [
            (
                FRAME + (width - 2 * FRAME) * index / max(1, len(losses) - 1),
                height - FRAME - (height - 2 * FRAME) * value / most,
            )
            for index, value in list(enumerate(values))[::every]
        ]
        if len(points) > 1:
            draw.line(points, fill=colour, width=thickness)
    draw.text((FRAME, 6), f"loss {means[-1]:.4f} after step {len(losses)}", fill=INK)
    return picture


def loss_plot_image(losses: Sequence[float], title: str) -> Tensor:
    """The engine's loss plot as an IMAGE."""
    from ..trainer.plots import loss_plot

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loss.png"
        loss_plot(path, losses, title)
        return read_image(path)
