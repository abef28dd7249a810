"""What the user of a converted file should know: the reader's settings, what a rounding has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .canonical import LoraModule
from .pieces import Piece, fields, kind
from .tables import TABLES
from .targets import DIFF, LOKR, ROW, SIMPLETUNER_LYCORIS, TARGETS, Target


def notes(pieces: list[Piece], target: Target, family: str, cost: Mapping[str, float]) -> Iterator[str]:
    ranks = {piece.change.rank for piece in pieces if isinstance(piece.change, LoraModule)}
    doras = {axis for piece in pieces for axis in fields(piece.change)}
    kinds = {kind(piece) for piece in pieces}
    if cost:
        worst = max(cost, key=cost.__getitem__)
        yield (
            f"{len(cost)} scales that are no powers of two were put into the factors, since {target.reader} reads no "
            f"alpha: up to {cost[worst]:.1e} relative ({worst}); --dtype fp32 keeps them exact"
        )
    yield from _SETTINGS.get(target.reader, lambda *_: ())(ranks, doras, kinds, family)


Settings = Callable[[set[int], set[str], set[str], str], Iterable[str]]


def _of_ai_toolkit(ranks: set[int], doras: set[str], kinds: set[str], family: str) -> Iterator[str]:
    if len(ranks) > 1:
        yield (
            f"ranks are {min(ranks)} to {max(ranks)}: train on with linear: {max(ranks)} in ai-toolkit's settings, "
            "which cuts off what is beyond its rank when it loads"
        )
    if DIFF in kinds:
        yield "ai-toolkit loads full changes only of the layers that its settings train whole"


def _of_onetrainer(ranks: set[int], doras: set[str], kinds: set[str], family: str) -> Iterator[str]:
    if ranks:
        yield f"train on with rank {max(ranks)} in OneTrainer's settings; it loads no other"
    if doras:
        yield f"train on with OneTrainer's DoRA, output axis {'on' if ROW in doras else 'off'}"
    if LOKR in kinds:
        yield "train on with the LoKr factor and dimension of the file in OneTrainer's settings"


def _of_simpletuner(ranks: set[int], doras: set[str], kinds: set[str], family: str) -> Iterator[str]:
    if TABLES[family].joint.official is not None:  # the model itself has them apart
        yield "q, k and v are fused: SimpleTuner wants fuse_qkv_projections for it"


_SETTINGS: Mapping[str, Settings] = {
    TARGETS["ai-toolkit"].reader: _of_ai_toolkit,
    TARGETS["onetrainer"].reader: _of_onetrainer,
    TARGETS["simpletuner"].reader: _of_simpletuner,
    SIMPLETUNER_LYCORIS.reader: _of_simpletuner,
}
