"""`nox -s demo`, `nox -s tests` and the checks of CI, each from nothing."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "venv"
CONSTRAINTS = "constraints.txt"


def install(session: nox.Session, *what: str) -> None:
    # Compiling every file of torch and its companions takes longer than compiling, as they are imported, those in use.
    session.install("--no-compile", "-c", CONSTRAINTS, *what)


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a LoRA on the tiny base that ships with Graft and says what it learned."""
    install(session, "-e", ".")
    session.run("graft", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite."""
    install(session, "-e", ".[dev]")
    arguments = session.posargs or ["-n", "2", "--dist", "loadgroup"]
    session.run("pytest", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, the layers, and what ComfyUI's registry asks for."""
    install(session, "-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-logo")
    # mypy does not follow an editable install whose root is the package: it is shown the package by its name.
    package = Path(session.create_tmp()) / "graft_lora"
    if not package.is_symlink():
        package.symlink_to(Path.cwd(), target_is_directory=True)
    session.run("mypy", env={"MYPYPATH": str(package.parent)})
    validate(session)


def validate(session: nox.Session) -> None:
    """`comfy node validate` exits with 0 on warnings, so what it prints is read."""
    # Without a home of its own comfy-cli asks on first use whether it may send statistics.
    environment = {"HOME": session.create_tmp(), "PATH": os.environ["PATH"]}
    command = ("comfy", "--skip-prompt", "--no-enable-telemetry", "node", "validate")
    printed = str(session.run(*command, silent=True, env=environment))
    print(printed)
    if "All validation checks passed" not in printed or "warning" in printed.lower():
        session.error("comfy node validate has warnings")
