"""Weights for a sampler that is not quite the trainer: truncated importance sampling.

Old is the trainer's policy at the start of the batch's updates, the sampler's log-probs
are what it reported while generating. The weights multiply a token's policy loss and
nothing else; they never enter the ratio's product. As in verl's code (token, sequence,
2 usual) and TRL's (masking above 3); arXiv 2605.07331 trains with sequence weights
capped at 5.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from grpo_jax.objective.choices import AnyArray, check_choice
from grpo_jax.objective.ratios import TOKEN_LIMIT, token_log_ratio, usable_tokens
from grpo_jax.objective.scans import segment_count, segment_starts, segment_sum

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


@partial(jax.jit, static_argnames=("level", "mode"))
def tis_weights(
    old_logprobs: Float[AnyArray, "B T"],
    sampler_logprobs: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    cap: ScalarLike,
    level: str = "token",
    mode: str = "truncate",
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Detached weights old / sampler, bounded by `cap`; 0 at masked tokens.

    `level`: each "token" by itself, the row's or segment's product ("sequence"), or its
    geometric mean per token ("geometric"). `mode`: a weight above the cap becomes the
    cap ("truncate") or 0 ("mask"). Tokens without a finite pair of log-probs weigh 0.
    """
    check_choice("level", level, LEVELS)
    check_choice("mode", mode, MODES)
    use = usable_tokens(mask, segment_ids, old_logprobs, sampler_logprobs)
    gap = token_log_ratio(old_logprobs, sampler_logprobs, use)
    if level != "token":
        starts = segment_starts(segment_ids)
        total = segment_sum(gap, starts)
        if level == "geometric":
            total = total / jnp.maximum(segment_count(use, starts), 1)
        gap = jnp.clip(total, -TOKEN_LIMIT, TOKEN_LIMIT)
    weights = jnp.exp(gap)
    over = weights > cap
    weights = jnp.where(over, cap if mode == "truncate" else 0.0, weights)
    return jax.lax.stop_gradient(jnp.where(use, weights, 0.0))
