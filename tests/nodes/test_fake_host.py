"""The fake host has the real one's functions: read off the source of nodes/host.py, which imports ComfyUI."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

NODES = Path(__file__).parents[2] / "nodes"
TREE = ast.parse((NODES / "host.py").read_text(encoding="utf-8"))
REAL = {entry.name: entry.args for entry in TREE.body if isinstance(entry, ast.FunctionDef)}


def test_every_function_that_nodes_call_is_the_hosts():
    called = set()
    for path in NODES.glob("*.py"):
        if path.name != "host.py":
            called |= set(re.findall(r"\bhost\.(\w+)", path.read_text(encoding="utf-8")))
    assert called
    assert called <= REAL.keys()


def test_the_fake_takes_the_hosts_arguments(graph):
    fakes = {name: thing for name, thing in vars(graph.host).items() if inspect.isfunction(thing)}
    assert fakes
    for name, fake in fakes.items():
        given = inspect.signature(inspect.unwrap(fake)).parameters
        wanted = REAL[name]
        names = [entry.arg for entry in wanted.args] + ([wanted.vararg.arg] if wanted.vararg else [])
        assert list(given) == names, name
