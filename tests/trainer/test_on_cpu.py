"""What the CPU does in one dtype is, to the bit, what it would do in two; and a card's memory is counted without it."""

from __future__ import annotations

import pytest
import torch
from graft_lora.trainer import on_cpu
from graft_lora.trainer.formats import FORMATS
from graft_lora.trainer.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

NAN = 0x7F


def same_bits(found, wanted):
    return found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("finite", [True, False])
def test_every_fp8_number_is_widened_to_itself(finite):
    """Subnormal numbers, both zeros and the NaNs of both signs too, which must not become 480."""
    codes = torch.arange(256, dtype=torch.uint8)
    if finite:
        codes = codes[codes & NAN != NAN]
    numbers = codes.view(torch.float8_e4m3fn)
    assert same_bits(on_cpu.widened(numbers), numbers.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_other_8_bit_numbers_are_not_taken_for_that_fp8(dtype):
    numbers = torch.arange(120, dtype=torch.uint8).view(dtype)
    assert same_bits(on_cpu.widened(numbers), numbers.float())


def test_subnormal_numbers_stay_where_fp32_has_none():
    """As other programs in the process may have set it."""
    numbers = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wanted = numbers.float()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot be told to")
    try:
        assert same_bits(on_cpu.widened(numbers), wanted)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_one_nan_among_many_stays_one(code):
    numbers = torch.zeros(1000, dtype=torch.uint8)
    numbers[500] = code
    assert on_cpu.widened(numbers.view(torch.float8_e4m3fn)).isnan().sum() == 1


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_dequantised_as_by_the_product_of_two_dtypes(monkeypatch, precision, dtype):
    monkeypatch.setattr(on_cpu, "FITS_CACHES", 1000)  # many pieces, the last of them smaller
    weight = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)) / 7
    buffers = FORMATS[precision].quantize(weight)
    wanted = buffers["data"].to(dtype).mul_(buffers["scale"])
    assert same_bits(FORMATS[precision].dequantize(buffers, (33, 96), dtype), wanted)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_card_needs_no_wide_copy_of_a_weight(precision):
    """What is counted without data stands for a card, which takes two dtypes at once as fast as one."""
    with FakeTensorMode():
        layout = FORMATS[precision].layout((4096, 4096))
        buffers = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
        with LiveBytes(buffers.values()) as live:
            before = live.now
            FORMATS[precision].dequantize(buffers, (4096, 4096), torch.bfloat16)
        assert live.peak - before == 4096 * 4096 * 2
