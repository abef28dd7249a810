"""ComfyUI as the host: the only file that imports it.

A base stands in ComfyUI as a MODEL: ComfyUI's own class of the family (its sampling, conditioning and latent format)
around Graft's transformer. There is one such model for each loaded base. Every MODEL that goes out is a clone of it
that names the LoRAs which it shows, so that ComfyUI sees one model, and evicts it and brings it back as one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.ldm.common_dit
import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.quant_ops
import comfy.supported_models
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import args
from PIL import Image
from torch import Tensor, nn

from ..lora_convert import TABLES, LoraFile, Sizes, convert_state
from ..lora_convert.keys import sort_keys
from ..trainer.devices import Memory, host_memory
from ..trainer.errors import DatasetError, SettingsError, StoppedError, some
from ..trainer.families import Family
from ..trainer.samples import Encoders
from ..trainer.settings import AUTO, ModelSettings

if TYPE_CHECKING:
    # Imported where they are used: they need PEFT, which takes seconds that ComfyUI's start is not to wait for.
    from ..trainer.hosting import HostedBase, Shown

log = logging.getLogger(__name__)
management = comfy.model_management

# ComfyUI's names of the families' classes, in `supported_models` and `model_base`.
CLASSES = {"krea2": "Krea2", "ideogram4": "Ideogram4"}
SHOWN = "graft_adapters"  # in a MODEL's transformer options

REFUSED = (
    "this MODEL comes from Graft, which trains and samples its weights as they are stored, so that they cannot be "
    "patched, merged or saved as a model: add a LoRA with 'Load LoRA (any layout)', save one with 'Save LoRA'; for "
    "anything else load the model file with 'Load Diffusion Model'"
)


# --- the MODEL -------------------------------------------------------------------------------------------------------


class HostedTransformer(nn.Module):
    """The transformer as ComfyUI's samplers call it.

    It holds no parameters: the base is loaded when it is needed, and is moved by its `GraftPatcher` alone.
    """

    def __init__(self, hosted: HostedBase, dtype: torch.dtype, model: nn.Module) -> None:
        super().__init__()
        self.hosted, self.dtype = hosted, dtype
        self._model = weakref.ref(model)  # the one that it is part of
        self._told: set[str] = set()

    def _shown(self, options: Mapping[str, Any]) -> Shown:
        """LoRAs of the MODEL that is being sampled.

        The options tell them, but `DualModelGuider` gives its second model those of the first: where ComfyUI has noted
        whose turn it is, that MODEL is asked.
        """
        model = self._model()
        patcher = None if model is None else model.current_patcher
        return patcher.shown if isinstance(patcher, GraftPatcher) else options.get(SHOWN, ())

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        """What nodes that patch, merge or save weights ask first."""
        raise SettingsError(REFUSED)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        attention_mask: Tensor | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        **conditions: Any,
    ) -> Tensor:
        """Predicts the velocity, as ComfyUI's own transformers of both families do.

        Args:
            x: (B, C, h, w) or (B, C, 1, h, w), noisy latents of any size.
            timesteps: (B,), the share of noise.
            context: (B, T, W); None for the pass without text, where the family has one.
            attention_mask: (B, T), zero at padding.
            transformer_options: with the LoRAs to show under `graft_adapters`.
            conditions: anything else that a node has put in, which is refused.
        """
        options = dict(transformer_options or {})
        wrappers = comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timesteps, context, attention_mask, options, **conditions)

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None,
        attention_mask: Tensor | None,
        transformer_options: Mapping[str, Any],
        **conditions: Any,
    ) -> Tensor:
        family = self.hosted.file.family
        self._refuse(family, transformer_options, conditions)
        rows, columns = x.shape[-2:]
        frames = x.ndim == 5
        if frames and x.shape[2] != 1:
            raise SettingsError(f"{family.title} makes pictures, the latents have {x.shape[2]} frames; wanted 1")
        latents = x[:, :, 0] if frames else x
        multiple = family.latent_multiple
        if rows % multiple or columns % multiple:
            latents = comfy.ldm.common_dit.pad_to_patch_size(latents, (multiple, multiple))
        mask = None if attention_mask is None or context is None else attention_mask != 0
        shown = self._shown(transformer_options)
        out = self.hosted.velocity(latents, timesteps, context, mask, shown)[..., :rows, :columns]
        return out.unsqueeze(2) if frames else out

    def _refuse(self, family: Family, options: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
        """Raises for what would change the picture in a stock model and cannot here."""
        given = [name for name, value in conditions.items() if value is not None]
        patches = [
            f"{place} {name}"
            for place in ("patches", "patches_replace")
            for name, value in options.get(place, {}).items()
            if value
        ]
        for what in (*given, *patches):
            raise SettingsError(
                f"the MODEL from Graft ({family.title}) cannot take {what}, which a node has added; it would be left "
                "out: take that node out, or use the stock model with the saved LoRA"
            )
        if "optimized_attention_override" in options and "attention" not in self._told:
            self._told.add("attention")
            log.info("Graft computes attention itself: the attention that a node has chosen is not used")


class GraftPatcher(comfy.model_patcher.ModelPatcher):
    """A MODEL: ComfyUI's handle on a base, which moves it whole.

    Weights are not ComfyUI's to patch: what would do so is refused with one clear word.
    """

    @property
    def hosted(self) -> HostedBase:
        return self.model.diffusion_model.hosted

    @property
    def shown(self) -> Shown:
        """LoRAs that it shows, and their strengths."""
        return self.model_options["transformer_options"].get(SHOWN, ())

    def showing(self, shown: Shown) -> GraftPatcher:
        """A clone that shows these LoRAs."""
        clone = self.clone()
        clone.model_options["transformer_options"][SHOWN] = tuple(shown)
        return clone

    # --- memory

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        return self.hosted.bytes + sum(token.lora.bytes for token, _ in self.shown if token.lora is not None)

    def loaded_size(self) -> int:
        return self.hosted.bytes if self.hosted.on_device else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.hosted.on_device else self.offload_device

    def load(self, device_to: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self.hosted.load()
        self.model.device = self.load_device
        self.model.model_loaded_weight_memory = self.hosted.bytes
        for callback in self.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_LOAD):
            callback(self, self.load_device, 0, False, True)

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """All of it: a base is not cut up by ComfyUI, its blocks on the CPU are Graft's own."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.loaded_size()
            # Objects of the model, such as its sampling, may be patched; clones differ in that.
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            try:
                self.load(device_to)
            except BaseException:
                self.detach()
                raise
            return self.loaded_size() - before

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Nothing: it goes whole, which ComfyUI does next."""
        return 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        super().unpatch_model(None, unpatch_weights)
        if not unpatch_weights or device_to is None:
            return
        if self.hosted.in_use:
            log.info("Graft keeps its model where it is: it is training")
            return
        if torch.device(device_to) != self.load_device:
            self.hosted.to_host()
        self.model.device = self.current_loaded_device()

    def pre_run(self) -> None:
        """ComfyUI's note of whose turn it is.

        Raises:
            SettingsError: another MODEL of the same base is being sampled, and shows other LoRAs.
        """
        other = self.model.current_patcher
        if isinstance(other, GraftPatcher) and tuple(other.shown) != tuple(self.shown):
            raise SettingsError(
                "two MODELs of one Graft base with different LoRAs are sampled at once, which shows one of them twice: "
                "load the base a second time for the other"
            )
        super().pre_run()

    # --- what cannot be done

    def _refused(self, *_args: Any, **_kwargs: Any) -> Any:
        raise SettingsError(REFUSED)

    add_patches = _refused
    add_hook_patches = _refused
    add_weight_wrapper = _refused
    get_key_patches = _refused
    model_state_dict = _refused
    model_state_dict_for_saving = _refused
    patch_weight_to_device = _refused
    set_model_compute_dtype = _refused
    deepclone_multigpu = _refused
    state_dict_for_saving = _refused


def load_base_model(
    path: str | Path,
    precision: str = AUTO,
    compute_dtype: str = "bf16",
    allow_distilled: bool = False,
    blocks_on_cpu: int | str = AUTO,
    quantized_cache: str | Path | None = None,
    eight_bit_compute: bool | str = False,
) -> GraftPatcher:
    """A MODEL of a file, of which the header alone is read now: the weights follow when they are first needed.

    Raises:
        GraftError: the file is no base of a family, is a distilled one, or cannot be trained so on this machine.
    """
    from ..trainer.base_model import compute_dtype_of
    from ..trainer.checkpoints import open_model_file
    from ..trainer.hosting import HostedBase
    from ..trainer.preflight import check_variant

    settings = ModelSettings(
        path=str(path),
        precision=precision,
        compute_dtype=compute_dtype,
        device=device(),
        quantized_cache="" if quantized_cache is None else str(quantized_cache),
        allow_distilled=allow_distilled,
        blocks_on_cpu=blocks_on_cpu,
        eight_bit_compute=eight_bit_compute,
    )
    # The unconditional one of a pair can be sampled from too; a run on it is refused by its checks.
    file = open_model_file(path, unconditional=Path(path).is_file())
    check_variant(file, allow_distilled)
    hosted = HostedBase(settings, file, torch.device(settings.device), memory)
    config = getattr(comfy.supported_models, CLASSES[file.family.name])(
        {"image_model": file.family.name, "disable_unet_model_creation": True}
    )
    dtype = compute_dtype_of(compute_dtype)
    config.set_inference_dtype(dtype, None)
    with torch.inference_mode(False):
        model = config.get_model({}, "", device=torch.device("cpu"))
        model.diffusion_model = HostedTransformer(hosted, dtype, model)
    # Also with --highvram, which would leave it on the card for good: a run needs the card to itself.
    return GraftPatcher(model, load_device=hosted.place, offload_device=torch.device("cpu"))


def is_hosted(model: Any) -> bool:
    """Whether a MODEL is Graft's own."""
    return isinstance(model, GraftPatcher)


def hosted_base(model: Any) -> HostedBase:
    """The base of a MODEL from Graft.

    Raises:
        SettingsError: it is another MODEL.
    """
    if not is_hosted(model):
        raise SettingsError(
            "the MODEL is not Graft's: connect 'Load Model for LoRA Training', whose weights can be trained"
        )
    return model.hosted


# --- LoRAs on a MODEL ------------------------------------------------------------------------------------------------


def trained_model(model: GraftPatcher, adapter: str, strength: float = 1.0) -> GraftPatcher:
    """A MODEL that shows a trained adapter of its base beside what `model` shows.

    The adapter leaves the base when the last MODEL that shows it is gone.

    Args:
        model: from `load_base_model`.
        adapter: its name on the base.
        strength: what its change is multiplied by.
    """
    return model.showing((*model.shown, (model.hosted.token(adapter), strength)))


def with_strength(model: GraftPatcher, strength: float) -> GraftPatcher:
    """The same MODEL with another strength of the LoRA that was added to it last: the trained one, or one from a file.

    Raises:
        SettingsError: it shows none.
    """
    hosted_base(model)
    if not model.shown:
        raise SettingsError("this MODEL shows no LoRA: connect that of 'Train LoRA' or 'Load LoRA (any layout)'")
    *others, (last, _) = model.shown
    return model.showing((*others, (last, strength)))


def with_lora(
    model: GraftPatcher, lora: LoraFile, strength: float = 1.0, name: str = "LoRA"
) -> tuple[GraftPatcher, int, list[str]]:
    """A MODEL from Graft that shows one more LoRA, of any kind.

    Args:
        model: from `load_base_model`, or a clone of it.
        lora: as `read_lora` gives it for the base's sizes.
        strength: what its change is multiplied by.
        name: of the LoRA, for messages.

    Returns:
        The MODEL, how many modules of the base are changed, and the names of those that the base does not have.

    Raises:
        SettingsError: it is for the other family.
        LoraError: its q, k and v cannot be brought into the base's form.
    """
    from ..trainer.applied import AppliedLora
    from ..trainer.hosting import AdapterToken

    file = hosted_base(model).file
    if lora.family != file.family.name:
        raise SettingsError(f"{name} is a LoRA for {TABLES[lora.family].title}, the model is {file.family.title}")
    sizes = Sizes.of(file.family.name, file.shapes)
    with torch.inference_mode(False), torch.no_grad():
        applied, missing = AppliedLora.of(lora, sizes, lambda module: file.tensor(f"{module}.weight").float())
    return model.showing((*model.shown, (AdapterToken(name, applied), strength))), applied.count, missing


def stock_with_lora(
    model: Any, state: Mapping[str, Tensor], metadata: Mapping[str, str], strength: float = 1.0
) -> tuple[Any, int, list[str]]:
    """A stock MODEL with a LoRA of any kind and layout as ComfyUI's own patches.

    The LoRA is converted to ComfyUI's layout in memory.

    Returns:
        The MODEL, how many of its modules are patched, and keys, or modules, that were not taken.

    Raises:
        SettingsError: the MODEL is of neither family.
        LoraError: the LoRA cannot be read, or is for another base.
    """
    family = next(
        (name for name, kind in CLASSES.items() if isinstance(model.model, getattr(comfy.model_base, kind))), None
    )
    if family is None:
        raise SettingsError(
            f"the MODEL is {type(model.model).__name__}; wanted {' or '.join(CLASSES.values())}, whose LoRAs are read"
        )
    shapes = {name: tuple(weight.shape) for name, weight in model.model.diffusion_model.named_parameters()}
    found = sort_keys(state)
    left = [*found.unknown, *found.text_encoder]
    known = {key: tensor for key, tensor in state.items() if key not in left}

    def weight(module: str) -> Tensor:
        key = f"diffusion_model.{module}.weight"
        backup = model.backup.get(key)
        value = comfy.utils.get_attr(model.model, key) if backup is None else backup.weight
        if isinstance(value, comfy.quant_ops.QuantizedTensor):
            value = value.dequantize()
        return value.detach().float().cpu()

    converted, _, _ = convert_state(known, metadata, "comfyui", base=weight, sizes=Sizes.of(family, shapes))
    loaded = comfy.lora.load_lora(converted, comfy.lora.model_lora_keys_unet(model.model, {}), log_missing=False)
    clone = model.clone()
    taken = {_module(key) for key in clone.add_patches(loaded, strength)}
    wanted = {_module(key if isinstance(key, str) else key[0]) for key in loaded}
    return clone, len(taken), [*left, *sorted(wanted - taken)]


def _module(key: Any) -> str:
    name = key if isinstance(key, str) else key[0]
    return name.removesuffix(".weight").removesuffix(".bias")


# --- the device and its memory ---------------------------------------------------------------------------------------


def device() -> str:
    """The device that ComfyUI computes on, as torch names it."""
    place = management.get_torch_device()
    return str(place) if isinstance(place, torch.device) else str(torch.device(place))


def memory() -> Memory:
    """The device's memory; free is what there is once every other model has left it.

    What `--reserve-vram` keeps for others is left out.
    """
    place = management.get_torch_device()
    if management.is_device_cpu(place):
        return host_memory()
    free = management.get_free_memory(place)
    free += sum(entry.model_loaded_memory() for entry in _loaded() if entry.device == place)
    if args.reserve_vram is not None:
        free -= int(args.reserve_vram * 2**30)
    total = int(management.get_total_memory(place))
    return Memory(total, int(max(0, min(free, total))))


MEMORY_OPTIONS = ("lowvram", "novram", "gpu_only", "highvram")
SPEED_OPTIONS = ("use_sage_attention", "use_flash_attention", "fast")


def option_notes() -> list[str]:
    """What the user should know of the options that ComfyUI was started with, a line each."""
    notes = []
    if args.cpu:
        notes.append("ComfyUI was started with --cpu: everything is computed there, slowly")
    elif chosen := _chosen_options(MEMORY_OPTIONS):
        notes.append(f"{chosen} does not bind Graft: its memory plan decides how many blocks wait on the CPU")
    if chosen := _chosen_options(SPEED_OPTIONS):
        notes.append(f"{chosen} does not act on Graft's models: what is trained needs kernels with a backward")
    return notes


def _chosen_options(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(args, name, False))


def _loaded() -> list[Any]:
    return [entry for entry in management.current_loaded_models if entry.model is not None]


def free_others(*keep: Any) -> None:
    """Unloads every model of ComfyUI's but these and their clones."""
    _unload([entry for entry in _loaded() if any(model.is_clone(entry.model) for model in keep)])


def release(*models: Any) -> None:
    """Unloads these, such as a VAE and a CLIP, and their clones."""
    gone = [getattr(model, "patcher", model) for model in models]
    _unload([entry for entry in _loaded() if not any(model.is_clone(entry.model) for model in gone)])


def _unload(keep: list[Any]) -> None:
    """All but these."""
    for place in {entry.device for entry in _loaded()}:
        management.free_memory(1e30, place, keep_loaded=keep)
    management.soft_empty_cache(force=True)


@contextmanager
def training(model: GraftPatcher, node_id: str | None, *guides: GraftPatcher) -> Iterator[threading.Event]:
    """A run on the MODEL's base: gradients are on, inference mode is off, and ComfyUI cannot move the base meanwhile.

    `free_others` and `hosted_base(model).load(checked)` belong inside. Adapters of a run that fails are taken off the
    base. Afterwards all is as it was, also after an exception or a Stop.

    Args:
        model: from `load_base_model`.
        node_id: of the node that runs.
        guides: MODELs that previews are sampled with; they leave the device afterwards.

    Yields:
        An event that the node's button "Finish now" sets.
    """
    hosted = hosted_base(model)
    with ExitStack() as stack:
        for guide in guides:
            stack.callback(hosted_base(guide).to_host)
            stack.enter_context(hosted_base(guide).run())
        stack.callback(_known, model)
        stack.enter_context(hosted.run())
        yield stack.enter_context(finishing(node_id))


def _known(model: GraftPatcher) -> None:
    """Puts the base on ComfyUI's list of loaded models, which it may have left while it trained: else it would stay."""
    if model.hosted.on_device and not any(model.is_clone(entry.model) for entry in _loaded()):
        try:
            management.load_models_gpu([model], force_full_load=True)
        except Exception as error:  # the run's own error, which may be on its way, is the one to be seen
            log.warning("Graft: the base could not stay on the device after the run (%s)", error)
            model.hosted.to_host()


# --- interruption and progress ---------------------------------------------------------------------------------------


def interrupted() -> bool:
    """Whether the user has pressed Stop."""
    return bool(management.processing_interrupted())


def raise_interrupt() -> None:
    """Passes a Stop on to ComfyUI.

    Raises:
        InterruptProcessingException: always; it is no `Exception`.
    """
    management.interrupt_current_processing(False)
    raise management.InterruptProcessingException


class Progress:
    """A node's progress bar and its preview picture."""

    def __init__(self, node_id: str | None, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(total, node_id=node_id)

    def update(self, done: int, total: int | None = None, picture: Image.Image | None = None) -> None:
        """Shows how far it is, and a picture. A Stop is left for `interrupted` to tell, so that a run can end well."""
        preview = None if picture is None else ("JPEG", picture, 768)
        try:
            self._bar.update_absolute(done, total, preview)
        except management.InterruptProcessingException:
            management.interrupt_current_processing(True)


def show_text(node_id: str | None, words: str) -> None:
    """Shows words on a node."""
    server = _server()
    if server is not None and node_id is not None:
        server.send_progress_text(words, node_id)


def progress(node_id: str | None, total: int) -> Progress:
    """The bar of the node that is running."""
    return Progress(node_id, total)


def _server() -> Any:
    """ComfyUI's server; None where there is none, as in tests."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


FINISH = "/graft/finish"
_finishing: dict[str, threading.Event] = {}


@contextmanager
def finishing(node_id: str | None) -> Iterator[threading.Event]:
    """An event that the node's button "Finish now" sets, while the node runs."""
    event = threading.Event()
    if node_id is not None:
        _finishing[str(node_id)] = event
    try:
        yield event
    finally:
        if node_id is not None and _finishing.get(str(node_id)) is event:
            del _finishing[str(node_id)]


def finish(node_id: str) -> bool:
    """Asks a running node to end early with its outputs; whether there is such a one.

    The page knows a node in a subgraph by its own id alone, ComfyUI runs it as `id of the subgraph:its own`.
    """
    found = (event for name, event in _finishing.items() if name.rpartition(":")[2] == str(node_id))
    event = _finishing.get(str(node_id)) or next(found, None)
    if event is not None:
        event.set()
    return event is not None


def finish_route() -> None:
    """Lets the web page ask: POST /graft/finish with {"node_id": …}. Once, also where the pack is there twice."""
    server = _server()
    if server is None or any(getattr(route, "path", None) == FINISH for route in server.routes):
        return
    from aiohttp import web

    @server.routes.post(FINISH)
    async def _finish(request: Any) -> Any:
        given = await request.json()
        found = finish(str(given.get("node_id", "")))
        return web.json_response({"running": found}, status=200 if found else 404)


# --- encoders --------------------------------------------------------------------------------------------------------


def latent_format(family: Family) -> Any:
    """ComfyUI's latent format of a family: how its VAE's latents are normalised."""
    return getattr(comfy.supported_models, CLASSES[family.name]).latent_format()


def encoders_of(vae: Any, clip: Any, family: Family) -> Encoders:
    """ComfyUI's VAE and CLIP as the engine's encoders: ordinary tensors on the CPU in and out."""
    return Encoders(
        picture=lambda pixels: encode_picture(vae, family, pixels),
        text=lambda caption: encode_text(clip, caption),
        decode=decoder_of(vae, family),
        picture_id=f"comfyui {type(vae.first_stage_model).__name__} {weights_id(vae.first_stage_model)}",
        text_id=f"comfyui {type(clip.cond_stage_model).__name__} {clip_id(clip)}",
    )


def encode_picture(vae: Any, family: Family, pixels: Tensor) -> Tensor:
    """(1, 3, h, w) in [-1, 1] → (1, C, h', w') fp32 in the family's normalised space."""
    with torch.no_grad():
        latents = vae.encode((pixels.movedim(1, -1) + 1) / 2)
    return normalised_latents(latents, family)


def normalised_latents(latents: Tensor, family: Family) -> Tensor:
    """LATENT's samples (B, C, h, w) or (B, C, 1, h, w), raw as a VAE gives them → (B, C, h, w) fp32 on the CPU.

    Raises:
        DatasetError: several frames.
    """
    format = latent_format(family)
    with torch.inference_mode(False), torch.no_grad():
        latents = latents.detach().to("cpu", torch.float32, copy=True)
        if format.latent_dimensions == 3 and latents.ndim == 4:
            latents = latents.unsqueeze(2)
        latents = format.process_in(latents)
        if latents.ndim == 5:
            if latents.shape[2] != 1:
                raise DatasetError(f"the latents have {latents.shape[2]} frames; {family.title} is trained on pictures")
            latents = latents[:, :, 0]
        return latents.contiguous()


def decoder_of(vae: Any, family: Family) -> Any:
    """(1, C, h', w') in the family's normalised space → (1, 3, h, w) in [-1, 1].

    The VAE leaves the device afterwards, where a run that goes on needs the room. A Stop, which every layer of the VAE
    raises, comes out as a `StoppedError`, and `interrupted` still tells it: a run can save what it has.
    """
    format = latent_format(family)

    def decode(latents: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                given = latents.unsqueeze(2) if format.latent_dimensions == 3 else latents
                raw = format.process_out(given)
                pictures = vae.decode_tiled(raw) if _needs_tiles(vae, raw) else vae.decode(raw)
        except management.InterruptProcessingException:
            management.interrupt_current_processing(True)  # raising it has cleared it
            raise StoppedError("stopped while a picture was decoded") from None
        finally:
            release(vae)
        with torch.inference_mode(False):
            pictures = pictures.reshape(-1, *pictures.shape[-3:])[:1].detach().to("cpu", torch.float32, copy=True)
            return pictures.movedim(-1, 1) * 2 - 1

    return decode


def _needs_tiles(vae: Any, latents: Tensor) -> bool:
    """Whether a VAE needs more than is free to decode a picture at once.

    A run keeps its base on the card, so ComfyUI cannot make room; and where the driver lets a card overflow into main
    memory, as on Windows, decoding would not fail but take minutes.
    """
    needed = getattr(vae, "memory_used_decode", None)
    if needed is None or management.is_device_cpu(vae.device):
        return False
    tiled = needed(latents.shape, vae.vae_dtype) > management.get_free_memory(vae.device)
    if tiled:
        log.info("Graft: the preview is decoded in tiles, since there is no room to decode it at once")
    return tiled


def encode_text(clip: Any, caption: str) -> Tensor:
    """A caption's conditioning (T, W)."""
    with torch.no_grad():
        found = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
    return conditioning_tensor(found, f"the caption {caption[:40]!r}")


# What a CONDITIONING may have beside its tensor without meaning anything else for these families.
HARMLESS = {"pooled_output", "attention_mask"}


def conditioning_tensor(conditioning: Any, what: str, width: int | None = None) -> Tensor:
    """A CONDITIONING → (T, W) on the CPU, padding cut off.

    Args:
        conditioning: of one caption.
        what: it is, for messages.
        width: W that the base wants.

    Raises:
        DatasetError: it says more than a caption does, or was made by another text encoder.
    """
    if len(conditioning) != 1:
        raise DatasetError(f"{what} has {len(conditioning)} parts; wanted one caption: do not combine conditioning")
    tensor, extra = conditioning[0]
    more = [name for name, value in extra.items() if value is not None and name not in HARMLESS]
    if more:
        raise DatasetError(
            f"{what} has {some(more)}, which can be neither trained on nor previewed: connect a text encoder directly"
        )
    if tensor.ndim != 3 or tensor.shape[0] != 1:
        raise DatasetError(f"{what} is {list(tensor.shape)}; wanted [1, tokens, features] of one caption")
    if width is not None and tensor.shape[2] != width:
        raise DatasetError(
            f"{what} has {tensor.shape[2]} features per token, the base wants {width}: another text encoder, or a CLIP "
            "loaded as another type?"
        )
    mask = extra.get("attention_mask")
    with torch.inference_mode(False), torch.no_grad():
        rows = tensor[0].detach().to("cpu", copy=True)
        if mask is not None:
            rows = rows[mask.reshape(-1).to("cpu", copy=True) != 0]
        if not len(rows):
            raise DatasetError(f"{what} has no tokens")
        return rows.contiguous()


def weights_id(module: nn.Module) -> str:
    """A hash that tells one set of weights from another: names, shapes, dtypes and a few values of each tensor."""
    digest = hashlib.sha256()
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if not tensor.is_meta and tensor.numel():
                flat = tensor.detach().reshape(-1)
                chosen = flat[:: max(1, len(flat) // 16)].to("cpu", copy=True).contiguous()
                digest.update(chosen.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:24]


def clip_id(clip: Any) -> str:
    """`weights_id` of a CLIP, with what else its conditioning depends on."""
    parts = [weights_id(clip.cond_stage_model), repr(clip.layer_idx), repr(sorted(clip.tokenizer_options.items()))]
    if clip.patcher.patches:
        # Patches of a LoRA: what is encoded with them is not found again in another session.
        parts.append(str(clip.patcher.patches_uuid))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:24]


# --- folders ---------------------------------------------------------------------------------------------------------


def model_files() -> list[str]:
    """Names in the list of `diffusion_models`."""
    return list(folder_paths.get_filename_list("diffusion_models"))


def model_path(name: str) -> Path:
    """The file of a name in that list."""
    return Path(folder_paths.get_full_path_or_raise("diffusion_models", name))


def lora_files() -> list[str]:
    """Names in the list of `loras`."""
    return list(folder_paths.get_filename_list("loras"))


def lora_path(name: str) -> Path:
    """The file of a name in that list."""
    return Path(folder_paths.get_full_path_or_raise("loras", name))


def lora_folders() -> list[Path]:
    """Folders whose LoRAs ComfyUI lists."""
    return [Path(folder) for folder in folder_paths.get_folder_paths("loras")]


def output_directory() -> Path:
    """Where ComfyUI writes."""
    return Path(folder_paths.get_output_directory())


def datasets() -> dict[str, Path]:
    """Folders that can be datasets, by name: those in ComfyUI's input folder, and in its folders of datasets."""
    roots = [folder_paths.get_input_directory()]
    if "datasets" in folder_paths.folder_names_and_paths:
        roots += folder_paths.get_folder_paths("datasets")
    found: dict[str, Path] = {}
    for root in map(Path, roots):
        # Not `rglob`, which looks at every file too: ComfyUI asks several times for each graph.
        for place, folders, _ in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in (Path(place, name) for name in folders):
                found.setdefault(path.relative_to(root).as_posix(), path)
    return dict(sorted(found.items()))


def file_mark(path: Path) -> str:
    """Changes when the file is written anew."""
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"
