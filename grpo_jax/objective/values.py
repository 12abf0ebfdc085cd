"""The critic's loss and how well it explains what was earned.

Both speak of values at the steps of `advantages.step_advantages`, given anywhere in an
array: a mask says where. Everything else in it is ignored.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.objective.choices import AnyArray
from grpo_jax.objective.statistics import centre

Sums = tuple[Float[Array, ""], Float[Array, ""]]


@partial(jax.jit, static_argnames="clip")
def value_loss(
    values: Float[AnyArray, "*S"],
    old_values: Float[AnyArray, "*S"],
    returns: Float[AnyArray, "*S"],
    mask: Bool[AnyArray, "*S"],
    *,
    clip: float = 0.0,
) -> tuple[Sums, Sums]:
    """Half the squared error of the values -> ((total, weight), (clipped, weight)).

    With `clip` > 0 (in units of the reward) the error is at least that of the value
    moved by no more than `clip` from `old_values`, those from before the first update:
    beyond it nothing is gained (PPO's clipped value loss, in verl and so in StepPO's
    code, arXiv 2604.18401, with clip 0.5). The second pair counts steps that it stops.
    Steps with a number that is not finite carry no loss; the weight counts the mask, so
    that it can be taken before the values are known.
    """
    mask = jnp.asarray(mask, bool)
    weight = jnp.sum(mask).astype(jnp.float32)
    use = mask
    for x in (values, old_values, returns):
        use &= jnp.isfinite(x)
    new, old, target = (
        jnp.where(use, jnp.asarray(x, jnp.float32), 0.0)
        for x in (values, old_values, returns)
    )
    old, target = jax.lax.stop_gradient((old, target))
    error = jnp.square(new - target)
    if not clip:
        return (0.5 * jnp.sum(error), weight), (jnp.zeros_like(weight), weight)
    bounded = jnp.square(old + jnp.clip(new - old, -clip, clip) - target)
    clipped = jnp.sum(bounded > error).astype(jnp.float32)
    return (0.5 * jnp.sum(jnp.maximum(error, bounded)), weight), (clipped, weight)


@jax.jit
def explained_variance(
    values: Float[AnyArray, "*S"],
    returns: Float[AnyArray, "*S"],
    mask: Bool[AnyArray, "*S"],
) -> Float[Array, ""]:
    """1 - var(returns - values) / var(returns) over the mask; NaN for equal returns.

    1 is a perfect critic, 0 one that says the same everywhere, below 0 a harmful one.
    """
    values, returns, mask = (jnp.ravel(x)[None] for x in (values, returns, mask))
    use = jnp.asarray(mask, bool) & jnp.isfinite(values) & jnp.isfinite(returns)
    target, live = centre(jnp.asarray(returns, jnp.float32), use)
    left, _ = centre(returns - jnp.asarray(values, jnp.float32), use)
    share = jnp.sum(left**2) / jnp.maximum(jnp.sum(target**2), 1e-30)
    return jnp.where(jnp.any(live), 1.0 - share, jnp.nan)
