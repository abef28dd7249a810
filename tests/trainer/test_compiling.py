"""Compiled element-wise work: the numbers of eager, one compilation for all buckets, and nothing left behind.

Compiling takes a C++ compiler and a good part of a minute: each family is compiled once, for all of these tests.
"""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, attention, compiling, memory, pointwise
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.errors import TrainingError
from torch._dynamo.utils import counters

# One worker does it for both.
pytestmark = pytest.mark.xdist_group("compiled")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

# Rows and columns of the latents: five buckets, none with the same number of tokens as another.
BUCKETS = [(6, 10), (4, 8), (8, 8), (10, 6), (12, 4)]
WAYS = {"slim": False, "one block": 1, "all blocks": True}


def adapted(folder, name):
    base = tiny.loaded(folder, name, "fp32")
    tiny.adapt(base, LoraSettings(rank=4, alpha=6))
    return base


def step(base, bucket, how_many):
    """Loss and gradients, all in one vector each."""
    name = base.family.name
    rows, columns = bucket
    generator = torch.Generator().manual_seed(rows)
    noisy = torch.randn(1, tiny.LATENTS[name][0], rows, columns, generator=generator)
    text = torch.randn(1, 3 + rows, tiny.WIDTHS[name], generator=generator)
    parameters = adapters.parameters(base.model, "a")
    with (
        adapters.active(base.model, "a", train=True),
        attention.training_backends(),
        memory.recomputing(*base.family.by_place(base.model), how_many),
    ):
        loss = base.model(noisy, torch.full((1,), 0.4), text).square().mean()
        loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None
    return loss.detach(), gradients


def kept(base):
    """Bytes that a forward pass keeps for backward, weights excluded."""
    weights = {t.untyped_storage()._cdata for t in (*base.model.parameters(), *base.model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage
        return tensor

    with (
        adapters.active(base.model, "a", train=True),
        attention.training_backends(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        base.model(**tiny.inputs(base.family.name, batch=1, tokens=64)).square().mean()
    return sum(storage.nbytes() for storage in found.values())


def flags():
    """Whatever a user may have set of dynamo and inductor, as far as it can be compared."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    return dynamo.save_config_portable(), inductor.save_config_portable()


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """By family: (loss, gradients) eager and compiled of each step, graphs compiled after each, flags around, and bytes
    kept eager and compiled."""
    found = {}
    for name in tiny.NAMES:
        base = adapted(tmp_path_factory.mktemp(name), name)
        before = flags()
        counters.clear()
        pairs, graphs = {}, []
        with compiling.compiled() as compiler:
            for bucket in BUCKETS:
                for way, how_many in WAYS.items():
                    pairs[bucket, way] = [step(base, bucket, how_many)]
                graphs.append(counters["stats"]["unique_graphs"])
            limits = dict(counters["recompile_limit"])
            made, compiled = len(compiler.made), kept(base)
        for (bucket, way), pair in pairs.items():
            pair.append(step(base, bucket, WAYS[way]))
        found[name] = pairs, graphs, made, (before, flags()), limits, (kept(base), compiled)
    return found


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@needs_compiler
def test_loss_and_gradients_are_eager_s_up_to_the_order_of_sums(measured, family_name):
    pairs = measured[family_name][0]
    losses = max(relative(compiled[0], eager[0]) for compiled, eager in pairs.values())
    gradients = max(relative(compiled[1], eager[1]) for compiled, eager in pairs.values())
    print(f"{family_name}: loss {losses:.1e}, gradients {gradients:.1e}")
    assert losses <= 1e-6
    assert gradients <= 1e-6
    assert any(not torch.equal(compiled[1], eager[1]) for compiled, eager in pairs.values()), "nothing was compiled"


@needs_compiler
def test_every_block_and_bucket_shares_one_compilation_of_each_piece(measured, family_name):
    _, graphs, made, *_ = measured[family_name]
    assert graphs == [made] * len(BUCKETS)
    # Norm, q's and k's rotation, SwiGLU, residuals, and Krea 2's gate; a kind of arguments each.
    assert 4 <= made <= 10


@needs_compiler
def test_what_is_compiled_keeps_hardly_more_than_eager(measured, family_name):
    """The memory plan counts eager steps."""
    eager, compiled = measured[family_name][5]
    print(f"{family_name}: {compiled / eager:.3f} of eager's bytes")
    assert compiled <= 1.02 * eager


@needs_compiler
def test_no_setting_of_the_compiler_is_changed(measured, family_name):
    before, after = measured[family_name][3]
    assert before == after


def test_nothing_is_compiled_where_no_graph_is_made_or_nobody_asks():
    asked = []

    def runner(function, args):
        asked.append(function.__name__)
        return function(*args)

    @pointwise.pointwise
    def double(x):
        return 2 * x

    plain, trained = torch.ones(1, 2, 3), torch.ones(1, 2, 3, requires_grad=True)
    with pointwise.run_by(runner):
        double(plain)
        with torch.no_grad():
            double(trained)
        assert asked == []
        double(trained)
    double(trained)
    assert asked == ["double"]


def test_what_cannot_be_compiled_is_an_error_and_does_not_run_eager():
    @pointwise.pointwise
    def impossible(x):
        torch._dynamo.graph_break()
        return 2 * x

    with compiling.compiled(), pytest.raises(TrainingError, match=r"impossible cannot be compiled .* compile = false"):
        impossible(torch.ones(1, 2, 3, requires_grad=True))
