"""Beside the policy loss: KL to the reference, lost likelihood (LLDS), entropy.

All return (total, weight) like `losses.aggregate`; the trainer adds them to the
policy loss with their own coefficients (beta, lambda).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from grpo_jax.objective.choices import AnyArray, check_choice, per_token
from grpo_jax.objective.losses import aggregate
from grpo_jax.objective.ratios import masked, token_log_ratio, usable_tokens
from grpo_jax.objective.scans import run_starts, segment_starts, segment_sum


@partial(jax.jit, static_argnames=("estimator", "aggregation"))
def kl_penalty(
    new_logprobs: Float[AnyArray, "B T"],
    ref_logprobs: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    estimator: str = "k3",
    aggregation: str = "token_mean",
    max_length: ScalarLike | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """KL(new || ref) from sampled tokens, with d = log ref - log new within +-20.

    "k3" is exp(d) - d - 1 (GRPO, arXiv 2402.03300), "k2" d^2 / 2. k1 = -d is refused:
    as a loss term its expected gradient is zero, it only adds noise.
    """
    if estimator == "k1":
        raise ValueError(
            "estimator 'k1' cannot be a loss term, its expected gradient is zero; "
            "use k2 or k3"
        )
    check_choice("estimator", estimator, ("k2", "k3"))
    ref_logprobs = jax.lax.stop_gradient(ref_logprobs)
    use = usable_tokens(mask, segment_ids, new_logprobs, ref_logprobs)
    d = token_log_ratio(ref_logprobs, new_logprobs, use)
    penalties = jnp.expm1(d) - d if estimator == "k3" else d**2 / 2
    return aggregate(penalties, use, aggregation, max_length, segment_ids)


@partial(jax.jit, static_argnames="aggregation")
def entropy_bonus(
    entropy: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    aggregation: str = "token_mean",
    max_length: ScalarLike | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Entropy of the policy at sampled tokens, nats, for the loss to subtract.

    As in PPO (arXiv 1707.06347): it keeps samples apart where groups fall flat. A large
    weight makes the policy ramble.
    """
    use = usable_tokens(mask, segment_ids, entropy)
    entropy = masked(use, entropy)
    return aggregate(entropy, use, aggregation, max_length, segment_ids)


@partial(jax.jit, static_argnames=("gate", "normalization"))
def lld_penalty(
    new_logprobs: Float[AnyArray, "B T"],
    old_logprobs: Float[AnyArray, "B T"],
    advantages: Float[AnyArray, " B"] | Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    gate: str = "action",
    normalization: str = "paper",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    token_weights: Float[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """LLDS (arXiv 2512.04220): likelihood that good rows lost since the old policy.

    Rows whose *outcome* advantage is >= 0 pay max(0, old - new) at tokens inside a
    gate that lost likelihood in sum: each run of action tokens ("action", the main
    form), the whole row or segment ("response"), or each token by itself ("token").

    `normalization`: "paper" is the mean over those rows of each row's token mean;
    "code" the sum over all action tokens, those of other rows included; "tokens" over
    the action tokens of those rows (the form of the ablations). `token_weights`
    scales tokens and leaves gate and denominator alone (the paper's answer masking).
    Exactly 0 while new == old, so inert in the first update after a rollout.
    """
    check_choice("gate", gate, ("action", "response", "token"))
    check_choice("normalization", normalization, ("paper", "code", "tokens"))
    shape, packed = new_logprobs.shape, segment_ids is not None
    old_logprobs = jax.lax.stop_gradient(old_logprobs)
    advantages = per_token("advantages", advantages, shape, packed)
    use = usable_tokens(mask, segment_ids, new_logprobs, old_logprobs, advantages)
    # The policy loss has the same log-ratio: under one jit it is computed once.
    drop = -token_log_ratio(new_logprobs, old_logprobs, use)
    gated = lld_gates(gate, jax.lax.stop_gradient(drop), use, segment_ids)
    preferred = advantages >= 0
    losses = jnp.where(gated, jax.nn.relu(drop), 0.0)
    if token_weights is not None:
        losses = losses * masked(use, jax.lax.stop_gradient(token_weights))
    match normalization:
        case "paper":
            how = "seq_mean_token_mean"
            return aggregate(losses, use, how, None, segment_ids, preferred)
        case "code":
            return aggregate(jnp.where(preferred, losses, 0.0), use)
    return aggregate(losses, use, chosen=preferred)


def answer_weight(mean_calls: float, *, form: str, base_calls: float = 2.0) -> float:
    """What an answer's tokens weigh in `lld_penalty`, others 1 (its answer masking).

    By how often the policy calls its tools, `mean_calls` valid calls a trajectory, so
    that one which has stopped calling is not kept at its bare answers. "paper":
    min(calls / base_calls, 1), where `base_calls` is 2 in the paper's 3B base run;
    "code": max(calls - 1, 0), at most 1. Both multiply the penalty's own coefficient,
    .2 as a rule: at 1.2 calls "paper" gives .6 and "code" .2, times .2 .04.
    """
    check_choice("form", form, ("paper", "code"))
    if form == "paper":
        return min(mean_calls / base_calls, 1.0)
    return min(max(mean_calls - 1.0, 0.0), 1.0)


def lld_gates(
    gate: str,
    drop: Float[Array, "B T"],
    use: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
) -> Bool[Array, "B T"]:
    """Whether the token's run, row or itself lost likelihood in sum."""
    starts = segment_starts(segment_ids)
    match gate:
        case "action":
            return segment_sum(drop, run_starts(use, starts)) > 0
        case "response":
            return segment_sum(drop, starts) > 0
    return drop > 0
