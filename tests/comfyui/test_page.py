"""The example workflows in ComfyUI's own page, in a headless Chromium: opened without a fault, queued, and seen."""

from __future__ import annotations

import shutil
import time

import pytest

pytest.importorskip("playwright", reason="needs playwright and a Chromium to look at the page")
from page import at_demonstration_size, browser, load, provide, show, workflow

NAMES = ("train_krea2", "train_ideogram4", "convert_lora")


@pytest.fixture(scope="module")
def page(server):
    if shutil.which("chromium") is None:
        pytest.skip("needs a Chromium to look at the page")
    provide(server, *map(workflow, NAMES))
    with browser(server) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_an_example_workflow_opens_without_a_missing_node_or_a_red_widget(page, name):
    assert load(page, workflow(name)) == []


def test_a_fault_is_seen(page):
    """The check above would see one: a file that is not there, and a node that nobody registered."""
    graph = workflow("train_krea2")
    graph["nodes"][1]["widgets_values"][0] = "nothing.safetensors"
    graph["nodes"][2]["type"] = "NoSuchNode"
    assert len(load(page, graph)) >= 2


def test_the_example_trains_in_the_page_with_a_picture_on_the_node(server, page, tmp_path, family_name):
    graph = at_demonstration_size(workflow(f"train_{family_name}"), family_name, steps=40, every=10)
    trained = next(node for node in graph["nodes"] if node["type"] == "GraftTrain")
    trained["widgets_values"][0] = name = f"page-{family_name}"
    assert load(page, graph) == []
    before = len(server.get("/history"))
    page.evaluate("() => window.app.queuePrompt(0)")
    end = time.monotonic() + 180
    pictures = 0
    while len(server.get("/history")) == before and time.monotonic() < end:
        pictures = max(pictures, page.evaluate(PICTURES, trained["id"]))
        time.sleep(0.2)
    outcome = list(server.get("/history").values())[-1]
    assert outcome["status"]["status_str"] == "success", outcome["status"]
    assert pictures > 0
    assert (server.folder / "output" / "graft" / name / "preview.png").is_file()
    show(page, tmp_path / "done.png")
    assert (tmp_path / "done.png").stat().st_size > 50_000


# Pictures that a node shows now.
PICTURES = """id => { const node = window.app.graph.getNodeById(id);
  return (node.imgs?.length ?? 0) + (node.preview?.length ?? 0); }"""
