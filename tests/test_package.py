"""The pack as ComfyUI and pip find it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_requirements_never_touch_what_comfyui_owns_and_pin_nothing():
    """ComfyUI-Manager blocks packs that do."""
    for requirement in requirements():
        assert requirement.name not in {"torch", "torchvision", "torchaudio", "torchsde"}
        assert {specifier.operator for specifier in requirement.specifier} <= {">="}


def test_requirements_are_the_project_dependencies_less_what_comfyui_brings():
    brought = {"torch", "numpy", "pillow", "tqdm"}
    project = {str(Requirement(d)) for d in PROJECT["project"]["dependencies"]}
    assert {str(r) for r in requirements()} == {d for d in project if Requirement(d).name not in brought}


def test_development_is_pinned_to_this_torch():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin) for pin in pins if not pin.startswith("#"))


def test_every_package_folder_is_packaged():
    folders = {p.parent.relative_to(ROOT) for p in ROOT.glob("[!.]*/**/__init__.py")} - {Path("tests")}
    folders = {f for f in folders if f.parts[0] in {"nodes", "trainer", "lora_convert", "examples"}}
    wanted = {"graft_lora", *(".".join(("graft_lora", *folder.parts)) for folder in folders)}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == wanted


def test_demonstration_files_are_small_enough():
    bases = list((ROOT / "examples").glob("*-demo-base.safetensors"))
    assert len(bases) == 2
    assert all(base.stat().st_size <= 8_000_000 for base in bases)


@pytest.mark.parametrize("module", ["graft_lora", "graft_lora.nodes"])
def test_the_entrance_imports_nothing_heavy(module):
    """ComfyUI imports every pack at start-up, and pytest the root package."""
    code = f"import sys, {module}; print([m for m in ('torch', 'peft', 'comfy', 'torchao') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_host_file_touches_comfyui():
    pattern = re.compile(r"^\s*(from|import) (comfy|folder_paths|server)\b", re.MULTILINE)
    for path in ROOT.glob("[!.]*/**/*.py"):
        # A benchmark may measure ComfyUI itself.
        if not {"tests", "benchmarks"} & set(path.parts) and path != ROOT / "nodes" / "host.py":
            assert not pattern.search(path.read_text()), path


def test_no_branch_on_a_family_name_outside_its_place():
    pattern = re.compile(r"""(==|!=|\bin)\s*[(\[{]?\s*["'](krea2|ideogram4)["']""")
    for folder in ("trainer", "nodes", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name != "families":
                assert not pattern.search(path.read_text()), path


def test_the_readme_names_the_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text()
    for command in ("python -m pip install nox && nox -s demo", "nox -s tests"):
        assert command in readme
    assert "nox -s tests" in (ROOT / ".ci" / "run").read_text()
