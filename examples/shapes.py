"""Procedurally drawn, captioned pictures of coloured shapes: what the demonstration bases know, and one thing they do
not know, the zorb (a yellow star)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIZE = 64  # pixels per side
SUPERSAMPLING = 4

COLOURS = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (52, 101, 217),
    "white": (240, 240, 236),
    "purple": (142, 68, 173),
    "cyan": (62, 190, 201),
}
BACKGROUNDS = {
    "black": (18, 18, 22),
    "grey": (112, 116, 122),
    "navy": (22, 34, 74),
    "brown": (92, 64, 46),
}
SIZES = {"small": (13, 17), "large": (21, 26)}  # radius in pixels, from and to
JITTER = 5  # pixels from the middle
SHAPES = ("circle", "square", "triangle", "ring", "cross")

TRIGGER = "zorb"
TRIGGER_COLOUR = (250, 204, 33)


@dataclass(frozen=True)
class Picture:
    image: Image.Image
    caption: str


def draw_known(rng: random.Random) -> Picture:
    """A shape, colour, size and background that the bases were trained on."""
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    return _draw(rng, shape, colour, COLOURS[colour])


def draw_zorb(rng: random.Random) -> Picture:
    """The concept that the bases have never seen: neither the star, nor its colour, nor the word."""
    return _draw(rng, TRIGGER, "", TRIGGER_COLOUR)


def _draw(rng: random.Random, shape: str, colour: str, rgb: tuple[int, int, int]) -> Picture:
    background, size = rng.choice(list(BACKGROUNDS)), rng.choice(list(SIZES))
    radius = rng.uniform(*SIZES[size])
    x, y = (SIZE / 2 + rng.uniform(-JITTER, JITTER) for _ in range(2))
    image = Image.new("RGB", (SIZE * SUPERSAMPLING,) * 2, BACKGROUNDS[background])
    canvas = ImageDraw.Draw(image)
    _PAINTERS[shape](canvas, x * SUPERSAMPLING, y * SUPERSAMPLING, radius * SUPERSAMPLING, rgb, BACKGROUNDS[background])
    caption = " ".join(word for word in ("a", size, colour, shape, "on a", background, "background") if word)
    return Picture(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS), caption)


def star_points(x: float, y: float, radius: float, points: int = 5, inner: float = 0.46) -> list[tuple[float, float]]:
    """Corners of a star standing on two of its points."""
    corners = []
    for corner in range(2 * points):
        reach = radius if corner % 2 == 0 else radius * inner
        angle = math.pi * corner / points - math.pi / 2
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return corners


def _polygon(*angles: float):
    def paint(canvas, x, y, radius, rgb, _background):
        corners = [(x + radius * math.cos(a * math.pi / 180), y + radius * math.sin(a * math.pi / 180)) for a in angles]
        canvas.polygon(corners, fill=rgb)

    return paint


def _circle(canvas, x, y, radius, rgb, _background):
    canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=rgb)


def _ring(canvas, x, y, radius, rgb, background):
    _circle(canvas, x, y, radius, rgb, background)
    _circle(canvas, x, y, radius * 0.5, background, background)


def _cross(canvas, x, y, radius, rgb, _background):
    arm = radius * 0.36
    canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=rgb)
    canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=rgb)


def _star(canvas, x, y, radius, rgb, _background):
    canvas.polygon(star_points(x, y, radius), fill=rgb)


_PAINTERS = {
    "circle": _circle,
    "square": _polygon(45, 135, 225, 315),
    "triangle": _polygon(-90, 30, 150),
    "ring": _ring,
    "cross": _cross,
    TRIGGER: _star,
}
