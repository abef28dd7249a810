"""`python -m graft_lora …`, and `python <folder of this pack> …` from a bare clone, whatever the folder is called."""

import sys


def _as_package() -> None:
    """Makes the folder importable as `graft_lora` where it is run as a plain folder."""
    import importlib.util
    from pathlib import Path

    here = Path(__file__).resolve().parent
    # Python puts the folder itself on the path; its `nodes` and `trainer` must not pass for top-level modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.util.spec_from_file_location(
        "graft_lora", here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["graft_lora"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    if not __package__:
        _as_package()
    from graft_lora.cli import main

    sys.exit(main())
