"""Tests against a real ComfyUI: `COMFYUI_PATH=<its folder> pytest tests/comfyui`, with the Python that it runs on.

Without that variable they are skipped and say so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `server` and `page`


@pytest.fixture(scope="session")
def comfy():
    """ComfyUI's own package, on the CPU."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.skip("needs a ComfyUI: set COMFYUI_PATH to its folder")
    sys.path.insert(0, path)
    arguments, sys.argv = sys.argv, ["main.py", "--cpu"]
    try:
        # It reads its arguments from the command line at import.
        import comfy.options

        comfy.options.enable_args_parsing(True)
        import comfy.lora
        import comfy.model_base
    finally:
        sys.argv = arguments
        sys.path.remove(path)
    return comfy


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of that ComfyUI with this pack in it, for all of a session's graphs."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.skip("needs a ComfyUI: set COMFYUI_PATH to its folder")
    from server import Server

    running = Server(Path(path), tmp_path_factory.mktemp("comfyui"))
    yield running
    running.stop()
