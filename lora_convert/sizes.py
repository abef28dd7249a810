"""Shapes of both families' weights: the published ones, or those of another base's header."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from .errors import BrokenModuleError, NotALoraError
from .tables import TABLES, Table

Shape = tuple[int, ...]

# As published: ComfyUI 0.33 `comfy/ldm/krea2` and `comfy/ldm/ideogram4`, diffusers 0.42's configurations.
_KREA2_TEXT_BLOCKS = {"count": 2, "width": 2560, "kv_width": 2560, "head_width": 128, "mlp": 6912}
_NUMBERS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "krea2": {
        "": {"width": 6144, "latent_features": 64, "time_features": 256, "text_width": 2560, "text_layers": 12},
        # 48 query heads and 12 key/value heads of 128.
        "blocks.{}": {
            "count": 28, "width": 6144, "kv_width": 1536, "head_width": 128, "mlp": 16384, "modulation": 6 * 6144,
        },
        "txtfusion.layerwise_blocks.{}": _KREA2_TEXT_BLOCKS,
        "txtfusion.refiner_blocks.{}": _KREA2_TEXT_BLOCKS,
    },
    "ideogram4": {
        "": {"width": 4608, "patch_features": 128, "time_width": 512, "text_features": 53248},
        "layers.{}": {"count": 34, "width": 4608, "head_width": 256, "mlp": 12288, "time_width": 512},
    },
}  # fmt: skip
"""Family → numbered container (`""` for what stands in none) → the numbers that its shapes are made of."""


@dataclass(frozen=True)
class Sizes:
    """Shapes by official name.

    Attributes:
        family: the family's name.
        shapes: module, or parameter that is no module's `weight` → shape of the weight, (out, in) or that of a vector.
        biases: module → length of its bias.
    """

    family: str
    shapes: Mapping[str, Shape]
    biases: Mapping[str, int]

    @property
    def table(self) -> Table:
        return TABLES[self.family]

    @classmethod
    def published(cls, family: str) -> Sizes:
        """Those of the published weights."""
        return _published(family)

    @classmethod
    def of(cls, family: str, header: Mapping[str, Sequence[int]]) -> Sizes:
        """Those of a base.

        Args:
            family: the family's name.
            header: official parameter name → shape, unpacked; names of other things are passed over.

        Raises:
            NotALoraError: none of the names is the family's.
        """
        table = TABLES[family]
        shapes: dict[str, Shape] = {}
        biases: dict[str, int] = {}
        for name, shape in header.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and table.row(module):
                shapes[module] = tuple(shape)
            elif kind == "bias" and (row := table.row(module)) and row.bias:
                biases[module] = math.prod(shape)
            elif table.row(name):
                shapes[name] = tuple(shape)
        if not shapes:
            raise NotALoraError(f"the base has no weight of {table.title}; wanted its official names; give such a base")
        return cls(family, shapes, biases)

    def shape(self, module: str) -> Shape:
        """Of a module's weight; of q, k and v together for a joint name.

        Raises:
            BrokenModuleError: this model has no such module.
        """
        if module in self.shapes:
            return self.shapes[module]
        members = self.table.members(module)
        if members is None or not all(member in self.shapes for member in members):
            raise BrokenModuleError(
                f"{module} is not in this {self.table.title}{self._counted(module)}; is the LoRA for another base?"
            )
        found = [self.shapes[member] for member in members]
        return sum(shape[0] for shape in found), found[0][1]

    def is_joint(self, module: str) -> bool:
        """Whether a name is that of q, k and v together."""
        return self.table.is_joint(module)

    def rows(self, joint: str) -> tuple[int, int, int]:
        """Output rows of q, k and v of a joint name.

        Raises:
            BrokenModuleError: this model has no such module.
        """
        members = self.table.members(joint)
        if members is None:
            third = self.shape(joint)[0] // 3
            return third, third, third
        q, k, v = (self.shape(member)[0] for member in members)
        return q, k, v

    def modules(self) -> Iterator[str]:
        """Official names of everything that has a matrix."""
        return (name for name, shape in self.shapes.items() if len(shape) == 2)

    def _counted(self, module: str) -> str:
        """How many of the module's container there are, where that may be what is wrong."""
        place = self.table.inside_of(module)
        if place is None:
            return ""
        known = (self.table.inside_of(name) for name in self.shapes)
        numbers = {other[1] for other in known if other and other[0] == place[0]}
        return f", which has {len(numbers)} {place[0].split('{')[0].rstrip('.')}"


@cache
def _published(family: str) -> Sizes:
    table, numbers = TABLES[family], _NUMBERS[family]
    shapes: dict[str, Shape] = {}
    biases: dict[str, int] = {}

    def add(name: str, words: tuple[str, ...], bias: bool, known: Mapping[str, int]) -> None:
        factors = [word.split("*") for word in words]
        if all(factor.isdigit() or factor in known for word in factors for factor in word):
            shapes[name] = tuple(math.prod(int(known.get(factor, factor)) for factor in word) for word in factors)
            if bias:
                biases[name] = shapes[name][0]

    for name, row in table.alone.items():
        add(name, row.shape, row.bias, numbers[""])
    for container in table.outer:
        for number in range(numbers[container]["count"]):
            for name, row in table.inside.items():
                add(f"{container.format(number)}.{name}", row.shape, row.bias, numbers[container])
    return Sizes(family, shapes, biases)
