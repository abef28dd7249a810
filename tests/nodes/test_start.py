"""ComfyUI's start: what importing the pack may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A ComfyUI of which every attribute is there and nothing works.
START = """
import sys
from unittest.mock import MagicMock

sys.path.insert(0, sys.argv[1])
import stand_in

sys.modules.update(stand_in.modules())
names = "ldm ldm.common_dit lora model_base model_management model_patcher patcher_extension quant_ops"
names += " supported_models utils cli_args"
comfy = sys.modules["comfy"] = MagicMock()
for name in names.split():
    sys.modules[f"comfy.{name}"] = getattr(comfy, name.rpartition(".")[2])
comfy.model_patcher.ModelPatcher = object
for name in ("aiohttp", "folder_paths", "server"):
    sys.modules[name] = MagicMock()
sys.modules["folder_paths"].get_input_directory.return_value = sys.argv[1]

import asyncio

import graft_lora

extension = asyncio.run(graft_lora.comfy_entrypoint())
asyncio.run(extension.on_load())
for node in asyncio.run(extension.get_node_list()):
    node.define_schema()
settings = {node.__name__: node for node in asyncio.run(extension.get_node_list())}["LoraSettingsNode"]
assert settings.validate_inputs("lora", False, -1) is True  # ComfyUI's server asks it, and answers nobody meanwhile
slow = {"peft", "torchao", "matplotlib", "transformers", "diffusers", "accelerate"}
print(sorted(slow & sys.modules.keys()))
"""


def test_comfyuis_start_waits_for_no_library_that_takes_seconds():
    """PEFT brings torchao, transformers and accelerate: five seconds in which ComfyUI does not start."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(Path(__file__).parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
