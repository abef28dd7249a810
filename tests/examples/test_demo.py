"""What a LoRA learns and what it costs, on the demonstration bases: the acceptance of the whole engine.

Fixed seeds, fixed noise, the family's own distribution of noise levels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
from pathlib import Path

import pytest
import tiny
import torch
from graft_lora.examples.demo import (
    KNOWN,
    LORA,
    PROMPTS,
    TRAIN,
    ZORBS,
    demo,
    demo_settings,
    draw_folder,
    folder_of,
    held_out,
)
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.examples.shapes import TRIGGER
from graft_lora.lora_convert import Sizes, convert_file, read_comfyui, read_state
from graft_lora.trainer import adapters
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.batches import Visit, collate
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.evaluate import held_out_loss
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.pictures import read_folder
from graft_lora.trainer.preflight import check
from graft_lora.trainer.run import read_dataset
from graft_lora.trainer.samples import encode_pictures
from PIL import Image

SEEDS = (0, 1, 2)
STEPS = 150  # of the demo's 900: enough for the claims below, and the suite has ten minutes
OTHER_WORD = "thing"  # another that the base has never seen, so that the captions differ in the trigger alone

# One worker trains a family's runs, so that none is trained twice.
FAMILY = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in tiny.NAMES]
RUNS = [pytest.param(name, seed, marks=pytest.mark.xdist_group(name)) for name in tiny.NAMES for seed in SEEDS]


def prepared(folder, name, seed, permuted=False, **train):
    """A base, its held-out pictures, and a session on the demonstration's pictures drawn with this seed."""
    family = FAMILIES[name]
    parts = encoders(family)
    settings = demo_settings(family, folder / f"{name}-{seed}")
    draw_folder(folder_of(folder / f"{name}-{seed}"), seed)
    samples = read_dataset(settings, check(settings, parts), parts, print)
    if permuted:
        samples = permute_captions(samples)
    base = load_base(settings.model.path, "fp32", "fp32")
    settings = dataclasses.replace(TRAIN, **{"steps": STEPS, "seed": seed, **train})
    session = TrainSession(base, samples, LORA, settings, "a")
    return base, parts, session


def permute_captions(samples):
    """Captions dealt out anew so that the concept's share is the same under its own captions as under the others."""
    concept = [s for s in samples if TRIGGER in s.caption]
    known = [s for s in samples if TRIGGER not in s.caption]
    kept = round(len(concept) ** 2 / len(samples))
    swapped = len(concept) - kept
    dealt = concept[:kept] + known[swapped:]
    for mine, other in zip(concept[kept:], known[:swapped], strict=True):
        dealt.append(dataclasses.replace(mine, caption=other.caption, conditioning=other.conditioning))
        dealt.append(dataclasses.replace(other, caption=mine.caption, conditioning=mine.conditioning))
    return dealt


def losses(base, samples):
    found = {}
    for label, adapter in (("before", None), ("after", "a")):
        with adapters.active(base.model, adapter):
            found[label] = held_out_loss(base.model, base.family, samples)
    return found["before"], found["after"]


def gain_of_the_trigger(base, parts, samples):
    """How much lower the loss on the concept is, in parts of itself, when the caption names it.

    At uniform noise levels: Ideogram 4's own, at 64 pixels, hardly reach those at which a caption decides anything.
    """
    nameless = []
    for sample in samples:
        caption = sample.caption.replace(TRIGGER, OTHER_WORD)
        nameless.append(dataclasses.replace(sample, caption=caption, conditioning=parts.text(caption)))
    with adapters.active(base.model, "a"):
        without, named = (
            held_out_loss(base.model, base.family, group, distribution="uniform") for group in (nameless, samples)
        )
    return 1 - named / without


@functools.cache
def of_the_base(name):
    """Losses of the base alone, on the concept and on what it knows."""
    base = load_base(base_path(FAMILIES[name]), "fp32", "fp32")
    return tuple(
        held_out_loss(base.model, base.family, group) for group in held_out(base.family, encoders(base.family))
    )


# No fixture of the module: xdist tears those down between two tests of one group.
@functools.cache
def trained(name, seed, permuted=False):
    """Trains a run: the losses with its LoRA on the concept and on what the base knew, and the trigger's gain."""
    with tempfile.TemporaryDirectory() as folder:
        base, parts, session = prepared(Path(folder), name, seed, permuted)
        with session:
            list(session.steps())
        session.check_trained()
        concept, known = held_out(base.family, parts)
        gain = gain_of_the_trigger(base, parts, concept)
        with adapters.active(base.model, "a"):
            return *(held_out_loss(base.model, base.family, group) for group in (concept, known)), gain


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_learns_the_concept_and_keeps_what_the_base_knew(name, seed):
    before, known_before = of_the_base(name)
    after, known_after, gain = trained(name, seed)
    print(
        f"\n| {FAMILIES[name].title} | {seed} | {before:.3f} → {after:.3f} ({after / before - 1:+.0%}) "
        f"| {known_before:.3f} → {known_after:.3f} ({known_after / known_before - 1:+.1%}) | {gain:.0%} |"
    )
    assert known_before < 0.5 * before, "the base knew the concept already"
    assert after <= 0.6 * before
    assert known_after < 1.1 * known_before
    assert gain > 0.03


@pytest.mark.parametrize("name", FAMILY)
def test_with_permuted_captions_the_trigger_gains_nothing(name):
    """The captions are what teaches: a trainer that mixes them up, as TrainLoraNode does, would pass the test above."""
    gain, true_gain = trained(name, 0, permuted=True)[-1], trained(name, 0)[-1]
    print(f"\n{FAMILIES[name].title}: naming the zorb gains {gain:.1%} with permuted captions, {true_gain:.1%} without")
    assert abs(gain) < 0.2 * true_gain


@pytest.mark.parametrize("name", FAMILY)
def test_learning_rate_zero_changes_no_loss(tmp_path, name):
    base, parts, session = prepared(tmp_path, name, 0, learning_rate=0.0, steps=3)
    with session:
        list(session.steps())
    for samples in held_out(base.family, parts):
        before, after = losses(base, samples[:8])
        assert before == after


@pytest.fixture(scope="session", params=FAMILY)
def demo_run(request, tmp_path_factory):
    """The demo command, short, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = demo(request.param, tmp_path_factory.mktemp("demo") / "run", steps=20)
    return result, printed.getvalue()


def test_demo_writes_all_that_it_names(demo_run):
    demo_result, printed = demo_run
    folder = demo_result.folder
    for path in (demo_result.lora, folder / "preview.png", folder / "loss.png"):
        assert str(path) in printed
    concept, _ = held_out(demo_result.base.family, encoders(demo_result.base.family))
    for adapter in (None, demo_result.name):
        with adapters.active(demo_result.base.model, adapter):
            assert f"{held_out_loss(demo_result.base.model, demo_result.base.family, concept):.3f}" in printed
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "log.jsonl", "loss.png", "preview.png", "state", demo_result.lora.name,
    }  # fmt: skip
    assert len(list(folder_of(folder).glob("*.png"))) == len(list(folder_of(folder).glob("*.txt"))) == ZORBS + KNOWN
    assert Image.open(folder / "preview.png").width > 100 * len(PROMPTS)
    assert len(demo_result.losses) == 20


def test_demo_lora_in_diffusers_own_loader_gives_the_output_of_the_live_adapter(demo_run, tmp_path):
    """Converted names, diffusers' pipeline loader, the mapped tiny model, every module of the adapter."""
    from diffusers.loaders.lora_pipeline import Ideogram4LoraLoaderMixin, Krea2LoraLoaderMixin

    demo_result, _ = demo_run
    base, family = demo_result.base, demo_result.base.family
    loader = {"krea2": Krea2LoraLoaderMixin, "ideogram4": Ideogram4LoraLoaderMixin}[family.name]
    file = open_model_file(base_path(family))
    path = tmp_path / "pytorch_lora_weights.safetensors"
    convert_file(demo_result.lora, path, "diffusers", sizes=Sizes.of(family.name, file.shapes))
    plain = family.build(file.config)
    plain.load_state_dict(dict(file.tensors()))
    twin = tiny.diffusers_twin(family.name, plain, file.config)
    state = loader.lora_state_dict(str(tmp_path), weight_name=path.name)
    loader.load_lora_into_transformer(state[0] if isinstance(state, tuple) else state, transformer=twin)
    adapted = {name for name, module in twin.named_modules() if hasattr(module, "lora_A")}
    modules = read_comfyui(read_state(demo_result.lora)[0])
    wanted = {member for name in modules for member in family.table.to_diffusers(name)}
    assert adapted == wanted

    parts = encoders(family)
    samples = encode_pictures(read_folder(folder_of(demo_result.folder))[:3], family, 64, parts)
    batch = collate(samples, [Visit(index, flipped=False, captioned=True) for index in range(3)], None)
    arguments = (batch.latents, torch.tensor([0.2, 0.5, 0.9]), batch.conditioning)
    with torch.no_grad(), adapters.active(base.model, demo_result.name):
        live = base.model(*arguments, batch.mask)
    with torch.no_grad(), adapters.active(base.model, None):
        bare = base.model(*arguments, batch.mask)
    with torch.no_grad():
        theirs = tiny.diffusers_velocity(family.name, twin, *arguments, batch.mask, file.config)
    assert tiny.relative(live, bare) > 0.01
    assert tiny.relative(theirs, live) < 1e-4
