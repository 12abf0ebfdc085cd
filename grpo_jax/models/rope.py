"""Rotary position embedding (arXiv 2104.09864) with the scalings checkpoints declare.

The halves convention of Hugging Face: dimension i turns together with i + H/2.
Frequencies are computed once in float64 on the host.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from grpo_jax.models.config import ModelConfig


def frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] (radians a position) and the factor on cos and sin."""
    half = np.arange(0, config.head_width, 2, dtype=np.float64)
    base = config.rope_theta ** (-half / config.head_width)
    scaling = dict(config.rope_scaling or ())
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return base, 1.0
        case "linear":
            return base / float(scaling["factor"]), 1.0
        case "factors":  # GGUF stores llama3 scaling so
            return base / np.asarray(scaling["factors"]), 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(base, scaling, config)
    raise ValueError(
        f"rope_scaling type {kind!r} is not known; known: default, linear, llama3, yarn"
    )


def _llama3(base: np.ndarray, scaling: Mapping) -> np.ndarray:
    """Llama 3.1: long waves are stretched, short ones kept, a ramp between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    waves = float(scaling["original_max_position_embeddings"]) * base / (2 * math.pi)
    keep = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return keep * base + (1 - keep) * base / factor


def _yarn(
    base: np.ndarray, scaling: Mapping, config: ModelConfig
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones."""
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or config.max_positions

    def dimension(rotations):
        """The dimension that turns `rotations` times over the original context."""
        ratio = original / (rotations * 2 * math.pi)
        return config.head_width * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_width - 1)
    ramp = (np.arange(len(base)) - low) / max(high - low, 1e-3)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    return keep * base + (1 - keep) * base / factor, _yarn_attention(factor, scaling)


def _yarn_attention(factor: float, scaling: Mapping) -> float:
    """Temperature correction that YaRN puts on cos and sin."""

    def magnitude(scale):
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(float(mscale)) / magnitude(float(all_dim))
    return magnitude(1.0)


def rotations(
    config: ModelConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """cos and sin of every position, float32, one axis left for the heads."""
    inverse, factor = frequencies(config)
    angles = positions[..., None, None].astype(jnp.float32) * inverse.astype(np.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T 1 h"],
    sin: Float[Array, "B T 1 h"],
) -> Float[Array, "B T N H"]:
    """Turn each head by its position's angles; computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
