"""Importing torchao without its warnings of every optional kernel that does not fit this torch: none is used here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The latter for pytree's note on an enum of torchao's.
_LOGGERS = ("torchao", "torch.utils._pytree")
# Two threads that import at once would take each other's level for the one to restore.
_one = threading.RLock()


def _let_through(record: logging.LogRecord) -> bool:
    """All but torchao's warnings by `logging.warning`; a host's own words in the root logger pass meanwhile."""
    return record.levelno >= logging.ERROR or "torchao" not in record.pathname


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Hides torchao's warnings, not its errors, while it lasts; the loggers are restored."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    root = logging.getLogger()
    with _one:
        levels = [logger.level for logger in loggers]
        root.addFilter(_let_through)
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            root.removeFilter(_let_through)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
