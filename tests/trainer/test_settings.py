"""Settings from TOML: every unknown or ill-typed one is named."""

from __future__ import annotations

import pytest
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.settings import RunSettings, read_settings


def written(tmp_path, text):
    path = tmp_path / "cats.toml"
    path.write_text(text)
    return path


def test_defaults_are_those_that_a_first_run_needs(tmp_path):
    settings = read_settings(written(tmp_path, ""))
    assert settings.lora == RunSettings().lora
    assert (settings.lora.rank, settings.lora.targets) == (32, "attention+mlp")
    assert (settings.model.precision, settings.model.compute_dtype) == ("auto", "bf16")
    assert settings.train.timesteps == "family"
    assert settings.output == str(tmp_path / "runs" / "cats")


def test_paths_are_relative_to_the_file_even_with_spaces(tmp_path):
    """Lora-Training-in-Comfy 55: a path with a space broke it."""
    text = '[model]\npath = "my models/base.safetensors"\nquantized_cache = "kept"\n[dataset]\npictures = "/abs/pics"\n'
    settings = read_settings(written(tmp_path, text))
    assert settings.model.path == str(tmp_path / "my models" / "base.safetensors")
    assert settings.model.quantized_cache == str(tmp_path / "kept")
    assert settings.dataset.pictures == "/abs/pics"


def test_a_byte_order_mark_of_a_windows_editor_is_no_fault(tmp_path):
    path = tmp_path / "cats.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 7\n")
    assert read_settings(path).train.steps == 7


def test_values_arrive(tmp_path):
    text = '[lora]\nalpha = 8\n[train]\nlearning_rate = 1\n[preview]\nprompts = ["a", "b"]\n'
    settings = read_settings(written(tmp_path, text))
    assert settings.lora.alpha == 8.0
    assert settings.train.learning_rate == 1.0
    assert settings.preview.prompts == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3", r"setting 'step' in \[train\] is not known; there are steps, batch_size"),
        ("steps = 3", "setting 'steps' is not known; there are output, name, model"),
        ('[train]\nsteps = "many"', "train.steps is 'many'; wanted int"),
        ("[train]\nsteps = true", "train.steps is True; wanted int"),
        ("[train]\nsteps = 0", "steps is 0; wanted at least 1"),
        ("[train]\nlearning_rate = -1.0", "learning_rate is -1.0; wanted at least 0"),
        ("[train]\nlearning_rate = nan", "learning_rate is nan"),
        ("[train]\nseed = 100000000000000000000", "seed is 100000000000000000000; wanted 0 or more, and less than 2"),
        ("[preview]\nseed = 5000000000000000000", "preview.seed is 5000000000000000000"),
        ("[train]\nlearning_rate = inf", "learning_rate is inf"),
        ("[lora]\nalpha = inf", "alpha is infinite"),
        ("[lora]\nrank = 0", "rank is 0; wanted 1 to 4096"),
        ('[model]\nprecision = "int3"', "precision 'int3' is not known; choose one of auto, fp32, bf16"),
        ('[model]\neight_bit_compute = "on"', "eight_bit_compute 'on' is not known; choose one of auto"),
        ("[model]\neight_bit_compute = 1", "model.eight_bit_compute is 1; wanted bool or str"),
        ('[model]\ncompute_dtype = "fp16"', "compute_dtype 'fp16' is not known; choose one of bf16, fp32"),
        ('[model]\nfamily = "flux"', "family 'flux' is not known; choose one of krea2, ideogram4"),
        (
            '[train]\ncheckpointing = "some"',
            "checkpointing is 'some'; wanted true, false, 'auto' or a number of blocks",
        ),
        ("[train]\ncheckpointing = -1", "checkpointing is -1; wanted at least 0"),
        ("[train]\ncheckpointing = 1.0", "train.checkpointing is 1.0; wanted bool or int or str"),
        ('[train]\ntimesteps = "sigmoid"', "timesteps 'sigmoid' is not known"),
        ('[train]\nsave_dtype = "int8"', "save_dtype 'int8' is not known"),
        ('[preview]\nprompts = "a"', "preview.prompts is 'a'; wanted a list"),
        ("[preview]\nprompts = [1]", r"preview.prompts\[0\] is 1; wanted str"),
        ("model = 3", "'model' is 3; wanted a table"),
        ("[train", "is not TOML"),
    ],
)
def test_faults_are_named(tmp_path, text, message):
    with pytest.raises(SettingsError, match=message):
        read_settings(written(tmp_path, text))


@pytest.mark.parametrize(("text", "wanted"), [("true", True), ("1", 1), ("false", False), ("0", 0), ('"auto"', "auto")])
def test_a_number_of_checkpointed_blocks_is_no_bool(tmp_path, text, wanted):
    """In Python True equals 1; in all blocks and in one block is not the same."""
    found = read_settings(written(tmp_path, f"[train]\ncheckpointing = {text}")).train.checkpointing
    assert (type(found), found) == (type(wanted), wanted)


def test_no_such_file(tmp_path):
    with pytest.raises(SettingsError, match=r"nothing\.toml cannot be read \(No such file"):
        read_settings(tmp_path / "nothing.toml")
