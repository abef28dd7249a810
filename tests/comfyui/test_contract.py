"""The stand-in of tests/nodes against a real ComfyUI: the same names, the same parameters in the same order."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "nodes"))

import stand_in

KINDS = (
    "Boolean", "Int", "Float", "String", "Combo", "MultiType", "Autogrow", "Model", "Vae", "Clip", "Image", "Latent",
    "Conditioning",
)  # fmt: skip


@pytest.fixture
def real(comfy, monkeypatch):
    """ComfyUI's own `comfy_api.latest`."""
    monkeypatch.syspath_prepend(os.environ["COMFYUI_PATH"])
    from comfy_api import latest

    return latest


@pytest.fixture
def mine():
    return stand_in.modules()["comfy_api.latest"]


def parameters(function):
    """Names in order; without what collects the rest."""
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, entry in inspect.signature(function).parameters.items() if entry.kind not in rest]


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_take_the_same_arguments(real, mine, kind):
    theirs, ours = getattr(real.io, kind), getattr(mine.io, kind)
    assert ours.io_type == theirs.io_type
    assert parameters(ours.Input.__init__) == parameters(theirs.Input.__init__)


def test_outputs_take_the_same_arguments(real, mine):
    assert parameters(mine.io.Model.Output.__init__) == parameters(real.io.Model.Output.__init__)
    assert parameters(mine.io.Custom("X").Output.__init__) == parameters(real.io.Custom("X").Output.__init__)


@pytest.mark.parametrize("name", ["PreviewImage", "PreviewText"])
def test_what_a_node_shows_takes_the_same_arguments(real, mine, name):
    assert parameters(getattr(mine.ui, name).__init__) == parameters(getattr(real.ui, name).__init__)


def test_the_rest_takes_the_same_arguments(real, mine):
    template = real.io.Autogrow.TemplatePrefix
    assert parameters(mine.io.Autogrow.TemplatePrefix.__init__) == parameters(template.__init__)
    assert parameters(mine.io.NodeOutput.__init__) == parameters(real.io.NodeOutput.__init__)
    theirs = parameters(real.io.Schema.__init__)
    assert [name for name in theirs if name in parameters(mine.io.Schema.__init__)] == parameters(
        mine.io.Schema.__init__
    )
    assert mine.io.Hidden.unique_id.value == real.io.Hidden.unique_id.value
    assert mine.io.ControlAfterGenerate.fixed.value == real.io.ControlAfterGenerate.fixed.value
    for name in ("on_load", "get_node_list"):
        assert inspect.iscoroutinefunction(getattr(real.ComfyExtension, name))
        assert inspect.iscoroutinefunction(getattr(mine.ComfyExtension, name))
