"""The two sides of `stock_node.py`: ComfyUI's TrainLoraNode and Graft's session, on one base and the same pictures.

Both get the pictures as a LATENT, raw as a VAE gives them, and one CONDITIONING each, and run under inference mode, as
nodes do. Import nothing else of ComfyUI before `open_comfyui`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from graft_lora.examples.demo import encode
from graft_lora.examples.demo_parts import base_path, encoders
from graft_lora.examples.shapes import draw_zorb
from graft_lora.lora_convert import write_comfyui
from graft_lora.trainer import adapters
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import load_base
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.live_bytes import LiveBytes, tensors_of
from graft_lora.trainer.loop import TrainSession
from graft_lora.trainer.samples import Sample
from graft_lora.trainer.settings import TrainSettings
from measure import GFLOP, MIB, Flops
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
RANK, RATE, STEPS = 8, 5e-4, 8
SAME = {
    "training_dtype": "fp32", "lora_dtype": "fp32", "gradient_checkpointing": False, "steps": STEPS, "rank": RANK,
    "learning_rate": RATE,
}  # fmt: skip
LORA = LoraSettings(rank=RANK, alpha=float(RANK), targets="all")
State = dict[str, Tensor]


def open_comfyui() -> str:
    """Makes ComfyUI importable, on the CPU, and returns its version."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        sys.exit("COMFYUI_PATH is not set: set it to the folder of a ComfyUI, and use the Python that it runs on")
    if not (Path(path) / "comfy_extras" / "nodes_train.py").is_file():
        sys.exit(
            f"{path} has no comfy_extras/nodes_train.py: set COMFYUI_PATH to the folder of a ComfyUI 0.33 or newer"
        )
    sys.path.insert(0, path)
    arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--disable-api-nodes"]
    try:
        # It reads its arguments from the command line at import.
        import comfy.options

        comfy.options.enable_args_parsing(True)
        import comfy.model_base
        import comfyui_version
    finally:
        sys.argv = arguments
    comfy.utils.set_progress_bar_enabled(False)
    return comfyui_version.__version__


def pictures(name: str, count: int = 4) -> list[Sample]:
    """Zorbs of as many different captions, encoded for a family's demonstration base."""
    parts, rng, found = encoders(FAMILIES[name]), random.Random(0), {}
    while len(found) < count:
        picture = draw_zorb(rng)
        found.setdefault(picture.caption, encode(picture, parts, f"{len(found):02}"))
    return list(found.values())


def noise_pictures(name: str, cells: int) -> list[Sample]:
    """One picture of nothing, with so many latent cells a side."""
    like = pictures(name, 1)[0]
    latents = torch.randn(FAMILIES[name].latent_channels, cells, cells, generator=torch.Generator().manual_seed(0))
    return [Sample("noise", like.caption, latents, like.conditioning)]


def raw(name: str, samples: list[Sample]) -> Tensor:
    """LATENT's samples: (B, C, h, w), or (B, C, 1, h, w) for Krea 2, not normalised."""
    from graft_lora.nodes import host

    latent_format = host.latent_format(FAMILIES[name])
    latents = torch.stack([sample.latents for sample in samples])
    return latent_format.process_out(latents.unsqueeze(2) if latent_format.latent_dimensions == 3 else latents)


def stock_model(name: str, base: Path) -> Any:
    """ComfyUI's own MODEL of a base, in the file's dtype, which it can load again, as TrainLoraNode does."""
    import comfy.sd
    import comfy.utils

    path = str(base)
    dtype = next(iter(comfy.utils.load_torch_file(path).values())).dtype
    if name == "krea2":
        return comfy.sd.load_diffusion_model(path, model_options={"dtype": dtype})
    # Its loader knows Ideogram 4 at the published sizes alone: the tests' parts build the small one from its classes.
    spec = importlib.util.spec_from_file_location("graft_test_parts", ROOT / "tests/comfyui/parts/__init__.py")
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)

    def make(**_: Any) -> Any:
        return parts.stock_model(comfy.utils.load_torch_file(path), dtype)

    model = make()
    model.cached_patcher_init = (make, ())
    return model


class Stock:
    """ComfyUI's TrainLoraNode on a family's demonstration base, or on another one."""

    def __init__(self, name: str, base: Path | None = None) -> None:
        self.name = name
        self.model = stock_model(name, base or base_path(FAMILIES[name]))

    def train(self, *given: Any, **changes: Any) -> State:
        """The LoRA alone of what `outputs` gives."""
        return self.outputs(*given, **changes)[0]

    def outputs(
        self, samples: list[Sample] | None = None, latents: list[Tensor] | None = None, **changes: Any
    ) -> tuple[State, dict[str, list[float]], int]:
        """LoRA, losses and steps as the node returns them, its other inputs being its defaults, `SAME` and `changes`.

        Args:
            samples: pictures, those of `pictures` by default.
            latents: one LATENT for each entry, in place of a single one of all samples.
            changes: inputs of the node.
        """
        from comfy_extras.nodes_train import TrainLoraNode

        samples = samples or pictures(self.name)
        inputs = {entry.id: getattr(entry, "default", None) for entry in TrainLoraNode.define_schema().inputs}
        given = latents or [raw(self.name, samples)]
        wanted = {key: [value] for key, value in {**inputs, **SAME, **changes}.items()} | {
            "model": [self.model],
            "latents": [{"samples": entry} for entry in given],
            "positive": [[[sample.conditioning[None], {"pooled_output": None}]] for sample in samples],
        }
        with torch.inference_mode():
            return TrainLoraNode.execute(**wanted).result


class Graft:
    """Graft's session on the same base; each `session` trains an adapter of its own."""

    def __init__(self, name: str, **how: Any) -> None:
        self.family = FAMILIES[name]
        self.base = load_base(base_path(self.family), "fp32", "fp32", **how)
        self.count = 0

    def session(self, samples: list[Sample] | None = None, **train: Any) -> TrainSession:
        """A session with the rank, rate, steps and targets of the other side."""
        self.count += 1
        settings = {"steps": STEPS, "learning_rate": RATE, "warmup_steps": 0, "checkpointing": False, **train}
        samples = samples or pictures(self.family.name)
        return TrainSession(self.base, samples, LORA, TrainSettings(**settings), f"a{self.count}")

    def train(self, *given: Any, **settings: Any) -> TrainSession:
        """The session after its steps."""
        with torch.inference_mode(), self.session(*given, **settings) as session:
            list(session.steps())
        return session

    def untrained(self, session: TrainSession) -> tuple[int, int]:
        """How many layers have learned nothing, and of how many."""
        layers = adapters.adapted(self.base.model, session.name).values()
        return sum(not layer.zero_at_start(session.name).any() for layer in layers), len(layers)

    def file(self, session: TrainSession) -> State:
        """What the session's LoRA file would hold."""
        return write_comfyui(adapters.to_canonical(self.base.model, session.name))


@contextmanager
def watched(owner: Any, name: str, before: Callable[..., None] | None = None, after: Any = None) -> Iterator[None]:
    """While it lasts `before` sees the arguments of a method, and `after` its result and those."""
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        result = original(*arguments, **named)
        if after is not None:
            after(result, *arguments, **named)
        return result

    with patch.object(owner, name, call):
        yield


class Step(NamedTuple):
    """What one step takes: GFLOP, and MiB at its peak above what was alive before."""

    gflop: float
    peak: float


def step_of_node(run: Callable[[], object]) -> Step:
    """Of the node's forward and backward pass, in a run of one step.

    The node trains a copy of the model that it loads meanwhile: its weights are alive before.
    """
    from comfy_extras.nodes_train import TrainSampler

    counts: list[tuple[float, int]] = []
    with LiveBytes() as live, Flops() as flops:

        def before(*_: Any, **__: Any) -> None:
            live.reset()
            counts.append((flops.total, live.now))

        with watched(TrainSampler, "fwd_bwd", before, lambda *_, **__: counts.append((flops.total, live.peak))):
            run()
    (none, alive), (total, peak) = counts
    return Step((total - none) / GFLOP, (peak - alive) / MIB)


def step_of_graft(session: TrainSession) -> Step:
    """Of the second step of a new session, the weights not counted."""
    with session, LiveBytes(elsewhere=tensors_of(session.base.model)) as live, Flops() as flops:
        session.step()
        live.reset()
        none, alive = flops.total, live.now
        session.step()
    return Step((flops.total - none) / GFLOP, (live.peak - alive) / MIB)


def change(lora: State) -> State:
    """What a LoRA file's state adds to each weight: alpha / rank · up · down."""
    found = {}
    for key, up in lora.items():
        if key.endswith(".lora_up.weight"):
            module, down = key.removesuffix(".lora_up.weight"), lora[key.replace("lora_up", "lora_down")]
            found[module] = lora[f"{module}.alpha"].float() / len(down) * (up.float() @ down.float())
    return found


def size(values: State) -> float:
    """Euclidean norm over all of them."""
    return sum(float(value.double().square().sum()) for value in values.values()) ** 0.5


def difference(one: State, other: State) -> float:
    """Norm of the difference as a share of the second's norm."""
    return size({key: one[key] - other[key] for key in other}) / size(other)


def weights_of(module: nn.Module) -> set[int]:
    """Where the base's own weights lie in memory, which may be parameters or buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {tensor.data_ptr() for name, tensor in named if not adapters.is_adapters_own(name)}
