"""Shapes of models whose weights nobody needs to download to plan for them.

Copied from the checkpoints' config.json.
"""

from grpo_jax.models.config import ModelConfig


def _qwen2(width, layers, heads, kv_heads, mlp, vocab, tied, positions=32768):
    return ModelConfig(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width // heads,
        mlp_width=mlp,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=True,
        qk_norm=False,
        tied=tied,
        max_positions=positions,
        architecture="qwen2",
    )


def _qwen3(width, layers, heads, kv_heads, mlp, tied):
    return ModelConfig(
        vocab_size=151936,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=128,
        mlp_width=mlp,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=True,
        tied=tied,
        max_positions=40960,
        architecture="qwen3",
    )


def _llama(width, layers, heads, kv_heads, mlp, tied, factor):
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return ModelConfig(
        vocab_size=128256,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width // heads,
        mlp_width=mlp,
        norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=tuple(sorted(scaling.items())),
        qkv_bias=False,
        qk_norm=False,
        tied=tied,
        max_positions=131072,
        architecture="llama",
    )


_SHAPES = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, 152064, False),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, False),
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, True, 32.0),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 24, 8, 8192, True, 32.0),
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, False, 8.0),
}


def known_config(source: str) -> ModelConfig | None:
    """The shape of a hub id of these families, instruction-tuned or not; else None."""
    return _SHAPES.get(source.removesuffix("-Instruct"))
