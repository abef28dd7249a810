"""Quantisations that cannot be trained on, told by their keys or a folder's config.json, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from .errors import UnreadableFormatError, some
from .stored_weights import WAY_OUT

# What diffusers calls them (`quantization_config.quant_method`), for the user to read.
METHODS = {
    "sdnq": "SDNQ",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "auto-round": "AutoRound",
    "torchao": "torchao",
    "quanto": "quanto",
    "modelopt": "ModelOpt",
    "nunchaku_lite": "Nunchaku (SVDQuant)",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "compressed-tensors": "compressed-tensors",
}
# Methods whose files are read: what their tensors say is checked one by one.
READ = ("bitsandbytes", "bfl")

# Name → endings of keys that give it away, the more particular names first.
KEYS = {
    "SDNQ": (".svd_up", ".svd_down", ".zero_point"),
    "Nunchaku (SVDQuant)": (".wscales", ".proj_down", ".smooth_factor", ".wzeros"),
    "GPTQ": (".g_idx",),
    "AWQ": (".qzeros", ".qweight"),
    "torchao": ("._weight_qdata",),
    "quanto": (".weight._data",),
    "compressed-tensors": (".weight_packed",),
    "HQQ": (".W_q",),
}


def refuse_by_keys(file: str, keys: Collection[str]) -> None:
    """Raises UnreadableFormatError, with the name of the quantisation and an example of its keys."""
    for name, endings in KEYS.items():
        telling = sorted(key for key in keys if key.endswith(endings))
        if telling:
            raise _error(file, name, telling)
    # Without svd and zero points SDNQ leaves only a scale beside each weight. Norms have a `.scale` and no weight.
    scales = sorted(key for key in keys if key.endswith(".scale") and key.removesuffix("scale") + "weight" in keys)
    if scales:
        raise _error(file, "SDNQ", scales)


def refuse_by_config(name: str, folder: Path) -> None:
    """Raises UnreadableFormatError where a diffusers folder says that it is quantised in a way that is not read."""
    for file, inside in (("quantization_config.json", False), ("config.json", True)):
        try:
            settings = json.loads((folder / file).read_text(encoding="utf-8"))
            method = (settings.get("quantization_config") or {} if inside else settings).get("quant_method")
        except (OSError, ValueError, AttributeError):
            # No such file, or none that says anything: the keys are what counts.
            continue
        if method is not None and method not in READ:
            raise _error(name, METHODS.get(method, str(method)), [f'quant_method "{method}" in {file}'])


def _error(file: str, name: str, evidence: list[str]) -> UnreadableFormatError:
    return UnreadableFormatError(
        f"{file} is quantised by {name} ({some(evidence, 1)}), which cannot be trained on; {WAY_OUT}"
    )
