"""Memory of the host while a base is loaded: what is kept and little more, not the file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.tensor_files import write_tensors

# In a process of its own, so that nothing else's memory is counted. A first load of nothing does all the imports.
CHILD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.formats import format_of
from graft_lora.trainer.quantization import quantize_model

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

source, precision, cache, tiny = sys.argv[1:]
torch.set_num_threads(1)
load_base(tiny, precision, "bf16", "cpu", quantized_cache=cache)
Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
before = memory("VmRSS")
base = load_base(source, precision, "bf16", "cpu", quantized_cache=cache)
kept = sum(tensor.nbytes for tensor in [*base.model.parameters(), *base.model.buffers()])
print(json.dumps({"peak": memory("VmHWM") - before, "kept": kept, "notes": base.notes}))
"""
MIB = 2**20
CONFIG = Krea2Config(
    width=2048, heads=16, kv_heads=4, mlp=5504, blocks=3, text_width=64, text_layers=3, text_heads=2, text_kv_heads=2,
    text_mlp=64,
)  # fmt: skip


def written(path, config):
    with torch.device("meta"):
        model = FAMILIES["krea2"].build(config)
    layout = {name: (torch.bfloat16, tuple(value.shape)) for name, value in model.named_parameters()}
    write_tensors(path, layout, lambda name: torch.full(layout[name][1], 0.5, dtype=torch.bfloat16))
    return max(math.prod(shape) * 2 for _, shape in layout.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read as Linux reports it")
@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_loading_takes_the_quantised_size_and_little_more(tmp_path, precision):
    """A mapped file of 344 MiB would count as memory whole, beside the quantised base."""
    source, tiny, cache = tmp_path / "base.safetensors", tmp_path / "tiny.safetensors", tmp_path / "kept"
    largest = written(source, CONFIG)
    written(tiny, Krea2Config(width=256, heads=2, kv_heads=1, mlp=256, blocks=1, text_width=64, text_layers=3,
                              text_heads=2, text_kv_heads=2, text_mlp=64))  # fmt: skip
    size = source.stat().st_size
    for word in ("is kept for the next time", "was read from"):
        command = [sys.executable, "-c", CHILD, str(source), precision, str(cache), str(tiny)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        assert any(word in note for note in found["notes"]), found["notes"]
        # The tensor that is read, and its dense copy where it is one; the quantiser's pieces. At full size the largest
        # tensor takes 0.5 GiB.
        allowed = 2 * largest + 48 * MIB
        assert allowed < size / 2  # or a mapped file would not be seen
        assert found["peak"] <= found["kept"] + allowed, f"{(found['peak'] - found['kept']) / MIB:.0f} MiB over"
