"""LoRA files of Krea 2 and Ideogram 4. Needs torch and safetensors only."""

from .canonical import Canonical, Change, DiffModule, LohaModule, LokrModule, LoraModule, Split, Trained
from .convert import LAYOUTS, Report, convert_file, convert_folder, convert_state
from .errors import LoraError
from .files import atomic_file, read_state, write_state
from .inspect import Inspection, inspect_file, inspect_state
from .layouts import FP32_PARTS, read_comfyui, write_comfyui
from .reading import LoraFile, open_lora, read_lora
from .sizes import Sizes
from .tables import TABLES, Table
from .writing import Written, gather, write_lora

__all__ = [
    "FP32_PARTS",
    "LAYOUTS",
    "TABLES",
    "Canonical",
    "Change",
    "DiffModule",
    "Inspection",
    "LohaModule",
    "LokrModule",
    "LoraError",
    "LoraFile",
    "LoraModule",
    "Report",
    "Sizes",
    "Split",
    "Table",
    "Trained",
    "Written",
    "atomic_file",
    "convert_file",
    "convert_folder",
    "convert_state",
    "gather",
    "inspect_file",
    "inspect_state",
    "open_lora",
    "read_comfyui",
    "read_lora",
    "read_state",
    "write_comfyui",
    "write_lora",
    "write_state",
]
