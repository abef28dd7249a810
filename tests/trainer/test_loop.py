"""The training step against a plain loop over diffusers + PEFT, and what a session leaves behind."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from dataclasses import replace

import peft
import pytest
import tiny
import torch
from graft_lora.lora_convert import read_comfyui, read_state
from graft_lora.trainer import adapters, loop
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.batches import BatchStream
from graft_lora.trainer.errors import SettingsError, TrainingError
from graft_lora.trainer.loop import NotFiniteError, TrainSession
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# One worker compiles torchao's step, and the others do not compile the same again.
COMPILED = pytest.mark.xdist_group("compiled")


def samples(name, count=6, lengths=(7, 4, 5)):
    generator = torch.Generator().manual_seed(11)
    return [
        Sample(
            f"{index}.png",
            f"caption {index}",
            torch.randn(tiny.LATENTS[name], generator=generator),
            torch.randn(lengths[index % len(lengths)], tiny.WIDTHS[name], generator=generator),
        )
        for index in range(count)
    ]


def session(tmp_path, name, lora=None, precision="fp32", compute="fp32", adapter="a", base=None, drop=0.0, **train):
    path = tmp_path / f"{name}.safetensors"
    if not path.exists():
        tiny.write(tiny.build(name), path)
    base = base or load_base(path, precision, compute)
    values = {"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 3, "seed": 3, **train}
    empty = None if base.family.image_only_pass else torch.zeros(1, tiny.WIDTHS[name])
    lora = lora or LoraSettings(rank=4, alpha=8)
    return TrainSession(base, samples(name), lora, TrainSettings(**values), adapter, drop, empty)


class OneThird(nn.Module):
    """Stands for to_q, to_k or to_v of a diffusers model whose attention got one fused Linear."""

    def __init__(self, attention, index):
        super().__init__()
        self._attention = [attention]  # not a submodule
        self.index = index

    def forward(self, x):
        return self._attention[0].qkv(x).chunk(3, dim=-1)[self.index]


def fuse(twin):
    for layer in twin.layers:
        attention = layer.attention
        fused = nn.Linear(attention.hidden_size, 3 * attention.hidden_size, bias=False)
        with torch.no_grad():
            fused.weight.copy_(torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]))
        attention.qkv = fused
        for index, member in enumerate(("to_q", "to_k", "to_v")):
            setattr(attention, member, OneThird(attention, index))
    return twin


def peft_config(kind, modules):
    targets = "|".join(map(re.escape, modules))
    if kind == "lokr":
        return peft.LoKrConfig(r=4, alpha=4, decompose_factor=4, init_weights="lycoris", target_modules=targets)
    return peft.LoraConfig(r=4, lora_alpha=8, use_dora=kind == "dora", target_modules=targets)


def peft_weights(kind, layer):
    """PEFT's weights of one layer by the names that Graft has for them."""
    if kind == "lokr":
        names = ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
        return {name: getattr(layer, name)["default"] for name in names if "default" in getattr(layer, name)}
    found = {"lora_down": layer.lora_A["default"].weight, "lora_up": layer.lora_B["default"].weight}
    return found | ({"magnitude": layer.lora_magnitude_vector["default"].weight} if kind == "dora" else {})


def weights_of(module):
    return module.factors() | ({} if module.magnitude is None else {"magnitude": module.magnitude})


@pytest.mark.parametrize(
    ("name", "targets", "fused", "kind"),
    [
        ("krea2", "all", False, "lora"),
        ("krea2", "all", False, "dora"),
        ("krea2", "all", False, "lokr"),
        ("ideogram4", r".*(?<!qkv)", False, "lora"),  # all but the fused projection
        ("ideogram4", "all", True, "lora"),
        ("ideogram4", "all", True, "dora"),
        ("ideogram4", "all", True, "lokr"),
    ],
)
def test_ten_steps_equal_diffusers_and_peft(tmp_path, monkeypatch, name, targets, fused, kind):
    """Same initial weights, batches, noise and sigmas, fp32; gradient accumulation, clipping and warm-up included."""
    lora, limit = LoraSettings(kind, 4, 8, targets=targets), 0.5
    if kind == "lokr":
        lora, limit = LoraSettings(kind, 4, 4, factor=4, targets=targets), 0.2
    graft = session(tmp_path, name, lora, steps=10, accumulation=2, max_grad_norm=limit)
    initial = adapters.to_canonical(graft.base.model, "a")
    record = []
    for function in ("collate", "draw_sigmas", "draw_noise"):
        original = getattr(loop, function)

        def spy(*args, original=original, **kwargs):
            record.append(original(*args, **kwargs))
            return record[-1]

        monkeypatch.setattr(loop, function, spy)
    with graft:
        logs = list(graft.steps())
    trained = adapters.to_canonical(graft.base.model, "a")

    twin = tiny.diffusers_twin(name, tiny.build(name)).requires_grad_(False)
    twin = fuse(twin) if fused else twin
    modules = {}
    for module in initial:
        modules[module] = (
            module if fused and module.endswith("qkv") else graft.base.family.table.to_diffusers(module)[0]
        )
    peft.inject_adapter_in_model(peft_config(kind, modules.values()), twin, "default")
    theirs = {module: peft_weights(kind, twin.get_submodule(name)) for module, name in modules.items()}
    for module, weights in theirs.items():
        assert weights.keys() == weights_of(initial[module]).keys()
        for part, weight in weights.items():
            weight.data.copy_(initial[module].factors().get(part, weight))
    parameters = [p for p in twin.parameters() if p.requires_grad]
    assert len(parameters) == sum(len(weights) for weights in theirs.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=1e-4)
    draws = iter(record)
    for step in range(10):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 3)
        batches = [(next(draws), next(draws), next(draws)) for _ in range(2)]
        pictures = sum(len(batch.names) for batch, _, _ in batches)
        total = 0.0
        for batch, sigma, noise in batches:
            share = sigma.view(-1, 1, 1, 1)
            noisy = (1 - share) * batch.latents + share * noise
            velocity = tiny.diffusers_velocity(name, twin, noisy, sigma, batch.conditioning, batch.mask)
            loss = (velocity - (noise - batch.latents)).square().mean(dim=(1, 2, 3)).sum() / pictures
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad()
        assert logs[step].loss == pytest.approx(total, rel=1e-4)
        assert logs[step].grad_norm == pytest.approx(norm.item(), rel=1e-3)
    assert max(log.grad_norm for log in logs) > limit, "clipping was never exercised"
    for module, weights in theirs.items():
        for part, weight in weights.items():
            found, start = weights_of(trained[module])[part], weights_of(initial[module])[part]
            # Adam divides a gradient near zero by itself, and so its rounding too.
            assert tiny.relative(weight, found) < 3e-4, (module, part)
            assert tiny.relative(found, start) > 1e-3 or not start.any()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_module_is_trained_and_the_base_is_not(tmp_path, family_name, precision):
    """ComfyUI's node leaves 16 text-fusion layers untrained when it offloads; here every B of `all` must move."""
    graft = session(tmp_path, family_name, LoraSettings(rank=4, alpha=4, targets="all"), precision, "bf16")
    before = {k: v.clone() for k, v in graft.base.model.state_dict().items() if ".lora_" not in k}
    with graft:
        logs = list(graft.steps())
    graft.check_trained()
    assert [log.step for log in logs] == [1, 2, 3, 4]
    assert [log.learning_rate for log in logs] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    after = graft.base.model.state_dict()
    assert all(torch.equal(after[k].float(), v.float()) for k, v in before.items())
    assert not any(p.requires_grad for p in graft.base.model.parameters())


def test_a_module_that_learned_nothing_is_named(tmp_path):
    graft = session(tmp_path, "krea2")
    with graft:
        list(graft.steps())
    layer = adapters.adapted(graft.base.model, "a")["blocks.1.mlp.up"]
    with torch.no_grad():
        layer.lora_B["a"].weight.zero_()
    with pytest.raises(TrainingError, match=r"1 of \d+ modules learned nothing .*blocks\.1\.mlp\.up"):
        graft.check_trained()
    with torch.no_grad():
        layer.lora_B["a"].weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"not finite: blocks\.1\.mlp\.up"):
        graft.check_trained()


def run_to_end(tmp_path, name, **changes):
    graft = session(tmp_path, name, **changes)
    with graft:
        losses = [log.loss for log in graft.steps()]
    return losses, adapters.to_canonical(graft.base.model, "a")


def test_a_seed_fixes_the_whole_run(tmp_path, family_name):
    lora = LoraSettings(rank=4, alpha=4, dropout=0.1)
    torch.manual_seed(1)
    first = run_to_end(tmp_path, family_name, lora=lora)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = run_to_end(tmp_path, family_name, lora=lora)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator was drawn from"
    other = run_to_end(tmp_path, family_name, lora=lora, seed=4)
    assert first[0] == second[0] != other[0]
    assert all(torch.equal(first[1][m].up, second[1][m].up) for m in first[1])


def test_dropout_and_checkpointing_together_change_nothing(tmp_path, family_name):
    lora = LoraSettings(rank=4, alpha=4, dropout=0.3)
    on = run_to_end(tmp_path, family_name, lora=lora, checkpointing=True)
    off = run_to_end(tmp_path, family_name, lora=lora, checkpointing=False)
    assert on[0] == off[0]
    assert all(torch.equal(on[1][m].up, off[1][m].up) for m in on[1])
    assert on[0] != run_to_end(tmp_path, family_name)[0], "dropout had no effect"


def test_learning_rate_zero_changes_nothing(tmp_path, family_name):
    graft = session(tmp_path, family_name, learning_rate=0.0)
    before = adapters.to_canonical(graft.base.model, "a")
    with graft:
        list(graft.steps())
    after = adapters.to_canonical(graft.base.model, "a")
    assert all(torch.equal(before[m].down, after[m].down) and not after[m].up.any() for m in before)


def test_a_second_run_on_the_same_base_leaves_the_first_alone(tmp_path, family_name):
    first = session(tmp_path, family_name)
    with first:
        list(first.steps())
    kept = adapters.to_canonical(first.base.model, "a")
    second = session(tmp_path, family_name, adapter="b", base=first.base)
    with second:
        losses = [log.loss for log in second.steps()]
    assert losses == run_to_end(tmp_path, family_name)[0], "the second run felt the first"
    again = adapters.to_canonical(first.base.model, "a")
    assert all(torch.equal(kept[m].up, again[m].up) for m in kept)


def test_trains_inside_comfyui_inference_mode(tmp_path, family_name):
    """FluxTrainer 12: 'Inference tensors cannot be saved for backward'."""
    plain = run_to_end(tmp_path, family_name, precision="int8")[0]
    with torch.inference_mode():
        assert run_to_end(tmp_path, family_name, precision="int8")[0] == plain


def test_globals_and_model_are_restored_after_an_exception(tmp_path):
    graft = session(tmp_path, "krea2")
    with pytest.raises(RuntimeError, match="broken"), graft:
        graft.step()
        raise RuntimeError("broken")
    assert not any("forward" in module.__dict__ for module in graft.base.model.modules())
    assert not any(p.requires_grad for p in graft.base.model.parameters())
    # The globals of torch are compared after every test (conftest.py).


def test_an_infinite_loss_stops_the_run_and_names_the_pictures(tmp_path):
    graft = session(tmp_path, "krea2", batch_size=1)
    graft.samples = [Sample("bad.png", "", torch.full((16, 6, 10), torch.inf), torch.zeros(2, 120))]
    graft.stream = BatchStream(graft.samples, 1, graft.generator)
    before = adapters.to_canonical(graft.base.model, "a")
    with graft, pytest.raises(TrainingError, match=r"loss became (nan|inf) in step 1 on bad\.png"):
        graft.step()
    after = adapters.to_canonical(graft.base.model, "a")
    assert all(torch.equal(before[m].down, after[m].down) for m in before)


def test_targets_that_match_nothing_leave_no_adapter(tmp_path):
    with pytest.raises(SettingsError, match="is none of"):
        session(tmp_path, "krea2", LoraSettings(targets="nothing"))


KINDS = {
    "lora": LoraSettings(rank=4, alpha=8),
    "rslora": LoraSettings(rank=5, alpha=8, rslora=True),  # an alpha that fp32 does not hold exactly
    "dora": LoraSettings("dora", 4, 8),
    "lokr": LoraSettings("lokr", 4, 8, factor=4),
    "lokr, whole": LoraSettings("lokr", 128, 128, factor=4),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_kind_is_saved_as_it_was_trained(tmp_path, family_name, kind, dtype):
    graft = session(tmp_path, family_name, KINDS[kind], precision="int8", save_dtype=dtype)
    with graft:
        list(graft.steps())
    graft.check_trained()
    path = tmp_path / "out.safetensors"
    graft.save(path)
    state, metadata = read_state(path)
    fp32 = {key for key, tensor in state.items() if tensor.dtype == torch.float32}
    if dtype == "bf16":
        assert fp32 == {key for key in state if key.endswith((".alpha", ".dora_scale"))}
    trained, kept = adapters.to_canonical(graft.base.model, "a"), read_comfyui(state)
    assert kept.keys() == trained.keys()
    linears = adapters.linears(graft.base.model)
    for name, module in kept.items():
        weight = linears[name].weight.float()
        wanted = trained[name].merged(weight) - weight
        assert tiny.relative(module.merged(weight) - weight, wanted) < (1e-2 if dtype == "bf16" else 1e-5)
        assert wanted.any()
    module, arguments = {
        "lora": ("networks.lora", None),
        "dora": ("lycoris.kohya", {"algo": "lora", "dora_wd": "True"}),
        "lokr": ("lycoris.kohya", {"algo": "lokr", "factor": "4"}),
    }[KINDS[kind].kind]
    assert metadata["ss_network_module"] == module
    assert json.loads(metadata.get("ss_network_args", "null")) == arguments
    assert ("dora_scale" in json.loads(metadata["graft"])) == (kind == "dora")


@pytest.mark.parametrize(
    ("kind", "part"),
    [("lora", "lora_up"), ("lora", "alpha"), ("dora", "dora_scale"), ("lokr", "lokr_w1"), ("lokr", "lokr_w2_b")],
)
def test_each_part_of_the_file_is_compared(tmp_path, monkeypatch, kind, part):
    graft = session(tmp_path, "krea2", KINDS[kind])
    original = loop.read_state

    def flipped(path):
        state, metadata = original(path)
        key = next(k for k in state if part in k)
        state[key] = state[key] + 1
        return state, metadata

    monkeypatch.setattr(loop, "read_state", flipped)
    with pytest.raises(TrainingError, match="reads back differently"):
        graft.save(tmp_path / "out.safetensors")


@pytest.mark.parametrize(("kind", "zero"), [("dora", "lora_B"), ("lokr", "w2_b"), ("lokr, whole", "w2")])
def test_a_module_that_learned_nothing_is_named_with_each_kind(tmp_path, kind, zero):
    graft = session(tmp_path, "krea2", KINDS[kind], steps=1)
    with graft:
        list(graft.steps())
    graft.check_trained()
    weights = adapters.adapted(graft.base.model, "a")["blocks.1.mlp.up"].weights("a")
    with torch.no_grad():
        weights[zero].zero_()
    with pytest.raises(TrainingError, match=r"1 of \d+ modules learned nothing .*blocks\.1\.mlp\.up"):
        graft.check_trained()
    with torch.no_grad():
        list(weights.values())[-1].fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"not finite: blocks\.1\.mlp\.up"):
        graft.check_finite()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_saved_file_is_what_was_trained(tmp_path, family_name, dtype):
    graft = session(tmp_path, family_name, save_dtype=dtype)
    with graft:
        list(graft.steps())
    path = tmp_path / "out.safetensors"
    graft.save(path)
    state, metadata = read_state(path)
    kinds = {key.rpartition(".")[2] if key.endswith("alpha") else "weight": t.dtype for key, t in state.items()}
    assert kinds == {"alpha": torch.float32, "weight": loop.SAVE_DTYPES[dtype]}
    trained = adapters.to_canonical(graft.base.model, "a")
    for name, module in read_comfyui(state).items():
        assert torch.equal(module.up, trained[name].up.to(module.up.dtype))
        assert module.alpha == 8
    assert metadata["ss_network_dim"] == "4"
    assert metadata["ss_network_alpha"] == "8"
    assert json.loads(metadata["graft"])["train"]["seed"] == 3
    with pytest.raises(FileExistsError, match="is not overwritten unasked"):
        graft.save(path)
    graft.save(path, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{family_name}.safetensors", "out.safetensors"])


def test_a_file_that_reads_back_differently_is_noticed(tmp_path, monkeypatch):
    graft = session(tmp_path, "krea2")
    original = loop.read_state

    def flipped(path):
        state, metadata = original(path)
        key = next(k for k in state if "lora_down" in k)
        state[key] = state[key] + 1
        return state, metadata

    monkeypatch.setattr(loop, "read_state", flipped)
    with pytest.raises(TrainingError, match="reads back differently"):
        graft.save(tmp_path / "out.safetensors")


@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_open_session_checkpoints_pins_and_trains_even_where_gradients_are_off(tmp_path, checkpointing):
    graft = session(tmp_path, "krea2", checkpointing=checkpointing)
    (*blocks, last), trunk = graft.base.family.by_place(graft.base.model)
    with torch.no_grad(), graft:
        # Whether a block recomputes everything, or is slim, as the last one always is: what it keeps.
        assert all(block.forward.args[2] is not checkpointing for block in (*blocks, *trunk))
        assert last.forward.args[2] is True
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.is_grad_enabled()
        graft.step()


def test_an_outer_autocast_changes_nothing(tmp_path, family_name):
    plain = run_to_end(tmp_path, family_name)
    with torch.autocast("cpu", torch.bfloat16):
        under = run_to_end(tmp_path, family_name)
    assert under[0] == plain[0]
    assert all(torch.equal(under[1][m].up, plain[1][m].up) for m in plain[1])


def test_gradients_of_a_step_that_failed_are_not_added_to(tmp_path, monkeypatch):
    """Out of memory in the second half of an accumulated step."""
    graft = session(tmp_path, "krea2", accumulation=2, learning_rate=0.0)
    original, calls, norms = graft._loss, [], []

    def fails_once(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("as on a full card")
        return original(batch)

    epoch = graft.stream.state_dict()
    with graft:
        for attempt in ("clean", "after a failure"):
            graft._return_to((torch.Generator().manual_seed(1).get_state(), epoch))
            if attempt == "after a failure":
                monkeypatch.setattr(graft, "_loss", fails_once)
                with pytest.raises(torch.OutOfMemoryError):
                    graft.step()
                assert len(calls) == 2
                assert all(p.grad is None for p in graft.parameters)
            # Neither the order nor a draw is reset here: a failed step has given them back.
            norms.append(graft.step().grad_norm)
    assert norms[0] == norms[1]
    assert all(p.grad is None for p in graft.parameters)


def test_a_step_waits_for_the_device_once(tmp_path, family_name, monkeypatch):
    """Each `.item()` of a tensor on a GPU, and each question whether one is finite, waits until all work is done."""
    waits = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                waits.append(str(func))
            return func(*args, **(kwargs or {}))

    original = torch.Tensor.tolist

    def tolist(tensor):
        if tensor.dtype.is_floating_point:
            waits.append(tuple(tensor.shape))
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with session(tmp_path, family_name, accumulation=2, steps=8) as graft, Waits():
        for _ in range(3):
            waits.clear()
            graft.step()
            # Two losses and the gradient's norm.
            assert waits == [(3,)]
        for _ in range(3):
            waits.clear()
            assert graft.advance(read=False) == []
            assert waits == []
        assert [log.step for log in graft.read()] == [4, 5, 6]
        assert waits == 3 * [(3,)]  # the first of which waits
        assert graft.read() == []


def test_steps_that_are_read_later_have_the_same_numbers(tmp_path):
    logs = {}
    for read in (True, False):
        with session(tmp_path, "krea2", adapter=f"read_{read}", warmup_steps=3) as graft:
            logs[read] = [log for _ in range(4) for log in graft.advance(read)] + graft.read()
    for one, other in zip(logs[True], logs[False], strict=True):
        assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)
    assert len({log.seconds for log in logs[False]}) == 1


def test_a_loss_that_is_not_finite_is_found_with_the_next_that_is_read(tmp_path, monkeypatch):
    """Named with the step and the pictures that it came from."""
    graft = session(tmp_path, "krea2")
    original = graft._loss
    monkeypatch.setattr(graft, "_loss", lambda drawn: original(drawn) * (torch.nan if graft.done == 1 else 1))
    with graft:
        graft.advance(read=False)
        names = graft._ahead.passes[0].batch.names
        graft.advance(read=False)
        with pytest.raises(NotFiniteError, match=rf"the loss became nan in step 2 on {names[0]}") as caught:
            graft.advance()
        assert graft.done == 2
        assert [log.step for log in caught.value.logs] == [1]
        assert graft.read() == []


@pytest.mark.parametrize("read", [True, False])
def test_a_step_that_failed_in_the_optimiser_is_not_read_as_one_that_was_made(tmp_path, monkeypatch, read):
    """The first one makes the moments, for which there may be no room."""
    graft = session(tmp_path, "krea2")
    with graft:
        graft.advance(read=False)
        with monkeypatch.context() as patch:
            patch.setattr(graft.optimizer, "step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                graft.advance(read)
        graft.advance(read=False)
        assert [log.step for log in graft.read()] == [1, 2]
        assert graft.done == 2


def test_nothing_is_saved_or_read_over_what_was_not_read(tmp_path):
    graft = session(tmp_path, "krea2")
    with graft:
        start = graft.state_dict()
        graft.advance(read=False)
        for call in (graft.state_dict, graft.step):
            with pytest.raises(AssertionError, match=r"read\(\)"):
                call()
        graft.load_state_dict(start)
        assert graft.read() == []


def test_what_is_drawn_ahead_belongs_to_the_next_step(tmp_path):
    """The state between two steps is that before its draws; the last step draws nothing ahead."""
    states = []
    for ahead in (True, False):
        with session(tmp_path, "krea2", adapter="ahead" if ahead else "plain", drop=0.5) as graft:
            for step in range(4):
                graft.step()
                assert (graft._ahead is not None) == (step < 3)
                if not ahead:
                    graft._return_to(graft._place())
                state = graft.state_dict()
                states.append((step, state["generator"].tolist(), state["stream"]))
    assert states[:4] == states[4:]


@pytest.mark.parametrize(
    ("kind", "optimizer", "after"),
    [
        ("lora", "adamw", 1),
        ("lora", "adamw", 3),
        ("dora", "adamw", 3),
        ("lokr", "adamw", 3),
        *(pytest.param(kind, "adamw8bit", 3, marks=COMPILED) for kind in ("lora", "dora", "lokr")),
    ],
)
def test_a_saved_session_continues_bit_exactly(tmp_path, family_name, kind, optimizer, after):
    """Weights, average, optimiser, schedule, generator, order of the data, dropout of captions and of the adapter."""

    def new():
        # rank 20: A and B, or w1 and w2 of factor 2, are large enough for 8-bit moments
        lora = LoraSettings(kind, 20, 8, factor=2 if kind == "lokr" else -1, dropout=0.1)
        settings = {"steps": 6, "schedule": "cosine", "ema": 0.9, "optimizer": optimizer, "drop": 0.3}
        return session(tmp_path, family_name, lora, **settings)

    whole = new()
    with whole:
        wanted = [log.loss for log in whole.steps()]
    first = new()
    with first:
        losses = [first.step().loss for _ in range(after)]
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = new()
    second.load_state_dict(torch.load(buffer, weights_only=True))
    with second:
        losses += [log.loss for log in second.steps()]
    assert losses == wanted
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, second.parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.average.values, second.average.values, strict=True))


def test_the_moving_average_follows_its_formula_and_is_what_is_saved(tmp_path):
    graft = session(tmp_path, "krea2", ema=0.5)
    wanted = [p.detach().clone() for p in graft.parameters]
    with graft:
        for step in range(1, 5):
            graft.step()
            decay = min(0.5, (1 + step) / (10 + step))
            wanted = [decay * w + (1 - decay) * p.detach() for w, p in zip(wanted, graft.parameters, strict=True)]
    for found, value in zip(graft.average.values, wanted, strict=True):
        assert tiny.relative(found, value) < 1e-5
    own = [p.detach().clone() for p in graft.parameters]
    graft.save(tmp_path / "out.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(own, graft.parameters, strict=True))
    kept = read_comfyui(read_state(tmp_path / "out.safetensors")[0])
    name = graft.targets[0]
    assert torch.equal(kept[name].down, graft.average.values[0])
    assert not torch.equal(kept[name].down, own[0])


def test_weights_of_a_mask_reach_the_loss(tmp_path, monkeypatch):
    graft = session(tmp_path, "krea2", steps=1, batch_size=1)
    weights = torch.rand(6, 10)
    graft.samples[:] = [replace(sample, weights=weights) for sample in graft.samples]
    given = []
    original = loop.velocity_loss
    monkeypatch.setattr(loop, "velocity_loss", lambda *a: given.append(a[3]) or original(*a))
    with graft:
        graft.step()
    assert torch.equal(given[0], weights[None, None])


def test_dropped_captions_train_the_image_only_pass_of_ideogram4():
    """With all text masked away the transformer gives what it gives without text."""
    model = tiny.build("ideogram4")
    arguments = tiny.inputs("ideogram4")
    mask = torch.zeros_like(arguments["mask_BT"])
    masked = model(**{**arguments, "mask_BT": mask})
    assert tiny.relative(masked, model(arguments["latents"], arguments["sigma_B"])) < 1e-5
