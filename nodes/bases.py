"""A base model that a conversion may ask for: an input with the model files, and what the converter takes of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from . import host

NONE = "none"


def base_input() -> Any:
    """The input: `none`, or a file of models/diffusion_models."""
    return io.Combo.Input(
        "base",
        options=[NONE, *host.model_files()],
        default=NONE,
        optional=True,
        advanced=True,
        tooltip="The base model's file. Only some DoRA files and models of unusual size ask for it.",
    )


def base_options(name: str) -> dict[str, Any]:
    """What `convert_state` is told about the chosen base; nothing with `NONE`."""
    return options_of(None if name == NONE else host.model_path(name))


def options_of(path: Path | None) -> dict[str, Any]:
    """Sizes and weights of a base, read when they are asked for."""
    if path is None:
        return {}
    from ..lora_convert.sizes import Sizes
    from ..trainer.checkpoints import open_model_file

    file = open_model_file(path)
    # A name of the converter is a module's, or that of a parameter which is no module's weight.
    weights = {name.removesuffix(".weight"): name for name in file.shapes}
    return {
        "sizes": Sizes.of(file.family.name, file.shapes),
        "base": lambda module: file.tensor(weights[module]).float(),
    }
