"""Converting full-size LoRAs beside reading and rewriting the same file with safetensors alone.

    python benchmarks/convert.py [--results benchmarks/RESULTS-convert.md]

Krea 2 with all 264 modules at rank 32, Ideogram 4's blocks at rank 128, both in bf16, random. Each figure has a process
of its own; times are wall clock, on a warm page cache, and the best of three, taken by turns; memory is the rise of
`VmHWM` over a process that has imported what it needs. Both the rewriting and the conversion end with the file on the
disk (fsync), since a conversion never ends earlier: without it the rewriting would be of a file that a power cut takes.
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
# Of a conversion: times the rewriting alone; seconds and memory with verification; seconds for a chosen rank.
MOST_TIMES, MOST_SECONDS, MOST_RANK_SECONDS, SPARE = 3.0, 10.0, 60.0, 256 * MIB
CASES = (
    # file, family, source, target
    ("krea2", "comfyui", "diffusers"),
    ("krea2", "comfyui", "kohya"),
    ("ideogram4", "comfyui", "diffusers"),
    ("ideogram4", "comfyui", "kohya"),
)


def make(family: str, path: Path) -> None:
    """A LoRA in ComfyUI's layout: rank 32 on every Linear of Krea 2, rank 128 on those of Ideogram 4's blocks."""
    import torch
    from graft_lora.lora_convert import Sizes
    from safetensors.torch import save_file

    rank = 32 if family == "krea2" else 128
    sizes, generator = Sizes.published(family), torch.Generator().manual_seed(0)
    state = {}
    for name in sizes.modules():
        block = name.startswith("layers.") and "adaln" not in name
        if len(sizes.shape(name)) == 2 and (family == "krea2" or block) and "indicator" not in name:
            out, columns = sizes.shape(name)
            down, up = torch.randn(rank, columns, generator=generator), torch.randn(out, rank, generator=generator)
            state[f"diffusion_model.{name}.lora_down.weight"] = down.bfloat16()
            state[f"diffusion_model.{name}.lora_up.weight"] = up.bfloat16()
            state[f"diffusion_model.{name}.alpha"] = torch.tensor(float(rank))
    save_file(state, path, {"format": "pt"})


def child(what: str, source: Path, target: Path, layout: str) -> None:
    """Does one thing, and prints seconds and bytes."""
    from graft_lora.lora_convert import convert_file, open_lora, read_lora, write_lora, write_state
    from safetensors import safe_open
    from safetensors.torch import save_file

    before = peak()
    started = time.perf_counter()
    if what == "rewrite":
        with safe_open(source, framework="pt") as file:
            save_file({key: file.get_tensor(key) for key in file.keys()}, target)  # noqa: SIM118
        with target.open("rb+") as written:
            os.fsync(written.fileno())
    elif what == "convert":
        state, metadata = open_lora(source)
        written = write_lora(read_lora(state, metadata), layout)
        write_state(target, written.state, written.metadata)
    else:
        convert_file(source, target, layout, rank=16 if what == "rank" else None)
    print(json.dumps([time.perf_counter() - started, peak() - before]))


def peak() -> int:
    """The most memory that the process had so far, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(what: str, source: Path, folder: Path, layout: str) -> tuple[float, int]:
    target = folder / "out.safetensors"
    target.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", what, str(source), str(target), layout]
    seconds, memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, memory


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, help="write the table there")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        what, source, target, layout = parsed.child
        child(what, Path(source), Path(target), layout)
        return 0
    lines = [
        "| file | to | rewriting alone, synced | conversion | × | with verification | peak memory | at rank 16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in ("krea2", "ideogram4"):
            make(family, folder / f"{family}.safetensors")
        for family, _, layout in CASES:
            source = folder / f"{family}.safetensors"
            size = source.stat().st_size
            # By turns, so that what else the machine does falls on both; the first brings the file into the page cache.
            turns = [[measure(what, source, folder, layout)[0] for what in ("rewrite", "convert")] for _ in range(3)]
            alone, plain = (min(times) for times in zip(*turns, strict=True))
            verified, memory = measure("verify", source, folder, layout)
            ranked = measure("rank", source, folder, layout)[0]
            lines.append(
                f"| {family}, {size / MIB:.0f} MiB | {layout} | {alone:.2f} s | {plain:.2f} s | {plain / alone:.1f} | "
                f"{verified:.1f} s | {memory / MIB:.0f} MiB | {ranked:.0f} s |"
            )
            targets = {
                "conversion": plain <= MOST_TIMES * alone,
                "verification": verified <= MOST_SECONDS,
                "memory": memory <= 2 * size + SPARE,
                "rank": ranked <= MOST_RANK_SECONDS,
            }
            missed += [f"{family} to {layout}: {what}" for what, met in targets.items() if not met]
    table = "\n".join(lines)
    print(table)
    print("missed: " + "; ".join(missed) if missed else "every target is met")
    if parsed.results:
        text = f"# benchmarks/convert.py\n\n{__doc__.split(chr(10) * 2)[2].strip()}\n\n{table}\n"
        parsed.results.write_text(text, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
