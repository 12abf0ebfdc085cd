"""The fund rewards: exact weights, the label, parameters by value, overuse."""

import json
import random
from types import SimpleNamespace

import pytest

from tools_env.fund import FundEnvironment, generate
from tools_env.fund.reward import (
    capped_reward,
    graded_reward,
    mentions_market,
    parse_answer,
    same_params,
)
from tools_env.fund.tasks import ANSWER_FORMATS, gold_answer
from tools_env.fund.tools import TOOL_NAMES
from tools_env.protocol import Task, ToolCall

GOOD = {
    "check_balance": {},
    "transfer_funds": {"amount": 5},
    "withdraw_funds": {"amount": 5},
    "place_order": {"side": "buy", "symbol": "VTI", "quantity": 1},
    "get_transaction_history": {},
    "check_market_status": {},
}
TASK = Task(
    "t",
    [
        {"role": "system", "content": "check_market_status may be called"},
        {"role": "user", "content": "Transfer 10万 to savings."},
    ],
    {"label": "transfer_funds", "params": {"amount": 100_000, "to": "savings"}},
)


def _answer(tool="transfer_funds", params=None, **changes):
    params = {"amount": 100_000, "to": "savings"} if params is None else params
    answer = {"thought": "t", "action": {"tool": tool, "params": params}, "plan": ["p"]}
    answer |= changes
    return json.dumps({k: v for k, v in answer.items() if v is not None})


def _score(text, task=TASK, **options):
    return FundEnvironment(**options).reward(task, SimpleNamespace(answer=text))


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (_answer(), 1.0),
        (f"\n {_answer()} \n", 1.0),
        (_answer(thought=None), 0.9),
        (_answer(thought=" "), 0.9),
        (_answer(plan=None), 0.9),
        (_answer(plan=[]), 0.9),
        (_answer(plan=["a", 3]), 0.9),
        (_answer(params={"amount": 1, "to": "savings"}), 0.8),
        (_answer(params={"amount": 100_000}), 0.8),
        (_answer(params={"amount": "10万", "to": "savings"}), 0.9),  # not a number
        (_answer(params={"amount": 100_000, "to": "savings", "x": 1}), 0.7),
        (_answer(params="all"), 0.7),
        (_answer("withdraw_funds", {"amount": 100_000}), 0.4),
        (_answer("withdraw_funds", {"amount": "much"}), 0.3),
        (_answer("check_market_status", {}), 0.1),
        (_answer("pay", {}), 0.2),
        (_answer(action={"tool": ["transfer_funds"]}), 0.2),
        (_answer(action="transfer_funds"), 0.2),
        ("", 0.0),
        ("{}", 0.0),
        ("[]", 0.0),
        ("null", 0.0),
        ("transfer_funds", 0.0),
    ],
)
def test_graded_weights(text, total):
    assert _score(text).total == total


def test_parts_are_flags_for_metrics():
    parts = _score(_answer("check_market_status", {})).parts
    assert parts == {
        "thought": 1.0,
        "plan": 1.0,
        "known_tool": 1.0,
        "schema": 1.0,
        "right_tool": 0.0,
        "right_params": 0.0,
        "overuse": 1.0,
    }


def test_wrong_tool_in_perfect_form_earns_at_most_point_four():
    for task in generate("train", 300, 1) + generate("test", 100, 1):
        for tool in set(TOOL_NAMES) - {task.columns["label"]}:
            for params in (GOOD[tool], task.columns["params"]):
                assert _score(_answer(tool, params), task).total <= 0.4
        assert _score("", task).total == 0.0


def test_overuse_penalty_is_configurable_and_spares_market_questions():
    text = _answer("check_market_status", {})
    assert _score(text, overuse_penalty=0.0).total == 0.4
    assert _score(text, overuse_penalty=1.0).total == 0.0
    asked = [{"role": "user", "content": "Sell before the market closes."}]
    assert _score(text, Task("t", asked, TASK.columns)).total == 0.4
    expected = TASK.columns | {"label": "check_market_status", "params": {}}
    assert _score(text, Task("t", TASK.prompt, expected)).total == 1.0


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("Is the market open?", True),
        ("before the bell", True),
        ("after-hours prices", True),
        ("supermarket bill", False),
        ("transfer 5k to savings", False),
        ("美股开盘了吗", True),
        ("今天休市吗", True),
        ("查一下我的余额", False),
    ],
)
def test_market_words(text, mentions):
    assert mentions_market(text) is mentions


def test_article_reward_is_the_printed_form():
    score = lambda text: _score(text, reward="article").total  # noqa: E731
    assert score(_answer()) == 0.9
    assert score(_answer("withdraw_funds", {})) == 0.9  # it never looks at the label
    assert score(_answer("pay")) == 0.7
    assert score(_answer(thought=None)) == 0.7
    assert score(_answer(action={"tool": "check_balance"})) == 0.8
    assert score(_answer("check_market_status", {})) == 0.6
    assert score('{"plan": 1}') == 0.2
    assert score("no json") == 0.0
    assert FundEnvironment("article").max_reward == 0.9


def test_capped_reward_stops_at_the_articles_0_8():
    score = lambda text, **keys: capped_reward(TASK, text, **keys).total  # noqa: E731
    react = {"answer_format": "react"}
    assert score(_answer(), **react) == 0.8
    assert score(_answer("withdraw_funds", {}), **react) == 0.8  # blind to the label
    assert score(_answer("pay"), **react) == 0.6
    assert score(_answer(thought=None), **react) == 0.6
    assert score(_answer(action={"tool": "check_balance"}), **react) == 0.7
    columns = TASK.columns | {"thought": "t", "plan": ["p"]}
    gold = gold_answer(columns, "reasoning_action")
    assert score(gold) == 0.8 and score("no json") == 0.0
    assert FundEnvironment("capped").max_reward == 0.8
    with pytest.raises(ValueError, match="capped.*'tool'"):
        FundEnvironment("capped", answer_format="tool")


@pytest.mark.parametrize(
    ("gold", "given", "same"),
    [
        ({"a": 10, "b": 2}, {"a": 999, "b": 2}, False),
        ({"a": 10, "b": 2}, {"a": 10, "b": 2, "c": 1}, False),
        ({"a": 10, "b": 2}, {"a": 10}, False),
        ({"a": 10, "b": 2}, {"a": 10.0, "b": 2}, True),
        ({"a": 10, "b": 2}, {"b": 2, "a": 10}, True),
        ({"a": 10, "b": 2}, None, False),
        ({"a": 10, "b": 2}, {}, False),
        ({}, {}, True),
        ({}, None, False),
        ({"a": 1}, {"a": True}, False),
        ({"amount": 100_000}, {"amount": "10万"}, True),
        ({"amount": 1200}, {"amount": 1200.0}, True),
        ({"amount": 1200.5}, {"amount": "$1,200.50"}, True),
        ({"amount": 1200}, {"amount": float("inf")}, False),
        ({"symbol": "AMZN"}, {"symbol": "amzn"}, True),
        ({"symbol": "AMZN"}, {"symbol": "AMZN, TSLA"}, False),
        ({"symbol": "AMZN"}, {"symbol": ""}, False),
    ],
)
def test_AV3_call_scorer_compares_values_and_refuses_extras(gold, given, same):
    assert same_params(gold, given) is same


def test_AV3_unreadable_answer_is_never_right():
    columns = {"label": "check_balance", "params": {}}
    assert _score("@@@", Task("t", TASK.prompt, columns)).total == 0.0


def test_DS1_null_filled_gold_params_are_no_parameters():
    columns = TASK.columns | {
        "params": {"amount": 100_000, "to": "savings", "symbol": None},
        "thought": "t",
        "plan": ["p"],
    }
    task = Task("t", TASK.prompt, columns)
    assert _score(_answer(), task).total == 1.0
    assert "null" not in gold_answer(columns)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": Infinity}',
        f"```json\n{_answer()}\n```",
        _answer() + " done",
        "{'a': 1}",
        '{"a": ' + "9" * 5000 + "}",
        "[" * 100_000,
        "\ud800",
    ],
)
def test_answers_that_are_not_one_strict_object_are_unreadable(text):
    assert parse_answer(text) is None
    assert _score(text).total == 0.0


def test_mutated_answers_never_raise():
    rng = random.Random(0)
    alphabet = '{}[]":,\\0123456789.-+eE truefalsnuaction万\ud800\x00'
    gold = gold_answer(generate("train", 1, 0)[0].columns)
    nested = '{"action": {"tool": "check_balance", "params": {"account": %s}}}'
    texts = [nested % ("[" * n + "]" * n) for n in (10, 300, 600, 900, 5000)]
    for _ in range(3000):
        characters = list(gold)
        for _ in range(rng.randint(1, 6)):
            characters[rng.randrange(len(characters))] = rng.choice(alphabet)
        texts.append("".join(characters))
    for text in texts:
        for kind in ("graded", "article", "capped"):
            assert 0.0 <= _score(text, reward=kind).total <= 1.0


def test_prediction_names_the_called_tool():
    environment = FundEnvironment()
    predict = lambda text: environment.prediction(  # noqa: E731
        TASK, SimpleNamespace(answer=text)
    )
    assert predict(_answer()) == {
        "expected": "transfer_funds",
        "called": "transfer_funds",
        "correct": True,
        "answer": "transfer_funds",
        "reasoning": 1.0,
    }
    assert predict(_answer("pay"))["called"] == "unknown"
    assert predict("?")["called"] is None and not predict("?")["correct"]


def test_environment_executes_nothing_and_refuses_unknown_rewards():
    environment = FundEnvironment()
    assert environment.tools() == []
    session = environment.start(TASK)
    assert session.call(ToolCall("check_balance", {})).status == "unknown"
    session.close()
    with pytest.raises(ValueError, match="reward.fund 'best'"):
        FundEnvironment("best")
    with pytest.raises(ValueError, match="overuse_penalty"):
        FundEnvironment(overuse_penalty=-1)


@pytest.mark.parametrize("answer_format", ["react", "reasoning_action", "tool"])
def test_every_answer_format_has_the_same_scale(answer_format):
    """Gold 1.0, a wrong tool in perfect form at most .4, an empty answer 0."""
    for task in generate("train", 200, 3, answer_format=answer_format):
        gold = gold_answer(task.columns, answer_format)
        assert graded_reward(task, gold, answer_format=answer_format).total == 1.0
        assert graded_reward(task, "", answer_format=answer_format).total == 0.0
        label = task.columns["label"]
        other = "check_balance" if label != "check_balance" else "check_market_status"
        columns = task.columns | {"label": other, "params": {}}
        wrong = gold_answer(columns, answer_format)
        assert graded_reward(task, wrong, answer_format=answer_format).total <= 0.4
        assert task.prompt[0]["content"].endswith(ANSWER_FORMATS[answer_format])
