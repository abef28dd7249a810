"""Conversions as wholes: every producer into every target with equal dW, refusals with a reason, and files put in place
only after they were compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tiny
import torch
from graft_lora.cli import main
from graft_lora.lora_convert import convert as convert_module
from graft_lora.lora_convert.canonical import LoraModule, Split
from graft_lora.lora_convert.convert import DTYPES, LAYOUTS, convert_file, convert_folder, convert_state
from graft_lora.lora_convert.errors import CannotConvertError, LoraError, NotALoraError
from graft_lora.lora_convert.reading import read_lora
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_files import delta, loha, lokr, lora, sizes, write
from safetensors.torch import load_file, save_file

A_B = (".lora_A.weight", ".lora_B.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")
# What diffusers' loaders take of Ideogram 4, and what every target takes of Krea 2.
EVERYWHERE = {
    "krea2": ("blocks.1.attn.qkv", "blocks.0.attn.gate", "blocks.1.mlp.down"),
    "ideogram4": ("layers.1.attention.qkv", "layers.0.attention.o", "layers.0.feed_forward.w2"),
}
# Producer → parts, prefix, naming of either family, flat.
SOURCES = {
    "diffusers": (A_B, "transformer.", ("diffusers", "diffusers"), False),
    "ai-toolkit": (A_B, "diffusion_model.", ("official", "official"), False),
    "fal": (A_B, "base_model.model.", ("official", "official"), False),
    "SimpleTuner": (A_B, "transformer.", ("fused", "official"), False),
    "musubi-tuner": (DOWN_UP, "lora_unet_", ("official", "official"), True),
    "OneTrainer": (DOWN_UP, "transformer.", ("diffusers", "diffusers"), False),
    "ComfyUI": (DOWN_UP, "diffusion_model.", ("official", "official"), False),
}
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def source_of(family, producer, rank=3, alpha=2.0, dtype=torch.float32, only=None):
    pair, prefix, naming, flat = SOURCES[producer]
    parts = lora(*pair, rank=rank, alpha=alpha, dtype=dtype)
    return write(family, parts, prefix, naming[family == "ideogram4"], flat, only=only or EVERYWHERE[family])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    producer=st.sampled_from(sorted(SOURCES)),
    target=st.sampled_from(LAYOUTS),
    rank=st.integers(1, 5),
    alpha=st.sampled_from([1.0, 3.0, 16.0, -2.0, 0.37]),
    dtype=st.sampled_from(sorted(ROUNDING, key=str)),
)
def test_dw_is_equal_after_every_conversion_and_a_second_one_changes_nothing(
    family_name, producer, target, rank, alpha, dtype
):
    file = source_of(family_name, producer, rank, alpha, dtype)
    shapes = sizes(family_name)
    common = None
    if target == "onetrainer" and family_name == "ideogram4" and SOURCES[producer][2][1] == "diffusers":
        # It has one rank for all modules, and q, k and v fused have three times that of the others.
        with pytest.raises(CannotConvertError, match=f"--rank {3 * rank} is exact"):
            convert_state(file.state, file.metadata, target, sizes=shapes)
        common = 3 * rank
    state, metadata, report = convert_state(file.state, file.metadata, target, common, sizes=shapes)
    found = read_lora(state, metadata, shapes)
    assert found.modules.keys() == file.wanted.keys()
    for name, wanted in file.wanted.items():
        assert tiny.relative(delta(found.modules[name]), wanted) < ROUNDING[dtype], name
    assert report.layout == target
    assert len(report.modules) == len(file.wanted)
    again, header, _ = convert_state(state, metadata, target, common, sizes=shapes)
    assert again.keys() == state.keys()
    assert header == metadata
    assert all(torch.equal(again[key], state[key]) and again[key].dtype == state[key].dtype for key in state)


@pytest.mark.parametrize("parts", [lokr(), lokr(rank=2), loha()], ids=["whole LoKr", "LoKr", "LoHa"])
@pytest.mark.parametrize("target", LAYOUTS)
def test_other_kinds_arrive_or_are_refused_with_a_way_out(family_name, target, parts):
    file = write(family_name, parts, "diffusion_model.", "official", only=EVERYWHERE[family_name])
    shapes = sizes(family_name)
    try:
        state, metadata, _ = convert_state(file.state, file.metadata, target, sizes=shapes)
    except CannotConvertError as error:
        said = str(error)
    else:
        found = read_lora(state, metadata, shapes)
        for name, wanted in file.wanted.items():
            assert tiny.relative(delta(found.modules[name]), wanted) < 1e-5
        return
    assert "\n" not in said
    assert any(way in said for way in ("rank", "another", "target"))


def test_fused_split_and_fused_again_is_the_original_bit_for_bit(family_name):
    file = source_of(family_name, "SimpleTuner", only=EVERYWHERE[family_name][:1])
    shapes = sizes(family_name)
    split, header, _ = convert_state(file.state, file.metadata, "diffusers", sizes=shapes)
    assert any("to_q." in key for key in split)
    fused, _, _ = convert_state(split, header, "simpletuner", sizes=shapes)
    wanted, _, _ = convert_state(file.state, file.metadata, "simpletuner", sizes=shapes)
    assert fused.keys() == wanted.keys()
    assert all(torch.equal(fused[key], wanted[key]) for key in wanted)


def test_a_chosen_rank_prints_its_error_and_is_the_best_there_is(family_name):
    file = source_of(family_name, "ComfyUI", rank=5, alpha=5.0)
    shapes = sizes(family_name)
    state, metadata, report = convert_state(file.state, file.metadata, "comfyui", rank=2, sizes=shapes)
    found = read_lora(state, metadata, shapes)
    for name, wanted in file.wanted.items():
        change = found.modules[name]
        members = (
            [(m, w) for m, w in zip(change.members, wanted.split(change.rows), strict=True)]
            if isinstance(change, Split)
            else [(change, wanted)]
        )
        for member, dense in members:
            assert member.rank == 2
            values = torch.linalg.svdvals(dense.double())
            best = (values[2:].square().sum() / values.square().sum()).sqrt().item()
            assert tiny.relative(member.delta(), dense) == pytest.approx(best, rel=1e-4)
    assert report.truncation > 0.1
    assert all(module.truncation is not None for module in report.modules)


def test_a_result_that_differs_is_not_put_in_place(tmp_path, family_name, monkeypatch):
    """The comparison must be able to fail: here the writer is made to lose half of one module."""
    file = source_of(family_name, "ComfyUI")
    save_file(file.state, tmp_path / "in.safetensors")
    write_lora = convert_module.write_lora

    def careless(*arguments, **options):
        written = write_lora(*arguments, **options)
        key = next(key for key in written.state if "lora_up" in key)
        written.state[key] = 0.5 * written.state[key]
        return written

    monkeypatch.setattr(convert_module, "write_lora", careless)
    with pytest.raises(LoraError, match=r"1 of 3 modules would not be what they were, .* nothing was written"):
        convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui", sizes=sizes(family_name))
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_the_input_is_not_touched_and_nothing_is_overwritten_unasked(tmp_path):
    file = source_of("krea2", "diffusers")
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(file.state, source)
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    options = {"sizes": sizes("krea2")}
    convert_file(source, target, "comfyui", **options)
    with pytest.raises(FileExistsError, match="is not overwritten unasked"):
        convert_file(source, target, "kohya", **options)
    kept = target.read_bytes()
    convert_file(source, target, "kohya", force=True, **options)
    assert target.read_bytes() != kept
    with pytest.raises(CannotConvertError, match="is the source itself"):
        convert_file(source, source, "kohya", force=True, **options)
    assert hashlib.sha256(source.read_bytes()).hexdigest() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_a_folder_goes_on_after_a_file_that_fails(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    save_file(source_of("krea2", "diffusers").state, tmp_path / "in" / "a.safetensors")
    (tmp_path / "in" / "b.safetensors").write_bytes(b"")
    save_file(source_of("krea2", "fal").state, tmp_path / "in" / "deep" / "c.safetensors")
    found = dict(convert_folder(tmp_path / "in", tmp_path / "out", "comfyui", sizes=sizes("krea2")))
    assert [str(name) for name in found] == ["a.safetensors", "b.safetensors", "deep/c.safetensors"]
    assert isinstance(found[Path("b.safetensors")], NotALoraError)
    assert (tmp_path / "out" / "deep" / "c.safetensors").is_file()
    assert not (tmp_path / "out" / "b.safetensors").exists()


@pytest.fixture
def base(tmp_path, family_name):
    return tiny.write(tiny.build(family_name), tmp_path / "base.safetensors")


def test_the_command_converts_a_file_and_reports(tmp_path, family_name, base, capsys):
    file = source_of(family_name, "musubi-tuner")
    save_file(file.state, tmp_path / "in.safetensors")
    arguments = ["convert", str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors"), "--to", "diffusers"]
    report = tmp_path / "report.json"
    assert main([*arguments, "--base", str(base), "--report", str(report), "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "(kohya) → diffusers" in said
    assert "3 modules compared, the worst differs by " in said
    (content,) = json.loads(report.read_text()).values()
    assert {module["name"] for module in content["modules"]} == set(file.wanted)
    assert load_file(tmp_path / "out.safetensors").keys()
    assert main(arguments) == 2
    assert "is not overwritten unasked" in capsys.readouterr().err


def test_the_command_on_a_folder_says_which_files_failed(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    base = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    save_file(source_of("krea2", "diffusers").state, tmp_path / "in" / "good.safetensors")
    (tmp_path / "in" / "bad.safetensors").write_bytes(b"\x80\x04")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "comfyui", "--base", str(base)]
    assert main([*arguments, "--report", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr()
    assert "bad.safetensors: " in said.err
    assert "1 of 2 files were not converted" in said.err
    assert "good.safetensors: krea2" in said.out
    assert "error" in json.loads((tmp_path / "r.json").read_text())["bad.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "nonsense"], "layout 'nonsense' is not known; choose one of comfyui, diffusers"),
        (["--to", "comfyui", "--dtype", "int3"], "dtype 'int3' is not known"),
        (["--to", "comfyui", "--rank", "0"], "rank is 0; wanted 1 or more"),
        (["--to", "comfyui", "--rank", "-3"], "rank is -3; wanted 1 or more"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, capsys, arguments, message):
    save_file(source_of("krea2", "diffusers").state, tmp_path / "in.safetensors")
    assert main(["convert", str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors"), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("graft: error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()


def test_a_dora_into_comfyui_asks_for_the_base_and_is_right_with_it(tmp_path, family_name, base):
    """ComfyUI divides by the norm of W where the paper has that of W + dW: the file's lengths must be made over."""
    from graft_lora.trainer.checkpoints import converter_options

    name = EVERYWHERE[family_name][1]
    generator = torch.Generator().manual_seed(0)
    weight = load_file(base)[f"{name}.weight"]
    down, up = torch.randn(3, weight.shape[1], generator=generator), torch.randn(len(weight), 3, generator=generator)
    magnitude = torch.rand(len(weight), generator=generator) + 0.5
    stem = f"diffusion_model.{name}"
    state = {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up, f"{stem}.magnitude": magnitude}
    with pytest.raises(CannotConvertError, match="base"):
        convert_state(state, {}, "comfyui", sizes=sizes(family_name))
    converted, _, report = convert_state(state, {}, "comfyui", **converter_options(base))
    changed = weight + up @ down
    wanted = magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True)
    # ComfyUI 0.33, comfy/weight_adapter/base.py: dora_scale · (W + dW) / ‖W‖ by row.
    scale = converted[f"{stem}.dora_scale"]
    alpha = converted[f"{stem}.alpha"] / 3
    delta_comfyui = alpha * converted[f"{stem}.lora_up.weight"] @ converted[f"{stem}.lora_down.weight"]
    found = scale * (weight + delta_comfyui) / weight.norm(dim=1, keepdim=True)
    assert tiny.relative(found, wanted) < 1e-5
    assert report.worst.difference < 1e-5
    baked, _, _ = convert_state(state, {}, "comfyui", bake=True, **converter_options(base))
    assert set(baked) == {f"{stem}.diff"}
    assert tiny.relative(weight + baked[f"{stem}.diff"], wanted) < 1e-5


def test_no_file_of_lora_convert_needs_more_than_torch_and_safetensors():
    import subprocess
    import sys

    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] in ('peft', 'diffusers', 'transformers', 'torchao', 'comfy', 'accelerate'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import graft_lora.lora_convert.convert, graft_lora.lora_convert\n"
        "assert not any(name.startswith('graft_lora.trainer') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_lora_of_rank_one_module_names_its_kind():
    file = source_of("krea2", "ComfyUI")
    _, _, report = convert_state(file.state, file.metadata, "comfyui", sizes=sizes("krea2"))
    assert {module.kind for module in report.modules} == {LoraModule.__name__, "LoraModule | LoraModule | LoraModule"}


@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_cast_within_its_own_layout_is_no_mere_rename(family_name, layout, dtype):
    """What the cast rounds was once taken for a fault, and nothing was written."""
    file = source_of(family_name, {"comfyui": "ComfyUI", "diffusers": "diffusers"}[layout])
    written, _, report = convert_state(file.state, file.metadata, layout, dtype=dtype, sizes=sizes(family_name))
    assert {tensor.dtype for key, tensor in written.items() if "alpha" not in key} == {DTYPES[dtype]}
    assert 1e-6 < report.worst.difference <= report.worst.allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_strength_that_is_one_percent_off_is_seen_where_nothing_is_rounded(dtype, monkeypatch):
    """The rounding of the dtype is no leave to be wrong by it: a rename must keep the bits."""
    file = source_of("krea2", "ComfyUI", dtype=dtype)
    write_lora = convert_module.write_lora

    def careless(*arguments, **options):
        written = write_lora(*arguments, **options)
        key = next(key for key in written.state if key.endswith("mlp.down.alpha"))
        written.state[key] = 1.01 * written.state[key]
        return written

    monkeypatch.setattr(convert_module, "write_lora", careless)
    with pytest.raises(LoraError, match="1 of 3 modules would not be what they were"):
        convert_state(file.state, file.metadata, "comfyui", sizes=sizes("krea2"))


def test_a_small_member_that_is_lost_is_seen_beside_a_truncated_one(monkeypatch):
    shapes, generator, state = sizes("krea2"), torch.Generator().manual_seed(0), {}
    for letter, rank, size in (("q", 8, 1.0), ("k", 2, 1e-3)):
        out, columns = shapes.shape(f"blocks.1.attn.w{letter}")
        stem = f"diffusion_model.blocks.1.attn.w{letter}"
        state[f"{stem}.lora_down.weight"] = torch.randn(rank, columns, generator=generator)
        state[f"{stem}.lora_up.weight"] = size * torch.randn(out, rank, generator=generator)
    convert_state(state, {}, "comfyui", rank=4, sizes=shapes)
    write_lora = convert_module.write_lora

    def careless(*arguments, **options):
        written = write_lora(*arguments, **options)
        key = next(key for key in written.state if "wk.lora_up" in key)
        written.state[key] = torch.zeros_like(written.state[key])
        return written

    monkeypatch.setattr(convert_module, "write_lora", careless)
    with pytest.raises(LoraError, match="would not be what they were"):
        convert_state(state, {}, "comfyui", rank=4, sizes=shapes)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("target", ["comfyui", "diffusers"])
def test_a_weak_dora_beside_a_plain_lora_goes_through_with_the_base(family_name, base, target, rank):
    """Its lengths are those of the whole weight, of which the change is a hundredth."""
    from graft_lora.trainer.checkpoints import converter_options

    _, dora, plain = EVERYWHERE[family_name]
    generator = torch.Generator().manual_seed(0)
    weights, state = load_file(base), {}
    for name in (dora, plain):
        weight = weights[f"{name}.weight"]
        down = torch.randn(3, weight.shape[1], generator=generator)
        up = torch.randn(len(weight), 3, generator=generator)
        up *= 0.01 * weight.norm() / (up @ down).norm()
        stem = f"diffusion_model.{name}"
        state |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        if name == dora:
            state[f"{stem}.magnitude"] = (weight + up @ down).norm(dim=1)
    _, _, report = convert_state(state, {}, target, rank, **converter_options(base))
    assert len(report.modules) == 2


@pytest.mark.parametrize("header", ["[" * 100_000, '{"a":' + "1" * 5000 + "}"])
def test_a_hostile_header_stops_neither_a_file_nor_a_folder(tmp_path, header):
    (tmp_path / "in").mkdir()
    for name, metadata in (("a", {"graft": header}), ("b", {})):
        save_file(source_of("krea2", "ComfyUI").state, tmp_path / "in" / f"{name}.safetensors", metadata)
    found = dict(convert_folder(tmp_path / "in", tmp_path / "out", "kohya", sizes=sizes("krea2")))
    assert len(found) == 2
    assert all(isinstance(result, convert_module.Report) for result in found.values()), found
    assert (tmp_path / "out" / "b.safetensors").is_file()


@pytest.mark.parametrize("report", ["in.safetensors", "out.safetensors", "other.safetensors", "nowhere/r.json"])
def test_a_report_never_takes_the_place_of_a_lora(tmp_path, capsys, report):
    """With --force it once replaced the source, and without it the result."""
    source = tmp_path / "in.safetensors"
    save_file(source_of("krea2", "ComfyUI").state, source)
    before = source.read_bytes()
    arguments = ["convert", str(source), str(tmp_path / "out.safetensors"), "--to", "kohya", "--force"]
    assert main([*arguments, "--report", str(tmp_path / report)]) == 2
    assert "the report" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert not (tmp_path / "out.safetensors").exists()


def test_what_its_own_reader_would_not_load_is_not_put_in_place(tmp_path, monkeypatch):
    """Graft's reader takes endings that ComfyUI's does not: read back, such a file is right."""
    file = source_of("krea2", "ComfyUI")
    save_file(file.state, tmp_path / "in.safetensors")
    write_lora = convert_module.write_lora

    def careless(*arguments, **options):
        written = write_lora(*arguments, **options)
        for key in list(written.state):
            if "mlp.down.lora" in key:
                written.state[key.replace(".lora_down.", ".lora_A.mine.").replace(".lora_up.", ".lora_B.mine.")] = (
                    written.state.pop(key)
                )
        return written

    monkeypatch.setattr(convert_module, "write_lora", careless)
    with pytest.raises(LoraError, match=r"ComfyUI would load the result partly: it knows no such ending .*"):
        convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui", sizes=sizes("krea2"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "nonsense"], "layout 'nonsense' is not known"),
        (["--to", "comfyui", "--dtype", "int3"], "dtype 'int3' is not known"),
        (["--to", "comfyui", "--rank", "0"], "rank is 0"),
    ],
)
def test_wrong_arguments_for_a_folder_are_said_once(tmp_path, capsys, arguments, message):
    (tmp_path / "in").mkdir()
    for name in "abc":
        save_file(source_of("krea2", "diffusers").state, tmp_path / "in" / f"{name}.safetensors")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("graft: error: ")
    assert said.count(message) == said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    options = {"rank": 0} if "--rank" in arguments else {"dtype": "int3"} if "--dtype" in arguments else {}
    with pytest.raises(LoraError, match=message):
        convert_folder(tmp_path / "in", tmp_path / "out", arguments[1], **options)


def test_progress_counts_the_files_that_are_converted(tmp_path, monkeypatch):
    """Those of an output folder within the source are not."""
    source, target = tmp_path / "in", tmp_path / "in" / "out"
    target.mkdir(parents=True)
    base = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    save_file(source_of("krea2", "diffusers").state, source / "a.safetensors")
    for name in ("before", "before too"):
        save_file(source_of("krea2", "diffusers").state, target / f"{name}.safetensors")
    totals = []
    monkeypatch.setattr("tqdm.tqdm", lambda found, total, **options: totals.append(total) or found)
    assert main(["convert", str(source), str(target), "--to", "kohya", "--base", str(base)]) == 0
    assert totals == [1]
    assert (target / "a.safetensors").is_file()


def test_unknown_keys_are_left_out_on_request_and_named(tmp_path, capsys):
    base = tiny.write(tiny.build("krea2"), tmp_path / "base.safetensors")
    strangers = ["diffusion_model.what.alpha", "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha", "x", "y", "z"]
    state = source_of("krea2", "diffusers").state | {name: torch.ones(1) for name in strangers}
    save_file(state, tmp_path / "in.safetensors")
    target, report = tmp_path / "out.safetensors", tmp_path / "r.json"
    arguments = ["convert", str(tmp_path / "in.safetensors"), str(target), "--to", "comfyui", "--base", str(base)]
    arguments += ["--report", str(report)]
    assert main(arguments) == 2
    assert "4 keys are not understood" in (said := capsys.readouterr().err)
    assert "leave them out (--skip-unknown)" in said
    assert not target.exists()
    assert main([*arguments, "--skip-unknown"]) == 0
    said = capsys.readouterr().out
    (content,) = json.loads(report.read_text()).values()
    assert sorted(content["left_out"]) == sorted(strangers)
    assert all(f"left out: {name}\n" in said for name in strangers)
    assert (
        load_file(target).keys()
        == convert_state(source_of("krea2", "diffusers").state, {}, "comfyui", sizes=sizes("krea2"))[0].keys()
    )
