"""Fused ↔ split, the best LoRA of a rank, and baking, against dense formulas in fp64 that are written out here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from graft_lora.lora_convert import Change, DiffModule, LohaModule, LokrModule, LoraModule, Split
from graft_lora.lora_convert.errors import BrokenModuleError, CannotConvertError
from graft_lora.lora_convert.fusing import bake, fuse, split, truncate
from graft_lora.lora_convert.low_rank import alpha_at
from hypothesis import given, settings
from hypothesis import strategies as st

GQA = (12, 4, 4)
"""Rows of grouped-query attention, as Krea 2's 6144 | 1536 | 1536: thirds would be wrong."""
ROWS = sum(GQA)
COLUMNS = 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALPHAS = (1.0, 0.5, 3.0, 16.0, -2.0, 0.7)

settings.register_profile("graft", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("graft")


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lora(rows=ROWS, rank=3, alpha=1.0, seed=0, dtype=torch.float32, **lengths):
    return LoraModule(
        normal(seed, rank, COLUMNS, dtype=dtype), normal(seed + 1, rows, rank, dtype=dtype), alpha, **lengths
    )


def loha(rows=ROWS, rank=2, alpha=1.0, seed=0, dtype=torch.float32):
    sides = [
        (normal(seed + i, rows, rank, dtype=dtype), normal(seed + 9 + i, rank, COLUMNS, dtype=dtype)) for i in (0, 1)
    ]
    return LohaModule(sides[0][0], sides[0][1], sides[1][0], sides[1][1], alpha)


def lokr(first, second, ranks=(None, None), alpha=1.0, seed=0, dtype=torch.float32):
    def factor(seed, rows, columns, rank):
        if rank is None:
            return normal(seed, rows, columns, dtype=dtype)
        return normal(seed, rows, rank, dtype=dtype), normal(seed + 1, rank, columns, dtype=dtype)

    return LokrModule(factor(seed, *first, ranks[0]), factor(seed + 5, *second, ranks[1]), alpha)


def dense(change: Change | Split) -> torch.Tensor:
    """dW in fp64, by the formula of each kind."""
    if isinstance(change, Split):
        parts = zip(change.members, change.rows, strict=True)
        return torch.cat([torch.zeros(n, COLUMNS).double() if m is None else dense(m) for m, n in parts])
    f = {name: tensor.double() for name, tensor in change.factors().items()}
    if isinstance(change, LoraModule):
        return change.alpha / len(f["lora_down"]) * f["lora_up"] @ f["lora_down"]
    if isinstance(change, LohaModule):
        sides = (f["hada_w1_a"] @ f["hada_w1_b"]) * (f["hada_w2_a"] @ f["hada_w2_b"])
        return change.alpha / len(f["hada_w1_b"]) * sides
    if isinstance(change, LokrModule):
        w1, w2 = (f[n] if n in f else f[n + "_a"] @ f[n + "_b"] for n in ("lokr_w1", "lokr_w2"))
        ranks = [len(f[n]) for n in ("lokr_w2_b", "lokr_w1_b") if n in f]
        return (change.alpha / ranks[0] if ranks else 1.0) * torch.kron(w1, w2)
    return f["diff"]


def weight(change: Change, base: torch.Tensor) -> torch.Tensor:
    """The weight that a change makes of its base, in fp64."""
    w = base.double()
    changed = w + dense(change)
    if change.magnitude is not None:
        return change.magnitude.double()[:, None] * changed / changed.norm(dim=1, keepdim=True)
    if change.magnitude_over_base is not None:
        return change.magnitude_over_base.double()[:, None] * changed / w.norm(dim=1, keepdim=True)
    if change.column_magnitude is not None:
        return change.column_magnitude.double() * changed / changed.norm(dim=0)
    return changed


def close(found, wanted, tolerance=1e-6):
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= tolerance * wanted.norm()


def identical(one: Change | Split | None, other: Change | Split | None):
    """The same bits, dtypes, alphas and lengths."""
    assert type(one) is type(other)
    if isinstance(one, Split):
        assert one.rows == other.rows
        for a, b in zip(one.members, other.members, strict=True):
            identical(a, b)
    elif one is not None:
        a, b = one.factors(), other.factors()
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name]), name
        assert one.scale == other.scale
        assert getattr(one, "alpha", None) == getattr(other, "alpha", None)
        for name in ("magnitude", "magnitude_over_base", "column_magnitude"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


ranks = st.integers(1, 6)
alphas = st.sampled_from(ALPHAS)
seeds = st.integers(0, 10**6)
dtypes = st.sampled_from(DTYPES)
rows = st.sampled_from([GQA, (4, 4, 4), (8, 4, 12)])


@st.composite
def fused(draw, rows):
    """Any kind of change of so many rows."""
    total, seed, dtype, alpha = sum(rows), draw(seeds), draw(dtypes), draw(alphas)
    kind = draw(st.sampled_from(["lora", "loha", "lokr", "diff"]))
    if kind == "lora":
        change = lora(total, draw(ranks), alpha, seed, dtype)
    elif kind == "loha":
        change = loha(total, draw(st.integers(1, 3)), alpha, seed, dtype)
    elif kind == "lokr":
        block = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        width = draw(st.sampled_from([2, 6, 12]))
        decomposed = st.sampled_from([None, 1, 2])
        shapes = (total // block, COLUMNS // width), (block, width)
        change = lokr(*shapes, (draw(decomposed), draw(decomposed)), alpha, seed, dtype)
    else:
        change = DiffModule(normal(seed, total, COLUMNS, dtype=dtype))
    lengths = draw(
        st.sampled_from([(), ("magnitude",), ("magnitude_over_base",), ("magnitude", "magnitude_over_base")])
    )
    return replace(change, **{name: normal(seed + 3, total).abs() + 0.5 for name in lengths})


@given(st.data())
def test_split_keeps_every_row(data):
    cuts = data.draw(rows)
    change = data.draw(fused(cuts))
    found = split(change, cuts)
    close(dense(found), dense(change))
    for name in ("magnitude", "magnitude_over_base"):
        whole = getattr(change, name)
        if whole is not None:
            assert torch.equal(torch.cat([getattr(member, name) for member in found.members]), whole)


@given(st.data())
def test_fused_split_fused_gives_the_same_bits(data):
    cuts = data.draw(rows)
    change = data.draw(fused(cuts))
    back = fuse(split(change, cuts))
    if isinstance(change, LokrModule) and any(
        member.factors().keys() != change.factors().keys() for member in split(change, cuts).members
    ):
        # Not a LoKr once cut, so not one again; yet the same dW.
        close(dense(back), dense(change))
    else:
        identical(back, change)


@given(st.data())
def test_fuse_is_the_rows_of_all_members(data):
    """Of any kinds, ranks, alphas and dtypes, and with members missing."""
    cuts = data.draw(rows)
    members = [data.draw(st.none() | fused((n,))) for n in cuts]
    members = [member and replace(member, magnitude=None, magnitude_over_base=None) for member in members]
    if not any(members):
        with pytest.raises(BrokenModuleError, match="all missing"):
            fuse(Split(tuple(members), cuts))
        return
    whole = Split(tuple(members), cuts)
    found = fuse(whole)
    # 1e-6 of each member, not of the strongest.
    for part, wanted in zip(dense(found).split(cuts), dense(whole).split(cuts), strict=True):
        close(part, wanted)


@given(st.data())
def test_split_fused_split_gives_the_same_bits(data):
    """Each member comes back at its own rank out of a stack of them, where scales are equal."""
    cuts = data.draw(rows)
    make = data.draw(st.sampled_from([lora, loha]))
    scale, dtype, seed = data.draw(st.sampled_from([0.5, 2.0, -1.0, 0.75])), data.draw(dtypes), data.draw(seeds)
    members = []
    for i, n in enumerate(cuts):
        rank = data.draw(st.integers(0, 3 if make is loha else 6))
        members.append(make(n, rank, scale * rank, seed + 50 * i, dtype) if rank else None)
    if any(members):
        before = Split(tuple(members), cuts)
        stacked = fuse(before)
        assert stacked.rank == sum(member.rank for member in members if member)
        identical(split(stacked, cuts), before)


def test_members_of_one_a_fuse_at_their_rank():
    """Three copies of A, as every split file has, are one again; q, k and v apart are three times the rank."""
    change = lora(rank=4, alpha=2.0, dtype=torch.bfloat16)
    members = split(change, GQA).members
    assert fuse(Split(members, GQA)).rank == 4
    assert fuse(Split((members[0], members[1], lora(4, 4, 2.0, seed=70, dtype=torch.bfloat16)), GQA)).rank == 8


def test_a_naive_stack_of_equal_a_comes_back_at_one_rank():
    change = lora(rank=3, alpha=3.0)
    up = torch.zeros(sum(GQA), 9)
    start = 0
    for i, part in enumerate(change.up.split(GQA)):
        up[start : start + len(part), 3 * i : 3 * i + 3] = part
        start += len(part)
    stacked = LoraModule(change.down.repeat(3, 1), up, 9.0)
    members = split(stacked, GQA)
    assert [member.rank for member in members.members] == [3, 3, 3]
    identical(fuse(members), change)


def test_ranks_go_to_their_member_unless_their_order_would_change():
    """k's ranks before q's would come back after them, so that such a stack keeps its whole rank."""
    up = torch.zeros(sum(GQA), 2)
    up[:12, 1], up[12:16, 0], up[16:, 1] = 1.0, 1.0, 1.0
    change = LoraModule(normal(0, 2, COLUMNS), up, 2.0)
    members = split(change, GQA)
    assert [member.rank for member in members.members] == [2, 2, 2]
    identical(fuse(members), change)


def test_a_rank_that_nobody_uses_goes_with_the_one_before_it():
    q, k, v = (lora(n, 2, 2.0, seed) for n, seed in zip(GQA, (0, 20, 40), strict=True))
    q = replace(q, up=torch.cat([q.up[:, :1], torch.zeros(12, 1)], dim=1))
    before = Split((q, k, v), GQA)
    identical(split(fuse(before), GQA), before)


def test_dependent_rows_of_a_fall_to_the_numerical_rank():
    """A of k and v in q's row space, as after a rotation of the ranks: the rank of one, and dW of each to 1e-6."""
    q = lora(12, 3, 3.0, dtype=torch.float32)
    members = [q]
    for n, seed in ((4, 10), (4, 20)):
        turned = (normal(seed, 3, 3).double() @ q.down.double()).float()
        members.append(LoraModule(turned, normal(seed + 1, n, 3), 3.0))
    found = fuse(Split(tuple(members), GQA))
    assert found.rank == 3
    assert torch.equal(found.down, q.down)
    for part, member in zip(dense(found).split(GQA), members, strict=True):
        close(part, dense(member))


def test_nearly_dependent_rows_of_a_stay():
    """bf16's rounding of a rotated A is no rounding of fp32: a collapse would cost 1e-3."""
    q = lora(12, 3, 3.0, dtype=torch.bfloat16)
    k = LoraModule((normal(9, 3, 3) @ q.down.float()).bfloat16(), normal(10, 4, 3).bfloat16(), 3.0)
    found = fuse(Split((q, k, None), GQA))
    assert found.rank == 6
    close(dense(found), dense(Split((q, k, None), GQA)), 0.0)


def test_a_collapse_that_would_cost_a_member_its_change_is_not_made():
    """k is the difference of two rows of A that differ by 5e-7: less than any row, and all that k does."""
    a, other, small = normal(0, 1, COLUMNS).double(), normal(1, 1, COLUMNS).double(), normal(2, 1, COLUMNS).double()
    q = LoraModule(torch.cat([a, other]), normal(3, 12, 2).double(), 2.0)
    k = LoraModule(
        torch.cat([a, a + 5e-7 * small]), normal(4, 4, 1).double() @ torch.tensor([[1.0, -1.0]]).double(), 2.0
    )
    found = fuse(Split((q, k, None), GQA))
    close(dense(found)[12:16], dense(k))


def test_dependent_rows_fall_beside_nearly_dependent_ones():
    """Rows 0.05 apart are independent, and no reason to keep those that are dependent."""
    q = lora(12, 3, 3.0)
    k = lora(4, 3, 3.0, seed=20)
    k.down[0] = q.down[0] + 0.05 * k.down[0]
    k.down[1] = 2 * q.down[1]
    members = Split((q, k, None), GQA)
    found = fuse(members)
    assert found.rank == 5
    close(dense(found), dense(members))


def test_rows_that_a_member_repeats_keep_all_their_columns():
    """Two columns of B in one place would be one of them; their sum is what counts."""
    q = lora(12, 3, 3.0)
    q.down[1] = q.down[0]
    k = lora(4, 3, 3.0, seed=20)
    k.down[2] = q.down[0]
    members = Split((q, k, None), GQA)
    found = fuse(members)
    assert found.rank == 4
    close(dense(found), dense(members))


def test_what_a_file_has_in_excess_itself_stays():
    """Rows of A that depend on each other within one member: a collapse would not give the file back."""
    change = lora(rank=3, alpha=3.0)
    change.down[2] = change.down[0] + change.down[1]
    identical(fuse(split(change, GQA)), change)


def test_a_stack_with_a_member_of_zeros_and_lengths():
    """k uses no rank of the stack, and stays for its lengths."""
    q, v = lora(12, 2, 2.0), lora(4, 2, 2.0, seed=9)
    change = replace(fuse(Split((q, None, v), GQA)), magnitude=torch.ones(ROWS))
    found = split(change, GQA)
    assert [member.rank for member in found.members] == [2, 4, 2]
    identical(fuse(found), change)


def test_alpha_comes_back_after_a_change_of_rank():
    """Alphas of files are fp32; what fp64 rounds on the way, by thirds and tenths, would be another one."""
    for value in torch.linspace(0.1, 40, 400).tolist():
        for rank, stack in ((3, 10), (7, 17), (12, 19)):
            assert alpha_at(alpha_at(value, rank, stack), stack, rank) == value


def test_unequal_alphas_keep_their_strength():
    """Alpha left as it is after stacking gives a third."""
    members = tuple(lora(n, 4, alpha, seed) for n, alpha, seed in zip(GQA, (4.0, 4.0, 4.0), (0, 20, 40), strict=True))
    assert fuse(Split(members, GQA)).alpha == 12.0
    unequal = Split(tuple(map(lambda m, a: replace(m, alpha=a), members, (4.0, -1.0, 0.3))), GQA)
    close(dense(fuse(unequal)), dense(unequal))
    assert fuse(unequal).scale == 1.0


@pytest.mark.parametrize(("alpha", "dtype"), [(2.0, torch.bfloat16), (-0.5, torch.bfloat16), (3.0, torch.float32)])
def test_a_ratio_is_folded_in_the_dtype_only_where_it_is_exact(alpha, dtype):
    """Folding 2/3 into bf16 would cost 1.6e-3; a power of two costs nothing."""
    members = Split((lora(12, 4, 8.0, dtype=torch.bfloat16), lora(4, 4, alpha, 9, torch.bfloat16), None), GQA)
    found = fuse(members)
    assert found.up.dtype == dtype
    assert found.down.dtype == torch.bfloat16
    close(dense(found), dense(members), 1e-7)


def test_alpha_zero_changes_nothing():
    members = Split((lora(12, 2, 0.0), lora(4, 2, 1.0, 9), None), GQA)
    close(dense(fuse(members)), dense(members))
    assert not dense(fuse(Split((lora(12, 2, 0.0), None, None), GQA))).any()


def test_a_zero_member_is_left_out_and_comes_back_as_zeros():
    change = lora()
    change.up[12:16] = 0.0
    found = split(change, GQA)
    assert found.members[1] is None
    identical(fuse(found), change)


def test_a_member_of_zeros_stays_where_lengths_change_its_weight():
    change = lora(magnitude=torch.ones(sum(GQA)))
    change.up[12:16] = 0.0
    assert split(change, GQA).members[1] is not None


def test_an_untrained_change_keeps_all_members():
    change = replace(lora(), up=torch.zeros(sum(GQA), 3))
    found = split(change, GQA)
    assert all(member.rank == 3 for member in found.members)
    identical(fuse(found), change)


def test_members_share_no_memory_of_a():
    """safetensors refuses a tensor under two names."""
    members = split(lora(), GQA).members
    assert len({member.down.data_ptr() for member in members}) == 3


KREA2 = (6144, 1536, 1536)
TEXT = (2560, 2560, 2560)
IDEOGRAM4 = (4608, 4608, 4608)
ALIGNED = [
    *product([KREA2], (6, 12, 20, 24, 48, 96, 128)),
    *product([TEXT], (3, 6, 12, 24, 48, 128)),
    *product([IDEOGRAM4], (3, 6, 9, 10, 12, 20, 24, 48, 96, 128)),
]


def factorization(size: int, factor: int) -> tuple[int, int]:
    """LyCORIS' rows of w1 and w2: the factor if it divides, else the largest divisor up to it (-1: up to the root)."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    small = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size and (factor < 0 or n <= factor))
    return small, size // small


@pytest.mark.parametrize(("cuts", "factor"), [*ALIGNED, (KREA2, -1), (IDEOGRAM4, -1)])
def test_aligned_factors_stay_lokr(cuts, factor):
    first, second = factorization(sum(cuts), factor)
    change = LokrModule(normal(0, first, 2), normal(1, second, 1), 1.0)
    found = split(change, cuts)
    assert all(isinstance(member, LokrModule) for member in found.members)
    assert torch.equal(torch.cat([member.delta() for member in found.members]), change.delta())
    identical(fuse(found), change)


@pytest.mark.parametrize(("cuts", "factor"), [(KREA2, 4), (KREA2, 16), (TEXT, -1), (IDEOGRAM4, 16)])
def test_other_factors_do_not(cuts, factor):
    first, second = factorization(sum(cuts), factor)
    change = LokrModule(normal(0, first, 2), normal(1, second, 1), 1.0)
    assert not any(isinstance(member, LokrModule) for member in split(change, cuts).members)


def test_lokr_of_a_decomposed_factor_becomes_lora():
    """B = kron(w1, w2_a), A = kron(I, w2_b): of rank in₁ · rank."""
    change = lokr((4, 2), (5, 12), (None, 1), alpha=3.0)
    found = split(change, (12, 4, 4))
    assert all(isinstance(member, LoraModule) and member.rank == 2 for member in found.members)
    close(dense(found), dense(change))
    both = split(lokr((4, 2), (5, 12), (1, 2), alpha=-3.0), GQA)
    assert all(isinstance(member, LoraModule) and member.rank == 2 for member in both.members)


def test_lokr_of_whole_factors_becomes_its_rows():
    change = lokr((4, 2), (5, 12), alpha=7.0)
    found = split(change, GQA)
    assert all(isinstance(member, DiffModule) for member in found.members)
    close(dense(found), dense(change))


def test_lokr_members_of_unequal_alphas_and_one_missing_stay_lokr():
    q = lokr((6, 4), (2, 6), (None, 2), alpha=2.0)
    v = replace(q, w1=normal(3, 2, 4), alpha=-3.0)
    members = Split((q, None, v), GQA)
    found = fuse(members)
    assert isinstance(found, LokrModule)
    close(dense(found), dense(members))


def test_lokr_members_of_other_factors_are_no_lokr_together():
    q = lokr((6, 4), (2, 6), (2, None), alpha=2.0)
    for k in (lokr((2, 4), (2, 6), (2, None), seed=30), replace(lokr((2, 4), (2, 6), (2, None), seed=30), w2=q.w2)):
        members = Split((q, k, None), GQA)
        found = fuse(members)
        assert not isinstance(found, LokrModule)
        close(dense(found), dense(members))


BASE = normal(99, sum(GQA), COLUMNS)


def baked(found: Split | Change) -> torch.Tensor:
    """The weight, q, k and v each by itself where they are apart."""
    if not isinstance(found, Split):
        return weight(found, BASE)
    parts = zip(found.members, BASE.split(found.rows), strict=True)
    return torch.cat([w.double() if m is None else weight(m, w) for m, w in parts])


def test_dora_by_column_needs_the_base():
    change = lora(column_magnitude=normal(3, COLUMNS).abs())
    with pytest.raises(CannotConvertError, match=r"column.*give it"):
        split(change, GQA)
    found = split(change, GQA, lambda: BASE)
    assert all(isinstance(member, DiffModule) and not member.has_magnitude for member in found.members)
    close(baked(found), baked(change))
    apart = Split(tuple(lora(n, column_magnitude=normal(n, COLUMNS).abs(), seed=n) for n in GQA), GQA)
    with pytest.raises(CannotConvertError, match=r"column.*give it"):
        fuse(apart)
    close(baked(fuse(apart, lambda: BASE)), baked(apart))


@pytest.mark.parametrize("form", ["magnitude", "magnitude_over_base"])
@pytest.mark.parametrize("k", [None, "plain", "other form"])
def test_a_member_without_lengths_needs_the_base(form, k):
    q, v = (lora(n, seed=n, **{form: normal(n, n).abs() + 1}) for n in (12, 4))
    other = {"magnitude": "magnitude_over_base", "magnitude_over_base": "magnitude"}[form]
    member = {None: None, "plain": lora(4, seed=7), "other form": lora(4, seed=7, **{other: normal(8, 4).abs() + 1})}[k]
    apart = Split((q, member, v), GQA)
    with pytest.raises(CannotConvertError, match=r"no common form.*give it"):
        fuse(apart)
    found = fuse(apart, lambda: BASE)
    for name in ("magnitude", "magnitude_over_base"):
        only = {"magnitude": None, "magnitude_over_base": None, name: getattr(found, name)}
        close(weight(replace(found, **only), BASE), baked(apart))


def test_lengths_that_all_have_are_joined_without_the_base():
    both = {name: normal(4, 4).abs() for name in ("magnitude", "magnitude_over_base")}
    q = lora(12, magnitude=normal(1, 12), seed=3)
    found = fuse(Split((q, lora(4, seed=5, **both), lora(4, seed=8, **both)), GQA))
    assert torch.equal(found.magnitude, torch.cat([q.magnitude, both["magnitude"], both["magnitude"]]))
    assert found.magnitude_over_base is None


@pytest.mark.parametrize("form", [None, "magnitude", "magnitude_over_base", "column_magnitude"])
def test_bake_is_all_that_a_change_does(form):
    size = COLUMNS if form == "column_magnitude" else sum(GQA)
    change = lora(alpha=0.01, **({form: normal(3, size).abs() + 0.5} if form else {}))
    found = bake(change, BASE.bfloat16())
    close(found.diff, weight(change, BASE.bfloat16()) - BASE.bfloat16().double())


def test_bake_keeps_the_digits_of_a_small_change():
    """fp32 weights of length 1e3 share seven digits with the changed ones; their difference keeps 1e-6 all the same."""
    base = 1000 * BASE
    change = lora(alpha=1e-2, magnitude=base.norm(dim=1) * 1.000001)
    close(bake(change, base).diff, weight(change, base) - base.double())


def test_bake_of_a_dora_wants_its_base():
    with pytest.raises(BrokenModuleError, match=r"none.*\[20, 24\]"):
        bake(lora(magnitude=torch.ones(20)))
    with pytest.raises(BrokenModuleError, match=r"\[4, 24\].*\[20, 24\]"):
        bake(lora(magnitude=torch.ones(20)), BASE[:4])
    with pytest.raises(BrokenModuleError, match="right base"):
        split(lora(column_magnitude=torch.ones(24)), GQA, lambda: BASE[:4])


@given(st.data())
def test_truncate_is_the_optimum(data):
    """Eckart–Young, against the SVD of the dense dW."""
    cuts = data.draw(rows)
    change = data.draw(fused(cuts))
    rank = data.draw(st.integers(1, 8))
    found, error = truncate(change, rank)
    s = torch.linalg.svdvals(dense(change))
    assert isinstance(found, LoraModule)
    assert found.rank <= rank
    assert torch.equal(found.magnitude, change.magnitude) if change.magnitude is not None else found.magnitude is None
    # Of equal singular values the best is not unique: the distance is, and must be the reported one.
    best = (s[rank:].norm() / s.norm()).item()
    assert error == pytest.approx(best, abs=1e-7)
    reached = ((dense(found) - dense(change)).norm() / s.norm()).item()
    assert reached == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("alpha", [3.0, -3.0])
@pytest.mark.parametrize("decomposed", [(None, None), (2, None), (None, 3), (1, 2)])
def test_truncate_of_a_kronecker_product(decomposed, alpha):
    change = lokr((5, 4), (4, 6), decomposed, alpha)
    found, error = truncate(change, 3)
    s = torch.linalg.svdvals(dense(change))
    best = (s[3:].norm() / s.norm()).item()
    assert error == pytest.approx(best, abs=1e-7)
    assert ((dense(found) - dense(change)).norm() / s.norm()).item() == pytest.approx(best, abs=1e-6)


def test_truncate_of_members_together_beats_each_by_itself():
    apart = Split(tuple(lora(n, 4, 4.0, seed) for n, seed in zip(GQA, (0, 20, 40), strict=True)), GQA)
    found, error = truncate(fuse(apart), 4)
    each = torch.cat([dense(truncate(member, 1)[0]) for member in apart.members])
    assert found.rank == 4
    assert error < 0.9 * (each - dense(apart)).norm() / dense(apart).norm()


def test_truncate_leaves_what_is_small_enough():
    change = lora(rank=3)
    assert truncate(change, 3) == (change, 0.0)


@pytest.mark.parametrize("shape", [(20, 24), (24, 20)])
def test_truncate_below_the_rank_of_a_deficient_change(shape):
    """Zero singular values divide nothing."""
    up, down = normal(0, shape[0], 2), normal(1, 2, shape[1])
    change = LoraModule(torch.cat([down, down, 0 * down]), torch.cat([up, up, up], dim=1), 6.0)
    found, error = truncate(change, 5)
    assert error < 1e-7
    close(found.delta(), dense(change))
    nothing, error = truncate(replace(change, up=0 * change.up), 2)
    assert error == 0.0
    assert not nothing.delta().any()


def test_truncate_refuses_what_has_no_rank():
    with pytest.raises(ValueError, match="rank 0"):
        truncate(lora(), 0)
    with pytest.raises(ValueError, match="vector"):
        truncate(DiffModule(torch.ones(4)), 2)


def test_shapes_that_do_not_go_together_are_refused():
    with pytest.raises(BrokenModuleError, match=r"\[20, 24\].*12 \+ 4 \+ 8"):
        split(lora(), (12, 4, 8))
    with pytest.raises(BrokenModuleError, match=r"k is \[12, 24\]; wanted \[4, 24\]"):
        fuse(Split((lora(12), lora(12), lora(4)), GQA))
