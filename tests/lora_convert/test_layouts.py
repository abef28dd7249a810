"""Writing and reading layouts, and files that are whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from graft_lora.lora_convert import (
    LokrModule,
    LoraModule,
    Sizes,
    atomic_file,
    convert_state,
    read_comfyui,
    read_state,
    write_comfyui,
    write_state,
)


def module(rows, columns, rank=4, alpha=6.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, columns, generator=generator).to(dtype)
    return LoraModule(down, torch.randn(rows, rank, generator=generator).to(dtype), alpha)


def test_the_change_is_alpha_over_rank_times_up_times_down():
    m = module(5, 7)
    assert torch.allclose(m.delta(), 1.5 * (m.up @ m.down))


def lokr(first=(2, 3), second=(4, 5), rank=(None, None), alpha=6.0, **magnitudes):
    """A LoKr whose factors are whole, or of the given ranks."""
    generator = torch.Generator().manual_seed(0)

    def factor(rows, columns, rank):
        if rank is None:
            return torch.randn(rows, columns, generator=generator)
        return torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)

    return LokrModule(factor(*first, rank[0]), factor(*second, rank[1]), alpha, **magnitudes)


def test_a_kronecker_product_is_scaled_where_a_factor_is_decomposed():
    """LyCORIS, ComfyUI and PEFT agree on no more than that: alpha of whole factors is written and not read."""
    assert lokr().scale == 1.0
    assert lokr(rank=(None, 2)).scale == 3.0
    assert lokr(rank=(2, None)).scale == 3.0
    assert lokr(rank=(1, 2)).scale == 3.0
    whole, low = lokr(), lokr(rank=(1, 2))
    assert torch.equal(whole.delta()[4:8, 5:10], whole.w1[1, 1] * whole.w2)
    w1, w2 = low.w1[0] @ low.w1[1], low.w2[0] @ low.w2[1]
    assert torch.allclose(low.delta()[4:8, 10:15], 3 * w1[1, 2] * w2, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_both_magnitudes_make_the_same_weight(kind):
    """The paper divides by the norm of W + dW, ComfyUI by that of W."""
    weight = torch.randn(8, 15)
    change = module(8, 15) if kind == "lora" else lokr()
    magnitude = torch.rand(8) + 0.5
    changed = weight + change.delta()
    wanted = magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True)
    over_base = magnitude * weight.norm(dim=1) / changed.norm(dim=1)
    for magnitudes in ({"magnitude": magnitude}, {"magnitude_over_base": over_base}):
        assert torch.allclose(replace(change, **magnitudes).merged(weight), wanted, atol=1e-5)
    assert torch.equal(change.merged(weight), changed)


@pytest.mark.parametrize("ranks", [(None, None), (None, 2), (2, None), (1, 2)])
@pytest.mark.parametrize("over_base", [None, torch.rand(8)])
def test_lokr_survives_comfyui_layout(ranks, over_base):
    wanted = lokr(rank=ranks, magnitude_over_base=over_base)
    state = write_comfyui({"blocks.0.attn.wq": wanted})
    stem = "diffusion_model.blocks.0.attn.wq"
    factors = {
        f"{stem}.lokr_w{n}{part}"
        for n, rank in zip("12", ranks, strict=True)
        for part in ([""] if rank is None else ["_a", "_b"])
    }
    assert set(state) == factors | {f"{stem}.alpha"} | (set() if over_base is None else {f"{stem}.dora_scale"})
    found = read_comfyui(state)["blocks.0.attn.wq"]
    assert isinstance(found, LokrModule)
    assert found.factors().keys() == wanted.factors().keys()
    assert all(torch.equal(found.factors()[part], tensor) for part, tensor in wanted.factors().items())
    assert found.alpha == 6.0
    if over_base is not None:
        assert torch.equal(found.magnitude_over_base, over_base)


def test_dora_scale_is_a_column_in_fp32_over_the_norm_of_the_base():
    """With one dimension ComfyUI would spread it over the columns of a square weight."""
    over_base = torch.rand(8)
    changed = replace(module(8, 8, dtype=torch.bfloat16), magnitude=torch.rand(8), magnitude_over_base=over_base)
    state = write_comfyui({"blocks.0.attn.wq": changed})
    scale = state["diffusion_model.blocks.0.attn.wq.dora_scale"]
    assert scale.dtype == torch.float32
    assert torch.equal(scale, over_base[:, None])
    read = read_comfyui(state)["blocks.0.attn.wq"]
    assert torch.equal(read.magnitude_over_base, over_base)
    assert read.magnitude is None


@pytest.mark.parametrize("shape", [(8,), (1, 8), ()])
def test_a_dora_scale_of_another_axis_is_an_error(shape):
    state = write_comfyui({"x": replace(module(8, 8), magnitude_over_base=torch.rand(8))})
    state["diffusion_model.x.dora_scale"] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"x has a dora_scale of \[.*\]; wanted \(out, 1\)"):
        read_comfyui(state)


def test_a_magnitude_that_the_layout_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="x is a DoRA, which ComfyUI's layout holds relative to a base"):
        write_comfyui({"x": replace(module(8, 8), magnitude=torch.rand(8))})


def test_comfyui_layout_has_official_names_and_fp32_alpha():
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6, dtype=torch.bfloat16)})
    assert {k: v.dtype for k, v in state.items()} == {
        "diffusion_model.blocks.0.attn.wq.lora_down.weight": torch.bfloat16,
        "diffusion_model.blocks.0.attn.wq.lora_up.weight": torch.bfloat16,
        "diffusion_model.blocks.0.attn.wq.alpha": torch.float32,
    }


@pytest.mark.parametrize("key", ["transformer.x.lora_A.weight", "diffusion_model.x.lokr_t2", "x.lora_down.weight"])
def test_a_key_that_is_not_understood_is_an_error(key):
    with pytest.raises(ValueError, match="is not a key of ComfyUI's LoRA layout"):
        read_comfyui({key: torch.zeros(1)})


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("lora", "alpha"),
        ("lora", "lora_up.weight"),
        ("lokr", "alpha"),
        ("lokr", "lokr_w1"),
        ("lokr", "lokr_w2_a"),
        ("lokr", "lokr_w2_b"),
    ],
)
def test_a_module_without_all_its_parts_is_an_error(kind, part):
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6) if kind == "lora" else lokr(rank=(None, 2))})
    del state[f"diffusion_model.blocks.0.attn.wq.{part}"]
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.wq has only .*wanted lora_down, lora_up and alpha"):
        read_comfyui(state)


def test_a_module_of_two_kinds_is_an_error():
    state = write_comfyui({"x": lokr()}) | write_comfyui({"x": module(8, 15)})
    with pytest.raises(ValueError, match="x has only"):
        read_comfyui(state)
    state = write_comfyui({"x": lokr()}) | write_comfyui({"x": lokr(rank=(None, 2))})
    with pytest.raises(ValueError, match="x has only"):
        read_comfyui(state)


def test_diffusers_own_converter_agrees(family_name):
    """ComfyUI's layout through diffusers' own conversion gives the state dict that is written for diffusers."""
    from diffusers.loaders import lora_conversion_utils as theirs

    with torch.device("meta"):
        linears = {n: m for n, m in tiny.build(family_name).named_modules() if isinstance(m, torch.nn.Linear)}
    shapes = Sizes.of(family_name, {f"{n}.weight": tuple(m.weight.shape) for n, m in linears.items()})
    supported = r"layers" if family_name == "ideogram4" else r""
    modules = {
        n: module(m.out_features, m.in_features, alpha=4.0, seed=i)  # alpha = rank, since its Krea 2 reader takes none
        for i, (n, m) in enumerate(linears.items())
        if n.startswith(supported)
    }
    state = {
        k.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): v
        for k, v in write_comfyui(modules).items()
        if not k.endswith("alpha")
    }
    convert = {
        "krea2": theirs._convert_non_diffusers_krea2_lora_to_diffusers,
        "ideogram4": theirs._convert_non_diffusers_ideogram4_lora_to_diffusers,
    }[family_name]
    wanted, found = convert(dict(state)), convert_state(write_comfyui(modules), {}, "diffusers", sizes=shapes)[0]
    assert set(found) == set(wanted)
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_written_file_comes_back_with_its_metadata(tmp_path):
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6)})
    write_state(tmp_path / "a.safetensors", state, {"a": "b"})
    found, metadata = read_state(tmp_path / "a.safetensors")
    assert metadata["a"] == "b"
    assert all(torch.equal(found[k], v) for k, v in state.items())


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="disk full"), atomic_file(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_leaves_the_former_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("former")
    with pytest.raises(FileExistsError, match="not overwritten unasked"), atomic_file(path):
        pass
    with pytest.raises(RuntimeError, match="disk full"), atomic_file(path, overwrite=True):
        raise RuntimeError("disk full")
    assert path.read_text() == "former"
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_came_while_another_was_written_is_not_overwritten(tmp_path, monkeypatch, links):
    """Two runs with one target: the second to finish once took the first one's place."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a.txt"
    with pytest.raises(FileExistsError, match="not overwritten unasked"), atomic_file(path) as temporary:
        temporary.write_text("second")
        path.write_text("first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def no_links(*_arguments):
    raise PermissionError(1, "Operation not permitted")


def test_a_file_system_without_hard_links_takes_files_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    with atomic_file(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "whole")]


def test_between_the_look_and_the_name_nothing_can_come(tmp_path, monkeypatch):
    """No look that says there is nothing makes it overwrite what is there."""
    path = tmp_path / "a.txt"
    path.write_text("first")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(FileExistsError, match="not overwritten unasked"), atomic_file(path) as temporary:
        temporary.write_text("second")
    assert path.read_text() == "first"


def test_needs_torch_and_safetensors_only():
    blocked = "peft, diffusers, torchao, PIL, matplotlib, tqdm, comfy, transformers, accelerate"
    code = (
        f"import sys\nfor name in '{blocked}'.split(', '): sys.modules[name] = None\n"
        "import graft_lora.lora_convert\n"
        "assert not [m for m in sys.modules if m.startswith(('graft_lora.trainer', 'graft_lora.nodes'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path):
    """safetensors raises a kind of its own."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"a\.safetensors cannot be written"):
            write_state(tmp_path / "a.safetensors", {"a": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
