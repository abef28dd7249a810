"""Facts of devices, with the cards faked."""

from __future__ import annotations

import cards
import psutil
import pytest
import torch
from graft_lora.trainer.devices import Device, Memory, chosen_device, host_memory, read_device
from graft_lora.trainer.errors import SettingsError


@pytest.mark.parametrize(
    ("card", "capability", "native"),
    [
        (cards.T4, (7, 5), False),
        (cards.RTX_2080_TI, (7, 5), False),
        (cards.RTX_3090, (8, 6), True),
        (cards.RTX_4090, (8, 9), True),
        (cards.B200, (10, 0), True),
        # (11, 0) and (9, 0) would pass for NVIDIA's newest.
        (cards.RX_7900, None, True),
        (cards.RADEON_VII, None, False),
    ],
)
def test_facts_of_a_card(monkeypatch, card, capability, native):
    cards.insert(monkeypatch, card, total=24 * cards.GIB, free=9 * cards.GIB)
    memory = Memory(24 * cards.GIB, 9 * cards.GIB)
    found = read_device()
    assert found == Device(torch.device("cuda"), card.name, capability, card.rocm, native, memory)
    assert found.kind == "cuda"


def test_facts_of_a_machine_without_a_card(monkeypatch):
    cards.insert(monkeypatch, None)
    found = read_device()
    assert (found.kind, found.name, found.capability, found.rocm, found.native_bf16) == (
        "cpu",
        "CPU",
        None,
        False,
        True,
    )
    assert found.memory.total == psutil.virtual_memory().total
    total, free = host_memory()
    assert 0 < free < total


@pytest.mark.parametrize("there", [True, False])
def test_cuda_is_chosen_where_there_is_one(monkeypatch, there):
    cards.insert(monkeypatch, cards.RTX_3090 if there else None)
    assert chosen_device("").type == ("cuda" if there else "cpu")
    assert chosen_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device 'gpu' is not known; use cpu, cuda or cuda:0"),
        ("mps", "device 'mps' is not one that Graft trains on"),
        ("cuda:1", "device is 'cuda:1', but torch sees 1 CUDA devices"),
    ],
)
def test_devices_that_are_refused(monkeypatch, device, message):
    cards.insert(monkeypatch, cards.RTX_3090)
    with pytest.raises(SettingsError, match=message):
        read_device(device)


def test_a_driver_that_does_not_answer_is_one_clear_line(monkeypatch):
    def fails(device=None):
        raise RuntimeError("CUDA error: no CUDA-capable device is detected\nCUDA kernel errors might be ...")

    cards.insert(monkeypatch, cards.RTX_3090)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    with pytest.raises(SettingsError) as caught:
        read_device("cuda")
    assert str(caught.value) == (
        "device 'cuda' does not answer (CUDA error: no CUDA-capable device is detected); mend its driver, or use "
        'device = "cpu"'
    )
