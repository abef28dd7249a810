"""What each reader does with keys of a LoRA file: a closed table of small rules, by the readers' sources.

ComfyUI 0.33 `comfy/lora.py` (key map), `comfy/weight_adapter`; diffusers `loaders/lora_pipeline.py`,
`loaders/lora_conversion_utils.py`, `loaders/peft.py`; ai-toolkit `toolkit/network_mixins.py` (`load_weights`);
musubi-tuner `utils/lora_utils.py`; OneTrainer `modules/util/load_lora_util.py`; SimpleTuner
`helpers/models/krea2/lora_pipeline.py`, `helpers/models/ideogram/pipeline.py`, `helpers/models/common.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .canonical import Change, DiffModule, LohaModule, LokrModule, LoraModule
from .errors import CannotConvertError
from .header import ADAPTER_METADATA
from .keys import DOWN_UP, Key
from .naming import DIFFUSERS, OFFICIAL, Place, spell
from .tables import TABLES

REFUSED, LOST, WRONG, REMARK = "refused", "lost", "wrong", "remark"
"""What a rule says of a key: the whole file fails; the key does nothing; it is read as something else; it is read, but
the reader's settings must fit."""

KREA2, IDEOGRAM4 = ("krea2",), ("ideogram4",)


@dataclass(frozen=True)
class Seen:
    """One key.

    Attributes:
        key: as it is understood.
        place: its module.
        shape: of its tensor.
        change: that of its module, or of the member; None where the key is a placeholder, or of a bias alone.
        placeholder: whether it stands, as zeros, beside the q, k, v that were trained.
    """

    key: Key
    place: Place
    shape: tuple[int, ...]
    change: Change | None
    placeholder: bool

    @cached_property
    def suffix(self) -> str:
        return self.key.text[len(self.key.prefix) + len(self.key.stem) :]

    @property
    def module(self) -> tuple[str, int | None]:
        return self.place.module, self.place.member

    @property
    def is_vector(self) -> bool:
        """Whether its weight is a parameter of its own name, such as a norm's scale, and no Linear's."""
        row = TABLES[self.place.family].row(self.place.module)
        return self.place.module.endswith((".scale", ".lin", "_indicator")) or (row is not None and len(row.shape) == 1)

    @property
    def is_fused(self) -> bool:
        """Whether it is of q, k and v in one."""
        return self.place.member is None and TABLES[self.place.family].is_joint(self.place.module)

    def named(self, naming: str, flat: bool = False) -> bool:
        """Whether the module's name is this naming's own."""
        try:
            return spell(self.place.family, *self.module, naming, flat) == self.key.stem
        except CannotConvertError:
            return False


@dataclass(frozen=True)
class Whole:
    """A file.

    Attributes:
        family: the family's name.
        metadata: of its header.
        seen: its keys.
    """

    family: str
    metadata: Mapping[str, str]
    seen: list[Seen]

    @cached_property
    def parts(self) -> dict[tuple[str, int | None], set[str]]:
        found: dict[tuple[str, int | None], set[str]] = {}
        for seen in self.seen:
            found.setdefault(seen.module, set()).add(seen.key.part)
        return found

    @cached_property
    def lengths(self) -> dict[tuple[str, int | None], tuple[int, ...]]:
        """Module → shape of its `dora_scale`."""
        return {seen.module: seen.shape for seen in self.seen if seen.key.part == "dora_scale"}

    @cached_property
    def prefixes(self) -> set[str]:
        return {seen.key.prefix for seen in self.seen}

    @cached_property
    def suffixes(self) -> set[str]:
        return {seen.suffix for seen in self.seen}

    @cached_property
    def ranks(self) -> set[int]:
        changes = (seen.change for seen in self.seen)
        return {change.rank for change in changes if isinstance(change, LoraModule | LohaModule)}

    @cached_property
    def kinds(self) -> list[type[Change]]:
        """Of adapters, in the order of the keys."""
        kinds = (LoraModule, LokrModule, LohaModule)
        return list(dict.fromkeys(type(seen.change) for seen in self.seen if isinstance(seen.change, kinds)))

    @cached_property
    def has_fused(self) -> bool:
        return any(seen.is_fused and not seen.placeholder for seen in self.seen)

    @cached_property
    def through_converter(self) -> bool:
        """Whether diffusers takes the names for official ones, which it converts."""
        if self.family == "krea2":
            return any(seen.key.text.startswith(("diffusion_model.", "base_model.model.")) for seen in self.seen)
        texts = [seen.key.text for seen in self.seen]
        return any(text.startswith("diffusion_model.") or ".attention.qkv." in text for text in texts)

    @cached_property
    def peft_rank(self) -> int | None:
        """The rank that PEFT's settings in the header give to all modules; None where there are none, or several."""
        try:
            settings = json.loads(self.metadata.get(ADAPTER_METADATA, "{}"))
        except (ValueError, RecursionError):  # a file whose modules have alphas of their own is read without them
            return None
        if not isinstance(settings, dict) or settings.get("transformer.rank_pattern"):
            return None
        rank = settings.get("transformer.r")
        return rank if isinstance(rank, int) else None

    @cached_property
    def converted_prefix(self) -> str:
        """The prefix that diffusers' converter of Ideogram 4 takes off."""
        return next((p for p in ("diffusion_model.", "conditional_transformer.") if p in self.prefixes), "")


Test = Callable[[Seen, Whole], bool]


@dataclass(frozen=True, eq=False)
class Rule:
    """One rule.

    Attributes:
        effect: REFUSED, LOST, WRONG or REMARK.
        why: of a reason, which names the keys after it.
        test: whether it is about a key.
        families: of which it is.
    """

    effect: str
    why: str
    test: Test
    families: tuple[str, ...] = ("krea2", "ideogram4")


# ---- tests that several readers share


def _part(*parts: str) -> Test:
    return lambda seen, whole: seen.key.part in parts


def _kind(*kinds: type[Change]) -> Test:
    return lambda seen, whole: isinstance(seen.change, kinds)


def _no_strength(seen: Seen, whole: Whole) -> bool:
    """A factor of a module whose strength is not 1 and stands in the header alone."""
    first = seen.key.part in ("down", "hada_w1_a", "lokr_w1", "lokr_w1_a")
    return first and _scale(seen) != 1 and "alpha" not in whole.parts[seen.module]


def _alpha_matters(seen: Seen, whole: Whole) -> bool:
    return seen.key.part == "alpha" and _scale(seen) != 1


def _scale(seen: Seen) -> float:
    return 1.0 if seen.change is None else seen.change.scale


def _lone(seen: Seen, whole: Whole) -> bool:
    return seen.key.part == "down" and "up" not in whole.parts[seen.module]


def _without_lora(seen: Seen, whole: Whole) -> bool:
    return "lora" not in seen.key.text and seen.key.part != "dora_scale"


def _over_base(seen: Seen, whole: Whole) -> bool:
    return seen.key.part == "dora_scale" and seen.change is not None and seen.change.magnitude_over_base is not None


def _not(test: Test) -> Test:
    return lambda seen, whole: not test(seen, whole)


def _both(*tests: Test) -> Test:
    return lambda seen, whole: all(test(seen, whole) for test in tests)


def _either(*tests: Test) -> Test:
    return lambda seen, whole: any(test(seen, whole) for test in tests)


def _names(*accepted: tuple[str, str, bool]) -> Test:
    """Whether a key's prefix and naming are one of these: (prefix, naming, flat)."""
    return lambda seen, whole: any(
        seen.key.prefix == prefix and seen.named(naming, flat) for prefix, naming, flat in accepted
    )


def _suffixes(allowed: Iterable[str]) -> Test:
    """Whether A and B have one of these endings; other parts have one each."""
    allowed = frozenset(allowed)
    return lambda seen, whole: seen.key.part not in ("down", "up") or seen.suffix in allowed


_A_B = (".lora_A.weight", ".lora_B.weight")
_DOWN_UP = (".lora_down.weight", ".lora_up.weight")


# ---- ComfyUI

_COMFYUI_SUFFIXES = (
    *_A_B,
    *_DOWN_UP,
    "_lora.down.weight",
    "_lora.up.weight",
    ".lora.down.weight",
    ".lora.up.weight",
    ".lora_A",
    ".lora_B",
    ".lora_linear_layer.down.weight",
    ".lora_linear_layer.up.weight",
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)


def _in_comfyui_map(seen: Seen, whole: Whole) -> bool:
    prefix = seen.key.prefix
    if prefix == "diffusion_model." and seen.named(OFFICIAL):
        return True
    own_name = whole.family == "krea2" and seen.place.module.endswith((".scale", ".lin"))
    if prefix == "lora_unet_":
        # The flat names are those of parameters that end in `.weight` only.
        return seen.named(OFFICIAL, flat=True) and not own_name
    if whole.family != "krea2" or seen.is_fused or own_name:
        return False
    stem = seen.key.stem
    if prefix == "lycoris_":
        return seen.named(DIFFUSERS, flat=True) or stem.endswith("_attn_to_out")
    return prefix in ("diffusion_model.", "transformer.", "") and (
        seen.named(DIFFUSERS) or stem.endswith(".attn.to_out")
    )


def _vector_on_square(seen: Seen, whole: Whole) -> bool:
    square = seen.change is not None and len(set(seen.change.shape)) == 1
    return seen.key.part == "dora_scale" and len(seen.shape) == 1 and square


def _vector_by_row(seen: Seen, whole: Whole) -> bool:
    """A key of a module with one length a row, without a second dimension: the product has not the weight's shape."""
    lengths = whole.lengths.get(seen.module, ())
    shape = () if seen.change is None else seen.change.shape
    return len(lengths) == 1 and len(shape) == 2 and lengths[0] == shape[0] != shape[1]


def _paper_by_row(seen: Seen, whole: Whole) -> bool:
    return seen.key.part == "dora_scale" and seen.change is not None and seen.change.magnitude is not None


def _column_of_one_row(seen: Seen, whole: Whole) -> bool:
    columns = seen.change is not None and seen.change.column_magnitude is not None
    return seen.key.part == "dora_scale" and columns and seen.shape[0] == seen.change.shape[0]  # type: ignore[union-attr]


_COMFYUI = (
    Rule(LOST, "its key map has no such name", _not(_in_comfyui_map)),
    Rule(LOST, "it knows no such ending", _not(_suffixes(_COMFYUI_SUFFIXES))),
    Rule(LOST, "a lora_A without a lora_B does nothing", _lone),
    Rule(LOST, "lengths as a vector fail on a weight that is not square", _vector_by_row),
    Rule(
        WRONG,
        "a placeholder's dora_scale rescales the base",
        lambda seen, whole: seen.placeholder and seen.key.part == "dora_scale",
    ),
    Rule(WRONG, "the lengths of a DoRA are ignored", _part("magnitude")),
    Rule(WRONG, "lengths as a vector are spread over the columns of a square weight", _vector_on_square),
    Rule(WRONG, "lengths of a column are taken for those of the one row", _column_of_one_row),
    Rule(WRONG, "the paper's dora_scale is divided by the norm of W instead of W + dW", _paper_by_row),
    Rule(WRONG, "the strength stands in the header, which is ignored", _no_strength),
)

# ---- diffusers

_IDEOGRAM4_CONVERTED = ("attention.qkv", "attention.o", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
                        "adaln_modulation")  # fmt: skip


def _converted(seen: Seen, whole: Whole) -> bool:
    """Whether diffusers' converter takes a key of a file that it converts."""
    if whole.family == "krea2":
        known = seen.key.prefix in ("diffusion_model.", "base_model.model.", "") and seen.named(OFFICIAL)
        return known and seen.suffix in _A_B and not seen.is_vector
    inside = TABLES[whole.family].inside_of(seen.key.stem)
    known = seen.key.prefix == whole.converted_prefix and inside is not None and inside[2] in _IDEOGRAM4_CONVERTED
    endings = _DOWN_UP if any(".lora_down.weight" in suffix for suffix in whole.suffixes) else _A_B
    return known and seen.suffix in (*endings, ".alpha")


def _through_converter(seen: Seen, whole: Whole) -> bool:
    return whole.through_converter and seen.key.part != "dora_scale"


def _of_transformer(seen: Seen, whole: Whole) -> bool:
    return not whole.through_converter and seen.key.prefix == "transformer."


def _stale_header(seen: Seen, whole: Whole) -> bool:
    return seen.key.part == "down" and whole.peft_rank is not None and seen.shape[0] != whole.peft_rank


_NO_LORA = "it refuses files with keys without `lora` in them"

_DIFFUSERS = (
    Rule(WRONG, "dora_scale is dropped with a warning", _part("dora_scale")),
    Rule(REFUSED, "a lora_A without a lora_B fails", _both(_lone, _not(_without_lora))),
    Rule(REFUSED, "its converter refuses such keys", _both(_through_converter, _not(_converted))),
    Rule(REFUSED, _NO_LORA, _both(_without_lora, lambda seen, whole: not whole.through_converter)),
    Rule(
        LOST,
        "it looks under `transformer.` only, without a word",
        lambda seen, whole: not whole.through_converter and seen.key.prefix != "transformer.",
    ),
    Rule(
        LOST,
        "its model has no such module, unless q, k and v were fused, and then it has no effect",
        _both(_of_transformer, lambda seen, whole: seen.is_fused and seen.place.naming == DIFFUSERS),
    ),
    Rule(
        REFUSED, "its model has no such module", _both(_of_transformer, lambda seen, whole: not seen.named(DIFFUSERS))
    ),
    Rule(REFUSED, "the header is of another rank", _both(_of_transformer, _stale_header)),
    Rule(
        REFUSED, "it knows lora_A and lora_B only", _both(_of_transformer, lambda seen, whole: seen.key.pair == DOWN_UP)
    ),
    Rule(
        WRONG,
        "the strength stands in the header, where it is not looked for",
        lambda seen, whole: _no_strength(seen, whole) and ADAPTER_METADATA not in whole.metadata,
    ),
)

# ---- trainers

_AI_TOOLKIT = (
    Rule(
        LOST,
        "it looks for official names under `diffusion_model.` only",
        _not(_names(("diffusion_model.", OFFICIAL, False), ("transformer.", OFFICIAL, False))),
    ),
    Rule(LOST, "it knows no such ending", _not(_suffixes((*_A_B, *_DOWN_UP)))),
    Rule(LOST, "it knows no LoHa", _kind(LohaModule)),
    Rule(WRONG, "the lengths of a DoRA start anew", _part("dora_scale", "magnitude")),
    Rule(WRONG, "alpha is dropped, and the strength taken for 1", _alpha_matters),
    Rule(WRONG, "the strength stands in the header, and is taken for 1", _no_strength),
    Rule(REMARK, "its settings must train these layers whole", _kind(DiffModule)),
    Rule(
        REMARK,
        "it cuts off what is beyond the rank of its settings",
        lambda seen, whole: len(whole.ranks) > 1 and seen.key.part == "down",
    ),
)

_MUSUBI = (
    Rule(LOST, "it looks for official names under `lora_unet_` only", _not(_names(("lora_unet_", OFFICIAL, True)))),
    Rule(LOST, "it knows lora_down and lora_up only", _not(_suffixes(_DOWN_UP))),
    Rule(LOST, "it knows no full changes", _either(_kind(DiffModule), _part("diff_b"))),
    Rule(
        LOST,
        "it takes one kind of adapter in a file",
        lambda seen, whole: (
            len(whole.kinds) > 1 and seen.change is not None and type(seen.change) is not whole.kinds[0]
        ),
    ),
    Rule(
        LOST,
        "it takes a first factor of a LoKr whole only",
        lambda seen, whole: isinstance(seen.change, LokrModule) and isinstance(seen.change.w1, tuple),
    ),
    Rule(WRONG, "the lengths of a DoRA are left out", _part("dora_scale", "magnitude")),
    Rule(WRONG, "the strength stands in the header, which is ignored", _no_strength),
)


def _known_to_onetrainer(seen: Seen, whole: Whole) -> bool:
    prefix = seen.key.prefix.removeprefix("base_model.model.")
    if prefix in ("lora_unet_", "lycoris_"):
        return seen.named(OFFICIAL, flat=True) or seen.named(DIFFUSERS, flat=True)
    if prefix == "diffusion_model.":
        return seen.named(OFFICIAL)
    return prefix in ("transformer.", "") and (seen.named(OFFICIAL) or seen.named(DIFFUSERS))


_ONETRAINER = (
    Rule(REFUSED, "it knows no full changes", _either(_part("diff", "diff_b"), _lone)),
    Rule(REFUSED, "it reverses these names with no such module", _not(_known_to_onetrainer)),
    Rule(
        REFUSED,
        "its model has q, k and v apart",
        lambda seen, whole: seen.is_fused and not seen.placeholder,
        KREA2,
    ),
    Rule(
        REFUSED,
        "it takes one kind of adapter in a file",
        lambda seen, whole: len(whole.kinds) > 1 and type(seen.change) is not whole.kinds[0],
    ),
    Rule(
        REFUSED,
        "it takes one rank for all modules",
        lambda seen, whole: len(whole.ranks) > 1 and seen.key.part in ("down", "hada_w1_b"),
    ),
    Rule(WRONG, "dora_scale over the norm of W is taken for the paper's", _over_base),
    Rule(WRONG, "the strength stands in the header, which is ignored", _no_strength),
    Rule(
        REMARK,
        "its setting for fused q, k and v must be on",
        lambda seen, whole: seen.is_fused and seen.key.part in ("down", "lokr_w1", "hada_w1_a"),
        IDEOGRAM4,
    ),
    Rule(
        REMARK,
        "its setting for fused q, k and v must be off",
        lambda seen, whole: seen.place.member is not None and seen.key.part in ("down", "lokr_w1", "hada_w1_a"),
        IDEOGRAM4,
    ),
    Rule(REMARK, "its settings must be those of a DoRA of this axis", _part("dora_scale", "magnitude")),
)


def _lycoris(seen: Seen, whole: Whole) -> bool:
    return whole.prefixes == {"lycoris_"}


def _known_to_simpletuner(seen: Seen, whole: Whole) -> bool:
    if whole.prefixes == {"lycoris_"}:
        return seen.named(DIFFUSERS if whole.family == "krea2" else OFFICIAL, flat=True)
    if seen.key.prefix not in ("transformer.", "diffusion_model.", ""):
        return False
    if whole.family == "ideogram4":
        return seen.named(OFFICIAL)
    # Of official names it translates those of the main blocks.
    return seen.named(DIFFUSERS) or (seen.named(OFFICIAL) and seen.key.stem.startswith("blocks."))


_SIMPLETUNER = (
    Rule(
        REFUSED,
        "its model has no such module",
        lambda seen, whole: not _known_to_simpletuner(seen, whole) and not _lycoris(seen, whole),
        KREA2,
    ),
    Rule(LOST, "its model has no such module", _not(_known_to_simpletuner)),
    Rule(
        REFUSED,
        "it takes a first factor of a LoKr whole only",
        lambda seen, whole: isinstance(seen.change, LokrModule) and isinstance(seen.change.w1, tuple),
    ),
    Rule(
        REFUSED,
        "it takes a DoRA by output row only",
        lambda seen, whole: (
            _lycoris(seen, whole)
            and seen.key.part == "dora_scale"
            and seen.change is not None
            and seen.change.column_magnitude is not None
        ),
    ),
    Rule(WRONG, "dora_scale over the norm of W is taken for the paper's", _both(_lycoris, _over_base)),
    Rule(WRONG, "dora_scale is dropped with a warning", _both(_not(_lycoris), _part("dora_scale"))),
    Rule(
        REFUSED,
        "it knows no such key outside `lycoris_`",
        _both(
            _not(_lycoris), lambda seen, whole: seen.suffix not in (*_A_B, ".alpha") and seen.key.part != "magnitude"
        ),
    ),
    Rule(
        REFUSED,
        "it knows lora_magnitude_vector only",
        lambda seen, whole: seen.key.part == "magnitude" and "lora_magnitude_vector" not in seen.suffix,
    ),
    Rule(REFUSED, "a lora_A without a lora_B fails", _lone),
    Rule(
        WRONG,
        "the strength stands in the header, which is ignored",
        lambda seen, whole: _no_strength(seen, whole) and ADAPTER_METADATA not in whole.metadata,
    ),
    Rule(REMARK, "alpha must be in its settings as in the header, which is not read", _no_strength),
    Rule(
        REMARK,
        "its setting lora_format must be comfyui",
        lambda seen, whole: (
            seen.key.prefix == "diffusion_model." or (seen.suffix == ".alpha" and not _lycoris(seen, whole))
        ),
    ),
    Rule(
        REMARK,
        "its setting fuse_qkv_projections must be on",
        lambda seen, whole: (
            seen.is_fused and not seen.placeholder and seen.key.part in ("down", "lokr_w1", "hada_w1_a")
        ),
        KREA2,
    ),
    Rule(
        REMARK,
        "its setting fuse_qkv_projections must be off",
        lambda seen, whole: seen.place.member is not None and not seen.placeholder and seen.key.part == "down",
        KREA2,
    ),
)

READERS: Mapping[str, tuple[Rule, ...]] = {
    "ComfyUI": _COMFYUI,
    "diffusers": _DIFFUSERS,
    "ai-toolkit": _AI_TOOLKIT,
    "musubi-tuner": _MUSUBI,
    "OneTrainer": _ONETRAINER,
    "SimpleTuner": _SIMPLETUNER,
}
"""Reader → its rules. Of a key the first that fits counts, remarks aside."""
