"""ComfyUI's own page in a headless browser: opens workflows, queues them, and takes pictures of what a user sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graft_lora.examples.demo import draw_folder
from server import PACK, Server

WORKFLOWS = PACK / "example_workflows"
# Faults of a loaded graph: types that nothing registered, and choices that are not in their lists.
FAULTS = """
() => window.app.graph._nodes.flatMap(node => {
  const faults = [];
  if (!(node.type in LiteGraph.registered_node_types)) faults.push(`${node.type} is missing`);
  if (node.has_errors) faults.push(`${node.type} is red`);
  for (const widget of node.widgets ?? []) {
    const values = widget.options?.values;
    const choices = typeof values === "function" ? values(widget, node) : values;
    if (widget.type === "combo" && Array.isArray(choices) && !choices.includes(widget.value))
      faults.push(`${node.type}.${widget.name} = ${widget.value} is not in its list`);
  }
  return faults;
})
"""


def workflow(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def provide(server: Server, *graphs: dict[str, Any]) -> None:
    """Empty files under the names that the workflows ask for, so that their lists hold them, and the pictures."""
    places = {"VAELoader": "vae", "CLIPLoader": "text_encoders", "GraftLoadModel": "diffusion_models"}
    for node in (node for graph in graphs for node in graph["nodes"]):
        if node["type"] in places:
            folder = server.folder / "models" / places[node["type"]]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / node["widgets_values"][0]).touch()
        if node["type"] in ("GraftInspectLora", "GraftConvertLora"):
            (server.folder / "models" / "loras" / node["widgets_values"][0]).touch()
        if node["type"] == "GraftImageFolder":
            folder = server.folder / "input" / node["widgets_values"][0]
            if not folder.exists():
                draw_folder(folder, seed=0, zorbs=8, known=4)


def at_demonstration_size(graph: dict[str, Any], family: str, steps: int, every: int) -> dict[str, Any]:
    """An example workflow with the demonstration's base, VAE and text encoder in the places of the published ones."""
    for node in graph["nodes"]:
        values = node.get("widgets_values")
        if node["type"] == "GraftLoadModel":
            values[:3] = [f"{family}.safetensors", "fp32", "fp32"]
        elif node["type"] == "CLIPLoader":
            node["type"], node["widgets_values"] = "TestClip", [f"{family}.safetensors", False]
        elif node["type"] == "VAELoader":
            node["type"], node["widgets_values"] = "TestVae", [family]
        elif node["type"] == "GraftImageFolder":
            values[3] = 64
        elif node["type"] == "GraftLoraSettings":
            values[:3] = [8, 8.0, "all"]
        elif node["type"] == "GraftTrainSettings":
            values[:4] = [steps, 0.003, 4, 0]
        elif node["type"] == "GraftPreviewSettings":
            values[0], values[3:5] = every, [12, 2.5]
        elif node["type"] == "CLIPTextEncode" and values[0]:
            values[0] = "a large zorb on a navy background"
        elif node["type"] in ("EmptyLatentImage", "EmptyFlux2LatentImage"):
            values[:2] = [64, 64]
        elif node["type"] == "GraftSaveLora":
            values[4] = f"{family}.safetensors"
        elif node["type"] == "KSampler":
            values[2:4] = [12, 2.5]
        if "properties" in node:
            node["properties"].pop("models", None)
    return graph


@contextmanager
def browser(server: Server) -> Iterator[Any]:
    """ComfyUI's page, loaded, with nothing over the graph."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or None, args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": 1900, "height": 1000})
        page.goto(server.url)
        page.wait_for_function("() => window.app?.graph && window.app.canvas", timeout=120_000)
        page.wait_for_timeout(3000)
        page.keyboard.press("Escape")
        # Words on nodes however small they are, and no map over them.
        page.evaluate(
            """() => { const set = window.app.extensionManager.setting.set;
            set("LiteGraph.Canvas.MinFontSizeForLOD", 0); set("Comfy.Minimap.Visible", false); }"""
        )
        yield page
        chromium.close()


def load(page: Any, graph: dict[str, Any]) -> list[str]:
    """Opens a workflow as a file dropped on the page would; returns its faults."""
    page.evaluate("graph => window.app.loadGraphData(graph)", graph)
    page.wait_for_timeout(2500)
    page.keyboard.press("Escape")
    return page.evaluate(FAULTS)


def show(page: Any, path: Path, around: tuple[float, float, float, float] | None = None) -> None:
    """Writes a picture of the page, with a part of the graph (x, y, width, height), or all of it, in view."""
    if around is None:
        around = page.evaluate(
            """() => { const n = window.app.graph._nodes;
            const x = Math.min(...n.map(e => e.pos[0])), y = Math.min(...n.map(e => e.pos[1])) - 40;
            return [x, y, Math.max(...n.map(e => e.pos[0] + e.size[0])) - x,
                    Math.max(...n.map(e => e.pos[1] + e.size[1])) - y]; }"""
        )
    page.evaluate(
        """([x, y, w, h]) => { const s = window.app.canvas.ds, c = window.app.canvas.canvas;
        const scale = window.devicePixelRatio, cw = c.width / scale, ch = c.height / scale;
        s.scale = Math.min(cw / (w + 120), ch / (h + 160));
        s.offset = [cw / s.scale / 2 - x - w / 2, ch / s.scale / 2 - y - h / 2 + 20 / s.scale];
        window.app.canvas.setDirty(true, true); }""",
        list(around),
    )
    page.wait_for_timeout(1200)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path))


def make_pictures(comfyui: Path, folder: Path) -> None:
    """The pictures that ship: a thumbnail beside each example workflow, and docs/comfyui.png of a run under way."""
    from PIL import Image

    class Provided(Server):
        def _layout(self) -> None:
            super()._layout()
            provide(self, *map(workflow, ("train_krea2", "train_ideogram4", "convert_lora")))

    server = Provided(comfyui, folder)
    try:
        with browser(server) as page:
            for name in ("train_krea2", "train_ideogram4", "convert_lora"):
                load(page, workflow(name))
                show(page, folder / f"{name}.png")
                with Image.open(folder / f"{name}.png") as picture:
                    # Without the page's own bars.
                    small = (
                        picture.convert("RGB").crop((60, 40, 1900, 990)).resize((736, 380), Image.Resampling.LANCZOS)
                    )
                    small.save(WORKFLOWS / f"{name}.jpg", quality=88)
            graph = at_demonstration_size(workflow("train_krea2"), "krea2", 600, 50)
            load(page, graph)
            page.evaluate("() => window.app.queuePrompt(0)")
            log = server.folder / "output" / "graft" / "zorb" / "log.jsonl"
            while not log.is_file() or len(log.read_text().splitlines()) < 320:
                page.wait_for_timeout(300)
            # What Check Run says stands above this part: it names folders of this machine.
            show(page, PACK / "docs" / "comfyui.png", (1130, 400, 960, 540))
    finally:
        server.stop()


if __name__ == "__main__":
    import os
    import tempfile

    make_pictures(Path(os.environ["COMFYUI_PATH"]), Path(tempfile.mkdtemp()))
