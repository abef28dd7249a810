"""What loading a base takes: time as a ratio to reading the file, and memory of the host.

    python benchmarks/load.py --family krea2 --blocks 4 --output benchmarks/RESULTS-load.md

Writes a synthetic bf16 file with that many blocks of the family's full width, then loads it at each precision, each
time in a process of its own, whose memory Linux reports. Needs Linux; deletes what it wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from graft_lora.trainer.base_model import PRECISIONS, load_base
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.ideogram4 import Ideogram4Config
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.formats import format_of
from graft_lora.trainer.quantization import quantize_model
from graft_lora.trainer.tensor_files import write_tensors
from torch import nn

GIB = 2**30
ALLOWED = 1.5 * GIB  # over the quantised size
CONFIGS = {
    "krea2": lambda blocks: Krea2Config(blocks=blocks),
    "ideogram4": lambda blocks: Ideogram4Config(layers=blocks),
}
COLUMNS = {
    "precision": "precision",
    "kept": "kept",
    "peak": "peak RSS",
    "anonymous": "of it RssAnon",
    "over": "peak − kept",
    "read": "read, s",
    "load": "load, s",
    "ratio": "load / read",
    "made": "load and keep, s",
    "cache_read": "read kept, s",
    "cache_copied": "read kept to new memory, s",
    "cache_load": "load kept, s",
    "cache_ratio": "load / read to new memory",
    "cache_over": "peak − kept",
}
LEGEND = """\
Each load has a process of its own, and both files are in the page cache throughout: each is read just before.
Memory in GiB; times are wall clock and, in brackets, CPU time. Ratios are of CPU times where the base goes to the CPU,
which other work on the machine disturbs less, and else of wall clock.

- **kept**: the loaded base, its buffers and parameters.
- **peak RSS**: the most memory of the process, above what it had with torch imported alone, as the kernel counts it
  (`VmHWM`): anonymous pages and pages of mapped files alike. Promised: at most kept + 1.5 GiB, where kept counts only
  if it is kept on the CPU.
- **RssAnon**: its anonymous part alone, sampled each 5 ms. That part cannot be given back; pages of a mapped file can,
  but count in RSS all the same.
- **read**: the file through one buffer of 16 MiB. **load**: `load_base`, without the imports of the first load in a
  process (torchao, torch's meta device), which take 2 to 4 s of CPU time whatever the size.
- the last columns: the same with `quantized_cache`, first making it, then from it. **to new memory**: the same file
  into memory that is not used again, which is what loading is at least: the system has to provide each page.
"""


@dataclass(frozen=True)
class Time:
    """Seconds."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} ({self.cpu:.1f})"

    def over(self, other: Time, device: str) -> float:
        return self.cpu / other.cpu if device == "cpu" else self.wall / other.wall


@contextmanager
def timed() -> Iterator[list[Time]]:
    """A list that holds the time of the block when it has ended."""
    times: list[Time] = []
    wall, cpu = time.perf_counter(), time.process_time()
    yield times
    times.append(Time(time.perf_counter() - wall, time.process_time() - cpu))


def synthetic(path: Path, family_name: str, blocks: int) -> None:
    """A base's file with random weights in bf16, of full width, written one tensor at a time."""
    family = FAMILIES[family_name]
    with torch.device("meta"):
        model = family.build(CONFIGS[family_name](blocks))
    layout = {name: (torch.bfloat16, tuple(value.shape)) for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    write_tensors(path, layout, lambda name: torch.randn(layout[name][1], generator=generator).mul_(0.02).bfloat16())


def read(path: Path) -> Time:
    """The time that reading the file takes, through one buffer."""
    buffer = memoryview(bytearray(2**24))
    with path.open("rb", buffering=0) as file, timed() as times:
        while file.readinto(buffer):
            pass
    return times[0]


def read_to_memory(path: Path) -> Time:
    """The time that reading the file takes, into memory of its size."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file, timed() as times:
        memory = torch.empty(size, dtype=torch.uint8).numpy().data
        for start in range(0, size, 2**24):
            file.readinto(memory[start : start + 2**24])
    return times[0]


def memory() -> dict[str, int]:
    """The process's memory in bytes, by Linux's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def measured(path: Path, precision: str, device: str, cache: str) -> dict[str, float]:
    """One load in this process: seconds, bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = memory()
    anonymous, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            anonymous[0] = max(anonymous[0], memory()["RssAnon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    quantize_model(nn.Sequential(nn.Linear(64, 64)), lambda name: format_of(precision))
    with torch.device("meta"):
        nn.Linear(1, 1)
    with timed() as times:
        base = load_base(path, precision, "bf16", device, quantized_cache=cache)
        if device != "cpu":
            torch.cuda.synchronize()
    done.set()
    watcher.join()
    print("\n".join(base.notes), file=sys.stderr)
    tensors = [*base.model.parameters(), *base.model.buffers()]
    return {
        **dataclasses.asdict(times[0]),
        "kept": sum(tensor.nbytes for tensor in tensors),
        "peak": memory()["VmHWM"] - before["VmRSS"],
        "anonymous": anonymous[0] - before["RssAnon"],
    }


def in_own_process(*arguments: str) -> tuple[Time, dict[str, float]]:
    command = [sys.executable, __file__, "--child", *arguments]
    values = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return Time(values.pop("wall"), values.pop("cpu")), values


def row(path: Path, precision: str, device: str, folder: Path) -> dict[str, str]:
    """One line of the table."""
    reading = [read(path), read(path)][1]
    loading, sizes = in_own_process(str(path), precision, device, "")
    on_host = sizes["kept"] if device == "cpu" else 0
    cells = dict.fromkeys(COLUMNS, "") | {"precision": precision, "read": str(reading), "load": str(loading)}
    cells |= {key: f"{sizes[key] / GIB:.2f}" for key in ("kept", "peak", "anonymous")}
    cells |= {"over": over(sizes["peak"] - on_host), "ratio": f"{loading.over(reading, device):.1f}"}
    if precision not in ("fp32", "bf16"):
        making, _ = in_own_process(str(path), precision, device, str(folder))
        (kept,) = folder.iterdir()
        _, reading, copying = read(kept), read(kept), read_to_memory(kept)
        loading, sizes = in_own_process(str(path), precision, device, str(folder))
        kept.unlink()
        cells |= {"made": str(making), "cache_read": str(reading), "cache_load": str(loading)}
        cells |= {"cache_copied": str(copying), "cache_ratio": f"{loading.over(copying, device):.2f}"}
        cells |= {"cache_over": over(sizes["peak"] - on_host)}
    return cells


def over(size: float) -> str:
    return f"{size / GIB:.2f}" + (" (too much)" if size > ALLOWED else "")


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *(list(cells.values()) for cells in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="krea2")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=["bf16", "fp8", "int8", "nf4"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary folder by default")
    parser.add_argument("--output", type=Path, help="the table is added to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        path, cache = Path(name) / "base.safetensors", Path(name) / "kept"
        synthetic(path, arguments.family, arguments.blocks)
        size = path.stat().st_size
        rows = [row(path, precision, arguments.device, cache) for precision in arguments.precision]
    title = f"{FAMILIES[arguments.family].title}, {arguments.blocks} blocks of full width"
    text = f"""\
## {title}, {size / GIB:.2f} GiB in bf16, on {arguments.device}

torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}

{table(rows)}

"""
    print(text)
    if arguments.output:
        start = "" if arguments.output.exists() else f"# benchmarks/load.py\n\n{LEGEND}\n"
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(start + text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        source, precision, device, cache = sys.argv[2:]
        print(json.dumps(measured(Path(source), precision, device, cache)))
    else:
        main()
