"""The registry of model families. A third family is one more file here and one more line below."""

from __future__ import annotations

from ..errors import SettingsError
from .family import Family, Preview, Transformer
from .ideogram4 import Ideogram4
from .krea2 import Krea2

FAMILIES: dict[str, Family] = {family.name: family for family in (Krea2(), Ideogram4())}


def family_named(name: str) -> Family:
    """The family of this name.

    Raises:
        SettingsError: there is none.
    """
    if name not in FAMILIES:
        raise SettingsError(f"family {name!r} is not known; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "Preview", "Transformer", "family_named"]
