"""Rewards of trajectories: the environment's own, or the user's functions.

Errors are data: an environment whose reward raises or is not finite abstains on that
trajectory, and the share of those is a metric. (User functions do the same inside
`RewardSet`.)
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Environment, Reward, Task, Turn
from tools_env.rewards import RewardSet
from tools_env.schema import example_arguments
from tools_env.terms import Shaping

LOG = logging.getLogger(__name__)
_SHOWN = 3  # different failures that a batch names


def score_trajectories(
    environment: Environment,
    rewards: RewardSet | None,
    trajectories: Sequence[Trajectory],
    shaping: Shaping | None = None,
    bonus: float = 0.0,
) -> dict[str, float]:
    """Set the reward of every trajectory: the outcome, with `shaping` its terms too.

    A trajectory that its tools' infrastructure failed abstains. `bonus` is the
    interaction weight. Returns rewards/failed, the share of trajectories whose own
    reward raised or was not finite, and rewards/terms_failed, the share of those whose
    terms did.
    """
    for trajectory in trajectories:
        if trajectory.fault:
            trajectory.reward = Reward(None)
    trajectories = [t for t in trajectories if not t.fault]
    if not trajectories:
        return {}
    values = _score_outcomes(environment, rewards, trajectories)
    if shaping is not None:
        values |= _shape(shaping, trajectories, bonus)
    return values


def _shape(
    shaping: Shaping, trajectories: Sequence[Trajectory], bonus: float
) -> dict[str, float]:
    """A term that fails makes its trajectory abstain; the similarity just stays out."""
    failures = Counter()
    for trajectory in trajectories:
        try:
            trajectory.reward = _finite(shaping.apply(trajectory, bonus))
        except Exception as error:
            failures[repr(error)] += 1
            trajectory.reward = Reward(None)
    if shaping.similarity:
        try:
            shaping.shape_failures(trajectories)
        except Exception as error:
            LOG.warning("reward.embedding failed, no similarity: %r", error)
    for error, count in failures.most_common(_SHOWN):
        LOG.warning("the reward terms of %d trajectories failed: %s", count, error)
    failed = failures.total()
    return {"rewards/terms_failed": failed / len(trajectories)} if failed else {}


def _score_outcomes(
    environment: Environment,
    rewards: RewardSet | None,
    trajectories: Sequence[Trajectory],
) -> dict[str, float]:
    if rewards is not None:
        tasks = [trajectory.task for trajectory in trajectories]
        scored = rewards(tasks, trajectories, _completion_ids(trajectories))
        for trajectory, reward in zip(trajectories, scored, strict=True):
            trajectory.reward = reward
        return {}
    failures = Counter()
    for trajectory in trajectories:
        try:
            reward = environment.reward(trajectory.task, trajectory)
            trajectory.reward = _finite(reward)
        except Exception as error:
            failures[repr(error)] += 1
            trajectory.reward = Reward(None)
    for error, count in failures.most_common(_SHOWN):
        LOG.warning("the reward of %d trajectories failed: %s", count, error)
    if len(failures) > _SHOWN:
        LOG.warning("and rewards failed in %d more ways", len(failures) - _SHOWN)
    return {"rewards/failed": failures.total() / max(len(trajectories), 1)}


def _finite(reward: Reward) -> Reward:
    """The reward, or ValueError that says which number is none."""
    for name, value in {"total": reward.total, **reward.parts}.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    for turn, value in enumerate(reward.turns or (), 1):
        if not math.isfinite(value):
            raise ValueError(f"turn {turn} is {value}")
    return reward


def check_rewards(rewards: RewardSet, task: Task, tools: Sequence[dict]) -> None:
    """Call each function on made-up answers to `task`, with and without a tool call.

    Raises ValueError that names the function which does not bear it.
    """
    answers = list(_made_up(task, tools))
    rewards.check_at_start(answers, _completion_ids(answers))


def _made_up(task: Task, tools: Sequence[dict]) -> Iterator[Trajectory]:
    """A trajectory that answers "0" at once, and one that calls the first tool first.

    Real trajectories, so that a reward meets whatever it may read later.
    """
    one = np.zeros(1, np.int32)
    prompt, tool = Segment.given(Source.PROMPT, one), Segment.given(Source.TOOL, one)
    model = Segment.given(Source.MODEL, one)
    yield Trajectory(task, 0, 0, [prompt, model], [Turn("0")], "stop")
    for schema in tools[:1]:
        name = schema["function"]["name"]
        call = CallRecord(name, example_arguments(schema), "ok", "0")
        turns = [Turn("", [call]), Turn("0")]
        yield Trajectory(task, 0, 1, [prompt, model, tool, model], turns, "stop")


def _completion_ids(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The ids that the policy sampled."""
    return [
        [
            token
            for segment in trajectory.segments
            if segment.source is Source.MODEL
            for token in segment.tokens.tolist()
        ]
        for trajectory in trajectories
    ]
