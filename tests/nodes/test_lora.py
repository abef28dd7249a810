"""Load LoRA (any layout), LoRA Strength, Save, Convert, Inspect; Plot Loss and Estimate Memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from graft_lora.lora_convert import open_lora, read_lora
from graft_lora.lora_convert.sizes import Sizes


@pytest.fixture
def trained(graph, model, dataset):
    """Outputs of a short run: MODEL, LORA_MODEL, plot, run."""
    lora = graph.run("GraftLoraSettings", rank=2)[0]
    settings = graph.run("GraftTrainSettings", steps=2, learning_rate=0.01)[0]
    return graph.run(
        "GraftTrain", model=model, dataset=dataset, name="zorb", lora_settings=lora, train_settings=settings
    ).args


def sizes(model):
    return Sizes.of(model.hosted.file.family.name, model.hosted.file.shapes)


def save(graph, trained, family_name, which=3, **more):
    given = {"name": "graft/zorb", "base": f"{family_name}.safetensors", **more}
    return graph.run("GraftSaveLora", lora=trained[which], **given)[0]


def same(one, other):
    """Whether two files' changes are the same, to fp32's roundings."""
    assert one.modules.keys() == other.modules.keys()
    for name, change in one.modules.items():
        members = [getattr(entry, "members", (entry,)) for entry in (change, other.modules[name])]
        for mine, theirs in zip(*members, strict=True):
            torch.testing.assert_close(mine.delta(), theirs.delta())


@pytest.mark.parametrize("which", [1, 3], ids=["LORA_MODEL", "GRAFT_RUN"])
@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
def test_a_saved_lora_is_the_trained_one_in_any_layout(graph, model, trained, family_name, which, layout):
    path = save(graph, trained, family_name, which, layout=layout)
    assert path == str(graph.host.lora_folders()[0].resolve() / "graft" / "zorb.safetensors")
    assert graph.host.lora_files() == ["graft/zorb.safetensors"]
    wanted = read_lora(*open_lora(trained[3].lora), sizes(model))
    found = read_lora(*open_lora(path), sizes(model))
    assert found.layout == layout
    if layout == "comfyui":
        same(wanted, found)


def test_a_run_knows_its_base_itself(graph, trained, family_name):
    assert save(graph, trained, family_name, base="none")


def test_nothing_is_overwritten_unasked(graph, trained, family_name):
    first = save(graph, trained, family_name)
    second = save(graph, trained, family_name)
    assert second == first.replace("zorb.safetensors", "zorb_2.safetensors")
    third = save(graph, trained, family_name, overwrite=True, dtype="bf16")
    assert third == first
    assert {tensor.dtype for key, tensor in open_lora(first)[0].items() if "lora_" in key} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["", "../zorb", "/tmp/zorb", "a/", "..\\zorb"])
def test_a_lora_is_written_among_comfyuis_or_not_at_all(graph, trained, family_name, name):
    assert graph.classes["GraftSaveLora"].validate_inputs(name) is not True
    with pytest.raises(RuntimeError, match="is no file's in"):
        save(graph, trained, family_name, name=name)


def test_a_folder_of_loras_may_be_a_link_to_another_disk(graph, trained, family_name, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (graph.host.lora_folders()[0] / "graft").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    save(graph, trained, family_name)
    assert (tmp_path / "elsewhere" / "zorb.safetensors").is_file()


def test_a_lora_that_is_written_anew_under_its_name_is_read_anew(graph, trained, family_name):
    """ComfyUI would give the cached MODEL out again, since no input has changed."""
    save(graph, trained, family_name)
    nodes = [graph.classes[name] for name in ("GraftLoadLora", "GraftConvertLora", "GraftInspectLora")]
    marks = lambda: [node.fingerprint_inputs(lora_name="graft/zorb.safetensors") for node in nodes]  # noqa: E731
    before = marks()
    assert marks() == before
    save(graph, trained, family_name, overwrite=True)
    assert not set(before) & set(marks())
    base = graph.classes["GraftLoadModel"].fingerprint_inputs
    assert base(model_name=f"{family_name}.safetensors") != base(model_name=None)


def test_any_layout_is_loaded_onto_a_graft_model_and_counted(graph, model, trained, family_name):
    save(graph, trained, family_name, layout="diffusers")
    changed, report = graph.run("GraftLoadLora", model=model, lora_name="graft/zorb.safetensors", strength=0.5).args
    assert [(token.name, strength) for token, strength in changed.shown] == [("zorb", 0.5)]
    assert "modules of graft/zorb.safetensors applied at strength 0.5" in report
    assert "had no effect: a.module" in report


def test_a_stock_model_gets_comfyuis_own_patches(graph, trained, family_name):
    save(graph, trained, family_name)
    changed, report = graph.run("GraftLoadLora", model="stock model", lora_name="graft/zorb.safetensors").args
    assert changed == "stock"
    assert report == f"{len(trained[1]) // 3} modules of graft/zorb.safetensors applied at strength 1"


def test_strength_is_set_without_training_again(graph, trained):
    changed = graph.run("GraftAdapterStrength", model=trained[0], strength=0.25)[0]
    assert [strength for _, strength in changed.shown] == [0.25]
    assert [strength for _, strength in trained[0].shown] == [1.0]
    with pytest.raises(RuntimeError, match="not Graft's"):
        graph.run("GraftAdapterStrength", model=object())


def test_a_file_is_converted_beside_itself_and_stays(graph, model, trained, family_name):
    original = save(graph, trained, family_name)
    before = Path(original).read_bytes()
    path, report = graph.run(
        "GraftConvertLora", lora_name="graft/zorb.safetensors", layout="diffusers", base=f"{family_name}.safetensors"
    ).args
    assert path.endswith("zorb-diffusers.safetensors")
    assert "→ diffusers" in report
    assert "modules compared" in report
    assert Path(original).read_bytes() == before
    assert read_lora(*open_lora(path), sizes(model)).layout == "diffusers"


def test_a_chosen_rank_says_what_it_costs(graph, trained, family_name):
    save(graph, trained, family_name)
    _, report = graph.run(
        "GraftConvertLora", lora_name="graft/zorb.safetensors", rank=1, name="small", base=f"{family_name}.safetensors"
    ).args
    assert "the chosen rank costs" in report


def test_a_file_is_inspected(graph, trained, family_name):
    save(graph, trained, family_name)
    report = graph.run("GraftInspectLora", lora_name="graft/zorb.safetensors", base=f"{family_name}.safetensors")[0]
    assert "rank 2" in report
    assert "norm of dW" in report


def test_a_run_is_plotted_and_one_that_is_gone_is_said(graph, trained):
    plot = graph.run("GraftPlotLoss", run=trained[3])[0]
    assert plot.shape[0] == 1
    assert plot.std() > 0
    (trained[3].folder / "log.jsonl").unlink()
    with pytest.raises(RuntimeError, match="moved or removed"):
        graph.run("GraftPlotLoss", run=trained[3])


def test_a_card_of_a_size_is_estimated(graph):
    table = graph.run("GraftEstimateMemory", family="krea2", card_gb=24.0, precision="nf4")[0]
    assert "| Krea 2 | 24 GB |" in table
    assert table.count("\n") == 2


def test_the_curve_while_training_shows_one_loss_as_well_as_thousands(graph):
    from graft_lora.nodes.pictures import loss_curve

    pictures = [loss_curve(losses) for losses in ([], [0.5], [0.0, 0.0], [1 / (1 + i) for i in range(20000)])]
    assert all(picture.size == (640, 360) for picture in pictures)
    assert len(pictures[-1].getcolors(10**6)) > len(pictures[0].getcolors(10**6))


def test_a_sheet_of_many_pictures_shows_some_of_all(graph, tmp_path):
    from graft_lora.nodes import pictures
    from PIL import Image

    paths = []
    for index in range(pictures.MOST + 30):
        paths.append(tmp_path / f"{index}.png")
        Image.new("RGB", (8, 12), (index, 0, 0)).save(paths[-1])
    sheet = pictures.thumbnails(paths)
    assert sheet.width == pictures.GAP + 8 * (pictures.THUMBNAIL + pictures.GAP)
    assert sheet.height == sheet.width


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_other_kinds_come_out_as_loras_too(graph, model, dataset, family_name, kind):
    lora = graph.run("GraftLoraSettings", rank=2, adapter=kind)[0]
    settings = graph.run("GraftTrainSettings", steps=1, learning_rate=0.01)[0]
    out = graph.run("GraftTrain", model=model, dataset=dataset, lora_settings=lora, train_settings=settings)
    assert save(graph, out.args, family_name)


def test_settings_that_do_not_go_together_are_refused_before_anything_is_queued(graph):
    node = graph.classes["GraftLoraSettings"]
    assert "rslora" in node.validate_inputs("lokr", True, -1)
    assert "factor" in node.validate_inputs("lora", False, 4)
    assert "lokr_factor is 0" in node.validate_inputs("lokr", False, 0)
    assert node.validate_inputs("lora", True, -1) is True
    assert node.validate_inputs(None, True, -1) is True


def test_alpha_of_zero_is_the_rank(graph):
    assert graph.run("GraftLoraSettings", rank=8)[0].alpha == 8
    assert graph.run("GraftLoraSettings", rank=8, alpha=4.0)[0].alpha == 4


def test_tiny_sizes_are_not_the_published(model):
    """Else the base that the tests above give would prove nothing."""
    name = model.hosted.file.family.name
    assert sizes(model).shapes != Sizes.published(name).shapes
    assert tiny.CONFIGS[name]
