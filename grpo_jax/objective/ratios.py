"""Importance ratios pi_new / pi_old in log space: token, sequence, step, cumulative.

Old is always the policy at the start of this batch's updates, never the reference.
Token log-ratios are clamped to +-20; the three that combine tokens are used in the
stop-gradient form sg(value) + lp - sg(lp): their value is that of the whole segment,
step or prefix, their gradient flows through the current token only.

GSPO arXiv 2507.18071, CTPO 2605.07331, StepPO 2604.18401. In CTPO the product runs
over action tokens alone and goes on across turns (the authors' code; the paper's
text is silent on tool tokens).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.objective.choices import AnyArray, check_choice
from grpo_jax.objective.scans import (
    running_count,
    running_sum_and_count,
    segment_count,
    segment_starts,
    segment_sum,
    turn_starts,
)

TOKEN_LIMIT = 20.0  # a token's log-ratio lies within +- this
CAP = 10.0  # upper limit of sequence, step and cumulative log-ratios in the loss
RATIOS = ("token", "sequence", "cumulative", "step")


def usable_tokens(
    mask: Bool[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"] | None,
    *values: Float[AnyArray, "B T"],
) -> Bool[Array, "B T"]:
    """Action tokens outside padding at which all values are finite.

    This mask replaces the caller's everywhere, position counters included.
    """
    use = jnp.asarray(mask, bool)
    if segment_ids is not None:
        use &= segment_ids > 0
    for value in values:
        use &= jnp.isfinite(value)
    return use


def masked(
    mask: Bool[AnyArray, "B T"], x: Float[AnyArray, "B T"]
) -> Float[Array, "B T"]:
    """float32 x with 0 where masked: replaced before any exp, product or sum.

    A `where` after an exp would still give NaN gradients at masked positions.
    """
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def token_log_ratio(
    numerator: Float[Array, "B T"],
    denominator: Float[Array, "B T"],
    use: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Clamped log-ratio of two policies per token, 0 at unused positions."""
    difference = masked(use, numerator) - masked(use, denominator)
    return jnp.clip(difference, -TOKEN_LIMIT, TOKEN_LIMIT)


@jax.jit
def cumulative_log_ratio(
    log_ratio: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """CTPO's running sum of token log-ratios, and its 1-based action-token count.

    Detached, tokens clamped to +-20, the sum not capped. Tokens that are masked or
    not finite add 0 and do not advance the count, which is 1 before the first one.

        mask        1    1    0    0    1    1    0
        log_ratio  .02  .05   9   -3   .03 -.08   4
        cumulative .02  .07  .07  .07  .10  .02  .02
        position    1    2    2    2    3    4    4
    """
    use = usable_tokens(mask, segment_ids, log_ratio)
    starts = segment_starts(segment_ids)
    tokens = jax.lax.stop_gradient(masked(use, log_ratio))
    tokens = jnp.clip(tokens, -TOKEN_LIMIT, TOKEN_LIMIT)
    cumulative, count = running_sum_and_count(tokens, use, starts)
    return cumulative, jnp.maximum(count, 1)


def token_position(
    use: Bool[Array, "B T"], starts: Bool[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """1-based count of action tokens so far in the row or segment."""
    return jnp.maximum(running_count(use, starts), 1)


def policy_log_ratio(
    ratio: str,
    new_logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    use: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    turn_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    """The log-ratio that the loss exponentiates; `use` from `usable_tokens`."""
    check_choice("ratio", ratio, RATIOS)
    tokens = token_log_ratio(new_logprobs, old_logprobs, use)
    if ratio == "token":
        return tokens
    starts, tokens = segment_starts(segment_ids), jax.lax.stop_gradient(tokens)
    match ratio:
        case "cumulative":
            value, _ = running_sum_and_count(tokens, use, starts)
        case "sequence":
            value = _segment_mean(tokens, use, starts)
        case "step":
            if turn_ids is None:
                raise ValueError("ratio 'step' needs turn_ids")
            value = _segment_mean(tokens, use, turn_starts(turn_ids, use, starts))
    new_logprobs = masked(use, new_logprobs)
    through = new_logprobs - jax.lax.stop_gradient(new_logprobs)
    return jnp.minimum(value + through, CAP)


def _segment_mean(tokens, use, starts) -> Float[Array, "B T"]:
    count = segment_count(use, starts)
    return segment_sum(tokens, starts) / jnp.maximum(count, 1)
