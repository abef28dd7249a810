"""What a graph sees of the nodes: ids, tooltips, defaults, help pages and translations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IDS = (
    "GraftLoadModel", "GraftImageFolder", "GraftEncodeDataset", "GraftDatasetFromLatents", "GraftLoraSettings",
    "GraftTrainSettings", "GraftPreviewSettings", "GraftTrain", "GraftLoadLora", "GraftAdapterStrength",
    "GraftSaveLora", "GraftConvertLora", "GraftInspectLora", "GraftCheckRun", "GraftEstimateMemory", "GraftPlotLoss",
)  # fmt: skip


@pytest.fixture
def schemas(graph):
    return {name: node.define_schema() for name, node in graph.classes.items()}


def test_node_ids_are_those_that_saved_workflows_name(schemas):
    assert tuple(schemas) == IDS


def test_the_extension_lists_every_node_and_registers_the_button(graph):
    import graft_lora

    extension = asyncio.run(graft_lora.comfy_entrypoint())
    asyncio.run(extension.on_load())
    assert [node.define_schema().node_id for node in asyncio.run(extension.get_node_list())] == list(IDS)
    assert graph.host.calls == ["route"]


@pytest.mark.parametrize("name", IDS)
def test_every_node_explains_itself(schemas, name):
    schema = schemas[name]
    assert schema.category == "model/training/graft"
    assert schema.display_name
    assert schema.description
    assert "graft" in schema.search_aliases
    assert len(schema.search_aliases) > 2
    for entry in (*schema.inputs, *schema.outputs):
        assert entry.tooltip, f"{name}: {entry.id or entry.display_name}"
        assert entry.tooltip.strip().endswith("."), entry.tooltip


@pytest.mark.parametrize("name", IDS)
def test_every_widget_has_a_default_that_it_accepts(schemas, name):
    for entry in schemas[name].inputs:
        if hasattr(entry, "options"):
            assert entry.default is None or entry.default in entry.options
        elif hasattr(entry, "min"):
            assert entry.min <= entry.default <= entry.max
        elif entry.get_io_type() in ("BOOLEAN", "STRING") and not getattr(entry, "force_input", None):
            assert entry.default is not None, f"{name}: {entry.id}"


def test_the_settings_nodes_without_a_change_are_the_engines_defaults(graph):
    from graft_lora.trainer.adapters import LoraSettings
    from graft_lora.trainer.settings import TrainSettings

    assert graph.run("GraftLoraSettings")[0] == LoraSettings()
    assert graph.run("GraftTrainSettings")[0] == TrainSettings()


def test_every_training_setting_of_the_engine_has_a_widget(schemas):
    import dataclasses

    from graft_lora.trainer.settings import TrainSettings

    widgets = {entry.id for entry in schemas["GraftTrainSettings"].inputs}
    assert widgets == {field.name for field in dataclasses.fields(TrainSettings)}


@pytest.mark.parametrize("name", IDS)
def test_every_node_has_a_help_page_that_names_its_inputs(schemas, name):
    page = (ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schemas[name].display_name}\n")
    for entry in schemas[name].inputs:
        assert f"**{entry.id}**" in page, entry.id


def test_no_help_page_is_of_a_node_that_is_gone():
    assert {path.stem for path in (ROOT / "web" / "docs").glob("*.md")} == set(IDS)


# Its tooltip says what this machine can run, so that no translation may stand in its place.
DYNAMIC = {("GraftLoadModel", "precision")}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_translations_have_the_schemas_keys(schemas, language):
    texts = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(texts) == set(IDS)
    for name, schema in schemas.items():
        assert set(texts[name]) == {"display_name", "description", "inputs", "outputs"}
        assert set(texts[name]["inputs"]) == {entry.id for entry in schema.inputs}
        for entry, words in texts[name]["inputs"].items():
            assert set(words) == ({"name"} if (name, entry) in DYNAMIC else {"name", "tooltip"})
        assert list(texts[name]["outputs"]) == [str(index) for index in range(len(schema.outputs))]


def test_the_english_texts_are_the_schemas(schemas):
    texts = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for name, schema in schemas.items():
        assert texts[name]["display_name"] == schema.display_name
        assert texts[name]["description"] == schema.description
        for entry in schema.inputs:
            assert texts[name]["inputs"][entry.id].get("tooltip", entry.tooltip) == entry.tooltip
        for index, entry in enumerate(schema.outputs):
            assert texts[name]["outputs"][str(index)] == {"name": entry.display_name, "tooltip": entry.tooltip}


def tooltip_when_tried(load):
    load._try()
    return load.precision_tooltip()


def test_the_precision_tooltip_says_what_the_machine_can_run(graph):
    from graft_lora.nodes import load

    tooltip = tooltip_when_tried(load)
    assert "This machine can run: " in tooltip
    assert "fp32" in tooltip


def test_the_precisions_are_tried_when_a_page_asks_and_nobody_waits_for_it(graph, monkeypatch):
    """The first question is ComfyUI's at its start, in which torchao must not be imported."""
    import threading

    from graft_lora.nodes import load

    answer, tried = threading.Event(), []

    def slow():
        tried.append(threading.current_thread())
        answer.wait(10)
        return {"nf4": {}}

    monkeypatch.setattr(load, "precision_faults", slow)
    monkeypatch.setattr(load, "_asked", 0)
    assert load.PENDING in load.precision_tooltip()
    assert tried == []
    assert load.PENDING in load.precision_tooltip()
    answer.set()
    (thread,) = (thread for thread in threading.enumerate() if thread in tried or thread.name == "graft-precisions")
    thread.join(10)
    assert tried == [thread]
    assert load.precision_tooltip().endswith("This machine can run: nf4.")


def test_a_precision_that_fails_everywhere_is_named_with_the_reason(graph, monkeypatch):
    from graft_lora.nodes import load
    from graft_lora.trainer import modes

    monkeypatch.setattr(modes, "modes", lambda device, family: dict.fromkeys(load.PRECISIONS) | {"nf4": "no torchao"})
    tooltip = tooltip_when_tried(load)
    assert "Not nf4: no torchao." in tooltip
    assert "nf4" not in tooltip.split("can run: ")[1].split(".")[0]


def test_a_driver_that_fails_does_not_break_the_node(graph, monkeypatch):
    from graft_lora.nodes import load

    def broken(device):
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr("graft_lora.trainer.devices.read_device", broken)
    assert "could not be found out: the driver is gone" in tooltip_when_tried(load)
