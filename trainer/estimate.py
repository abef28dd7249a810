"""What cards of different sizes can do: the memory plan for the published models, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import plan
from .errors import DoesNotFitError, SettingsError
from .families import Family
from .formats import FORMATS
from .lora_settings import LoraSettings
from .plan import GIB, Budget, Workload
from .settings import AUTO, one_of

CARDS = (8, 12, 16, 24)  # GB
SMALL, LARGE = 512, 1024
LARGE_FROM = 12  # GB: cards below are asked for small pictures


@dataclass(frozen=True)
class Question:
    """What every card is asked for.

    Attributes:
        host: free main memory, GiB.
        resolution: side of the pictures; None for 1024, or 512 on cards below 12 GB.
        rank: of the LoRA.
        precision: or `auto`.
    """

    host: float = 24
    resolution: int | None = None
    rank: int = 32
    precision: str = AUTO

    def __post_init__(self) -> None:
        one_of("precision", self.precision, (AUTO, *FORMATS))


@dataclass(frozen=True)
class Row:
    """One card's answer. `workload` is None where it cannot, and `reason` says what it can do."""

    family: Family
    card: float
    side: int
    workload: Workload | None
    reason: str = ""


def rows(families: Iterable[Family], cards: Iterable[float], question: Question) -> Iterator[Row]:
    """The plan for each family on each card, all of whose memory is free."""
    lora = LoraSettings(rank=question.rank, alpha=question.rank)
    for family in families:
        for card in cards:
            side = question.resolution or (LARGE if card >= LARGE_FROM else SMALL)
            multiple = family.latent_downscale * family.latent_multiple
            if side < multiple or side % multiple:
                raise SettingsError(f"resolution is {side}; {family.title} takes multiples of {multiple}")
            cells = side // family.latent_downscale
            asked = Workload(
                family,
                family.published,
                (family.latent_channels, cells, cells),
                lora=lora,
                precision=question.precision,
            )
            memory = int(card * GIB)
            try:
                chosen = plan.choose(asked, Budget(plan.usable(memory, memory), int(question.host * GIB)))
                yield Row(family, card, side, chosen)
            except DoesNotFitError as error:
                yield Row(family, card, side, None, str(error))


def _checkpointing(work: Workload) -> str:
    if work.checkpointing is True or not work.checkpointing:
        return "least memory" if work.checkpointing else "off"
    return f"{work.checkpointing} of {work.blocks}"


HEAD = ("Model", "Card", "Pictures", "Precision", "Checkpointing", "Blocks on the CPU", "On the card", "Main memory")


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    reasons = []
    for row in rows:
        start = (row.family.title, f"{row.card:g} GB", f"{row.side}²")
        if row.workload is None:
            lines.append((*start, "does not fit", "", "", "", ""))
            reasons.append(f"{row.card:g} GB: {row.reason}")
            continue
        prediction, work = plan.predict(row.workload), row.workload
        lines.append(
            (
                *start,
                work.precision,
                _checkpointing(work),
                f"{work.blocks_on_cpu} of {work.blocks}",
                plan.gib(prediction.device),
                plan.gib(prediction.host),
            )
        )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *reasons])
