"""Loss terms and metrics by role: reasoning, or tool call.

`objective.role_weights` is the fund article's loss, .3 mean over reasoning + .7 mean
over tool-call tokens, on whatever adapters there are. The article leaves the
normalisation open; here every role has its own divisor, and one without a token in the
minibatch adds 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.types import TrajectoryBatch
from tools_env.roles import ROLES


def by_role(
    name: str, batch: TrajectoryBatch, weights: tuple[float, ...], term: Callable
) -> dict:
    """{name: term(all tokens)}; with weights {name/role: term(the role's tokens)}."""
    if not weights:
        return {name: term(batch.action_mask)}
    return {f"{name}/{role}": term(batch.roles == i) for i, role in enumerate(ROLES)}


def role_weight(term: str, weights: tuple[float, ...]) -> float:
    """The weight of a term that `by_role` named."""
    return weights[ROLES.index(term.partition("/")[2])]


def role_metrics(entropy: Float[Array, "B T"], batch: TrajectoryBatch) -> dict:
    """The share of tool-call tokens and each role's entropy, as (sum, weight)."""
    metrics, total = {}, _count(batch.action_mask)
    for i, role in enumerate(ROLES):
        own = batch.action_mask & (batch.roles == i)
        metrics[f"entropy/{role}"] = mean_pair(entropy, own)
    metrics["roles/tool_share"] = _count(own), total
    return metrics


def mean_pair(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[jax.Array, jax.Array]:
    """(sum, count) of the finite values where the mask is True."""
    use = mask & jnp.isfinite(values)
    return jnp.sum(jnp.where(use, values, 0.0)), _count(use)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask).astype(jnp.float32)
