"""What a LoRA file's header metadata says of the strength of modules that have no `alpha` of their own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from .errors import LoraError
from .keys import A_B, Key, shown

ADAPTER_METADATA = "lora_adapter_metadata"
"""diffusers' key: PEFT's configuration as JSON, each name with the component's before it."""

_COMPONENTS = ("transformer.", "conditional_transformer.", "diffusion_model.", "unet.", "")

# Of PEFT's patterns, which are regular expressions, those are taken that cannot run away: no repeated groups.
_PLAIN_PATTERN = re.compile(r"(?:[\w^$|()-]|\\?\.|\\d\+|\[0-9\]\+|\.\*)*")


class Header:
    """The alpha that the header gives, as one that is divided by the rank.

    Attributes:
        notes: what was found out on the way.
    """

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = metadata
        self._config: dict[str, Any] | None = None
        self.notes: list[str] = []

    def alpha(self, key: Key, rank: int) -> float | None:
        """Of a module, or None where the header says nothing of it.

        Args:
            key: that of one of the module's factors.
            rank: as the factors have it.

        Raises:
            LoraError: the header cannot be understood, or is of another rank than the module.
        """
        if ADAPTER_METADATA in self._metadata:
            return self._from_peft(key, rank)
        if "lora_alpha" in self._metadata:
            alpha = _number("lora_alpha", self._metadata["lora_alpha"])
            given = self._metadata.get("lora_rank", self._metadata.get("r"))
            return self._checked(key, "lora_alpha", alpha, rank, given, self._flat_rslora())
        if self._metadata.get("ss_network_alpha", "None") != "None":
            return self._from_kohya(key, rank)
        return None

    def _flat_rslora(self) -> bool:
        """Of a header in which every setting is a text of its own."""
        text = self._metadata.get("use_rslora", "false")
        if text.lower() not in ("true", "false"):
            raise LoraError(f"the header's use_rslora is {shown(text)}; wanted true or false; write alpha keys instead")
        return text.lower() == "true"

    def _from_peft(self, key: Key, rank: int) -> float | None:
        config = self._peft()
        alpha = self._pattern("alpha_pattern", key, config.get("lora_alpha"))
        if alpha is None:
            return None
        given = self._pattern("rank_pattern", key, config.get("r"))
        rslora = config.get("use_rslora")
        if rslora is not None and not isinstance(rslora, bool):
            # PEFT takes any text for true, "false" too.
            raise LoraError(
                f"the header's use_rslora is {shown(repr(rslora))}; wanted true or false; write alpha keys instead"
            )
        return self._checked(key, ADAPTER_METADATA, _number("lora_alpha", alpha), rank, given, bool(rslora))

    def _from_kohya(self, key: Key, rank: int) -> float | None:
        alpha = _number("ss_network_alpha", self._metadata["ss_network_alpha"])
        dim = self._metadata.get("ss_network_dim")
        if alpha == 0:
            # sd-scripts, musubi-tuner and LyCORIS train with the rank then, and write the 0 that they were given.
            self._say("the header's ss_network_alpha of 0 stands for the rank, which is strength 1")
            return float(rank)
        if key.pair == A_B:
            # sd-scripts and musubi-tuner write lora_down with an alpha of its own. Their converters, which write
            # lora_A, fold alpha in and leave the header as it was.
            if dim in (None, "None") or _number("ss_network_dim", dim) != alpha:
                self._say(
                    "the header's ss_network_alpha is not applied: in lora_A/lora_B files it is folded in already"
                )
            return None
        return self._checked(key, "ss_network_alpha", alpha, rank, None if dim == "None" else dim)

    def _checked(self, key: Key, name: str, alpha: float, rank: int, given: object, rslora: bool = False) -> float:
        """The alpha, if the header is about this rank; of an rsLoRA (alpha / √rank) the one that is divided by it."""
        number = rank if given is None else _number("the rank", given)
        if number == rank:
            self._say(f"alpha {alpha:g} comes from the header ({name}){', of an rsLoRA' if rslora else ''}")
            return alpha * math.sqrt(rank) if rslora else alpha
        if number == alpha and not rslora:
            # Strength 1 then as now. That of an rsLoRA would be another at each rank.
            self._say(f"the header ({name}) gives another rank, {number:g}, than {shown(key.stem)} has, {rank}")
            return float(rank)
        raise LoraError(
            f"{shown(key.stem)} has rank {rank}, but the header ({name}) says rank {number:g} with alpha {alpha:g}"
            f"{' (rsLoRA)' if rslora else ''}, so it is another file's, and the strength is not known; write alpha "
            "keys, or take that out of the header"
        )

    def _peft(self) -> dict[str, Any]:
        if self._config is None:
            try:
                found = json.loads(self._metadata[ADAPTER_METADATA])
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise LoraError(f"the header's {ADAPTER_METADATA} is no JSON object; wanted PEFT's configuration")
            component = next((c for c in _COMPONENTS if f"{c}lora_alpha" in found or f"{c}r" in found), "")
            self._config = {k.removeprefix(component): v for k, v in found.items() if k.startswith(component)}
        return self._config

    def _pattern(self, name: str, key: Key, default: Any) -> Any:
        """As PEFT looks a module up: the first pattern that is the end of its name, from a dot on."""
        patterns = self._peft().get(name) or {}
        if not isinstance(patterns, dict):
            raise LoraError(f"the header's {name} is no JSON object; wanted patterns and numbers")
        for pattern, value in patterns.items():
            if (
                len(pattern) > 300
                or not _PLAIN_PATTERN.fullmatch(pattern)
                or pattern.count("*") + pattern.count("+") > 3
            ):
                raise LoraError(
                    f"the header's {name} has {shown(pattern)}, which is not understood; wanted module names"
                )
            try:
                if re.match(rf"(.*\.)?({pattern})$", key.stem):
                    return value
            except re.error as error:
                raise LoraError(f"the header's {name} has {shown(pattern)}, which is no pattern ({error})") from error
        return default

    def _say(self, note: str) -> None:
        if note not in self.notes and len(self.notes) < 20:
            self.notes.append(note)


def _number(name: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise LoraError(f"the header's {name} is {shown(str(value))}; wanted a number")
    return number
