"""Every node's work, outside inference mode, and with errors that are for the user."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ..lora_convert import LoraError
from ..trainer.errors import GraftError

# The engine names a setting by its table in the command line's file; in a graph it is the widget of that name.
_TABLE = re.compile(r"\[(?:model|dataset|lora|train|preview)\] ")

P = ParamSpec("P")
R = TypeVar("R")


def guarded(work: Callable[P, R]) -> Callable[P, R]:
    """Runs `work` outside of ComfyUI's inference mode, whose tensors can neither be trained nor trained on.

    An error that the user can mend comes out with its message alone: ComfyUI shows it with the frames that raised it,
    which would say nothing more. Anything else is a fault of Graft and keeps its traceback.
    """

    @wraps(work)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            with torch.inference_mode(False):
                return work(*arguments, **options)
        except (GraftError, LoraError, OSError) as error:
            message = for_graph(str(error))
        raise RuntimeError(message)

    return run


def for_graph(message: str) -> str:
    """An engine's message in a graph's words."""
    return _TABLE.sub("", message)
