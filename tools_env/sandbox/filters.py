"""Filters on the code's own process: system calls (seccomp) and paths (Landlock).

Both are Linux features that need no privilege and cannot be taken off again; children
inherit them. Pure ctypes; every call raises OSError where the kernel refuses it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from tools_env.sandbox.isolation import check, libc
from tools_env.sandbox.paths import DEVICES

# Numbers of refused system calls: x86_64, aarch64 (None: there is none).
_REFUSED = {
    # leaving the sandbox's view of files, processes and network
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # memory that no process maps, so that no account holds it
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large attack surface without use here
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    # the machine itself
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_CLONE, _CLONE3 = (56, 220), 435
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NAMESPACES = 0x7E020000  # CLONE_NEW*

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # landlock_*, the same on every machine
_PATH_BENEATH, _VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_PROC = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime")


def refuse_calls() -> None:
    """Refuse system calls that no computation needs; EPERM, and ENOSYS for clone3."""
    program = _program(os.uname().machine)
    filters = (ctypes.c_char * len(program)).from_buffer_copy(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(filters))
    result = libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.c_char_p(header), 0, 0
    )
    check(result, "seccomp")


def _program(machine: str) -> bytes:
    """BPF code of the filter; each refused number is one jump to a common end."""
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    column, arch = _MACHINES[machine]
    refused = [row[column] for row in _REFUSED.values() if row[column] is not None]
    # Ends, counted from the last instruction backwards: kill, ENOSYS, EPERM, allow.
    lines: list[tuple[int, int, str | int, str | int]] = [
        (_LOAD, _ARCH, 0, 0),
        (_JUMP_EQ, arch, 0, "kill"),
        (_LOAD, _NUMBER, 0, 0),
        (_JUMP_GE, 0x40000000, "nosys", 0),  # the x32 table of x86_64
        (_JUMP_EQ, _CLONE3, "nosys", 0),  # its flags lie in memory: use clone
        *((_JUMP_EQ, number, "perm", 0) for number in refused),
        (_JUMP_EQ, _CLONE[column], 0, "allow"),
        (_LOAD, _FIRST_ARGUMENT, 0, 0),
        (_JUMP_SET, _NAMESPACES, "perm", "allow"),
    ]
    ends = {
        "allow": (_RETURN, _ALLOW),
        "perm": (_RETURN, _ERRNO | errno.EPERM),
        "nosys": (_RETURN, _ERRNO | errno.ENOSYS),
        "kill": (_RETURN, _KILL),
    }
    places = {name: len(lines) + i for i, name in enumerate(ends)}
    code = b""
    for at, (operation, value, yes, no) in enumerate(lines):
        jumps = [places[x] - at - 1 if isinstance(x, str) else x for x in (yes, no)]
        code += struct.pack("HBBI", operation, *jumps, value)
    return code + b"".join(struct.pack("HBBI", op, 0, 0, k) for op, k in ends.values())


def landlock_version() -> int:
    """Version of Landlock's interface; 0 where the kernel has none."""
    return max(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION), 0)


def restrict_paths(readable: list[str], work: str) -> None:
    """Let the process read `readable` and change `work` only.

    From Linux 6.12 on it can neither signal a process outside, which cannot be traced
    or looked into anyway.
    """
    version = landlock_version()
    if version < 1:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    everything = (1 << bits) - 1
    scope = 3 if version >= 6 else 0  # abstract sockets, signals
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", everything, 3 if version >= 4 else 0, scope)[:size]
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), 0)
    check(ruleset, "landlock")
    for path in (*readable, *_PROC):
        _allow(ruleset, path, _READ)
    for name in DEVICES:
        _allow(ruleset, f"/dev/{name}", (_READ_FILE | _WRITE_FILE) & everything)
    _allow(ruleset, work, everything)
    check(libc.syscall(_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = struct.pack("=Qi", access, descriptor)
        check(libc.syscall(_ADD, ruleset, _PATH_BENEATH, rule, 0), f"landlock {path}")
    finally:
        os.close(descriptor)
