"""Argument types and checks shared by the objective's public functions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

AnyArray = jax.Array | np.ndarray


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError that names the argument, its value and what is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def per_token(
    name: str, value: AnyArray, shape: tuple[int, int], packed: bool
) -> Float[Array, "B T"]:
    """A [B] or [B,T] argument as detached float32 [B,T]; packed rows need [B,T]."""
    value = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
    if value.shape == shape:
        return value
    if packed:
        raise ValueError(
            f"{name} must be [B,T] = {shape} with segment_ids, "
            f"because a row holds several segments; got {value.shape}"
        )
    if value.shape == shape[:1]:
        return jnp.broadcast_to(value[:, None], shape)
    raise ValueError(f"{name} must be [B] or [B,T] of {shape}; got {value.shape}")
