"""What ships beside the nodes: workflows, page script, icon, and that a wheel carries them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ("train_krea2", "train_ideogram4", "convert_lora")
STOCK = {
    "CLIPLoader", "CLIPTextEncode", "EmptyFlux2LatentImage", "EmptyLatentImage", "KSampler", "MarkdownNote",
    "PreviewAny", "PreviewImage", "VAEDecode", "VAELoader",
}  # fmt: skip
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}


def workflow(name):
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_example_workflows_use_nodes_that_are_there(graph, name):
    kinds = {node["type"] for node in workflow(name)["nodes"]}
    assert kinds - STOCK <= graph.classes.keys()
    assert kinds - STOCK


@pytest.mark.parametrize("name", WORKFLOWS)
def test_example_workflows_have_the_schemas_sockets_and_widgets(graph, name):
    for node in workflow(name)["nodes"]:
        if node["type"] in STOCK:
            continue
        schema = graph.classes[node["type"]].define_schema()
        entries = sorted(schema.inputs, key=lambda entry: entry.optional)  # as the page puts them
        widgets = [entry for entry in entries if entry.get_io_type() in WIDGETS]
        values = [value for value in node["widgets_values"] if value != "fixed"]
        assert len(values) == len(widgets), node["type"]
        for entry, value in zip(widgets, values, strict=True):
            if hasattr(entry, "min"):
                assert entry.min <= value <= entry.max, entry.id
        sockets = {slot["name"].split(".")[0]: slot["type"] for slot in node["inputs"]}
        wanted = {entry.id: entry.get_io_type() for entry in entries if entry not in widgets}
        assert sockets.keys() == wanted.keys()
        assert [output["type"] for output in node["outputs"]] == [output.io_type for output in schema.outputs]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_example_workflows_links_agree_at_both_ends(name):
    content = workflow(name)
    nodes = {node["id"]: node for node in content["nodes"]}
    for link, source, output, target, slot, kind in content["links"]:
        assert link in nodes[source]["outputs"][output]["links"]
        assert nodes[target]["inputs"][slot]["link"] == link
        assert nodes[source]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][slot]["type"] in ("*", kind) or kind in nodes[target]["inputs"][slot]["type"]


def test_every_workflow_is_one_that_is_tested():
    assert {path.stem for path in (ROOT / "example_workflows").glob("*.json")} == set(WORKFLOWS)


def test_the_page_script_knows_one_node_and_one_route(graph):
    script = (ROOT / "web" / "graft.js").read_text(encoding="utf-8")
    assert re.findall(r'comfyClass !== "(\w+)"', script) == ["GraftTrain"]
    assert re.findall(r'fetchApi\("([^"]+)"', script) == ["/graft/finish"]
    assert [path.name for path in (ROOT / "web").glob("*.js")] == ["graft.js"]


def test_the_icon_is_square_and_small_enough_for_the_registry():
    icon = (ROOT / "icon.svg").read_text(encoding="utf-8")
    width, height = re.search(r'width="(\d+)" height="(\d+)"', icon).groups()
    assert width == height
    assert int(width) <= 400
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["comfy"]["Icon"].endswith("/icon.svg")


def test_the_wheel_carries_what_comfyui_looks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["graft_lora"]
    carried = {path for pattern in patterns for path in ROOT.glob(pattern)}
    for folder in ("web", "locales", "example_workflows"):
        assert {path for path in (ROOT / folder).rglob("*") if path.is_file()} <= carried


def test_the_registrys_archive_keeps_them():
    ignored = (ROOT / ".comfyignore").read_text().split()
    assert not {"web/", "locales/", "example_workflows/", "icon.svg"} & set(ignored)
