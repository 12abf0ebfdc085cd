"""A Python interpreter for code that a model wrote, outside the trainer's process.

`PythonSandbox.run` sends code to a session, reads its output under a cap and enforces
the deadline. A session is a fork of a worker that is isolated already and has numpy and
sympy imported (see `host`, `worker`, `keeper`), with a work folder of its own; nothing
starts before the first call. docs/sandbox.md says level by level what is isolated and
what is not; in short:

* "process": limits on time, memory, output, processes, files; nothing of a call
  outlives it; where the trainer is root, a user of its own. All levels have this.
* "landlock": filters on system calls and paths too: no network, no reading but of the
  system and Python, no writing but to the work folder, no reach to other processes.
* "namespace" and "bubblewrap": a file system, process table and network of its own too,
  and a cap on what its files take up.

The interpreter reports its own status, so code can lie about how its call ended.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from dataclasses import dataclass

from tools_env.sandbox.host import SandboxUnavailable, Session, WorkerLost
from tools_env.sandbox.output import CappedOutput

# Strongest first. What bubblewrap makes are namespaces too.
LEVELS = ("namespace", "bubblewrap", "landlock", "process")
RANKS = {"namespace": 2, "bubblewrap": 2, "landlock": 1, "process": 0}
_MAX_CODE = 1 << 20  # bytes
_LOST = "Variables and imports are lost; the next call starts afresh."


@dataclass(frozen=True)
class SandboxResult:
    """How a call ended.

    `status`: "ok"; "error" (uncaught exception, non-zero exit); "timeout"; "memory";
    "crashed" (the interpreter died from a signal or broke). `output` is what was
    printed, stdout and stderr in order, then a note in brackets if state was lost.
    """

    status: str
    output: str
    seconds: float


class PythonSandbox:
    """Runs code; a context manager. Safe to use from any thread, one call at a time.

    `timeout_s` is wall time a call, `memory_mb` the limit of a process and of all
    together, `output_bytes` the cap on a result's UTF-8 text. With `stateful` variables
    and imports stay between calls, else every call has a new interpreter. `preload`
    names modules that the process which sessions are forked from imports besides numpy
    and sympy.
    """

    def __init__(
        self,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        output_bytes: int = 16384,
        stateful: bool = True,
        *,
        max_processes: int = 32,
        file_mb: int = 64,
        level: str | None = None,
        preload: tuple[str, ...] = (),
    ):
        for name, value, least in (
            ("timeout_s", timeout_s, 0.001),
            ("memory_mb", memory_mb, 64),
            ("output_bytes", output_bytes, 512),
            ("max_processes", max_processes, 1),
            ("file_mb", file_mb, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if level is not None and level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, not {level!r}")
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._output_bytes = output_bytes
        self._stateful = stateful
        self._limits = {
            "memory_mb": memory_mb,
            "cpu_s": timeout_s + 0.5,
            "processes": max_processes,
            "file_mb": file_mb,
        }
        self._wanted = level
        self._preload = preload
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = False
        self.level: str | None = None  # known after the first call

    def __enter__(self) -> PythonSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str) -> SandboxResult:
        """Run code and say how it ended; never raises for what the code does.

        Raises SandboxUnavailable when no worker can be started, RuntimeError after
        `close`.
        """
        data = code.encode("utf-8", "surrogatepass")
        if len(data) > _MAX_CODE:
            text = f"[error: the code is longer than {_MAX_CODE} bytes]"
            return SandboxResult("error", text, 0.0)
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            if self._session is None:
                self._session = self._start()
            start = time.monotonic()
            output = CappedOutput(self._output_bytes)
            verdict = self._session.exchange(data, start + self._timeout_s, output)
            if not (verdict["alive"] and self._stateful):
                self._session.end(output)
                self._session = None
            seconds = time.monotonic() - start
            text = output.text(self._note(verdict))
            return SandboxResult(verdict["status"], text, seconds)

    def close(self) -> None:
        """Kill everything the sandbox runs and remove its work folder.

        A call that runs in another thread is cut short.
        """
        self._closed = True
        session = self._session
        if session is not None:
            session.hang_up()
        with self._lock:
            if self._session is not None:
                self._session.stop()
                self._session = None

    def _start(self) -> Session:
        level = strongest_level() if self._wanted is None else self._wanted
        try:
            session = Session(level, self._limits, self._preload)
        except WorkerLost:
            session = Session(level, self._limits, self._preload)
        self.level = level
        return session

    def _note(self, verdict: dict) -> str:
        """Tell the model what the output alone does not."""
        if verdict["alive"]:
            return ""
        lost = f" {_LOST}" if self._stateful else ""
        if verdict["status"] == "timeout":
            what = "CPU time" if verdict["note"] == "cpu" else "time"
            return f"[timeout: more than {self._timeout_s:g} s of {what}.{lost}]"
        if verdict["status"] == "memory":
            return f"[memory: more than {self._memory_mb} MB.{lost}]"
        if verdict["status"] == "crashed":
            return f"[crashed: {_crash(verdict['note'])}.{lost}]"
        return f"[the interpreter exited with code {verdict['note']}.{lost}]"


def strongest_level(required: str = "process") -> str:
    """The strongest level that works here; tried once a process.

    Raises SandboxUnavailable with the reasons when it is weaker than `required`.
    """
    level, reasons = _try_levels()
    if level is None or RANKS[level] < RANKS[required]:
        have = "no level works" if level is None else f"only '{level}' works"
        raise SandboxUnavailable(f"{have}; {'; '.join(reasons)}")
    return level


@functools.cache
def _try_levels() -> tuple[str | None, tuple[str, ...]]:
    """The first level that runs code, and why each before it does not."""
    reasons: list[str] = []
    for level in LEVELS:
        try:
            with PythonSandbox(60.0, level=level) as sandbox:
                result = sandbox.run("6 * 7")
        except SandboxUnavailable as error:
            reasons.append(f"{level}: {error}")
            continue
        if result.output == "42\n":
            return level, tuple(reasons)
        reasons.append(f"{level}: {result.output}")
    return None, tuple(reasons)


def _crash(note: str) -> str:
    if not note.lstrip("-").isdigit():
        return "the interpreter broke off"
    try:
        name = signal.Signals(-int(note)).name
    except ValueError:
        name = f"signal {-int(note)}"
    return f"the interpreter died from {name}"
