"""The pack as ComfyUI's extension: its nodes, and the route of the button "Finish now"."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension

from . import host, node_classes


class GraftExtension(ComfyExtension):
    """All of Graft's nodes."""

    async def on_load(self) -> None:
        """Called once, before the nodes are asked for."""
        host.finish_route()

    async def get_node_list(self) -> list[Any]:
        """The node classes, in the order of `nodes.NODES`."""
        return node_classes()
