"""Writing and reading layouts, and files that are whole or not there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import tiny
import torch
from graft_lora.lora_convert import (
    LoraModule,
    atomic_file,
    read_comfyui,
    read_state,
    write_comfyui,
    write_diffusers,
    write_state,
)


def module(rows, columns, rank=4, alpha=6.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, columns, generator=generator).to(dtype)
    return LoraModule(down, torch.randn(rows, rank, generator=generator).to(dtype), alpha)


def test_the_change_is_alpha_over_rank_times_up_times_down():
    m = module(5, 7)
    assert torch.allclose(m.delta(), 1.5 * (m.up @ m.down))


def test_comfyui_layout_has_official_names_and_fp32_alpha():
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6, dtype=torch.bfloat16)}, "krea2")
    assert {k: v.dtype for k, v in state.items()} == {
        "diffusion_model.blocks.0.attn.wq.lora_down.weight": torch.bfloat16,
        "diffusion_model.blocks.0.attn.wq.lora_up.weight": torch.bfloat16,
        "diffusion_model.blocks.0.attn.wq.alpha": torch.float32,
    }


@pytest.mark.parametrize("key", ["transformer.x.lora_A.weight", "diffusion_model.x.magnitude", "x.lora_down.weight"])
def test_a_key_that_is_not_understood_is_an_error(key):
    with pytest.raises(ValueError, match="is not a key of ComfyUI's LoRA layout"):
        read_comfyui({key: torch.zeros(1)})


def test_a_module_without_all_its_parts_is_an_error():
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6)}, "krea2")
    del state["diffusion_model.blocks.0.attn.wq.alpha"]
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.wq has only .*wanted lora_down, lora_up and alpha"):
        read_comfyui(state)


def test_diffusers_layout_splits_the_fused_projection_and_folds_alpha():
    fused = module(12, 6)
    state = write_diffusers(
        {"layers.3.attention.qkv": fused, "layers.3.attention.o": module(4, 4, seed=1)}, "ideogram4"
    )
    assert set(state) == {
        f"transformer.layers.3.attention.{m}.lora_{x}.weight"
        for m in ("to_q", "to_k", "to_v", "to_out.0")
        for x in "AB"
    }
    members = [
        state[f"transformer.layers.3.attention.to_{m}.lora_B.weight"]
        @ state[f"transformer.layers.3.attention.to_{m}.lora_A.weight"]
        for m in "qkv"
    ]
    assert torch.allclose(torch.cat(members), fused.delta(), atol=1e-6)


def test_a_module_that_diffusers_does_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"blocks\.0\.nothing: diffusers' krea2 has no such module"):
        write_diffusers({"blocks.0.nothing": module(4, 4)}, "krea2")


def test_diffusers_own_converter_agrees(family_name):
    """ComfyUI's layout through diffusers' own conversion gives the state dict that is written for diffusers."""
    from diffusers.loaders import lora_conversion_utils as theirs

    with torch.device("meta"):
        linears = {n: m for n, m in tiny.build(family_name).named_modules() if isinstance(m, torch.nn.Linear)}
    supported = r"layers" if family_name == "ideogram4" else r""
    modules = {
        n: module(m.out_features, m.in_features, alpha=4.0, seed=i)  # alpha = rank, since its Krea 2 reader takes none
        for i, (n, m) in enumerate(linears.items())
        if n.startswith(supported)
    }
    state = {
        k.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): v
        for k, v in write_comfyui(modules, family_name).items()
        if not k.endswith("alpha")
    }
    convert = {
        "krea2": theirs._convert_non_diffusers_krea2_lora_to_diffusers,
        "ideogram4": theirs._convert_non_diffusers_ideogram4_lora_to_diffusers,
    }[family_name]
    wanted, found = convert(dict(state)), write_diffusers(modules, family_name)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_written_file_comes_back_with_its_metadata(tmp_path):
    state = write_comfyui({"blocks.0.attn.wq": module(8, 6)}, "krea2")
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
