"""Every producer's layout is read, by itself, as what its formula says."""

from __future__ import annotations

import json
import math

import pytest
import tiny
import torch
from graft_lora.lora_convert.canonical import Change, DiffModule, LohaModule, LokrModule, LoraModule, Split
from graft_lora.lora_convert.naming import DIFFUSERS, spell
from graft_lora.lora_convert.reading import open_lora, read_lora
from lora_files import File, delta, loha, lokr, lora, sizes, write

A_B = (".lora_A.weight", ".lora_B.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")


def peft_header(**config):
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


# What: parts, prefix, naming (of Krea 2, of Ideogram 4), flat, header, producer, layout, fused (of either family).
PRODUCERS = {
    "diffusers": (
        lora(*A_B, scale=4.0), "transformer.", ("diffusers", "diffusers"), False, peft_header(r=3, lora_alpha=12),
        "diffusers / PEFT", "diffusers", (False, False),
    ),
    "diffusers, rsLoRA": (
        lora(*A_B, scale=12 / math.sqrt(3)), "transformer.", ("diffusers", "diffusers"), False,
        peft_header(r=3, lora_alpha=12, use_rslora=True), "diffusers / PEFT", "diffusers", (False, False),
    ),
    "ai-toolkit": (
        lora(*A_B), "diffusion_model.", ("official", "official"), False, {}, "ai-toolkit", "ai-toolkit", (False, True),
    ),
    "ai-toolkit, LoKr": (
        lokr(rank=2, alpha=3.0), "diffusion_model.", ("official", "official"), False,
        {"software": '{"name": "ai-toolkit"}'}, "ai-toolkit", "comfyui", (False, True),
    ),
    "SimpleTuner, split": (
        lora(*A_B, scale=0.5), "transformer.", ("diffusers", "official"), False, peft_header(r=3, lora_alpha=1.5),
        None, None, (False, True),
    ),
    "SimpleTuner, fused": (
        lora(*A_B, scale=0.5), "transformer.", ("fused", "official"), False, peft_header(r=3, lora_alpha=1.5),
        "SimpleTuner", "simpletuner", (True, True),
    ),
    "SimpleTuner, comfyui": (
        lora(*A_B, alpha=6.0), "diffusion_model.", ("fused", "official"), False, {}, None, None, (True, True),
    ),
    "SimpleTuner, LyCORIS": (
        lokr(alpha=1e10), "lycoris_", ("fused", "official"), True, {"lycoris_config": "{}"},
        "SimpleTuner", None, (True, True),
    ),
    "musubi-tuner": (
        lora(*DOWN_UP, alpha=1.0), "lora_unet_", ("official", "official"), True,
        {"ss_network_alpha": "1.0", "ss_network_dim": "3", "sshs_model_hash": "0"},
        "musubi-tuner", "kohya", (False, True),
    ),
    "musubi-tuner, diffusers names": (
        lora(*DOWN_UP, alpha=1.0), "lora_unet_", ("diffusers", "diffusers"), True, {"ss_steps": "1"},
        "musubi-tuner", None, (False, False),
    ),
    "OneTrainer, DIFFUSERS": (
        lora(*A_B), "transformer.", ("diffusers", "diffusers"), False, {"ot_branch": "master"},
        "OneTrainer", "diffusers", (False, False),
    ),
    "OneTrainer, KOHYA": (
        lora(*DOWN_UP, alpha=2.0), "lora_unet_", ("official", "official"), True, {"ot_branch": "master"},
        "OneTrainer", "kohya", (False, True),
    ),
    "OneTrainer, ORIGINAL": (
        lora(*A_B, alpha=2.0), "", ("official", "official"), False, {}, "OneTrainer", None, (False, True),
    ),
    "OneTrainer, COMFY": (
        lora(*A_B, alpha=2.0), "diffusion_model.", ("official", "official"), False, {"ot_revision": "1"},
        "OneTrainer", "onetrainer", (False, True),
    ),
    "OneTrainer, old": (
        lora(*DOWN_UP, alpha=2.0), "transformer.", ("diffusers", "diffusers"), False, {},
        "OneTrainer", None, (False, False),
    ),
    "OneTrainer, old kohya": (
        lora(*DOWN_UP, alpha=2.0), "lora_transformer_", ("diffusers", "diffusers"), True, {},
        None, None, (False, False),
    ),
    "ComfyUI": (
        lora(*DOWN_UP, alpha=1.0), "diffusion_model.", ("official", "official"), False, {},
        "ComfyUI TrainLoraNode", "comfyui", (False, True),
    ),
    "Graft": (
        lora(*DOWN_UP, alpha=6.0), "diffusion_model.", ("official", "official"), False, {"graft": "{}"},
        "Graft", "comfyui", (False, True),
    ),
    "LoHa": (
        loha(alpha=0.5), "diffusion_model.", ("official", "official"), False, {}, None, "comfyui", (False, True),
    ),
    "whole LoKr, whose alpha no reader takes": (
        lokr(alpha=7.0), "diffusion_model.", ("official", "official"), False, {}, None, "comfyui", (False, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PRODUCERS)
def test_every_producer_is_read(family_name, what):
    parts, prefix, naming, flat, header, producer, layout, fused = PRODUCERS[what]
    index = 0 if family_name == "krea2" else 1
    file = write(family_name, parts, prefix, naming[index], flat, header)
    found = read_lora(file.state, file.metadata, sizes(family_name))
    assert found.family == family_name
    assert found.modules.keys() == file.wanted.keys()
    for module, wanted in file.wanted.items():
        # PEFT's strength is a root with rsLoRA, hence not bit for bit.
        assert tiny.relative(delta(found.modules[module]), wanted) < 1e-6, module
    assert found.fused is fused[index]
    assert producer is None or found.producer == producer
    assert found.layout == layout if layout else found.layout
    assert found.metadata == file.metadata


def test_factors_are_taken_as_they_are(family_name):
    """No copy, no rounding: a rename can be compared bit by bit."""
    file = write(family_name, lora(*DOWN_UP, alpha=6.0, dtype=torch.bfloat16), "diffusion_model.", "official")
    kept = {id(tensor) for tensor in file.state.values()}
    for change in read_lora(file.state, {}, sizes(family_name)).modules.values():
        members = [m for m in change.members if m is not None] if isinstance(change, Split) else [change]
        assert {id(factor) for member in members for factor in member.factors().values()} <= kept


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (".lora_A.weight", ".lora_B.weight"),
        (".lora_A", ".lora_B"),
        (".lora_A.default.weight", ".lora_B.default.weight"),
        (".lora_A.my-adapter.weight", ".lora_B.my-adapter.weight"),
        (".lora_down.weight", ".lora_up.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    ],
)
@pytest.mark.parametrize(
    ("prefix", "naming", "flat"),
    [
        ("transformer.", "diffusers", False),
        ("base_model.model.", "official", False),
        ("base_model.model.transformer.", "diffusers", False),
        ("transformer.base_model.model.", "diffusers", False),
        ("model.diffusion_model.", "official", False),
        ("conditional_transformer.", "official", False),
        ("", "diffusers", False),
        ("", "official", True),
        ("lora_unet_", "diffusers", True),
        ("lycoris_", "official", True),
    ],
)
def test_every_ending_with_every_prefix(family_name, a, b, prefix, naming, flat):
    file = write(family_name, lora(a, b, alpha=6.0), prefix, naming, flat)
    found = read_lora(file.state, {}, sizes(family_name))
    assert found.modules.keys() == file.wanted.keys()
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())


def test_fal_gives_alpha_in_the_header_for_krea2_and_in_keys_for_ideogram4():
    file = write(
        "krea2", lora(*A_B, scale=4.0), "base_model.model.", "official", metadata={"lora_rank": "3", "lora_alpha": "12"}
    )
    found = read_lora(file.state, file.metadata, sizes("krea2"))
    assert found.producer == "fal"
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())
    assert any("alpha 12 comes from the header (lora_alpha)" in note for note in found.notes)
    file = write("ideogram4", lora(*A_B, alpha=6.0), "conditional_transformer.", "official")
    found = read_lora(file.state, {}, sizes("ideogram4"))
    assert found.producer == "fal"
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())


def test_alpha_and_rank_patterns_of_the_header():
    """PEFT takes the first pattern that is the end of a module's name, from a dot on."""
    shapes = sizes("krea2")
    only = ("blocks.1.attn.qkv", "blocks.0.attn.gate")
    q, gate = "transformer_blocks.1.attn.to_q", "transformer_blocks.0.attn.to_gate"
    file = write("krea2", lora(*A_B), "transformer.", "diffusers", only=only)
    file.state[f"transformer.{gate}.lora_A.weight"] = torch.randn(5, 256)
    file.state[f"transformer.{gate}.lora_B.weight"] = torch.randn(256, 5)
    header = peft_header(
        r=3, lora_alpha=6, rank_pattern={"attn.to_gate": 5}, alpha_pattern={q: 1.5, r"^.*\.to_gate$": 20, "to_q": 9}
    )
    found = read_lora(file.state, header, shapes).modules
    q_, k, v = found["blocks.1.attn.qkv"].members
    assert (q_.scale, k.scale, v.scale, found["blocks.0.attn.gate"].scale) == (0.5, 2.0, 2.0, 4.0)


def test_a_key_alpha_goes_before_the_header():
    file = write("krea2", lora(*A_B, alpha=1.5), "transformer.", "diffusers", metadata=peft_header(r=3, lora_alpha=12))
    found = read_lora(file.state, file.metadata, sizes("krea2"))
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())


def test_kohyas_header_alpha_is_for_kohyas_names():
    """musubi-tuner's own converter folds alpha into lora_A and lora_B and leaves the header as it was."""
    header = {"ss_network_alpha": "1.5", "ss_network_dim": "3"}
    file = write("ideogram4", lora(*DOWN_UP, scale=0.5), "lora_unet_", "official", True)
    found = read_lora(file.state, header, sizes("ideogram4"))
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())
    file = write("ideogram4", lora(*A_B, scale=1.0), "diffusion_model.", "official")
    found = read_lora(file.state, header, sizes("ideogram4"))
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())
    assert any("ss_network_alpha is not applied" in note for note in found.notes)


def one(family, module, parts, metadata=None, prefix="diffusion_model."):
    """What is read of one module, spelled officially."""
    state = {f"{prefix}{module}.{part}": tensor for part, tensor in parts.items()}
    return read_lora(state, metadata or {}, sizes(family))


PAIR = {"lora_down.weight": torch.randn(3, 256), "lora_up.weight": torch.randn(256, 3), "alpha": torch.tensor(3.0)}
OUT, IN = torch.rand(320) + 0.5, torch.rand(256) + 0.5
RECTANGLE = {"lora_down.weight": torch.randn(3, 256), "lora_up.weight": torch.randn(320, 3), "alpha": torch.tensor(3.0)}


@pytest.mark.parametrize(
    ("part", "tensor", "wanted"),
    [
        ("dora_scale", OUT[:, None], "magnitude"),
        ("dora_scale", OUT, "magnitude"),
        ("dora_scale", IN[None], "column_magnitude"),
        ("dora_scale", IN, "column_magnitude"),
        ("magnitude", OUT, "magnitude"),
        ("lora_magnitude_vector", OUT, "magnitude"),
        ("lora_magnitude_vector.weight", OUT[:, None], "magnitude"),
        ("lora_magnitude_vector.default.weight", OUT[None], "magnitude"),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "lokr", "diff"])
def test_dora_on_either_axis_in_the_papers_sense(part, tensor, wanted, kind):
    """OneTrainer's and LyCORIS' dora_scale, ai-toolkit's magnitude, PEFT's lora_magnitude_vector: by ‖W + dW‖."""
    factors = {
        "lora": RECTANGLE,
        "lokr": {"lokr_w1": torch.randn(4, 8), "lokr_w2": torch.randn(80, 32), "alpha": torch.tensor(1.0)},
        "diff": {"diff": torch.randn(320, 256)},
    }[kind]
    module = "layers.0.feed_forward.w1"
    change = one("ideogram4", module, factors | {part: tensor}, {"ot_branch": "1"}).modules[module]
    weight = torch.randn(320, 256)
    changed = weight + change.delta()
    values, axis = (OUT[:, None], 1) if wanted == "magnitude" else (IN[None], 0)
    assert torch.allclose(change.merged(weight), values * changed / changed.norm(dim=axis, keepdim=True), atol=1e-5)


def test_grafts_and_comfyuis_dora_scale_stands_over_the_base():
    """By row ComfyUI divides by ‖W‖; Graft writes for it and says so. Without that word it is the paper's."""
    module, scale = "layers.0.feed_forward.w1", {"dora_scale": OUT[:, None]}
    said = {"graft": json.dumps({"dora_scale": "over the norm of W"})}
    strength_1 = {**RECTANGLE, "alpha": torch.tensor(1.0)}
    for parts, metadata in ((RECTANGLE, said), (strength_1, {})):
        change = one("ideogram4", module, parts | scale, metadata).modules[module]
        assert torch.equal(change.magnitude_over_base, OUT)
        assert change.magnitude is None
    change = one("ideogram4", module, RECTANGLE | scale, {"graft": "{}"}).modules[module]
    assert torch.equal(change.magnitude, OUT)
    assert change.magnitude_over_base is None
    column = one("ideogram4", module, RECTANGLE | {"dora_scale": IN[None]}, said).modules[module]
    assert torch.equal(column.column_magnitude, IN)


def test_a_guess_on_what_a_dora_scale_is_is_said():
    """No header and a strength of 1 are like ComfyUI's TrainLoraNode, and not only like it."""
    module, scale = "layers.0.feed_forward.w1", {"dora_scale": OUT[:, None]}
    strength_1 = {**RECTANGLE, "alpha": torch.tensor(1.0)}

    def said(parts, metadata=None):
        return any("taken as over the norm of W" in note for note in one("ideogram4", module, parts, metadata).notes)

    assert said(strength_1 | scale)
    assert not said(strength_1)
    assert not said(strength_1 | scale, {"graft": json.dumps({"dora_scale": "over the norm of W"})})
    assert not said(strength_1 | {"dora_scale": IN[None]})
    assert not said(RECTANGLE | scale)


def test_a_one_dimensional_dora_scale_on_a_square_weight_is_by_row():
    """ComfyUI would spread it over the columns."""
    found = one("krea2", "blocks.0.attn.gate", PAIR | {"dora_scale": IN}, {"ot_branch": "1"})
    assert torch.equal(found.modules["blocks.0.attn.gate"].magnitude, IN)
    assert any("taken as by output row" in note for note in found.notes)


def test_ai_toolkits_full_rank_lora_a_is_the_change_itself():
    whole = torch.randn(320, 256)
    change = one("ideogram4", "layers.0.feed_forward.w1", {"lora_A.weight": whole}).modules["layers.0.feed_forward.w1"]
    assert isinstance(change, DiffModule)
    assert torch.equal(change.delta(), whole)


def test_norms_tables_and_biases_are_read(family_name):
    """ComfyUI's TrainLoraNode writes `.diff` for vectors, `.diff_b` for biases; ai-toolkit for all that it trains."""
    vectors, bias = {
        "krea2": (
            {"blocks.0.prenorm.scale": "blocks.0.prenorm.scale", "blocks.1.postnorm": "blocks.1.postnorm.scale",
             "blocks.0.mod.lin": "blocks.0.mod.lin"}, "tproj.1",
        ),
        "ideogram4": (
            {"layers.0.attention_norm1": "layers.0.attention_norm1", "layers.1.attention.norm_q":
             "layers.1.attention.norm_q", "llm_cond_norm": "llm_cond_norm"}, "layers.0.adaln_modulation",
        ),
    }[family_name]  # fmt: skip
    shapes = sizes(family_name)
    state = {f"diffusion_model.{name}.diff": torch.randn(shapes.shape(module)) for name, module in vectors.items()}
    state[f"diffusion_model.{bias}.diff_b"] = torch.randn(shapes.biases[bias])
    found = read_lora(state, {}, shapes)
    assert found.modules.keys() == set(vectors.values())
    for name, module in vectors.items():
        assert torch.equal(found.modules[module].delta(), state[f"diffusion_model.{name}.diff"])
    assert torch.equal(found.biases[bias], state[f"diffusion_model.{bias}.diff_b"])
    assert found.fused is None


def test_placeholders_beside_the_fused_projection_are_left_out():
    """Zeros whose `dora_scale` would rescale the base, as ComfyUI's #16234 has them."""
    file = write("krea2", lokr(), "lycoris_", "fused", True, only=("blocks.1.attn.qkv",))
    stem = "lycoris_transformer_blocks_1_attn_to_"
    file.state[f"{stem}qkv.dora_scale"] = torch.rand(512, 1)
    for member, rows in zip("qkv", (256, 128, 128), strict=True):
        file.state[f"{stem}{member}.lokr_w1"] = torch.zeros(2, 2)
        file.state[f"{stem}{member}.lokr_w2"] = torch.randn(rows // 2, 128)
        file.state[f"{stem}{member}.alpha"] = torch.tensor(1.0)
        file.state[f"{stem}{member}.dora_scale"] = torch.rand(rows, 1)
    found = read_lora(file.state, {}, sizes("krea2"))
    change = found.modules["blocks.1.attn.qkv"]
    assert isinstance(change, LokrModule)
    assert torch.equal(change.magnitude, file.state[f"{stem}qkv.dora_scale"][:, 0])
    assert torch.allclose(change.delta(), file.wanted["blocks.1.attn.qkv"])
    assert any("3 placeholders of zero" in note for note in found.notes)
    assert found.fused is True


def test_missing_members_stay_missing(family_name):
    module = {"krea2": "blocks.1.attn.qkv", "ideogram4": "layers.1.attention.qkv"}[family_name]
    file = write(family_name, lora(*A_B), "transformer.", "diffusers", only=(module,))
    file.state = {key: tensor for key, tensor in file.state.items() if ".to_k." not in key}
    found = read_lora(file.state, {}, sizes(family_name)).modules[module]
    assert isinstance(found, Split)
    assert [member is None for member in found.members] == [False, True, False]
    assert found.rows == sizes(family_name).rows(module)


@pytest.mark.parametrize(("alpha", "word"), [(-1.5, "negative"), (0.0, "change nothing")])
def test_negative_and_zero_alpha_keep_their_meaning(alpha, word):
    """A root of a negative one, as others take to share it between the factors, is NaN."""
    file = write("krea2", lora(*DOWN_UP, alpha=alpha), "diffusion_model.", "official")
    found = read_lora(file.state, {}, sizes("krea2"))
    assert all(torch.allclose(delta(found.modules[m]), wanted) for m, wanted in file.wanted.items())
    assert any(word in note for note in found.notes)


def test_fp8_factors_are_held_exactly():
    file = write("krea2", lora(*A_B), "diffusion_model.", "official", only=("blocks.0.attn.gate",))
    state = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in file.state.items()}
    found = read_lora(state, {}, sizes("krea2")).modules["blocks.0.attn.gate"]
    a, b = (state[f"diffusion_model.blocks.0.attn.gate{end}"].float() for end in A_B)
    assert torch.equal(found.delta(), b @ a)


def test_the_published_sizes_count_without_a_base():
    state = {"diffusion_model.blocks.27.attn.wk.lora_A.weight": torch.randn(2, 6144)}
    state["diffusion_model.blocks.27.attn.wk.lora_B.weight"] = torch.randn(1536, 2)
    split = read_lora(state).modules["blocks.27.attn.qkv"]
    assert split.rows == (6144, 1536, 1536)
    assert split.members[1].shape == (1536, 6144)


@pytest.mark.parametrize(("family", "out", "columns"), [("krea2", 64, 6144), ("ideogram4", 128, 4608)])
def test_shapes_tell_the_family_where_the_name_is_in_both(family, out, columns):
    state = {"transformer.final_layer.linear.lora_A.weight": torch.randn(2, columns)}
    state["transformer.final_layer.linear.lora_B.weight"] = torch.randn(out, 2)
    assert read_lora(state).family == family


# --- against the programs themselves ---------------------------------------------------------------------------------


def diffusers_names(family, module):
    """diffusers' names of a module one, or those of q, k and v."""
    joint = sizes(family).is_joint(module)
    return [spell(family, module, member, DIFFUSERS) for member in (range(3) if joint else (None,))]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_agrees(family_name, dora, rslora, tmp_path):
    """A LoRA that PEFT made on diffusers' model and diffusers saved with its header."""
    import peft
    from diffusers.loaders.lora_base import LoraBaseMixin

    model = tiny.build(family_name)
    twin = tiny.diffusers_twin(family_name, model)
    config = peft.LoraConfig(
        r=3, lora_alpha=12, use_rslora=rslora, use_dora=dora, init_lora_weights=False,
        target_modules=["to_q", "to_k", "to_v", "to_out.0", "ff.up", "feed_forward.w1"],
        **({} if rslora else {"alpha_pattern": {"to_k": 1.5}, "rank_pattern": {"to_v": 5}}),
    )  # fmt: skip
    twin.add_adapter(config)
    state = peft.get_peft_model_state_dict(twin)
    LoraBaseMixin._save_lora_weights(
        tmp_path, {"transformer": state}, {"transformer": config.to_dict()}, True, "a.safetensors"
    )
    found = read_lora(*open_lora(tmp_path / "a.safetensors"), sizes(family_name))
    assert found.producer == "diffusers / PEFT"
    layers = {n: m for n, m in twin.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    wanted = {n: m.get_delta_weight("default").detach() for n, m in layers.items()}
    seen = 0
    for module, change in found.modules.items():
        for name in diffusers_names(family_name, module):
            part = change.members["qkv".index(name[-1])] if isinstance(change, Split) else change
            assert tiny.relative(part.delta(), wanted[name]) < 1e-6
            if dora:
                layer = layers[name]
                merged = layer.lora_magnitude_vector["default"].weight
                changed = layer.base_layer.weight + wanted[name]
                theirs = merged[:, None] * changed / changed.norm(dim=1, keepdim=True)
                assert tiny.relative(part.merged(layer.base_layer.weight), theirs) < 1e-5
            seen += 1
    assert seen == len(wanted)


@pytest.mark.parametrize("kind", ["locon", "loha", "lokr", "lokr whole", "lokr both"])
@pytest.mark.parametrize("on_output", [None, True, False])
@pytest.mark.parametrize("rslora", [False, True])
def test_lycoris_agrees(kind, on_output, rslora):
    """Its own modules' state dicts, and the weights that its forward uses.

    Not those of `get_merged_weight`, which in 4.1 multiplies LoHa and LoKr by alpha / rank twice. Of whole LoKr factors
    under rsLoRA its training has another strength than any reader of its files, itself included.
    """
    if kind == "lokr whole" and rslora:
        pytest.skip("trained with a strength that its file does not hold")
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule as TheirLoha
    from lycoris.modules.lokr import LokrModule as TheirLokr

    cls = {"locon": LoConModule, "loha": TheirLoha}.get(kind, TheirLokr)
    more = {"lokr whole": {"full_matrix": True}, "lokr both": {"decompose_both": True, "factor": -1}}.get(kind, {})
    name = "layers.0.feed_forward.w1"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = torch.nn.Linear(256, 320, bias=False)
        theirs = cls(
            "lycoris_" + name.replace(".", "_"), linear, lora_dim=3, alpha=1.5, rs_lora=rslora,
            weight_decompose=on_output is not None, wd_on_out=bool(on_output), **more,
        )  # fmt: skip
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        if on_output is not None:
            torch.nn.init.uniform_(theirs.dora_scale, 0.5, 1.5)
    if kind == "lokr both":
        assert {"lokr_w1_a", "lokr_w2_a"} <= theirs.custom_state_dict().keys()
    state = {f"{theirs.lora_name}.{part}": t.detach() for part, t in theirs.custom_state_dict().items()}
    change = read_lora(state, {}, sizes("ideogram4")).modules[name]
    wanted_type = {"locon": LoraModule, "loha": LohaModule}.get(kind, LokrModule)
    assert type(change) is wanted_type
    with torch.no_grad():
        trained = theirs.make_weight() * theirs.scale if kind == "locon" else theirs.get_weight(theirs.shape)
        assert tiny.relative(change.delta(), trained) < 1e-6
        merged = linear.weight + trained
        if on_output is not None:
            merged = theirs.apply_weight_decompose(merged)
        assert tiny.relative(change.merged(linear.weight), merged) < 1e-5


# --- the public reports, by their keys -------------------------------------------------------------------------------

REPORTS = {
    "ComfyUI #14477: OneTrainer's split q, k, v of Ideogram 4": (
        "ideogram4", lora(*A_B, alpha=2.0), "diffusion_model.", "diffusers", False,
    ),
    "ComfyUI #14987: to_qkv of Krea 2": ("krea2", lora(*A_B), "transformer.", "fused", False),
    "ComfyUI #16234, SimpleTuner #3222: LoKr on to_qkv of Krea 2": ("krea2", lokr(), "lycoris_", "fused", True),
    "OneTrainer PR #1522: lora_down under diffusers' names": (
        "ideogram4", lora(*DOWN_UP, alpha=1.0), "transformer.", "diffusers", False,
    ),
    "musubi-tuner #770, #905, ComfyUI #11487: flattened to_out_0": (
        "ideogram4", lora(*DOWN_UP, alpha=1.0), "lora_unet_", "diffusers", True,
    ),
    "diffusers #14074: bare native names of Krea 2": ("krea2", lora(*A_B), "", "official", False),
    "diffusers #13919, #14409: alpha keys": ("krea2", lora(*A_B, alpha=2.0), "transformer.", "diffusers", False),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_public_reports_are_read(report):
    family, parts, prefix, naming, flat = REPORTS[report]
    file: File = write(family, parts, prefix, naming, flat)
    found = read_lora(file.state, {}, sizes(family))
    assert found.modules.keys() == file.wanted.keys()
    assert all(isinstance(change, Change | Split) for change in found.modules.values())
    assert all(tiny.relative(delta(found.modules[m]), wanted) < 1e-6 for m, wanted in file.wanted.items())
