"""The text trunk of a run: run once for each caption where no adapter trains it, and then out of the way.

The trunk depends on neither time nor latents. While it is frozen its output is the same in every step, so it is made
once, kept on disk, and the trunk's weights wait on the CPU until the run is over. Its output is smaller too: 53248
features a token become 4608 in Ideogram 4.

Shape suffixes: B batch, T tokens, W conditioning width, D the transformer's width.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from . import adapters
from .base_model import Base
from .families import Family
from .samples import Cache, Sample
from .tensor_files import add_tensor


class TextTrunk:
    """What a run does with the base's text trunk.

    Attributes:
        frozen: no adapter of the run trains it.
        cache: where its outputs are kept.
    """

    def __init__(self, base: Base, targets: Sequence[str], base_id: str, cache: Cache | None = None) -> None:
        """
        Args:
            base: the loaded base.
            targets: official names of the Linears that the run's adapter changes.
            base_id: names the base's file and its weights; another one makes other cache entries.
            cache: by default nothing is kept on disk.
        """
        self.base = base
        self.frozen = is_frozen(base.family, targets)
        self.cache = cache or Cache()
        self._base_id = base_id
        # An earlier run may have ended without room for it on the device.
        self._move(base.model.device)

    def _move(self, device: torch.device) -> None:
        for name in self.base.family.text_trunk:
            self.base.model.get_submodule(name).to(device)

    def samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their conditioning put through a frozen trunk; as they are where it is trained."""
        if not self.frozen:
            return list(samples)
        return [
            dataclasses.replace(sample, conditioning=self.tokens(sample.conditioning), after_trunk=True)
            for sample in samples
        ]

    def tokens(self, conditioning_TW: Tensor) -> Tensor:
        """(T, W) → (T, D) on the CPU through a frozen trunk, from the cache or made now."""
        digest = hashlib.sha256()
        add_tensor(digest, conditioning_TW)
        dtype = str(self.base.model.compute_dtype)
        depends = ("text", self.base.family.name, self._base_id, self.base.precision, dtype, digest.hexdigest())
        return self.cache.get("a caption's text tokens", depends, lambda: self._run(conditioning_TW)[0])

    def _run(self, conditioning_TW: Tensor) -> Tensor:
        with torch.inference_mode(False), adapters.active(self.base.model, None):
            return self.base.model.encode_text(conditioning_TW[None].to(self.base.model.device))

    @contextmanager
    def parked(self) -> Iterator[None]:
        """While it lasts the weights of a frozen trunk are on the CPU and their memory on the device is free."""
        if not self.frozen:
            yield
            return
        self._move(torch.device("cpu"))
        try:
            yield
        finally:
            # What ended the run may still hold all of the device's memory: that error is the one to be seen.
            with suppress(torch.OutOfMemoryError):
                self._move(self.base.model.device)


def is_frozen(family: Family, targets: Sequence[str]) -> bool:
    """Whether none of these modules belongs to the text trunk."""
    return not any(target.split(".")[0] in family.text_trunk for target in targets)
