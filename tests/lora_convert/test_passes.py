"""Passes by small pieces see all of a tensor, wherever in it the one number is that counts."""

from __future__ import annotations

import math

import pytest
import torch
from graft_lora.lora_convert import passes

SHAPES = [(3,), (40, 1000), (1000, 128), (2**15,), (2**15 - 64, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [-7.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_is_found_in_any_piece(shape, value, place):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.linspace(-1, 1, math.prod(shape)).to(dtype).reshape(shape)
        tensor.view(-1)[place] = value
        found = passes.largest(tensor)
        assert found == abs(value) or (math.isnan(value) and math.isnan(found))
        assert passes.largest(tensor.T if tensor.ndim == 2 else tensor[::2]) == pytest.approx(
            found if tensor.ndim == 2 else tensor[::2].double().abs().amax().item(), nan_ok=True
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_equal_and_shares_nothing(shape):
    tensor = torch.randn(shape).bfloat16()
    for one in (tensor, tensor.T if tensor.ndim == 2 else tensor[::2]):
        copy = passes.copied(one)
        assert torch.equal(copy, one)
        assert copy.is_contiguous()
        assert copy.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()


@pytest.mark.parametrize("row", [0, 63, 64, 999])
def test_a_column_is_live_by_any_of_its_rows(row):
    tensor = torch.zeros(1000, 5)
    tensor[:, 1] = 1.0
    tensor[row, 3] = -1e-30
    assert passes.live_columns(tensor).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("row", [0, 1, 999])
def test_nothing_but_zeros_is_seen_in_all_rows(row):
    tensor = torch.zeros(1000, 5)
    assert passes.is_zero(tensor)
    tensor[row, 2] = 1e-30
    assert not passes.is_zero(tensor)


def test_no_piece_is_one_that_torch_divides_among_its_threads():
    """ATen's grain: at::internal::GRAIN_SIZE, 2¹⁵ numbers."""
    pieces = passes._pieces(torch.zeros(2**18))
    assert sum(len(piece) for piece in pieces) == 2**18
    assert max(len(piece) for piece in pieces) < 2**15
