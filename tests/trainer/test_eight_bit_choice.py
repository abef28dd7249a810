"""Whether a run multiplies in 8 bits: what each device can, what settings and measurement decide, what is said."""

from __future__ import annotations

import dataclasses

import cards
import pytest
import tiny
import torch
from graft_lora.examples.demo import draw_folder
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.trainer import adapters, eight_bit, eight_bit_choice, modes, probes
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.devices import read_device
from graft_lora.trainer.eight_bit_choice import Measured, choose, eligible, measure
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.evaluate import held_out_loss
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.formats import FORMATS
from graft_lora.trainer.preflight import check, verdicts
from graft_lora.trainer.quantization import FrozenLinear
from graft_lora.trainer.run import read_dataset, run
from graft_lora.trainer.settings import AUTO, DatasetSettings, ModelSettings, RunSettings, TrainSettings

FASTER, SLOWER = Measured(0.001, 0.002), Measured(0.0031, 0.002)
CPU = read_device("cpu")

# Card → what it can multiply in 8 bits: with fp32 activations, with bf16 ones.
TABLE = {
    cards.T4: (["int8"], ["int8"]),
    cards.RTX_2080_TI: (["int8"], ["int8"]),
    cards.RTX_3090: (["int8"], ["int8"]),
    cards.RTX_4090: (["int8"], ["int8", "fp8"]),
    cards.B200: (["int8"], ["int8", "fp8", "mxfp8"]),
    cards.RX_7900: ([], []),
    cards.RADEON_VII: ([], []),
    cards.Card("NVIDIA GeForce GTX 1080 Ti", (6, 1)): ([], []),
    cards.Card("Tesla V100", (7, 0)): ([], []),
    None: (["int8"], ["int8", "fp8"]),
}


@pytest.mark.parametrize("card", TABLE, ids=lambda card: card.name if card else "no card")
def test_what_a_device_can_multiply_in_8_bits(monkeypatch, card):
    if card is not None:  # without one the probe runs for real
        monkeypatch.setattr(probes, "eight_bit_fault", lambda *arguments: None)
    cards.insert(monkeypatch, card)
    device = read_device()
    for compute, wanted in zip(("fp32", "bf16"), TABLE[card], strict=True):
        assert [name for name in modes.EIGHT_BIT_NEEDS if not modes.eight_bit_fault(name, compute, device)] == wanted


def test_why_a_device_cannot(monkeypatch):
    said = {}
    for card in (cards.RTX_3090, cards.RX_7900):
        cards.insert(monkeypatch, card)
        said[card] = modes.eight_bit_fault("fp8", "bf16", read_device())
    assert said == {
        cards.RTX_3090: "NVIDIA GeForce RTX 3090 has no fp8 matmul (compute capability 8.6, wanted 8.9)",
        cards.RX_7900: "fp8 matmuls are not offered on AMD Radeon RX 7900 XTX: under ROCm they have not been tried",
    }
    assert modes.eight_bit_fault("mxfp8", "bf16", CPU) == "mxfp8 matmuls are not offered on a CPU"
    assert modes.eight_bit_fault("fp8", "fp32", CPU) == "fp8 matmuls give bf16, and compute_dtype is fp32"


def test_a_kernel_that_is_missing_or_wrong_is_found_by_a_try(monkeypatch):
    def missing(*arguments, **options):
        raise RuntimeError("Rowwise scaling is not currently supported on your device")

    assert probes.eight_bit_fault("fp8", "cpu") is None
    monkeypatch.setattr(torch, "_scaled_mm", missing)
    fault = probes.eight_bit_fault("fp8", "cpu")
    assert fault is not None
    assert "fp8 matmuls do not work on cpu with torch" in fault
    assert "(Rowwise scaling is not" in fault
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros(len(a), b.shape[1], dtype=torch.int32))
    fault = probes.eight_bit_fault("int8", "cpu")
    assert fault is not None
    assert "int8 matmuls give wrong numbers on cpu" in fault


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_the_try_needs_no_torchao(monkeypatch, format):
    """ComfyUI's fp8 and int8 files are trained on without it."""
    monkeypatch.setattr(type(FORMATS[format]), "row_quantizer", lambda self: 1 / 0)
    assert probes.eight_bit_fault(format, "cpu") is None


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    return tiny.loaded(tmp_path, "krea2", "int8", "bf16")


def unmeasured(*arguments):
    raise AssertionError("it was measured")


@pytest.mark.parametrize(("found", "used", "words"), [
    (FASTER, True, "matmuls in 8 bits, measured faster (1 ms, dequantised 2 ms), in 16 Linears; those called with 16 "
     "tokens or fewer and the others stay as they are"),
    (SLOWER, False, "matmuls are not in 8 bits, measured slower (3.1 ms, dequantised 2 ms)"),
])  # fmt: skip
def test_auto_takes_the_faster_one_and_says_which(monkeypatch, base, found, used, words):
    monkeypatch.setattr(eight_bit_choice, "measure", lambda *arguments: found)
    assert choose(base, AUTO, 128, CPU) == (used, words)


def test_what_is_set_is_not_measured(monkeypatch, base):
    monkeypatch.setattr(eight_bit_choice, "measure", unmeasured)
    assert choose(base, False, 128, CPU) == (False, "")
    used, note = choose(base, True, 128, CPU)
    assert used
    assert note.startswith("matmuls in 8 bits, as set, in 16 Linears")


@pytest.mark.parametrize(("precision", "compute", "tokens", "reason"), [
    ("bf16", "bf16", 128, "no Linear of the base in bf16 can be multiplied in 8 bits: wanted precision "
     "int8, fp8, mxfp8"),
    ("nf4", "bf16", 128, "no Linear of the base in nf4 can be multiplied in 8 bits"),
    ("int8", "bf16", 16, "the largest batch has 16 tokens, wanted more than 16"),
    ("fp8", "fp32", 128, "fp8 matmuls give bf16, and compute_dtype is fp32"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_where_it_is_set_and_else_said(
    monkeypatch, tmp_path, precision, compute, tokens, reason
):
    monkeypatch.setattr(eight_bit_choice, "measure", unmeasured)
    base = tiny.loaded(tmp_path, "krea2", precision, compute)
    with pytest.raises(SettingsError) as caught:
        choose(base, True, tokens, CPU)
    assert str(caught.value).startswith(f"eight_bit_compute is true, but {reason}")
    assert str(caught.value).endswith('; set [model] eight_bit_compute = "auto"')
    used, note = choose(base, AUTO, tokens, CPU)
    assert not used
    # Nobody who trains in bf16 asked for 8 bits.
    assert note.startswith(f"matmuls are not in 8 bits: {reason}") or (precision in ("bf16", "nf4") and note == "")


def test_the_measurement_times_both_ways_on_the_largest_shapes_of_the_model(monkeypatch, base):
    """By a clock that stands still but for products in 8 bits."""
    now, shapes = [0.0], []
    forward = eight_bit.forward

    def slow(x, data, scale):
        now[0] += 1.0
        shapes.append((x.shape[0], *data.shape))
        return forward(x, data, scale)

    monkeypatch.setattr(eight_bit, "forward", slow)
    monkeypatch.setattr(eight_bit_choice.time, "perf_counter", lambda: now[0])
    layers = list(eligible(base.model, base.family).values())
    assert measure(layers, 40, torch.bfloat16, CPU.place) == Measured(2.0, 0.0)
    sizes = sorted({(layer.out_features, layer.in_features) for layer in layers}, key=lambda s: -s[0] * s[1])
    assert set(shapes) == {(40, *size) for size in sizes[:2]}
    assert not any(layer.eight_bit for layer in layers)


def test_on_a_cpu_a_part_of_a_large_layer_is_measured(monkeypatch):
    monkeypatch.setitem(eight_bit_choice.MOST, "cpu", (24, 32))
    layer = FrozenLinear(64, 48).store(torch.ones(48, 64), FORMATS["int8"])
    shapes = []
    forward = eight_bit.forward
    monkeypatch.setattr(
        eight_bit, "forward", lambda x, data, scale: shapes.append((*x.shape, *data.shape)) or forward(x, data, scale)
    )
    measure([layer], 4096, torch.bfloat16, CPU.place)
    assert set(shapes) == {(24, 32, 32, 32)}


# --- a run -----------------------------------------------------------------------------------------------------------


def settings_of(tmp_path, precision="int8", steps=3, used=AUTO, family="krea2"):
    if not (tmp_path / "pictures").exists():
        draw_folder(tmp_path / "pictures", seed=0, zorbs=3, known=2)
    return RunSettings(
        str(tmp_path / "out"),
        "zorb",
        ModelSettings(str(base_path(FAMILIES[family])), "", precision, "bf16", "cpu", eight_bit_compute=used),
        DatasetSettings(str(tmp_path / "pictures"), encoders="demo", resolution=64),
        LoraSettings(rank=2, alpha=2),
        TrainSettings(steps=steps, learning_rate=2e-3, save_every=0, checkpointing=False),
    )


def start(settings, **arguments):
    said = []
    return run(settings, encoders(FAMILIES["krea2"]), said.append, **arguments), said


def test_a_run_multiplies_so_from_its_first_to_its_last_step_and_no_longer(monkeypatch, tmp_path):
    result, said = start(settings_of(tmp_path, used=True))
    assert any(line.startswith("matmuls in 8 bits, as set") for line in said)
    assert not any(layer.eight_bit for layer in eligible(result.base.model, result.base.family).values())
    plain, said = start(dataclasses.replace(settings_of(tmp_path, used=False), output=str(tmp_path / "plain")))
    assert not any("8 bits" in line for line in said)
    assert plain.losses[0] != result.losses[0]
    assert plain.losses[0] == pytest.approx(result.losses[0], rel=0.02)


@pytest.mark.parametrize("first", [FASTER, SLOWER])
def test_a_run_goes_on_as_it_began_whatever_would_be_faster_now(monkeypatch, tmp_path, first):
    monkeypatch.setattr(eight_bit_choice, "measure", lambda *arguments: first)
    whole, _ = start(dataclasses.replace(settings_of(tmp_path, steps=4), output=str(tmp_path / "whole")))
    start(settings_of(tmp_path, steps=2))
    monkeypatch.setattr(eight_bit_choice, "measure", lambda *arguments: SLOWER if first is FASTER else FASTER)
    resumed, _ = start(settings_of(tmp_path, steps=4), resume=True)
    assert resumed.losses == whole.losses


def test_a_run_does_not_go_on_with_another_setting(tmp_path):
    start(settings_of(tmp_path, steps=2, used=False))
    with pytest.raises(SettingsError, match="eight_bit_compute was False, is True"):
        start(settings_of(tmp_path, steps=4, used=True), resume=True)


def test_the_checks_know_it_before_anything_is_loaded(tmp_path, monkeypatch):
    def said(**changes):
        settings = settings_of(tmp_path)
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **changes))
        return verdicts(settings, encoders(FAMILIES["krea2"]))[-1]

    assert said() == ("8-bit compute", True, "where it is measured faster")
    assert said(eight_bit_compute=True) == ("8-bit compute", True, "on")
    assert said(eight_bit_compute=False) == ("8-bit compute", True, "off")
    assert said(precision="bf16") == ("8-bit compute", True, "off: the weights are kept in bf16, wanted int8 or fp8")
    refused = said(precision="fp8", compute_dtype="fp32", eight_bit_compute=True)
    assert refused == (
        "8-bit compute",
        False,
        "eight_bit_compute is true, but fp8 matmuls give bf16, and compute_dtype is fp32; set [model] "
        'eight_bit_compute = "auto"',
    )


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_run_in_8_bits_learns_as_one_with_dequantised_weights_does(tmp_path, family_name, precision):
    """Measured over 60 steps of batch 2: held-out loss 0.622 → 0.394 and 0.860 → 0.480, the ways apart by 0.14 %."""
    family = FAMILIES[family_name]
    after = {}
    for used in (False, True):
        settings = settings_of(tmp_path, precision, steps=12, used=used, family=family_name)
        settings = dataclasses.replace(
            settings,
            output=str(tmp_path / f"used-{used}"),
            train=dataclasses.replace(settings.train, learning_rate=5e-3, warmup_steps=2),
        )
        result = run(settings, encoders(family), lambda text: None)
        cached = check(dataclasses.replace(settings, output=str(tmp_path / "unused")), encoders(family))
        samples = read_dataset(settings, cached, encoders(family), lambda text: None)
        # Measured alike for both, with dequantised weights.
        for name in (None, result.name):
            with adapters.active(result.base.model, name):
                after[used, name is None] = held_out_loss(result.base.model, family, samples, draws=2)
    print(f"{family_name} {precision}: {after}")
    assert after[True, True] == after[False, True]
    assert after[False, False] < 0.9 * after[False, True]
    assert after[True, False] == pytest.approx(after[False, False], rel=0.02)
    assert after[True, False] != after[False, False]
