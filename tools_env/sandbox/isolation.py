"""The Linux calls that shut a sandbox off, made through ctypes; used by `worker`.

Nothing here is imported by the trainer. Every call raises OSError where the kernel or
the container refuses it; the trainer then starts the worker at the weaker level.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True) if LINUX else None

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_CAPBSET_DROP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAP_VERSION_3, _CAP_DAC_READ_SEARCH, _MAX_CAP = 0x20080522, 2, 63
_SIGKILL = 9


def check(result: int, what: str) -> None:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _prctl(option: int, *args: int) -> None:
    padded = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *padded), f"prctl {option}")


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent has died."""
    if LINUX:
        _prctl(_PR_SET_SUBREAPER, 1)


def unshare() -> None:
    """Leave the host's namespaces; the next forked child is process 1 of the new ones.

    Root keeps its user namespace, so that it can hand the code to a spare user; anyone
    else needs a user namespace to be allowed the others.
    """
    if not LINUX:
        raise OSError("namespaces are a Linux feature")
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWPID | _NEWNS | _NEWIPC | _NEWUTS | _NEWNET
    check(libc.unshare(flags if uid == 0 else flags | _NEWUSER), "unshare")
    if uid != 0:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def set_limits(memory_mb: int, processes: int, file_mb: int) -> None:
    """Hard limits a process: address space, processes of the user, file size, files.

    `memory_mb` comes on top of what the preloaded interpreter has mapped already.
    """
    memory, size = _mapped() + (memory_mb << 20), file_mb << 20
    for name, value in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", size),
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_NOFILE", 256),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
    ):
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if LINUX:  # elsewhere some limits exist by name only
                raise


def user_threads() -> int:
    """Threads of this process's user on the machine: what RLIMIT_NPROC counts.

    0 outside Linux, where a process cannot look.
    """
    user, count = os.getuid(), 0
    for name in filter(str.isdigit, os.listdir("/proc") if LINUX else ()):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            pass
    return count


def _mapped() -> int:
    """Bytes of this process's address space."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return 0


def drop_privileges(uid: int, gid: int) -> None:
    """Become an unprivileged user without capabilities, for good.

    A spare user may not be able to read the interpreter's own files (a virtual
    environment under /root): then one capability stays, to read and search. Where root
    has not even that one, the code stays root without any capability.
    """
    if not LINUX:
        return
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    keep = 0
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(gid, 0, 0)
        os.setresuid(uid, 0, 0)
        if not _readable(os.__file__, sys.executable, *sys.path):
            keep = _permitted() & 1 << _CAP_DAC_READ_SEARCH
            if not keep:
                uid, gid = 0, 0
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _set_capabilities(keep)
    if keep:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)
    _prctl(_PR_SET_DUMPABLE, 1)  # /proc/self is the code's own again


def _readable(*paths: str) -> bool:
    """Whether the real user, who is not the effective one yet, may read the paths."""
    return all(os.access(path, os.R_OK) for path in paths if os.path.exists(path))


def _permitted() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if "CapPrm" in line)


def drop_bounding_set() -> None:
    """Give up for all descendants every capability but the one that may be kept."""
    for capability in range(_MAX_CAP + 1) if LINUX else ():
        if capability != _CAP_DAC_READ_SEARCH:
            libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)


def _set_capabilities(mask: int) -> None:
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    data = struct.pack("6I", mask, mask, mask, 0, 0, 0)
    check(libc.capset(header, data), "capset")
