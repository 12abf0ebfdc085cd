"""The process that watches over one interpreter; process 1 of a sealed session.

It hands calls over, watches memory and CPU time, stops the interpreter between calls,
and kills what a call left running. It runs no code of a model.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable

from tools_env.sandbox import interpreter, isolation

_TICK_S = 0.05  # how often the keeper looks at a running call
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATUSES = {b"o": "ok", b"e": "error", b"m": "memory"}
_SLOTS = 4096  # users that one worker has for its sessions


def spare_user(serial: int, slot: int) -> tuple[int, int]:
    """A user that nothing else runs as, so that its process limit is its own."""
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    mapped = max(
        [int(line.split()[2]) for line in _read("/proc/self/uid_map").splitlines()],
        default=0,
    )
    number = serial * _SLOTS + slot % _SLOTS
    wide = mapped > 0x7FFFFFFF
    spare = 0x40000000 + number % 0x3FFFF000 if wide else 20000 + number % 40000
    return spare, spare


class Keeper:
    """Owns the interpreter process; one call at a time."""

    def __init__(
        self,
        config: dict,
        control: socket.socket,
        work: str,
        uid: int,
        gid: int,
        confine: Callable[[], None],
    ):
        # What is preloaded is every session's and counts for none.
        self.memory = (config["memory_mb"] << 20) + _resident(os.getpid())
        self.cpu_s = config["cpu_s"]
        self.sealed = os.getpid() == 1
        self.control = control
        self.channel, inner = socket.socketpair()
        self.channel.settimeout(1.0)  # the code may write half a message
        self.exit_code: int | None = None
        self.number = 0
        self.child = os.fork()
        if self.child == 0:
            control.close()
            self.channel.close()
            if uid == os.getuid() and not self.sealed:
                # The limit counts what else the user runs, the trainer's threads too.
                others = isolation.user_threads()
                config = config | {"processes": config["processes"] + others}
            _become_interpreter(config, inner, work, uid, gid, confine)
        inner.close()

    def serve(self) -> None:
        """Run calls until the trainer hangs up or the interpreter has died."""
        while (code := interpreter.receive_frame(self.control)) is not None:
            verdict = self.run(code)
            if verdict is None:
                return
            self.pause()
            self.control.sendall(json.dumps(verdict).encode() + b"\n")
            if not verdict["alive"]:
                return

    def run(self, code: bytes) -> dict | None:
        """Run one call; None when the trainer has hung up."""
        self.number += 1
        start_cpu = self.cpu_used()
        _drain(self.channel)
        send_signal(self.child, signal.SIGCONT)
        try:
            self.channel.sendall(len(code).to_bytes(4, "big") + code)
        except OSError:
            return self.death()
        watched = select.poll()
        watched.register(self.control, select.POLLIN)
        watched.register(self.channel, select.POLLIN)
        while True:
            events = {fd for fd, _ in watched.poll(_TICK_S * 1000)}
            if self.channel.fileno() in events:
                return self.answer()
            if self.control.fileno() in events:
                return None
            self.reap()
            if self.exit_code is not None:
                return self.death()
            if self.memory_used() > self.memory:
                return {"status": "memory", "alive": False, "note": "memory"}
            if self.cpu_used() - start_cpu > self.cpu_s:
                return {"status": "timeout", "alive": False, "note": "cpu"}

    def answer(self) -> dict:
        try:
            message = interpreter.receive(self.channel, 5)
        except OSError:
            message = None
        if message is None:
            return self.death()
        status = _STATUSES.get(message[:1])
        if status is None or int.from_bytes(message[1:], "big") != self.number:
            return {"status": "crashed", "alive": False, "note": "protocol"}
        return {"status": status, "alive": status != "memory", "note": ""}

    def death(self) -> dict:
        """Say how the interpreter ended; one that only closed its channel is killed."""
        end = time.monotonic() + 0.2
        while self.exit_code is None and time.monotonic() < end:
            self.reap()
            time.sleep(0.002)
        code = self.exit_code
        if code is None:
            return {"status": "crashed", "alive": False, "note": "protocol"}
        status = "crashed" if code < 0 else "error" if code else "ok"
        return {"status": status, "alive": False, "note": str(code)}

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def pause(self) -> None:
        """Stop the interpreter, threads included, and kill what else is running."""
        if self.exit_code is None:
            send_signal(self.child, signal.SIGSTOP)
        self.kill_others({self.child})

    def kill_others(self, spared: set[int]) -> None:
        for _ in range(1000):  # a fork storm is bounded by the process limit
            others = [pid for pid in self.processes() if pid not in spared]
            if not others:
                return
            for pid in others:
                send_signal(pid, signal.SIGKILL)
            self.reap()

    def kill_all(self) -> None:
        if isolation.LINUX:
            self.kill_others(set())
        else:
            send_signal(-self.child, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Every process of this sandbox but the keeper."""
        if not isolation.LINUX:
            return []
        if self.sealed:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            return [pid for pid in pids if pid != 1 and _lives(pid)]
        found: list[int] = []
        pending = [os.getpid()]
        while pending:
            below = children(pending.pop())
            found += below
            pending += below
        return [pid for pid in found if _lives(pid)]

    def memory_used(self) -> int:
        """Resident bytes of all processes; pages they share are counted once."""
        pids = self.processes()
        resident = sum(map(_resident, pids))
        if resident <= self.memory:
            return resident
        return sum(map(_proportional, pids))

    def cpu_used(self) -> float:
        """CPU seconds of all processes, those that have ended included."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        live = sum(_cpu_ticks(pid) for pid in self.processes()) / _TICKS_PER_S
        return ended.ru_utime + ended.ru_stime + live


def _become_interpreter(
    config: dict,
    channel: socket.socket,
    work: str,
    uid: int,
    gid: int,
    confine: Callable[[], None],
) -> None:
    try:
        os.setsid()
        output = os.dup(1)
        isolation.set_limits(
            config["memory_mb"], config["processes"], config["file_mb"]
        )
        isolation.drop_privileges(uid, gid)
        os.chdir(work)
        os.environ["HOME"] = os.environ["TMPDIR"] = work
        confine()
        interpreter.serve(channel, output)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)
    os._exit(0)


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _drain(channel: socket.socket) -> None:
    """Forget what the code wrote into the channel on its own."""
    channel.setblocking(False)
    try:
        while channel.recv(65536):
            pass
    except OSError:  # nothing more to read, or the interpreter is gone
        pass
    channel.settimeout(1.0)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # the process has just ended
        return ""


def children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    texts = [_read(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    return [int(child) for text in texts for child in text.split()]


def _lives(pid: int) -> bool:
    """False for a zombie, which only its parent can collect."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return _resident(pid)


def _cpu_ticks(pid: int) -> int:
    """User and system time of a process and of the children it has waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) if fields else 0
