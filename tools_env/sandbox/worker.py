"""The program that a sandbox starts: an isolated parent of which sessions are forks.

Started by `host`. It shuts itself off as far as its level
says, imports numpy and sympy, and then forks a session for every request, so that a
session costs milliseconds and shares the modules' memory. At the level "namespace" it
is process 1 of its own process namespace: when it ends, so does all below it. Elsewhere
it adopts what a dying session leaves behind, and kills it.

A request is a frame of JSON with three descriptors: the session's control socket, its
output pipe, and a socket that is closed here when nothing of the session runs any more.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time

from tools_env.sandbox import interpreter, isolation, keeper, paths

if isolation.LINUX:
    from tools_env.sandbox import filters, rootfs

_GRACE_S = 2.0  # for sessions to end by themselves when the trainer has gone


def main() -> None:
    config = json.loads(sys.argv[1])
    hub = socket.socket(fileno=config["hub"])
    serial = os.getpid()  # of the host: no two live workers share it
    try:
        readable = _shut_off(config["level"], hub)
    except (OSError, AttributeError, ValueError) as error:
        hub.sendall(f"E{type(error).__name__}: {error}".encode())
        os._exit(1)
    hub.sendall(b"R")
    _preload(config["preload"])
    Server(hub, config["level"], serial, readable).serve()
    os._exit(0)


def _shut_off(level: str, hub: socket.socket) -> list[str]:
    """Do what a level needs once; returns the paths that sessions may read."""
    if level == "namespace":
        isolation.unshare()
        _fork_and_wait(hub)
        isolation.die_with_parent()
        rootfs.enter()
        # Some modules want to write when they are imported, and /tmp may be read-only.
        os.environ["HOME"] = os.environ["TMPDIR"] = rootfs.WORK
        sys.path[:] = [path for path in sys.path if os.path.exists(path)]
    if level == "landlock" and not isolation.LINUX:
        raise OSError("Landlock is a Linux feature")
    isolation.adopt_orphans()
    return list(paths.visible_paths())


def _fork_and_wait(*given: socket.socket) -> None:
    """Go on in a child; the parent closes what was given, and ends with the child."""
    child = os.fork()
    if child:
        for held in given:
            held.close()
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        os.waitpid(child, 0)
        os._exit(0)


def _preload(names: list[str]) -> None:
    """Import what sessions share; the collector leaves those pages alone from now on.

    Not outside Linux: other systems' libraries need not survive a fork.
    """
    for name in names if isolation.LINUX else ():
        try:
            __import__(name)
        except Exception:  # not installed here, or broken: sessions work without it
            pass
    gc.collect()
    gc.freeze()


class Server:
    """Forks sessions and notices their end; one thread, no code of a model."""

    def __init__(
        self, hub: socket.socket, level: str, serial: int, readable: list[str]
    ):
        self.hub = hub
        self.level = level
        self.serial = serial
        self.readable = readable
        self.sessions: dict[int, tuple[int, int, socket.socket]] = {}  # by process
        self.woken, self.wake = socket.socketpair()
        self.woken.setblocking(False)
        self.wake.setblocking(False)

    def serve(self) -> None:
        """Answer requests until the trainer hangs up, then end what is left."""
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        watched = select.poll()
        watched.register(self.hub, select.POLLIN)
        watched.register(self.woken, select.POLLIN)
        while True:
            events = {fd for fd, _ in watched.poll()}
            if self.woken.fileno() in events:
                _empty(self.woken)
                self.collect()
            if self.hub.fileno() in events and not self.answer():
                break
        end = time.monotonic() + _GRACE_S
        while self.level != "namespace" and self.sessions:
            if time.monotonic() > end:
                for pid in self.sessions:
                    keeper.send_signal(pid, signal.SIGKILL)
            time.sleep(0.01)
            self.collect()

    def answer(self) -> bool:
        """Take one request; False when the trainer has gone."""
        header, files, _, _ = socket.recv_fds(self.hub, 4, 3)
        if len(header) < 4:
            return False
        body = interpreter.receive(self.hub, int.from_bytes(header, "big"))
        if body is None:
            return False
        request = json.loads(body)
        if "kill" in request:
            for pid, (number, _, _) in self.sessions.items():
                if number == request["kill"]:
                    keeper.send_signal(pid, signal.SIGKILL)
            return True
        control, output, life = files
        taken = {slot for _, slot, _ in self.sessions.values()}
        slot = next(i for i in range(len(taken) + 1) if i not in taken)
        try:
            child = os.fork()
        except OSError as error:  # the machine is out of processes or memory
            os.write(output, f"fork: {error}".encode())
            os.write(control, b"E")
            child = None
        if child == 0:
            self.become_session(request, slot, control, output, life)
        os.close(control)
        os.close(output)
        held = socket.socket(fileno=life)
        if child is None:
            held.close()
        else:
            self.sessions[child] = request["number"], slot, held
        return True

    def become_session(
        self, request: dict, slot: int, control: int, output: int, life: int
    ) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self.hub, self.woken, self.wake):
            held.close()
        for _, _, held in self.sessions.values():
            held.close()
        os.close(life)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        os.setsid()
        channel = socket.socket(fileno=control)
        try:
            uid, gid = keeper.spare_user(self.serial, slot)
            work = self.shut_off(request, channel, uid, gid)
            kept = keeper.Keeper(request, channel, work, uid, gid, self.filter(work))
        except (OSError, AttributeError, ValueError) as error:
            channel.sendall(b"E")
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        channel.sendall(b"R")
        kept.serve()
        kept.kill_all()
        os._exit(0)

    def shut_off(
        self, request: dict, channel: socket.socket, uid: int, gid: int
    ) -> str:
        """Do what the level needs for each session; returns its work folder."""
        if self.level == "namespace":
            isolation.unshare()
            _fork_and_wait(channel)
            isolation.die_with_parent()
            rootfs.add_private(request["file_mb"], uid, gid)
            isolation.drop_bounding_set()
            return paths.WORK
        os.chown(request["workdir"], uid, gid)
        isolation.adopt_orphans()
        isolation.drop_bounding_set()
        return request["workdir"]

    def filter(self, work: str):
        """What the interpreter does to itself as the last thing before any code."""

        def apply() -> None:
            if self.level == "process":
                return
            # Inside bubblewrap it keeps the code from signalling its keeper.
            boxed = self.level == "bubblewrap" and filters.landlock_version()
            if self.level == "landlock" or boxed:
                filters.restrict_paths(self.readable, work)
            filters.refuse_calls()

        return apply

    def collect(self) -> None:
        """Take note of sessions that ended, once nothing of them runs any more."""
        ended = []
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid in self.sessions:
                ended.append(self.sessions.pop(pid))
            elif pid == 0 and not self.kill_orphans():
                break
        for _, _, life in ended:
            life.close()

    def kill_orphans(self) -> bool:
        """Kill children that are no session: a dead one left them. True if any."""
        if not isolation.LINUX:
            return False
        orphans = [p for p in keeper.children(os.getpid()) if p not in self.sessions]
        for pid in orphans:
            keeper.send_signal(pid, signal.SIGKILL)
        if orphans:
            time.sleep(0.001)
        return bool(orphans)


def _empty(source: socket.socket) -> None:
    try:
        while source.recv(4096):
            pass
    except BlockingIOError:
        pass
