"""More estimators: leave-one-out, GRPO-LEAD, and two of turn-level credit.

The same conventions as in `advantages`: [P,G] trajectories or [P,G,M] turns, detached
results, exactly 0 for what is unused or has nothing to be compared with.

RLOO arXiv 2402.14740, GRPO-LEAD 2504.09696, MT-GRPO 2505.11821, GiGPO 2505.10978.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real, ScalarLike

from grpo_jax.objective.advantages import group_advantages
from grpo_jax.objective.choices import AnyArray, check_choice
from grpo_jax.objective.scans import discounted_sum
from grpo_jax.objective.statistics import FLAT, centre, standardise, usable_rows

SHORTEST = 3  # GRPO-LEAD judges a group's lengths by this many of its shortest rollouts


@jax.jit
def rloo_advantages(
    rewards: Real[AnyArray, "P G"], valid: Bool[AnyArray, "P G"] | None = None
) -> Float[Array, "P G"]:
    """RLOO: the reward minus the mean of the *other* valid members of the group.

    That is n / (n - 1) times the centred reward, n the number of valid members.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    use = jnp.isfinite(rewards)
    use = use if valid is None else use & valid
    centred, live = centre(rewards, use)
    count = jnp.sum(use, axis=1, keepdims=True)
    scaled = centred * count / jnp.maximum(count - 1, 1)
    return jax.lax.stop_gradient(jnp.where(live, scaled, 0.0))


@partial(jax.jit, static_argnames=("ddof",))
def lead_advantages(
    rewards: Real[AnyArray, "P G"],
    correct: Bool[AnyArray, "P G"],
    lengths: Real[AnyArray, "P G"],
    valid: Bool[AnyArray, "P G"] | None = None,
    *,
    alpha: ScalarLike = 0.05,
    min_length: ScalarLike = 0.0,
    ddof: int = 1,
    eps: ScalarLike = 1e-6,
) -> Float[Array, "P G"]:
    """GRPO-LEAD: short correct rollouts earn more, hard prompts weigh more.

    A correct rollout earns exp(-alpha z), z its length standardised over the group's
    correct ones; the others what `rewards` says (-1 in the paper). The group-relative
    advantage is multiplied by w(share correct) where positive and by w(share wrong)
    where not, w(q) = .4 + 1.1 / (1 + exp(10 (q - .75))). Where the three shortest
    rollouts of a group have a mean length of at most `min_length` tokens (4000 in the
    released code), its lengths do not count.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    use = jnp.isfinite(rewards)
    use = use if valid is None else use & valid
    correct = use & correct
    z = _length_scores(jnp.asarray(lengths, jnp.float32), correct, use, min_length)
    earned = jnp.where(correct, jnp.exp(-alpha * z), rewards)
    advantages = group_advantages(earned, use, ddof=ddof, eps=eps)
    count = jnp.maximum(jnp.sum(use, axis=1, keepdims=True), 1)
    share = jnp.sum(use & (earned > 0), axis=1, keepdims=True) / count
    weight = jnp.where(
        advantages > 0, difficulty_weight(share), difficulty_weight(1 - share)
    )
    return jax.lax.stop_gradient(advantages * weight)


def _length_scores(lengths, correct, use, min_length) -> Float[Array, "P G"]:
    """Standardised lengths of the correct rollouts; 0 for a lone one and short ones."""
    z = standardise(lengths, correct, 1, 1e-6)
    if lengths.shape[1] < SHORTEST:
        return z
    shortest = jnp.sort(jnp.where(use, lengths, jnp.inf), axis=1)[:, :SHORTEST]
    return jnp.where(jnp.mean(shortest, axis=1, keepdims=True) > min_length, z, 0.0)


def difficulty_weight(share: Float[AnyArray, "*R"]) -> Float[Array, "*R"]:
    """GRPO-LEAD's w(q), from 1.5 where nothing is right to .48 where everything is."""
    return 0.4 + 1.1 * jax.nn.sigmoid(-10 * (share - 0.75))


@partial(jax.jit, static_argnames=("ddof",))
def mt_grpo_advantages(
    turn_rewards: Real[AnyArray, "P G M"],
    turn_mask: Bool[AnyArray, "P G M"],
    outcome: Float[AnyArray, "P G"],
    *,
    turn_weight: ScalarLike = 1.0,
    ddof: int = 1,
    eps: ScalarLike = 1e-6,
) -> Float[Array, "P G M"]:
    """MT-GRPO: A_outcome + turn_weight * A_turn before the last turn, A_outcome there.

    A_turn standardises a turn's own reward over the group's turns of the same number;
    `outcome` is the trajectory's group-relative advantage. The paper states it for two
    turns, a call and an answer; for more of them this is our extension.
    """
    rewards, use = usable_rows(turn_mask, turn_rewards)
    by_turn = (x.swapaxes(1, 2).reshape(-1, x.shape[1]) for x in (rewards, use))
    turn = standardise(*by_turn, ddof, eps)
    num_tasks, size, num_turns = rewards.shape
    turn = turn.reshape(num_tasks, num_turns, size).swapaxes(1, 2)
    later = jnp.pad(use[..., 1:], ((0, 0), (0, 0), (0, 1)))
    total = outcome[..., None] + jnp.where(later, turn_weight * turn, 0.0)
    return jax.lax.stop_gradient(jnp.where(use, total, 0.0))


@partial(jax.jit, static_argnames=("ddof", "scale"))
def gigpo_advantages(
    turn_rewards: Real[AnyArray, "P G M"],
    turn_mask: Bool[AnyArray, "P G M"],
    states: Int[AnyArray, "P G M"],
    outcome: Float[AnyArray, "P G"],
    *,
    gamma: ScalarLike,
    turn_weight: ScalarLike = 1.0,
    ddof: int = 1,
    scale: str = "std",
    eps: ScalarLike = 1e-6,
) -> Float[Array, "P G M"]:
    """GiGPO: A_outcome + turn_weight * A_step, A_step among turns from equal states.

    A turn's discounted return is compared with those of all turns of the group that
    began in the same state (`states`: equal numbers, equal states): "std" divides by
    their deviation, "none" only centres. A state met once gives 0.
    """
    check_choice("scale", scale, ("std", "none"))
    rewards, use = usable_rows(turn_mask, turn_rewards)
    returns = discounted_sum(rewards, jnp.full(rewards.shape, gamma, jnp.float32))
    pool, in_pool, state = (
        x.reshape(x.shape[0], -1) for x in (returns, use, jnp.asarray(states))
    )
    same = (state[:, :, None] == state[:, None, :]) & in_pool[:, None, :]
    count = jnp.maximum(jnp.sum(same, axis=2), 1)
    mean = jnp.sum(jnp.where(same, pool[:, None, :], 0.0), axis=2) / count
    centred = pool - mean
    spread = jnp.max(jnp.where(same, jnp.abs(centred)[:, None, :], 0.0), axis=2)
    step = centred
    if scale == "std":
        squares = jnp.sum(jnp.where(same, (centred**2)[:, None, :], 0.0), axis=2)
        step = centred / (jnp.sqrt(squares / jnp.maximum(count - ddof, 1)) + eps)
    live = in_pool & (spread > FLAT * jnp.maximum(1.0, jnp.abs(mean))) & (count > 1)
    step = jnp.where(live, step, 0.0).reshape(rewards.shape)
    total = outcome[..., None] + turn_weight * step
    return jax.lax.stop_gradient(jnp.where(use, total, 0.0))
