"""Choices of the objective that are fine alone and make no sense together.

Read by `config.check`, which refuses a config with the first reason found.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict


def clashes(config: ConfigDict) -> Iterator[str]:
    """One sentence a clash: which keys, and why they do not go together."""
    yield from _estimator(config)
    yield from _loss(config.objective)
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
    if choices.estimator == "gigpo" and choices.scale_rewards == "batch":
        yield (
            "objective.scale_rewards='batch' does not fit objective.estimator='gigpo', "
            "which compares turns from equal states; use 'std' or 'none'"
        )
    if choices.estimator == "steppo" and choices.scale_rewards == "batch":
        yield (
            "objective.scale_rewards='batch' does not fit "
            "objective.estimator='steppo', which knows no groups: 'std' divides by the "
            "deviation of the batch, 'none' does not divide"
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
