"""Shapes of models whose weights nobody needs to download to plan for them.

Copied from the checkpoints' config.json.
"""

from grpo_jax.models.config import ModelConfig

_LLAMA3 = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What the members of a family share.
_QWEN2 = dict(
    architecture="qwen2",
    vocab_size=151936,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    qkv_bias=True,
    qk_norm=False,
    max_positions=32768,
)
_QWEN3 = _QWEN2 | dict(
    architecture="qwen3", qkv_bias=False, qk_norm=True, max_positions=40960
)
_LLAMA = _QWEN2 | dict(
    architecture="llama",
    vocab_size=128256,
    norm_eps=1e-5,
    rope_theta=5e5,
    qkv_bias=False,
    max_positions=131072,
)


def _shape(family, width, layers, heads, kv_heads, mlp, *, tied, **own) -> ModelConfig:
    """`own`: what this member does not share; a head has width / heads if unsaid."""
    sizes = dict(
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width // heads,
        mlp_width=mlp,
        tied=tied,
    )
    return ModelConfig(**(family | sizes | own))


def _qwen3(*sizes, tied):
    return _shape(_QWEN3, *sizes, tied=tied, head_width=128)


def _llama(*sizes, tied, factor):
    scaling = tuple(sorted((_LLAMA3 | {"factor": factor}).items()))
    return _shape(_LLAMA, *sizes, tied=tied, rope_scaling=scaling)


_SHAPES = {
    "Qwen/Qwen2.5-0.5B": _shape(_QWEN2, 896, 24, 14, 2, 4864, tied=True),
    "Qwen/Qwen2.5-1.5B": _shape(_QWEN2, 1536, 28, 12, 2, 8960, tied=True),
    "Qwen/Qwen2.5-3B": _shape(_QWEN2, 2048, 36, 16, 2, 11008, tied=True),
    "Qwen/Qwen2.5-7B": _shape(
        _QWEN2, 3584, 28, 28, 4, 18944, tied=False, vocab_size=152064
    ),
    "Qwen/Qwen2.5-14B": _shape(
        _QWEN2, 5120, 48, 40, 8, 13824, tied=False, vocab_size=152064
    ),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, tied=False),
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, tied=True, factor=32.0),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 24, 8, 8192, tied=True, factor=32.0),
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, tied=False, factor=8.0),
}


def known_config(source: str) -> ModelConfig | None:
    """The shape of a hub id of these families, instruction-tuned or not; else None."""
    return _SHAPES.get(source.removesuffix("-Instruct"))
