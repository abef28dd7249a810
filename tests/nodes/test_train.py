"""Train LoRA and Check Run: a run in a graph, from the checks to its outputs."""

from __future__ import annotations

import json

import fake_host
import pytest
import tiny
import torch
from graft_lora.lora_convert import read_state
from graft_lora.trainer import adapters


def settings(graph, steps=3, **more):
    return graph.run("GraftTrainSettings", steps=steps, learning_rate=0.01, **more)[0]


def train(graph, model, dataset, steps=3, **more):
    lora = more.pop("lora_settings", None) or graph.run("GraftLoraSettings", rank=2)[0]
    given = {"train_settings": settings(graph, steps), **more}
    return graph.run("GraftTrain", model=model, dataset=dataset, lora_settings=lora, **given)


def fresh(graph, name):
    return graph.run("GraftLoadModel", model_name=f"{name}.safetensors", compute_dtype="fp32")[0]


def prompt(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, 4, tiny.WIDTHS[name], generator=generator), {}]]


def preview(graph, name, **more):
    given = {"prompts": {"prompt0": prompt(name), "prompt1": prompt(name, 1)}, "vae": None, "sampling_steps": 2}
    return graph.run("GraftPreviewSettings", **given | more)[0]


class StopAfter:
    """Presses a button after so many steps."""

    def __init__(self, graph, steps, press):
        self.graph, self.steps, self.press = graph, steps, press
        self.progress = graph.host.progress
        graph.host.progress = self

    def __call__(self, node, total):
        bar = self.progress(node, total)
        step = bar.update

        def stepped(done, *more):
            step(done, *more)
            if total > 1 and done == self.steps:
                self.press()

        bar.update = stepped
        return bar


def stop_after_two_of_four(graph, model, dataset):
    """A run called zorb that ComfyUI's Stop ends."""

    def press():
        graph.host.interrupt = True

    StopAfter(graph, 2, press)
    with pytest.raises(fake_host.Interrupted):
        train(graph, model, dataset, steps=4, name="zorb")
    graph.host.interrupt = False


def test_a_run_gives_the_trained_model_the_lora_the_plot_and_the_run(graph, model, dataset):
    trained, lora, loss, run = train(graph, model, dataset, name="zorb").args
    assert run.folder == graph.host.output_directory() / "graft" / "zorb"
    assert run.lora == run.folder / "zorb.safetensors"
    assert trained.hosted is model.hosted
    assert [token.name for token, _ in trained.shown] == ["zorb"]
    assert adapters.adapter_names(model.hosted.base.model) == ["zorb"]
    saved, _ = read_state(run.lora)
    assert lora.keys() == saved.keys()
    assert all(torch.equal(lora[key], saved[key]) for key in saved)
    ends = {key.rsplit(".", 2)[-2] if key.endswith("weight") else key.rsplit(".", 1)[-1] for key in lora}
    assert ends == {"lora_up", "lora_down", "alpha"}
    assert all(key.startswith("diffusion_model.") for key in lora)
    assert not any(tensor.is_inference() for tensor in lora.values())
    assert loss.ndim == 4
    assert len((run.folder / "log.jsonl").read_text().splitlines()) == 3
    assert graph.host.calls[-3:] == ["training", "free_others", "trained"]


def test_progress_shows_step_loss_speed_and_time_left_and_a_picture(graph, model, dataset):
    train(graph, model, dataset)
    bar = next(bar for bar in graph.host.bars if bar.total == 3)
    assert [done for done, _, _ in bar.steps] == [1, 2, 3, 3]
    assert bar.steps[2][2].size == (640, 360)  # the live curve
    assert bar.steps[3][2].size == (960, 504)  # the run's own plot, which stays
    lines = [text for text in graph.host.texts if text.startswith("step 2 of 3 · loss ")]
    assert len(lines) == 1
    assert "s/step" in lines[0]
    assert lines[0].endswith(" left")
    assert graph.host.texts[-1].startswith("Finished after step 3: ")


def test_time_left_is_told_in_the_unit_that_fits(graph):
    from graft_lora.nodes.train import progress_text

    assert progress_text(10, 1510, 0.5, 2.0).endswith("50 min left")
    assert progress_text(10, 6010, 0.5, 2.0).endswith("3 h 20 min left")
    assert progress_text(1, 11, 0.5, 2.0) == "step 1 of 11 · loss 0.5000 · 2.00 s/step · 20 s left"


def test_a_second_run_gets_a_folder_and_an_adapter_of_its_own(graph, model, dataset):
    first, _, _, one = train(graph, model, dataset, name="zorb").args
    second, _, _, two = train(graph, model, dataset, name="zorb", steps=2).args
    assert (one.folder.name, two.folder.name) == ("zorb", "zorb_2")
    assert [token.name for token, _ in first.shown] == ["zorb"]
    assert [token.name for token, _ in second.shown] == ["zorb_2"]
    assert len(read_state(one.lora)[0]) == len(read_state(two.lora)[0])


def test_stop_saves_says_where_and_passes_the_interruption_on(graph, model, dataset):
    stop_after_two_of_four(graph, model, dataset)
    folder = graph.host.output_directory() / "graft" / "zorb"
    assert (folder / "zorb.safetensors").is_file()
    assert (folder / "state").is_dir()
    assert "Stopped after step 2" in graph.host.texts[-1]
    assert str(folder / "zorb.safetensors") in graph.host.texts[-1]
    assert "To go on, queue again" in graph.host.texts[-1]


def test_a_stopped_run_that_is_continued_equals_one_that_was_not(graph, family_name, dataset):
    whole = train(graph, fresh(graph, family_name), dataset, steps=4, name="whole")[1]

    stop_after_two_of_four(graph, fresh(graph, family_name), dataset)
    continued = train(graph, fresh(graph, family_name), dataset, steps=4, name="zorb", resume="continue")
    assert continued[3].folder.name == "zorb"
    assert all(torch.equal(whole[key], continued[1][key]) for key in whole)


def test_an_unchanged_graph_takes_the_result_of_its_run_when_comfyui_has_forgotten_it(graph, family_name, dataset):
    """0.33's cache forgets outputs as soon as another workflow runs, and a restart forgets all: hours would be lost."""
    first = train(graph, fresh(graph, family_name), dataset, steps=3, name="zorb")
    again = train(graph, fresh(graph, family_name), dataset, steps=3, name="zorb")
    assert again[3].folder == first[3].folder
    assert len((again[3].folder / "log.jsonl").read_text().splitlines()) == 3
    assert all(torch.equal(first[1][key], again[1][key]) for key in first[1])
    assert any("going on with the run in" in text for text in graph.host.texts)
    assert graph.run("GraftCheckRun", model=fresh(graph, family_name), dataset=dataset, name="zorb")[1]


def test_queued_again_a_stopped_run_goes_on_and_a_changed_one_begins_anew(graph, family_name, dataset):
    whole = train(graph, fresh(graph, family_name), dataset, steps=4, name="whole")[1]

    stop_after_two_of_four(graph, fresh(graph, family_name), dataset)
    continued = train(graph, fresh(graph, family_name), dataset, steps=4, name="zorb")
    assert continued[3].folder.name == "zorb"
    assert all(torch.equal(whole[key], continued[1][key]) for key in whole)
    other = graph.run("GraftLoraSettings", rank=3)[0]
    changed = train(graph, fresh(graph, family_name), dataset, steps=1, name="zorb", lora_settings=other)
    assert changed[3].folder.name == "zorb_2"
    assert any("since it is not the one in zorb: " in text and "lora.rank" in text for text in graph.host.texts)


def test_continue_goes_on_with_the_last_run_of_a_name(graph, model, dataset):
    train(graph, model, dataset, name="zorb")
    train(graph, model, dataset, name="zorb", steps=2)
    longer = train(graph, model, dataset, name="zorb", steps=3, resume="continue")
    assert longer[3].folder.name == "zorb_2"
    assert len((longer[3].folder / "log.jsonl").read_text().splitlines()) == 3


def test_continue_without_a_run_is_refused(graph, model, dataset):
    with pytest.raises(RuntimeError, match="no run called zorb is there to be continued"):
        train(graph, model, dataset, name="zorb", resume="continue")


def test_continue_with_another_learning_rate_is_refused_by_name(graph, model, dataset):
    train(graph, model, dataset, name="zorb")
    other = graph.run("GraftTrainSettings", steps=3, learning_rate=0.02)[0]
    with pytest.raises(RuntimeError, match="learning_rate"):
        train(graph, model, dataset, name="zorb", resume="continue", train_settings=other)


def test_finish_now_ends_early_with_its_outputs(graph, model, dataset):
    StopAfter(graph, 2, graph.host.finish.set)
    _, lora, _, run = train(graph, model, dataset, steps=9, name="zorb").args
    assert lora
    assert len((run.folder / "log.jsonl").read_text().splitlines()) == 2
    assert "Finished early, as asked, after step 2" in graph.host.texts[-1]


def test_nothing_is_evicted_or_loaded_before_every_check_has_passed(graph, model, dataset):
    graph.host.calls.clear()
    wrong = graph.run("GraftLoraSettings", target_pattern="nothing")[0]
    with pytest.raises(RuntimeError, match="'nothing'"):
        train(graph, model, dataset, lora_settings=wrong)
    assert graph.host.calls == []
    assert model.hosted.base is None


def test_an_error_reaches_the_user_as_its_message_alone(graph, model, dataset):
    wrong = graph.run("GraftLoraSettings", target_pattern="nothing")[0]
    with pytest.raises(RuntimeError) as caught:
        train(graph, model, dataset, lora_settings=wrong)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "\n" not in str(caught.value)


def test_previews_are_sampled_shown_and_kept(graph, model, dataset, family_name):
    out = train(graph, model, dataset, name="zorb", preview=preview(graph, family_name, every=2))
    folder = out[3].folder
    assert sorted(path.name for path in (folder / "previews").glob("0*.png")) == [
        "000000.png",
        "000002.png",
        "000003.png",
    ]
    assert (folder / "preview.png").is_file()
    bar = next(bar for bar in graph.host.bars if bar.total == 3)
    shown = [picture.size for _, _, picture in bar.steps if picture is not None]
    assert (640, 360) not in shown
    assert json.loads((folder / "config.json").read_text())["preview"]["prompts"] == ["prompt 1", "prompt 2"]


def test_a_preview_may_have_a_size_of_its_own(graph, model, dataset, family_name):
    side = 64
    train(graph, model, dataset, preview=preview(graph, family_name, width=side, height=2 * side))
    with pytest.raises(RuntimeError, match="takes multiples of 16"):
        train(graph, model, dataset, preview=preview(graph, family_name, width=side + 8, height=side))
    node = graph.classes["GraftPreviewSettings"]
    assert node.validate_inputs(64, 0) is not True
    assert node.validate_inputs(width=64, height=64, prompts=None) is True


def test_a_preview_prompt_of_another_text_encoder_is_refused_first(graph, model, dataset, family_name):
    graph.host.calls.clear()
    wrong = {"prompt0": [[torch.zeros(1, 3, 8), {}]]}
    with pytest.raises(RuntimeError, match="preview prompt 1 has 8 features"):
        train(graph, model, dataset, preview=preview(graph, family_name, prompts=wrong))
    assert graph.host.calls == []


@pytest.mark.parametrize("family_name", ["ideogram4"], indirect=False)
def test_the_second_transformer_guides_previews(graph, model, dataset, family_name, tmp_path):
    tiny.write(tiny.build(family_name, seed=5), tmp_path / "models" / "second.safetensors")
    second = graph.run("GraftLoadModel", model_name="second.safetensors", compute_dtype="fp32")[0]
    pictures = []
    for name, more in (("alone", {}), ("guided", {"unconditional": second})):
        shown = preview(graph, family_name, guidance=3.0, **more)
        folder = train(graph, model, dataset, preview=shown, name=name)[3].folder
        pictures.append((folder / "previews" / "000000.png").read_bytes())
    assert pictures[0] != pictures[1]
    with pytest.raises(RuntimeError, match="unconditional is the model that is trained"):
        train(graph, model, dataset, preview=preview(graph, family_name, unconditional=model))
    with pytest.raises(RuntimeError, match="sees no text"):
        both = preview(graph, family_name, unconditional=second, negative=prompt(family_name))
        train(graph, model, dataset, preview=both)


def test_a_dataset_of_the_other_family_is_refused(graph, dataset, family_name):
    other = fresh(graph, next(name for name in tiny.NAMES if name != family_name))
    with pytest.raises(RuntimeError, match="the dataset was encoded for"):
        train(graph, other, dataset)


def test_a_lora_is_trained_on_the_base_alone(graph, model, dataset):
    trained = train(graph, model, dataset, name="zorb")[0]
    with pytest.raises(RuntimeError, match="has the LoRA zorb on it"):
        train(graph, trained, dataset)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "encoded", "x.", " x", "CON/…"])
def test_a_name_that_is_no_folders_is_refused_before_anything_is_queued(graph, name):
    for node in ("GraftTrain", "GraftCheckRun"):
        assert "cannot be a run's" in graph.classes[node].validate_inputs(name)
        assert graph.classes[node].validate_inputs("my lora-2.1") is True
        assert graph.classes[node].validate_inputs(None) is True


def test_check_run_lists_every_verdict_and_loads_nothing(graph, model, dataset):
    graph.host.calls.clear()
    passed, report = graph.run("GraftCheckRun", model=model, dataset=dataset).args
    assert passed is model
    assert report.startswith("All ")
    assert "✓ model file: " in report
    assert "✗" not in report
    assert report.endswith("– --lowvram does not bind Graft")
    assert graph.host.calls == []
    assert model.hosted.base is None
    assert not (graph.host.output_directory() / "graft" / "my_lora").exists()


def test_check_run_says_all_that_is_wrong_at_once(graph, model, dataset, family_name):
    wrong = graph.run("GraftLoraSettings", target_pattern="nothing")[0]
    texts = {"prompt0": [[torch.zeros(1, 3, 8), {}]]}
    report = graph.run(
        "GraftCheckRun",
        model=model,
        dataset=dataset,
        lora_settings=wrong,
        preview=preview(graph, family_name, prompts=texts),
    )[1]
    assert report.startswith("2 of ")
    assert "✗ targets: " in report
    assert "– disk space: not checked" in report
    assert "✗ previews: preview prompt 1 has 8 features" in report


def test_an_unchanged_graph_does_not_train_again(graph, pictures, family_name):
    """Everything before Train LoRA has the same fingerprint twice, Check Run too, whose model it may take: a new one
    would start hours of training again where the sampler's seed alone has changed.
    """
    given = {"folder": "zorb", "model_name": f"{family_name}.safetensors", "lora_name": None}
    for name, node in graph.classes.items():
        fingerprint = getattr(node, "fingerprint_inputs", None)
        assert fingerprint is None or fingerprint(**given) == fingerprint(**given), name


def test_check_run_and_train_ask_for_the_same(graph):
    train_inputs, check_inputs = (
        graph.classes[name].define_schema().inputs for name in ("GraftTrain", "GraftCheckRun")
    )
    assert [entry.id for entry in train_inputs] == [entry.id for entry in check_inputs]


def test_a_distilled_base_needs_the_switch(graph, tmp_path):
    tiny.write(tiny.build("krea2"), tmp_path / "models" / "krea2-turbo.safetensors")
    with pytest.raises(RuntimeError, match="distilled"):
        graph.run("GraftLoadModel", model_name="krea2-turbo.safetensors")
    with pytest.raises(RuntimeError, match="or set allow_distilled"):  # the widget, not the command line's [model]
        graph.run("GraftLoadModel", model_name="krea2-turbo.safetensors")
    assert graph.run("GraftLoadModel", model_name="krea2-turbo.safetensors", allow_distilled=True)[0].hosted


@pytest.mark.parametrize(("chosen", "wanted"), [(None, False), ("off", False), ("on", True), ("auto", "auto")])
def test_products_in_8_bits_are_asked_for_by_a_switch(graph, chosen, wanted):
    """A workflow from before there was one goes on without."""
    asked = {} if chosen is None else {"eight_bit_compute": chosen}
    model = graph.run("GraftLoadModel", model_name="krea2.safetensors", **asked)[0]
    assert model.hosted.settings.eight_bit_compute == wanted


def test_the_second_transformer_can_be_queued_and_not_trained(graph, tmp_path):
    """Its published name says what it is: previews and DualModelGuider need it loaded."""
    from graft_lora.trainer.errors import WrongModelError
    from graft_lora.trainer.preflight import open_model_file

    path = tiny.write(tiny.build("ideogram4"), tmp_path / "models" / "ideogram4_unconditional.safetensors")
    assert graph.classes["GraftLoadModel"].validate_inputs(path.name) is True
    with pytest.raises(WrongModelError, match="no trainer trains"):
        open_model_file(path)


def test_a_file_that_is_no_base_is_refused_before_anything_is_queued(graph, tmp_path):
    (tmp_path / "models" / "bad.safetensors").write_bytes(b"bad")
    node = graph.classes["GraftLoadModel"]
    assert "bad.safetensors" in node.validate_inputs("bad.safetensors")
    assert node.validate_inputs("krea2.safetensors") is True
    assert node.validate_inputs(None) is True
