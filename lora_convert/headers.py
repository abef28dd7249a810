"""The header metadata of a converted file: what stays true is kept, what the conversion made untrue is not."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from .header import ADAPTER_METADATA

# PEFT's settings, and ranks and alphas, from which readers would build another adapter; LyCORIS' own settings.
_STALE = {ADAPTER_METADATA, "lora_rank", "lora_alpha", "use_rslora", "lycoris_config", "modelspec.hash_sha256"}
# kohya's network settings; hashes of the tensors.
_STALE_STARTS = ("ss_network_", "sshs_")
_GRAFT = "graft"
_DORA = "dora_scale"
OVER_BASE, PAPER = "over the norm of W", "the paper's"
"""What `dora_scale` in the header's `graft` entry may say: the two meanings of keys that look alike."""


def fresh(metadata: Mapping[str, str], dora_scale: str | None = None) -> dict[str, str]:
    """What is still true of a source's header.

    Args:
        metadata: of the source.
        dora_scale: which of the two meanings the file's `dora_scale` keys have, where it has any.
    """
    kept = {k: v for k, v in metadata.items() if k not in _STALE and not k.startswith(_STALE_STARTS)}
    try:
        graft = json.loads(kept.get(_GRAFT, "{}"))
    except (ValueError, RecursionError):
        graft = None
    if isinstance(graft, dict):
        graft.pop(_DORA, None)
        if dora_scale is not None:
            graft[_DORA] = dora_scale
        kept.pop(_GRAFT, None)
        if graft:
            kept[_GRAFT] = json.dumps(graft)
    return {"format": "pt", **{k: v for k, v in kept.items() if k != "format"}}


def kohya_entries(rank: int, alpha: float) -> dict[str, str]:
    """What tools show of a file whose modules all have this rank and alpha."""
    return {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}


def peft_entry(ranks: Mapping[str, int], doras: Collection[str], prefix: str) -> dict[str, str]:
    """PEFT's settings of an adapter whose scales are folded: alpha is the rank, module by module.

    Without them diffusers takes the ranks from the tensors, which older releases did with one alpha for all of them.

    Args:
        ranks: module, as the file spells it without the prefix → rank.
        doras: the modules among them that have a magnitude.
        prefix: of the component, such as `transformer`.
    """
    counts = list(ranks.values())
    rank = max(sorted(set(counts)), key=counts.count)
    # As diffusers writes them itself: PEFT takes a key with ^ for the whole name and not for its end.
    others = {f"^{module}": own for module, own in ranks.items() if own != rank}
    settings = {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "use_dora": bool(doras),
        "lora_bias": False,
    }
    return {
        ADAPTER_METADATA: json.dumps(
            {f"{prefix}.{key}": value for key, value in settings.items()}, indent=2, sort_keys=True
        )
    }
