"""Verdicts on readers: diffusers against its own loader, ComfyUI against its rules written out, the others by file."""

from __future__ import annotations

import json

import lora_files
import pytest
import tiny
import torch
from graft_lora.lora_convert.canonical import Split
from graft_lora.lora_convert.readers import verdicts
from graft_lora.lora_convert.reading import read_lora
from lora_files import loha, lokr, lora
from safetensors.torch import save_file
from torch import nn

A_B = (".lora_A.weight", ".lora_B.weight")
DEFAULT_A_B = (".lora_A.default.weight", ".lora_B.default.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")


def judged(file, sizes=None):
    read = read_lora(file.state, file.metadata, sizes or lora_files.sizes(file.family))
    return verdicts(file.state, file.metadata, read)


def with_lengths(parts, name, shape=lambda out, columns: (out, 1)):
    """The same parts, and a tensor of lengths."""

    def more(out, columns, generator):
        tensors, change = parts(out, columns, generator)
        return tensors | {name: 1 + torch.rand(shape(out, columns), generator=generator)}, change

    return more


# ---- diffusers, against itself


def diffusers_computes(file, tmp_path):
    """What diffusers' own loader makes of a file: `not`, `fully`, or `else` where it computes something else."""
    from diffusers.loaders import lora_pipeline

    mixin = {"krea2": lora_pipeline.Krea2LoraLoaderMixin, "ideogram4": lora_pipeline.Ideogram4LoraLoaderMixin}
    model = tiny.build(file.family)
    twin = tiny.diffusers_twin(file.family, model)
    owner = mixin[file.family]()
    owner.transformer, owner.components, owner.hf_device_map = twin, {}, None
    path = tmp_path / "a.safetensors"
    save_file(file.state, path, {"format": "pt"} | file.metadata)
    arguments = tiny.inputs(file.family)
    with torch.no_grad():
        before = tiny.diffusers_velocity(file.family, twin, *arguments.values())
        try:
            owner.load_lora_weights(path)
        except (ValueError, LookupError, RuntimeError):
            return "not"
        found = tiny.diffusers_velocity(file.family, twin, *arguments.values())
        if tiny.relative(found, before) < 1e-6:
            return "not"
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        sizes = lora_files.sizes(file.family)
        for name, change in file.wanted.items():
            members = sizes.table.members(name) or (name,)
            for member, rows in zip(members, change.split([len(linears[m].weight) for m in members]), strict=True):
                linears[member].weight += rows
        return "fully" if tiny.relative(found, model(**arguments)) < 1e-4 else "else"


LEAVES = [
    "to_q", "to_k", "to_v", "to_out.0", "to_gate", "down", "up", "img_in", "linear_2", "time_mod_proj", "w2",
    "final_layer.linear", "adaln_modulation", "final_layer.adaln_modulation",
]  # fmt: skip


def peft(rank, alpha):
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": LEAVES}
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}


PLAIN = {
    "krea2": ("blocks.1.attn.qkv", "blocks.0.attn.wo", "blocks.1.mlp.down"),
    "ideogram4": ("layers.1.attention.qkv", "layers.0.attention.o", "layers.0.feed_forward.w2"),
}
DIFFUSERS = {  # what → prefix, naming, flat, parts, header, whether it is of the blocks alone
    "its own": ("transformer.", "diffusers", False, lora(*A_B), {}, False),
    "its own with alpha in the header": ("transformer.", "diffusers", False, lora(*A_B, scale=2.0), peft(3, 6), False),
    "its own with kohya's header": (
        "transformer.", "diffusers", False, lora(*A_B, scale=2.0), {"lora_rank": "3", "lora_alpha": "6"}, False,
    ),
    "its own with another's header": ("transformer.", "diffusers", False, lora(*A_B), peft(5, 5), False),
    "down and up": ("transformer.", "diffusers", False, lora(*DOWN_UP), {}, False),
    "official under transformer": ("transformer.", "official", False, lora(*A_B), {}, False),
    "fused under transformer": ("transformer.", "fused", False, lora(*A_B), {}, False),
    "ai-toolkit": ("diffusion_model.", "official", False, lora(*A_B), {}, False),
    "ai-toolkit, blocks": ("diffusion_model.", "official", False, lora(*A_B), {}, True),
    "with alpha": ("diffusion_model.", "official", False, lora(*A_B, alpha=1.5), {}, True),
    "ComfyUI": ("diffusion_model.", "official", False, lora(*DOWN_UP, alpha=1.5), {}, True),
    "default": ("diffusion_model.", "official", False, lora(*DEFAULT_A_B), {}, True),
    "fal, Krea 2": ("base_model.model.", "official", False, lora(*A_B), {}, True),
    "fal, Ideogram 4": ("conditional_transformer.", "official", False, lora(*A_B, alpha=6.0), {}, True),
    "bare": ("", "official", False, lora(*A_B), {}, True),
    "bare diffusers": ("", "diffusers", False, lora(*A_B), {}, True),
    "SimpleTuner comfyui": ("diffusion_model.", "diffusers", False, lora(*A_B, alpha=3.0), {}, True),
    "musubi-tuner": ("lora_unet_", "official", True, lora(*DOWN_UP, alpha=1.5), {}, True),
    "LyCORIS": ("lycoris_", "fused", True, lokr(), {}, True),
    "LoKr": ("diffusion_model.", "official", False, lokr(), {}, True),
    "LoHa": ("transformer.", "diffusers", False, loha(), {}, True),
    "dora_scale": ("diffusion_model.", "official", False, with_lengths(lora(*A_B), ".dora_scale"), {}, True),
    "magnitude": ("diffusion_model.", "official", False, with_lengths(lora(*A_B), ".magnitude"), {}, True),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFUSERS)
def test_diffusers_as_it_loads_itself(what, family_name, tmp_path):
    prefix, naming, flat, parts, metadata, blocks = DIFFUSERS[what]
    only = PLAIN[family_name] if blocks else None
    file = lora_files.write(family_name, parts, prefix, naming, flat, metadata, only)
    verdict = judged(file)["diffusers"]
    if what == "dora_scale":
        # Without it the LoRA is loaded, which is not what a DoRA says.
        assert diffusers_computes(file, tmp_path) == "fully"
        assert verdict.loads == "wrongly"
        return
    found = diffusers_computes(file, tmp_path)
    assert {"partly": "else", "wrongly": "else"}.get(verdict.loads, verdict.loads) == found, verdict


# ---- ComfyUI, by the rules of its comfy/lora.py, comfy/utils.py and comfy/weight_adapter, written out


def comfyui_map(model):
    """Name in a file → parameter. Of Krea 2 the diffusers names of the Linears are known too."""
    found = {}
    for name, _ in model.named_parameters():
        if name.endswith(".weight"):
            stem = name.removesuffix(".weight")
            found |= {f"lora_unet_{stem.replace('.', '_')}": name, f"diffusion_model.{stem}": name}
        else:
            found[f"diffusion_model.{name}"] = name
    if hasattr(model, "txtfusion"):
        for module, (official, diffusers) in lora_files.KREA2.items():
            del module
            for ours, theirs in zip(official, diffusers, strict=True):
                for spelled in {theirs, theirs.removesuffix(".0")} if "blocks" in theirs else {theirs}:
                    for key in (f"diffusion_model.{spelled}", f"transformer.{spelled}", spelled):
                        found[key] = f"{ours}.weight"
                    found[f"lycoris_{spelled.replace('.', '_')}"] = f"{ours}.weight"
    return found


COMFYUI_PAIRS = [
    (f"{b}{end}", f"{a}{end}") for a, b, end in (
        (".lora_down", ".lora_up", ".weight"), ("_lora.down", "_lora.up", ".weight"), (".lora_A", ".lora_B", ".weight"),
        (".lora.down", ".lora.up", ".weight"), (".lora_A", ".lora_B", ""), (".lora_A", ".lora_B", ".default.weight"),
        (".lora_linear_layer.down", ".lora_linear_layer.up", ".weight"),
    )
]  # fmt: skip


def comfyui_weights(state, model):
    """Parameter → its weight as ComfyUI changes it, and the keys that it took. What fails is left as it is."""
    weights, taken = dict(model.named_parameters()), set()
    changed = {}
    for stem, name in comfyui_map(model).items():
        get = lambda end, stem=stem: state.get(stem + end)  # noqa: E731
        own = {key for key in state if key.startswith((f"{stem}.", f"{stem}_lora."))}
        alpha, scale, weight = get(".alpha"), 1.0, weights[name].detach()
        pair = next(((b, a) for b, a in COMFYUI_PAIRS if stem + b in state), None)
        if pair is not None:
            change = get(pair[0]) @ get(pair[1])
            scale = 1.0 if alpha is None else alpha.item() / len(get(pair[1]))
        elif get(".hada_w1_a") is not None:
            change = (get(".hada_w1_a") @ get(".hada_w1_b")) * (get(".hada_w2_a") @ get(".hada_w2_b"))
            scale = alpha.item() / len(get(".hada_w1_b"))
        elif get(".lokr_w1") is not None:
            change = torch.kron(get(".lokr_w1"), get(".lokr_w2"))
        elif get(".diff") is not None:
            change = get(".diff")
        else:
            continue
        new, lengths = weight + scale * change, get(".dora_scale")
        if lengths is not None:
            by_row = lengths.shape[0] == len(weight)
            norm = weight.norm(dim=1, keepdim=True) if by_row else new.norm(dim=0, keepdim=True)
            factor = lengths / (norm + torch.finfo(torch.float32).eps)
            try:
                # In place, as ComfyUI does it, which logs an error and leaves the weight alone.
                new.mul_(factor)
            except RuntimeError:
                continue
        changed[name] = new
        taken |= own
    return changed, taken


def comfyui_computes(file):
    """The verdict that its weights give, beside those that the file says."""
    model = tiny.build(file.family)
    sizes = lora_files.sizes(file.family)
    changed, taken = comfyui_weights(file.state, model)
    weights = dict(model.named_parameters())
    wanted = {}
    for name, entry in read_lora(file.state, file.metadata, sizes).modules.items():
        members = sizes.table.members(name) or (name,)
        whole = torch.cat([weights[f"{member}.weight"].detach() for member in members])
        if isinstance(entry, Split):
            pairs = zip(entry.members, whole.split(entry.rows), strict=True)
            whole = torch.cat([weight if change is None else change.merged(weight) for change, weight in pairs])
        else:
            whole = entry.merged(whole)
        wanted |= dict(zip(members, whole.split([len(weights[f"{m}.weight"]) for m in members]), strict=True))
    found = {name.removesuffix(".weight"): weight for name, weight in changed.items()}
    if not found.keys() & wanted.keys():
        return "not"
    for name, weight in found.items():
        right = wanted.get(name, weights[f"{name}.weight"].detach())
        if tiny.relative(weight, right) > 1e-5:
            return "wrongly"
    return "fully" if found.keys() == wanted.keys() and taken == file.state.keys() else "partly"


def row(out, columns):
    return (out,)


def by_column(out, columns):
    return (1, columns)


PLAIN_LORA = lora(*A_B)
COMFYUI = {
    "the prefix alone": [(prefix, naming, flat, PLAIN_LORA) for prefix, naming, flat in (
        ("diffusion_model.", "official", False), ("diffusion_model.", "diffusers", False),
        ("diffusion_model.", "fused", False), ("transformer.", "official", False), ("transformer.", "diffusers", False),
        ("transformer.", "fused", False), ("", "official", False), ("", "diffusers", False), ("", "fused", False),
        ("base_model.model.", "official", False), ("base_model.model.", "diffusers", False),
        ("conditional_transformer.", "official", False), ("model.diffusion_model.", "official", False),
        ("unet.", "diffusers", False), ("lora_transformer_", "diffusers", True),
        ("lora_unet_", "official", True), ("lora_unet_", "diffusers", True), ("lora_unet_", "fused", True),
        ("lycoris_", "official", True), ("lycoris_", "diffusers", True), ("lycoris_", "fused", True),
    )],
    "the ending": [("diffusion_model.", "official", False, lora(a, b, alpha=1.5)) for b, a in COMFYUI_PAIRS],
    "an ending that it does not know": [
        ("diffusion_model.", "official", False, lora(".lora_down", ".lora_up")),
        ("diffusion_model.", "official", False, lora(".lora_A.mine.weight", ".lora_B.mine.weight")),
    ],
    "the kind": [("diffusion_model.", "official", False, parts) for parts in (loha(), lokr())],
    "lengths": [
        ("diffusion_model.", "official", False, with_lengths(PLAIN_LORA, name, shape))
        for name, shape in (
            (".magnitude", row), (".lora_magnitude_vector", row), (".dora_scale", row), (".dora_scale", by_column),
            (".dora_scale", lambda out, columns: (out, 1)),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", COMFYUI)
def test_comfyui_as_its_weights_come_out(what, family_name):
    for prefix, naming, flat, parts in COMFYUI[what]:
        file = lora_files.write(family_name, parts, prefix, naming, flat)
        verdict = judged(file)["ComfyUI"]
        assert verdict.loads == comfyui_computes(file), (prefix, naming, flat, list(file.state)[:3], verdict)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_comfyui_ignores_the_strength_in_the_header(scale, family_name):
    file = lora_files.write(
        family_name, lora(*A_B, scale=scale), "diffusion_model.", "official",
        metadata={"lora_rank": "3", "lora_alpha": str(3 * scale)},
    )  # fmt: skip
    verdict = judged(file)["ComfyUI"]
    assert verdict.loads == comfyui_computes(file) == ("fully" if scale == 1 else "wrongly")
    count = sum(key.endswith(".lora_A.weight") for key in file.state)
    reasons = (
        "the strength stands in the header, which is ignored "
        f"({count} keys, such as {next(iter(file.state))})",
    )  # fmt: skip
    assert verdict.reasons == (() if scale == 1 else reasons)


def test_comfyui_rescales_the_base_by_a_placeholders_dora_scale():
    """SimpleTuner's LyCORIS, with zeros for the q, k, v that were not trained beside the fused one that was."""
    parts = with_lengths(lokr(), ".dora_scale")
    file = lora_files.write("krea2", parts, "lycoris_", "fused", True, only=PLAIN["krea2"][:1])
    unused = lora_files.write("krea2", parts, "lycoris_", "diffusers", True, only=PLAIN["krea2"][:1]).state
    file.state |= {k: v if k.endswith(("dora_scale", "alpha")) else torch.zeros_like(v) for k, v in unused.items()}
    changed, _ = comfyui_weights(file.state, model := tiny.build("krea2"))
    assert len(changed) == 3
    assert all(tiny.relative(new, dict(model.named_parameters())[name]) > 0.1 for name, new in changed.items())
    assert judged(file)["ComfyUI"].loads == "not"
    file.state |= lora_files.write("krea2", lokr(), "lycoris_", "fused", True, only=PLAIN["krea2"][1:]).state
    verdict = judged(file)["ComfyUI"]
    assert verdict.loads == comfyui_computes(file) == "wrongly"
    assert any(reason.startswith("a placeholder's dora_scale rescales the base (3 keys") for reason in verdict.reasons)


# ---- the trainers, a file for each rule


def file_of(prefix, naming, flat=False, parts=PLAIN_LORA, metadata=None, only=True, **extra):
    """A maker of files of one family; `extra` are parts of other modules to be put in: module → parts."""

    def make(family):
        wanted = PLAIN[family] if only else None
        file = lora_files.write(family, parts, prefix, naming, flat, metadata, wanted)
        for module, more in extra.items():
            name = module.replace("__", ".")
            file.state |= lora_files.write(family, more, prefix, naming, flat, None, (name,)).state
        return file

    return make


def without_up(out, columns, generator):
    """ai-toolkit's full rank."""
    change = torch.randn(out, columns, generator=generator)
    return {".lora_A.weight": change}, change


def full(out, columns, generator):
    change = torch.randn(out, columns, generator=generator)
    return {".diff": change}, change


def low_w1(out, columns, generator):
    tensors, change = lokr(alpha=2.0)(out, columns, generator)
    w1 = tensors.pop(".lokr_w1")
    return tensors | {".lokr_w1_a": w1, ".lokr_w1_b": torch.eye(2)}, change


OF_HEADER = {"lora_rank": "3", "lora_alpha": "6"}
OVER_W = {"graft": json.dumps({"dora_scale": "over the norm of W"})}
ROWS = with_lengths(PLAIN_LORA, ".dora_scale")
OFFICIAL = ("diffusion_model.", "official")
TRAINERS = [  # reader, family, file, verdict, words of its reasons
    ("ai-toolkit", None, file_of(*OFFICIAL), "fully", []),
    ("ai-toolkit", None, file_of("transformer.", "official"), "fully", []),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=lora(*DOWN_UP)), "fully", []),
    ("ai-toolkit", None, file_of("", "official"), "not", ["official names under `diffusion_model.` only"]),
    ("ai-toolkit", None, file_of("lora_unet_", "official", True), "not", ["under `diffusion_model.` only"]),
    ("ai-toolkit", "krea2", file_of("transformer.", "diffusers"), "not", ["under `diffusion_model.` only"]),
    ("ai-toolkit", "ideogram4", file_of("transformer.", "diffusers"), "partly", ["(8 keys, such as", "to_q"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=lora(*DEFAULT_A_B)), "not", ["no such ending"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=loha()), "not", ["no LoHa"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=lokr()), "fully", []),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=with_lengths(PLAIN_LORA, ".magnitude", row)), "wrongly", ["anew"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=ROWS), "wrongly", ["lengths of a DoRA start anew"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=lora(*A_B, alpha=1.5)), "wrongly", ["alpha is dropped"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=lora(*A_B, alpha=3.0)), "fully", []),
    ("ai-toolkit", None, file_of(*OFFICIAL, metadata=OF_HEADER), "wrongly", ["strength stands in the header"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=without_up), "fully", ["train these layers whole"]),
    ("ai-toolkit", None, file_of(*OFFICIAL, parts=full), "fully", ["train these layers whole"]),
    ("ai-toolkit", "krea2", file_of(*OFFICIAL, tmlp__2=lora(*A_B, rank=5)), "fully", ["beyond the rank"]),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True, lora(*DOWN_UP, alpha=1.5)), "fully", []),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True, loha()), "fully", []),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True, lokr()), "fully", []),
    ("musubi-tuner", None, file_of(*OFFICIAL, parts=lora(*DOWN_UP)), "not", ["under `lora_unet_` only"]),
    ("musubi-tuner", "krea2", file_of("lora_unet_", "diffusers", True, lora(*DOWN_UP)), "not", ["official names"]),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True), "not", ["lora_down and lora_up only"]),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True, full), "not", ["no full changes"]),
    ("musubi-tuner", None, file_of("lora_unet_", "official", True, low_w1), "not", ["first factor of a LoKr whole"]),
    (
        "musubi-tuner", "krea2", file_of("lora_unet_", "official", True, lora(*DOWN_UP), tmlp__2=lokr()), "partly",
        ["one kind of adapter"],
    ),
    (
        "musubi-tuner", None, file_of("lora_unet_", "official", True, with_lengths(lora(*DOWN_UP), ".dora_scale")),
        "wrongly", ["lengths of a DoRA are left out"],
    ),
    (
        "musubi-tuner", None, file_of("lora_unet_", "official", True, lora(*DOWN_UP), OF_HEADER), "wrongly",
        ["strength stands in the header"],
    ),
    ("OneTrainer", "krea2", file_of(*OFFICIAL, parts=lora(*A_B, alpha=1.5)), "fully", []),
    ("OneTrainer", "ideogram4", file_of(*OFFICIAL), "fully", ["fused q, k and v must be on (1 key"]),
    ("OneTrainer", "ideogram4", file_of("transformer.", "diffusers"), "fully", ["must be off (3 keys"]),
    ("OneTrainer", "krea2", file_of("base_model.model.", "official"), "fully", []),
    ("OneTrainer", "krea2", file_of("lycoris_", "diffusers", True, lokr()), "fully", []),
    ("OneTrainer", None, file_of("conditional_transformer.", "official"), "not", ["no such module"]),
    ("OneTrainer", None, file_of("diffusion_model.", "diffusers"), "not", ["no such module"]),
    ("OneTrainer", "krea2", file_of("transformer.", "fused"), "not", ["q, k and v apart (2 keys"]),
    ("OneTrainer", None, file_of(*OFFICIAL, parts=full), "not", ["no full changes"]),
    ("OneTrainer", None, file_of(*OFFICIAL, parts=without_up), "not", ["no full changes"]),
    ("OneTrainer", "krea2", file_of(*OFFICIAL, tmlp__2=lora(*A_B, rank=5)), "not", ["one rank"]),
    ("OneTrainer", "krea2", file_of(*OFFICIAL, tmlp__2=loha()), "not", ["one kind of adapter"]),
    ("OneTrainer", "krea2", file_of(*OFFICIAL, parts=ROWS), "fully", ["those of a DoRA of this axis"]),
    ("OneTrainer", None, file_of(*OFFICIAL, parts=ROWS, metadata=OVER_W), "wrongly", ["over the norm of W is taken"]),
    ("OneTrainer", None, file_of(*OFFICIAL, metadata=OF_HEADER), "wrongly", ["strength stands in the header"]),
    ("SimpleTuner", "krea2", file_of("transformer.", "fused"), "fully", ["fuse_qkv_projections must be on (1 key"]),
    ("SimpleTuner", "krea2", file_of("transformer.", "diffusers"), "fully", ["fuse_qkv_projections must be off"]),
    ("SimpleTuner", "ideogram4", file_of("transformer.", "official"), "fully", []),
    ("SimpleTuner", "ideogram4", file_of("transformer.", "diffusers"), "partly", ["no such module (8 keys"]),
    ("SimpleTuner", None, file_of(*OFFICIAL), "fully", ["lora_format must be comfyui"]),
    ("SimpleTuner", "krea2", file_of(*OFFICIAL, only=False), "not", ["no such module", "txtfusion"]),
    ("SimpleTuner", "krea2", file_of("base_model.model.", "official"), "not", ["no such module"]),
    ("SimpleTuner", None, file_of(*OFFICIAL, parts=lora(*DOWN_UP)), "not", ["outside `lycoris_`"]),
    ("SimpleTuner", None, file_of(*OFFICIAL, parts=lokr()), "not", ["outside `lycoris_`"]),
    (
        "SimpleTuner", None, file_of(*OFFICIAL, parts=with_lengths(PLAIN_LORA, ".magnitude", row)), "not",
        ["lora_magnitude_vector only"],
    ),
    ("SimpleTuner", None, file_of(*OFFICIAL, parts=without_up), "not", ["lora_A without a lora_B"]),
    ("SimpleTuner", None, file_of(*OFFICIAL, parts=ROWS), "wrongly", ["dora_scale is dropped"]),
    ("SimpleTuner", None, file_of(*OFFICIAL, metadata=OF_HEADER), "wrongly", ["strength stands in the header"]),
    ("SimpleTuner", "krea2", file_of("transformer.", "fused", metadata=peft(3, 6)), "fully", ["alpha must be in"]),
    ("SimpleTuner", "krea2", file_of("lycoris_", "fused", True, lokr()), "fully", ["projections must be on"]),
    ("SimpleTuner", "ideogram4", file_of("lycoris_", "official", True, lokr()), "fully", []),
    ("SimpleTuner", "krea2", file_of("lycoris_", "official", True, lokr()), "not", ["no such module"]),
    ("SimpleTuner", "krea2", file_of("lycoris_", "fused", True, low_w1), "not", ["first factor of a LoKr whole"]),
    (
        "SimpleTuner", "krea2", file_of("lycoris_", "fused", True, with_lengths(lokr(), ".dora_scale", by_column)),
        "not", ["by output row only"],
    ),
    (
        "SimpleTuner", "krea2", file_of("lycoris_", "fused", True, with_lengths(lokr(), ".dora_scale"), OVER_W),
        "wrongly", ["over the norm of W is taken"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(TRAINERS)))
def test_trainers(case):
    reader, family, make, loads, words = TRAINERS[case]
    for name in tiny.NAMES if family is None else (family,):
        verdict = judged(make(name))[reader]
        assert verdict.loads == loads, (name, verdict)
        assert bool(verdict.reasons) == bool(words) or loads == "fully", (name, verdict)
        assert all(any(word in reason for reason in verdict.reasons) for word in words), (name, verdict)


NOT_SQUARE = {"krea2": "tproj.1", "ideogram4": "layers.0.feed_forward.w2"}
IS_SQUARE = {"krea2": "blocks.0.attn.wo", "ideogram4": "layers.0.attention.o"}


def test_comfyui_does_nothing_with_a_lora_a_alone(family_name):
    file = lora_files.write(family_name, without_up, *OFFICIAL, only=(IS_SQUARE[family_name],))
    assert judged(file)["ComfyUI"].loads == comfyui_computes(file) == "not"


@pytest.mark.parametrize(("modules", "loads"), [(NOT_SQUARE, "not"), (IS_SQUARE, "wrongly")])
def test_comfyui_and_lengths_as_a_vector(modules, loads, family_name):
    """Over the norm of W, as it computes them, but without a second dimension."""
    parts = with_lengths(PLAIN_LORA, ".dora_scale", row)
    file = lora_files.write(family_name, parts, *OFFICIAL, metadata=OVER_W, only=(modules[family_name],))
    assert judged(file)["ComfyUI"].loads == comfyui_computes(file) == loads
    upright = with_lengths(PLAIN_LORA, ".dora_scale")
    file = lora_files.write(family_name, upright, *OFFICIAL, metadata=OVER_W, only=(modules[family_name],))
    assert judged(file)["ComfyUI"].loads == comfyui_computes(file) == "fully"


def test_comfyui_takes_lengths_of_columns_of_one_row_for_those_of_rows():
    stem = "diffusion_model.txtfusion.projector"
    state = {f"{stem}.lora_A.weight": torch.ones(1, 3), f"{stem}.lora_B.weight": torch.ones(1, 1)}
    file = lora_files.File("krea2", state | {f"{stem}.dora_scale": torch.tensor([[0.5, 1.0, 2.0]])})
    verdict = judged(file)["ComfyUI"]
    assert verdict.loads == comfyui_computes(file) == "wrongly"
    assert "lengths of a column are taken for those of the one row" in verdict.reasons[0]
