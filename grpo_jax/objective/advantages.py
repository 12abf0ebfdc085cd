"""Advantages from rewards: a trajectory's, a turn's or a step's.

Fed by the rewards of step 3 of a training step; the results are broadcast to tokens
and go to `losses.policy_loss`. All results are detached. Standard deviations are
sample ones by default (`ddof=1`), as in the public code of the papers; ddof=0 gives
the population form. A pool whose spread is within rounding, or of fewer than two
samples, gives exactly 0, where (x - mean) / (std + eps) would amplify rounding.

GRPO arXiv 2402.03300, Dr.GRPO 2503.20783, NGRPO 2509.18851, GTPO 2511.14846,
StepPO 2604.18401.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real, ScalarLike

from grpo_jax.objective.choices import AnyArray, check_choice
from grpo_jax.objective.scans import discounted_sum
from grpo_jax.objective.statistics import (
    centre,
    deviation,
    standardise,
    usable_rows,
)


@partial(jax.jit, static_argnames=("num_virtual", "ddof", "scale"))
def group_advantages(
    rewards: Real[AnyArray, "P G"],
    valid: Bool[AnyArray, "P G"] | None = None,
    *,
    virtual_reward: ScalarLike | Real[AnyArray, " P"] | None = None,
    num_virtual: int = 1,
    ddof: int = 1,
    scale: str = "std",
    eps: ScalarLike = 1e-6,
) -> Float[Array, "P G"]:
    """Group-relative advantages; rows that are invalid or not finite get 0.

    `scale`: "std" is GRPO, "none" Dr.GRPO, "batch" divides by the std of all raw
    rewards of the batch. NGRPO: `num_virtual` samples of `virtual_reward`, a number or
    one a group, join each group's statistics (and the batch's), so that an all-wrong
    group is pushed down.
    """
    check_choice("scale", scale, ("std", "none", "batch"))
    if num_virtual < 0:
        raise ValueError(f"num_virtual must be at least 0, got {num_virtual}")
    num_real = rewards.shape[1]
    samples = jnp.asarray(rewards, jnp.float32)
    use = jnp.ones(samples.shape, bool) if valid is None else jnp.asarray(valid, bool)
    if virtual_reward is not None:
        best = jnp.asarray(virtual_reward, jnp.float32).reshape(-1, 1)
        best = jnp.broadcast_to(best, (len(samples), num_virtual))
        samples = jnp.concatenate([samples, best], axis=1)
        use = jnp.pad(use, ((0, 0), (0, num_virtual)), constant_values=True)
    use &= jnp.isfinite(samples)
    centred, live = centre(samples, use)
    match scale:
        case "std":
            centred = centred / (deviation(centred, use, ddof) + eps)
        case "batch":
            pool, _ = centre(samples.reshape(1, -1), use.reshape(1, -1))
            centred = centred / (deviation(pool, use.reshape(1, -1), ddof) + eps)
    return jax.lax.stop_gradient(jnp.where(live, centred, 0.0)[:, :num_real])


@partial(jax.jit, static_argnames=("norm_scope", "scale", "ddof"))
def turn_advantages(
    turn_rewards: Real[AnyArray, "P G M"],
    turn_mask: Bool[AnyArray, "P G M"],
    *,
    gamma: ScalarLike,
    norm_scope: str = "group",
    scale: str = "std",
    ddof: int = 1,
    eps: ScalarLike = 1e-6,
) -> Float[Array, "P G M"]:
    """GTPO: discounted returns of each turn, normalised over all turns of a pool.

    The pool is the group (default; the paper's wording allows it) or the batch (the
    public fork). `scale`: "std" is the paper's, "none" only centres. A trajectory with
    a non-finite turn reward gets 0 and leaves the pool. With gamma < 1 an all-pass
    group is not flat: its later turns look better.
    """
    check_choice("norm_scope", norm_scope, ("group", "batch"))
    check_choice("scale", scale, ("std", "none"))
    rewards, use = usable_rows(turn_mask, turn_rewards)
    returns = discounted_sum(rewards, jnp.full(rewards.shape, gamma, jnp.float32))
    num_pools = rewards.shape[0] if norm_scope == "group" else 1
    pool, in_pool = (x.reshape(num_pools, -1) for x in (returns, use))
    if scale == "std":
        advantages = standardise(pool, in_pool, ddof, eps)
    else:
        centred, live = centre(pool, in_pool)
        advantages = jnp.where(live, centred, 0.0)
    return jax.lax.stop_gradient(advantages.reshape(rewards.shape))


@partial(jax.jit, static_argnames=("whiten",))
def step_advantages(
    rewards: Real[AnyArray, "N M"],
    values: Float[AnyArray, "N M"],
    mask: Bool[AnyArray, "N M"],
    *,
    gamma: ScalarLike,
    lam: ScalarLike,
    whiten: bool = True,
) -> tuple[Float[Array, "N M"], Float[Array, "N M"]]:
    """StepPO: GAE over the steps of a trajectory -> (advantages, returns).

    A row is a trajectory, a column a step; padding follows the last step, after which
    the value is 0. Returns are taken before whitening, which is over all steps of the
    batch (not tokens: long steps would dominate), with the sample std. A trajectory
    with a non-finite reward or value gets 0 in both.
    """
    rewards, values, use = usable_rows(mask, rewards, values)
    decay = jnp.full(rewards.shape, gamma, jnp.float32)
    next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    delta = jnp.where(use, rewards + decay * next_values - values, 0.0)
    advantages = discounted_sum(delta, decay * lam)
    returns = jnp.where(use, advantages + values, 0.0)
    if whiten:
        pool = standardise(advantages.reshape(1, -1), use.reshape(1, -1), 1, 1e-8)
        advantages = pool.reshape(rewards.shape)
    return jax.lax.stop_gradient((jnp.where(use, advantages, 0.0), returns))


def rows_by_group(
    group_ids: Sequence | np.ndarray,
) -> tuple[Int[np.ndarray, "P G"], Bool[np.ndarray, "P G"]]:
    """Host side: row numbers of each group, and which of them are real.

    For rows in any order: `rewards[rows]` is [P,G] for `group_advantages`, and
    `result[rows[real]] = advantages[real]` puts the values back. Groups come in order
    of first appearance; short ones are filled with row 0, marked not real.
    """
    groups: dict = {}
    for row, group in enumerate(np.asarray(group_ids).tolist()):
        groups.setdefault(group, []).append(row)
    size = max(map(len, groups.values()), default=0)
    rows = np.zeros((len(groups), size), np.int32)
    real = np.zeros((len(groups), size), bool)
    for place, members in enumerate(groups.values()):
        rows[place, : len(members)] = members
        real[place, : len(members)] = True
    return rows, real
