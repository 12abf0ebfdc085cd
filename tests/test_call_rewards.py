"""Calls as a set, judged by value."""

import itertools
from types import SimpleNamespace

import pytest

from tools_env.call_rewards import right_calls, same_calls
from tools_env.protocol import CallRecord, Turn
from tools_env.rewards import RewardSet


def add(**arguments):
    return {"name": "add", "arguments": arguments}


def f(x):
    return {"name": "f", "arguments": {"x": x}}


@pytest.mark.parametrize(
    ("gold", "given", "same"),
    [
        ([add(a=10, b=2)], [add(a=999, b=2)], False),
        ([add(a=10, b=2)], [add(a=10, b=2, c=1)], False),
        ([add(a=10, b=2)], [add(a=10)], False),
        ([add(a=10, b=2)], [add(a=10.0, b=2)], True),
        ([add(a=10, b=2)], [add(a="10", b=2)], False),
        ([add(a=1, b=2)], [add(a=True, b=2)], False),
        ([add(a=10, b=2)], [{"name": "Add", "arguments": {"a": 10, "b": 2}}], False),
        ([add(a=10, b=2)], [{"name": "", "arguments": None}], False),
        ([f(1), f(2)], [f(2), f(1)], True),
        ([f(1), f(2)], [f(1), f(1)], False),
        ([f(1), f(2)], [f(1)], False),
        ([f(1), f(2)], [f(1), f(2), f(2)], False),
        ([f([1, {"k": "v"}])], [f([1.0, {"k": "v"}])], True),
        ([f([1, 2])], [f([2, 1])], False),
        ([f(None)], [f(0)], False),
    ],
)
def test_AV3_calls_are_compared_by_value_and_as_a_set(gold, given, same):
    assert same_calls(gold, given) is same


def test_AV3_any_order_of_the_gold_calls_is_right_and_no_other_choice():
    gold = [f(1), f(2), f(2), add(a=1, b=2)]
    for given in itertools.permutations(gold):
        assert same_calls(gold, given)
    for given in itertools.product(gold, repeat=4):
        count = sum(call == f(2) for call in given)
        others = f(1) in given and add(a=1, b=2) in given
        assert same_calls(gold, given) is (count == 2 and others)


def trajectory(text, *calls):
    records = [CallRecord(call["name"], call["arguments"], "ok", "") for call in calls]
    turns = [Turn("", records)] if records else []
    return SimpleNamespace(turns=[*turns, Turn(text)], answer=text)


def test_AV3_rubbish_is_no_answer_where_no_call_is_wanted():
    broken = {"name": "", "arguments": None}
    cases = [
        ([], trajectory("There is nothing to call."), 1.0),
        ([], trajectory("@@@"), 0.0),
        ([], trajectory(""), 0.0),
        ([], trajectory("Done.", f(1)), 0.0),
        ([], trajectory("Done.", broken), 0.0),
        ([f(1)], trajectory("Done.", broken), 0.0),
        ([f(1)], trajectory("Done."), 0.0),
        ([f(1)], trajectory("Done.", f(1)), 1.0),
        (None, trajectory("Done.", f(1)), None),
    ]
    gold, made, wanted = zip(*cases, strict=True)
    assert right_calls(list(made), list(gold)) == list(wanted)


def test_calls_over_several_turns_count_and_the_reward_set_takes_it():
    turns = [Turn("", [CallRecord("f", {"x": x}, "ok", "")]) for x in (2, 1)]
    one = SimpleNamespace(turns=[*turns, Turn("3")], answer="3")
    task = SimpleNamespace(columns={"calls": [f(1), f(2)]}, prompt=[])
    (reward,) = RewardSet([right_calls]).score(task, [one])
    assert reward.total == 1.0
