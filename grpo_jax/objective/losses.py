"""The clipped policy loss and the aggregation that all losses share.

Choices deviate from the papers' text only where their code does, and say so:
* CTPO (arXiv 2605.07331): the window [exp(-e sqrt t), exp(e_high sqrt t)] is in log
  space, as in paper and code; the collapse article's linear form is "sqrt_linear".
  The dual clip exists in the code only and is off unless `dual_clip` is given.
* NGRPO (2509.18851) and DAPO (2503.14476) need no code of their own: decoupled
  bounds are `epsilon` and `epsilon_high` (.16/.24 and .2/.28).
* Rows without action tokens leave the sequence means' denominator.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from grpo_jax.objective.choices import AnyArray, check_choice, per_token
from grpo_jax.objective.ratios import (
    masked,
    policy_log_ratio,
    token_position,
    usable_tokens,
)
from grpo_jax.objective.scans import segment_count, segment_starts

SURROGATES = ("ppo", "cispo")
CLIPS = ("fixed", "sqrt_log", "sqrt_linear", "none")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
Bound = Float[Array, ""] | Float[Array, "B T"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("total", "weight", "metrics"),
    meta_fields=(),
)
@dataclass(frozen=True)
class PolicyLoss:
    """A loss before its division, so that micro-batches can be added.

    Attributes:
      total: f32 [], sum of the loss.
      weight: f32 [], what the total is divided by.
      metrics: name -> (sum, weight), both f32 [].
    """

    total: jax.Array
    weight: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]

    @property
    def loss(self) -> jax.Array:
        return self.total / jnp.maximum(self.weight, 1.0)


@partial(jax.jit, static_argnames=("ratio", "clip", "surrogate", "aggregation"))
def policy_loss(
    new_logprobs: Float[AnyArray, "B T"],
    old_logprobs: Float[AnyArray, "B T"],
    advantages: Float[AnyArray, " B"] | Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    ratio: str = "token",
    clip: str = "fixed",
    surrogate: str = "ppo",
    epsilon: ScalarLike = 0.2,
    epsilon_high: ScalarLike | None = None,
    dual_clip: ScalarLike | None = None,
    aggregation: str = "token_mean",
    max_length: ScalarLike | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    turn_ids: Int[AnyArray, "B T"] | None = None,
    tis_weights: Float[AnyArray, " B"] | Float[AnyArray, "B T"] | None = None,
    among: Bool[AnyArray, "B T"] | None = None,
) -> PolicyLoss:
    """The surrogate loss with any ratio, window and aggregation (design sec. 5).

    `surrogate`: "ppo" drops the gradient of a token outside the window, "cispo"
    (arXiv 2506.13585) keeps it and bounds its weight:
    -sg(clip(ratio)) A log p. Differentiable in `new_logprobs` only. Tokens where a
    log-prob, advantage or weight is not finite are treated as masked and counted in
    `nonfinite_tokens`. `among`: only those tokens are aggregated, as if they were all
    there are; ratios, positions and metrics take every action token.
    """
    check_choice("clip", clip, CLIPS)
    check_choice("surrogate", surrogate, SURROGATES)
    if surrogate == "cispo" and dual_clip is not None:
        raise ValueError("dual_clip bounds the loss of surrogate 'ppo', not of 'cispo'")
    shape, packed = new_logprobs.shape, segment_ids is not None
    advantages = per_token("advantages", advantages, shape, packed)
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    use = usable_tokens(mask, segment_ids, new_logprobs, old_logprobs, advantages)
    if tis_weights is not None:
        tis_weights = per_token("tis_weights", tis_weights, shape, packed)
        use &= jnp.isfinite(tis_weights)
    advantages = masked(use, advantages)
    log_ratio = policy_log_ratio(
        ratio, new_logprobs, old_logprobs, use, segment_ids, turn_ids
    )
    position = token_position(use, segment_starts(segment_ids))
    window = clip_window(clip, position, epsilon, epsilon_high)
    if surrogate == "cispo":
        losses = _cispo(log_ratio, masked(use, new_logprobs), advantages, window)
    else:
        ceiling = None if dual_clip is None else _dual_bound(clip, position, dual_clip)
        losses = _ppo(log_ratio, advantages, window, ceiling)
    if tis_weights is not None:
        losses = losses * masked(use, tis_weights)
    summed = use if among is None else use & among
    total, weight = aggregate(losses, summed, aggregation, max_length, segment_ids)
    metrics = _metrics(surrogate, log_ratio, advantages, window, use)
    action = usable_tokens(mask, segment_ids)
    metrics["nonfinite_tokens"] = (_count(action & ~use), _count(action))
    return PolicyLoss(total, weight, metrics)


def aggregate(
    losses: Float[Array, "B T"],
    use: Bool[Array, "B T"],
    aggregation: str = "token_mean",
    max_length: ScalarLike | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chosen: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(total, weight) of per-token losses; the loss is total / max(weight, 1).

    Rows, or packed segments, count when they have an action token. `chosen`, constant
    within each, selects some of them.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "constant" and max_length is None:
        raise ValueError("aggregation 'constant' needs max_length, its divisor")
    starts = segment_starts(segment_ids)
    counted = use if chosen is None else use & chosen
    losses = jnp.where(counted, losses, 0.0)
    if aggregation == "token_mean":
        return jnp.sum(losses), jnp.sum(counted).astype(jnp.float32)
    if starts is None:
        weight = jnp.sum(jnp.any(counted, axis=-1)).astype(jnp.float32)
    else:
        # Counts of `use`, not of `counted`: one scan serves every term of a loss.
        first = use & (token_position(use, starts) == 1)
        weight = jnp.sum(first & counted).astype(jnp.float32)
    match aggregation:
        case "seq_mean_token_mean":
            lengths = segment_count(use, starts)
            losses = losses / jnp.maximum(lengths, 1)
        case "constant":
            weight = weight * max_length
    return jnp.sum(losses), weight


def clip_window(
    clip: str,
    position: Int[Array, "B T"],
    epsilon: ScalarLike,
    epsilon_high: ScalarLike | None,
) -> tuple[Bound, Bound]:
    """Logarithms of the ratio's lower and upper bound, scalar or one a token.

    In log space because exp is monotonic: one exp a token then serves ratio and bounds.
    """
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    root = jnp.sqrt(position.astype(jnp.float32))
    match clip:
        case "fixed":
            return _log(1 - epsilon), _log(1 + epsilon_high)
        case "sqrt_linear":
            return _log(1 - epsilon * root), _log(1 + epsilon_high * root)
        case "sqrt_log":
            return -epsilon * root, epsilon_high * root
    return jnp.float32(-jnp.inf), jnp.float32(jnp.inf)


def _log(x: ScalarLike | Float[Array, "B T"]) -> Bound:
    """log x, -inf from 0 down: no ratio is below such a bound."""
    return jnp.log(jnp.maximum(x, 0.0))


def _dual_bound(clip: str, position, dual_clip) -> Bound:
    """Log of the largest ratio that a negative advantage is charged for."""
    if clip.startswith("sqrt"):
        return dual_clip * jnp.sqrt(position.astype(jnp.float32))
    return _log(dual_clip)


def _ppo(log_ratio, advantages, window, ceiling) -> Float[Array, "B T"]:
    """max(-A r, -A clip(r)), for A < 0 at most -A exp(ceiling).

    A > 0 is bounded from above and A < 0 from below; a bounded token has no gradient.
    """
    negative = advantages < 0
    low, high = jnp.maximum(log_ratio, window[0]), jnp.minimum(log_ratio, window[1])
    if ceiling is not None:
        low = jnp.minimum(low, ceiling)
    bounded = jax.lax.stop_gradient(jnp.where(negative, low, high))
    # Not clip's own gradient, which is halved where the ratio is at a bound.
    inside = jnp.where(bounded == log_ratio, log_ratio, bounded)
    return -advantages * jnp.exp(inside)


def _cispo(log_ratio, logprobs, advantages, window) -> Float[Array, "B T"]:
    weight = jnp.exp(jnp.clip(jax.lax.stop_gradient(log_ratio), *window))
    return -advantages * weight * logprobs


def _metrics(surrogate, log_ratio, advantages, window, use) -> dict:
    """Share of tokens that the window acted on: in "ppo" it stopped their gradient."""
    low, high = use & (log_ratio < window[0]), use & (log_ratio > window[1])
    if surrogate == "ppo":
        low, high = low & (advantages < 0), high & (advantages > 0)
    tokens = _count(use)
    return {
        "clip_ratio/low": (_count(low), tokens),
        "clip_ratio/high": (_count(high), tokens),
        "clip_ratio/region": (_count(low) + _count(high), tokens),
    }


def _count(mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(mask).astype(jnp.float32)
