"""What a run watches of its own process: stop signals, compilations, stages' time."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import jax

from grpo_jax.config import Stopped


class StopSignal:
    """SIGTERM and SIGINT set a flag; `check` raises Stopped where that is safe.

    Further signals change nothing: a save that has begun is always completed.
    """

    def __init__(self):
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.name:
            raise Stopped(self.name)

    def _note(self, number: int, _frame: object) -> None:
        if not self.name:  # not print: the signal may have come in the middle of one
            text = f"{signal.Signals(number).name}: saving what can be saved\n"
            os.write(2, text.encode())
        self.name = signal.Signals(number).name


class Compilations:
    """Counts the programs compiled, or fetched from the cache, since its birth.

    Flat from step 2 on, or something changes shape that should not.
    """

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, _seconds: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def timed(values: dict, stage: str) -> Iterator[None]:
    """Add the seconds that the block took to values["time/{stage}"], if it ended."""
    started = time.perf_counter()
    yield
    name = f"time/{stage}"
    values[name] = values.get(name, 0.0) + time.perf_counter() - started
