"""Backward passes by hand beside autograd's own of the formula, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graft_lora.trainer import elementwise, on_cpu
from graft_lora.trainer.live_bytes import LiveBytes
from torch import Tensor

B, L, H, K = 2, 48, 3, 64
EPS = 1e-5


@pytest.fixture(autouse=True, params=["a CPU", "a card"])
def _device(request, monkeypatch):
    """Both ways of casting, which differ in what they read and write alone."""
    monkeypatch.setattr(on_cpu, "is_cpus", lambda tensor: request.param == "a CPU")


def norm(x, gain, shift=None, eps=EPS):
    normed = gain * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())
    return normed if shift is None else normed + shift


def rotation(x, cos, sin, neighbours):
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)


def angles(generator):
    found = 6 * torch.rand(1, L, 1, K // 2, generator=generator)
    return found.cos(), found.sin()


# Function, formula, the shapes of its tensors in the dtype of activations, those of its tensors in fp32, how many fp32
# or 16-bit tensors like the result its backward pass may have alive, and how often its result is rounded.
CASES = {
    "norm": (
        lambda x, gain: elementwise.rms_normed(x, gain, None, EPS),
        norm, [(B, L, K)], [(K,)], (3, 1), 1,
    ),
    "norm and modulation": (
        lambda x, gain, shift: elementwise.rms_normed(x, gain, shift, EPS),
        norm, [(B, L, K)], [(B, 1, K), (B, 1, K)], (3, 1), 1,
    ),
    "norm and modulation of every token": (
        lambda x, gain, shift: elementwise.rms_normed(x, gain, shift, EPS),
        norm, [(B, L, K)], [(B, L, K), (B, L, K)], (3, 1), 1,
    ),
    "gate": (elementwise.gated, lambda x, gate: x * gate.sigmoid(), [(B, L, K)] * 2, [], (0, 3), 2),
    "swiglu": (elementwise.swiglu, lambda gate, up: F.silu(gate) * up, [(B, L, K)] * 2, [], (0, 2), 2),
}  # fmt: skip


def made(case, dtype):
    """The case's arguments, a gradient of its result, and both with what is true of them in fp64."""
    function, formula, activations, others, _, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in activations]
    args += [torch.randn(shape, generator=generator).requires_grad_() for shape in others]
    grad = torch.randn(activations[0], generator=generator).to(dtype)
    exact = [argument.detach().double().requires_grad_() for argument in args]
    true = formula(*exact)
    return function, args, grad, true, torch.autograd.grad(true, exact, grad.double())


def off(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_in_fp32_result_and_gradients_are_the_formulas(case):
    function, args, grad, true, wanted = made(case, torch.float32)
    result = function(*args)
    assert off(result, true) < 1e-6
    for found, expected in zip(torch.autograd.grad(result, args, grad), wanted, strict=True):
        assert off(found, expected) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_in_bf16_they_are_rounded_at_the_end_alone(case):
    function, args, grad, true, wanted = made(case, torch.bfloat16)
    result = function(*args)
    assert result.dtype == torch.bfloat16
    often = CASES[case][-1]
    assert off(result, true) <= 1.2 * often**0.5 * off(true.bfloat16(), true)
    for argument, found, expected in zip(args, torch.autograd.grad(result, args, grad), wanted, strict=True):
        assert found.dtype == argument.dtype
        # What is summed over tokens is summed in fp32.
        rounded = 1.2 * (often + 1) ** 0.5 * off(expected.bfloat16(), expected)
        assert off(found, expected) <= (1e-6 if argument.dtype == torch.float32 else rounded)


@pytest.mark.parametrize("case", CASES)
def test_one_argument_alone_can_be_trained(case):
    function, args, grad, _, wanted = made(case, torch.float32)
    for index, expected in enumerate(wanted):
        chosen = [argument.detach().requires_grad_(place == index) for place, argument in enumerate(args)]
        (found,) = torch.autograd.grad(function(*chosen), chosen[index], grad)
        assert off(found, expected) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_no_argument_and_no_gradient_is_written_to(case):
    """Work is done in place where a tensor is the function's own, which in fp32 a cast does not make it."""
    function, args, grad, _, _ = made(case, torch.float32)
    before = [tensor.detach().clone() for tensor in (*args, grad)]
    result = function(*args)
    after = result.detach().clone()
    torch.autograd.grad(result, args, grad)
    assert all(map(torch.equal, (*args, grad, result), (*before, after)))


@pytest.mark.parametrize("case", CASES)
def test_the_arguments_alone_are_kept_and_few_tensors_alive(case):
    function, args, grad, _, _ = made(case, torch.bfloat16)
    wide, narrow = CASES[case][4]
    with LiveBytes([*args, grad]) as live:
        before = live.now
        result = function(*args)
        rows = 4 * B * L  # 1 / rms
        assert live.now <= before + result.nbytes + rows
        live.reset()
        start = live.now
        found = torch.autograd.grad(result, args, grad)
        summed = sum(tensor.nbytes for tensor in args if tensor.dtype == torch.float32)  # gradients of gain and shift
        assert live.peak <= start + (2 * wide + narrow) * result.nbytes + summed
    assert len(found) == len(args)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation(monkeypatch, dtype, neighbours, compiling):
    """What runs eager and what is compiled are written apart."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(B, L, H, K, generator=generator).to(dtype) for _ in range(2))
    gain, (cos, sin) = torch.randn(K, generator=generator), angles(generator)
    before = [tensor.clone() for tensor in (x, grad, gain, cos, sin)]
    leaves = x.requires_grad_(), gain.requires_grad_()
    result = elementwise.rms_normed_and_rotated(*leaves, EPS, cos, sin, neighbours)
    found = torch.autograd.grad(result, leaves, grad)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = rotation(norm(*exact), cos.double(), sin.double(), neighbours)
    wanted = torch.autograd.grad(true, exact, grad.double())
    for one, other in ((result, true), *zip(found, wanted, strict=True)):
        assert one.dtype == (torch.float32 if one is found[1] else dtype)
        assert off(one, other) <= 1.01 * off(other.to(one.dtype), other) + 3e-7
    assert all(map(torch.equal, (x, grad, gain, cos, sin), before))


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("way", ["transposed", "a part of one tensor", "expanded"])
def test_no_layout_of_input_or_gradient_matters(way, neighbours):
    """SDPA's math kernel gives k's gradient transposed, and q, k and v may be parts of one Linear's output."""

    def laid(tensor):
        if way == "transposed":
            return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        if way == "expanded":
            return tensor[:, :1].expand_as(tensor)
        return torch.stack([tensor, tensor], dim=2).unbind(2)[0]

    generator = torch.Generator().manual_seed(1)
    x, grad = (laid(torch.randn(B, L, H, K, generator=generator)) for _ in range(2))
    gain, (cos, sin) = torch.randn(K, generator=generator), angles(generator)
    found, wanted = [], []
    for results, change in ((found, lambda tensor: tensor), (wanted, lambda tensor: tensor.contiguous())):
        leaf = change(x).detach().requires_grad_()
        for result in (
            elementwise.rms_normed(leaf, gain, None, EPS),
            elementwise.rms_normed_and_rotated(leaf, gain, EPS, cos, sin, neighbours),
        ):
            results += [result, *torch.autograd.grad(result, leaf, change(grad))]
    assert not x.is_contiguous()
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_tables_that_are_to_be_trained_are_refused():
    cos, sin = angles(torch.Generator())
    with pytest.raises(ValueError, match="tables of a rotation have no gradient"):
        elementwise.rms_normed_and_rotated(torch.ones(B, L, H, K), torch.ones(K), EPS, cos.requires_grad_(), sin, True)
