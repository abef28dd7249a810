"""The README's table beside ComfyUI's TrainLoraNode is what its script measures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stock_node

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "stock_node.py"
# A share, a size in memory and a fraction may differ from one machine to another; words, counts and errors may not.
MEASURED = re.compile(r"\d+(?:\.\d+| MiB|%)")


def rows(text):
    """The table's rows: words with a sign in place of each figure, and the figures."""
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return [
        (MEASURED.sub("#", line), [float(re.match(r"[\d.]+", x)[0]) for x in MEASURED.findall(line)]) for line in lines
    ]


def run(*arguments, **environment):
    variables = {key: value for key, value in os.environ.items() if key != "COMFYUI_PATH"} | environment
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def test_the_readme_holds_what_the_script_measures(tmp_path):
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.skip("needs a ComfyUI: set COMFYUI_PATH to its folder")
    done = run("--results", str(tmp_path / "results.md"), COMFYUI_PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (tmp_path / "results.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Beside ComfyUI's own training node")[1].split("\n## ")[0]
    wanted, found = rows(section), rows(done.stdout)
    assert len(wanted) == 11
    assert [words for words, _ in found] == [words for words, _ in wanted]
    for (words, new), (_, kept) in zip(found, wanted, strict=True):
        # Half a unit of the last digit, which is a percent, a MiB or a thousandth, may be rounded either way.
        assert new == pytest.approx(kept, rel=0.1, abs=0.002), words


def test_the_readme_and_the_results_are_one_table():
    readme, results = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "benchmarks/RESULTS-stock-node.md")
    )
    table = results[results.index("| ") :].strip()
    assert table in readme


@pytest.mark.parametrize(("where", "said"), [(None, "COMFYUI_PATH is not set"), ("nowhere", "has no comfy_extras")])
def test_without_a_comfyui_the_script_says_what_it_wants(monkeypatch, where, said):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    if where:
        monkeypatch.setenv("COMFYUI_PATH", where)
    with pytest.raises(SystemExit, match=said):
        stock_node.main()
