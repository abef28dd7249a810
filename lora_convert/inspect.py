"""What a LoRA file holds, which readers would load it, and how much it changes, block by block.

print(inspect_file("style.safetensors").text())
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .canonical import Change, DiffModule, LohaModule, LokrModule, LoraModule, Split
from .low_rank import norm
from .readers import LOADS, Verdict, verdicts
from .reading import open_lora, read_lora
from .sizes import Sizes
from .tables import TABLES, Table
from .targets import COLUMN, ROW, ROW_OVER_BASE

OTHERS = "others"
COLUMNS = 80
_BAR = 36
_KINDS = {LoraModule: "LoRA", LokrModule: "LoKr", LohaModule: "LoHa"}
_DORA = {
    ROW: "by output row, over the norm of W + dW (the paper's)",
    ROW_OVER_BASE: "by output row, over the norm of W (ComfyUI's)",
    COLUMN: "by input column",
}
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Group:
    """Modules of one sort.

    Attributes:
        name: `attention`, `mlp`, `text fusion` or `others`.
        modules: how many are changed; q, k and v apart are three.
        rank: the least and the largest; None where none has a rank.
        alpha: likewise.
    """

    name: str
    modules: int
    rank: tuple[int, int] | None
    alpha: tuple[float, float] | None


@dataclass(frozen=True)
class Inspection:
    """What is in a file.

    Attributes:
        family: the family's name.
        producer: who wrote it, as far as can be told.
        layout: of its keys.
        fused: whether q, k and v are one; None where it changes none of them.
        kinds: kind of change → how many modules have it.
        groups: ranks and alphas, by group.
        dtypes: dtype → how many tensors have it.
        parameters: numbers in all tensors but alpha.
        dora: the forms of a DoRA's lengths; empty without.
        verdicts: reader → whether it would load the file, and why.
        notes: what a user should know.
        norms: block → ‖dW‖ (Frobenius) of all its modules together, without a DoRA's lengths; `others` is the rest.
    """

    family: str
    producer: str
    layout: str
    fused: bool | None
    kinds: dict[str, int]
    groups: tuple[Group, ...]
    dtypes: dict[str, int]
    parameters: int
    dora: tuple[str, ...]
    verdicts: dict[str, Verdict]
    notes: tuple[str, ...]
    norms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """For people: lines of at most 80 columns."""
        fused = {None: "not changed", True: "fused", False: "apart"}[self.fused]
        facts = {
            "family": TABLES[self.family].title,
            "producer": self.producer,
            "layout": self.layout,
            "q, k, v": fused,
            "kinds": ", ".join(f"{count} {kind}" for kind, count in self.kinds.items()),
            "dtype": ", ".join(self.dtypes),
            "parameters": f"{self.parameters:,}",
            "DoRA": "; ".join(self.dora) or "no",
        }
        lines = [line for name, fact in facts.items() for line in _wrapped(f"{name:<13}", fact)]
        lines += ["", *(_group(group) for group in self.groups), ""]
        for reader, verdict in self.verdicts.items():
            lines.append(f"{reader:<13}{LOADS[verdict.loads]}")
            lines += [line for reason in verdict.reasons for line in _wrapped(" " * 13 + "- ", reason)]
        if self.notes:
            lines += ["", *(line for note in self.notes for line in _wrapped("note: ", note))]
        return "\n".join([*lines, "", "norm of dW", *_chart(self.norms)])


def inspect_file(path: str | Path, sizes: Sizes | None = None) -> Inspection:
    """Inspects a file, which is not changed.

    Args:
        path: a safetensors file.
        sizes: shapes of the base, where it is not of the published size.

    Raises:
        LoraError: it is no LoRA of the families, or a broken one.
    """
    return inspect_state(*open_lora(path, skip_unknown=True), sizes)


def inspect_state(
    state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, sizes: Sizes | None = None
) -> Inspection:
    """Inspects what stands in a file.

    Keys that are not understood are left out, with a note; the verdicts do not count them.

    Args:
        state: key → tensor of any floating dtype.
        metadata: of the header.
        sizes: shapes of the base, where it is not of the published size.

    Raises:
        LoraError: it is no LoRA of the families, or a broken one.
    """
    metadata = dict(metadata or {})
    file = read_lora(state, metadata, sizes, skip_unknown=True)
    table = TABLES[file.family]
    changes = [(name, change) for name, entry in file.modules.items() for change in _members(entry)]
    kinds: dict[str, int] = {}
    for _, change in changes:
        kinds[_kind(change)] = kinds.get(_kind(change), 0) + 1
    if file.biases:
        kinds["bias"] = len(file.biases)
    tensors = {key: tensor for key, tensor in state.items() if not key.endswith(".alpha")}
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + 1
    return Inspection(
        family=file.family,
        producer=file.producer,
        layout=file.layout,
        fused=file.fused,
        kinds=kinds,
        groups=tuple(_groups(changes, table)),
        dtypes=dtypes,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        dora=tuple(form for field, form in _DORA.items() if any(getattr(c, field) is not None for _, c in changes)),
        verdicts=verdicts(state, metadata, file),
        notes=file.notes,
        norms=_norms(changes, table),
    )


def _members(entry: Change | Split) -> Iterator[Change]:
    members = entry.members if isinstance(entry, Split) else (entry,)
    return (member for member in members if member is not None)


def _kind(change: Change) -> str:
    if isinstance(change, DiffModule):
        return "full change" if len(change.shape) == 2 else "vector"
    return _KINDS[type(change)]


def _groups(changes: list[tuple[str, Change]], table: Table) -> Iterator[Group]:
    sorted_in: dict[str, list[Change]] = {name: [] for name in (*(name for name, _ in table.groups), OTHERS)}
    for module, change in changes:
        group = next((name for name, pattern in table.groups if re.fullmatch(pattern, module)), OTHERS)
        sorted_in[group].append(change)
    for name, members in sorted_in.items():
        adapters = [c for c in members if isinstance(c, LoraModule | LohaModule | LokrModule) and c.rank is not None]
        ranks, alphas = [c.rank for c in adapters if c.rank is not None], [c.alpha for c in adapters]
        if members:
            span = (min(ranks), max(ranks)) if ranks else None
            yield Group(name, len(members), span, (min(alphas), max(alphas)) if alphas else None)


def _norms(changes: list[tuple[str, Change]], table: Table) -> dict[str, float]:
    """By block, in the model's order."""
    squares: dict[tuple[int, int, str], float] = {}
    containers = list(table.outer)
    for module, change in changes:
        place = table.inside_of(module)
        block = (len(containers), 0, OTHERS)
        if place is not None:
            block = (containers.index(place[0]), place[1], place[0].format(place[1]))
        squares[block] = squares.get(block, 0.0) + norm(change) ** 2
    return {name: math.sqrt(squares[order, number, name]) for order, number, name in sorted(squares)}


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]


def _group(group: Group) -> str:
    modules = f"{group.modules} module{'' if group.modules == 1 else 's'}"
    if group.rank is None or group.alpha is None:
        return f"{group.name:<13}{modules}"
    return f"{group.name:<13}{modules}, rank {_span(group.rank)}, alpha {_span(group.alpha)}"


def _span(span: tuple[float, float]) -> str:
    low, high = (f"{value:.6g}" for value in span)
    return low if low == high else f"{low} to {high}"


def _chart(norms: Mapping[str, float]) -> Iterator[str]:
    """A line a block, with a bar in eighths of a column."""
    most = max(norms.values(), default=0.0)
    width = max((len(name) for name in norms), default=0)
    for name, value in norms.items():
        eighths = round(8 * _BAR * value / most) if most else 0
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        yield f"{name:<{width}} {value:>10.4g} {bar}".rstrip()
