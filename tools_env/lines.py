"""A process of its own that answers a line of JSON with a line of JSON.

For checkers that can neither be finished nor interrupted inside a thread, or whose
imports must not come near the trainer. The process writes "ready" first; one that is
late or dies is killed, and started again for the next question.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class LineProcess:
    """One process for all threads, started at need.

    `script` runs with `arguments` after it and `environ` as its environment (None:
    this process's own); `deadline_s` bounds an answer, `start_s` the start.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        deadline_s: float,
        start_s: float = 60.0,
        environ: Mapping[str, str] | None = None,
    ):
        # -P: the script's folder holds modules whose names must not shadow others
        self._command = [sys.executable, "-P", str(script), *arguments]
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._environ = environ
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, question: Any) -> Any:
        """The answer; None when it was late or the process died over it.

        Raises RuntimeError when the process does not start.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # it died between two questions
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(json.dumps(question) + "\n")
            except BrokenPipeError:
                self._stop()
                return None
            line = self._read(self._deadline_s)
            return None if line is None else json.loads(line)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=self._environ,
        )
        if self._read(self._start_s) != "ready":
            self._stop()
            raise RuntimeError(f"{self._command[2]} does not start")

    def _read(self, seconds: float) -> str | None:
        """One line of the process; None, and an end to it, when late or dead."""
        stream = self._process.stdout
        ready, _, _ = select.select([stream], [], [], seconds)
        line = stream.readline() if ready else ""
        if not line:
            self._stop()
            return None
        return line.strip()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
