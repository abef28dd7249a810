"""What an adapter is: settings alone, so that who shows or reads them need not import PEFT, which takes seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import SettingsError

KINDS = ("lora", "dora", "lokr")


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is.

    Attributes:
        kind: `lora`; `dora`, which trains the length of every output row apart from its direction (arXiv 2402.09353);
            or `lokr`, a Kronecker product of two factors (LyCORIS, arXiv 2309.14859), which diffusers cannot load.
        rank: rows of A and columns of B. In LoKr the first factor is whole and the second has this rank, or is whole
            too where the rank is at least half its longer side: a rank of 4096 makes it whole everywhere.
        alpha: strength; the change is alpha / rank · B · A. A LoKr of whole factors has no alpha in any reader, so
            there it must equal the rank.
        rslora: divide alpha by the square root of the rank instead, so that high ranks are not held back (arXiv
            2312.03732). In the file alpha is scaled up to match, since readers divide by the rank. Not with LoKr.
        factor: of LoKr alone: both sides of a weight are cut into this many parts, where it divides them, else into the
            next lower divisor; -1 for that below the root of the side. The lower, the larger the adapter.
        targets: a preset of the family (`attention`, `attention+mlp`, `all`) or a regular expression that must match
            an official module name whole.
        blocks: which transformer blocks, such as `all`, `0-13` or `0,4,8-11`; modules outside the blocks are left out
            when a range is given.
        dropout: share of the adapter's inputs that is zeroed in training.
    """

    kind: str = "lora"
    rank: int = 32
    alpha: float = 32.0
    rslora: bool = False
    factor: int = -1
    targets: str = "attention+mlp"
    blocks: str = "all"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"kind {self.kind!r} is not known; choose one of {', '.join(KINDS)}")
        if self.kind == "lokr" and self.rslora:
            raise SettingsError("rslora cannot be used with kind lokr, whose factors are mostly whole; leave it off")
        if self.factor != -1 and self.kind != "lokr":
            raise SettingsError(f"factor is {self.factor}, which belongs to kind lokr; kind is {self.kind}")
        if self.factor != -1 and self.factor < 1:
            raise SettingsError(f"factor is {self.factor}; wanted a positive number, or -1 to have it chosen")
        if not 1 <= self.rank <= 4096:
            raise SettingsError(f"rank is {self.rank}; wanted 1 to 4096, 16 or 32 being usual")
        if not self.alpha > 0:
            raise SettingsError(f"alpha is {self.alpha}; wanted a positive number, the rank being usual")
        if self.alpha == math.inf:
            raise SettingsError("alpha is infinite; wanted a positive number, the rank being usual")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"dropout is {self.dropout}; wanted a share from 0 up to, but not, 1")

    @property
    def file_alpha(self) -> float:
        """The alpha that gives this strength to a reader which divides by the rank, as all do."""
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha
