"""A graph without ComfyUI: nodes by id, run as ComfyUI runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import fake_host
import graft_lora.nodes
import pytest
import stand_in
import tiny
import torch
from PIL import Image


class Graph:
    """The nodes, and the host that they speak with."""

    def __init__(self, host, classes):
        self.host = host
        self.classes = {node.define_schema().node_id: node for node in classes}

    def run(self, node_id, **given):
        """Executes a node under inference mode; what is not given is the widget's default, as in a new node."""
        node = self.classes[node_id]
        inputs = {}
        for entry in node.define_schema().inputs:
            if entry.id in given:
                inputs[entry.id] = given.pop(entry.id)
            elif not entry.optional:
                default = entry.default
                options = getattr(entry, "options", None)
                inputs[entry.id] = options[0] if default is None and options else default
        assert not given, f"{node_id} has no input {', '.join(given)}"
        clone = type(node.__name__, (node,), {"hidden": SimpleNamespace(unique_id="7")})
        with torch.inference_mode():
            return clone.execute(**inputs)


@pytest.fixture
def graph(tmp_path, monkeypatch):
    host = fake_host.make(tmp_path)
    stand_in.install(monkeypatch, **{"graft_lora.nodes.host": host})
    monkeypatch.setattr(graft_lora.nodes, "host", host, raising=False)
    return Graph(host, graft_lora.nodes.node_classes())


@pytest.fixture
def pictures(tmp_path, graph):
    """A folder of four pictures in two shapes, with captions."""
    folder = tmp_path / "input" / "zorb"
    folder.mkdir()
    for index, size in enumerate(((96, 64), (64, 96), (96, 64), (64, 96))):
        Image.new("RGB", size, (40 * index, 90, 200 - 30 * index)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"a zorb number {index}")
    return folder


@pytest.fixture
def model(graph, family_name):
    return graph.run("GraftLoadModel", model_name=f"{family_name}.safetensors", compute_dtype="fp32")[0]


@pytest.fixture
def clip(family_name):
    return SimpleNamespace(width=tiny.WIDTHS[family_name])


@pytest.fixture
def dataset(graph, pictures, model, clip):
    folder = graph.run("GraftImageFolder", folder="zorb", resolution=64)[0]
    return graph.run("GraftEncodeDataset", pictures=folder, vae=None, clip=clip, model=model)[0]
