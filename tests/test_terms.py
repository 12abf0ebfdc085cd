"""Reward terms: one value a turn, bonus and penalty once, stages and similarity."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_jax import objective
from tools_env import terms
from tools_env.protocol import CallRecord, Reward, Task, Turn
from tools_env.terms import Overuse, Shaping


def environment(tools=("python",), answer="7", called=None, **more):
    prediction = {"expected": None, "called": called, "correct": None, "answer": answer}
    return SimpleNamespace(
        tools=lambda: [{"function": {"name": name}} for name in tools],
        prediction=lambda task, trajectory: prediction,
        **more,
    )


def trajectory(*turns, total=1.0, group=0, columns=None, text="done"):
    """Turns are lists of (name, status, code), the text the last turn's."""
    made = [
        Turn("", [CallRecord(n, {"code": c}, s, "") for n, s, c in calls])
        for calls in turns
    ] or [Turn("")]
    made[-1].text = text
    return SimpleNamespace(
        task=Task("t", [{"role": "user", "content": "?"}], columns or {}),
        group=group,
        turns=made,
        calls=[call for turn in made for call in turn.calls],
        answer=text,
        reward=Reward(total, {"right": total}),
    )


def calls(*statuses, name="python", code="x = 1"):
    return [(name, status, code) for status in statuses]


def shaping(**keys):
    keys.setdefault("outcome", 1.0)
    keys.setdefault("maximum", 1.0)
    return Shaping(keys.pop("environment", environment()), **keys)


def test_turn_terms_are_shares_of_a_turns_calls_over_the_turns_with_calls():
    mixed = trajectory(
        calls("ok", "malformed"), [], calls("error", "unknown"), calls("ok"), []
    )
    assert terms.parsed([mixed]) == [[0.5 / 3, 0, 1 / 3, 1 / 3, 0]]
    assert terms.schema_valid([mixed]) == [[0.5 / 3, 0, 0.5 / 3, 1 / 3, 0]]
    assert terms.executed([mixed]) == [[0.5 / 3, 0, 0.0, 1 / 3, 0]]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_more_calls_do_not_earn_more(count):
    good = trajectory(*[calls("ok")] * count, [])
    for term in terms.TURN_TERMS.values():
        (values,) = term([good])
        assert sum(values) == pytest.approx(1.0) and len(values) == count + 1
        assert term([trajectory([])]) == [[0.0]]


def test_terms_join_the_outcome_at_their_turns_and_the_rest_is_the_outcomes():
    keys = shaping(weights={"parsed": 0.1, "executed": 0.2}, maximum=1.3)
    reward = keys.apply(trajectory(calls("ok"), calls("error"), [], total=1.0))
    assert reward.turns == pytest.approx([0.15, 0.05, 0.0])
    assert reward.total == pytest.approx(1.2) and reward.maximum == 1.3
    parts = {"right": 1.0, "outcome": 1.0, "parsed": 1.0, "executed": 0.5}
    assert reward.parts == pytest.approx(parts)
    assert reward.passed


def test_turns_of_a_users_reward_are_kept():
    scored = trajectory(calls("ok"), [])
    scored.reward.turns = [0.25, 0.5]
    reward = shaping(weights={"executed": 0.1}).apply(scored)
    assert reward.turns == pytest.approx([0.35, 0.5])


@pytest.mark.parametrize(
    "statuses, columns, earned, maximum",
    [
        (["ok"], {}, 0.1, 1.1),
        (["ok"], {"needs_tool": True}, 0.1, 1.1),
        (["error", "ok"], {}, 0.1, 1.1),  # it ran; once, however many
        (["malformed", "unknown", "invalid"], {}, 0.0, 1.1),  # calls for their look
        ([], {}, 0.0, 1.1),
        (["ok"], {"needs_tool": False}, 0.0, 1.0),
        (["ok"], {"needs_tool": None}, 0.1, 1.1),
    ],
)
def test_bonus_for_executed_calls_on_tasks_that_need_a_tool(
    statuses, columns, earned, maximum
):
    scored = trajectory(calls(*statuses), [], total=0.5, columns=columns)
    reward = shaping(interaction=True).apply(scored, bonus=0.1)
    assert reward.total == pytest.approx(0.5 + earned)
    assert reward.maximum == pytest.approx(maximum)
    assert not reward.passed


def test_bonus_goes_to_the_turn_of_the_first_executed_call():
    scored = trajectory([], calls("malformed"), calls("ok"), calls("ok"))
    reward = shaping(interaction=True).apply(scored, bonus=0.1)
    assert reward.turns == [0.0, 0.0, 0.1, 0.0]


def test_golden_advantages_with_a_bonus():
    """algorithms: outcomes [1,1,0,0], calls [0,2,0,3], bonus .1."""
    batch = [
        trajectory(calls(*["ok"] * count), total=outcome)
        for outcome, count in zip([1.0, 1.0, 0.0, 0.0], [0, 2, 0, 3], strict=True)
    ]
    rewards = [shaping(interaction=True).apply(t, 0.1).total for t in batch]
    np.testing.assert_allclose(
        np.asarray(objective.group_advantages(np.array([rewards])))[0],
        [0.775553, 0.947899, -0.947899, -0.775553],
        atol=1e-5,
    )


def test_an_abstained_trajectory_stays_without_a_reward():
    scored = trajectory(calls("ok"), total=None)
    keys = shaping(weights={"parsed": 1.0}, interaction=True, stages=True)
    assert keys.apply(scored, 0.1) is scored.reward


def test_overuse_costs_once_and_only_where_the_call_is_uncalled_for():
    rule = Overuse("look", lambda task: not task.columns.get("asked"), 0.3)
    keys = shaping(overuse=(rule,))
    often = trajectory([], calls("ok", "ok", name="look"), calls("ok", name="look"))
    reward = keys.apply(often)
    assert reward.total == pytest.approx(0.7) and reward.parts["overuse_look"] == 1.0
    assert reward.turns == pytest.approx([0.0, -0.3, 0.0])
    asked = trajectory(calls("ok", name="look"), columns={"asked": True})
    assert keys.apply(asked).total == 1.0
    assert keys.apply(trajectory(calls("ok"))).total == 1.0


def test_overuse_where_nothing_is_executed_looks_at_the_tool_that_the_answer_names():
    rule = Overuse("look", lambda task: True, 0.3)
    named = shaping(environment=environment((), called="look"), overuse=(rule,))
    assert named.apply(trajectory()).total == pytest.approx(0.7)
    other = shaping(environment=environment((), called="pay"), overuse=(rule,))
    assert other.apply(trajectory()).total == 1.0


@pytest.mark.parametrize(
    "total, answer, text, statuses, expected",
    [
        (1.0, "7", "it is 7", ["ok"], 1.0),
        (0.5, "7", "it is 7", ["ok"], 0.55),
        (0.0, "7", "it is 7", [], 0.1),
        (0.0, None, "no idea", [], 0.1),
        (0.0, None, " ", [], 0.0),
        (1.0, "7", "it is 7", ["malformed"], 0.0),
    ],
)
def test_stages(total, answer, text, statuses, expected):
    keys = shaping(environment=environment(answer=answer), stages=True)
    reward = keys.apply(trajectory(calls(*statuses), total=total, text=text))
    assert reward.total == pytest.approx(expected)
    assert reward.parts["outcome"] == total


def test_stages_ask_the_environment_what_it_can_read():
    own = environment(readable=lambda trajectory: trajectory.answer == "{}")
    keys = shaping(environment=own, stages=True, outcome=2.0)
    assert keys.apply(trajectory(total=0.0, text="words")).total == 0.0
    assert keys.apply(trajectory(total=2.0, text="{}")).total == pytest.approx(2.0)


def test_code_overlap():
    assert terms.code_overlap("x = 1", "x  =  1") == 1.0
    assert terms.code_overlap("a b", "c d") == 0.0
    assert terms.code_overlap("a a b", "a b b") == pytest.approx(2 / 4)
    assert terms.code_overlap("", "") == 0.0


def test_cosine_is_at_least_0():
    assert terms.cosine([1, 0], [0.6, 0.8]) == pytest.approx(0.6)
    assert terms.cosine([1, 0], [-1, 0]) == 0.0
    assert terms.cosine([0, 0], [1, 0]) == 0.0


def shaped(keys, batch):
    for one in batch:
        one.reward = keys.apply(one)
    keys.shape_failures(batch)
    return [one.reward.total for one in batch]


def test_failures_earn_by_likeness_to_the_passing_ones_of_their_group():
    """Two passing peers with similarities .6 and .2 and alpha .5 give .2."""
    vectors = {"f": [1.0, 0.0], "p": [0.6, 0.8], "q": [0.2, 0.96**0.5]}

    def embed(texts):
        return [vectors[text] for text in texts]

    batch = [
        trajectory(calls("ok", code="p")),
        trajectory(calls("ok", code="q")),
        trajectory(calls("ok", code="f"), total=0.0),
        trajectory(calls("ok", code="f"), total=0.0, group=1),  # none passes here
    ]
    keys = shaping(similarity=0.5, embed=embed)
    assert shaped(keys, batch) == pytest.approx([1.0, 1.0, 0.2, 0.0])
    assert batch[2].reward.parts["similarity"] == pytest.approx(0.4)
    assert batch[2].reward.turns is None  # the outcome's, so the last turn's


def test_similarity_counts_the_code_of_executed_calls_only():
    batch = [
        trajectory(calls("ok", code="print(2 + 2)")),
        trajectory(calls("error", code="print(2 + 2)"), total=0.0),
        trajectory(calls("malformed", code="print(2 + 2)"), total=0.0),
    ]
    assert shaped(shaping(similarity=0.5), batch) == pytest.approx([1.0, 0.5, 0.0])


def test_a_group_without_failures_or_passes_is_left_alone():
    keys = shaping(similarity=0.5)
    assert shaped(keys, [trajectory(calls("ok"))] * 2) == [1.0, 1.0]
    fails = [trajectory(calls("ok"), total=0.0) for _ in range(2)]
    assert shaped(keys, fails) == [0.0, 0.0]
    unknown = dataclasses.replace(keys, outcome=None)
    assert shaped(unknown, [trajectory(), trajectory(total=0.0)]) == [1.0, 0.0]


def test_retools_failed_score_golden():
    scores = [terms.failed_score(turns) for turns in (2, 4, 6, 10, 16)]
    assert scores == pytest.approx([-1, -0.9, -0.8, -0.6, -0.6])


def test_only_failures_earn_the_failure_bonus():
    keys = shaping(failure_bonus=True, outcome=2.0, maximum=2.0)
    twice = [calls("ok"), calls("error"), []]
    assert keys.apply(trajectory(*twice, total=2.0)).total == 2.0
    failed = keys.apply(trajectory(*twice, total=0.5))
    assert failed.total == pytest.approx(2 * -0.8) and failed.passed is False
    assert failed.parts["outcome"] == 0.5 and failed.parts["failed_score"] == -0.8
    assert keys.apply(trajectory(total=0.0)).total == pytest.approx(-2.0)
    silent = trajectory(total=0.0)
    silent.reward = Reward(None)
    assert keys.apply(silent).total is None
