"""The demonstration: a tiny base learns a thing that it has never seen, from pictures in a folder."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

from ..trainer import adapters
from ..trainer.errors import SettingsError
from ..trainer.evaluate import held_out_loss
from ..trainer.families import FAMILIES, Family
from ..trainer.lora_settings import LoraSettings
from ..trainer.pictures import pixels_of
from ..trainer.preflight import check_output
from ..trainer.run import RunResult, run
from ..trainer.samples import Encoders, Sample
from ..trainer.settings import DatasetSettings, ModelSettings, PreviewSettings, RunSettings, TrainSettings
from .demo_parts import base_path, encoders
from .shapes import SIZE, Picture, draw_known, draw_zorb

ZORBS, KNOWN = 20, 100  # pictures of the concept, and of known things beside them
HELD_OUT = 48
LORA = LoraSettings(rank=8, alpha=8, targets="all")
TRAIN = TrainSettings(
    steps=900,
    batch_size=8,
    learning_rate=3e-3,
    schedule="cosine",
    timesteps="uniform",
    checkpointing=False,
    save_every=0,
)
PROMPTS = (
    "a large zorb on a navy background",
    "a small zorb on a grey background",
    "a large zorb on a brown background",
    "a large red circle on a grey background",
    "a large blue cross on a black background",
)


def demo(family_name: str, output: Path | None = None, steps: int | None = None) -> RunResult:
    """Draws the pictures, trains the LoRA, and prints what it gained and what it cost."""
    if family_name not in FAMILIES:
        raise SettingsError(f"family {family_name!r} is not known; choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[family_name]
    started = time.perf_counter()
    folder = (output or unused(Path("runs") / f"demo-{family.name}")).resolve()
    settings = demo_settings(family, folder)
    check_output(settings)
    if steps is not None:
        settings = dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=steps))
    parts = encoders(family)
    print(f"{family.title}'s architecture at demonstration size: {base_path(family).name}")
    print(f"drawing {ZORBS + KNOWN} captioned pictures into {shown(folder_of(folder))}")
    pictures = folder_of(folder)
    draw_folder(pictures, seed=0)
    result = run(settings, parts)
    zorbs, known = held_out(family, parts)
    print(f"\n{'held-out loss':<30}{'base':>8}{'with LoRA':>11}{'change':>9}")
    for label, samples in (("zorb, never seen by the base", zorbs), ("what the base knew", known)):
        before, after = (loss_with(result, adapter, samples) for adapter in (None, result.name))
        print(f"{label:<30}{before:>8.3f}{after:>11.3f}{after / before - 1:>+9.0%}")
    print(f"\nLoRA           {shown(result.lora)}")
    print(f"before / after {shown(result.folder / 'preview.png')}")
    print(f"loss plot      {shown(result.folder / 'loss.png')}")
    print(f"done in {time.perf_counter() - started:.0f} s")
    return result


def shown(path: Path) -> Path:
    """A path as it is best read: relative where it lies below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def loss_with(result: RunResult, adapter: str | None, samples: list[Sample]) -> float:
    """Held-out loss with the named adapter, or of the bare base."""
    with adapters.active(result.base.model, adapter):
        return held_out_loss(result.base.model, result.base.family, samples)


def folder_of(output: Path) -> Path:
    """The demonstration's pictures stand beside the run, whose own folder must be empty."""
    return output.with_name(f"{output.name}-pictures")


def demo_settings(family: Family, output: Path) -> RunSettings:
    return RunSettings(
        output=str(output),
        name=f"zorb-{family.name}",
        model=ModelSettings(path=str(base_path(family)), precision="fp32", compute_dtype="fp32"),
        dataset=DatasetSettings(pictures=str(folder_of(output)), encoders="demo", resolution=SIZE, flip=True),
        lora=LORA,
        train=TRAIN,
        preview=PreviewSettings(prompts=PROMPTS, guidance=2.5, steps=24, every=0),
    )


def draw_folder(folder: Path, seed: int, zorbs: int = ZORBS, known: int = KNOWN) -> None:
    """A folder as a user would bring it: PNG files with a caption beside each. A folder that is there is left alone."""
    if folder.exists():
        raise SettingsError(f"{folder} exists already; nothing there is overwritten")
    folder.mkdir(parents=True)
    rng = random.Random(1000 + seed)
    for name, draw, count in (("zorb", draw_zorb, zorbs), ("known", draw_known, known)):
        for index in range(count):
            picture: Picture = draw(rng)
            picture.image.save(folder / f"{name}-{index:02}.png")
            (folder / f"{name}-{index:02}.txt").write_text(picture.caption + "\n", encoding="utf-8")


def held_out(family: Family, parts: Encoders, seed: int = 99) -> tuple[list[Sample], list[Sample]]:
    """Pictures of the concept, and of what the base knows, that no run trains on."""
    rng = random.Random(seed)
    groups = []
    for draw in (draw_zorb, draw_known):
        groups.append([encode(draw(rng), parts, f"{draw.__name__}-{index}") for index in range(HELD_OUT)])
    return groups[0], groups[1]


def encode(picture: Picture, parts: Encoders, name: str) -> Sample:
    latents = parts.picture(pixels_of(picture.image))[0]
    return Sample(name, picture.caption, latents, parts.text(picture.caption))


def unused(folder: Path) -> Path:
    """The folder, or with the first number after it that no run has taken."""
    candidate, number = folder, 1
    while candidate.exists() or folder_of(candidate).exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
