"""Where the tests keep compiled programs: a folder for every kind of CPU.

A program compiled for one CPU may use instructions that another one lacks, and the
cache of a home folder may be shared between machines.
"""

import hashlib
import os
import platform
from pathlib import Path


def folder() -> str:
    base = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    kind = hashlib.sha256(cpu_flags().encode()).hexdigest()[:12]
    return str(base / "grpo_jax" / f"jax-{kind}")


def cpu_flags() -> str:
    """The instruction sets of this machine, as far as it tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return " ".join([platform.machine(), platform.processor(), *flags[:1]])
