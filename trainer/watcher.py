"""Who watches a run: is told what happens, and asked after every step whether to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from .loop import StepLog

# Wishes: to stop with what there is, to be resumed later; and to end early as if the steps had been fewer.
STOP, FINISH = "stop", "finish"
SMOOTHED = 20  # steps

Say = Callable[[str], None]


def recent(values: Sequence[float]) -> float:
    """The mean of the last `SMOOTHED`, as it is shown while a run is under way."""
    last = values[-SMOOTHED:]
    return sum(last) / len(last)


class Watcher:
    """Watches nothing; a subclass overrides what it wants to know."""

    def say(self, sentence: str) -> None:
        """A sentence for the user."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stands around the run's previews, steps and results."""
        yield

    def stepped(self, logs: Sequence[StepLog], total: int, losses: Sequence[float]) -> None:
        """Steps are done, one or as many as were read together; `losses` are those of all steps so far."""

    def previewed(self, step: int, path: Path) -> None:
        """A preview was written."""

    def wish(self) -> str:
        """Empty to go on, else `STOP` or `FINISH`. Asked between steps and before previews."""
        return ""


class Terminal(Watcher):
    """A progress bar; the first Ctrl-C is the wish to stop, the second gets the handler that was there before."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._stop = threading.Event()
        self._bar: tqdm | None = None

    def say(self, sentence: str) -> None:
        self._say(sentence)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._until_interrupted():
            try:
                yield
            finally:
                if self._bar is not None:
                    self._bar.close()
                    self._bar = None

    def stepped(self, logs: Sequence[StepLog], total: int, losses: Sequence[float]) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, initial=logs[0].step - 1, unit="step", dynamic_ncols=True, mininterval=0.5)
            if not self._bar.disable:  # as TQDM_DISABLE says, and then it has no clock
                # It begins when these steps did, or it would take them for done in no time.
                taken = sum(log.seconds for log in logs)
                self._bar.start_t -= taken
                self._bar.last_print_t -= taken
        self._bar.set_postfix(loss=f"{recent(losses):.3f}", refresh=False)
        self._bar.update(len(logs))
        if logs[-1].step == total:
            self._bar.close()  # what is said afterwards stands below the bar

    def wish(self) -> str:
        return STOP if self._stop.is_set() else ""

    @contextmanager
    def _until_interrupted(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return
        before = signal.getsignal(signal.SIGINT)

        def handle(_number: int, _frame: FrameType | None) -> None:
            self._stop.set()
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
