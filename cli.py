"""The command line: `graft demo`, `graft train`, `graft estimate`, `graft inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, or 2 after one line that says what is wrong."""
    parsed = _parser().parse_args(arguments)
    from .lora_convert.errors import LoraError
    from .trainer.errors import GraftError

    try:
        parsed.command(parsed)
    except (GraftError, LoraError, OSError) as error:
        print(f"graft: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("graft: stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graft", description="LoRA training for Krea 2 and Ideogram 4.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a LoRA on a tiny base that ships with Graft, without a GPU")
    demo.add_argument("--family", default="krea2", help="architecture: krea2 (the default) or ideogram4")
    demo.add_argument("--steps", type=int, help="training steps, fewer for a quick look")
    demo.add_argument("--output", type=Path, help="folder for the result (runs/demo-FAMILY)")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train a LoRA as a TOML file says")
    train.add_argument("--config", type=Path, required=True, help="the settings, see README")
    train.add_argument("--output", type=Path, help="the run's folder, instead of the one in the settings")
    train.add_argument("--resume", action="store_true", help="continue the stopped run in the output folder")
    train.set_defaults(command=_train)

    estimate = commands.add_parser("estimate", help="what a run will take on a card, before there is one")
    estimate.add_argument("--family", help="krea2 or ideogram4; both by default")
    estimate.add_argument("--card", type=float, nargs="+", metavar="GB", help="memory of the card (8 12 16 24)")
    estimate.add_argument("--host", type=float, default=24, metavar="GB", help="free main memory (24)")
    estimate.add_argument("--resolution", type=int, help="side of the pictures (1024; 512 for cards below 12 GB)")
    estimate.add_argument("--rank", type=int, default=32, help="rank of the LoRA (32)")
    estimate.add_argument("--precision", default="auto", help="fp32, bf16, fp8, int8, nf4 or auto (the default)")
    estimate.set_defaults(command=_estimate)

    inspect = commands.add_parser("inspect", help="what a LoRA file holds, and which programs would load it")
    inspect.add_argument("file", type=Path, metavar="FILE", help="a LoRA of any layout, safetensors")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.add_argument("--base", type=Path, metavar="MODEL", help="the base, where it is not of the published size")
    inspect.set_defaults(command=_inspect)
    return parser


def _demo(parsed: argparse.Namespace) -> None:
    from .examples.demo import demo

    demo(parsed.family, parsed.output, parsed.steps)


def _estimate(parsed: argparse.Namespace) -> None:
    from .trainer.estimate import CARDS, Question, rows, table
    from .trainer.families import FAMILIES, family_named

    families = [family_named(parsed.family)] if parsed.family else list(FAMILIES.values())
    question = Question(parsed.host, parsed.resolution, parsed.rank, parsed.precision)
    print(table(rows(families, parsed.card or CARDS, question)))


def _inspect(parsed: argparse.Namespace) -> None:
    import json

    from .lora_convert.inspect import inspect_file

    sizes = None
    if parsed.base:
        from .lora_convert.sizes import Sizes
        from .trainer.checkpoints import open_model_file

        model = open_model_file(parsed.base)
        sizes = Sizes.of(model.family.name, model.shapes)
    found = inspect_file(parsed.file, sizes)
    print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) if parsed.json else found.text())


def _train(parsed: argparse.Namespace) -> None:
    from .examples.demo_parts import base_path, encoders
    from .trainer.checkpoints import open_model_file
    from .trainer.errors import SettingsError
    from .trainer.families import FAMILIES
    from .trainer.run import run
    from .trainer.settings import read_settings

    settings = read_settings(parsed.config)
    if parsed.output:
        settings = dataclasses.replace(settings, output=str(parsed.output))
    found = None
    if settings.dataset.encoders == "demo":
        name, path = settings.model.family, settings.model.path
        if not name and not path:
            raise SettingsError('the base is missing: give [model] family = "krea2" or "ideogram4"')
        family = FAMILIES[name] if name else open_model_file(path).family
        found = encoders(family)
        if not path:
            model = dataclasses.replace(settings.model, path=str(base_path(family)))
            settings = dataclasses.replace(settings, model=model)
    result = run(settings, found, resume=parsed.resume)
    print(f"LoRA: {result.lora}")
    print(f"log, loss plot and previews: {result.folder}")


if __name__ == "__main__":
    sys.exit(main())
