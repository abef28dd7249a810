"""The command line as a person uses it: what it makes, and one clear line for each thing that is wrong."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from graft_lora.cli import main
from graft_lora.examples.demo import draw_folder
from graft_lora.examples.demo_parts import base_path
from graft_lora.lora_convert import read_state
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.samples import Sample, write_sample
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pictures(tmp_path):
    draw_folder(tmp_path / "pictures", seed=0, zorbs=3, known=2)
    return tmp_path / "pictures"


def config(tmp_path, **changes):
    """A run of three steps with the demonstration parts; `section__name` changes a setting, None removes it."""
    values = {
        "model": {"family": "krea2", "precision": "fp32", "compute_dtype": "fp32"},
        "dataset": {"pictures": "pictures", "encoders": "demo", "resolution": 64},
        "lora": {"rank": 2, "alpha": 2},
        "train": {"steps": 3, "learning_rate": 1e-3},
    }
    top = {name: changes.pop(name) for name in ("output", "name") if name in changes}
    for key, value in changes.items():
        section, name = key.split("__")
        if value is None:
            values[section].pop(name)
        else:
            values.setdefault(section, {})[name] = value
    lines = [f"{name} = {json.dumps(value)}" for name, value in top.items()]
    for section, entries in values.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in entries.items())]
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines))
    return path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("family", ["krea2", "ideogram4"])
def test_train_on_a_folder_of_pictures(tmp_path, pictures, family, capsys):
    path = config(tmp_path, model__family=family, preview__prompts=["a large zorb"], preview__steps=2)
    assert main(["train", "--config", str(path)]) == 0
    folder = tmp_path / "runs" / "run"
    assert files(folder) == [
        "config.json",
        "log.jsonl",
        "loss.png",
        "preview.png",
        "previews",
        "previews/000000.png",
        "previews/000003.png",
        "previews/strip.png",
        "run.safetensors",
        "state",
        "state/state.pt",
    ]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] > 0 for line in lines)
    assert json.loads((folder / "config.json").read_text())["lora"]["rank"] == 2
    for name in ("loss.png", "preview.png"):
        Image.open(folder / name).verify()
    assert str(folder / "run.safetensors") in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8", "nf4"])
def test_train_on_a_cache_with_any_model_file(tmp_path, family_name, precision):
    family = FAMILIES[family_name]
    tiny.write(tiny.build(family_name), tmp_path / "my base.safetensors", torch.bfloat16)
    (tmp_path / "cache").mkdir()
    for index in range(3):
        latents = torch.randn(tiny.LATENTS[family_name])
        sample = Sample(f"{index}", "a", latents, torch.randn(2 + index, tiny.WIDTHS[family_name]))
        write_sample(tmp_path / "cache", sample, family)
    path = config(
        tmp_path, model__path="my base.safetensors", model__family=None, model__precision=precision,
        model__compute_dtype="bf16", dataset__pictures=None, dataset__encoders=None, dataset__cache="cache",
        train__batch_size=2,
    )  # fmt: skip
    assert main(["train", "--config", str(path), "--output", str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == [
        "config.json",
        "log.jsonl",
        "loss.png",
        "out.safetensors",
        "state",
        "state/state.pt",
    ]


def test_a_run_goes_on_by_its_own_settings_wherever_its_folder_is(tmp_path, capsys):
    """As `train --output RUN --resume` does for one that ComfyUI began, whose VAE is not here."""
    family = FAMILIES["krea2"]
    tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors", torch.bfloat16)
    (tmp_path / "cache").mkdir()
    sample = Sample("a", "a", torch.randn(tiny.LATENTS["krea2"]), torch.randn(2, tiny.WIDTHS["krea2"]))
    write_sample(tmp_path / "cache", sample, family)
    path = config(
        tmp_path, model__path="base.safetensors", model__family=None, dataset__pictures=None, dataset__encoders=None,
        dataset__cache="cache", train__steps=2,
    )  # fmt: skip
    assert main(["train", "--config", str(path), "--output", str(tmp_path / "out")]) == 0
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    settings = json.loads((moved / "config.json").read_text())
    settings["train"]["steps"] = 4
    settings["preview"]["prompts"] = ["made in ComfyUI"]
    (moved / "config.json").write_text(json.dumps(settings))
    assert main(["train", "--output", str(moved), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "continuing after step 2" in out
    assert "no more previews: they need the VAE" in out
    assert len((moved / "log.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "out").exists()
    (moved / "config.json").write_text("{")
    assert main(["train", "--output", str(moved), "--resume"]) == 2
    assert "config.json is damaged" in capsys.readouterr().err
    assert main(["train", "--output", str(tmp_path / "cache"), "--resume"]) == 2
    assert "holds no run that could be continued" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--resume"], ["--output", "x"]])
def test_train_without_settings_says_what_it_wants(arguments, capsys):
    assert main(["train", *arguments]) == 2
    assert "give the settings by --config FILE, or a run to continue by --output FOLDER --resume" in (
        capsys.readouterr().err
    )


FAULTS = [
    ({"model__path": "nothing.safetensors"}, "nothing.safetensors: there is no such file"),
    ({"model__path": "text.safetensors"}, "text.safetensors (5 bytes) is not a safetensors file"),
    ({"dataset__pictures": "empty"}, "empty holds no picture"),
    ({"dataset__pictures": "missing"}, "missing is not a folder"),
    ({"dataset__pictures": None}, "the dataset is missing: give [dataset] pictures"),
    ({"dataset__cache": "empty"}, "give [dataset] pictures or cache, not both"),
    ({"dataset__encoders": None}, "pictures need encoders"),
    ({"model__family": None}, "the base is missing: give [model] family"),
    ({"dataset__pictures": None, "dataset__cache": "empty", "dataset__encoders": None}, "the base is missing"),
    (
        {"dataset__pictures": None, "dataset__cache": "empty", "dataset__encoders": None, "preview__prompts": ["x"]},
        "previews need encoders",
    ),
    ({"model__device": "mps"}, "device 'mps' is not one that Graft trains on"),
    ({"name": "名" * 100}, "cannot be a file's name"),
    ({"dataset__held_out": 5}, "held_out is 5 of 5 samples"),
    ({"model__device": "gpu"}, "device 'gpu' is not known"),
    ({"output": "text.safetensors/run"}, "text.safetensors is no folder"),
    ({"output": "x" * 300}, "cannot be used (File name too long)"),
    ({"name": "../mine"}, "name '../mine' cannot be a file's name"),
    ({"dataset__resolution": 4}, "resolution is 4"),
    ({"lora__rank": 0}, "rank is 0"),
    ({"lora__targets": "atention"}, "targets 'atention' is none of attention"),
    ({"lora__blocks": "9"}, "has the blocks 0 to 2"),
    ({"model__precision": "int3"}, "precision 'int3' is not known"),
    ({"model__device": "cuda:99"}, "CUDA devices; use device"),
    ({"model__path": "ideogram"}, "is Ideogram 4, but family is 'krea2'"),
    ({"model__path": "other width"}, "the text encoder gives 480 features per token"),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_a_fault_is_one_clear_line_and_nothing_is_written(tmp_path, pictures, capsys, changes, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("hello")
    shutil.copy(base_path(FAMILIES["ideogram4"]), tmp_path / "ideogram")
    tiny.write(tiny.build("krea2"), tmp_path / "other width")
    path = config(tmp_path, **changes)
    before = files(tmp_path)
    status = main(["train", "--config", str(path)])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("graft: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert files(tmp_path) == before


def test_nothing_that_exists_is_overwritten(tmp_path, pictures, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    for command in (["train", "--config", str(config(tmp_path))], ["demo"]):
        assert main([*command, "--output", str(tmp_path / "mine")]) == 2
        assert "exists and is not empty" in capsys.readouterr().err
    assert files(tmp_path / "mine") == ["notes.txt"]


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train", "--steps"]])
def test_unknown_words_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: graft" in capsys.readouterr().err


def test_an_unknown_family_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--family", "flux"]) == 2
    assert "family 'flux' is not known; choose one of krea2, ideogram4" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_runs_from_a_bare_clone_whatever_the_folder_is_called(tmp_path, pictures):
    clone = tmp_path / "custom_nodes" / "ComfyUI-Graft.v1 main"
    ignored = shutil.ignore_patterns(".*", "tests", "runs", "*.egg-info", "__pycache__", "build", "benchmarks")
    shutil.copytree(ROOT, clone, ignore=ignored)
    # As `python <folder> train …`, but it also prints which package ran: one is installed as well.
    arguments = [str(clone), "train", "--config", str(config(tmp_path))]
    code = (
        f"import runpy, sys; sys.argv = {arguments!r}; sys.path[0] = sys.argv[0]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(sys.modules['graft_lora'].__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(clone / "__init__.py")
    assert (tmp_path / "runs" / "run" / "run.safetensors").is_file()


def test_python_on_a_folder_works(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT), "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout


def test_a_run_called_train_works(tmp_path, pictures):
    """PEFT keeps adapters in a module dictionary, which has a method of that name."""
    assert main(["train", "--config", str(config(tmp_path, output="runs/train"))]) == 0
    assert (tmp_path / "runs" / "train" / "train.safetensors").is_file()


def test_ctrl_c_finishes_the_step_and_keeps_the_result(tmp_path, pictures, monkeypatch, capsys):
    original = TrainSession.advance

    def advance(self, read):
        logs = original(self, read)
        if self.done == 2:
            signal.raise_signal(signal.SIGINT)
        return logs

    monkeypatch.setattr(TrainSession, "advance", advance)
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", "--config", str(config(tmp_path, train__steps=5))]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped after 2 of 5 steps, as asked" in capsys.readouterr().out
    assert len((tmp_path / "runs" / "run" / "log.jsonl").read_text().splitlines()) == 2
    state, metadata = read_state(tmp_path / "runs" / "run" / "run.safetensors")
    assert metadata["ss_steps"] == "2"
    assert all(tensor.any() for tensor in state.values())


def test_a_run_that_fails_leaves_no_lora_behind(tmp_path, pictures, capsys):
    """A file of zeros or of NaN under the final name would pass for a result."""
    assert main(["train", "--config", str(config(tmp_path, train__learning_rate=1e30, train__steps=4))]) == 2
    error = capsys.readouterr().err
    assert "graft: error: " in error
    assert not list((tmp_path / "runs" / "run").glob("*.safetensors"))


def test_python_m_works():
    done = subprocess.run([sys.executable, "-m", "graft_lora", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_the_readmes_estimates_are_what_is_printed(capsys):
    """Of one card; the others come from the same plan."""
    assert main(["estimate", "--card", "12"]) == 0
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in capsys.readouterr().out.splitlines() if "12 GB" in line]
    assert len(rows) == 2
    assert all(f"\n{row}\n" in readme for row in rows)
