"""Held-out numbers against definitions written out here."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from toy import ToyEnvironment

from grpo_jax import evaluate
from grpo_jax.types import Trajectory
from tools_env.protocol import CallRecord, Reward, Task, Turn


class Told(ToyEnvironment):
    """The task's own columns say what the prediction is."""

    schemas = [{"type": "function"}]

    def tools(self):
        return self.schemas

    def prediction(self, task, trajectory):
        names = ("expected", "called", "correct", "answer")
        names += ("reasoning",) * ("reasoning" in task.columns)
        return {name: task.columns.get(name) for name in names}


def one(
    group, reward=1.0, correct=True, answer="a", statuses=(), stop="stop", **columns
):
    columns |= {"correct": correct, "answer": answer}
    calls = [CallRecord("tool", {}, status, "") for status in statuses]
    return Trajectory(
        Task(str(group), [], columns),
        group,
        0,
        [],
        turns=[Turn("", calls)],
        stop=stop,
        reward=Reward(reward),
    )


def test_DV1_every_item_counts_once():
    rows = [one(i, reward=1.0) for i in range(9)] + [one(9, reward=0.0)]
    values = evaluate.metrics(Told(), rows, 1)
    assert values["eval/score/all"] == pytest.approx(0.9)
    assert values["eval/num_tasks"] == 10


def test_scores_by_category_and_abstentions():
    rows = [
        one(0, reward=1.0, category="deposit"),
        one(1, reward=0.5, category="deposit"),
        one(2, reward=None, category="combo"),
        one(3, reward=0.0, category="combo"),
    ]
    values = evaluate.metrics(Told(), rows, 1)
    assert values["eval/score/deposit"] == 0.75
    assert values["eval/score/combo"] == 0.0
    assert values["eval/score/all"] == 0.5


def test_tool_accuracy_confusion_and_call_rate():
    rows = [
        one(0, expected="transfer", called="transfer", category="t", statuses=["ok"]),
        one(1, expected="transfer", called="market", category="t", statuses=["error"]),
        one(2, expected="market", called=None, category="m", statuses=["unknown"]),
        one(3, expected=None, called="market", category="m"),
    ]
    values = evaluate.metrics(Told(), rows, 1)
    assert values["eval/tool_accuracy/t"] == 0.5
    assert values["eval/tool_accuracy/m"] == 0.0
    assert values["eval/tool_accuracy/all"] == pytest.approx(1 / 3)
    assert values["eval/confusion"] == {
        "transfer": {"transfer": 1, "market": 1},
        "market": {"none": 1},
    }
    assert values["eval/call_rate"] == 0.5  # an unknown tool was not executed


def test_reasoning_is_judged_where_the_tools_were_right():
    rows = [
        one(0, expected="t", called="t", category="c", statuses=["ok"]),
        one(1, expected="t", called="t", category="c", statuses=["ok"], correct=False),
        one(2, expected="t", called="t", category="c", statuses=["ok", "error"]),
        one(3, expected="t", called="u", category="c", statuses=["ok"]),
        one(4, expected=None, called=None, category="d"),
        one(5, category="d", correct=False, reasoning=0.75),
        one(6, category="d", reasoning=None),
    ]
    values = evaluate.metrics(Told(), rows, 1)
    assert values["eval/reasoning_score/c"] == 0.5
    assert values["eval/reasoning_score/d"] == pytest.approx(1.75 / 2)
    assert values["eval/tool_accuracy/c"] == 0.75


def test_level_accuracy_and_cut_answers():
    rows = [one(0, level=1), one(1, level=2, correct=False, stop="length")]
    values = evaluate.metrics(Told(), rows, 1)
    assert values["eval/accuracy/1"] == 1 and values["eval/accuracy/2"] == 0
    assert values["eval/accuracy"] == values["eval/clipped_ratio"] == 0.5


def test_what_has_no_data_is_absent():
    values = evaluate.metrics(ToyEnvironment(), [], 1)
    assert values == {"eval/num_tasks": 0}
    single = evaluate.metrics(ToyEnvironment(), [one(0)], 1)
    assert not {"eval/call_rate", "eval/confusion", "eval/tool_accuracy/all"} & set(
        single
    )


def test_what_can_choose_the_best_checkpoint():
    rows = [one(0, category="c", level=1, expected="t", called="t", statuses=["ok"])]
    rows.append(one(1, category="c", level=2, correct=False, stop="length"))
    reported = evaluate.metrics(Told(), rows, 3).keys() - {"eval/confusion"}
    refused = {name for name in reported if not evaluate.can_select(name, 3)}
    assert refused == {"eval/num_tasks", "eval/clipped_ratio"}
    for name in ("reward", "eval/avg@2", "eval/score", "eval/score/a/b", "eval/call"):
        assert not evaluate.can_select(name, 3)


def by_definition(tasks):
    """avg, pass and maj shares, slowly."""
    averages, passes, majorities = [], [], []
    for samples in tasks:
        averages.append(sum(c for c, _ in samples) / len(samples))
        passes.append(max(c for c, _ in samples))
        votes = [a for _, a in samples if a is not None]
        most = max(Counter(votes).values(), default=0)
        # Of the most frequent answers, the one seen first.
        winner = next((a for a in votes if votes.count(a) == most), None)
        majorities.append(any(c and a == winner for c, a in samples if a is not None))
    return [float(np.mean(values)) for values in (averages, passes, majorities)]


def test_at_k_against_the_definitions():
    samples = [(True, "x"), (False, "y"), (False, None), (False, "z")]
    tasks = list(itertools.product(samples, repeat=3))
    values = evaluate.at_k(tasks, 3)
    expected = by_definition(tasks)
    got = [values[f"eval/{name}@3"] for name in ("avg", "pass", "maj")]
    np.testing.assert_allclose(got, expected)
    assert got[1] > got[2] > 0
    for name in ("avg", "pass", "maj"):
        low, high = (values[f"eval/{name}@3/{end}"] for end in ("low", "high"))
        assert low < values[f"eval/{name}@3"] < high


def test_members_of_a_task_are_voted_on_together():
    rows = [one(0, correct=c > 0, answer=a) for c, a in [(1, "x"), (0, "y"), (1, "x")]]
    rows += [one(1, correct=c > 0, answer=a) for c, a in [(0, "y"), (0, "y"), (1, "x")]]
    values = evaluate.metrics(Told(), rows, 3)
    assert values["eval/avg@3"] == 0.5
    assert values["eval/pass@3"] == 1.0
    assert values["eval/maj@3"] == 0.5
    assert values["eval/num_tasks"] == 2


@pytest.mark.parametrize(
    ("hits", "count"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (237, 400)]
)
def test_wilson_ends_are_where_the_score_test_rejects(hits, count):
    """They solve |share - p| = z sqrt(p (1 - p) / n)."""
    share, low, high = evaluate.wilson_interval(hits, count)
    assert share == hits / count and 0 <= low + 1e-12 and high <= 1 + 1e-12
    for p in (low, high):
        distance = 1.959963984540054 * math.sqrt(max(p * (1 - p), 0) / count)
        assert abs(share - p) == pytest.approx(distance, abs=1e-7)


def test_interval_of_a_mean():
    values = [0.0, 0.5, 1.0, 1.0]
    mean, low, high = evaluate.mean_interval(values)
    half = 1.96 * np.std(values, ddof=1) / 2
    assert (mean, low, high) == pytest.approx((0.625, 0.625 - half, 0.625 + half), 1e-4)
    assert evaluate.mean_interval([0.5]) == (0.5, 0.5, 0.5)
