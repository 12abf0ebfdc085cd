"""Means and deviations of pools of samples, safe where a pool is flat or empty.

A pool whose spread is within rounding, or of fewer than two samples, gives exactly 0,
where (x - mean) / (std + eps) would amplify rounding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num, ScalarLike

FLAT = 1e-6  # spread, relative to max(1, |mean|), below which a pool is constant


def usable_rows(mask, *arrays) -> tuple[jax.Array, ...]:
    """Float32 arrays, 0 where unused, and the mask without non-finite rows."""
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    use = jnp.asarray(mask, bool)
    for x in arrays:
        use &= jnp.all(jnp.isfinite(x) | ~jnp.asarray(mask, bool), -1, keepdims=True)
    return *(jnp.where(use, x, 0.0) for x in arrays), use


def centre(
    x: Num[Array, "N K"], use: Bool[Array, "N K"]
) -> tuple[Float[Array, "N K"], Bool[Array, "N K"]]:
    """x minus its row's mean, and where it is neither unused nor in a flat row.

    Rows are shifted by their minimum first, so that a small spread around a large
    mean keeps its digits in float32.
    """
    count = jnp.sum(use, axis=1, keepdims=True)
    low = jnp.min(jnp.where(use, x, jnp.inf), axis=1, keepdims=True)
    low = jnp.where(count > 0, low, 0.0)
    shifted = jnp.where(use, x - low, 0.0)
    mean = jnp.sum(shifted, axis=1, keepdims=True) / jnp.maximum(count, 1)
    spread = jnp.max(shifted, axis=1, keepdims=True)
    varied = spread > FLAT * jnp.maximum(1.0, jnp.abs(low + mean))
    return jnp.where(use, shifted - mean, 0.0), use & varied & (count >= 2)


def deviation(
    centred: Float[Array, "N K"], use: Bool[Array, "N K"], ddof: int
) -> Float[Array, "N 1"]:
    """Standard deviation of each row's used values, given their centred form."""
    freedom = jnp.maximum(jnp.sum(use, axis=1, keepdims=True) - ddof, 1)
    return jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / freedom)


def standardise(
    x: Float[Array, "N K"], use: Bool[Array, "N K"], ddof: int, eps: ScalarLike
) -> Float[Array, "N K"]:
    centred, live = centre(x, use)
    return jnp.where(live, centred / (deviation(centred, use, ddof) + eps), 0.0)
