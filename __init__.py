"""Graft: LoRA training for Krea 2 and Ideogram 4. ComfyUI's entrance; imports nothing of ComfyUI at import time."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """What ComfyUI asks for the pack's nodes: a `ComfyExtension`."""
    from .nodes.extension import GraftExtension

    return GraftExtension()
