"""A file system of the sandbox's own: the system and Python, read-only, and no more.

Made with the mount calls of Linux inside a mount namespace; used by `worker`. Every
call raises OSError where the kernel refuses it.
"""

from __future__ import annotations

import ctypes
import os
import struct

from tools_env.sandbox.isolation import check, libc
from tools_env.sandbox.paths import DEVICES, WORK, visible_paths

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_SYS_PIVOT_ROOT = 41 if os.uname().machine == "aarch64" else 155


def enter() -> None:
    """Make a root of `visible_paths`, /proc and a few devices, and change to it."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    shown = visible_paths()
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    os.mkdir("/tmp/mnt")
    check(libc.syscall(_SYS_PIVOT_ROOT, b"/tmp", b"/tmp/mnt"), "pivot_root")
    os.chdir("/")
    for path, real in shown.items():
        _show(f"/mnt{real}", path)
    for folder in ("/proc", "/dev/shm", WORK):
        os.makedirs(folder, exist_ok=True)
    for name in DEVICES:
        _show(f"/mnt/dev/{name}", f"/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    if not os.path.lexists("/tmp"):
        os.symlink(WORK, "/tmp")
    _make_readonly("/")
    # Before the old root goes: without one in sight the kernel allows no new /proc.
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    check(libc.umount2(b"/mnt", _MNT_DETACH), "umount")
    # For preloaded modules that want to write; every session mounts its own over it.
    _mount("tmpfs", WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4m,mode=0700")


def add_private(file_mb: int, uid: int, gid: int) -> None:
    """Mount a session's own /proc, size-capped work folder and shared memory."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    flags = _MS_NOSUID | _MS_NODEV
    _mount("proc", "/proc", "proc", flags | _MS_NOEXEC | _MS_RDONLY)
    owner = f"uid={uid},gid={gid},mode=0700,nr_inodes=4096"
    for folder, size_mb in ((WORK, file_mb), ("/dev/shm", 16)):
        _mount("tmpfs", folder, "tmpfs", flags, f"size={size_mb}m,{owner}")


def _show(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _make_readonly(path: str) -> None:
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = libc.syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        path.encode(),
        _AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    check(result, "mount_setattr")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str = ""
) -> None:
    encoded = [None if x is None else x.encode() for x in (source, target, kind)]
    result = libc.mount(*encoded, ctypes.c_ulong(flags), data.encode())
    check(result, f"mount {target}")
