"""Blocks on the CPU: the same numbers, every layer trained, and the weights where they should be."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, memory
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.formats import FORMATS
from graft_lora.trainer.offload import BlocksOnCPU, spread
from graft_lora.trainer.quantization import FrozenLinear, quantize_model

BLOCKS = 5


@pytest.fixture(scope="module", params=tiny.NAMES)
def base_file(request, tmp_path_factory):
    """A tiny base of five blocks, so that the two slots have to be taken in turns."""
    config = dataclasses.replace(
        tiny.CONFIGS[request.param], **{"blocks" if request.param == "krea2" else "layers": BLOCKS}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[request.param].build(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    return tiny.write(model, tmp_path_factory.mktemp("base") / f"{request.param}.safetensors")


def step(base, checkpointing, targets="attention+mlp", blocks="all", kind="lora"):
    """Loss and the gradients of a rank-2 adapter with random B, by name."""
    settings = LoraSettings(kind, rank=2, alpha=2, targets=targets, blocks=blocks)
    names = adapters.resolve_targets(base.family, adapters.linears(base.model), settings)
    adapters.inject(base.model, "a", settings, names, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for layer in adapters.adapted(base.model, "a").values():
        torch.nn.init.normal_(layer.zero_at_start("a"), std=0.1, generator=generator)
    chosen = base.family.blocks(base.model).values() if checkpointing else ()
    with adapters.active(base.model, "a", train=True), memory.checkpointed(chosen):
        loss = base.model(**tiny.inputs(base.family.name)).float().square().mean()
        loss.backward()
    return loss.detach(), {
        f"{name}.{part}": weight.grad
        for name, layer in adapters.adapted(base.model, "a").items()
        for part, weight in layer.weights("a").items()
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("precision", "count"), [("fp32", 1), ("fp32", BLOCKS), ("int8", 2), ("nf4", 3), ("mxfp8", 2)])
def test_loss_and_gradients_are_identical_and_no_layer_is_left_untrained(base_file, precision, checkpointing, count):
    """ComfyUI's own offloading leaves 16 layers untrained, and musubi's reports count wrong ones: every one is seen."""
    compute = "fp32" if precision == "fp32" else "bf16"
    plain_loss, plain = step(load_base(base_file, precision, compute), checkpointing)
    base = load_base(base_file, precision, compute, blocks_on_cpu=count)
    loss, gradients = step(base, checkpointing)
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, plain[name]), name
    # Twice on the same base: the slots are left in a state that the next step can begin from.
    adapters.remove(base.model, "a")
    assert torch.equal(step(base, checkpointing)[0], plain_loss)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_other_adapters_on_every_linear_are_identical_too(base_file, kind, checkpointing):
    """A DoRA keeps a base's bias for backward, by which time another block has taken its place on the device."""
    plain_loss, plain = step(load_base(base_file, "int8", "bf16"), checkpointing, "all", kind=kind)
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=BLOCKS)
    loss, gradients = step(base, checkpointing, "all", kind=kind)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def reads(monkeypatch):
    """Notes, for each read of a frozen weight, the storage that it was read from."""
    seen = []
    dequantized = FrozenLinear.dequantized

    def noting(layer, dtype):
        seen.append((layer, layer.get_buffer("data").untyped_storage().data_ptr()))
        return dequantized(layer, dtype)

    monkeypatch.setattr(FrozenLinear, "dequantized", noting)
    return seen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_read_from_the_device_alone(base_file, monkeypatch, checkpointing):
    """On a GPU a weight left on the CPU would be an error; here both are CPU memory, so it is looked at."""
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=3)
    seen = reads(monkeypatch)
    step(base, checkpointing)
    with torch.no_grad():
        base.model(**tiny.inputs(base.family.name))
    waiting = {place.layer for block in base.on_cpu.host for place in block.places}
    slots = {slot.flat.untyped_storage().data_ptr() for slot in base.on_cpu.slots}
    assert len(slots) == 2
    read = [pointer for layer, pointer in seen if layer in waiting]
    assert len(read) > 2 * len(waiting)  # forward, most of them in backward, and the pass without gradients
    assert set(read) <= slots


def test_the_next_block_is_copied_before_it_is_needed(base_file, monkeypatch):
    """Forward, recomputation and backward each enter a block whose weights are on their way already."""
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=BLOCKS)
    on_cpu, late = base.on_cpu, []
    enter = on_cpu.enter

    def watched(index, step, wrap):
        if on_cpu._holding(index) is None:
            late.append(index)
        enter(index, step, wrap)

    monkeypatch.setattr(on_cpu, "enter", watched)
    step(base, checkpointing=True)
    assert late == [0]  # the very first one: nothing came before it
    late.clear()
    with torch.no_grad():
        for _ in range(3):  # as when sampling
            base.model(**tiny.inputs(base.family.name))
    assert late == []


def test_a_block_left_out_by_the_adapter_needs_no_backward(base_file):
    """Blocks below the first adapted one have outputs without gradient: no hook, and no copy, in the backward pass."""
    plain_loss, plain = step(load_base(base_file, "int8", "bf16"), True, blocks="3-4")
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=BLOCKS)
    loss, gradients = step(base, True, blocks="3-4")
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)
    assert {slot.block for slot in base.on_cpu.slots} == {2, 3}  # it went no further down than prefetching block 2


def test_moving_the_model_leaves_the_blocks_where_they_are(base_file):
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=2)
    before = [place.layer.get_buffer(place.name).data_ptr() for block in base.on_cpu.host for place in block.places]
    base.model.to(torch.device("meta"))
    after = [place.layer.get_buffer(place.name).data_ptr() for block in base.on_cpu.host for place in block.places]
    assert before == after
    others = [m for m in base.model.modules() if isinstance(m, FrozenLinear) and not m.placed]
    assert all(layer.data.is_meta for layer in others)


def test_more_blocks_than_there_are(base_file):
    with pytest.raises(SettingsError, match=r"blocks_on_cpu is 6; this .* has 5 blocks"):
        load_base(base_file, "int8", "bf16", blocks_on_cpu=6)


def test_blocks_are_spread_over_the_depth():
    assert spread(0, 28) == []
    assert spread(2, 28) == [7, 21]
    assert spread(28, 28) == list(range(28))
    for count in range(29):
        chosen = spread(count, 28)
        assert len(set(chosen)) == count
        gaps = [b - a for a, b in itertools.pairwise(chosen)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_parked_blocks_give_the_slots_back_and_come_back_the_same(base_file, monkeypatch):
    """A host that shares the device asks for the memory: the weights are read where they always are."""
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=3)
    inputs, on_cpu = tiny.inputs(base.family.name), base.on_cpu
    with torch.no_grad():
        before = base.model(**inputs)
        slots = {slot.flat.untyped_storage().data_ptr() for slot in on_cpu.slots}
        assert on_cpu.device_bytes == sum(slot.flat.nbytes for slot in on_cpu.slots)
        on_cpu.park()
        assert on_cpu.parked
        assert on_cpu.slots == []
        for place in (place for block in on_cpu.host for place in block.places):
            # Nothing holds on to a slot, whose memory would stay taken.
            assert place.layer.get_buffer(place.name).untyped_storage().data_ptr() not in slots
        with pytest.raises(RuntimeError, match="are parked; unpark them"):
            base.model(**inputs)
        on_cpu.unpark()
        assert len(on_cpu.slots) == 2
        assert torch.equal(base.model(**inputs), before)
    loss = step(base, checkpointing=True)[0]
    assert torch.equal(loss, step(load_base(base_file, "int8", "bf16"), checkpointing=True)[0])


def test_dissolved_blocks_are_ordinary_ones(base_file):
    """Another number of blocks on the CPU, for another run on the same base, begins with none."""
    base = load_base(base_file, "int8", "bf16", blocks_on_cpu=3)
    inputs = tiny.inputs(base.family.name)
    with torch.no_grad():
        before = base.model(**inputs)
        base.on_cpu.dissolve()
        flats = {block.flat.untyped_storage().data_ptr() for block in base.on_cpu.host}
        assert torch.equal(base.model(**inputs), before)
        layers = [module for module in base.model.modules() if isinstance(module, FrozenLinear)]
        assert not any(layer.placed for layer in layers)
        assert not any(layer.get_buffer("data").untyped_storage().data_ptr() in flats for layer in layers)
        again = BlocksOnCPU(base.family.main_blocks(base.model)[:2], "cpu")
        assert torch.equal(base.model(**inputs), before)
    assert again.count == 2


class StandInStream:
    """Stands in for CUDA's streams: writes down who waits for what, in order."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.log.append(f"{self.name} marks")
        return "the copy"


def test_copies_wait_for_the_slot_and_computing_waits_for_the_copy(monkeypatch):
    """The two orders without which a GPU would compute with half-copied weights, or overwrite weights in use."""
    from contextlib import nullcontext

    blocks = [quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)), lambda _: FORMATS["int8"]) for _ in range(3)]
    on_cpu, log = BlocksOnCPU(blocks, "cpu"), []
    on_cpu.stream = StandInStream(log, "copying")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: StandInStream(log, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    on_cpu.enter(0, 1, wrap=False)
    copy = ["copying waits for all of computing", "copying marks"]
    assert log == [*copy, "computing waits for the copy", *copy]
    log.clear()
    on_cpu.enter(1, 1, wrap=False)
    assert log == ["computing waits for the copy", *copy]
