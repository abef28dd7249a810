"""q, k and v have one dtype at SDPA, in the forward and in the recomputation, whatever is combined with what."""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, attention, memory
from graft_lora.trainer.adapters import LoraLinear, LoraSettings, resolve_targets
from graft_lora.trainer.base_model import load_base

PRECISIONS = ["fp32", "bf16", "fp8", "int8", "nf4", "mxfp8"]
TARGETS = {
    "krea2": {"q": r".*\.wq", "k": r".*\.wk", "v": r".*\.wv", "all": "all"},
    # Ideogram 4 has one module for all three.
    "ideogram4": {"qkv": r".*\.qkv", "all": "all"},
}
CASES = [
    (name, precision, dtype, target, checkpointing, autocast)
    for name in tiny.NAMES
    for precision, dtype, target, checkpointing, autocast in itertools.product(
        PRECISIONS, [torch.float32, torch.bfloat16], TARGETS[name], [True, False], [True, False]
    )
]


@pytest.fixture(autouse=True)
def _slim_however_small(monkeypatch):
    """Blocks of tiny models are slim too."""
    monkeypatch.setattr(memory, "SMALL", 0)


@pytest.fixture
def seen(monkeypatch):
    """The dtypes of q, k and v at every call of SDPA, or of the kernel that it would choose."""
    calls = []

    def spying(original):
        def spy(q, k, v, mask):
            calls.append((q.dtype, k.dtype, v.dtype))
            return original(q, k, v, mask)

        return spy

    monkeypatch.setattr(attention, "_sdpa", spying(attention._sdpa))
    for key, kernel in attention.KERNELS.items():
        monkeypatch.setitem(attention.KERNELS, key, kernel._replace(forward=spying(kernel.forward)))
    return calls


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: tiny.write(tiny.build(name), folder / f"{name}.safetensors") for name in tiny.NAMES}


@pytest.fixture(scope="module")
def bases(files):
    """Loads a base once for all the cases that adapt it."""
    return functools.cache(lambda name, precision, compute: load_base(files[name], precision, compute))


@contextmanager
def adapted(base, *args):
    """The base with an adapter, which is removed again, also where the case fails."""
    try:
        yield adapt(base, *args)
    finally:
        adapters.remove(base.model, "a")


def adapted_base(path, precision, compute, dtype, targets):
    return adapt(load_base(path, precision, compute), dtype, targets)


def adapt(base, dtype, targets, name="a"):
    chosen = resolve_targets(base.family, adapters.linears(base.model), LoraSettings(targets=targets))
    settings = LoraSettings(rank=2, alpha=2)
    adapters.inject(base.model, name, settings, chosen, torch.Generator().manual_seed(0), dtype)
    for layer in adapters.adapted(base.model, name).values():
        with torch.no_grad():
            layer.lora_B[name].weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return base


@pytest.mark.parametrize(("name", "precision", "dtype", "target", "checkpointing", "autocast"), CASES)
def test_one_dtype_at_sdpa(bases, seen, name, precision, dtype, target, checkpointing, autocast):
    base = bases(name, precision, "fp32" if precision == "fp32" else "bf16")
    blocks = base.family.blocks(base.model).values()
    outer = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    recomputing = memory.checkpointed(blocks) if checkpointing else memory.checkpointed((), slim=blocks)
    with (
        adapted(base, dtype, TARGETS[name][target]),
        adapters.active(base.model, "a", train=True),
        attention.training_backends(),
        recomputing,
    ):
        with outer:
            out = base.model(**tiny.inputs(name))
        forward = len(seen)
        # The backward runs outside autocast, as PyTorch advises: what it recomputes must not notice.
        out.float().square().mean().backward()
        parameters = adapters.parameters(base.model, "a")
    assert forward == len(blocks)
    recomputed = len(seen) - forward
    if target == "all":
        assert recomputed == (len(blocks) if checkpointing else 0)
    else:
        # Blocks that no gradient passes through need not run again.
        assert (recomputed > 0) == checkpointing
    wanted = base.model.compute_dtype
    assert set(seen) == {(wanted, wanted, wanted)}
    assert parameters
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpointing_is_bit_identical_in_fp32(files, family_name, precision):
    base = adapted_base(files[family_name], precision, "fp32", torch.float32, "all")
    plain, recomputed = (tiny.loss_and_gradients(base, "a", recomputing) for recomputing in (False, True))
    assert all(torch.equal(found, wanted) for found, wanted in zip(recomputed, plain, strict=True))


def test_checkpointing_saves_memory(files, family_name):
    """Bytes that autograd packs for backward, parameters and buffers excluded."""
    base = adapted_base(files[family_name], "fp32", "fp32", torch.float32, "all")
    own = {t.untyped_storage().data_ptr() for t in (*base.model.parameters(), *base.model.buffers())}
    sizes = []
    for context in (nullcontext(), memory.checkpointed(base.family.blocks(base.model).values())):
        saved = {}

        def pack(tensor, saved=saved):
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            adapters.active(base.model, "a", train=True),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            context,
        ):
            out = base.model(**tiny.inputs(family_name))
            sizes.append(sum(saved.values()))
            out.sum().backward()
    assert sizes[1] < 0.5 * sizes[0]


def test_checkpointing_is_taken_off_again(files, family_name):
    base = load_base(files[family_name], "bf16", "bf16")
    blocks = base.family.blocks(base.model).values()
    with pytest.raises(RuntimeError, match="broken"), memory.checkpointed(blocks):
        assert all("forward" in block.__dict__ for block in blocks)
        raise RuntimeError("broken")
    assert not any("forward" in block.__dict__ for block in blocks)


class DropsAutocast(torch.autograd.Function):
    """A checkpoint as some trainers write it by hand: it recomputes under whatever autocast the backward has."""

    @staticmethod
    def forward(ctx, block, rope, mask, x, shared):
        ctx.block, ctx.rope, ctx.mask = block, rope, mask
        ctx.save_for_backward(x, shared)
        with torch.no_grad():
            return block(x, shared, rope, mask)

    @staticmethod
    def backward(ctx, grad):
        x, shared = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.block(x, shared, ctx.rope, ctx.mask)
        torch.autograd.backward(out, grad)
        return None, None, None, x.grad, shared.grad


def without_our_casts(monkeypatch):
    """Both casts taken away: the adapter's output to the base's, and k and v to q's dtype."""

    def forward(self, x):
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A:
                down, up = self.lora_A[name], self.lora_B[name]
                result = result + self.scaling[name] * up(down(x.to(down.weight.dtype)))
        return result

    def attend(q, k, v, mask=None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    from graft_lora.trainer.families import krea2

    monkeypatch.setattr(LoraLinear, "forward", forward)
    monkeypatch.setattr(krea2, "attention", attend)


@pytest.mark.parametrize("casts", [True, False])
def test_ai_toolkit_1041_sdpa_refuses_in_the_recomputation_without_our_casts(files, monkeypatch, casts):
    """A bf16 base, an fp32 adapter on k alone, autocast on in the forward and off in the recomputation."""
    if not casts:
        without_our_casts(monkeypatch)
    base = adapted_base(files["krea2"], "bf16", "bf16", torch.float32, r".*\.wk")
    block = base.model.blocks[0]
    x = torch.randn(1, 22, 256).bfloat16().requires_grad_()
    shared = torch.randn(1, 1, 6 * 256).bfloat16().requires_grad_()
    from graft_lora.trainer.families.krea2 import rope_tables

    rope = rope_tables((32, 48, 48), 7, 3, 5)
    with adapters.active(base.model, "a", train=True):
        with torch.autocast("cpu", torch.bfloat16):
            out = DropsAutocast.apply(block, rope, None, x, shared)
        if casts:
            out.float().sum().backward()
            assert all(p.grad.isfinite().all() for p in block.attn.wk.parameters() if p.requires_grad)
        else:
            with pytest.raises(RuntimeError, match=r"[Ee]xpected query, key, and value to have the same dtype"):
                out.float().sum().backward()


def test_sdpa_patched_by_another_pack_is_not_used(files, monkeypatch):
    """SageAttention replaces torch.nn.functional.scaled_dot_product_attention by a kernel without a backward."""

    def refuse(*args, **kwargs):
        raise AssertionError("a patched SDPA was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    load_base(files["krea2"], "bf16", "bf16").model(**tiny.inputs("krea2"))


@pytest.mark.parametrize("fails", [False, True])
def test_backends_are_pinned_and_restored(fails):
    flags = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())
    try:
        with attention.training_backends():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()) == flags


@pytest.mark.parametrize("odd", ["k", "v", "q"])
def test_attention_casts_k_and_v_to_q(odd):
    """The second of the two casts that end ai-toolkit 1041."""
    dtypes = {name: torch.float32 if name == odd else torch.bfloat16 for name in "qkv"}
    q, k, v = (torch.randn(1, 5, heads, 8).to(dtypes[n]) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    out = attention.attention(q, k, v)
    assert out.dtype == q.dtype
    assert out.shape == (1, 5, 32)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(1, 2), k.float().transpose(1, 2), v.float().transpose(1, 2), enable_gqa=True
    )
    assert tiny.relative(out, wanted.transpose(1, 2).flatten(2)) < 0.02


def test_checkpointing_inside_checkpointing_leaves_the_outer_one_on(files):
    base = load_base(files["krea2"], "bf16", "bf16")
    blocks = list(base.family.blocks(base.model).values())
    with memory.checkpointed(blocks):
        outer = [block.forward for block in blocks]
        with memory.checkpointed(blocks[:1]):
            pass
        assert [block.forward for block in blocks] == outer
