"""The text trunk run once: the identical loss, cached by all that it depends on, and out of the way meanwhile."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.batches import Visit, collate
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.evaluate import held_out_loss
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.samples import Cache, Sample
from graft_lora.trainer.settings import TrainSettings
from graft_lora.trainer.text_trunk import TextTrunk, is_frozen


def samples(name, lengths=(5, 5, 5)):
    generator = torch.Generator().manual_seed(4)
    return [
        Sample(
            f"{index}.png", f"caption {index}", torch.randn(*tiny.LATENTS[name], generator=generator),
            torch.randn(length, tiny.WIDTHS[name], generator=generator),
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


@pytest.fixture
def base_path(family_name, tmp_path):
    return tiny.write(tiny.build(family_name), tmp_path / "base.safetensors")


def losses(base, dataset, batch_size, dropout=0.0, empty=None):
    settings = TrainSettings(steps=4, batch_size=batch_size, learning_rate=1e-3)
    lora = LoraSettings(rank=2, alpha=2)
    with TrainSession(base, dataset, lora, settings, "a", dropout, empty) as session:
        return [log.loss for log in session.steps()]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_loss_is_identical(base_path, precision):
    compute = "fp32" if precision == "fp32" else "bf16"
    plain = losses(load_base(base_path, precision, compute), samples(tiny_family(base_path)), 1)
    base = load_base(base_path, precision, compute)
    trunk = TextTrunk(base, ["blocks.0.attn.wq"], "base")
    cached = trunk.samples(samples(base.family.name))
    assert all(sample.after_trunk for sample in cached)
    with trunk.parked():
        assert losses(base, cached, 1) == plain


def tiny_family(path):
    return open_model_file(path).family.name


def test_captions_of_unequal_length_in_one_batch_and_dropped_ones(base_path):
    """A padded batch attends under a mask, whose kernel rounds otherwise than the one without: equal to 1e-6."""
    base = load_base(base_path, "fp32", "fp32")
    name = base.family.name
    empty = None if base.family.image_only_pass else samples(name)[0].conditioning[:2]
    plain = losses(base, samples(name, (3, 7, 5)), 3, 0.5, empty)
    base = load_base(base_path, "fp32", "fp32")
    trunk = TextTrunk(base, [], "base")
    cached = losses(
        base, trunk.samples(samples(name, (3, 7, 5))), 3, 0.5, None if empty is None else trunk.tokens(empty)
    )
    assert max(abs(a - b) / b for a, b in zip(cached, plain, strict=True)) < 1e-6


def test_the_output_does_not_depend_on_the_padding_that_a_batch_adds(family_name):
    model, (short, long, _) = tiny.build(family_name).eval(), samples(family_name, (3, 7, 5))
    batch = collate([short, long], [Visit(0, False, True), Visit(1, False, True)], None)
    together = model.encode_text(batch.conditioning, batch.mask)
    # Two attention kernels differ by 4e-7, three eps of fp32, and by more on another CPU; were padding attended to, it
    # would be 0.3.
    assert tiny.relative(together[0, :3], model.encode_text(short.conditioning[None])[0]) < 1e-5


def test_trained_where_an_adapter_reaches_it(base_path):
    base = load_base(base_path, "fp32", "fp32")
    family, linears = base.family, adapters.linears(base.model)
    for targets, frozen in (("attention", True), ("attention+mlp", True), ("all", False)):
        chosen = adapters.resolve_targets(family, linears, LoraSettings(targets=targets))
        assert is_frozen(family, chosen) == frozen
    trunk = TextTrunk(base, list(linears), "base")
    dataset = samples(family.name)
    assert trunk.samples(dataset) == dataset
    before = next(base.model.get_submodule(family.text_trunk[-1]).buffers()).data_ptr()
    with trunk.parked():
        assert next(base.model.get_submodule(family.text_trunk[-1]).buffers()).data_ptr() == before


def test_the_trunk_is_all_that_the_text_runs_through(family_name):
    """`parked` moves these children away: were there another, or one too many, a GPU would say so in the first step."""
    model = tiny.build(family_name).eval()
    called = set()
    for name, child in model.named_children():
        child.register_forward_hook(lambda *_, name=name: called.add(name))
    arguments = tiny.inputs(family_name)
    text = model.encode_text(arguments["conditioning"], arguments["mask_BT"])
    trunk = set(FAMILIES[family_name].text_trunk)
    assert called == trunk
    called.clear()
    model(arguments["latents"], arguments["sigma_B"], mask_BT=arguments["mask_BT"], text=text)
    assert not called & trunk


def test_a_frozen_trunk_is_away_while_it_is_parked_and_comes_back(base_path, monkeypatch):
    base = load_base(base_path, "fp32", "fp32")
    trunk, moves = TextTrunk(base, [], "base"), []
    with monkeypatch.context() as patch:
        patch.setattr(TextTrunk, "_move", lambda self, device: moves.append(str(device)))
        with trunk.parked():
            assert moves == ["cpu"]
        assert moves == ["cpu", str(base.model.device)]
    trunk._move(torch.device("meta"))
    away = {name.split(".")[0] for name, tensor in base.model.state_dict().items() if tensor.is_meta}
    assert away == set(base.family.text_trunk)


def test_held_out_loss_is_measured_where_the_model_computes_and_not_where_its_trunk_waits(base_path):
    """Ideogram 4's first parameter is the trunk's: asked for the device, it would send everything to the CPU."""
    base = load_base(base_path, "fp32", "fp32")
    trunk = TextTrunk(base, [], "base")
    cached = trunk.samples(samples(base.family.name))
    trunk._move(torch.device("meta"))  # stands in for a place that is not the device
    assert 0 < held_out_loss(base.model, base.family, cached, draws=2) < 100


def test_conditioning_and_text_are_not_both_taken(family_name):
    model, arguments = tiny.build(family_name), tiny.inputs(family_name)
    with pytest.raises(ValueError, match="not both"):
        model(**arguments, text=arguments["conditioning"])


def test_the_cache_knows_base_precision_dtype_and_caption(base_path, tmp_path):
    base = load_base(base_path, "fp32", "fp32")
    sample = samples(base.family.name)[0]

    def made(base, base_id="one", sample=sample):
        trunk = TextTrunk(base, [], base_id, Cache(tmp_path / "cache"))
        trunk.samples([sample])
        return trunk.cache.made

    assert made(base) == 1
    assert made(base) == 0
    assert made(base, "another") == 1
    assert made(load_base(base_path, "bf16", "fp32")) == 1
    assert made(load_base(base_path, "fp32", "bf16")) == 1
    assert made(base, sample=dataclasses.replace(sample, conditioning=sample.conditioning + 1)) == 1
    assert made(base, sample=dataclasses.replace(sample, name="another.png")) == 0
