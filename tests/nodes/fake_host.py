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
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.samples import Encoders
from graft_lora.trainer.settings import ModelSettings


class Interrupted(BaseException):
    """ComfyUI's `InterruptProcessingException`, which is no `Exception` either."""


class Hosted:
    def __init__(self, settings):
        self.settings, self.file, self.base = settings, open_model_file(settings.path), None

    def load(self, checked=None):
        if self.base is None:
            self.base = load_base(self.file, "bf16", self.settings.compute_dtype)
        return self.base


class Bar:
    def __init__(self):
        self.updates = []

    def update(self, done, total, picture=None):
        self.updates.append((done, total, picture))


def make(folder: Path) -> ModuleType:
    """A host whose input, output and models are under `folder`."""
    host = ModuleType("graft_lora.nodes.host")
    for name in ("input", "output", "loras", "models"):
        (folder / name).mkdir()
    for name in tiny.NAMES:
        tiny.write(tiny.build(name), folder / "models" / f"{name}.safetensors")
    host.texts, host.bars, host.calls, host.interrupt = [], [], [], False
    host.finish = threading.Event()

    def load_base_model(path, *, precision, compute_dtype, allow_distilled, blocks_on_cpu, quantized_cache):
        blocks = 0 if blocks_on_cpu == "auto" else blocks_on_cpu
        settings = ModelSettings(
            str(path), "", precision, compute_dtype, "cpu", quantized_cache, allow_distilled, blocks
        )
        return SimpleNamespace(hosted=Hosted(settings), adapters=())

    def hosted_base(model):
        if not is_hosted(model):
            raise SettingsError("the model is of another loader; use Load Model for LoRA Training")
        return model.hosted

    def is_hosted(model):
        return hasattr(model, "hosted")

    def encoders_of(vae, clip, family):
        def picture(pixels):
            side = family.latent_downscale
            small = torch.nn.functional.avg_pool2d(pixels, side)
            return small.mean(1, keepdim=True).expand(-1, family.latent_channels, -1, -1).clone()

        def text(caption):
            host.calls.append("text")
            generator = torch.Generator().manual_seed(sum(caption.encode()))
            return torch.randn(3 + len(caption.split()), clip.width, generator=generator)

        return Encoders(picture, text, decoder_of(vae, family), "vae", "clip")

    def decoder_of(vae, family):
        return lambda latents: latents[:, :3].repeat_interleave(family.latent_downscale, 2).repeat_interleave(
            family.latent_downscale, 3
        ).clamp(-1, 1)  # fmt: skip

    @contextmanager
    def training(model, node):
        host.calls.append("training")
        yield host.finish
        host.calls.append("trained")

    def raise_interrupt():
        raise Interrupted

    def progress(node, total):
        host.bars.append(Bar())
        return host.bars[-1]

    def with_lora(model, lora, strength, name):
        changed = SimpleNamespace(hosted=model.hosted, adapters=(*model.adapters, (name, strength)))
        return changed, len(lora.modules), ["blocks.9.attn.wq"]

    def lora_files():
        return sorted(path.relative_to(folder / "loras").as_posix() for path in (folder / "loras").rglob("*.safetensors"))

    for function in (
        load_base_model, hosted_base, is_hosted, encoders_of, decoder_of, training, raise_interrupt, progress, with_lora,
        lora_files,
    ):  # fmt: skip
        setattr(host, function.__name__, function)
    host.stock_with_lora = lambda model, state, metadata, strength: ("stock", len(state) // 3, [])
    host.with_strength = lambda model, strength: SimpleNamespace(
        hosted=model.hosted, adapters=tuple((name, strength) for name, _ in model.adapters)
    )
    host.trained_model = lambda model, name: SimpleNamespace(hosted=model.hosted, adapters=((name, 1.0),))
    host.conditioning_tensor = lambda conditioning, what: conditioning[0][0][0].clone()
    host.normalised_latents = lambda samples, family: samples.clone()
    host.memory = lambda: Memory(2**35, 2**34)
    host.device = lambda: "cpu"
    host.free_others = lambda keep: host.calls.append("free_others")
    host.release = lambda *models: host.calls.append("release")
    host.interrupted = lambda: host.interrupt
    host.show_text = lambda node, text: host.texts.append(text)
    host.finish_route = lambda: host.calls.append("route")
    host.model_files = lambda: [f"{name}.safetensors" for name in FAMILIES]
    host.model_path = lambda name: folder / "models" / name
    host.datasets = lambda: {path.name: path for path in sorted((folder / "input").iterdir()) if path.is_dir()}
    host.lora_path = lambda name: folder / "loras" / name
    host.lora_folders = lambda: [folder / "loras"]
    host.output_directory = lambda: folder / "output"
    return host
