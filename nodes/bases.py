"""A base model that a conversion may ask for: an input with the model files, and what the converter takes of one."""

from __future__ import annotations

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
    from ..trainer.checkpoints import converter_options

    return {} if name == NONE else converter_options(host.model_path(name))
