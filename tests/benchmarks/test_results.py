"""The README's table of a training step is taken from the benchmark's results."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def cells(line):
    return [cell.strip().removesuffix(" ✗") for cell in line.strip("|").split("|")]


def results():
    """(model, table) → the rows of that table."""
    found, key = {}, None
    for line in (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"### (.*): (.*)", line):
            key = heading.groups()
        elif line.startswith("|"):
            found.setdefault(key, []).append(cells(line))
    return found


def test_the_readmes_step_of_comfyuis_node_is_the_results():
    """How many times Graft's its FLOPs, seconds and peak are: the least and the most of both models and all ways."""
    tables = [rows for (_, table), rows in results().items() if "TrainLoraNode" in table]
    assert len(tables) == 2
    ratios = {"GFLOP": [], "peak, MiB": [], "s/step": []}
    for head, _, *rows in tables:
        graft = {row[0]: row for row in rows if row[1] == "Graft"}
        for theirs in (row for row in rows if row[1] == "TrainLoraNode"):
            ours = graft[theirs[0].split(",")[0]]
            for column, found in ratios.items():
                index = head.index(column)
                found.append(float(theirs[index]) / float(ours[index]))
    (flops, _), (least, most), (fast, slow) = ((min(found), max(found)) for found in ratios.values())
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Beside ComfyUI's own training node")[1]
    words = (
        f"{flops:.2f} times Graft's FLOPs, {fast:.2f} to {slow:.2f} times the time and {least:.1f} to {most:.1f} times"
    )
    assert words in " ".join(section.split())


def test_the_readmes_step_is_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Beside diffusers + PEFT")[1].split("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if re.match(r"\| (Krea 2|Ideogram 4) ", line)]
    assert len(rows) == 4
    found = results()
    for model, way, *figures in rows:
        counts = {row[2]: row for row in found[model, "FLOPs and bytes"] if row[:2] == ["bf16", way]}
        times = {row[2]: row for row in found[model, "seconds per step"] if row[:2] == ["bf16", way]}
        ours, theirs = counts["Graft"], counts["diffusers + PEFT"]
        wanted = [ours[3], theirs[3], ours[5], theirs[5], ours[8], times["eager"][5], times["compiled"][5]]
        assert figures == wanted, (model, way)
    eight_bit = [
        row[5]
        for model in ("Krea 2", "Ideogram 4")
        for row in found[model, "seconds per step"]
        if row[0] == "int8, 8-bit products"
    ]
    same = [row for model in ("Krea 2", "Ideogram 4") for row in found[model, "the same numbers, in fp32"][2:]]
    assert len(same) == 4
    most = float(re.search(r"equal in fp32 to (\S+) ", " ".join(section.split()))[1])
    assert max(float(cell) for row in same for cell in row[1:3]) <= most
    assert f"a step takes {eight_bit[0]} and {eight_bit[1]} of theirs" in section
