"""LoRA files of Krea 2 and Ideogram 4. Needs torch and safetensors only."""

from .canonical import Canonical, Change, DiffModule, LohaModule, LokrModule, LoraModule, Split
from .files import atomic_file, read_state, write_state
from .layouts import FP32_PARTS, read_comfyui, write_comfyui, write_diffusers
from .tables import TABLES, Table

__all__ = [
    "FP32_PARTS",
    "TABLES",
    "Canonical",
    "Change",
    "DiffModule",
    "LohaModule",
    "LokrModule",
    "LoraModule",
    "Split",
    "Table",
    "atomic_file",
    "read_comfyui",
    "read_state",
    "write_comfyui",
    "write_diffusers",
    "write_state",
]
