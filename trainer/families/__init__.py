"""The registry of model families. A third family is one more file here and one more line below."""

from __future__ import annotations

from .family import Family, Preview, Transformer
from .ideogram4 import Ideogram4
from .krea2 import Krea2

FAMILIES: dict[str, Family] = {family.name: family for family in (Krea2(), Ideogram4())}

__all__ = ["FAMILIES", "Family", "Preview", "Transformer"]
