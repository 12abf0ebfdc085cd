"""The trainer's side of the sandbox's processes: workers and the sessions they fork.

One worker a level (and set of further modules) is started when it is first needed and
kept for the trainer's life; it is an isolated parent with numpy and sympy imported (see
`worker`). A session is a
fork of it, with a control socket, an output pipe and a work folder of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

from tools_env.protocol import ToolUnavailable
from tools_env.sandbox.output import CappedOutput
from tools_env.sandbox.paths import WORK, visible_paths

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Isolated mode sees neither the current folder nor PYTHONPATH.
_PROGRAM = (
    f"import sys; sys.path.append({os.path.dirname(_PACKAGE)!r}); "
    "from tools_env.sandbox import worker; sys.path.pop(); worker.main()"
)
PRELOADED = ("numpy", "numpy.random", "sympy")
SEALED = ("namespace", "bubblewrap")  # levels with a file system of their own
_START_S = 60.0  # a loaded machine may take long to start an interpreter
_STOP_S = 2.0  # grace for a session to kill everything before it is killed itself


class SandboxUnavailable(ToolUnavailable):
    """The sandbox could not be started; says why, level by level."""


class WorkerLost(SandboxUnavailable):
    """The worker died before it could fork a session; another one may do."""


class Worker:
    """The process that sessions of one level are forked from.

    `wrap` is a command to start it with, `preload` the modules that it imports.
    """

    def __init__(
        self,
        level: str,
        *,
        wrap: list[str] | None = None,
        preload: tuple[str, ...] = PRELOADED,
    ):
        self.hub, inner = socket.socketpair()
        self._lock = threading.Lock()
        self._number = 0
        config = {"level": level, "hub": inner.fileno(), "preload": preload}
        python = [sys.executable, "-I", "-B", "-X", "utf8", "-c", _PROGRAM]
        try:
            process = subprocess.Popen(
                [*(wrap or []), *python, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=_environment(),
                pass_fds=[inner.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self.hub.close()
            reason = f"cannot start {sys.executable}: {error}"
            raise SandboxUnavailable(reason) from error
        finally:
            inner.close()
        self.stop = weakref.finalize(self, _stop_worker, os.getpid(), process, self.hub)
        self._greet(process)

    def _greet(self, process: subprocess.Popen) -> None:
        self.hub.settimeout(_START_S)
        try:
            hello = self.hub.recv(4096)
        except OSError as error:
            hello = b"E%s" % str(error).encode()
        reason = hello[1:].decode("utf-8", "replace")
        with process.stderr:
            if hello == b"R":
                return
            self.stop()
            reason = reason or process.stderr.read(2000).decode("utf-8", "replace")
        raise SandboxUnavailable(reason or "the worker did not start")

    def fork(self, request: dict, files: list[int]) -> int:
        """Have a session forked that owns `files`; returns the session's number."""
        with self._lock:
            self._number += 1
            self._send(request | {"number": self._number}, files)
            return self._number

    def kill(self, number: int) -> None:
        """End a session by force."""
        try:
            with self._lock:
                self._send({"kill": number}, [])
        except OSError:  # the worker is gone, and its sessions with it
            pass

    def _send(self, message: dict, files: list[int]) -> None:
        body = json.dumps(message).encode()
        socket.send_fds(self.hub, [len(body).to_bytes(4, "big")], files)
        self.hub.sendall(body)


_workers: dict[tuple[str, tuple[str, ...]], Worker] = {}
_workers_lock = threading.Lock()


def shared_worker(level: str, more: tuple[str, ...] = ()) -> Worker:
    """The running worker of a level with `more` modules; started if there is none."""
    with _workers_lock:
        worker = _workers.get((level, more))
        if worker is None:
            worker = Worker(level, preload=(*PRELOADED, *more))
            _workers[level, more] = worker
        return worker


def bubblewrapped_worker(file_mb: int) -> Worker:
    """A worker of one session's own, started by bubblewrap."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed")
    if os.getuid() == 0:
        raise SandboxUnavailable("root needs no bubblewrap to make namespaces")
    command = [program, "--unshare-all", "--as-pid-1", "--cap-drop", "ALL"]
    shown = visible_paths() | {_PACKAGE: _PACKAGE}
    for path, real in shown.items():
        command += ["--ro-bind", real, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    if not any(path.startswith("/tmp/") for path in shown):
        command += ["--symlink", WORK, "/tmp"]
    for folder, size_mb in ((WORK, file_mb), ("/dev/shm", 16)):
        command += ["--size", str(size_mb << 20), "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return Worker("bubblewrap", wrap=command, preload=())


def forget_worker(worker: Worker) -> None:
    """Drop a worker that has died, so that the next session starts another."""
    with _workers_lock:
        for key in [key for key, kept in _workers.items() if kept is worker]:
            del _workers[key]
    worker.stop()


def _start_afresh() -> None:
    """In a fork of the trainer: the workers are the parent's."""
    global _workers_lock
    _workers_lock = threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


class Session:
    """A started session, its control socket, its output pipe and its end."""

    def __init__(self, level: str, limits: dict, preload: tuple[str, ...] = ()):
        own = level == "bubblewrap"
        self._worker = (
            bubblewrapped_worker(limits["file_mb"])
            if own
            else shared_worker(level, preload)
        )
        folder = None if level in SEALED else _make_folder()
        work = WORK if folder is None else os.path.join(folder, "work")
        self.control, control = socket.socketpair()
        self.life, life = socket.socketpair()
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        try:
            given = [control.fileno(), output, life.fileno()]
            number = self._worker.fork(limits | {"workdir": work}, given)
        except OSError:  # it has died: no greeting will come
            number = 0
        control.close()
        life.close()
        os.close(output)
        self._await_end = functools.partial(
            _await_end, self._worker, number, self.control, self.life
        )
        self.stop = weakref.finalize(
            self,
            _stop_session,
            os.getpid(),
            self._await_end,
            (self.control, self.life),
            self.output,
            folder,
            self._worker.stop if own else None,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self.control.settimeout(_START_S)
        try:
            hello = self.control.recv(1)
        except OSError as error:
            hello = str(error).encode()
        if hello == b"R":
            return
        output = CappedOutput(2000)
        self.end(output)
        if hello == b"E":
            raise SandboxUnavailable(output.text(""))
        forget_worker(self._worker)
        raise WorkerLost("the process that forks sessions has died")

    def exchange(self, code: bytes, deadline: float, output: CappedOutput) -> dict:
        """Have code run; give the keeper's verdict, or one of the trainer's own."""
        broken = {"status": "crashed", "alive": False, "note": "protocol"}
        poll = select.poll()
        poll.register(self.output, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        try:
            self.control.sendall(len(code).to_bytes(4, "big") + code)
            while (left := deadline - time.monotonic()) > 0:
                events = {fd for fd, _ in poll.poll(left * 1000)}
                if self.output in events:
                    self._read(output)
                if self.control.fileno() in events:
                    reply = self.control.recv(4096)
                    self.drain(output)
                    return json.loads(reply) if reply.endswith(b"\n") else broken
        except OSError:
            return broken
        return {"status": "timeout", "alive": False, "note": ""}

    def drain(self, output: CappedOutput) -> None:
        """Take what the pipe still holds; a pipe holds at most a megabyte."""
        for _ in range(16):
            if not self._read(output):
                return

    def _read(self, output: CappedOutput) -> bool:
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return False
        output.feed(data)
        return bool(data)

    def end(self, output: CappedOutput) -> None:
        """Kill everything, take the output that is left, give all back."""
        self._await_end()
        self.drain(output)
        self.stop()

    def hang_up(self) -> None:
        """Make the keeper end, and a waiting `exchange` return."""
        _hang_up(self.control)


def _environment() -> dict[str, str]:
    """All that the code sees of an environment: nothing of the trainer's."""
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )  # a pool of threads would use up the address space, and not survive the fork
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **threads}


def _hang_up(channel: socket.socket) -> None:
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed, or the other end is gone
        pass


def _await_end(
    worker: Worker, number: int, control: socket.socket, life: socket.socket
) -> None:
    """Return when no process of the session is left."""
    _hang_up(control)
    try:
        life.settimeout(_STOP_S)
        life.recv(1)
    except TimeoutError:
        worker.kill(number)
        with contextlib.suppress(OSError):
            life.recv(1)
    except OSError:  # closed before
        pass


def _stop_session(
    owner: int,
    await_end: Callable[[], None],
    channels: tuple[socket.socket, socket.socket],
    output: int,
    folder: str | None,
    stop_worker: Callable[[], None] | None,
) -> None:
    if os.getpid() != owner:  # a fork of the trainer: the session is not its own
        return
    await_end()
    for channel in channels:
        channel.close()
    os.close(output)
    if folder is not None:
        _remove(folder)
    if stop_worker is not None:
        stop_worker()


def _make_folder() -> str:
    """A folder with a work folder inside.

    The code may own that one, so a parent that it does not own holds its name.
    """
    folder = tempfile.mkdtemp(prefix="sandbox-")
    os.chmod(folder, 0o711)
    os.mkdir(os.path.join(folder, "work"), 0o700)
    return folder


def _remove(top: str) -> None:
    """Delete a folder whatever the code made of it: deep, shut, full of links.

    Inner folders are moved up to `top` before their parent goes, so no path is ever
    long and nothing here recurses.
    """
    moved = 0
    while folders := [
        e.path for e in os.scandir(top) if e.is_dir(follow_symlinks=False)
    ]:
        for folder in folders:
            os.chmod(folder, stat.S_IRWXU)
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, stat.S_IRWXU)  # or it could not be moved
                    moved += 1
                    os.rename(entry.path, os.path.join(top, f"moved-{moved}"))
                else:
                    os.unlink(entry.path)
            os.rmdir(folder)
    os.rmdir(top)


def _stop_worker(owner: int, process: subprocess.Popen, hub: socket.socket) -> None:
    if os.getpid() != owner:
        return
    _hang_up(hub)
    try:
        process.wait(2 * _STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    hub.close()
