"""The README's table of producers and readers is what its script prints."""

from __future__ import annotations

from pathlib import Path

from graft_lora.examples.compatibility import LAYOUTS, table
from graft_lora.lora_convert.writing import LAYOUTS as WRITTEN

README = Path(__file__).parents[2] / "README.md"


def test_readme_holds_what_the_script_prints():
    """And each file is loaded fully by each reader, once it is converted for it."""
    found = table()
    assert f"\n{found}\n" in README.read_text(encoding="utf-8")
    rows = [line.split(" | ")[2:] for line in found.splitlines()[2:]]
    assert len(rows) > 30
    assert all(cell.removesuffix(" |").split(" → ")[-1].startswith("fully") for row in rows for cell in row)


def test_every_layout_that_is_written_has_a_reader():
    assert set(LAYOUTS.values()) == set(WRITTEN)
