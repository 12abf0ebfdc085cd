"""Tool metrics of a batch: which calls count where, and over what they are divided."""

import json

import numpy as np
import pytest

from grpo_jax import health
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Reward, Task, Turn


def trajectory(*statuses, total=1.0):
    calls = [CallRecord("f", {}, status, "") for status in statuses]
    segments = [Segment.given(Source.PROMPT, [1]), Segment.given(Source.MODEL, [2, 3])]
    made = Trajectory(Task("t", []), 0, 0, segments, [Turn("", calls)], "stop")
    made.reward = Reward(total)
    return made


def test_shares_of_calls_written_and_of_calls_executed():
    values = health.tool_metrics(
        [
            trajectory("ok", "error", "timeout", "malformed"),
            trajectory("unknown", "invalid", "malformed", "ok"),
            trajectory("invalid", "unknown"),
            trajectory(),
        ]
    )
    assert values["tools/call_rate"] == 0.5
    assert values["tools/call_frequency"] == 1.0
    assert values["tools/malformed_frequency"] == pytest.approx(2 / 10)
    assert values["tools/invalid_frequency"] == pytest.approx(4 / 10)
    assert values["tools/failure_frequency"] == pytest.approx(2 / 4)
    assert values["tools/timeout_frequency"] == pytest.approx(1 / 4)


def test_without_a_call_there_is_no_share_of_calls():
    values = health.tool_metrics([trajectory(), trajectory()])
    assert values["tools/call_rate"] == 0.0
    shares = ("malformed", "invalid", "failure", "timeout")
    assert not [name for name in shares if f"tools/{name}_frequency" in values]


def test_spread_with_and_without_tools():
    values = health.tool_metrics(
        [
            trajectory("ok", total=1.0),
            trajectory("error", total=0.0),
            trajectory("unknown", total=0.25),
            trajectory(total=0.25),
            trajectory("ok", total=None),
        ]
    )
    assert values["reward_std/with_tools"] == pytest.approx(0.5**0.5)
    assert values["reward_std/without_tools"] == 0.0


def test_a_record_is_strict_json_whatever_the_policy_gives():
    broken = trajectory("ok")
    broken.segments[1].logprobs[:] = [float("nan"), -1.5]
    row = health.record(broken, str)
    json.dumps(row, allow_nan=False)
    assert row["segments"][1]["logprobs"] == [None, -1.5]


LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def test_TC4_a_rollouts_file_has_a_line_a_trajectory_for_every_reader(tmp_path):
    text = f"北京 ☀️ é{LINE_ENDS}\ud800 \udfff"
    odd = trajectory("ok")
    odd.turns[0].calls[0] = CallRecord("f", {"code": text}, "ok", text)
    path = tmp_path / "step_000001.jsonl"
    health.write_rollouts(path, [odd, odd], lambda ids: text)
    written = path.read_text(encoding="utf-8")
    assert "北京 ☀️ é" in written
    for lines in (written.splitlines(), written.strip().split("\n")):
        for row in map(json.loads, lines):
            (call,) = row["calls"]
            assert call["arguments"]["code"] == call["result"] == text
            assert row["segments"][1]["text"] == text
        assert len(lines) == 2


def scored(total, maximum=1.0, **more):
    made = trajectory("ok", total=total)
    made.reward = Reward(total, maximum=maximum, passed=total == 1.0)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_gap_between_the_best_reward_and_what_it_could_be():
    values = health.reward_metrics([scored(0.7, 0.9), scored(0.8), scored(0.1)])
    assert values["reward_gap"] == pytest.approx(0.2)
    assert values["frac_reward_best"] == pytest.approx(2 / 3)
    undeclared = health.reward_metrics([scored(0.7, None)])
    assert not {"reward_gap", "frac_reward_best"} & undeclared.keys()


def test_likelihood_of_correct_trajectories_by_turn():
    def turns(*logprobs, total=1.0):
        segments = [Segment.given(Source.PROMPT, [1])]
        for values in logprobs:
            array = np.array(values, np.float32)
            tokens = np.arange(len(values), dtype=np.int32)
            segments += [Segment(Source.MODEL, tokens, array)]
            segments += [Segment.given(Source.TOOL, [5])]
        return scored(total, segments=segments)

    values = health.likelihood_metrics(
        [
            turns([-1.0, -2.0], [-4.0]),
            turns([-3.0], [-2.0, float("nan")], [-0.5]),
            turns([-100.0], [-100.0], total=0.0),
        ]
    )
    prefix = "lld/nll_correct_by_turn/"
    found = {k.removeprefix(prefix): v for k, v in values.items() if prefix in k}
    assert found == {"1": 2.0, "2": 3.0, "3": 0.5}


def test_groups_of_identical_samples():
    batch = [scored(1.0, group=group) for group in (0, 0, 1, 1)]
    batch[3].segments = [*batch[3].segments[:1], Segment.given(Source.MODEL, [2, 4])]
    assert health.likelihood_metrics(batch)["frac_group_identical"] == 0.5


def test_prompts_that_name_no_tool():
    tools = [{"function": {"name": "price"}}]
    batch = [scored(1.0, group=group) for group in (0, 1)]
    batch[0].segments[0] = Segment.given(Source.PROMPT, [7])

    def decode(ids):
        return "call price" if ids == [7] else "call"

    assert health.prompt_metrics(batch, tools, decode) == {"tools/in_prompt": 0.5}
    assert health.prompt_metrics(batch, [], decode) == {}


def test_call_rate_of_the_tasks_that_need_a_tool():
    easy = Task("t", [], {"needs_tool": False})
    batch = [trajectory("ok"), trajectory(), trajectory()]
    batch[2].task = easy
    values = health.tool_metrics(batch)
    assert values["tools/call_rate"] == pytest.approx(1 / 3)
    assert values["interaction/call_rate"] == 0.5
    batch[0].task = batch[1].task = easy
    assert "interaction/call_rate" not in health.tool_metrics(batch)
