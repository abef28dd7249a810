"""Graft's host without ComfyUI: the same functions, on tiny bases and encoders made of arithmetic."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import tiny
import torch
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.checkpoints import open_model_file
from graft_lora.trainer.devices import Memory
from graft_lora.trainer.errors import DatasetError, SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.preflight import check_variant
from graft_lora.trainer.samples import Encoders
from graft_lora.trainer.settings import ModelSettings


class Interrupted(BaseException):
    """ComfyUI's `InterruptProcessingException`, which is no `Exception` either."""


class Hosted:
    def __init__(self, settings):
        self.settings, self.file, self.base = settings, open_model_file(settings.path), None

    def load(self, checked):
        if self.base is None:
            self.base = load_base(self.file, checked.settings.model.precision, self.settings.compute_dtype)
        return self.base

    def guide(self, checked):
        return self.load(checked).model


class GraftPatcher:
    def __init__(self, hosted, shown=()):
        self.hosted, self.shown = hosted, tuple(shown)


class Progress:
    def __init__(self, total):
        self.steps, self.total = [], total

    def update(self, done, total=None, picture=None):
        self.steps.append((done, total, picture))


def make(folder: Path) -> ModuleType:
    """A host whose input, output and models are under `folder`."""
    host = ModuleType("graft_lora.nodes.host")
    for name in ("input", "output", "loras", "models"):
        (folder / name).mkdir()
    for name in tiny.NAMES:
        tiny.write(tiny.build(name), folder / "models" / f"{name}.safetensors")
    host.texts, host.bars, host.calls, host.interrupt = [], [], [], False
    host.finish = threading.Event()

    def load_base_model(
        path, precision, compute_dtype, allow_distilled, blocks_on_cpu, quantized_cache, eight_bit_compute
    ):
        settings = ModelSettings(
            str(path), "", precision, compute_dtype, "cpu", quantized_cache, allow_distilled, blocks_on_cpu,
            eight_bit_compute,
        )  # fmt: skip
        check_variant(open_model_file(path), allow_distilled)
        return GraftPatcher(Hosted(settings))

    def is_hosted(model):
        return isinstance(model, GraftPatcher)

    def hosted_base(model):
        if not is_hosted(model):
            raise SettingsError("the MODEL is not Graft's: connect 'Load Model for LoRA Training'")
        return model.hosted

    def encoders_of(vae, clip, family):
        def picture(pixels):
            side = family.latent_downscale
            small = torch.nn.functional.avg_pool2d(pixels, side)
            host.calls.append("picture")
            return small.mean(1, keepdim=True).expand(-1, family.latent_channels, -1, -1).clone()

        def text(caption):
            host.calls.append("text")
            generator = torch.Generator().manual_seed(sum(caption.encode()))
            return torch.randn(3 + len(caption.split()), clip.width, generator=generator)

        return Encoders(picture, text, decoder_of(vae, family), "vae", "clip")

    def decoder_of(vae, family):
        side = family.latent_downscale
        return lambda latents: latents[:, :3].repeat_interleave(side, 2).repeat_interleave(side, 3).clamp(-1, 1)

    def conditioning_tensor(conditioning, what, width=None):
        found = conditioning[0][0][0].clone()
        if width is not None and found.shape[1] != width:
            raise DatasetError(f"{what} has {found.shape[1]} features per token, the base wants {width}")
        return found

    @contextmanager
    def training(model, node_id, *guides):
        host.calls.append("training")
        with torch.enable_grad():
            yield host.finish
        host.calls.append("trained")

    def raise_interrupt():
        raise Interrupted

    def progress(node_id, total):
        host.bars.append(Progress(total))
        return host.bars[-1]

    def with_lora(model, lora, strength, name):
        shown = (*model.shown, (SimpleNamespace(name=name), strength))
        return GraftPatcher(model.hosted, shown), len(lora.modules), ["a.module"]

    def with_strength(model, strength):
        return GraftPatcher(hosted_base(model), [(token, strength) for token, _ in model.shown])

    def trained_model(model, adapter, strength=1.0):
        return GraftPatcher(model.hosted, [(SimpleNamespace(name=adapter), strength)])

    def lora_files():
        paths = sorted((folder / "loras").rglob("*.safetensors"))
        return [path.relative_to(folder / "loras").as_posix() for path in paths]

    for function in (
        load_base_model, hosted_base, is_hosted, encoders_of, decoder_of, conditioning_tensor, training,
        raise_interrupt, progress, with_lora, with_strength, trained_model, lora_files,
    ):  # fmt: skip
        setattr(host, function.__name__, function)
    host.stock_with_lora = lambda model, state, metadata, strength: ("stock", len(state) // 3, [])
    host.normalised_latents = lambda latents, family: 2 * latents.clone()
    host.memory = lambda: Memory(2**35, 2**34)
    host.device = lambda: "cpu"
    host.free_others = lambda *keep: host.calls.append("free_others")
    host.release = lambda *models: host.calls.append("release")
    host.option_notes = lambda: ["--lowvram does not bind Graft"]
    host.file_mark = lambda path: f"{path.stat().st_mtime_ns}"
    host.show_text = lambda node_id, words: host.texts.append(words)
    host.interrupted = lambda: host.interrupt
    host.finish_route = lambda: host.calls.append("route")
    host.model_files = lambda: [f"{name}.safetensors" for name in FAMILIES]
    host.model_path = lambda name: folder / "models" / name
    host.datasets = lambda: {path.name: path for path in (folder / "input").iterdir() if path.is_dir()}
    host.lora_path = lambda name: folder / "loras" / name
    host.lora_folders = lambda: [folder / "loras"]
    host.output_directory = lambda: folder / "output"
    return host
