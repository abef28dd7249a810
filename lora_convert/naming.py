"""Module names as LoRA files spell them: any spelling → official or joint name by lookup, and the reverse.

An official name may be written with dots or, flattened, with underscores; so may diffusers' name. q, k and v are named
alone or together. Each family's modules are few, so every spelling of each is looked up: an underscore that belongs to
a name (`txtfusion_layerwise_blocks`, `adaln_modulation`) is never taken for a dot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from .errors import CannotConvertError
from .tables import TABLES, Row, Table

OFFICIAL, DIFFUSERS = "official", "diffusers"


@dataclass(frozen=True)
class Place:
    """Where a spelled name points to.

    Attributes:
        family: the family's name.
        module: official module name, name of a parameter that is no module's `weight`, or the joint name of q, k, v.
        member: 0, 1, 2 for q, k, v of a joint name; None for a whole module.
        naming: `official`, `diffusers`, or `both` where the two have the same name.
        flat: whether underscores stand for the dots.
    """

    family: str
    module: str
    member: int | None
    naming: str
    flat: bool


def locate(name: str) -> tuple[Place, ...]:
    """Every module that a name without prefix and suffix can mean: at most one of each family."""
    found = []
    for family in TABLES:
        for pattern, container, flat in _patterns(family):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            number, rest = match.groupdict().get("number"), match["rest"]
            entry = _entries(family, container is not None, flat).get(rest)
            # Both namings of Ideogram 4 have the same container; of Krea 2's each has its own.
            if entry is None or (container is not None and not container[1] & entry[2]):
                continue
            tail, member, namings = entry
            module = tail if container is None else f"{container[0].format(number)}.{tail}"
            naming = namings if container is None else namings & container[1]
            found.append(Place(family, module, member, _word(naming), flat))
            break
    return tuple(found)


def spell(family: str, module: str, member: int | None = None, naming: str = OFFICIAL, flat: bool = False) -> str:
    """A module's name in a file, without prefix and suffix.

    Args:
        family: the family's name.
        module: official or joint name.
        member: 0, 1 or 2 to name q, k or v of a joint name alone.
        naming: `official` or `diffusers`.
        flat: with underscores in place of the dots.

    Raises:
        CannotConvertError: there is no such name: q, k, v of official Ideogram 4 alone, or those of official Krea 2
            together.
    """
    table = TABLES[family]
    name = _dotted(table, module, member, naming)
    if name is None:
        which = "together" if member is None else "alone"
        raise CannotConvertError(
            f"{module}: q, k and v of {table.title} have no {naming} name {which}; "
            f"{'split' if member is None else 'fuse'} them, or write the other naming"
        )
    return name.replace(".", "_") if flat else name


def title(family: str, module: str, member: int | None = None) -> str:
    """A module's name in messages and reports: of q, k or v alone the official one where there is one."""
    members = TABLES[family].members(module)
    if member is None:
        return module
    return members[member] if members else f"{'qkv'[member]} of {module}"


def _dotted(table: Table, module: str, member: int | None, naming: str) -> str | None:
    place = table.inside_of(module)
    if place is None or not table.is_joint(module):
        if member is not None or table.row(module) is None:
            raise KeyError(f"{module}, member {member}")
        return module if naming == OFFICIAL else table.to_diffusers(module)[0]
    official, number, _ = place
    if naming == OFFICIAL:
        if (table.joint.official is None) != (member is None):
            return None
        return module if member is None else f"{official.format(number)}.{table.joint.official[member]}"  # type: ignore[index]
    container = table.outer[official].format(number)
    return f"{container}.{table.joint.fused[0] if member is None else _diffusers_members(table)[member]}"


def _diffusers_members(table: Table) -> tuple[str, ...]:
    if table.joint.official is None:
        names = table.inner[table.joint.name]
        assert isinstance(names, tuple)
        return names
    return tuple(str(table.inner[member]) for member in table.joint.official)


def _word(namings: frozenset[str]) -> str:
    return "both" if len(namings) > 1 else next(iter(namings))


Container = tuple[str, frozenset[str]]  # official name of a container, and in which namings a spelling of it stands
Entry = tuple[str, int | None, frozenset[str]]  # official or joint name, member, namings


@cache
def _patterns(family: str) -> tuple[tuple[re.Pattern[str], Container | None, bool], ...]:
    """How names of a family begin: in a numbered container, or alone; each dotted and flat."""
    found: list[tuple[re.Pattern[str], Container | None, bool]] = []
    for flat in (False, True):
        for official, diffusers in TABLES[family].outer.items():
            both = frozenset((OFFICIAL, DIFFUSERS))
            spellings = {official: both} if official == diffusers else {
                official: frozenset((OFFICIAL,)), diffusers: frozenset((DIFFUSERS,)),
            }  # fmt: skip
            for spelling, namings in spellings.items():
                text = re.escape(_flattened(spelling + ".", flat)).replace(r"\{\}", r"(?P<number>0|[1-9][0-9]{0,3})")
                found.append((re.compile(text + "(?P<rest>.+)"), (official, namings), flat))
        found.append((re.compile("(?P<rest>.+)"), None, flat))
    return tuple(found)


@cache
def _entries(family: str, inside: bool, flat: bool) -> Mapping[str, Entry]:
    """Every spelling of what stands inside a container, or alone."""
    table = TABLES[family]
    found: dict[str, Entry] = {}
    for spelling, official, member, naming in _spellings(table, inside):
        key = _flattened(spelling, flat)
        before = found.get(key, (official, member, frozenset()))
        # A spelling with two meanings would be a fault of the tables.
        assert before[:2] == (official, member), (family, key)
        found[key] = (official, member, before[2] | {naming})
    return found


def _flattened(name: str, flat: bool) -> str:
    return name.replace(".", "_") if flat else name


def _spellings(table: Table, inside: bool) -> Iterator[tuple[str, str, int | None, str]]:
    """(spelling, official or joint name, member, naming) of each module."""
    rows: Mapping[str, Row] = table.inside if inside else table.alone
    members = table.joint.official or ()
    for official, row in rows.items():
        whole, member = (table.joint.name, members.index(official)) if official in members else (official, None)
        # A norm is named without its parameter too; ComfyUI takes `to_out` for `to_out.0`, since some write it so.
        for spelling in _short(official, ".scale"):
            yield spelling, whole, member, OFFICIAL
        names = row.diffusers
        for index, diffusers in enumerate((names,) if isinstance(names, str) else names):
            for spelling in _short(diffusers, ".weight", ".0"):
                yield spelling, whole, member if isinstance(names, str) else index, DIFFUSERS
    if inside:
        for fused in table.joint.fused:
            yield fused, table.joint.name, None, DIFFUSERS


def _short(name: str, *ends: str) -> Iterator[str]:
    """A name, and what is written in its place: it without one of the ends."""
    yield name
    for end in ends:
        if name.endswith(end):
            yield name.removesuffix(end)
