"""A real ComfyUI server on the CPU with this pack and the tests' own parts, and graphs for its API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graft_lora.examples.demo_parts import base_path
from graft_lora.trainer.families import FAMILIES

HERE = Path(__file__).parent
PACK = HERE.parents[1]
PATIENCE = 180  # seconds for a graph


class GraphError(AssertionError):
    """A graph that ended in an error; its text is what the page shows."""


class Server:
    """One process of ComfyUI with a folder of its own."""

    def __init__(self, comfyui: Path, folder: Path, *options: str) -> None:
        self.folder, self.log = folder, folder / "server.log"
        self._layout()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(self.port),
            "--base-directory", str(folder), "--disable-api-nodes", "--database-url", "sqlite:///:memory:",
            "--use-pytorch-cross-attention", *options,
        ]  # fmt: skip
        # The parts import the engine under its package's name, as pip would have installed it.
        paths = [str(folder / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._wait()

    def _layout(self) -> None:
        for name in ("custom_nodes", "input", "output", "python", "models/diffusion_models", "models/loras"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "custom_nodes" / "graft-lora").symlink_to(PACK, target_is_directory=True)
        (self.folder / "custom_nodes" / "test_parts").symlink_to(HERE / "parts", target_is_directory=True)
        (self.folder / "python" / "graft_lora").symlink_to(PACK, target_is_directory=True)
        for family in FAMILIES.values():
            shutil.copy(base_path(family), self.folder / "models" / "diffusion_models" / f"{family.name}.safetensors")

    def _wait(self) -> None:
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.text()[-4000:]}")
            try:
                self.get("/queue")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError(f"ComfyUI did not start:\n{self.text()[-4000:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)

    def text(self) -> str:
        """What the server has printed so far."""
        return self.log.read_text(errors="replace")

    # --- the API -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path: str, content: Any = None) -> Any:
        data = json.dumps(content or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise GraphError(error.read().decode()) from error
        return json.loads(text) if text else None

    def queue(self, graph: dict[str, Any]) -> str:
        """Queues a graph and returns its id; one that is not valid is a `GraphError`."""
        return self.post("/prompt", {"prompt": graph})["prompt_id"]

    def finish(self, prompt: str, while_waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """What the graph put out, by node; `interrupted` is in it where it was stopped."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            entry = self.get(f"/history/{prompt}").get(prompt)
            if entry is not None:
                return self._outcome(entry)
            while_waiting()
            time.sleep(0.1)
        raise RuntimeError(f"the graph did not end in {PATIENCE} s:\n{self.text()[-4000:]}")

    def _outcome(self, entry: dict[str, Any]) -> dict[str, Any]:
        for kind, message in entry["status"]["messages"]:
            if kind == "execution_error":
                raise GraphError(f"{message['node_type']}: {message['exception_message']}")
            if kind == "execution_interrupted":
                return {**entry["outputs"], "interrupted": message}
        return entry["outputs"]

    def run(self, graph: dict[str, Any]) -> dict[str, Any]:
        """Queues a graph and waits for its end."""
        return self.finish(self.queue(graph))


class Graph(dict):
    """A graph in the API's form: `node = graph.add("KSampler", …)`, `node[0]` being its first output."""

    def add(self, kind: str, **inputs: Any) -> Node:
        name = str(len(self) + 1)
        self[name] = {"class_type": kind, "inputs": inputs}
        return Node(name)


class Node(str):
    """A node's id in a graph."""

    def __getitem__(self, output: int) -> list[Any]:  # type: ignore[override]
        return [str(self), output]
