"""What a sealed sandbox shows of the file system: the system and Python, no more."""

from __future__ import annotations

import os
import sys

WORK = "/sandbox"  # the work folder inside; /tmp leads there too
DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)


def visible_paths() -> dict[str, str]:
    """Path to real path of all that the code may read.

    Folders that an editable installation adds to `sys.path` are not among them.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    own = sorted(prefixes | {os.path.realpath(path) for path in prefixes})
    found: dict[str, str] = {}
    for path in (*_SYSTEM, *own):
        inside = any(path.startswith(f"{shown}/") for shown in found)
        if path != "/" and os.path.exists(path) and not inside:
            found[path] = os.path.realpath(path)
    return found
