"""Rewards of real trajectories: the start-up call, failures counted and named."""

import logging

import numpy as np
import pytest

from grpo_jax import health
from grpo_jax.scoring import check_rewards, score_trajectories
from grpo_jax.types import Segment, Source, Trajectory
from tools_env import tool_schema
from tools_env.functions import FunctionEnvironment
from tools_env.protocol import Reward, Task, Turn
from tools_env.rewards import RewardSet

TASK = Task("t", [{"role": "user", "content": "?"}], {"answer": "2"})
ATTRIBUTES = [name for name in dir(Trajectory) if not name.startswith("_")]
ATTRIBUTES += ["task", "group", "member", "segments"]  # fields without a default


def search(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        query: What for.
        limit: How many.
    """
    return query


def trajectory(*lengths):
    """A prompt of one token, then MODEL, TOOL, MODEL ... segments of these lengths."""
    segments = [Segment.given(Source.PROMPT, [9])]
    for i, length in enumerate(lengths):
        source = Source.TOOL if i % 2 else Source.MODEL
        segments.append(Segment.given(source, np.arange(length) + 10 * i))
    turns = [Turn("2") for _ in lengths[::2]]
    return Trajectory(TASK, 0, 0, segments, turns, "stop")


def test_start_up_call_offers_all_of_a_trajectory():
    seen = []

    def everything(trajectories, completion_ids, completions, answer):
        for one in trajectories:
            seen.append({name: getattr(one, name) for name in ATTRIBUTES})
            sampled = np.concatenate([segment.tokens for segment in one.segments])
            assert len(sampled) == 1 + one.completion_length
            for call in one.calls:
                assert call.status == "ok" and call.arguments["query"]
        assert len(completions) == len(completion_ids) == len(answer) == 1
        return [[1.0] * len(trajectories[0].turns)]

    check_rewards(RewardSet([everything]), TASK, [tool_schema(search)])
    assert [len(one["calls"]) for one in seen] == [0, 1]
    assert [one["answer"] for one in seen] == ["0", "0"]
    assert not any(one["truncated"] for one in seen)


@pytest.mark.parametrize(
    "function, made_up",
    [
        (lambda trajectories: [t.calls[0].seconds for t in trajectories], "0 tool"),
        (lambda trajectories: [1 / (1 - len(t.calls)) for t in trajectories], "1 tool"),
    ],
)
def test_start_up_call_finds_what_only_some_trajectories_break(function, made_up):
    rewards = RewardSet([function], names=["frail"])
    with pytest.raises(ValueError, match=f"frail failed its start-up.* {made_up} call"):
        check_rewards(rewards, TASK, [tool_schema(search)])


def test_without_tools_no_call_is_made_up():
    def count(trajectories):
        assert not any(t.calls for t in trajectories)
        return [0.0]

    check_rewards(RewardSet([count]), TASK, [])


def test_rewards_get_the_sampled_ids():
    def length(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    scored = [trajectory(3), trajectory(2, 5, 1)]
    assert score_trajectories(Frail(), RewardSet([length]), scored) == {}
    assert [one.reward.total for one in scored] == [3.0, 3.0]


def test_failures_of_a_reward_function_are_a_share_of_the_trajectories():
    def unsure(trajectories):
        return [float("nan"), 1.0, None, 0.5][: len(trajectories)]

    scored = [trajectory(1) for _ in range(4)]
    score_trajectories(Frail(), RewardSet([unsure]), scored)
    values = health.reward_metrics(scored)
    assert values["rewards/unsure/failed/mean"] == 0.25
    assert values["rewards/unsure/mean"] == 0.75
    assert values["rewards/abstained"] == 0.5


class Frail(FunctionEnvironment):
    """An environment whose reward raises `errors` in turn, then gives 1."""

    def __init__(self, errors=()):
        super().__init__([search], rewards=RewardSet([]))
        self.errors = list(errors)

    def reward(self, task, trajectory):
        if self.errors:
            raise self.errors.pop()
        return Reward(1.0)


def test_failures_of_the_environments_reward_are_counted_and_named_once(caplog):
    errors = [KeyError("answer")] * 5 + [ValueError(str(i)) for i in range(4)]
    scored = [trajectory(1) for _ in range(12)]
    with caplog.at_level(logging.WARNING):
        values = score_trajectories(Frail(errors), None, scored)
    assert values == {"rewards/failed": 0.75}
    assert [one.reward.total for one in scored] == [None] * 9 + [1.0] * 3
    assert len(caplog.messages) == 4
    assert caplog.messages[0] == (
        "the reward of 5 trajectories failed: KeyError('answer')"
    )
    assert caplog.messages[-1] == "and rewards failed in 2 more ways"
