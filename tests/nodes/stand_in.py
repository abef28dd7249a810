"""A small stand-in for the modules of ComfyUI that Graft's nodes touch, so that every node runs without ComfyUI.

Names, parameters and their order are ComfyUI's, which tests/comfyui/test_contract.py holds them to; only what Graft
uses is there, so that a use of anything else fails here first.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any


class Input:
    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, extra_dict=None, raw_link=None,
        advanced=None,
    ):  # fmt: skip
        self.id, self.optional, self.tooltip = id, optional, tooltip
        self.default = None

    def get_io_type(self):
        return self.Parent.io_type


class Output:
    def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
        self.id, self.display_name, self.tooltip = id, display_name, tooltip

    @property
    def io_type(self):
        return self.Parent.io_type


class BooleanInput(Input):
    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, label_on=None,
        label_off=None, socketless=None, force_input=None, extra_dict=None, raw_link=None, advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.default = default


class IntInput(Input):
    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, min=None, max=None,
        step=None, control_after_generate=None, display_mode=None, socketless=None, force_input=None, extra_dict=None,
        raw_link=None, advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.default, self.min, self.max = default, min, max


class FloatInput(Input):
    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, min=None, max=None,
        step=None, round=None, display_mode=None, gradient_stops=None, socketless=None, force_input=None,
        extra_dict=None, raw_link=None, advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.default, self.min, self.max = default, min, max


class StringInput(Input):
    def __init__(
        self, id, display_name=None, optional=False, tooltip=None, lazy=None, multiline=False, placeholder=None,
        default=None, dynamic_prompts=None, socketless=None, force_input=None, extra_dict=None, raw_link=None,
        advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.default, self.force_input = default, force_input


class ComboInput(Input):
    def __init__(
        self, id, options=None, display_name=None, optional=False, tooltip=None, lazy=None, default=None,
        control_after_generate=None, upload=None, image_folder=None, remote=None, socketless=None, extra_dict=None,
        raw_link=None, advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.options, self.default = options, default


class MultiTypeInput(Input):
    def __init__(
        self, id, types, display_name=None, optional=False, tooltip=None, lazy=None, extra_dict=None, raw_link=None,
        advanced=None,
    ):  # fmt: skip
        super().__init__(id, display_name, optional, tooltip)
        self.types = types

    def get_io_type(self):
        return ",".join(kind.io_type for kind in self.types)


class TemplatePrefix:
    def __init__(self, input, prefix, min=1, max=10):
        self.input, self.prefix, self.min, self.max = input, prefix, min, max


class AutogrowInput(Input):
    def __init__(self, id, template, display_name=None, optional=False, tooltip=None, lazy=None, extra_dict=None):
        super().__init__(id, display_name, optional, tooltip)
        self.template = template


def kind(io_type: str, input: type = Input, **more: Any) -> Any:
    """A socket type with its `Input` and `Output`."""
    made = SimpleNamespace(io_type=io_type, **more)
    made.Input = type("Input", (input,), {"Parent": made})
    made.Output = type("Output", (Output,), {"Parent": made})
    return made


def Custom(io_type):  # noqa: N802
    return kind(io_type)


class ControlAfterGenerate(StrEnum):
    fixed = "fixed"


class Hidden(StrEnum):
    unique_id = "UNIQUE_ID"


class Schema:
    def __init__(
        self, node_id, display_name=None, category="sd", inputs=(), outputs=(), hidden=(), description="",
        search_aliases=(), is_input_list=False, is_output_node=False,
    ):  # fmt: skip
        self.node_id, self.display_name, self.category = node_id, display_name, category
        self.inputs, self.outputs, self.hidden = list(inputs), list(outputs), list(hidden)
        self.description, self.search_aliases = description, list(search_aliases)
        self.is_input_list, self.is_output_node = is_input_list, is_output_node


class NodeOutput:
    def __init__(self, *args, ui=None, expand=None, block_execution=None):
        self.args, self.ui = args, ui

    def __getitem__(self, index):
        return self.args[index]


class ComfyNode:
    hidden: Any = None


class PreviewImage:
    def __init__(self, image, animated=False, cls=None):
        self.image = image


class PreviewText:
    def __init__(self, value):
        self.value = value


class ComfyExtension:
    async def on_load(self):
        """Called before the nodes are asked for."""

    async def get_node_list(self):
        raise NotImplementedError


def modules() -> dict[str, ModuleType]:
    """The stand-in's modules, by name."""
    io, ui = ModuleType("comfy_api.latest.io"), ModuleType("comfy_api.latest.ui")
    for name, io_type, input in (
        ("Boolean", "BOOLEAN", BooleanInput),
        ("Int", "INT", IntInput),
        ("Float", "FLOAT", FloatInput),
        ("String", "STRING", StringInput),
        ("Combo", "COMBO", ComboInput),
        ("MultiType", "COMFY_MULTITYPED_V3", MultiTypeInput),
        ("Model", "MODEL", Input),
        ("Vae", "VAE", Input),
        ("Clip", "CLIP", Input),
        ("Image", "IMAGE", Input),
        ("Latent", "LATENT", Input),
        ("Conditioning", "CONDITIONING", Input),
    ):
        setattr(io, name, kind(io_type, input))
    io.Autogrow = kind("COMFY_AUTOGROW_V3", AutogrowInput, TemplatePrefix=TemplatePrefix)
    for thing in (Custom, ControlAfterGenerate, Hidden, Schema, NodeOutput, ComfyNode):
        setattr(io, thing.__name__, thing)
    ui.PreviewImage, ui.PreviewText = PreviewImage, PreviewText
    latest = ModuleType("comfy_api.latest")
    latest.io, latest.ui, latest.ComfyExtension = io, ui, ComfyExtension
    api = ModuleType("comfy_api")
    api.latest = latest
    return {"comfy_api": api, "comfy_api.latest": latest}


def install(patch: Any, **more: ModuleType) -> None:
    """Puts the stand-in in the place of ComfyUI's modules, for as long as `patch` (a MonkeyPatch) lasts."""
    for name in [name for name in sys.modules if name.startswith("graft_lora.nodes.")]:
        patch.delitem(sys.modules, name)
    for name, module in {**modules(), **more}.items():
        patch.setitem(sys.modules, name, module)
