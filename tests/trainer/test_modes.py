"""What each device can be trained in, written out, and the words of each refusal."""

from __future__ import annotations

import cards
import pytest
from graft_lora.trainer import base_model, probes
from graft_lora.trainer.devices import read_device
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.modes import COMPUTE_NEEDS, PRECISION_NEEDS, compute_dtypes, modes, precision_fault

# Stored so: weights can be dequantised before they are multiplied, so that no card lacks the hardware for any.
ALL = ["fp32", "bf16", "fp8", "int8", "nf4", "as-stored"]
# Card → compute dtype → the precisions that go with it.
TABLE = {
    cards.T4: {"bf16": [], "fp32": ALL},
    cards.RTX_2080_TI: {"bf16": [], "fp32": ALL},
    cards.RTX_3090: {"bf16": ALL, "fp32": ALL},
    cards.RTX_4090: {"bf16": ALL, "fp32": ALL},
    cards.B200: {"bf16": [*ALL[:-1], "mxfp8", ALL[-1]], "fp32": [*ALL[:-1], "mxfp8", ALL[-1]]},
    cards.RX_7900: {"bf16": ALL, "fp32": ALL},
    cards.RADEON_VII: {"bf16": [], "fp32": ALL},
    None: {"bf16": ALL, "fp32": ALL},
}


@pytest.mark.parametrize("card", TABLE, ids=lambda card: card.name if card else "no card")
def test_precisions_and_compute_dtypes_of(monkeypatch, card, family_name):
    if card is not None:  # without one the probes run for real
        monkeypatch.setattr(probes, "precision_fault", lambda precision, device: None)
    cards.insert(monkeypatch, card)
    device = read_device()
    precisions = [name for name, fault in modes(device, FAMILIES[family_name]).items() if fault is None]
    found = {dtype: [] if fault else precisions for dtype, fault in compute_dtypes(device).items()}
    assert found == TABLE[card]


def test_the_tables_cover_what_the_settings_take():
    assert set(PRECISION_NEEDS) == set(base_model.PRECISIONS)
    assert set(COMPUTE_NEEDS) == set(base_model.COMPUTE_DTYPES)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            cards.T4,
            "Tesla T4 has no native bf16 (compute capability 7.5, wanted 8.0) and would emulate it many times slower; "
            'set [model] compute_dtype = "fp32", which is slower than bf16 in hardware, but right',
        ),
        (
            cards.RADEON_VII,
            "AMD Radeon VII has no native bf16 and would emulate it many times slower; "
            'set [model] compute_dtype = "fp32", which is slower than bf16 in hardware, but right',
        ),
    ],
)
def test_emulated_bf16_is_refused_and_fp32_offered(monkeypatch, card, message):
    cards.insert(monkeypatch, card)
    assert compute_dtypes(read_device()) == {"bf16": message, "fp32": None}


@pytest.mark.parametrize(("card", "found"), [
    (cards.RTX_4090, "NVIDIA GeForce RTX 4090 has 8.9"),
    (cards.RX_7900, "AMD Radeon RX 7900 XTX is none"),
    (None, "CPU is none"),
])  # fmt: skip
def test_mxfp8_is_refused_without_the_units_that_multiply_it(monkeypatch, card, found):
    cards.insert(monkeypatch, card)
    assert precision_fault("mxfp8", read_device(), FAMILIES["krea2"]) == (
        f"mxfp8 is for NVIDIA cards of compute capability 10.0 or newer, and {found}; "
        'set [model] precision = "fp8" or "int8"'
    )


def test_a_family_forbids_a_mode(monkeypatch):
    """As other trainers forbid fp8 for Qwen-Image."""

    class Delicate(type(FAMILIES["krea2"])):
        title = "Delicate"
        forbidden_modes = {"fp8": "its modulation overflows"}

    cards.insert(monkeypatch, None)
    found = modes(read_device(), Delicate())
    assert {name: fault for name, fault in found.items() if fault and name != "mxfp8"} == {
        "fp8": "Delicate is not to be trained in fp8: its modulation overflows; set [model] precision to one of fp32, "
        "bf16, int8, nf4, mxfp8, as-stored"
    }


def test_torchao_is_asked_for_by_what_needs_it_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(probes, "precision_fault", lambda precision, device: asked.append(precision) or "broken")
    cards.insert(monkeypatch, None)
    device, family = read_device(), FAMILIES["krea2"]
    assert [precision_fault(name, device, family) for name in ALL] == [
        None, None, "broken", "broken", "broken", None,
    ]  # fmt: skip
    assert asked == ["fp8", "int8", "nf4"]
