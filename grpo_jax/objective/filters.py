"""Which groups teach nothing, and what a nearly too long answer costs.

Group filters come before the advantages, row filters (void turns, truncation) after
their statistics: see `training.assign`, which applies both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real, ScalarLike

from grpo_jax.objective.choices import AnyArray
from grpo_jax.objective.statistics import centre


@jax.jit
def flat_groups(
    rewards: Real[AnyArray, "P G"], valid: Bool[AnyArray, "P G"] | None = None
) -> Bool[Array, " P"]:
    """Groups whose valid rewards agree to rounding, or with fewer than two of them.

    DAPO's dynamic sampling (arXiv 2503.14476) drops them. With a discount below 1 they
    must go before turn-level advantages, which would punish the opening turns of a
    group in which every rollout succeeded.
    """
    use = jnp.isfinite(rewards)
    use = use if valid is None else use & valid
    _, live = centre(jnp.asarray(rewards, jnp.float32), use)
    return ~jnp.any(live, axis=1)


@jax.jit
def saturated_groups(
    solved: Bool[AnyArray, "P G"], valid: Bool[AnyArray, "P G"] | None = None
) -> Bool[Array, " P"]:
    """Groups whose valid rollouts all solved the task; the filter that fits NGRPO.

    NGRPO's code (arXiv 2509.18851) drops these alone: its virtual sample exists for the
    groups in which every rollout failed.
    """
    use = jnp.ones(solved.shape, bool) if valid is None else jnp.asarray(valid, bool)
    return jnp.all(solved | ~use, axis=1) & jnp.any(use, axis=1)


@jax.jit
def overlong_penalty(
    lengths: Real[AnyArray, "*R"],
    *,
    max_length: ScalarLike,
    buffer: ScalarLike,
    floor: ScalarLike = -1.0,
) -> Float[Array, "*R"]:
    """DAPO's soft penalty (arXiv 2503.14476), added to the reward.

    0 up to max_length - buffer tokens, then linear down to -1 at max_length. `floor`
    -1 is the paper's; verl's code has none (-inf), which makes no difference where
    generation ends at max_length.
    """
    excess = jnp.asarray(lengths, jnp.float32) - (max_length - buffer)
    penalty = -jnp.maximum(excess, 0.0) / buffer
    return jnp.maximum(penalty, floor)
