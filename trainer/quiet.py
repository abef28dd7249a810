"""Importing torchao without its warnings of every optional kernel that does not fit this torch: none is used here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# `root` because torchao calls `logging.warning`; pytree for its note on an enum of torchao's.
_LOGGERS = ("", "torchao", "torch.utils._pytree")


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Hides warnings, not errors, while it lasts; the loggers' levels are restored."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
