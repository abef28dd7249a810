"""The registry of model families. A third family is one more file here and one more line below."""

from __future__ import annotations

from collections.abc import Iterable

from .family import Family, Preview, Transformer, linear_modules
from .ideogram4 import Ideogram4
from .krea2 import Krea2

FAMILIES: dict[str, Family] = {family.name: family for family in (Krea2(), Ideogram4())}


def detect(names: Iterable[str]) -> Family | None:
    """The family whose marker is among the official parameter names; None where there is none."""
    present = set(names)
    return next((family for family in FAMILIES.values() if family.marker in present), None)


__all__ = ["FAMILIES", "Family", "Preview", "Transformer", "detect", "linear_modules"]
