"""Verdicts on devices and variants, with the devices faked."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from graft_lora.trainer.checkpoints import telling_name
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.preflight import check, check_compute_dtype, chosen_device
from graft_lora.trainer.samples import Sample, write_sample
from graft_lora.trainer.settings import DatasetSettings, ModelSettings, RunSettings

# Card → compute capability, whether it is AMD's, what torch says of bf16, whether bf16 is native.
CARDS = {
    "Tesla T4": ((7, 5), False, True, False),
    "NVIDIA GeForce RTX 2080 Ti": ((7, 5), False, True, False),
    "NVIDIA GeForce RTX 3090": ((8, 6), False, True, True),
    "NVIDIA GeForce RTX 4090": ((8, 9), False, True, True),
    "NVIDIA B200": ((10, 0), False, True, True),
    "AMD Radeon RX 7900 XTX": ((11, 0), True, True, True),
    "AMD Radeon VII": ((9, 0), True, False, False),
}


@pytest.mark.parametrize("card", CARDS)
def test_bf16_is_refused_where_it_is_emulated(monkeypatch, card):
    capability, amd, claims, native = CARDS[card]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: claims)
    monkeypatch.setattr(torch.version, "hip", "6.4" if amd else None)
    check_compute_dtype("fp32", torch.device("cuda"))
    check_compute_dtype("bf16", torch.device("cpu"))
    if native:
        check_compute_dtype("bf16", torch.device("cuda"))
    else:
        with pytest.raises(SettingsError, match=rf'{card} has no native bf16; set .* compute_dtype = "fp32"'):
            check_compute_dtype("bf16", torch.device("cuda"))


@pytest.mark.parametrize("there", [True, False])
def test_cuda_is_chosen_where_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert chosen_device("").type == ("cuda" if there else "cpu")
    assert chosen_device("cpu").type == "cpu"


def test_unsloth_6843_a_distilled_variant_needs_a_confirmation(tmp_path):
    """Krea 2 Raw and Turbo have the same keys: the file's name is all that tells."""
    (tmp_path / "cache").mkdir()
    sample = Sample("a", "a", torch.randn(tiny.LATENTS["krea2"]), torch.randn(2, tiny.WIDTHS["krea2"]))
    write_sample(tmp_path / "cache", sample, FAMILIES["krea2"])
    for place, name in (
        ("Krea2-Turbo-bf16.safetensors", "Krea2-Turbo-bf16.safetensors"),
        ("Krea-2-Turbo/transformer/diffusion_pytorch_model.safetensors", "Krea-2-Turbo"),
        ("krea2_raw.safetensors", None),
        ("Krea-2-Raw/transformer/diffusion_pytorch_model.safetensors", None),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        path = tiny.write(tiny.build("krea2"), tmp_path / place)
        model = ModelSettings(str(path), compute_dtype="fp32", device="cpu")
        settings = RunSettings(
            str(tmp_path / "out"), model=model, dataset=DatasetSettings(cache=str(tmp_path / "cache"))
        )
        if name is None:
            check(settings, None)
            continue
        with pytest.raises(SettingsError, match=f"{name} looks like a distilled variant of Krea 2"):
            check(settings, None)
        model = dataclasses.replace(model, allow_distilled=True)
        check(dataclasses.replace(settings, model=model), None)


@pytest.mark.parametrize("path", ["turbo", "turbo/transformer", "turbo/transformer/x.safetensors"])
def test_a_model_is_known_by_its_diffusers_folder(tmp_path, path):
    (tmp_path / "turbo" / "transformer").mkdir(parents=True)
    assert telling_name(tmp_path / path) == "turbo"
    assert telling_name(tmp_path / "turbo" / "x.safetensors") == "x.safetensors"
    cached = tmp_path / "models--krea--turbo" / "snapshots" / "0a1b2c"
    assert telling_name(cached) == telling_name(cached / "transformer") == "models--krea--turbo"
