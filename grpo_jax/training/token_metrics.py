"""What a forward pass shows of a batch's tokens, whatever its loss makes of them.

Pairs are (sum, weight); a bare number is a maximum. A number that is not finite leaves
sum and weight, or one bad token would hide the rest; `nonfinite_tokens` counts it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax import objective
from grpo_jax.training.roles import mean_pair, role_metrics
from grpo_jax.types import TrajectoryBatch

GAP = "sampling/sampling_logp_difference"
RATIO_MAX = "ratio/max_by_position/"


def token_metrics(
    entropy: Float[Array, "B T"], batch: TrajectoryBatch, by_role: bool
) -> dict:
    """The entropy, and by role."""
    metrics = {"entropy": mean_pair(entropy, batch.action_mask)}
    return metrics | (role_metrics(entropy, batch) if by_role else {})


def policy_metrics(
    logprobs: Float[Array, "B T"],
    old: Float[Array, "B T"],
    batch: TrajectoryBatch,
    ratio: str,
) -> dict:
    """Ratios by position, and the distance of the old policy to the sampler."""
    mask = batch.action_mask
    gap = jnp.abs(old - batch.sampler_logprobs)
    largest = jnp.max(jnp.where(mask & jnp.isfinite(gap), gap, 0.0))
    metrics = {f"{GAP}/mean": mean_pair(gap, mask), f"{GAP}/max": largest}
    sums, counts, maxima = objective.ratio_by_position(
        logprobs,
        old,
        mask,
        ratio=ratio,
        segment_ids=batch.segment_ids,
        turn_ids=batch.turn_ids,
    )
    for k, position in enumerate(objective.POSITIONS):
        metrics[f"ratio/mean_by_position/{position}"] = sums[k], counts[k]
        metrics[f"{RATIO_MAX}{position}"] = maxima[k]
    return metrics
