"""Probes find what version numbers hide: stubs, missing compilers, folders that only seem writable."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchao.quantization
from graft_lora.trainer.formats import NF4, Float8, Int8
from graft_lora.trainer.probes import compile_fault, folder_fault, optimizer_fault, precision_fault

QUANTISED = {"fp8": Float8, "int8": Int8, "nf4": NF4}


def assert_refused(precision, reason):
    assert precision_fault(precision, "cpu") == (
        f"{precision} does not work on cpu ({reason}); install the torchao that goes with torch {torch.__version__} "
        '(python -m pip install -U torchao), or set [model] precision = "bf16"'
    )


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_working_torchao_passes_also_under_inference_mode(precision):
    with torch.inference_mode():
        assert precision_fault(precision, "cpu") is None


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_stub_of_torchao_that_quantises_nothing(monkeypatch, precision):
    """Seen on Windows under ROCm: the symbols import, and what comes back is what went in."""
    kind = {"fp8": "Float8Tensor", "int8": "Int8Tensor"}[precision]
    stub = SimpleNamespace(from_hp=lambda weight, *_: SimpleNamespace(qdata=weight, scale=torch.ones(len(weight), 1)))
    monkeypatch.setattr(torchao.quantization, kind, stub)
    assert_refused(precision, "torchao quantises nothing, as a stub does")


@pytest.mark.parametrize("precision", QUANTISED)
def test_numbers_that_come_back_wrong(monkeypatch, precision):
    kind = QUANTISED[precision]
    original = kind.quantize
    with monkeypatch.context() as patch:
        patch.setattr(kind, "quantize", lambda *args: {**(kept := original(*args)), "scale": kept["scale"] * torch.nan})
        assert_refused(precision, "values come back wrong by nan%")
    monkeypatch.setattr(kind, "quantize", lambda *args: {**(kept := original(*args)), "scale": kept["scale"] * 0})
    if precision != "nf4":  # whose scales have a mean of their own
        assert_refused(precision, "values come back wrong by 100%")


def test_no_torchao_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert_refused("int8", "import of torchao.quantization halted; None in sys.modules")


def test_a_precision_on_a_device_that_fails(monkeypatch):
    def no_kernel(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors …")

    monkeypatch.setattr(Int8, "quantize", no_kernel)
    assert_refused("int8", "CUDA error: no kernel image is available for execution on the device")


@pytest.mark.xdist_group("compiled")  # as in test_loop.py
def test_adamw8bit_steps_where_there_is_a_compiler():
    with torch.inference_mode():
        assert optimizer_fault("adamw8bit", "cpu") is None


@pytest.mark.xdist_group("compiled")
def test_compiling_works_where_there_is_a_compiler():
    with torch.inference_mode():
        assert compile_fault("cpu") is None


@functools.cache
def without_a_compiler():
    """What both probes say, in a process of their own: torch looks for the compiler once."""
    code = (
        "from graft_lora.trainer.probes import compile_fault, optimizer_fault\n"
        "for fault in (optimizer_fault('adamw8bit', 'cpu'), compile_fault('cpu')): print(fault)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


WITHOUT = pytest.mark.xdist_group("without a compiler")


@WITHOUT
def test_adamw8bit_without_a_compiler_is_one_clear_line():
    line, _ = without_a_compiler()
    assert line.startswith(
        f"adamw8bit needs torchao and a C++ compiler that work with torch {torch.__version__} on cpu ("
    )
    assert "No working C++ compiler found" in line
    assert line.endswith('); install what is missing, or set [train] optimizer = "adamw"')


@WITHOUT
def test_compiling_without_a_compiler_is_one_clear_line():
    _, line = without_a_compiler()
    assert line.startswith(f"compile needs a C++ compiler that works with torch {torch.__version__} on cpu (")
    assert "No working C++ compiler found" in line
    assert line.endswith("install what is missing, or set [train] compile = false")


def test_adamw8bit_without_torchao_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    assert optimizer_fault("adamw8bit", "cpu") == (
        f"adamw8bit needs torchao and a C++ compiler that work with torch {torch.__version__} on cpu (import of "
        'torchao.optim halted; None in sys.modules); install what is missing, or set [train] optimizer = "adamw"'
    )


def test_an_optimiser_that_steps_without_effect(monkeypatch):
    monkeypatch.setattr("torchao.optim.AdamW8bit.step", lambda self: None)
    assert optimizer_fault("adamw8bit", "cpu") == (
        'adamw8bit steps without effect on cpu; set [train] optimizer = "adamw"'
    )


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path):
    assert folder_fault(tmp_path) is None
    assert folder_fault(tmp_path / "not" / "there") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that only seems writable is needed")
def test_os_access_lies_and_the_try_does_not(monkeypatch):
    """As root all of /proc is writable to `os.access`; as another user it is not, and is refused just so."""
    if os.geteuid() == 0:
        assert os.access("/proc", os.W_OK)
    fault = folder_fault(Path("/proc/graft"))
    assert fault is not None
    assert fault.startswith("/proc/graft cannot be written to (")


@pytest.mark.parametrize("step", ["write_bytes", "chmod"])
def test_a_share_that_makes_folders_but_no_files(tmp_path, monkeypatch, step):
    def refuses(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, step, refuses)
    assert folder_fault(tmp_path) == f"{tmp_path} cannot be written to (Permission denied)"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert folder_fault(tmp_path / "file" / "run") == f"{tmp_path / 'file'} is no folder"
