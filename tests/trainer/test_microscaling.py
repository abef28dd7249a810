"""mxfp8: torchao's numbers, cuBLAS's layout of scales, and gradients through products of them.

No CPU multiplies them: `cards.block_scaled_mm` does so instead. Training with them stands in `test_eight_bit.py`.
"""

from __future__ import annotations

import cards
import pytest
import tiny
import torch
from graft_lora.trainer import eight_bit_choice, formats, microscaling, on_cpu, probes
from graft_lora.trainer.devices import read_device
from graft_lora.trainer.formats import FORMATS
from graft_lora.trainer.quantization import FrozenLinear, input_gradient, matmul
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.utils import to_blocked

FP8, E8M0, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16
RCEIL = ScaleCalculationMode.RCEIL


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Of sizes far apart, so that blocks have scales of their own.
    return torch.randn(*shape, generator=generator) * 10 ** (4 * torch.rand(*shape[:-1], 1, generator=generator) - 2)


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", cards.block_scaled_mm)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_activations_are_quantised_as_torchao_does(dtype):
    x = randn(48, 96).to(dtype)
    x[3, 32:64] = 0
    data, bits = microscaling.quantize_blocks(x)
    scale, wanted = to_mx(x, FP8, 32, RCEIL)
    # A block of zeros may have any scale; torchao's is the least of all.
    zero = wanted.float().unflatten(1, (-1, 32)).abs().amax(-1) == 0
    assert torch.equal(data.float(), wanted.float())
    assert torch.equal(bits[~zero], scale.view(torch.uint8)[~zero])
    assert zero.sum() == 1


@pytest.mark.parametrize("exponent", [-20, -1, 0, 7])
def test_a_scale_is_the_least_power_that_cuts_nothing_off(exponent):
    """At 448 · 2^n exactly, and at the numbers next to it."""
    bound = torch.tensor(448 * 2.0**exponent)
    inf = torch.tensor(torch.inf)
    below, above = bound.nextafter(-inf), bound.nextafter(inf)
    bits = microscaling.exponents(torch.stack([below, bound, above]))
    assert bits.tolist() == [127 + exponent, 127 + exponent, 128 + exponent]
    assert microscaling.powers(bits).tolist() == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]
    assert (microscaling.powers(bits) * microscaling.inverse_powers(bits) == 1).all()


def test_what_is_not_finite_does_not_become_finite(blackwell):
    layer = FrozenLinear(64, 64).store(randn(64, 64), FORMATS["mxfp8"])
    for bad in (torch.nan, torch.inf):
        x = torch.ones(32, 64, dtype=BF16)
        x[5, 40] = bad
        y = microscaling.forward(x, layer.data, layer.scale)
        assert not y[5].isfinite().any()
        assert y[:5].isfinite().all()


@pytest.mark.parametrize("shape", [(32, 32), (256, 192), (160, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_stored_weight_is_what_torchao_reads_of_its_numbers(monkeypatch, shape, dtype):
    monkeypatch.setitem(formats.PIECE, "cpu", 3 * 32 * shape[1])
    monkeypatch.setattr(on_cpu, "FITS_CACHES", 2 * 32 * shape[1])
    w = randn(*shape).to(dtype)
    layer = FrozenLinear(shape[1], shape[0]).store(w, FORMATS["mxfp8"])
    assert {name: (b.dtype, tuple(b.shape)) for name, b in layer.named_buffers()} == FORMATS["mxfp8"].layout(shape)
    scale = layer.scale.repeat_interleave(32, 0).view(E8M0)
    for wanted in (torch.float32, BF16):
        found = layer.dequantized(wanted)
        assert torch.equal(found, to_dtype(layer.data, scale, FP8, 32, wanted))
        with monkeypatch.context() as card:
            card.setattr(on_cpu, "is_cpus", lambda tensor: False)
            assert torch.equal(layer.dequantized(wanted), found)
    tiles = w.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).abs().amax((1, 3))
    assert torch.equal(layer.scale, microscaling.exponents(tiles))


def test_tiles_lose_next_to_nothing_to_rows_of_32():
    """fp8 has exponents of its own: a coarser scale costs subnormal numbers alone."""
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) / 32
    scale, data = to_mx(w, FP8, 32, RCEIL)
    by_rows = to_dtype(data, scale, FP8, 32, torch.float32)
    by_tiles = FrozenLinear(1024, 1024).store(w, FORMATS["mxfp8"]).dequantized(torch.float32)
    by_row = FrozenLinear(1024, 1024).store(w, FORMATS["fp8"]).dequantized(torch.float32)
    rows, tiles, fp8 = (((found - w).norm() / w.norm()).item() for found in (by_rows, by_tiles, by_row))
    assert tiles < 1.02 * rows
    assert tiles < 1.05 * fp8


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (33, 32)])
def test_a_weight_that_is_not_of_whole_tiles_is_refused(shape):
    assert not FORMATS["mxfp8"].fits_shape(shape)
    with pytest.raises(ValueError, match="mxfp8 stores tiles of 32 × 32 weights; got"):
        FORMATS["mxfp8"].quantize(torch.ones(shape))


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (32, 3), (128, 4), (129, 5), (300, 9), (512, 16)])
def test_scales_lie_as_torchao_lays_them(shape):
    bits = torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(microscaling.in_order(bits), to_blocked(bits))


@pytest.mark.parametrize("sizes", [(17, 32, 32), (100, 96, 64), (200, 160, 416)])
def test_product_and_gradient_are_those_of_the_quantised_operands(blackwell, monkeypatch, sizes):
    monkeypatch.setattr(microscaling, "CHUNK", 40 * 96)  # in several parts
    rows, inputs, outputs = sizes
    layer = FrozenLinear(inputs, outputs).store(randn(outputs, inputs), FORMATS["mxfp8"])
    w = layer.dequantized(torch.float32)
    layer.eight_bit = True
    for found, given, other in (
        (matmul(x := randn(rows, inputs, seed=1).to(BF16), layer), x, w.T),
        (input_gradient(g := randn(rows, outputs, seed=2).to(BF16), layer), g, w),
    ):
        scale, data = to_mx(given.contiguous(), FP8, 32, RCEIL)
        assert torch.equal(found, (to_dtype(data, scale, FP8, 32, torch.float32) @ other).to(BF16))
        assert found.is_contiguous()


def operands(rows=64, summed=96, columns=48, **changed):
    sizes = ((-(-lines // 128) * 128, -(-summed // 128) * 4) for lines in (rows, columns))
    scale_a, scale_b = (torch.zeros(size, dtype=torch.uint8).view(E8M0) for size in sizes)
    given = {
        "a_MK": torch.zeros(rows, summed).to(FP8),
        "b_KN": torch.zeros(columns, summed).to(FP8).T,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "out_dtype": BF16,
    }
    return given | changed


@pytest.mark.parametrize(("given", "fault"), [
    (operands(), None),
    (operands(rows=1), None),
    (operands(rows=300, summed=1024, columns=272), None),
    (operands(a_MK=torch.zeros(64, 96)), "the operands are torch.float32 and torch.float8_e4m3fn"),
    (operands(b_KN=torch.zeros(48, 64).to(FP8).T), "are no matrices that can be multiplied"),
    (operands(summed=80), "the product is 64 × 80 × 48"),
    (operands(columns=40), "the product is 64 × 96 × 40"),
    (operands(rows=0), "the product is 0 × 96 × 48"),
    (operands(a_MK=torch.zeros(96, 64).to(FP8).T), "the first operand has strides"),
    (operands(b_KN=torch.zeros(96, 48).to(FP8)), "the second operand has strides"),
    (operands(scale_a=torch.zeros(64, 3, dtype=torch.uint8).view(E8M0)), "wanted 512 of float8_e8m0fnu"),
    (operands(scale_b=torch.zeros(128, 4)), "scales are torch.float32"),
    (operands(scale_b=torch.zeros(4, 128, dtype=torch.uint8).view(E8M0).T), "in one piece"),
    (operands(out_dtype=torch.float32), "the result is torch.float32"),
])  # fmt: skip
def test_cudas_rules(given, fault):
    found = microscaling.cuda_fault(**given)
    assert (found is None) if fault is None else (found is not None and fault in found)


def test_what_cuda_would_refuse_is_an_error(blackwell):
    layer = FrozenLinear(64, 64).store(randn(64, 64), FORMATS["mxfp8"])
    with pytest.raises(ValueError, match=r"cannot be made in mxfp8: the result is torch.float32"):
        microscaling.forward(torch.ones(32, 64), layer.data, layer.scale)


def test_the_probe_finds_scales_in_a_wrong_place(blackwell, monkeypatch):
    assert probes.eight_bit_fault("mxfp8", "cpu") is None
    monkeypatch.setattr(microscaling, "in_order", lambda bits: to_blocked(bits).roll(1))
    assert "mxfp8 matmuls give wrong numbers on cpu" in (probes.eight_bit_fault("mxfp8", "cpu") or "")


def test_without_the_kernel_the_probe_says_so():
    assert "mxfp8 matmuls do not work on cpu with torch" in (probes.eight_bit_fault("mxfp8", "cpu") or "")


# --- a base ---------------------------------------------------------------------------------------------------------


def test_without_its_products_mxfp8_says_that_it_is_idle(tmp_path):
    base = tiny.loaded(tmp_path, "krea2", "mxfp8", "bf16")
    used, note = eight_bit_choice.choose(base, False, 128, read_device("cpu"))
    assert not used
    assert note.startswith("mxfp8 is there for matmuls in 8 bits, which are off")


def test_a_part_is_cut_by_tiles():
    with pytest.raises(ValueError, match=r"cut by tiles of 32 × 32 weights; got 48 × 64"):
        FORMATS["mxfp8"].part({}, 48, 64)
    layer = FrozenLinear(96, 128).store(randn(128, 96), FORMATS["mxfp8"])
    part = eight_bit_choice._part(layer, 64, torch.device("cpu"))
    assert torch.equal(part.dequantized(torch.float32), layer.dequantized(torch.float32)[:64, :64])
