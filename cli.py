"""The command line: `graft demo`, `graft train`, `graft estimate`, `graft convert`, `graft inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lora_convert.convert import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, or 2 after one line that says what is wrong.

    1 where some of many files could not be converted.
    """
    parsed = _parser().parse_args(arguments)
    from .lora_convert.errors import LoraError
    from .trainer.errors import GraftError

    try:
        return parsed.command(parsed) or 0
    except (GraftError, LoraError, OSError) as error:
        print(f"graft: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("graft: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graft", description="LoRA training for Krea 2 and Ideogram 4.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a LoRA on a tiny base that ships with Graft, without a GPU")
    demo.add_argument("--family", default="krea2", help="architecture: krea2 (the default) or ideogram4")
    demo.add_argument("--steps", type=int, help="training steps, fewer for a quick look")
    demo.add_argument("--output", type=Path, help="folder for the result (runs/demo-FAMILY)")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train a LoRA as a TOML file says")
    train.add_argument("--config", type=Path, help="the settings, see README")
    train.add_argument("--output", type=Path, help="the run's folder, instead of the one in the settings")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the stopped run in the output folder, by its own settings where no others are given",
    )
    train.set_defaults(command=_train)

    estimate = commands.add_parser("estimate", help="what a run will take on a card, before there is one")
    estimate.add_argument("--family", help="krea2 or ideogram4; both by default")
    estimate.add_argument("--card", type=float, nargs="+", metavar="GB", help="memory of the card (8 12 16 24)")
    estimate.add_argument("--host", type=float, default=24, metavar="GB", help="free main memory (24)")
    estimate.add_argument("--resolution", type=int, help="side of the pictures (1024; 512 for cards below 12 GB)")
    estimate.add_argument("--rank", type=int, default=32, help="rank of the LoRA (32)")
    estimate.add_argument("--precision", default="auto", help="fp32, bf16, fp8, int8, nf4, mxfp8 or auto (the default)")
    estimate.set_defaults(command=_estimate)

    convert = commands.add_parser("convert", help="bring a LoRA file, or a folder of them, into another layout")
    convert.add_argument("source", type=Path, help="a safetensors file, or a folder")
    convert.add_argument("target", type=Path, help="the new file, or folder")
    convert.add_argument("--to", required=True, metavar="LAYOUT", help="comfyui, diffusers, kohya, ai-toolkit, …")
    convert.add_argument("--rank", type=int, help="bring every module to this rank; by default nothing is lost")
    convert.add_argument("--dtype", help="bf16, fp16 or fp32; by default as in the source")
    convert.add_argument("--base", type=Path, help="the base model's file, which some DoRAs ask for")
    convert.add_argument("--bake", action="store_true", help="make a DoRA the full change that it is to --base")
    convert.add_argument("--report", type=Path, metavar="JSON", help="write the comparison of every module there")
    convert.add_argument("--skip-unknown", action="store_true", help="leave out, by name, keys that are not understood")
    convert.add_argument("--force", action="store_true", help="replace what is at the target")
    convert.set_defaults(command=_convert)

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


def _convert(parsed: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .lora_convert.convert import Report, check_options, convert_file, convert_folder, files_of

    check_options(parsed.to, parsed.rank, parsed.dtype)
    options = {"rank": parsed.rank, "dtype": parsed.dtype, "bake": parsed.bake, "force": parsed.force}
    options["skip_unknown"] = parsed.skip_unknown
    if parsed.base:
        from .trainer.checkpoints import converter_options

        options |= converter_options(parsed.base)
    if parsed.report:
        _check_report(parsed.report, parsed.source, parsed.target, parsed.force)
    results: dict[str, Report | Exception] = {}
    if parsed.source.is_dir():
        count = len(files_of(parsed.source, parsed.target))
        found = convert_folder(parsed.source, parsed.target, parsed.to, **options)
        for name, result in tqdm(found, total=count, unit="file", dynamic_ncols=True):
            results[str(name)] = result
            if isinstance(result, Exception):
                tqdm.write(f"{name}: {result}", file=sys.stderr)
    else:
        results[str(parsed.source)] = convert_file(parsed.source, parsed.target, parsed.to, **options)
    reports = {name: result for name, result in results.items() if isinstance(result, Report)}
    for name, report in reports.items():
        print(_said(name, report))
    if parsed.report:
        _write_report(parsed.report, results)
    if len(reports) < len(results):
        print(f"{len(results) - len(reports)} of {len(results)} files were not converted", file=sys.stderr)
    return 0 if len(reports) == len(results) else 1


def _check_report(report: Path, source: Path, target: Path, force: bool) -> None:
    """Before anything is converted: the report's place is its own, and can be written to."""
    from .lora_convert.errors import LoraError

    if report.suffix == ".safetensors" or report.resolve() in (source.resolve(), target.resolve()):
        raise LoraError(f"the report {report} is a LoRA's place; give it a name of its own, such as r.json")
    if not report.resolve().parent.is_dir():
        raise LoraError(f"the report {report} cannot be written: there is no folder {report.parent}; make it first")
    if report.exists() and not force:
        raise FileExistsError(f"{report} exists already; give another name, or --force to replace it")


def _said(name: str, report: Report) -> str:
    first, *others = report.lines()
    lines = [f"{name}: {first}", *(f"  {line}" for line in others)]
    if report.truncation is not None:
        lines[-1] += "; by module:"
        lines += [f"    {m.name}: {m.truncation:.2%}" for m in report.modules if m.truncation is not None]
    lines += [f"  {note}" for note in report.notes]
    return "\n".join([*lines, *(f"    left out: {key}" for key in report.left_out)])


def _write_report(path: Path, results: Mapping[str, Report | Exception]) -> None:
    from .lora_convert.files import atomic_file

    content = {
        name: {"error": str(result)} if isinstance(result, Exception) else result.as_dict()
        for name, result in results.items()
    }
    with atomic_file(path, overwrite=True) as temporary:  # `_check_report` has looked
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _inspect(parsed: argparse.Namespace) -> None:
    from .lora_convert.inspect import inspect_file
    from .trainer.checkpoints import converter_options

    found = inspect_file(parsed.file, converter_options(parsed.base)["sizes"] if parsed.base else None)
    print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) if parsed.json else found.text())


def _train(parsed: argparse.Namespace) -> None:
    from .examples.demo_parts import base_path, encoders
    from .trainer.checkpoints import open_model_file
    from .trainer.errors import SettingsError
    from .trainer.families import FAMILIES
    from .trainer.run import run
    from .trainer.settings import read_settings, resume_settings

    if parsed.config:
        settings = read_settings(parsed.config)
        if parsed.output:
            settings = dataclasses.replace(settings, output=str(parsed.output))
    elif parsed.resume and parsed.output:
        settings = resume_settings(parsed.output)
        if settings.preview.prompts and not settings.dataset.encoders:
            print("no more previews: they need the VAE and the text encoder that the run was begun with, in ComfyUI")
            settings = dataclasses.replace(settings, preview=dataclasses.replace(settings.preview, prompts=()))
    else:
        raise SettingsError("give the settings by --config FILE, or a run to continue by --output FOLDER --resume")
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
