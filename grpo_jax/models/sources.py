"""What `model.source` names: a folder, a GGUF file, a hub id, or a built-in model."""

import functools
import hashlib
import re
from pathlib import Path

from grpo_jax.config import BadInput
from grpo_jax.models import smollm2

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "*.model"]
HEAD_BYTES = 1 << 20


def locate(source: str | Path, *, weights: bool = True) -> Path:
    """Folder or GGUF file of a source (not "tiny"), downloaded when it is a hub id.

    Without `weights`, a hub model comes as its config and tokenizer files only.
    Raises BadInput when there is no such folder or file and no hub gives it.
    """
    if source == SMOLLM2:
        return smollm2.fetch()
    path = Path(source).expanduser()
    if source and (path.is_dir() or path.is_file()):
        if path.is_file() and path.suffix != ".gguf":
            raise BadInput(f"model.source {source}: a file must be a .gguf")
        return path
    if not HUB_ID.fullmatch(str(source)) or path.suffix == ".gguf":
        raise BadInput(
            f"model.source {str(source)!r}: no such folder or file, and not a hub id "
            f"(owner/name), {SMOLLM2!r} or {TINY!r}"
        )
    return _from_hub(str(source), weights)


@functools.cache  # asked for at every save: one process keeps to one snapshot
def _from_hub(name: str, weights: bool) -> Path:
    # Imported here: most runs never need the hub client.
    from huggingface_hub import snapshot_download

    files = [*SMALL_FILES, "*.safetensors"] if weights else SMALL_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # the client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise BadInput(
            f"model.source {name!r}: no such folder here, and the hub did not give it "
            f"({type(error).__name__}: {reason})"
        ) from error


def base_name(source: str | Path) -> str:
    """What an exported adapter calls its base model."""
    return smollm2.HUB_NAME if source == SMOLLM2 else str(source)


def base_fingerprint(source: str | Path) -> str:
    """sha256 over the names, sizes and first MiB of a base model's weight files.

    Cheap for any size, and enough to notice that an adapter met another base.
    """
    if source == TINY:
        return TINY
    path = locate(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(HEAD_BYTES))
    return digest.hexdigest()
