"""The objective: rewards -> advantages -> ratios -> clipped loss and penalties.

Every function here is pure, jitted, float32 inside (bf16 inputs are widened first)
and works on [B,T] arrays whose action mask is True on sampled tokens. Values at
masked positions never reach a result or a gradient. Losses and metrics come back
as (sum, weight) pairs, so micro-batches add both and divide once.
"""

from grpo_jax.objective.advantages import (
    group_advantages,
    rows_by_group,
    step_advantages,
    turn_advantages,
)
from grpo_jax.objective.credit import (
    gigpo_advantages,
    lead_advantages,
    mt_grpo_advantages,
    rloo_advantages,
)
from grpo_jax.objective.diagnostics import (
    POSITIONS,
    lld_gate_rate,
    ratio_by_position,
)
from grpo_jax.objective.filters import (
    flat_groups,
    overlong_penalty,
    saturated_groups,
)
from grpo_jax.objective.gear import gear_weights
from grpo_jax.objective.importance import tis_weights
from grpo_jax.objective.losses import PolicyLoss, aggregate, policy_loss
from grpo_jax.objective.penalties import (
    answer_weight,
    entropy_bonus,
    kl_penalty,
    lld_penalty,
)
from grpo_jax.objective.ratios import cumulative_log_ratio
from grpo_jax.objective.values import explained_variance, value_loss

__all__ = [
    "POSITIONS",
    "PolicyLoss",
    "aggregate",
    "answer_weight",
    "cumulative_log_ratio",
    "entropy_bonus",
    "explained_variance",
    "flat_groups",
    "gear_weights",
    "gigpo_advantages",
    "group_advantages",
    "kl_penalty",
    "lead_advantages",
    "lld_gate_rate",
    "lld_penalty",
    "mt_grpo_advantages",
    "overlong_penalty",
    "policy_loss",
    "ratio_by_position",
    "rloo_advantages",
    "rows_by_group",
    "saturated_groups",
    "step_advantages",
    "tis_weights",
    "turn_advantages",
    "value_loss",
]
