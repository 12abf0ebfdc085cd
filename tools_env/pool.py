"""Worker threads that run tool calls while the device decodes.

The engine submits the calls of a turn and goes on; `ready` hands back finished tickets
without blocking. A call's deadline runs from the moment a worker takes it up. Past it
the call has the result "timeout" whether or not its thread comes back: the thread is
left behind and replaced, so the pool keeps its width. While more than `max_stuck` are
left behind none is replaced, so there are never more than `workers + max_stuck`
threads; when no worker is left to run what is queued, the queue gets "not_run" at once
instead of waiting for ever. A thread that comes back late ends, and its value is
dropped. Threads are daemons: a stuck tool does not keep the process from ending.

Deadlines are looked at in `submit`, `ready` and `wait`, by the one thread that calls
these; no other thread may.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools_env.functions import describe
from tools_env.protocol import ToolResult


@dataclass(eq=False)
class Ticket:
    """Calls that were submitted together; `results` are in call order once `done`."""

    results: list[ToolResult | None]
    _waiting: deque[_Job] = field(default_factory=deque, repr=False)

    @property
    def done(self) -> bool:
        return all(result is not None for result in self.results)


@dataclass(eq=False)
class _Job:
    ticket: Ticket
    index: int
    function: Callable[..., ToolResult]
    args: tuple[Any, ...]
    deadline_s: float
    started: float = 0.0
    abandoned: bool = False


class ToolPool:
    """`workers` threads; `timeout_s` is the deadline of a call that names none."""

    def __init__(self, workers: int, timeout_s: float, *, max_stuck: int | None = None):
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"a tool pool needs workers >= 1 and timeout_s > 0, not {workers} "
                f"and {timeout_s}"
            )
        self._workers = workers
        self._timeout_s = timeout_s
        self._max_stuck = 4 * workers if max_stuck is None else max_stuck
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._finished: list[Ticket] = []
        self._stuck = 0
        self._width = 0
        self._closed = False
        for _ in range(workers):
            self._add_worker()

    def __enter__(self) -> ToolPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        function: Callable[..., ToolResult],
        *args: Any,
        deadline_s: float | None = None,
    ) -> Ticket:
        """Queue one call; its ticket holds one result."""
        return self.submit_turn(lambda _: function(*args), [None], deadline_s)

    def submit_turn(
        self,
        function: Callable[[Any], ToolResult],
        calls: Sequence[Any],
        deadline_s: float | Callable[[Any], float | None] | None = None,
        *,
        parallel: bool = False,
    ) -> Ticket:
        """Queue `function(call)` for every call of a turn, each with its own deadline.

        `deadline_s` is the same for all, or a function of the call.

        One after another, as a session with state needs it, or at once if `parallel`.
        In the first case the calls after one that timed out are not run.
        """
        ticket = Ticket([None] * len(calls))
        limits = [deadline_s(c) if callable(deadline_s) else deadline_s for c in calls]
        limits = [self._timeout_s if limit is None else limit for limit in limits]
        jobs = [
            _Job(ticket, i, function, (call,), limit)
            for i, (call, limit) in enumerate(zip(calls, limits, strict=True))
        ]
        with self._changed:
            if self._closed:
                raise RuntimeError("the tool pool is closed")
            first = len(jobs) if parallel else 1
            self._queue.extend(jobs[:first])
            ticket._waiting.extend(jobs[first:])
            if not jobs:
                self._finished.append(ticket)
            self._expire()
            self._changed.notify_all()
        return ticket

    def ready(self) -> list[Ticket]:
        """Give the tickets that finished since the last call, without blocking."""
        with self._changed:
            self._expire()
            finished, self._finished = self._finished, []
            return finished

    def wait(self, timeout_s: float | None = None) -> list[Ticket]:
        """Block until a ticket has finished or the time is over; give what finished.

        Returns [] at once when nothing is queued or running.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._expire()
                now = time.monotonic()
                over = end is not None and now >= end
                if self._finished or over or not (self._running or self._queue):
                    finished, self._finished = self._finished, []
                    return finished
                ends = [job.started + job.deadline_s for job in self._running]
                ends += [] if end is None else [end]
                self._changed.wait(max(min(ends) - now, 0.0) if ends else None)

    def close(self) -> None:
        """Let the workers go; queued calls are dropped, running ones not waited for."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _add_worker(self) -> None:
        self._width += 1
        threading.Thread(target=self._work, name="tool", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._queue.popleft()
                job.started = time.monotonic()
                self._running.add(job)
                self._changed.notify_all()  # `wait` must learn of the new deadline
            result = _result(job)
            with self._changed:
                if job.abandoned:
                    self._stuck -= 1
                    return
                self._running.discard(job)
                self._record(job, result)
                self._changed.notify_all()
            del job, result  # an idle worker keeps no trajectory alive

    def _record(self, job: _Job, result: ToolResult) -> None:
        ticket = job.ticket
        ticket.results[job.index] = result
        if ticket._waiting:
            self._queue.append(ticket._waiting.popleft())
        elif ticket.done:
            self._finished.append(ticket)

    def _expire(self) -> None:
        """Give "timeout" to calls past their deadline and replace their threads."""
        now = time.monotonic()
        late = [job for job in self._running if now >= job.started + job.deadline_s]
        for job in late:
            self._running.discard(job)
            job.abandoned = True
            self._width -= 1
            self._stuck += 1
            text = f"Timeout: the call did not return within {job.deadline_s:g} s."
            self._give_up(job, ToolResult("timeout", text, now - job.started))
        while self._width < self._workers and self._stuck <= self._max_stuck:
            self._add_worker()
        if self._width == 0:
            text = "Not run: every tool worker is stuck in an earlier call."
            while self._queue:
                self._give_up(self._queue.popleft(), ToolResult("not_run", text))

    def _give_up(self, job: _Job, result: ToolResult) -> None:
        while job.ticket._waiting:
            rest = job.ticket._waiting.popleft()
            text = "Not run: an earlier call of the turn did not return."
            job.ticket.results[rest.index] = ToolResult("not_run", text)
        self._record(job, result)


def _result(job: _Job) -> ToolResult:
    start = time.monotonic()
    try:
        return job.function(*job.args)
    except BaseException as error:  # the thread is the pool's: nothing may end it
        return ToolResult("error", describe(error), time.monotonic() - start)
