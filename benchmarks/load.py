"""What loading a base takes: time as a ratio to reading the file, and memory of the host.

    python benchmarks/load.py --family krea2 --blocks 4 --output benchmarks/RESULTS-load.md

Writes a synthetic bf16 file with that many blocks of the family's full width, then loads it at each precision, each
time in a process of its own, whose memory Linux reports. Needs Linux; deletes what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from graft_lora.trainer.base_model import PRECISIONS, load_base
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.ideogram4 import Ideogram4Config
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.tensor_files import write_tensors

GIB = 2**30
ALLOWED = 1.5 * GIB  # over the quantised size
CONFIGS = {
    "krea2": lambda blocks: Krea2Config(blocks=blocks),
    "ideogram4": lambda blocks: Ideogram4Config(layers=blocks),
}
COLUMNS = (
    ("precision", "precision"),
    ("kept", "kept"),
    ("peak", "peak RSS"),
    ("anonymous", "of it RssAnon"),
    ("over", "peak − kept"),
    ("read", "read"),
    ("load", "load"),
    ("ratio", "load / read"),
    ("cache_write", "load and keep"),
    ("cache_read", "read kept"),
    ("cache_load", "load kept"),
    ("cache_ratio", "load / read"),
    ("cache_over", "peak − kept"),
)
LEGEND = """\
Each row is a process of its own for each time; both files are in the page cache throughout (each is read once before).
**kept**: the loaded base, its buffers and parameters. **peak RSS**: the most memory of the process during loading, above
what it had before (torch imported, torchao not yet), as the kernel counts it (`VmHWM`): anonymous pages and pages of
mapped files alike. **RssAnon**: its anonymous part alone (sampled each 5 ms), which cannot be given back; the pages of a
mapped file can, but they count in RSS all the same. Promised: peak RSS at most kept + 1.5 GiB. **read**: the file
through one buffer of 16 MiB. **load**: `load_base`. The last five columns: the same with `quantized_cache`, first making
it, then from it. Times are seconds, memory is GiB."""


def synthetic(path: Path, family_name: str, blocks: int) -> None:
    """A base's file with random weights in bf16, of full width, written one tensor at a time."""
    family = FAMILIES[family_name]
    with torch.device("meta"):
        model = family.build(CONFIGS[family_name](blocks))
    layout = {name: (torch.bfloat16, tuple(value.shape)) for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    write_tensors(path, layout, lambda name: torch.randn(layout[name][1], generator=generator).mul_(0.02).bfloat16())


def read(path: Path) -> float:
    """Seconds that reading the file takes."""
    buffer = memoryview(bytearray(2**24))
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


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
    start = time.perf_counter()
    base = load_base(path, precision, "bf16", device, cache)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print("\n".join(base.notes), file=sys.stderr)
    tensors = [*base.model.parameters(), *base.model.buffers()]
    return {
        "seconds": seconds,
        "kept": sum(tensor.nbytes for tensor in tensors),
        "peak": memory()["VmHWM"] - before["VmRSS"],
        "anonymous": anonymous[0] - before["RssAnon"],
    }


def in_own_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def row(path: Path, precision: str, device: str, folder: Path) -> dict[str, str]:
    """One line of the table."""
    cells = {"precision": precision}
    read(path)
    seconds = read(path)
    plain = in_own_process(str(path), precision, device, "")
    on_host = plain["kept"] if device == "cpu" else 0
    cells |= {key: f"{plain[key] / GIB:.2f}" for key in ("kept", "peak", "anonymous")}
    cells |= {"over": _over(plain["peak"] - on_host), "read": f"{seconds:.1f}", "load": f"{plain['seconds']:.1f}"}
    cells["ratio"] = f"{plain['seconds'] / seconds:.1f}"
    if precision in ("fp32", "bf16"):
        return cells | dict.fromkeys(("cache_write", "cache_read", "cache_load", "cache_ratio", "cache_over"), "")
    made = in_own_process(str(path), precision, device, str(folder))
    (kept,) = folder.iterdir()
    read(kept)
    seconds = read(kept)
    again = in_own_process(str(path), precision, device, str(folder))
    kept.unlink()
    cells |= {"cache_write": f"{made['seconds']:.1f}", "cache_read": f"{seconds:.1f}"}
    cells |= {"cache_load": f"{again['seconds']:.1f}", "cache_ratio": f"{again['seconds'] / seconds:.2f}"}
    return cells | {"cache_over": _over(again["peak"] - on_host)}


def _over(size: float) -> str:
    return f"{size / GIB:.2f}" + (" (too much)" if size > ALLOWED else "")


def table(rows: list[dict[str, str]]) -> str:
    lines = [[title for _, title in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[cells[key] for key, _ in COLUMNS] for cells in rows]
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
    text = (
        f"## {FAMILIES[arguments.family].title}, {arguments.blocks} blocks of full width, {size / GIB:.2f} GiB in bf16, "
        f"on {arguments.device}\n\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f}\n\n{table(rows)}\n\n"
    )
    print(text)
    if arguments.output:
        start = "" if arguments.output.exists() else f"# benchmarks/load.py\n\n{LEGEND}\n\n"
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(start + text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        source, precision, device, cache = sys.argv[2:]
        print(json.dumps(measured(Path(source), precision, device, cache)))
    else:
        main()
