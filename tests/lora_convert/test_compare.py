"""How far two changes are apart, against dense differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from graft_lora.lora_convert import DiffModule, LohaModule, LokrModule, LoraModule, Split, compare
from graft_lora.lora_convert.compare import difference
from graft_lora.lora_convert.fusing import fuse, split

ROWS = (12, 4, 4)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(rows=20, rank=3, alpha=2.0, seed=0):
    return LoraModule(normal(seed, rank, 24), normal(seed + 1, rows, rank), alpha)


def lokr():
    """Of blocks of 5 rows, which no cut of q, k and v meets."""
    return LokrModule(normal(0, 4, 2), normal(1, 5, 12), 1.0)


def loha():
    return LohaModule(normal(0, 20, 2), normal(1, 2, 24), normal(2, 20, 2), normal(3, 2, 24), 1.0)


def dense(change):
    return torch.cat([m.delta() for m in change.members]) if isinstance(change, Split) else change.delta()


def relative(one, other):
    return ((one.double() - other.double()).norm() / one.double().norm()).item()


@pytest.fixture
def no_products(monkeypatch):
    """Makes anything but a comparison of bits fail."""

    def fail(*args):
        raise AssertionError("computed")

    for name in ("product_norm", "stacked_norm", "_dense_norm"):
        monkeypatch.setattr(compare, name, fail)


@pytest.mark.parametrize("make", [lora, lokr, loha, lambda: DiffModule(normal(0, 20, 24))])
def test_the_same_bits_are_not_computed_with(make, no_products):
    change = make()
    assert difference(change, replace(change)) == 0.0


@pytest.mark.parametrize("make", [lora, loha, lambda: LokrModule(normal(0, 5, 2), normal(1, 4, 12), 1.0)])
def test_slices_are_compared_by_their_bits(make, no_products):
    change = make()
    apart = split(change, ROWS)
    assert difference(change, apart) == 0.0
    assert difference(apart, change) == 0.0
    assert difference(apart, split(change, ROWS)) == 0.0


def test_a_stack_is_compared_with_its_members_by_their_bits(no_products):
    apart = Split((lora(12), lora(4, seed=5), lora(4, seed=9)), ROWS)
    apart = replace(apart, members=tuple(replace(m, alpha=3.0) for m in apart.members))
    assert difference(apart, fuse(apart)) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lora(), replace(lora(), up=lora().up + 1e-3)),
        (lora(), replace(lora(), down=lora().down + 1e-3)),
        (lora(), lora(seed=7)),
        (lora(), lora(rank=5, seed=7)),
        (lora(), replace(lora(), alpha=-2.0)),
        (lora(), lokr()),
        (lokr(), replace(lokr(), w2=lokr().w2 * 1.01)),
        (lokr(), LokrModule(normal(0, 5, 2), normal(1, 4, 12), 1.0)),
        (loha(), replace(loha(), alpha=1.01)),
        (loha(), lora()),
        (DiffModule(normal(0, 20, 24)), lora()),
    ],
)
def test_it_is_the_dense_difference(one, other):
    assert difference(one, other) == pytest.approx(relative(one.delta(), other.delta()), rel=1e-5, abs=1e-7)
    # Cut where a LoKr has no cut of its own.
    q, k, v = (DiffModule(part) for part in one.delta().split(ROWS))
    apart = Split((q, k, v), ROWS)
    assert difference(apart, other, whole=True) == pytest.approx(
        relative(one.delta(), other.delta()), rel=1e-5, abs=1e-7
    )
    worst = max(relative(a, b) for a, b in zip(one.delta().split(ROWS), other.delta().split(ROWS), strict=True))
    assert difference(apart, other) == pytest.approx(worst, rel=1e-5)


def test_a_small_difference_is_not_lost_in_rounding():
    """1e-12 of dW, between factors that have nothing in common: fp32 products, or Gram matrices, end at 1e-8."""
    one = replace(lora(), up=lora().up.double(), down=lora().down.double())
    turn = torch.linalg.qr(normal(5, 3, 3).double())[0]
    other = replace(one, up=one.up @ turn, down=turn.T @ one.down)
    assert difference(one, other) < 1e-14
    other = replace(other, up=other.up * (1 + 1e-12))
    assert difference(one, other) == pytest.approx(1e-12, rel=1e-2)


def test_a_scale_folded_into_b_is_no_difference():
    one = replace(lora(), alpha=1.5)
    assert difference(one, replace(one, up=one.up * 0.5, alpha=3.0)) == 0.0


@pytest.mark.parametrize("make", [lora, lokr, loha, lambda: DiffModule(normal(0, 20, 24))])
def test_another_dtype_is_no_difference_by_itself(make):
    """Values of bf16, held in bf16 and in fp32."""
    wide = {
        name: tensor.bfloat16().float() for name, tensor in vars(make()).items() if isinstance(tensor, torch.Tensor)
    }
    narrow = {name: tensor.bfloat16() for name, tensor in wide.items()}
    assert difference(replace(make(), **wide), replace(make(), **narrow)) == 0.0


def test_lokr_pairs_are_compared_by_their_factors():
    """A 1e-12 between them is below the rounding of dW in fp32."""
    one = LokrModule(normal(0, 4, 2).double(), (normal(1, 5, 2).double(), normal(2, 2, 12).double()), -3.0)
    other = replace(one, w1=one.w1 * (1 + 1e-12))
    assert difference(one, other) == pytest.approx(1e-12, rel=1e-3)
    whole = LokrModule(one.w1 * one.scale, one.w2[0] @ one.w2[1], 1.0)
    assert difference(one, whole) < 1e-15
    for changed in (replace(one, w1=normal(5, 4, 2)), replace(one, w2=normal(6, 5, 12))):
        assert difference(one, changed) == pytest.approx(relative(one.delta(), changed.delta()), rel=1e-5)


def test_a_lokr_beside_its_form_as_lora_is_compared_by_factors(monkeypatch):
    change = LokrModule(normal(0, 4, 2), (normal(1, 5, 1), normal(2, 1, 12)), 3.0)
    apart = split(change, ROWS)
    assert all(isinstance(member, LoraModule) for member in apart.members)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_dense_norm", None)
        assert difference(change, apart) == difference(apart, change) == 0.0
    q = replace(apart.members[0], up=apart.members[0].up * 1.01)
    found = difference(change, replace(apart, members=(q, *apart.members[1:])))
    assert found == pytest.approx(0.01, rel=1e-4)


def test_a_small_member_that_got_lost_shows():
    """k is a thousandth of q: of the whole it is within bf16's rounding."""
    q, k, v = lora(12), replace(lora(4, seed=5), alpha=2e-3), lora(4, seed=9)
    one, other = Split((q, k, v), ROWS), Split((q, None, v), ROWS)
    assert difference(one, other) == 1.0
    assert difference(one, other, whole=True) < 1e-3
    assert difference(other, one) == math.inf
    assert difference(other, Split((q, replace(k, up=0 * k.up), v), ROWS)) == 0.0


def test_chunks_of_rows_add_up(monkeypatch):
    monkeypatch.setattr(compare, "_CHUNK_BYTES", 3 * 24 * 4)
    one, other = lokr(), DiffModule(lokr().delta() + 0.01 * normal(3, 20, 24))
    assert difference(one, other) == pytest.approx(relative(one.delta(), other.delta()), rel=1e-6)
    apart = Split(tuple(DiffModule(part) for part in other.delta().split(ROWS)), ROWS)
    assert difference(one, apart, whole=True) == pytest.approx(relative(one.delta(), other.delta()), rel=1e-6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lora(), lora(16)),
        (lora(), replace(lora(), down=normal(0, 3, 12))),
        (lora(), DiffModule(normal(0, 20))),
        (Split((lora(12), None, None), ROWS), Split((lora(12), None, None), (12, 6, 2))),
        (Split((lora(12), lora(12), None), ROWS), lora()),
    ],
)
def test_other_shapes_are_infinitely_far(one, other):
    assert difference(one, other) == math.inf
    assert difference(other, one) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(value):
    """A NaN is not above any tolerance, and would pass."""
    for change in (lora(), loha(), DiffModule(normal(0, 20, 24))):
        name = {LoraModule: "up", LohaModule: "w1_a", DiffModule: "diff"}[type(change)]
        broken = getattr(change, name).clone()
        broken[3, 1] = value
        assert difference(change, replace(change, **{name: broken})) == math.inf
        assert difference(replace(change, **{name: broken}), change) == math.inf


def test_a_vector_is_compared():
    assert difference(DiffModule(torch.ones(8)), DiffModule(1.5 * torch.ones(8))) == pytest.approx(0.5)


@pytest.mark.parametrize("form", ["magnitude", "magnitude_over_base", "column_magnitude"])
def test_lengths_are_compared_each_by_itself(form):
    size = 24 if form == "column_magnitude" else 20
    lengths = torch.linspace(1e-3, 10, size)
    one = replace(lora(), **{form: lengths})
    changed = lengths.clone()
    changed[0] *= 1.5
    assert difference(one, replace(one, **{form: changed})) == pytest.approx(0.5, rel=1e-5)
    assert difference(one, lora()) == difference(lora(), one) == math.inf
    assert difference(one, replace(one, **{form: lengths * math.nan})) == math.inf


def test_lengths_need_one_form_in_common():
    both = replace(lora(), magnitude=torch.ones(20), magnitude_over_base=torch.ones(20))
    assert difference(both, replace(both, magnitude=None)) == 0.0
    assert difference(replace(both, magnitude_over_base=None), replace(both, magnitude=None)) == math.inf


def test_lengths_of_members_are_cut():
    for change in (lora(), lokr()):
        one = replace(change, magnitude=torch.linspace(1, 2, 20))
        apart = split(one, ROWS)
        assert difference(one, apart) < 1e-6
        k = replace(apart.members[1], magnitude=apart.members[1].magnitude * 1.25)
        assert difference(one, replace(apart, members=(apart.members[0], k, apart.members[2]))) == pytest.approx(0.25)


def test_lengths_of_columns_apart_are_not_those_of_all_rows():
    column = torch.ones(24)
    apart = Split(tuple(replace(member, column_magnitude=column) for member in split(lora(), ROWS).members), ROWS)
    assert difference(replace(lora(), column_magnitude=column), apart) == math.inf
    assert difference(apart, apart) == 0.0
