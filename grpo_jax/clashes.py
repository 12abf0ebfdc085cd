"""Choices of the objective that are fine alone and make no sense together.

Read by `config.check`, which refuses a config with the first reason found.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict


def clashes(config: ConfigDict) -> Iterator[str]:
    """One sentence a clash: which keys, and why they do not go together."""
    yield from _estimator(config)
    yield from _scale(config.objective)
    yield from _unread_rewards(config)
    yield from _loss(config.objective)
    yield from _displacement(config)
    yield from _roles(config)


def _estimator(config: ConfigDict) -> Iterator[str]:
    choices = config.objective
    if choices.estimator == "ngrpo" and choices.drop_flat_groups:
        yield (
            "objective.drop_flat_groups=True would drop the all-wrong groups that "
            "objective.estimator='ngrpo' exists for; use drop_saturated_groups"
        )
    if choices.max_draws > 1 and not (
        choices.drop_flat_groups or choices.drop_saturated_groups
    ):
        yield (
            f"objective.max_draws={choices.max_draws} replaces groups that a filter "
            "drops; set objective.drop_flat_groups or objective.drop_saturated_groups"
        )
    if choices.redraw != "new" and choices.max_draws == 1:
        yield (
            f"objective.redraw='{choices.redraw}' says what replaces dropped groups; "
            "objective.max_draws=1 replaces none"
        )
    if choices.step != "turn" and choices.estimator != "steppo":
        yield (
            f"objective.step='{choices.step}' cuts turns for objective.estimator="
            f"'steppo'; '{choices.estimator}' has no steps"
        )
    longest = config.rollout.max_completion_length
    if choices.overlong_buffer > longest:
        yield (
            f"objective.overlong_buffer={choices.overlong_buffer} is above "
            f"rollout.max_completion_length={longest}: every answer would be penalised"
        )


OUTCOME_TERMS = ("stages", "failure_bonus", "similarity")
# Estimators that know fewer scales than `objective.group_advantages`, and why.
SCALES = {
    "dr_grpo": (("std", "none"), "which never divides"),
    "rloo": (("std", "none"), "which never divides"),
    "lead": (("std",), "which always divides by the group's deviation"),
    "mt_grpo": (("std",), "whose turns are always divided by their deviation"),
    "gtpo": (
        ("std", "none"),
        "whose objective.norm_scope='batch' compares the turns of the batch",
    ),
    "gigpo": (("std", "none"), "which compares turns from equal states"),
    "steppo": (
        ("std", "none"),
        "which knows no groups: 'std' divides by the deviation of the batch",
    ),
}


def _scale(choices: ConfigDict) -> Iterator[str]:
    """A scale that the estimator would not look at."""
    known, why = SCALES.get(choices.estimator, ((choices.scale_rewards,), ""))
    if choices.scale_rewards not in known:
        yield (
            f"objective.scale_rewards='{choices.scale_rewards}' does not fit "
            f"objective.estimator='{choices.estimator}', {why}; use "
            + " or ".join(f"'{name}'" for name in known)
        )


def _unread_rewards(config: ConfigDict) -> Iterator[str]:
    """Rewards that the estimator would not look at, or the one that it lives on."""
    choices, reward = config.objective, config.reward
    bonus = reward.floor if reward.floor_mode == "bonus" else 0.0
    by_turn = {name: reward[name] for name in ("parsed", "schema_valid", "executed")}
    by_turn |= {"interaction": reward.interaction, "floor": bonus}
    by_turn |= {"overuse": reward.overuse}
    beside = by_turn | {name: reward[name] for name in OUTCOME_TERMS}
    given = {f"reward.{name}": value for name, value in beside.items() if value}
    if choices.overlong_buffer:
        given["objective.overlong_buffer"] = choices.overlong_buffer
    if choices.estimator == "lead" and given:
        key, value = next(iter(given.items()))
        yield (
            f"{key}={value!r} would not be read: objective.estimator='lead' sets the "
            "rewards itself, by right or wrong and by length"
        )
    if reward.stages and reward.failure_bonus:
        yield (
            "reward.failure_bonus=True and reward.stages=True both say what a failure "
            "earns; use one"
        )
    if choices.estimator == "mt_grpo" and not (
        any(by_turn.values())
        or reward.functions
        or config.tools.environment not in ("fund", "fund_bank", "python")
    ):
        yield (
            "objective.estimator='mt_grpo' without a reward by turn is 'grpo': set "
            "reward.parsed, reward.schema_valid or reward.executed, or give one float "
            "a turn from reward.functions"
        )


def _displacement(config: ConfigDict) -> Iterator[str]:
    """The penalty on lost likelihood where nothing can be lost."""
    choices = config.objective
    updates = config.train.num_minibatches * config.train.num_iterations
    if choices.lld and updates == 1 and not config.lora.dropout:
        yield (
            f"objective.lld={choices.lld} is exactly 0 with one update a rollout "
            "batch, in which the policy is still the old one: raise "
            "train.num_minibatches or train.num_iterations"
        )
    if choices.lld_answer != "none" and not choices.lld:
        yield (
            f"objective.lld_answer='{choices.lld_answer}' weighs the answers' part of "
            "objective.lld, which is 0"
        )


def _loss(choices: ConfigDict) -> Iterator[str]:
    least = 1.0 if choices.clip == "fixed" else 0.0
    if choices.dual_clip is not None and not choices.dual_clip > least:
        yield (
            f"objective.dual_clip={choices.dual_clip} must be above {least} "
            f"with objective.clip='{choices.clip}'"
        )
    if choices.surrogate == "cispo" and choices.dual_clip is not None:
        yield (
            f"objective.dual_clip={choices.dual_clip} bounds the loss of "
            "objective.surrogate='ppo'; 'cispo' bounds every weight already"
        )
    unused = (choices.tis_level, choices.tis_mode) != ("token", "truncate")
    if choices.tis_cap is None and unused:
        yield (
            f"objective.tis_level='{choices.tis_level}' and objective.tis_mode="
            f"'{choices.tis_mode}' are not used without objective.tis_cap"
        )


def _roles(config: ConfigDict) -> Iterator[str]:
    """What tells reasoning from tool calls needs both in an answer."""
    choices = config.objective
    weights = choices.role_weights
    if weights and (
        len(weights) != 2
        or any(not isinstance(w, int | float) or w < 0 for w in weights)
        or not sum(weights)
    ):
        yield (
            "objective.role_weights must be () or (reasoning, tool), numbers of at "
            f"least 0 and not both 0; got {weights!r}"
        )
    used = [
        name
        for name, value in (
            ("lora.routed", config.lora.routed),
            ("objective.role_weights", weights),
            ("objective.role_gradients_every", choices.role_gradients_every),
            ("objective.step", choices.step == "role"),
        )
        if value
    ]
    fund = config.tools.environment == "fund"
    if used and fund and config.data.answer_format == "tool":
        yield (
            f"{used[0]} needs reasoning beside the tool call, which "
            "data.answer_format='tool' has not; use 'react' or 'reasoning_action'"
        )
