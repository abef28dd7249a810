"""ComfyUI nodes: what a graph sees. Thin: the engine computes, `host` speaks with ComfyUI."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# File → its node classes. They are imported when ComfyUI asks for them, since the package must import without it.
NODES = {
    "load": ("LoadModel",),
    "dataset": ("ImageFolder", "EncodeDataset", "DatasetFromLatents"),
    "settings_nodes": ("LoraSettingsNode", "TrainSettingsNode", "PreviewSettingsNode"),
    "train": ("Train",),
    "lora": ("LoadLora", "AdapterStrength", "SaveLora"),
    "convert": ("ConvertLora", "InspectLora"),
    "reports": ("CheckRun", "EstimateMemory", "PlotLoss"),
}


def node_classes() -> list[Any]:
    """The classes of `NODES`."""
    return [getattr(import_module(f".{file}", __name__), name) for file, names in NODES.items() for name in names]
