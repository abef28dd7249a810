"""LoRA files of Krea 2 and Ideogram 4. Needs torch and safetensors only."""

from .canonical import Canonical, LoraModule
from .files import atomic_file, read_state, write_state
from .layouts import read_comfyui, write_comfyui, write_diffusers
from .tables import TABLES, Table

__all__ = [
    "TABLES",
    "Canonical",
    "LoraModule",
    "Table",
    "atomic_file",
    "read_comfyui",
    "read_state",
    "write_comfyui",
    "write_diffusers",
    "write_state",
]
