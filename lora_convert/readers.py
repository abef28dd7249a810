"""Who would load a LoRA file, and what they would make of it, from its keys, header and values.

The rules of each reader stand in reader_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .canonical import Change, Split
from .keys import Key, shown, sort_keys
from .reader_rules import LOST, READERS, REFUSED, REMARK, WRONG, Rule, Seen, Whole
from .reading import LoraFile

FULLY, PARTLY, WRONGLY, NOT = "fully", "partly", "wrongly", "not"
LOADS = {FULLY: "fully", PARTLY: "partly", WRONGLY: "wrongly", NOT: "not at all"}
"""As sentences say it."""
_FACTORS = ("down", "up", "hada_w1_a", "lokr_w1", "lokr_w1_a", "lokr_w2", "lokr_w2_a", "diff", "diff_b")


@dataclass(frozen=True)
class Verdict:
    """What a reader makes of a file.

    Attributes:
        loads: `fully`; `partly`, where some modules are left out; `wrongly`, where it loads and computes something else
            than the file says; `not`, where it fails, or leaves the model as it is.
        reasons: one line each, with how many keys and an example; of `fully`, what the reader's settings must be.
    """

    loads: str
    reasons: tuple[str, ...]


def verdicts(state: Mapping[str, Tensor], metadata: Mapping[str, str], file: LoraFile) -> dict[str, Verdict]:
    """Reader → its verdict.

    Args:
        state: the file's tensors; their shapes are looked at.
        metadata: of its header.
        file: the same, read.
    """
    whole = _whole(state, metadata, file)
    return {reader: _verdict(rules, whole) for reader, rules in READERS.items()}


def verdict_of(reader: str, state: Mapping[str, Tensor], metadata: Mapping[str, str], file: LoraFile) -> Verdict:
    """That of one reader; the other arguments are those of `verdicts`."""
    return _verdict(READERS[reader], _whole(state, metadata, file))


def _whole(state: Mapping[str, Tensor], metadata: Mapping[str, str], file: LoraFile) -> Whole:
    found = sort_keys(state)
    seen = [one for key in found.keys if (one := _see(key, state, file)) is not None]
    return Whole(file.family, metadata, seen)


def _see(key: Key, state: Mapping[str, Tensor], file: LoraFile) -> Seen | None:
    place = next((place for place in key.places if place.family == file.family), None)
    if place is None:
        return None
    entry = file.modules.get(place.module)
    change: Change | None
    if isinstance(entry, Split):
        change = None if place.member is None else entry.members[place.member]
    else:
        change = entry if place.member is None else None
    return Seen(key, place, tuple(state[key.text].shape), change, placeholder=entry is not None and change is None)


def _verdict(rules: tuple[Rule, ...], whole: Whole) -> Verdict:
    hits: dict[Rule, list[str]] = {}
    lost = set()
    for seen in whole.seen:
        for rule in rules:
            if whole.family in rule.families and rule.test(seen, whole):
                hits.setdefault(rule, []).append(seen.key.text)
                if rule.effect == LOST:
                    lost.add(seen.key.text)
                if rule.effect != REMARK:
                    break
    by_effect = {effect: [rule for rule in rules if rule in hits and rule.effect == effect] for effect in _EFFECTS}
    if by_effect[REFUSED]:
        return Verdict(NOT, _reasons(by_effect[REFUSED], hits))
    carriers = [seen.key.text for seen in whole.seen if seen.key.part in _FACTORS and not seen.placeholder]
    if all(text in lost for text in carriers):
        return Verdict(NOT, _reasons(by_effect[LOST], hits))
    if by_effect[WRONG]:
        return Verdict(WRONGLY, _reasons(by_effect[WRONG] + by_effect[LOST], hits))
    if by_effect[LOST]:
        return Verdict(PARTLY, _reasons(by_effect[LOST], hits))
    return Verdict(FULLY, _reasons(by_effect[REMARK], hits))


_EFFECTS = (REFUSED, LOST, WRONG, REMARK)


def _reasons(rules: list[Rule], hits: Mapping[Rule, list[str]]) -> tuple[str, ...]:
    def reason(rule: Rule) -> str:
        texts = hits[rule]
        keys = "key" if len(texts) == 1 else "keys"
        return f"{rule.why} ({len(texts)} {keys}, such as {shown(texts[0])})"

    return tuple(reason(rule) for rule in rules)
