"""The benchmark of a GPU at small size on the CPU, and Graft's CUDA kernels by their shapes, without a GPU."""

from __future__ import annotations

import gpu
import pytest
import torch
from graft_lora.trainer import attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

SMALL = ["--device", "cpu", "--small", "--precision", "int8"]


def test_it_measures_and_keeps_to_the_plan(family_name, capsys, tmp_path):
    output = tmp_path / "RESULTS-gpu.md"
    assert gpu.main([*SMALL, "--family", family_name, "--output", str(output)]) == 0
    rows = [line.split(" | ") for line in output.read_text(encoding="utf-8").splitlines() if "² |" in line]
    assert [tuple(row[1:4]) for row in rows] == [
        (base, side, way)
        for side, way in (("128²", "on"), ("128²", "off"), ("64²", "on"), ("64²", "off"))
        for base in ("int8", "int8, 8-bit products")
    ]
    for row in rows:
        peak, planned = (float(cell.split()[0]) for cell in row[7:9])
        assert float(row[4]) > 0
        assert 0 < peak <= planned * 1.05
    out = capsys.readouterr().out
    assert all(f"{way} | 0.0e+00" in out for way in ("its own attention", "recomputing", "slim"))


def test_a_precision_that_is_not_for_the_device_is_left_out_and_named(capsys):
    assert gpu.main(["--device", "cpu", "--small", "--precision", "mxfp8", "--family", "krea2"]) == 0
    assert "| mxfp8 | mxfp8 is for NVIDIA cards of compute capability 10.0 or newer" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().out


def test_wrong_gradients_end_it(monkeypatch, capsys):
    kernel = attention.KERNELS["cpu", SDPBackend.FLASH_ATTENTION]
    wrong = kernel._replace(backward=lambda *arguments: [2 * grad for grad in kernel.backward(*arguments)])
    monkeypatch.setitem(attention.KERNELS, ("cpu", SDPBackend.FLASH_ATTENTION), wrong)
    assert gpu.main([*SMALL, "--family", "krea2"]) == 1
    out = capsys.readouterr().out
    assert "✗" in out
    assert "s/step" not in out


def test_a_model_that_does_not_fit_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "usable", lambda device: 0)
    assert gpu.main([*SMALL, "--family", "krea2"]) == 0
    assert capsys.readouterr().out.count("does not fit") == 8


class Context:
    """What autograd hands to a Function; its engine cannot be started for a device that is not there."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 128), (4, 4, 256)])
def test_kernels_of_cuda_take_what_their_backward_asks_for(backend, heads, groups, width):
    """Tensors without data have a device that is not there: number, order and shapes of the arguments are checked."""
    context = Context()
    with FakeTensorMode(), torch.no_grad():
        leaves = [
            torch.empty(1, 40, count, width, device="cuda", dtype=torch.bfloat16) for count in (heads, groups, groups)
        ]
        out = attention._Attention.forward(context, *leaves, None, attention.KERNELS["cuda", backend])
        assert out.shape == (1, 40, heads * width)
        gradients = attention._Attention.backward(context, torch.empty_like(out))[:3]
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
    assert all(gradient.device.type == "cuda" for gradient in gradients)
