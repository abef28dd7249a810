"""Nodes for tests alone: the demonstration codec and words in the places of a VAE and a CLIP, and a stock model.

They stand in for downloads of many gigabytes; everything else in the tests' graphs is ComfyUI's or Graft's own.
"""

import comfy.latent_formats
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import folder_paths
import torch
from graft_lora.examples.demo_parts import Codec, TextEncoder
from graft_lora.trainer.checkpoints import read_shapes
from graft_lora.trainer.families import FAMILIES

FORMATS = {"krea2": comfy.latent_formats.Wan21, "ideogram4": comfy.latent_formats.Flux2}


def _patcher(module):
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(module, load_device=cpu, offload_device=cpu)


class Vae:
    """As ComfyUI's VAE: pictures (B, H, W, 3) in [0, 1], raw latents, with a frame axis for Krea 2."""

    def __init__(self, name):
        self.first_stage_model = Codec.load(FAMILIES[name])
        self.format, self.frames = FORMATS[name](), name == "krea2"
        self.patcher = _patcher(self.first_stage_model)

    def encode(self, pixels):
        latents = self.first_stage_model.encode(pixels[..., :3].movedim(-1, 1) * 2 - 1)
        return self.format.process_out(latents.unsqueeze(2) if self.frames else latents)

    def decode(self, samples):
        latents = self.format.process_in(samples)
        pictures = self.first_stage_model.decode(latents.squeeze(2) if latents.ndim == 5 else latents)
        return (pictures.movedim(1, -1) + 1) / 2


class Clip:
    """As ComfyUI's CLIP."""

    def __init__(self, width):
        self.cond_stage_model = torch.nn.Linear(1, width)
        torch.nn.init.ones_(self.cond_stage_model.weight)
        torch.nn.init.zeros_(self.cond_stage_model.bias)
        self.encoder = TextEncoder(width)
        self.layer_idx, self.tokenizer_options = None, {}
        self.patcher = _patcher(self.cond_stage_model)

    def tokenize(self, text, **_):
        return text

    def encode_from_tokens_scheduled(self, tokens, **_):
        return [[self.encoder(tokens)[None], {"pooled_output": None}]]

    def encode_from_tokens(self, tokens, return_pooled=False, return_dict=False, **_):
        cond = self.encoder(tokens)[None]
        return {"cond": cond, "pooled_output": None} if return_dict else (cond, None) if return_pooled else cond


class TestVae:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("VAE",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"family": (list(FAMILIES),)}}

    def make(self, family):
        return (Vae(family),)


class TestClip:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        files = folder_paths.get_filename_list("diffusion_models")
        return {"required": {"file": (files,), "wrong": ("BOOLEAN", {"default": False})}}

    def make(self, file, wrong):
        shapes = read_shapes(folder_paths.get_full_path_or_raise("diffusion_models", file))
        family = next(family for family in FAMILIES.values() if family.marker in shapes)
        return (Clip(family.conditioning_width(family.config(shapes)) + 8 * wrong),)


class TestStockModel:
    """A small base in ComfyUI's own transformer: its loader knows Ideogram 4 at its published sizes alone."""

    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"file": (folder_paths.get_filename_list("diffusion_models"),)}}

    def make(self, file):
        state = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("diffusion_models", file))
        return (stock_model(state),)


def stock_model(state, dtype=torch.float32):
    """ComfyUI's own model of these weights, in that dtype on the CPU, in its own patcher."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    family = next(family for family in FAMILIES.values() if family.marker in shapes)
    sizes = family.config(shapes)
    if family.name == "ideogram4":
        chosen = {
            "image_model": "ideogram4", "in_channels": sizes.patch_features, "num_layers": sizes.layers,
            "num_attention_heads": sizes.heads, "attention_head_dim": sizes.head_width, "intermediate_size": sizes.mlp,
            "adaln_dim": sizes.time_width, "llm_features_dim": sizes.text_features,
        }  # fmt: skip
        config = comfy.supported_models.Ideogram4({})
    else:
        chosen = {
            "image_model": "krea2", "features": sizes.width, "channels": family.latent_channels, "patch": 2,
            "layers": sizes.blocks, "heads": sizes.heads, "kvheads": sizes.kv_heads, "txtlayers": sizes.text_layers,
            "txtdim": sizes.text_width, "txtheads": sizes.text_heads, "txtkvheads": sizes.text_kv_heads,
            "tdim": sizes.time_features,
        }  # fmt: skip
        config = comfy.supported_models.Krea2({})
    config.unet_config = {**chosen, "dtype": dtype}
    config.manual_cast_dtype = None
    model = config.get_model(state, device="cpu")
    missing, unexpected = model.diffusion_model.load_state_dict(
        {k: v.to(dtype) for k, v in state.items()}, strict=False
    )
    assert not missing, missing
    assert not unexpected, unexpected
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model.eval(), cpu, cpu)


NODE_CLASS_MAPPINGS = {"TestVae": TestVae, "TestClip": TestClip, "TestStockModel": TestStockModel}
