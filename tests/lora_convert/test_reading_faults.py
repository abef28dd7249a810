"""What is no LoRA, or a broken one, is one clear error; nothing is left out unasked."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys

import pytest
import torch
from graft_lora.lora_convert.errors import BrokenModuleError, LoraError, NotALoraError, UnknownKeysError
from graft_lora.lora_convert.reading import open_lora, read_lora
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lora_files import MODULES, loha, lokr, lora, sizes, write
from safetensors.torch import save_file

A_B = (".lora_A.weight", ".lora_B.weight")
GATE = "diffusion_model.blocks.0.attn.gate"


def gate(**parts):
    """A sound LoRA of one square module of the tiny Krea 2 with some parts changed, or taken out with None."""
    found = {"lora_down.weight": torch.randn(3, 256), "lora_up.weight": torch.randn(256, 3), "alpha": torch.tensor(3.0)}
    for part, tensor in parts.items():
        name = part.replace("__", ".")
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    return {f"{GATE}.{part}": tensor for part, tensor in found.items()}


def refused(state, error, match, metadata=None, family="krea2"):
    with pytest.raises(error, match=match) as caught:
        read_lora(state, metadata or {}, sizes(family))
    said = str(caught.value)
    assert "\n" not in said
    assert isinstance(caught.value, LoraError)
    if error is BrokenModuleError:
        assert any(way in said for way in WAYS), f"no word on what to do: {said}"


WAYS = ("take ", "give ", "export it again", "write it", "merge", "is the LoRA for another base?")


NAN, INF = torch.full((3, 256), math.nan), torch.full((256, 3), -math.inf)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"lora_up__weight": None}, r"blocks\.0\.attn\.gate has only down, alpha"),
        ({"lora_down__weight": None}, r"blocks\.0\.attn\.gate has only up, alpha"),
        ({"lora_down__weight": None, "lora_up__weight": None}, "has only alpha"),
        ({"lora_down__weight": NAN}, r"gate has down with values that are not finite"),
        ({"lora_up__weight": INF}, r"gate has up with values that are not finite"),
        ({"alpha": torch.tensor(math.nan)}, r"gate\.alpha is nan; wanted a finite number"),
        ({"alpha": torch.tensor([1.0, 2.0])}, r"alpha is float32 \[2\]; wanted one number"),
        ({"dora_scale": torch.full((256, 1), math.nan)}, "dora_scale with values that are not finite"),
        ({"dora_scale": torch.ones(7)}, r"dora_scale of \[7\]; for a weight of \[256, 256\] wanted one number a row"),
        ({"dora_scale": torch.ones(256, 256)}, r"dora_scale of \[256, 256\]"),
        ({"dora_scale": torch.ones(256, 1), "magnitude": torch.ones(256)}, "has a magnitude and a dora_scale"),
        ({"lora_down__weight": torch.randn(3, 255)}, r"a change of \[256, 255\]; wanted \[256, 256\]"),
        ({"lora_up__weight": torch.randn(256, 4)}, r"of \[256, 4\] and \[3, 256\]; wanted one rank"),
        ({"lora_up__weight": torch.randn(256, 0), "lora_down__weight": torch.randn(0, 256)}, "none of them 0"),
        (
            {"lora_up__weight": torch.zeros(256, 2000), "lora_down__weight": torch.zeros(2000, 256)},
            "of rank 2000; wanted 1 to 1536",
        ),
        ({"lora_up__weight": torch.ones(256, 3, dtype=torch.int8)}, "has up of int8"),
        ({"lora_up__weight": torch.ones(256, 3, dtype=torch.complex64)}, "has up of complex64"),
        ({"lora_up__weight": torch.randn(256, 3, 1)}, "wanted 1 or 2 dimensions"),
        ({"lora_up__weight": torch.randn(256)}, "wanted two dimensions"),
        ({"hada_w1_a": torch.randn(256, 3)}, "hada_w1_a cannot go with the rest"),
        ({"diff": torch.randn(256, 256)}, "diff cannot go with the rest"),
        ({"lokr_w1": torch.randn(2, 2)}, "lokr_w1 cannot go with the rest"),
        ({"diff_b": torch.randn(256)}, "has a diff_b, but the model has no bias there"),
    ],
)
def test_a_broken_module_is_named(parts, match):
    refused(gate(**parts), BrokenModuleError, match)


@pytest.mark.parametrize("kind", [lora(*A_B), lokr(), lokr(rank=2), loha()])
def test_a_missing_part_of_any_kind_is_an_error(kind):
    state = write("krea2", kind, "diffusion_model.", "official", only=("blocks.0.attn.gate",)).state
    for key in state:
        if key.endswith(".alpha"):
            continue
        rest = {other: tensor for other, tensor in state.items() if other != key}
        refused(rest, BrokenModuleError, r"blocks\.0\.attn\.gate has only")


def test_a_bias_of_another_length_is_an_error():
    refused(
        {"diffusion_model.first.diff_b": torch.randn(255)}, BrokenModuleError, "first has a diff_b of 255; .* has 256"
    )


def test_loha_factors_of_different_ranks_are_an_error():
    """Their product exists and is scaled by one rank: no reader would notice."""
    state = write("krea2", loha(rank=2), "diffusion_model.", "official", only=("blocks.0.attn.gate",)).state
    state |= {f"{GATE}.hada_w2_a": torch.randn(256, 3), f"{GATE}.hada_w2_b": torch.randn(3, 256)}
    refused(state, BrokenModuleError, "hada_w1 and hada_w2 of different shapes")


def test_a_lora_a_without_b_is_not_taken_for_full_rank():
    """Only where it has the weight's own shape."""
    state = {f"{GATE}.lora_A.weight": torch.randn(3, 256)}
    refused(state, BrokenModuleError, "has only down")


def test_lora_of_another_size_is_an_error():
    """The published names with a block too many, or of other widths."""
    state = {key.replace("blocks.0", "blocks.9"): tensor for key, tensor in gate().items()}
    refused(state, BrokenModuleError, r"blocks\.9\.attn\.gate is not in this Krea 2, which has 2 blocks")
    with pytest.raises(BrokenModuleError, match=r"a change of \[256, 256\]; wanted \[6144, 6144\]"):
        read_lora(gate())


def test_q_of_the_wrong_length_is_named():
    """q's rows used for k and v, as other converters do under grouped queries."""
    state = write("krea2", lora(*A_B), "diffusion_model.", "official", only=("blocks.1.attn.qkv",)).state
    q, k = (f"diffusion_model.blocks.1.attn.{name}.lora_B.weight" for name in ("wq", "wk"))
    refused(state | {k: state[q].clone()}, BrokenModuleError, r"blocks\.1\.attn\.wk has a change of \[256, 256\]")


def test_two_spellings_of_one_module_are_an_error():
    state = gate() | {key.replace("diffusion_model.blocks.0.attn.gate", "lora_unet_blocks_0_attn_gate"): tensor
                      for key, tensor in gate().items()}  # fmt: skip
    refused(state, BrokenModuleError, r"blocks\.0\.attn\.gate is spelled in two ways, .*lora_unet_")
    apart = gate(alpha=None) | {"transformer.transformer_blocks.0.attn.to_gate.alpha": torch.tensor(1.0)}
    refused(apart, BrokenModuleError, "is spelled in two ways")
    twice = gate() | {f"{GATE}.lora_A.weight": torch.randn(3, 256)}
    refused(twice, BrokenModuleError, "is spelled in two ways")


def test_fused_and_split_q_k_v_together_are_an_error():
    only = ("blocks.1.attn.qkv",)
    state = write("krea2", lora(*A_B), "transformer.", "fused", only=only).state
    state |= write("krea2", lora(*A_B), "transformer.", "diffusers", only=only).state
    refused(state, BrokenModuleError, r"blocks\.1\.attn\.qkv is there as one and as q, k, v apart")


def test_both_families_in_one_file_are_an_error():
    state = write("krea2", lora(*A_B), "diffusion_model.", "official").state
    state |= write("ideogram4", lora(*A_B), "diffusion_model.", "official").state
    with pytest.raises(NotALoraError, match="modules of both families"):
        read_lora(state)
    refused(state, NotALoraError, "is no module of Krea 2")


def test_unknown_keys_are_named_or_left_out_on_request():
    state = gate() | {"diffusion_model.blocks.0.attn.wz.alpha": torch.tensor(1.0), "what": torch.ones(1)}
    refused(state, UnknownKeysError, r"2 keys are not understood: diffusion_model\.blocks\.0\.attn\.wz\.alpha, what")
    found = read_lora(state, {}, sizes("krea2"), skip_unknown=True)
    assert list(found.modules) == ["blocks.0.attn.gate"]
    assert any("2 keys were left out" in note and "wz.alpha" in note for note in found.notes)


@pytest.mark.parametrize(
    "key",
    [
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha",
        "text_encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "text_encoders.qwen.layers.0.mlp.down_proj.lora_B.weight",
    ],
)
def test_a_text_encoders_part_is_never_dropped_in_silence(key):
    refused({key: torch.ones(2, 2)}, NotALoraError, "keys of a text encoder alone")
    refused(gate() | {key: torch.ones(2, 2)}, UnknownKeysError, "1 keys are of a text encoder: ")
    found = read_lora(gate() | {key: torch.ones(2, 2)}, {}, sizes("krea2"), skip_unknown=True)
    assert any(key in note for note in found.notes)


@pytest.mark.parametrize(
    "state",
    [
        {"blocks.0.attn.wq.weight": torch.ones(2, 2), "blocks.0.prenorm.scale": torch.ones(2)},
        {"model.diffusion_model.layers.0.attention.qkv.weight": torch.ones(2, 2)},
        {"transformer_blocks.0.norm1.weight": torch.ones(2)},
    ],
)
def test_a_base_model_is_called_one(state):
    with pytest.raises(NotALoraError, match="this is a base model"):
        read_lora(state)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("oft_blocks", "OFT"),
        ("oft_diag", "OFT"),
        ("oft_R.weight", "OFT"),
        ("lokr_t2", "Tucker"),
        ("hada_t1", "Tucker"),
        ("lora_mid.weight", "Tucker"),
        ("a1.weight", "GLoRA"),
        ("on_input", "IA3"),
        ("lora_B.bias", "bias inside"),
        ("set_weight", "replaces"),
    ],
)
def test_kinds_that_cannot_be_read_are_refused_by_name(part, match):
    refused(gate() | {f"{GATE}.{part}": torch.ones(2, 2)}, LoraError, match)


def test_another_models_lora_and_nothing_are_refused():
    other = {"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 2)}
    refused(other, NotALoraError, r"none of 1 keys is recognised, transformer\.single_transformer_blocks")
    refused({}, NotALoraError, "the file has no tensors")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ("no JSON", "is no JSON object"),
        ("[" * 100_000, "is no JSON object"),
        ("[1]", "is no JSON object"),
        (json.dumps({"transformer.r": 3, "transformer.lora_alpha": "x"}), "lora_alpha is x; wanted a number"),
        (json.dumps({"transformer.r": 3, "transformer.lora_alpha": True}), "lora_alpha is True; wanted a number"),
        ('{"transformer.r": 3, "transformer.lora_alpha": NaN}', "lora_alpha is nan"),
        ('{"transformer.r": 3, "transformer.lora_alpha": 1' + "0" * 400 + "}", "wanted a number"),
        ('{"r": 3, "lora_alpha": 6, "alpha_pattern": [1]}', "alpha_pattern is no JSON object"),
        ('{"r": 3, "lora_alpha": 6, "alpha_pattern": {"(a+)+": 1}}', "is not understood; wanted module names"),
        ('{"r": 3, "lora_alpha": 6, "alpha_pattern": {"(": 1}}', "which is no pattern"),
    ],
)
def test_a_header_that_cannot_be_understood_is_an_error_only_where_it_is_needed(header, match):
    metadata = {"lora_adapter_metadata": header}
    refused(gate(alpha=None), LoraError, match, metadata)
    assert read_lora(gate(), metadata, sizes("krea2")).modules


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_adapter_metadata": json.dumps({"transformer.r": 16, "transformer.lora_alpha": 8})},
        {"lora_rank": "16", "lora_alpha": "8"},
        {"ss_network_dim": "16", "ss_network_alpha": "8"},
    ],
)
def test_a_stale_header_is_an_error_and_not_a_strength(metadata):
    refused(gate(alpha=None), LoraError, "has rank 3, but the header .* says rank 16 with alpha 8", metadata)
    same = {name: text.replace("16", "8") for name, text in metadata.items()}
    found = read_lora(gate(alpha=None), same, sizes("krea2"))
    assert found.modules["blocks.0.attn.gate"].scale == 1
    assert any("gives another rank, 8" in note for note in found.notes)


def peft_settings(**settings):
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}


@pytest.mark.parametrize(
    "metadata",
    [
        peft_settings(r=16, lora_alpha=16, use_rslora=True),
        {"lora_rank": "16", "lora_alpha": "16", "use_rslora": "True"},
    ],
)
def test_an_rslora_of_another_rank_has_no_known_strength(metadata):
    """Without the root, alpha = rank is strength 1 at any rank; with it, alpha / √16 is 4 and alpha / √3 is not."""
    refused(gate(alpha=None), LoraError, r"rank 16 with alpha 16 \(rsLoRA\), so it is another file's", metadata)


@pytest.mark.parametrize(("text", "scale"), [("true", 6 / math.sqrt(3)), ("False", 2.0)])
def test_rslora_is_read_from_a_flat_header(text, scale):
    metadata = {"lora_rank": "3", "lora_alpha": "6", "use_rslora": text}
    found = read_lora(gate(alpha=None), metadata, sizes("krea2")).modules["blocks.0.attn.gate"]
    assert found.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (peft_settings(r=3, lora_alpha=6, use_rslora="true"), "'true'"),
        (peft_settings(r=3, lora_alpha=6, use_rslora="false"), "'false'"),
        ({"lora_rank": "3", "lora_alpha": "6", "use_rslora": "perhaps"}, "perhaps"),
    ],
)
def test_an_rslora_that_is_neither_true_nor_false_is_refused(metadata, said):
    """PEFT takes any text for true; whoever wrote "false" meant something else."""
    refused(gate(alpha=None), LoraError, f"use_rslora is {said}; wanted true or false", metadata)


@pytest.mark.parametrize("dim", ["3", "16", "None", None])
def test_kohyas_alpha_of_zero_is_the_rank(dim):
    """sd-scripts, musubi-tuner and LyCORIS: `alpha = lora_dim if alpha is None or alpha == 0 else alpha`."""
    metadata = {"ss_network_alpha": "0.0"} | ({} if dim is None else {"ss_network_dim": dim})
    found = read_lora(gate(alpha=None), metadata, sizes("krea2"))
    assert found.modules["blocks.0.attn.gate"].scale == 1
    assert any("of 0 stands for the rank" in note for note in found.notes)


def test_kohyas_dimension_may_be_none():
    found = read_lora(gate(alpha=None), {"ss_network_alpha": "6", "ss_network_dim": "None"}, sizes("krea2"))
    assert found.modules["blocks.0.attn.gate"].scale == 2


def test_a_lost_lora_b_beside_pairs_is_no_full_change():
    """At rank 256 its lora_A has the weight's own shape, and once became dW in silence."""
    up = "diffusion_model.blocks.0.mlp.up"
    shape = sizes("krea2").shape("blocks.0.mlp.up")
    pair = {f"{up}.lora_A.weight": torch.randn(3, shape[1]), f"{up}.lora_B.weight": torch.randn(shape[0], 3)}
    lone = {f"{GATE}.lora_A.weight": torch.randn(256, 256)}
    refused(pair | lone, BrokenModuleError, r"gate has a lora_A\.weight of the weight's own shape .* was it lost\?")
    # Alone, or beside what is spelled otherwise, it is ai-toolkit's full rank.
    assert read_lora(lone, {}, sizes("krea2")).modules["blocks.0.attn.gate"].shape == (256, 256)
    other = {f"{up}.diff": torch.randn(shape)}
    assert len(read_lora(lone | other, {}, sizes("krea2")).modules) == 2


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "complex64", "bool"])
def test_an_alpha_that_is_no_number_is_one_error(name):
    """torch has dtypes that it cannot convert, which was a NotImplementedError."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    alpha = torch.zeros(1, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(1, dtype=dtype)
    refused(
        gate(alpha=alpha), BrokenModuleError, f"gate.alpha is {name} .*; wanted one number; write it as one in fp32"
    )


def test_a_placeholder_of_no_numbers_is_one_error():
    only = ("blocks.1.attn.qkv",)
    state = write("krea2", lora(*A_B), "transformer.", "fused", only=only).state
    state |= write("krea2", lora(*A_B), "transformer.", "diffusers", only=only).state
    dtype = getattr(torch, "float4_e2m1fn_x2", torch.complex64)
    key = "transformer.transformer_blocks.1.attn.to_q.lora_A.weight"
    state[key] = torch.zeros(8, dtype=torch.uint8).view(dtype)
    refused(state, BrokenModuleError, "is there as one and as q, k, v apart")


@pytest.mark.parametrize("value", [1e200, -1e39])
def test_fp64_beyond_fp32_is_said_at_once(value):
    """It once failed as infinite after the comparison, with the advice to write fp32."""
    state = {f"{GATE}.diff": torch.full((256, 256), value, dtype=torch.float64)}
    refused(state, BrokenModuleError, r"values up to 1\.0e\+(200|39); wanted what fp32 can hold; it is broken")
    assert read_lora({f"{GATE}.diff": torch.full((256, 256), 1e38, dtype=torch.float64)}, {}, sizes("krea2")).modules


# --- files -----------------------------------------------------------------------------------------------------------


def header(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def pickled():
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    return buffer.getvalue()


KEY = f"{GATE}.lora_down.weight"
BAD = {
    "0 bytes": (b"", "is empty; wanted a safetensors file"),
    "3 bytes": (b"abc", "is no sound safetensors file"),
    "text": (b"this is no LoRA at all" * 10, "is no sound safetensors file"),
    "a pickle of torch": (pickled(), "is a pickle, which can run code"),
    "a bare pickle": (b"\x80\x04\x95\x00\x00", "is a pickle, which can run code"),
    "a header of 10 GB": (header(b"{}", length=10 * 2**30), "is no sound safetensors file"),
    "a tensor of 10 GB": (
        header({KEY: {"dtype": "F32", "shape": [2_500_000_000], "data_offsets": [0, 10_000_000_000]}}, b"1234"),
        "is no sound safetensors file",
    ),
    "a tensor cut off": (
        header({KEY: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, b"1234"),
        "is no sound safetensors file",
    ),
    "a dtype of its own": (
        header({KEY: {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
        "is no sound safetensors file",
    ),
    "metadata that is no text": (header({"__metadata__": {"a": 1}}), "is no sound safetensors file"),
    "a deep header": (header(b"[" * 100_000), "is no sound safetensors file"),
    "no tensors": (header({}), "has no tensors"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_error(tmp_path, what):
    data, match = BAD[what]
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(NotALoraError, match=match) as caught:
        open_lora(tmp_path / "a.safetensors")
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_one_error_wherever_it_is_cut(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(gate(), path)
    whole = path.read_bytes()
    for length in (1, 7, 8, 9, 50, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(NotALoraError, match="is no sound safetensors file"):
            open_lora(path)


def test_a_folder_a_missing_and_an_unreadable_file_are_one_error(tmp_path):
    with pytest.raises(NotALoraError, match="is a folder"):
        open_lora(tmp_path)
    with pytest.raises(NotALoraError, match=r"cannot be read \(No such file"):
        open_lora(tmp_path / "none.safetensors")
    if os.name == "posix" and os.geteuid() != 0:
        path = tmp_path / "a.safetensors"
        save_file(gate(), path)
        path.chmod(0)
        with pytest.raises(NotALoraError, match="cannot be read"):
            open_lora(path)


def test_a_base_model_is_refused_before_its_tensors_are_read(tmp_path):
    """Of 2 GiB, which the file has as a hole, none is read."""
    pytest.importorskip("resource")
    path = tmp_path / "base.safetensors"
    size = 2**31
    entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    with path.open("wb") as file:
        file.write(header({"blocks.0.attn.wq.weight": entry}))
        file.truncate(file.tell() + size)
    code = (
        "import resource, sys\n"
        "from graft_lora.lora_convert.reading import open_lora\n"
        "from graft_lora.lora_convert.errors import NotALoraError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: open_lora(sys.argv[1])\n"
        "except NotALoraError as error: assert 'base model' in str(error)\n"
        "else: raise SystemExit('was read')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    run = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    assert int(run.stdout) * 1024 < 100e6


# --- anything at all -------------------------------------------------------------------------------------------------

ENDINGS = [
    ".lora_A.weight", ".lora_B.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora_up.weight", ".lora_A",
    "_lora.up.weight", ".lora.down.weight", ".alpha", ".dora_scale", ".magnitude", ".lora_magnitude_vector", ".diff",
    ".diff_b", ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b", ".lokr_w1_a", ".lokr_w1_b", ".lokr_t2", ".hada_w1_a",
    ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".oft_blocks", ".weight", ".bias", "",
]  # fmt: skip
NAMES = [name for family in MODULES.values() for pair in family.values() for names in pair for name in names] + [
    "transformer_blocks.1.attn.to_qkv",
    "blocks.0.prenorm.scale",
    "layers.0.attention_norm1",
    "blocks.9999.attn.wq",
]
PREFIXES = ["", "transformer.", "diffusion_model.", "base_model.model.", "lora_unet_", "lycoris_", "lora_te_", "model."]

words = st.text(max_size=12)
keys = st.one_of(
    st.builds(
        lambda prefix, name, flat, ending: prefix + (name.replace(".", "_") if flat else name) + ending,
        st.sampled_from(PREFIXES), st.sampled_from(NAMES), st.booleans(), st.sampled_from(ENDINGS),
    ),
    st.builds(lambda a, b, ending: a + b + ending, st.sampled_from(PREFIXES), words, st.sampled_from(ENDINGS)),
    words,
)  # fmt: skip
shapes = st.one_of(
    st.sampled_from([(), (1,), (256,), (3, 256), (256, 3), (128, 3), (2, 2), (256, 256), (1, 256), (256, 1), (0, 3)]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
values = st.sampled_from([0.0, 1.0, -1.0, 0.5, math.nan, math.inf, 3e38])
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32,
     torch.bool, torch.uint8, torch.complex64]
)  # fmt: skip
tensors = st.builds(lambda shape, value, dtype: full(shape, value, dtype), shapes, values, dtypes)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
fields = ["r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "transformer.r", "transformer.lora_alpha",
          "transformer.alpha_pattern"]  # fmt: skip
headers = st.dictionaries(
    st.sampled_from(
        ["lora_adapter_metadata", "lora_alpha", "lora_rank", "ss_network_alpha", "ss_network_dim", "graft", "software"]
    ),
    st.one_of(words, st.dictionaries(st.sampled_from(fields), anything, max_size=4).map(json.dumps)),
    max_size=3,
)


def full(shape, value, dtype):
    if not dtype.is_floating_point and not dtype.is_complex:
        value = 0.0 if not math.isfinite(value) or abs(value) > 1 else abs(value)
    return torch.full(shape, value).to(dtype)


def is_read_or_one_error(state, metadata, family, skip):
    """Any exception but `LoraError` fails the test by itself."""
    message = ""
    try:
        found = read_lora(state, metadata, sizes_of[family] if family else None, skip_unknown=skip)
    except LoraError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    assert message or found.modules or found.biases or found.notes


sizes_of = {family: sizes(family) for family in MODULES}


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    st.dictionaries(keys, tensors, max_size=6), headers, st.sampled_from(["krea2", "ideogram4", None]), st.booleans()
)
@example(gate(), {"lora_adapter_metadata": "{"}, "krea2", False)
def test_any_keys_and_header_are_read_or_one_error(state, metadata, family, skip):
    is_read_or_one_error(state, metadata, family, skip)


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.data())
def test_a_sound_file_with_one_thing_changed_is_read_or_one_error(data):
    """Nearer to what happens: most of the file is right."""
    family = data.draw(st.sampled_from(list(SOUND)))
    state, metadata = dict(data.draw(st.sampled_from(SOUND[family]))), {}
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(state)))
        tensor = state.pop(key)
        match data.draw(st.integers(0, 4)):
            case 0:
                state[data.draw(keys)] = tensor
            case 1:
                state[key] = data.draw(tensors)
            case 2:
                state[key.replace(".", "_", data.draw(st.integers(1, 4)))] = tensor
            case 3:
                position = data.draw(st.integers(0, len(key)))
                state[key[:position] + data.draw(words) + key[position:]] = tensor
            case 4:
                metadata = data.draw(headers)
        if not state:
            break
    is_read_or_one_error(state, metadata, family, data.draw(st.booleans()))


ONLY = ("blocks.1.attn.qkv", "blocks.0.attn.gate", "layers.1.attention.qkv")
SOUND = {
    family: [
        write(family, kind, prefix, naming, flat, only=ONLY).state
        for kind in (lora(*A_B), lora(".lora_down.weight", ".lora_up.weight", alpha=1.0), lokr(rank=2), loha())
        for prefix, naming, flat in (("transformer.", "fused", False), ("lora_unet_", "official", True))
    ]
    for family in MODULES
}


def test_a_header_length_that_begins_like_a_pickle_is_no_pickle(tmp_path):
    """One file in 256 has 0x80 as the low byte of its header's length."""
    state = {"diffusion_model.blocks.0.attn.wq.lora_A.weight": torch.zeros(1, 1)}
    path = tmp_path / "a.safetensors"
    for padding in range(512):
        save_file(state, path, {"x": "y" * padding})
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    assert open_lora(path)[0].keys() == state.keys()
