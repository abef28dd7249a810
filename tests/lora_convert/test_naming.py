"""Spelled names of modules, and their shapes."""

from __future__ import annotations

import pytest
import tiny
import torch
from graft_lora.lora_convert.errors import BrokenModuleError, CannotConvertError, NotALoraError
from graft_lora.lora_convert.naming import DIFFUSERS, OFFICIAL, locate, spell
from graft_lora.lora_convert.sizes import Sizes
from graft_lora.trainer.families import FAMILIES


def test_published_sizes_are_those_of_the_models(family_name):
    family = FAMILIES[family_name]
    with torch.device("meta"):
        model = family.build(family.published)
    found = Sizes.of(family_name, {name: tuple(p.shape) for name, p in model.named_parameters()})
    published = Sizes.published(family_name)
    assert dict(found.shapes) == dict(published.shapes)
    assert found.biases == published.biases


def test_q_k_and_v_are_cut_where_grouped_queries_have_them():
    """Thirds, as other converters cut, are wrong in Krea 2's blocks."""
    krea2, ideogram4 = Sizes.published("krea2"), Sizes.published("ideogram4")
    assert krea2.rows("blocks.27.attn.qkv") == (6144, 1536, 1536)
    assert krea2.shape("blocks.27.attn.qkv") == (9216, 6144)
    assert krea2.rows("txtfusion.refiner_blocks.1.attn.qkv") == (2560, 2560, 2560)
    assert ideogram4.rows("layers.33.attention.qkv") == (4608, 4608, 4608)
    assert ideogram4.shape("layers.33.attention.qkv") == (13824, 4608)


def test_a_block_beyond_the_last_is_an_error():
    with pytest.raises(BrokenModuleError, match=r"blocks\.28\.attn\.qkv is not in this Krea 2, which has 28 blocks"):
        Sizes.published("krea2").shape("blocks.28.attn.qkv")
    with pytest.raises(NotALoraError, match="no weight of Ideogram 4"):
        Sizes.of("ideogram4", {"blocks.0.attn.wq.weight": (8, 8)})


def place(family, name):
    """(module, member) of a name in a family."""
    found = [(p.module, p.member) for p in locate(name) if p.family == family]
    assert len(found) == 1, name
    return found[0]


def test_every_linear_of_the_models_is_found_dotted_and_flat(family_name):
    """Also those whose names have an underscore, which un-flattening by replacement breaks."""
    with torch.device("meta"):
        model = tiny.build(family_name)
        twin = tiny.diffusers_twin(family_name, model)
    for naming, root in ((OFFICIAL, model), (DIFFUSERS, twin)):
        linears = [name for name, module in root.named_modules() if isinstance(module, torch.nn.Linear)]
        assert len(linears) > 15
        places = [place(family_name, name) for name in linears]
        assert len(set(places)) == len(linears)
        for name, (module, member) in zip(linears, places, strict=True):
            assert place(family_name, name.replace(".", "_")) == (module, member)
            assert spell(family_name, module, member, naming) == name
            assert spell(family_name, module, member, naming, flat=True) == name.replace(".", "_")


@pytest.mark.parametrize(
    ("name", "module", "member"),
    [
        ("txtfusion_layerwise_blocks_1_attn_wq", "txtfusion.layerwise_blocks.1.attn.qkv", 0),
        ("layers_3_adaln_modulation", "layers.3.adaln_modulation", None),
        ("transformer_blocks_0_attn_to_qkv", "blocks.0.attn.qkv", None),
        ("text_fusion_refiner_blocks_1_attn_to_out_0", "txtfusion.refiner_blocks.1.attn.wo", None),
        ("transformer_blocks.5.attn.to_out", "blocks.5.attn.wo", None),
        ("layers_9_attention_to_out_0", "layers.9.attention.o", None),
        ("blocks.0.prenorm", "blocks.0.prenorm.scale", None),
        ("transformer_blocks.0.norm1", "blocks.0.prenorm.scale", None),
    ],
)
def test_names_of_the_field(name, module, member):
    assert [(place.module, place.member) for place in locate(name)] == [(module, member)]


@pytest.mark.parametrize(
    "name",
    ["", "blocks", "blocks.0", "blocks.00.attn.wq", "blocks.٣.attn.wq", "blocks.0.attn.to_q", "layers.0.attn.wq"],
)
def test_other_names_are_not_found(name):
    assert locate(name) == ()


def test_a_name_that_both_families_have_is_both():
    assert {place.family for place in locate("final_layer.linear")} == {"krea2", "ideogram4"}


def test_what_has_no_name_is_an_error():
    with pytest.raises(CannotConvertError, match="q, k and v of Krea 2 have no official name together; split them"):
        spell("krea2", "blocks.0.attn.qkv")
    with pytest.raises(CannotConvertError, match="q, k and v of Ideogram 4 have no official name alone; fuse them"):
        spell("ideogram4", "layers.0.attention.qkv", 1)
    assert spell("krea2", "blocks.0.attn.qkv", None, DIFFUSERS, flat=True) == "transformer_blocks_0_attn_to_qkv"
