"""Converting LoRA files: read any layout, write another, prove that both say the same, put the file in place.

    report = convert_file("from-onetrainer.safetensors", "for-comfyui.safetensors", "comfyui")

What the reader of the target layout would compute is compared, module by module, with what the source says. More than
the rounding of the dtype, or than the error of a chosen rank, is a failure, and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .canonical import Change, Split, members_of
from .compare import difference
from .dora import bake as effect_of
from .errors import CannotConvertError, LoraError
from .files import write_state
from .fusing import split
from .low_rank import norm
from .naming import title
from .pieces import Base, Weights
from .readers import FULLY, LOADS, verdict_of
from .reading import LoraFile, open_lora, read_lora
from .sizes import Sizes
from .targets import TARGETS
from .writing import LAYOUTS, Written, write_lora

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative error of a number that is rounded once to the dtype; fp64 factors are computed with in fp32.
ROUNDING = {torch.float64: 2**-24, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# A product of two factors has two roundings, a scale that is folded in one more, and one is to spare.
ROUNDINGS = 4
# Where nothing is folded, cast or computed: alpha and lengths in fp32.
KEPT = 1e-6


@dataclass(frozen=True)
class ModuleReport:
    """One module of a conversion.

    Attributes:
        name: official, or the joint name of q, k and v.
        kind: of its change, such as `LoraModule`; of q, k and v apart, of each.
        difference: relative, ‖dW after - dW before‖ / ‖dW before‖.
        allowed: what rounding, and a chosen rank, explain.
        truncation: relative error of the chosen rank; None where none was chosen.
    """

    name: str
    kind: str
    difference: float
    allowed: float
    truncation: float | None = None


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        family: `krea2` or `ideogram4`.
        producer: who wrote the source, as far as it shows.
        source_layout: how the source names its keys.
        layout: how the result does.
        modules: each of them.
        truncation: relative error of the whole by a chosen rank; None where none was chosen.
        notes: what the user should know, one sentence each.
        left_out: keys of the source that were left out, as asked for.
    """

    family: str
    producer: str
    source_layout: str
    layout: str
    modules: tuple[ModuleReport, ...]
    truncation: float | None = None
    notes: tuple[str, ...] = field(default=())
    left_out: tuple[str, ...] = ()

    @property
    def worst(self) -> ModuleReport | None:
        """The module that differs most."""
        return max(self.modules, key=lambda module: module.difference, default=None)

    def lines(self) -> list[str]:
        """What was converted, how exact it is, and last, where a rank was chosen, what that costs as a whole."""
        worst = self.worst
        lines = [
            f"{self.family}, {self.producer} ({self.source_layout}) → {self.layout}",
            f"{len(self.modules)} modules compared, the worst differs by "
            + (f"{worst.difference:.1e} ({worst.name})" if worst else "nothing"),
        ]
        if self.truncation is not None:
            lines.append(f"the chosen rank costs {self.truncation:.2%} of the whole")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def convert_state(
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    layout: str,
    rank: int | None = None,
    dtype: str | None = None,
    base: Base | None = None,
    sizes: Sizes | None = None,
    bake: bool = False,
    skip_unknown: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str], Report]:
    """Converts what stands in a file.

    Args:
        state: key → tensor of any floating dtype.
        metadata: the file's header.
        layout: one of `LAYOUTS`.
        rank: every matrix is brought to this rank, optimally; by default nothing is lost.
        dtype: `fp32`, `bf16` or `fp16` of the factors; by default each keeps its own. alpha and magnitudes stay fp32.
        base: weights of the base model, where the mathematics asks for them (DoRA).
        sizes: shapes of the base, where it is not of the published size.
        bake: DoRA becomes the change that it makes to `base`.
        skip_unknown: leave out keys that are not understood, or of a text encoder; the report names them.

    Returns:
        The new state, its header, and the report on the comparison.

    Raises:
        LoraError: the source cannot be read, the target cannot express it, or the two do not agree.
    """
    check_options(layout, rank, dtype)
    source = read_lora(state, metadata, sizes, skip_unknown)
    chosen = None if dtype is None else DTYPES[dtype]
    written = write_lora(source, layout, dtype=chosen, rank=rank, bake=bake, base=base, sizes=sizes)
    report = verify(source, written, layout, sizes, base, rank)
    return written.state, written.metadata, report


def check_options(layout: str, rank: int | None = None, dtype: str | None = None) -> None:
    """That they are ones that there are; see `convert_state`.

    Raises:
        LoraError: the one that is not.
    """
    if layout not in LAYOUTS:
        raise LoraError(f"layout {layout!r} is not known; choose one of {', '.join(LAYOUTS)}")
    if dtype is not None and dtype not in DTYPES:
        raise LoraError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    if rank is not None and rank < 1:
        raise LoraError(f"rank is {rank}; wanted 1 or more")


def verify(
    source: LoraFile,
    written: Written,
    layout: str,
    sizes: Sizes | None = None,
    base: Base | None = None,
    rank: int | None = None,
) -> Report:
    """Compares what a reader of the target layout would compute with what the source says.

    Two things have to hold: read back, every module is what it was; and by the rules of the layout's own reader, which
    is not as tolerant as Graft's, it loads all of the file as what it says.

    Raises:
        LoraError: a module that is not there, or differs by more than rounding and the chosen rank explain; a reader
            that would not load the file fully.
    """
    sizes = sizes or Sizes.published(source.family)
    weights = Weights(source.family, base, sizes)
    after = read_lora(written.state, written.metadata, sizes)
    reports = []
    for name, wanted in source.modules.items():
        found = after.modules.get(name)
        if found is None:
            raise LoraError(f"{name} is not in the result; this is a fault of Graft: report it with the file's keys")
        truncation = _truncation(written, name, source.family)
        if base is not None and (_has_lengths(wanted) or _has_lengths(found)):
            # One form of its lengths may have become another, or all of it a full change: what it does is compared.
            error, allowed = _by_effect(wanted, found, name, weights, truncation)
        elif rank is not None and isinstance(found, Split):
            error, allowed = _by_member(wanted, found, name, written, source.family)
        else:
            error = difference(wanted, found, whole=rank is not None)
            renamed = rank is None and _is_kept(wanted, found, layout)
            allowed = KEPT if renamed else ROUNDINGS * max(_rounding(found), _rounding(wanted)) + (truncation or 0.0)
        reports.append(ModuleReport(name, _kind(wanted), error, allowed, truncation))
    extra = sorted(after.modules.keys() - source.modules.keys())
    if extra:
        raise LoraError(f"the result has {extra[0]}, which the source has not; this is a fault of Graft: report it")
    for name, bias in source.biases.items():
        kept = after.biases.get(name)
        # fp16 has no smaller steps than 6e-8.
        least = 2**-24 if kept is not None and kept.dtype == torch.float16 else 0.0
        if kept is None or not torch.allclose(kept.float(), bias.float(), rtol=2 * ROUNDING[kept.dtype], atol=least):
            raise LoraError(f"the bias of {name} would not be what it was; nothing was written: convert in fp32")
    wrong = [report for report in reports if not report.difference <= report.allowed]
    if wrong:
        worst = max(wrong, key=lambda report: report.difference)
        raise LoraError(
            f"{len(wrong)} of {len(reports)} modules would not be what they were, {worst.name} the worst by "
            f"{worst.difference:.1e} where rounding explains {worst.allowed:.1e}; nothing was written: convert in "
            "fp32, or report it with the file's keys"
        )
    reader = TARGETS[layout].reader
    verdict = verdict_of(reader, written.state, written.metadata, after)
    if verdict.loads != FULLY:
        raise CannotConvertError(
            f"{reader} would load the result {LOADS[verdict.loads]}: {verdict.reasons[0]}; nothing was written: choose "
            "another target, or report it with the file's keys"
        )
    return Report(
        source.family,
        source.producer,
        source.layout,
        layout,
        tuple(reports),
        written.error if rank is not None else None,
        (*source.notes, *written.notes),
        source.left_out,
    )


def _is_kept(wanted: Change | Split, found: Change | Split, layout: str) -> bool:
    """Whether factors and alpha were renamed or sliced, and nothing more."""
    target = TARGETS[layout]
    if not target.alpha or target.whole_w1 or target.folds_lokr:
        return False
    if isinstance(wanted, Split) and not isinstance(found, Split):
        return False
    return _kinds(wanted) == _kinds(found)


def _kinds(change: Change | Split) -> set[tuple[type, torch.dtype]]:
    return {(type(member), tensor.dtype) for member in members_of(change) for tensor in member.factors().values()}


def _by_member(wanted: Change | Split, found: Split, name: str, written: Written, family: str) -> tuple[float, float]:
    """The member that differs most beyond what its own rank explains: its difference, and what is allowed of it."""
    apart = wanted if isinstance(wanted, Split) else split(wanted, found.rows)
    worst = (0.0, 0.0)
    for index, (mine, theirs) in enumerate(zip(apart.members, found.members, strict=True)):
        if mine is None and theirs is None:
            continue
        if mine is None or theirs is None:
            lone = mine or theirs
            assert lone is not None
            # Nothing on one side: the other must be nothing too.
            pair = (math.inf if any(bool(t.any()) for t in lone.factors().values()) else 0.0, 0.0)
        else:
            rounding = ROUNDINGS * max(_rounding(mine), _rounding(theirs))
            pair = difference(mine, theirs), rounding + written.errors.get(title(family, name, index), 0.0)
        if pair[0] - pair[1] >= worst[0] - worst[1]:
            worst = pair
    return worst


def _by_effect(
    wanted: Change | Split, found: Change | Split, name: str, weights: Weights, truncation: float | None
) -> tuple[float, float]:
    """What both do to the base's weight: their difference relative to the effect, and what is allowed of it.

    Lengths are fp32 and relative to the whole weight, so a small effect has the weight's roundings in it; so has a
    truncation, which is relative to dW.
    """
    mine, theirs = _effect(wanted, name, weights), _effect(found, name, weights)
    effect = math.hypot(*map(norm, members_of(mine))) or 1.0
    change = math.hypot(*map(norm, members_of(wanted)))
    weight = weights.of(name, None).norm().item()
    allowed = ROUNDINGS * max(_rounding(found), _rounding(wanted)) * max(1.0, change / effect)
    allowed += 8 * 2**-24 * weight / effect + 2 * (truncation or 0.0) * change / effect
    return difference(mine, theirs, whole=True), allowed


def _truncation(written: Written, name: str, family: str) -> float | None:
    """Of a module, or the largest of q, k and v that were brought to a rank apart."""
    names = [title(family, name, member) for member in (None, 0, 1, 2)]
    return max((written.errors[key] for key in names if key in written.errors), default=None)


def _has_lengths(change: Change | Split) -> bool:
    return any(member.has_magnitude for member in members_of(change))


def _effect(change: Change | Split, name: str, weights: Weights) -> Change | Split:
    """All that a change does to its weight, as full changes."""
    if not isinstance(change, Split):
        return effect_of(change, weights.of(name, None))
    q, k, v = (
        None if member is None else effect_of(member, weights.of(name, index))
        for index, member in enumerate(change.members)
    )
    return Split((q, k, v), change.rows)


def _rounding(change: Change | Split) -> float:
    return max((ROUNDING[dtype] for _, dtype in _kinds(change)), default=0.0)


def _kind(change: Change | Split) -> str:
    if isinstance(change, Split):
        return " | ".join("none" if member is None else type(member).__name__ for member in change.members)
    return type(change).__name__


def convert_folder(
    source: str | Path, target: str | Path, layout: str, **options: Any
) -> Iterator[tuple[Path, Report | Exception]]:
    """Converts every safetensors file of a folder and its subfolders into the same places of another.

    One that fails does not stop the others. What holds for none of them is said before the first.

    Args:
        source: the folder.
        target: another, made where it is not there.
        layout: one of `LAYOUTS`.
        options: of `convert_file`.

    Yields:
        Each file of the source, by its name within it, with its report or its error.

    Raises:
        LoraError: as `files_of`; also options that there are not.
    """
    check_options(layout, options.get("rank"), options.get("dtype"))
    return _each(Path(source), Path(target), files_of(source, target), layout, options)


def files_of(source: str | Path, target: str | Path) -> list[Path]:
    """Names, within the source, of the files that `convert_folder` converts: those under the target are not.

    Raises:
        LoraError: the source is no folder, holds no such file, or is the target.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    if target == source or source.is_relative_to(target):
        raise CannotConvertError(f"{target} is the source itself, or holds it; it is not touched: give another folder")
    files = [path for path in source.rglob("*.safetensors") if not path.is_relative_to(target)]
    if not files:
        raise LoraError(f"{source} holds no .safetensors files; wanted a folder of LoRAs")
    return sorted(path.relative_to(source) for path in files)


def _each(
    source: Path, target: Path, names: list[Path], layout: str, options: dict[str, Any]
) -> Iterator[tuple[Path, Report | Exception]]:
    for name in names:
        try:
            yield name, convert_file(source / name, target / name, layout, **options)
        except (ValueError, RuntimeError, MemoryError, OSError) as error:  # LoraError is a ValueError
            yield name, error


def convert_file(
    source: str | Path,
    target: str | Path,
    layout: str,
    rank: int | None = None,
    dtype: str | None = None,
    base: Base | None = None,
    sizes: Sizes | None = None,
    bake: bool = False,
    force: bool = False,
    skip_unknown: bool = False,
) -> Report:
    """Converts a file; the result is put in place whole, after it was compared, or not at all.

    Args:
        source: a safetensors file, which is not touched.
        target: the new file.
        force: `target` may be there already and is replaced.

    The other arguments are `convert_state`'s.

    Raises:
        LoraError: see `convert_state`; also a target that is the source.
        FileExistsError: the target exists and `force` was not given.
        OSError: it cannot be written.
    """
    source, target = Path(source), Path(target)
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists already and is not overwritten unasked")
    if target.exists() and source.exists() and target.samefile(source):
        raise CannotConvertError(f"{target} is the source itself, which is not touched; give another target")
    check_options(layout, rank, dtype)
    state, metadata = open_lora(source, skip_unknown)
    converted, header, report = convert_state(state, metadata, layout, rank, dtype, base, sizes, bake, skip_unknown)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_state(target, converted, header, overwrite=force)
    return report


__all__ = [
    "DTYPES",
    "LAYOUTS",
    "ModuleReport",
    "Report",
    "convert_file",
    "convert_folder",
    "convert_state",
    "files_of",
    "verify",
]
