"""What the losses do to the tokens, as numbers to watch: by position, by gate.

Sums and counts, so that micro-batches add up; nothing here is differentiated.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.objective.choices import AnyArray, per_token
from grpo_jax.objective.penalties import lld_gates
from grpo_jax.objective.ratios import (
    policy_log_ratio,
    token_log_ratio,
    token_position,
    usable_tokens,
)
from grpo_jax.objective.scans import run_starts, segment_starts

# First action token of each bucket of positions, counted from 1.
POSITIONS = tuple(4**k for k in range(8))  # 1, 4, 16 ... 16384


@partial(jax.jit, static_argnames=("ratio",))
def ratio_by_position(
    new_logprobs: Float[AnyArray, "B T"],
    old_logprobs: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    ratio: str = "token",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    turn_ids: Int[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, " K"], Float[Array, " K"], Float[Array, " K"]]:
    """Sum, count and maximum of the ratio in each bucket of `POSITIONS`.

    A fixed window clips more and more of a cumulative ratio that widens with the
    position (arXiv 2605.07331); a maximum is 0 where a bucket is empty.
    """
    use = usable_tokens(mask, segment_ids, new_logprobs, old_logprobs)
    log_ratio = policy_log_ratio(
        ratio, new_logprobs, old_logprobs, use, segment_ids, turn_ids
    )
    position = token_position(use, segment_starts(segment_ids))
    values = jax.lax.stop_gradient(jnp.where(use, jnp.exp(log_ratio), 0.0))
    ends = (*POSITIONS[1:], jnp.iinfo(jnp.int32).max)
    rows = []
    for low, high in zip(POSITIONS, ends, strict=True):
        inside = use & (position >= low) & (position < high)
        here = jnp.where(inside, values, 0.0)
        rows.append((here.sum(), inside.sum().astype(jnp.float32), here.max()))
    sums, counts, maxima = (jnp.stack(column) for column in zip(*rows, strict=True))
    return sums, counts, maxima


@partial(jax.jit, static_argnames=("gate",))
def lld_gate_rate(
    new_logprobs: Float[AnyArray, "B T"],
    old_logprobs: Float[AnyArray, "B T"],
    advantages: Float[AnyArray, " B"] | Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    gate: str = "action",
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(open, all) gates of the likelihood-displacement penalty, in rows it protects.

    A gate is a turn, a trajectory or a token, as `gate` says (`penalties.lld_penalty`).
    """
    packed = segment_ids is not None
    advantages = per_token("advantages", advantages, new_logprobs.shape, packed)
    use = usable_tokens(mask, segment_ids, new_logprobs, old_logprobs, advantages)
    drop = -token_log_ratio(new_logprobs, old_logprobs, use)
    is_open = lld_gates(gate, jax.lax.stop_gradient(drop), use, segment_ids)
    starts = segment_starts(segment_ids)
    match gate:
        case "action":
            first = use & run_starts(use, starts)
        case "response":
            first = use & (token_position(use, starts) == 1)
        case _:
            first = use
    first &= advantages >= 0
    opened = jnp.sum(first & is_open).astype(jnp.float32)
    return opened, jnp.sum(first).astype(jnp.float32)
