"""GEAR: token weights from where a teacher who knows the answer disagrees.

Of arXiv 2605.11853 only the abstract was at hand: a self-teacher, the same model given
the ground truth; spikes of its divergence mark anchors, from which segments reach to a
boundary that token entropy signals; an anchor's divergence speaks for its segment. No
equation, constant or code was found, so THE DEFINITION BELOW IS THIS PROJECT'S OWN:

    D_t = |log pi(y_t | x, y*, y_<t) - log pi(y_t | x, y_<t)|
    anchor_t: D_t > divergence. It opens a segment, which ends before the next anchor,
              before a token of entropy H_t > entropy, and with its turn
    v_t = D of the segment's anchor, D_t outside of segments
    w_t = clip(1 + kappa (v_t - mean v) / (std v + 1e-6), low, high), over its mean

    D   .1   .1   1.6  .2   .1   .1   2.1  .3      divergence 1, entropy 1, kappa .5
    H   .2   .3   .9   .4   .3   1.4  1.2  .2
    v   .1   .1   1.6  1.6  1.6  .1   2.1  2.1
    w   .37  .37  1.26 1.26 1.26 .37  1.55 1.55

Mean and (population) deviation are those of the trajectory's action tokens, so weights
only move an advantage between its tokens, and never change its sign.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from grpo_jax.objective.choices import AnyArray
from grpo_jax.objective.ratios import masked, usable_tokens
from grpo_jax.objective.scans import (
    run_starts,
    running_sum,
    segment_count,
    segment_starts,
    segment_sum,
)

ROUNDING = 1e-4  # nats by which equal policies may differ in float32; counts as 0


@jax.jit
def gear_weights(
    teacher_logprobs: Float[AnyArray, "B T"],
    logprobs: Float[AnyArray, "B T"],
    entropies: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    divergence: ScalarLike = 1.0,
    entropy: ScalarLike = 1.0,
    kappa: ScalarLike = 0.5,
    low: ScalarLike = 0.2,
    high: ScalarLike = 3.0,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Factors of the advantages, and which tokens are anchors; both detached.

    Log-probs and entropies in nats, `low` above 0. 1 off action tokens and where one of
    the three numbers is not finite; such tokens count nowhere. With `segment_ids` a
    trajectory is a packed segment, else a row.
    """
    given = [jnp.asarray(x) for x in (teacher_logprobs, logprobs, entropies)]
    use = usable_tokens(mask, segment_ids, *given)
    teacher, student, spread = (masked(use, x) for x in given)
    gap = jnp.abs(teacher - student)
    gap = jnp.where(gap < ROUNDING, 0.0, gap)
    starts = segment_starts(segment_ids)
    anchors = use & (gap > divergence)
    turns = run_starts(jnp.asarray(mask, bool), starts)
    edges = anchors | turns | (use & (spread > entropy))
    own = running_sum(jnp.where(anchors, gap, 0.0), edges)  # 0 outside of segments
    value = jnp.where(use, jnp.where(own > 0, own, gap), 0.0)

    count = jnp.maximum(segment_count(use, starts), 1)

    def mean(x):
        return segment_sum(jnp.where(use, x, 0.0), starts) / count

    centred = value - mean(value)
    deviation = jnp.sqrt(mean(centred**2))
    weights = jnp.clip(1.0 + kappa * centred / (deviation + 1e-6), low, high)
    weights = jnp.where(use, weights / jnp.maximum(mean(weights), 1e-6), 1.0)
    return jax.lax.stop_gradient(weights), anchors
