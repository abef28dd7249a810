"""Whole graphs in a real ComfyUI server: pictures → dataset → training → sampling → file → ComfyUI's own loader."""

from __future__ import annotations

import json
import time

import pytest
import torch
from graft_lora.examples.demo import draw_folder
from graft_lora.lora_convert import read_state, write_state
from graft_lora.lora_convert.convert import convert_file
from server import Graph, GraphError

EMPTY = {"krea2": "EmptySD3LatentImage", "ideogram4": "EmptyFlux2LatentImage"}


@pytest.fixture(scope="module")
def zorbs(server):
    """A folder of pictures in ComfyUI's input."""
    folder = server.folder / "input" / "zorbs"
    if not folder.exists():
        draw_folder(folder, seed=0, zorbs=4, known=2)
    return "zorbs"


class Parts:
    """A graph that trains, and the nodes in it that tests go on from."""

    def __init__(self, family, folder, name, precision="fp32", lora=None, train=None, run=None, images=None):
        self.family, self.graph = family, Graph()
        add = self.graph.add
        file = f"{family}.safetensors"
        self.model = add(
            "GraftLoadModel", model_name=file, precision=precision, compute_dtype="fp32", blocks_on_cpu=-1,
            allow_distilled=False, keep_quantized=False,
        )  # fmt: skip
        self.vae, self.clip = add("TestVae", family=family), add("TestClip", file=file, wrong=False)
        chosen = {
            "folder": folder, "trigger": "", "default_caption": "", "resolution": 64, "flip": False,
            "caption_dropout": 0.0, "held_out": 0, **(images or {}),
        }  # fmt: skip
        self.pictures = add("GraftImageFolder", **chosen)
        self.dataset = add(
            "GraftEncodeDataset", pictures=self.pictures[0], vae=self.vae[0], clip=self.clip[0], model=self.model[0]
        )
        adapter = {
            "rank": 4, "alpha": 4.0, "targets": "attention+mlp", "blocks": "all", "target_pattern": "",
            "adapter": "lora", "rslora": False, "lokr_factor": -1, "dropout": 0.0, **(lora or {}),
        }  # fmt: skip
        training = {
            "steps": 6, "learning_rate": 0.01, "batch_size": 2, "save_every": 0, "seed": 0, "accumulation": 1,
            "optimizer": "adamw", "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0,
            "timesteps": "family", "checkpointing": "auto", "ema": 0.0, "keep": 3, "held_out_every": 0,
            "save_dtype": "fp32", "compile": "off", **(train or {}),
        }  # fmt: skip
        self.lora, self.settings = add("GraftLoraSettings", **adapter), add("GraftTrainSettings", **training)
        wanted = {
            "model": self.model[0], "dataset": self.dataset[0], "name": name, "resume": "new run",
            "lora_settings": self.lora[0], "train_settings": self.settings[0], **(run or {}),
        }  # fmt: skip
        self.train = add("GraftTrain", **wanted)

    def sample(self, model, prefix, cfg=1.0, text="a large zorb on a navy background"):
        return sample(self.graph, self.family, self.clip, model, prefix, cfg, text)


def sample(graph, family, clip, model, prefix, cfg=1.0, text="a large zorb on a navy background"):
    """KSampler on a MODEL; returns the node that writes its latents."""
    positive = graph.add("CLIPTextEncode", clip=clip[0], text=text)
    negative = graph.add("CLIPTextEncode", clip=clip[0], text="")
    empty = graph.add(EMPTY[family], width=64, height=64, batch_size=1)
    sampled = graph.add(
        "KSampler", model=model, seed=7, steps=4, cfg=cfg, sampler_name="euler", scheduler="simple",
        positive=positive[0], negative=negative[0], latent_image=empty[0], denoise=1.0,
    )  # fmt: skip
    return graph.add("SaveLatent", samples=sampled[0], filename_prefix=prefix)


def latents(server, outputs, node):
    (file,) = outputs[node]["latents"]
    return read_state(server.folder / "output" / file["subfolder"] / file["filename"])[0]["latent_tensor"]


def difference(one, other):
    return float((one - other).norm() / other.norm())


def stock_latents(server, family, loras=(), cfg=1.0):
    """From ComfyUI's own model and its own loader of LoRAs."""
    graph, file = Graph(), f"{family}.safetensors"
    clip = graph.add("TestClip", file=file, wrong=False)
    if family == "krea2":
        model = graph.add("UNETLoader", unet_name=file, weight_dtype="default")
    else:
        model = graph.add("TestStockModel", file=file)
    for name in loras:
        model = graph.add("LoraLoaderModelOnly", model=model[0], lora_name=name, strength_model=1.0)
    node = sample(graph, family, clip, model[0], f"stock-{family}-{len(loras)}", cfg)
    return latents(server, server.run(graph), node)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_untrained_model_samples_as_comfyuis_own(server, family_name, cfg):
    graph, file = Graph(), f"{family_name}.safetensors"
    model = graph.add(
        "GraftLoadModel", model_name=file, precision="fp32", compute_dtype="fp32", blocks_on_cpu=-1,
        allow_distilled=False, keep_quantized=False,
    )  # fmt: skip
    clip = graph.add("TestClip", file=file, wrong=False)
    node = sample(graph, family_name, clip, model[0], "untrained", cfg)
    found = latents(server, server.run(graph), node)
    assert difference(found, stock_latents(server, family_name, cfg=cfg)) < 1e-3


def test_train_sample_save_and_load_with_the_stock_loader(server, zorbs, family_name):
    """The MODEL output shows the LoRA that the file holds, and the base without it is another picture."""
    parts = Parts(family_name, zorbs, f"first-{family_name}")
    trained = parts.sample(parts.train[0], "trained")
    base = parts.sample(parts.model[0], "base")
    parts.graph.add(
        "GraftSaveLora", lora=parts.train[1], name=f"tests/first-{family_name}", layout="comfyui", dtype="as it is",
        overwrite=False, base=f"{family_name}.safetensors",
    )  # fmt: skip
    outputs = server.run(parts.graph)
    with_lora, without = latents(server, outputs, trained), latents(server, outputs, base)
    assert difference(with_lora, without) > 0.01
    name = f"tests/first-{family_name}.safetensors"
    listed = server.get("/object_info/LoraLoaderModelOnly")["LoraLoaderModelOnly"]["input"]["required"]["lora_name"]
    assert name in json.dumps(listed)
    before = len(server.text())
    assert difference(with_lora, stock_latents(server, family_name, [name])) < 1e-3
    assert "lora key not loaded" not in server.text()[before:]


@pytest.mark.parametrize("precision", ["fp8", "int8", "nf4"])
def test_quantised_bases_train_and_sample(server, zorbs, family_name, precision):
    parts = Parts(family_name, zorbs, f"{precision}-{family_name}", precision)
    nodes = [parts.sample(parts.train[0], "quantised"), parts.sample(parts.model[0], "plain")]
    zero = parts.graph.add("GraftAdapterStrength", model=parts.train[0], strength=0.0)
    nodes.append(parts.sample(zero[0], "zero"))
    outputs = server.run(parts.graph)
    trained, base, off = (latents(server, outputs, node) for node in nodes)
    assert difference(trained, base) > 0.01
    assert torch.equal(off, base)


def test_a_second_queue_with_another_learning_rate_leaves_the_first_models_picture(server, zorbs, family_name):
    name = f"twice-{family_name}"
    parts = Parts(family_name, zorbs, name)
    node = parts.sample(parts.train[0], "first")
    first = latents(server, server.run(parts.graph), node)
    again = Parts(family_name, zorbs, name, train={"learning_rate": 0.002})
    other = again.sample(again.train[0], "second")
    second = latents(server, server.run(again.graph), other)
    assert difference(second, first) > 1e-3
    assert (server.folder / "output" / "graft" / f"{name}_2").is_dir()
    node = parts.sample(parts.train[0], "first-again")
    assert torch.equal(latents(server, server.run(parts.graph), node), first)


def test_stop_in_the_middle_and_continue_is_the_uninterrupted_run(server, zorbs, family_name):
    whole = Parts(family_name, zorbs, f"whole-{family_name}", train={"steps": 60})
    server.run(whole.graph)
    name = f"stopped-{family_name}"
    log = server.folder / "output" / "graft" / name / "log.jsonl"
    parts = Parts(family_name, zorbs, name, train={"steps": 60})
    prompt, asked = server.queue(parts.graph), []

    def stop():
        if not asked and log.is_file() and len(log.read_text().splitlines()) >= 5:
            asked.append(server.post("/interrupt"))

    outputs = server.finish(prompt, stop)
    assert "interrupted" in outputs
    steps = len(log.read_text().splitlines())
    assert 5 <= steps < 60
    folder = log.parent
    assert (folder / f"{name}.safetensors").is_file()
    assert f"{name}.safetensors" in server.text()  # where it is, is said
    more = Parts(family_name, zorbs, name, train={"steps": 60}, run={"resume": "continue"})
    server.run(more.graph)
    assert len(log.read_text().splitlines()) == 60
    wanted = read_state(
        server.folder / "output" / "graft" / f"whole-{family_name}" / f"whole-{family_name}.safetensors"
    )
    found = read_state(folder / f"{name}.safetensors")
    assert all(torch.equal(found[0][key], value) for key, value in wanted[0].items())


def test_finish_now_ends_early_with_all_outputs(server, zorbs):
    name = "early"
    log = server.folder / "output" / "graft" / name / "log.jsonl"
    parts = Parts("krea2", zorbs, name, train={"steps": 500})
    node = parts.sample(parts.train[0], "early")
    prompt, asked = server.queue(parts.graph), []

    def finish():
        if not asked and log.is_file() and len(log.read_text().splitlines()) >= 3:
            asked.append(server.post("/graft/finish", {"node_id": str(parts.train)}))

    outputs = server.finish(prompt, finish)
    assert "interrupted" not in outputs
    assert len(log.read_text().splitlines()) < 500
    latents(server, outputs, node)


def test_each_picture_trains_with_its_own_caption(server, zorbs):
    """The stock node runs every picture of a batch with every caption."""
    log = []
    for batch in (1, 6):
        parts = Parts("krea2", zorbs, f"batch-{batch}", train={"steps": 2, "batch_size": batch, "learning_rate": 1e-3})
        server.run(parts.graph)
        config = json.loads((server.folder / "output" / "graft" / f"batch-{batch}" / "config.json").read_text())
        log.append(config["dataset"]["cache"])
    assert log[0] == log[1]
    captions = set()
    for path in (server.folder / log[0]).glob("*.png.safetensors"):
        captions.add(read_state(path)[1]["caption"])
    assert len(captions) > 1


def test_any_layout_loads_without_conversion(server, zorbs, family_name):
    """Fused Krea 2 and split Ideogram 4, on a stock model and on Graft's own, against the converted file."""
    source = server.folder / "models" / "loras" / f"layouts-{family_name}.safetensors"
    parts = Parts(family_name, zorbs, f"layouts-{family_name}", lora={"targets": "attention"})
    parts.graph.add(
        "GraftSaveLora", lora=parts.train[1], name=f"layouts-{family_name}", layout="comfyui", dtype="as it is",
        overwrite=False, base=f"{family_name}.safetensors",
    )  # fmt: skip
    server.run(parts.graph)
    from graft_lora.examples.demo_parts import base_path
    from graft_lora.lora_convert.sizes import Sizes
    from graft_lora.trainer.checkpoints import read_shapes
    from graft_lora.trainer.families import FAMILIES

    sizes = Sizes.of(family_name, read_shapes(base_path(FAMILIES[family_name])))
    layout = {"krea2": "simpletuner", "ideogram4": "diffusers"}[family_name]
    other = source.with_name(f"other-{family_name}.safetensors")
    convert_file(source, other, layout, sizes=sizes)
    stock = stock_latents(server, family_name, [source.name])
    for kind in ("graft", "stock"):
        graph, file = Graph(), f"{family_name}.safetensors"
        clip = graph.add("TestClip", file=file, wrong=False)
        if kind == "graft":
            model = graph.add(
                "GraftLoadModel", model_name=file, precision="fp32", compute_dtype="fp32", blocks_on_cpu=-1,
                allow_distilled=False, keep_quantized=False,
            )  # fmt: skip
        else:
            model = graph.add("TestStockModel", file=file)
        loaded = graph.add("GraftLoadLora", model=model[0], lora_name=other.name, strength=1.0)
        node = sample(graph, family_name, clip, loaded[0], f"any-{kind}")
        assert difference(latents(server, server.run(graph), node), stock) < 1e-3


def test_what_is_wrong_is_said_before_anything_is_loaded(server, zorbs):
    wrong = Parts("krea2", zorbs, "wrong-clip")
    wrong.graph[str(wrong.clip)]["inputs"]["wrong"] = True
    with pytest.raises(GraphError, match="features per token"):
        server.run(wrong.graph)
    lonely = server.folder / "input" / "lonely"
    draw_folder(lonely, seed=1, zorbs=2, known=0)
    (lonely / "zorb-01.txt").unlink()
    with pytest.raises(GraphError, match=r"no caption for zorb-01\.png"):
        server.run(Parts("krea2", "lonely", "lonely").graph)
    other = Parts("krea2", zorbs, "other-model")
    stock = other.graph.add("UNETLoader", unet_name="krea2.safetensors", weight_dtype="default")
    other.graph[str(other.train)]["inputs"]["model"] = stock[0]
    with pytest.raises(GraphError, match="Load Model for LoRA Training"):
        server.run(other.graph)


@pytest.mark.parametrize("kind", ["LoraLoaderModelOnly", "ModelSave", "ModelMergeSimple"])
def test_stock_nodes_that_change_weights_get_one_clear_word(server, zorbs, kind):
    graph, file = Graph(), "krea2.safetensors"
    model = graph.add(
        "GraftLoadModel", model_name=file, precision="int8", compute_dtype="fp32", blocks_on_cpu=-1,
        allow_distilled=False, keep_quantized=False,
    )  # fmt: skip
    (server.folder / "models" / "loras").mkdir(exist_ok=True)
    if kind == "LoraLoaderModelOnly":
        test_train_sample_save_and_load = server.folder / "models" / "loras" / "any.safetensors"
        if not test_train_sample_save_and_load.exists():
            parts = Parts("krea2", zorbs, "any")
            parts.graph.add(
                "GraftSaveLora", lora=parts.train[1], name="any", layout="comfyui", dtype="as it is", overwrite=False,
                base=file,
            )  # fmt: skip
            server.run(parts.graph)
        model = graph.add(kind, model=model[0], lora_name="any.safetensors", strength_model=1.0)
        clip = graph.add("TestClip", file=file, wrong=False)
        sample(graph, "krea2", clip, model[0], "clear")
    elif kind == "ModelSave":
        graph.add(kind, model=model[0], filename_prefix="saved")
    else:
        merged = graph.add(kind, model1=model[0], model2=model[0], ratio=0.5)
        clip = graph.add("TestClip", file=file, wrong=False)
        sample(graph, "krea2", clip, merged[0], "merged")
    with pytest.raises(GraphError, match="Graft"):
        server.run(graph)


def test_a_run_of_the_graph_goes_on_from_the_command_line_and_back(server, zorbs, tmp_path):
    import subprocess
    import sys

    from server import PACK

    name = "parity"
    parts = Parts("krea2", zorbs, name, train={"steps": 4})
    server.run(parts.graph)
    folder = server.folder / "output" / "graft" / name
    config = json.loads((folder / "config.json").read_text())
    config["train"]["steps"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, str(PACK), "train", "--output", str(folder), "--resume"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "continuing after step 4" in done.stdout
    assert len((folder / "log.jsonl").read_text().splitlines()) == 8
    back = Parts("krea2", zorbs, name, train={"steps": 10}, run={"resume": "continue"})
    server.run(back.graph)
    assert len((folder / "log.jsonl").read_text().splitlines()) == 10


def test_memory_comes_back_when_models_are_freed(server, zorbs):
    """Resident memory after each of five runs whose models are freed: within 5 % of that after the first."""
    sizes = []
    for number in range(5):
        parts = Parts("krea2", zorbs, f"freed-{number}", train={"seed": number})
        server.run(parts.graph)
        server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(2)
        with open(f"/proc/{server.process.pid}/status") as status:
            sizes.append(next(int(line.split()[1]) for line in status if line.startswith("VmRSS")))
    assert max(sizes[1:]) < 1.05 * sizes[0], sizes


def test_the_stock_dataset_nodes_give_a_dataset(server, zorbs, family_name):
    """Their latents are raw: the normalisation that the stock node leaves out in some modes is applied."""
    name = f"latents-{family_name}"
    parts = Parts(family_name, zorbs, name)
    add = parts.graph.add
    loaded = add("LoadImageTextDataSetFromFolder", folder=zorbs)
    made = add("MakeTrainingDataset", images=loaded[0], texts=loaded[1], vae=parts.vae[0], clip=parts.clip[0])
    dataset = add(
        "GraftDatasetFromLatents", latents=made[0], conditioning=made[1], captions=loaded[1], model=parts.model[0],
        caption_dropout=0.0, held_out=0,
    )  # fmt: skip
    parts.graph[str(parts.train)]["inputs"]["dataset"] = dataset[0]
    server.run(parts.graph)
    folders = []
    for run in (name, f"first-{family_name}"):
        config = server.folder / "output" / "graft" / run / "config.json"
        if not config.is_file():
            server.run(Parts(family_name, zorbs, run).graph)
        folders.append(json.loads(config.read_text())["dataset"]["cache"])
    found, wanted = (_samples(server.folder / folder) for folder in folders)
    assert len(found) == len(wanted) == 6
    for caption, tensors in wanted:
        alike = [
            other
            for text, other in found
            if text == caption and difference(other["latents"], tensors["latents"]) < 1e-5
        ]
        assert len(alike) == 1, caption
        assert torch.equal(alike[0]["conditioning"], tensors["conditioning"])


def _samples(folder):
    """Captions and tensors of a folder's encoded pictures."""
    read = [read_state(path) for path in folder.glob("*.safetensors")]
    return [(metadata["caption"], tensors) for tensors, metadata in read if "latents" in tensors]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_file_of_comfyuis_own_fp8_quantiser_trains_and_samples_as_what_it_means(server, zorbs, precision):
    """Against ComfyUI's own loader on the same file, whose scales it applies too."""
    kitchen = pytest.importorskip("comfy_kitchen.tensor")
    folder = server.folder / "models" / "diffusion_models"
    state, _ = read_state(folder / "krea2.safetensors")
    mark = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    for key in [key for key in state if key.startswith("blocks.") and state[key].ndim == 2]:
        weight = state.pop(key).float() * 3  # scales far from 1
        quantised = kitchen.QuantizedTensor.from_float(weight, "TensorCoreFP8Layout")
        state |= {f"{key}{suffix[6:]}": value for suffix, value in quantised.state_dict("weight").items()}
        state[f"{key.removesuffix('weight')}comfy_quant"] = mark.clone()
    write_state(folder / "scaled.safetensors", state, {}, overwrite=True)
    graph = Graph()
    clip = graph.add("TestClip", file="krea2.safetensors", wrong=False)
    stock = graph.add("UNETLoader", unet_name="scaled.safetensors", weight_dtype="default")
    node = sample(graph, "krea2", clip, stock[0], "scaled-stock")
    wanted = latents(server, server.run(graph), node)
    parts = Parts("krea2", zorbs, f"scaled-{precision}", precision)
    parts.graph[str(parts.model)]["inputs"]["model_name"] = "scaled.safetensors"
    base, trained = (parts.sample(model[0], "scaled") for model in (parts.model, parts.train))
    outputs = server.run(parts.graph)
    found = latents(server, outputs, base)
    # What the file means, quantised once more by rows: fp8 has 3 bits behind the point, int8 7 in all.
    assert difference(found, wanted) < 0.2
    assert difference(latents(server, outputs, trained), found) > 0.01
