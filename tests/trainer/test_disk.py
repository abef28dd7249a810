"""What a run is said to write, against what it writes, and full disks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from graft_lora.examples.demo import draw_folder
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.trainer import disk
from graft_lora.trainer.adapters import LoraSettings, linears, resolve_targets, weight_sizes
from graft_lora.trainer.disk import Demand, check_room
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.families.krea2 import Krea2Config
from graft_lora.trainer.preflight import verdicts
from graft_lora.trainer.run import run
from graft_lora.trainer.settings import (
    DatasetSettings,
    ModelSettings,
    PreviewSettings,
    RunSettings,
    TrainSettings,
)
from torchao.optim import AdamW8bit

KIB, GIB = 2**10, 2**30


def settings_of(tmp_path, family, **train):
    return RunSettings(
        str(tmp_path / "out"), "zorb",
        ModelSettings(str(base_path(FAMILIES[family])), "", "fp32", "fp32", "cpu"),
        DatasetSettings(str(tmp_path / "pictures"), encoders="demo", resolution=64, flip=True, held_out=1),
        LoraSettings(rank=8, alpha=8),
        TrainSettings(
            **{"steps": 6, "save_every": 2, "keep": 1, "held_out_every": 3, "checkpointing": False, "ema": 0.9, **train}
        ),
        PreviewSettings(("a large zorb", "a small zorb"), every=2, steps=1, guidance=1.0),
    )  # fmt: skip


def demands_of(settings, family, monkeypatch):
    """What the checks ask the disks for."""
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(disk, "check_room", lambda demands: asked.extend(demands) or "")
        found = verdicts(settings, encoders(FAMILIES[family]))
    assert all(verdict.ok for verdict in found), found
    return {demand.setting: demand for demand in asked}


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_run_writes_what_was_said(tmp_path, monkeypatch, family_name):
    draw_folder(tmp_path / "pictures", seed=0, zorbs=3, known=2)
    settings = settings_of(tmp_path, family_name)
    wanted = demands_of(settings, family_name, monkeypatch)
    assert wanted["output"].folder == tmp_path / "out"
    assert wanted["[dataset] encoded"].folder == tmp_path / "pictures" / ".graft-cache"
    result = run(settings, encoders(FAMILIES[family_name]), lambda _: None)

    sizes = [
        parameter.numel()
        for module in result.base.model.modules()
        if hasattr(module, "lora_A")
        for parameter in (module.lora_A["zorb"].weight, module.lora_B["zorb"].weight)
    ]
    header = 24 * KIB
    lora = disk.lora_bytes(sizes, torch.float32)
    assert lora <= result.lora.stat().st_size <= lora + header
    state = disk.state_bytes(sizes, "adamw", ema=True)
    # torch's archive aligns every tensor to 64 bytes and has a record of each.
    assert state <= (result.folder / "state" / "state.pt").stat().st_size <= state + 512 * 4 * len(sizes)
    previews = size_of(result.folder / "previews") + (result.folder / "preview.png").stat().st_size
    assert previews <= disk.previews_bytes(2, 2, 6)
    # One periodic LoRA, the best and the last; at the worst moment one more of each of the former, and two states.
    total = wanted["output"].bytes
    assert total == 5 * lora + 2 * state + disk.previews_bytes(2, 2, 6)
    assert size_of(result.folder) <= total

    found = list((tmp_path / "pictures" / ".graft-cache").iterdir())
    tensors = sum(path.stat().st_size for path in found) - 256 * len(found)  # less their headers
    assert tensors <= wanted["[dataset] encoded"].bytes <= 3 * tensors
    again = dataclasses.replace(settings, output=str(tmp_path / "again"))
    assert demands_of(again, family_name, monkeypatch)["[dataset] encoded"].bytes == 0
    unmirrored = dataclasses.replace(again, dataset=dataclasses.replace(settings.dataset, resolution=80, flip=False))
    latents = demands_of(unmirrored, family_name, monkeypatch)["[dataset] encoded"].bytes
    assert (
        latents == 5 * 4 * FAMILIES[family_name].latent_channels * (80 // FAMILIES[family_name].latent_downscale) ** 2
    )


def test_moments_are_as_torchao_keeps_them():
    for elements in (100, 4096, 4097, 256 * 300):
        parameter = torch.nn.Parameter(torch.zeros(elements))
        optimizer = AdamW8bit([parameter])
        wanted = 0
        for signed in (True, False):
            buffer = optimizer._new_buffer(parameter, signed)
            parts = [getattr(buffer, name) for name in getattr(buffer, "tensor_attrs", ())] or [buffer]
            wanted += sum(part.numel() * part.element_size() for part in parts)
        assert disk.moments_bytes([elements], "adamw8bit") == wanted
        assert disk.moments_bytes([elements], "adamw") == 8 * elements


def test_the_published_size_of_krea_2():
    """107 million parameters at rank 32 on the blocks' attention and MLP: by hand, 28 blocks of eight Linears."""
    width, kv, mlp, rank = 6144, 1536, 16384, 32  # the rank is the default
    per_block = 3 * (width + width) + 2 * (width + kv) + 3 * (width + mlp)
    with torch.device("meta"):
        found = linears(FAMILIES["krea2"].build(Krea2Config()))
    targets = resolve_targets(FAMILIES["krea2"], found, LoraSettings())
    sizes = weight_sizes(found, targets, LoraSettings())
    assert sum(sizes) == 28 * rank * per_block == 107_347_968
    assert disk.lora_bytes(sizes, torch.bfloat16) == 2 * sum(sizes)
    assert disk.state_bytes(sizes, "adamw", ema=False) == 12 * sum(sizes)
    # The published text cache of one caption: 512 tokens in fp32.
    assert disk.conditioning_bytes(["x" * 1000], 30720, 4, 12) == 512 * 30720 * 4
    assert disk.latents_bytes(FAMILIES["krea2"], [(1024, 768)]) == 4 * 16 * 128 * 96


def fake_disks(monkeypatch, free):
    """Folders whose first letter is the same lie on one disk, with so many bytes free."""
    monkeypatch.setattr(disk, "standing", lambda folder: folder)
    monkeypatch.setattr(disk, "disk_of", lambda folder: ord(folder.name[0]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.name[0]]))


def test_room_is_asked_of_each_disk(monkeypatch):
    fake_disks(monkeypatch, {"a": 3 * GIB, "b": 2 * GIB})
    output, encoded = Demand(Path("a1"), "saves", "output", 2 * GIB), Demand(Path("b1"), "cache", "encoded", 2 * GIB)
    assert check_room([output, encoded]) == (
        "about 2.0 GiB of 3.0 GiB free (saves 2.0 GiB); about 2.0 GiB of 2.0 GiB free (cache 2.0 GiB)"
    )
    with pytest.raises(SettingsError) as caught:
        check_room([output, dataclasses.replace(encoded, bytes=2 * GIB + 2**28)])
    assert str(caught.value) == (
        "the run needs about 2.2 GiB on the disk of b1 (cache 2.2 GiB), which has 2.0 GiB free; make room, or set "
        "encoded to a folder on another disk"
    )


def test_folders_on_one_disk_are_added_up(monkeypatch):
    fake_disks(monkeypatch, {"a": 3 * GIB})
    output, encoded = Demand(Path("a1"), "saves", "output", 2 * GIB), Demand(Path("a2"), "cache", "encoded", 2 * GIB)
    assert check_room([output]) == "about 2.0 GiB of 3.0 GiB free (saves 2.0 GiB)"
    with pytest.raises(SettingsError) as caught:
        check_room([output, encoded])
    assert str(caught.value) == (
        "the run needs about 4.0 GiB on the disk of a1 (saves 2.0 GiB, cache 2.0 GiB), which has 3.0 GiB free; make "
        "room, or set output or encoded to a folder on another disk"
    )


def test_room_is_looked_for_where_the_folder_will_be_made(tmp_path):
    assert check_room([Demand(tmp_path / "not" / "there", "saves", "output", 1)]).startswith("about 0.0 MiB of ")
