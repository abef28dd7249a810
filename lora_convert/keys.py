"""Keys of LoRA files: prefix, spelled module name, and which part of the module's change the tensor is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .errors import LoraError, NotALoraError, UnknownKeysError
from .naming import Place, locate
from .tables import TABLES

PREFIXES = (
    "base_model.model.",
    "conditional_transformer.",
    "diffusion_model.",
    "transformer.",
    "model.",
    "unet.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
)
"""What stands before a module's name, also one after the other: `model.diffusion_model.`."""

A_B, DOWN_UP = "lora_A/lora_B", "lora_down/lora_up"

# (what ends a key, part, what the pair is called); the first that fits counts. PEFT may put an adapter's name in.
_PARTS = tuple(
    (re.compile(rf"(?:{end})\Z"), part, pair)
    for end, part, pair in (
        (r"\.lora_A(?:\.[^.]+)?\.weight|\.lora_A", "down", A_B),
        (r"\.lora_B(?:\.[^.]+)?\.weight|\.lora_B", "up", A_B),
        (r"\.lora_down(?:\.weight)?|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight", "down", DOWN_UP),
        (r"\.lora_up(?:\.weight)?|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight", "up", DOWN_UP),
        (r"\.(hada_w[12]_[ab]|lokr_w[12](?:_[ab])?)", "", ""),
        (r"\.(?:diff|w_norm)", "diff", ""),
        (r"\.(?:diff_b|b_norm)", "diff_b", ""),
        (r"\.alpha", "alpha", ""),
        (r"\.dora_scale", "dora_scale", ""),
        (r"\.magnitude|\.lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?", "magnitude", ""),
    )
)
_REFUSED = tuple(
    (re.compile(rf"(?:{end})\Z"), what)
    for end, what in (
        (r"\.b?oft_(?:blocks|diag|r|R)(?:\..+)?|\.rescale", "OFT, which turns the weight instead of adding to it"),
        (r"\.lokr_t[12]|\.hada_t[12]|\.lora_mid(?:\.weight)?", "a Tucker factor, which only a convolution has"),
        (r"\.[ab][12]\.weight", "GLoRA, which multiplies the weight by what it learned"),
        (r"\.on_input", "IA3, which scales the weight instead of adding to it"),
        (r"\.lora_[AB](?:\.[^.]+)?\.bias|\.lora_(?:up|down)\.bias", "a LoRA with a bias inside"),
        (r"\.set_weight|\.reshape_weight", "a weight that replaces the base's"),
    )
)  # fmt: skip
_TEXT_ENCODER = re.compile(r"(?:lora_(?:prior_)?te[0-9]*_|text_encoders?[0-9_]*\.|te[0-9]*\.|bundle_emb)")


@dataclass(frozen=True)
class Key:
    """One key that is understood.

    Attributes:
        text: the key itself.
        prefix: what stood before the module's name.
        stem: the module's name as spelled.
        part: `down`, `up`, `hada_w1_a`, …, `lokr_w2`, …, `diff`, `diff_b`, `alpha`, `dora_scale` or `magnitude`.
        pair: `lora_A/lora_B` or `lora_down/lora_up` where the part is one of these, else empty.
        places: the module that is meant, in each family that has such a name.
    """

    text: str
    prefix: str
    stem: str
    part: str
    pair: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Sorted:
    """Keys by what they are.

    Attributes:
        keys: those that are parts of a LoRA of one of the families.
        text_encoder: those of a text encoder.
        unknown: the rest.
    """

    keys: list[Key]
    text_encoder: list[str]
    unknown: list[str]


def sort_keys(texts: Iterable[str]) -> Sorted:
    """Understands the keys of a file, of which the tensors need not be at hand.

    Raises:
        NotALoraError: there are none, they are a base model's, or none belongs to one of the families.
        LoraError: a kind of adapter that cannot be read.
    """
    found = Sorted([], [], [])
    base: list[str] = []
    for text in texts:
        refused = next((what for end, what in _REFUSED if end.search(text)), None)
        if refused:
            raise LoraError(
                f"{shown(text)} is part of {refused}; it cannot be converted; merge it into its base instead"
            )
        key = _key(text)
        if key is not None and key.places:
            found.keys.append(key)
        elif key is None and (family := _base_weight(text)):
            base.append(family)
        elif _TEXT_ENCODER.match(text):
            found.text_encoder.append(text)
        else:
            found.unknown.append(text)
    if base:
        raise NotALoraError(
            f"{len(base)} keys are whole weights of {TABLES[base[0]].title}: this is a base model, or has one inside; "
            "wanted a LoRA"
        )
    if not found.keys:
        raise _nothing(found)
    return found


def refuse_strangers(found: Sorted) -> None:
    """Nothing is left out unasked.

    Raises:
        UnknownKeysError: keys that are not understood, or of a text encoder.
    """
    if found.unknown:
        raise UnknownKeysError(
            f"{len(found.unknown)} keys are not understood: {some(found.unknown)}; wanted parts of a LoRA of "
            f"{_titles()}; leave them out (--skip-unknown) only if they are known to do nothing"
        )
    if found.text_encoder:
        raise UnknownKeysError(
            f"{len(found.text_encoder)} keys are of a text encoder: {some(found.text_encoder)}; no layout here holds "
            "them; leave them out (--skip-unknown) if the transformer's part is enough"
        )


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few names and how many more there are, on one line."""
    names = list(names)
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(shown(name) for name in names[:count]) + rest


def shown(text: str) -> str:
    """A name from a file, fit for a message: printable and not too long."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 120 else f"{text[:100]}…{text[-15:]}"


def _nothing(found: Sorted) -> NotALoraError:
    if found.text_encoder:
        names = some(found.text_encoder, 1)
        return NotALoraError(f"there are keys of a text encoder alone, such as {names}; wanted a LoRA of {_titles()}")
    if not found.unknown:
        return NotALoraError(f"the file has no tensors; wanted a LoRA of {_titles()}")
    first = shown(found.unknown[0])
    return NotALoraError(
        f"none of {len(found.unknown)} keys is recognised, {first} first; wanted a LoRA of {_titles()}"
    )


def _titles() -> str:
    return " or ".join(table.title for table in TABLES.values())


def _key(text: str) -> Key | None:
    """The key's parts, with no places where its module is not known; None where it has no LoRA's ending."""
    for end, part, pair in _PARTS:
        match = end.search(text)
        if match:
            prefix, stem, places = _module(text[: match.start()])
            return Key(text, prefix, stem, part or match[1], pair, places)
    return None


@lru_cache(maxsize=2048)  # a module has several keys
def _module(name: str) -> tuple[str, str, tuple[Place, ...]]:
    """(prefix, rest, places) of a module's name."""
    rest, left = name, list(PREFIXES)
    while True:
        places = locate(rest)
        prefix = None if places else next((prefix for prefix in left if rest.startswith(prefix)), None)
        if prefix is None:
            return name[: len(name) - len(rest)], rest, places
        left.remove(prefix)
        rest = rest.removeprefix(prefix)


def _base_weight(text: str) -> str | None:
    """The family of which a key is a whole weight or bias."""
    for end in (".weight", ".bias", ""):
        if text.endswith(end):
            places = _module(text[: len(text) - len(end)])[2]
            row = TABLES[places[0].family].row(places[0].module) if places else None
            # Without an ending it is a vector of its own name, such as a norm's, and not a module.
            if places and (end or (row and len(row.shape) == 1)):
                return places[0].family
    return None
