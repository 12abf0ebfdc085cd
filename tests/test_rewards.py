"""Reward functions in keyword form: counts, abstention, failures, loading."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tools_env import rewards
from tools_env.protocol import CallRecord, Task, Turn
from tools_env.rewards import RewardCountError, RewardSet, load_function


def _trajectory(*texts):
    turns = [Turn(text) for text in texts]
    return SimpleNamespace(turns=turns, answer=texts[-1], stop="stop", truncated=False)


def _answer(task):
    trajectory = _trajectory("0")
    trajectory.task = task
    return [trajectory]


def _batch(count, turns=1):
    tasks = [
        Task(f"t{i}", [{"role": "user", "content": f"q{i}"}], {"answer": i})
        for i in range(count)
    ]
    return tasks, [_trajectory(*["a"] * turns) for _ in range(count)]


def _giving(value, name="given"):
    def function(**_):
        return value

    function.__name__ = name
    return function


def _totals(values, *more, weights=None):
    functions = [_giving(v, f"f{i}") for i, v in enumerate((values, *more))]
    scored = RewardSet(functions, weights)(*_batch(len(values)))
    return [reward.total for reward in scored]


@pytest.mark.parametrize(
    ("returned", "received"),
    [
        ([1.0], "1"),
        (1.0, "one float"),
        ([1, 0, 1], "3"),
        ([1, 2, 3, 4, 5], "5"),
        ([], "0"),
        (None, "one NoneType"),
        (np.float32(1), "one float"),
        (np.ones((1, 4)), "1"),
        ("four", "one str"),
    ],
)
def test_RW1_wrong_number_of_rewards_names_function_and_counts(returned, received):
    score = RewardSet([_giving(returned, "length_bonus")])
    with pytest.raises(RewardCountError, match="length_bonus.*expected 4.*" + received):
        score(*_batch(4))


def test_RW1_column_array_is_one_value_a_row():
    scored = RewardSet([_giving(np.arange(4.0)[:, None])])(*_batch(4))
    assert [reward.total for reward in scored] == [0, 1, 2, 3]


def test_RW3_abstaining_row_has_no_total():
    assert _totals([1, None, 0, 0.5]) == [1.0, None, 0.0, 0.5]


def test_RW3_abstaining_term_is_ignored_in_the_weighted_sum():
    totals = _totals([1, 0, 1, 0], [None, 0.5, None, 0.25], weights=[1, 2])
    assert totals == [1, 1, 1, 0.5]


def test_RW3_row_abstains_when_every_term_does():
    assert _totals([None, 1], [None, None]) == [None, 1.0]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "1", 10**400, -1e19, [1.0, 2.0], [None], {}],
)
def test_RW3_unusable_value_abstains_and_is_counted(value):
    score = RewardSet([_giving([value, 1.0], "f"), _giving([0.5, 0.5], "g")])
    first, second = score(*_batch(2))
    assert first.total == 0.5
    assert first.parts == {"f/failed": 1.0, "f": None, "g/failed": 0.0, "g": 0.5}
    assert second.total == 1.5 and second.parts["f/failed"] == 0.0


def test_RW3_raising_function_abstains_and_is_counted():
    def broken(completions):
        raise KeyError("x")

    (reward,) = RewardSet([broken])(*_batch(1))
    assert (reward.total, reward.parts) == (
        None,
        {"broken/failed": 1.0, "broken": None},
    )


def test_functions_get_the_keywords_they_name():
    seen = {}

    def named(prompts, completions, answer, trajectories):
        seen["named"] = prompts, completions, answer, trajectories
        return [1.0, 2.0]

    def everything(**keywords):
        seen["all"] = set(keywords)
        return [1, True]

    tasks, trajectories = _batch(2)
    tasks[1].columns["extra"] = "e"
    record = CallRecord("python", {"code": "1"}, "ok", "1")
    trajectories[0].turns = [Turn("call", [record]), Turn("done")]
    score = RewardSet([named, everything], weights=[1, 0.5], names=["n", "e"])
    scored = score(tasks, trajectories, completion_ids=[[1], [2]])
    prompts, completions, answer, given = seen["named"]
    assert prompts == [task.prompt for task in tasks]
    assert completions[0] == [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "name": "python", "content": "1"},
        {"role": "assistant", "content": "done"},
    ]
    assert answer == [0, 1] and given == trajectories
    assert seen["all"] == {
        "prompts", "completions", "completion_ids", "trajectories", "answer", "extra"
    }  # fmt: skip
    assert [r.total for r in scored] == [1.5, 2.5]
    assert scored[0].parts == {"n/failed": 0.0, "n": 1.0, "e/failed": 0.0, "e": 1.0}
    assert score.score(tasks[0], trajectories)[1].total == 2.5


def test_values_a_turn_are_kept_and_summed():
    tasks, trajectories = _batch(2, turns=3)
    score = RewardSet(
        [_giving([[0.5, 0, 1], None], "a"), _giving([[1, 1, 1], [0, 0, 2]], "b")],
        weights=[2, 1],
    )
    first, second = score(tasks, trajectories)
    assert (first.total, first.turns) == (6.0, [2.0, 1.0, 3.0])
    assert (second.total, second.turns) == (2.0, [0.0, 0.0, 2.0])
    assert (first.parts["a"], first.parts["b"]) == (1.5, 3.0)


def test_start_up_check_passes_good_functions():
    RewardSet(
        [_giving([0.0]), _giving([None], "g"), _giving([[1.0]], "h")]
    ).check_at_start(_answer(Task("t", [])), [[1]])


@pytest.mark.parametrize("returned", [[math.nan], [math.inf], ["1"], [[1.0, 2.0]]])
def test_start_up_check_refuses_unusable_values(returned):
    with pytest.raises(ValueError, match="reward function bad gave"):
        RewardSet([_giving(returned, "bad")]).check_at_start(_answer(Task("t", [])))


def test_start_up_check_names_what_raises_or_miscounts():
    def needs_label(completions, label):
        return [1.0 for _ in label]

    with pytest.raises(ValueError, match="needs_label failed its start-up.*label"):
        RewardSet([needs_label]).check_at_start(_answer(Task("t", [])))
    RewardSet([needs_label]).check_at_start(_answer(Task("t", [], {"label": "x"})))
    with pytest.raises(RewardCountError, match="many: expected 1 values, received 2"):
        RewardSet([_giving([1, 2], "many")]).check_at_start(_answer(Task("t", [])))


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="reward.weights has 1 entries for 2"):
        RewardSet([_giving(1), _giving(2, "g")], weights=[1.0])
    with pytest.raises(ValueError, match="must differ"):
        RewardSet([_giving(1), _giving(2)])


def test_functions_load_by_dotted_path():
    path = "tools_env.rewards.load_function"
    assert load_function(path) is load_function("tools_env.rewards:load_function")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("name", "not of the form"),
        (".name", "not of the form"),
        ("no_such_module.f", "cannot import 'no_such_module'"),
        (
            "tools_env.rewards.nothing",
            "'nothing' in module 'tools_env.rewards' does not",
        ),
        ("tools_env.rewards._log", "is not callable"),
    ],
)
def test_load_errors_name_the_path_and_the_fault(path, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        load_function(path)
    assert repr(path) in str(caught.value)


def test_failures_are_logged(caplog):
    RewardSet([_giving([math.nan], "f")])(*_batch(1))
    assert "f gave 1 unusable" in caplog.text
    assert rewards._log.name == "tools_env.rewards"
