"""What an inspection says, against what the file was made of."""

from __future__ import annotations

import json

import lora_files
import pytest
import tiny
import torch
from graft_lora.cli import main
from graft_lora.lora_convert import write_state
from graft_lora.lora_convert.errors import LoraError
from graft_lora.lora_convert.inspect import inspect_file, inspect_state
from lora_files import loha, lokr, lora

KINDS = {
    "LoRA": lora(".lora_A.weight", ".lora_B.weight", alpha=1.5),
    "LoKr": lokr(rank=2, alpha=3.0),
    "LoHa": loha(),
}


def block(family, module):
    numbered = module.startswith(("blocks.", "txtfusion.layerwise", "txtfusion.refiner", "layers."))
    if not numbered:
        return "others"
    return ".".join(module.split(".")[: 3 if module.startswith("txtfusion") else 2])


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_dense_changes(kind, family_name):
    file = lora_files.write(family_name, KINDS[kind], "diffusion_model.", "official")
    found = inspect_state(file.state, {}, lora_files.sizes(family_name))
    wanted: dict[str, float] = {}
    for module, change in file.wanted.items():
        name = block(family_name, module)
        wanted[name] = wanted.get(name, 0.0) + change.double().square().sum().item()
    assert found.norms == {name: pytest.approx(square**0.5, rel=1e-6) for name, square in wanted.items()}
    assert list(found.norms)[-1] == "others"
    assert found.kinds == {kind: sum(len(lora_files.MODULES[family_name][m][0]) for m in file.wanted)}
    assert found.parameters == sum(t.numel() for k, t in file.state.items() if not k.endswith("alpha"))


def test_blocks_are_in_the_models_order(family_name):
    """Not 10 before 2."""
    shapes = {"krea2": ("blocks.{}.attn.wo", 6144), "ideogram4": ("layers.{}.attention.o", 4608)}
    name, width = shapes[family_name]
    state = {}
    for number in (10, 2, 0):
        stem = "diffusion_model." + name.format(number)
        state |= {f"{stem}.lora_A.weight": torch.ones(1, width), f"{stem}.lora_B.weight": torch.ones(width, 1)}
    found = inspect_state(state)
    assert [block.split(".")[1] for block in found.norms] == ["0", "2", "10"]
    assert list(found.norms.values()) == pytest.approx([width] * 3)


def test_ranks_and_alphas_are_those_of_each_group():
    state = {}
    sizes = lora_files.sizes("krea2")
    for module, rank, alpha in (
        ("blocks.0.attn.wq", 2, 1.0),
        ("blocks.1.attn.wo", 5, 4.0),
        ("blocks.0.mlp.up", 3, 3.0),
        ("txtfusion.refiner_blocks.0.mlp.up", 4, 2.0),
        ("first", 1, 7.0),
    ):
        out, columns = sizes.shape(module)
        stem = f"diffusion_model.{module}"
        state |= {f"{stem}.lora_down.weight": torch.ones(rank, columns), f"{stem}.alpha": torch.tensor(alpha)}
        state[f"{stem}.lora_up.weight"] = torch.ones(out, rank)
    state["diffusion_model.blocks.0.prenorm.scale.diff"] = torch.ones(256)
    found = inspect_state(state, {}, sizes)
    assert {group.name: (group.modules, group.rank, group.alpha) for group in found.groups} == {
        "text fusion": (1, (4, 4), (2.0, 2.0)),
        "attention": (2, (2, 5), (1.0, 4.0)),
        "mlp": (1, (3, 3), (3.0, 3.0)),
        "others": (2, (1, 1), (7.0, 7.0)),
    }
    assert "attention    2 modules, rank 2 to 5, alpha 1 to 4" in found.text()
    assert found.kinds == {"LoRA": 5, "vector": 1}


@pytest.mark.parametrize("part", [".dora_scale", ".magnitude"])
def test_a_dora_says_of_which_form_it_is(part, family_name):
    def parts(out, columns, generator):
        tensors, change = KINDS["LoRA"](out, columns, generator)
        return tensors | {part: torch.ones(out, 1)}, change

    file = lora_files.write(family_name, parts, "diffusion_model.", "official")
    sizes = lora_files.sizes(family_name)
    assert inspect_state(file.state, {}, sizes).dora == ("by output row, over the norm of W + dW (the paper's)",)
    if part == ".dora_scale":
        header = {"graft": json.dumps({"dora_scale": "over the norm of W"})}
        found = inspect_state(file.state, header, sizes)
        assert found.dora == ("by output row, over the norm of W (ComfyUI's)",)
        assert found.verdicts["ComfyUI"].loads == "fully"


def test_text_has_no_line_over_80_columns_and_a_bar_for_each_block(family_name):
    file = lora_files.write(family_name, KINDS["LoRA"], "base_model.model.", "official")
    file.state["base_model.model." + "x" * 300] = torch.ones(1)
    found = inspect_state(file.state, {}, lora_files.sizes(family_name))
    lines = found.text().splitlines()
    assert max(map(len, lines)) <= 80
    bars = lines[lines.index("norm of dW") + 1 :]
    assert [bar.split()[0] for bar in bars] == list(found.norms)
    lengths = {bar.split()[0]: bar.count("█") for bar in bars}
    assert max(lengths.values()) == 36
    most = max(found.norms.values())
    assert lengths == {name: int(36 * value / most + 1 / 16) for name, value in found.norms.items()}
    assert "1 keys were left out" in " ".join(line.strip() for line in lines)


def test_a_file_that_changes_nothing_has_no_bars():
    state = {
        "diffusion_model.blocks.0.attn.wo.lora_A.weight": torch.ones(1, 6144),
        "diffusion_model.blocks.0.attn.wo.lora_B.weight": torch.zeros(6144, 1),
    }
    found = inspect_state(state)
    assert found.norms == {"blocks.0": 0.0}
    assert "█" not in found.text()


# ---- the command


@pytest.fixture
def lora_path(tmp_path, family_name):
    file = lora_files.write(family_name, KINDS["LoRA"], "diffusion_model.", "official")
    write_state(tmp_path / "a.safetensors", file.state, {"format": "pt"})
    return tmp_path / "a.safetensors"


def test_the_command_takes_sizes_from_a_base(lora_path, family_name, tmp_path, capsys):
    base = tiny.write(tiny.build(family_name), tmp_path / "base.safetensors")
    before = lora_path.read_bytes()
    assert main(["inspect", str(lora_path), "--base", str(base)]) == 0
    text = capsys.readouterr().out
    assert text == inspect_file(lora_path, lora_files.sizes(family_name)).text() + "\n"
    assert main(["inspect", str(lora_path), "--base", str(base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == family_name
    assert found["verdicts"]["musubi-tuner"]["loads"] == "not"
    assert lora_path.read_bytes() == before


def test_faults_are_one_line_and_status_2(lora_path, tmp_path, capsys):
    """A LoRA of another size without its base, no file, no LoRA, no base."""
    (tmp_path / "text.safetensors").write_text("hello")
    for arguments, word in (
        ([str(lora_path)], "wanted"),
        ([str(tmp_path / "no.safetensors")], "no.safetensors cannot be read"),
        ([str(tmp_path / "text.safetensors")], "is no sound safetensors file"),
        ([str(lora_path), "--base", str(tmp_path / "no")], "there is no such file"),
    ):
        assert main(["inspect", *arguments]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith("graft: error: ")
        assert word in error
        assert error.count("\n") == 1


def test_of_a_broken_file_there_is_no_inspection(family_name):
    file = lora_files.write(family_name, KINDS["LoRA"], "diffusion_model.", "official")
    next(iter(file.state.values()))[0, 0] = float("nan")
    with pytest.raises(LoraError, match="not finite"):
        inspect_state(file.state, {}, lora_files.sizes(family_name))


@pytest.mark.parametrize("header", ["{", "[1]", "[" * 100_000])
def test_a_broken_peft_header_beside_alphas_of_their_own_is_no_crash(family_name, header):
    file = lora_files.write(
        family_name, lora(".lora_A.weight", ".lora_B.weight", alpha=2.0), "transformer.", "diffusers"
    )
    found = inspect_state(file.state, {"lora_adapter_metadata": header}, lora_files.sizes(family_name))
    assert found.verdicts
