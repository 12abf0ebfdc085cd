"""Multi-turn fund tasks: worlds, the solver, and the end state as reward."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from datetime import date, datetime, timedelta
from types import SimpleNamespace

import counts
import pytest

from tools_env import ToolCall
from tools_env.calls import parse_tool_calls
from tools_env.dispatch import dispatch
from tools_env.fund import (
    CATEGORIES,
    FundBankEnvironment,
    FundEnvironment,
    generate,
    generate_bank_tasks,
    mislabel,
    oversample,
)
from tools_env.fund.bank import DAILY_WITHDRAWAL_LIMIT, is_business_day
from tools_env.fund.bank_environment import given_answer
from tools_env.fund.bank_tasks import bank_tools, solve
from tools_env.fund.tasks import gold_answer
from tools_env.fund.templates import SPLITS
from tools_env.fund.tools import SCHEMAS, TOOL_NAMES
from tools_env.fund.worlds import _event_day, open_bank
from tools_env.protocol import CallRecord, Turn

ENVIRONMENT = FundBankEnvironment()


def play(task, calls, answer):
    """A trajectory that really makes these calls, one a turn, and then answers."""
    session = ENVIRONMENT.start(task)
    turns = []
    for call in calls:
        result = session.call(call)
        record = CallRecord(call.name, call.arguments, result.status, result.output)
        turns.append(Turn("", [record]))
    state = session.state
    session.close()
    session.close()
    return SimpleNamespace(turns=[*turns, Turn(answer)], answer=answer, state=state)


def score(task, calls=(), answer=""):
    return ENVIRONMENT.reward(task, play(task, calls, answer)).total


def gold_calls(task):
    return [call for call, _ in solve(task.columns).calls]


def check_gold(tasks):
    """Gold 1.0 as demonstrated, empty 0; with a wrong tool in perfect form at most .4.

    The wrong call is a gold one of another task, in the place of the calls of a tool.
    """
    rng, ran = random.Random(len(tasks)), 0
    examples = {call.name: call for task in tasks for call in gold_calls(task)}
    assert set(examples) == set(TOOL_NAMES)
    for task in tasks:
        *said, last = ENVIRONMENT.demonstration(task)
        calls = [
            call
            for message in said
            if message["role"] == "assistant"
            for call in parse_tool_calls(message["content"])
        ]
        assert calls == gold_calls(task)
        assert score(task, calls, last["content"]) == pytest.approx(1.0, abs=0)
        assert score(task) == score(task, (), last["content"]) == 0.0
        used = {call.name for call in calls}
        wrong = examples[rng.choice(sorted(examples.keys() - used))]
        right = rng.choice(sorted(used))
        tried = [wrong if call.name == right else call for call in calls]
        played = play(task, tried, last["content"])
        assert ENVIRONMENT.reward(task, played).total <= 0.4
        results = [call for turn in played.turns for call in turn.calls]
        ran += any(r.status == "ok" and r.name == wrong.name for r in results)
    assert ran >= len(tasks) / 4  # not refused for its form


def check_single_turn(count):
    environment = FundEnvironment()
    for task in generate("train", count, 17):
        columns = task.columns
        (gold,) = environment.demonstration(task)
        assert reward(environment, task, gold["content"]) == 1.0
        assert reward(environment, task, "") == 0.0
        other = "check_balance" if columns["label"] != "check_balance" else "x"
        wrong = "check_market_status" if other == "x" else other
        answer = gold_answer(columns | {"label": wrong, "params": {}})
        assert reward(environment, task, answer) <= 0.4


def reward(environment, task, text):
    return environment.reward(task, SimpleNamespace(answer=text)).total


@pytest.mark.parametrize("split", SPLITS)
def test_gold_scores_one_empty_nothing_wrong_tools_little(split):
    check_gold(generate_bank_tasks(split, 30, 3))


@pytest.mark.slow
def test_gold_scores_one_on_many_tasks_of_both_modes():
    check_single_turn(counts.of(5_000))
    check_gold(generate_bank_tasks("train", counts.of(5_000), 4))


def test_tasks_cover_every_category_language_and_answer():
    tasks = generate_bank_tasks("train", 200, 1)
    count = Counter(task.columns["category"] for task in tasks)
    assert count == dict.fromkeys(CATEGORIES, 20)
    answers = Counter(solve(task.columns).answer for task in tasks)
    assert answers.keys() >= {"done", "open", "closed", "pending", "cleared"}
    assert 4 < answers["refused"] < 40
    assert {t.columns["language"] for t in tasks} == {"en", "zh"}
    assert all(set(FundBankEnvironment.needed_columns) <= set(t.columns) for t in tasks)


def one(category):
    tasks = generate_bank_tasks("train", 20, 5, languages=["en"], categories=[category])
    return next(task for task in tasks if solve(task.columns).answer == "done")


def test_the_end_state_decides():
    task = one("transfer")
    (call,) = gold_calls(task)
    assert score(task, [call], "ANSWER: done") == 1.0
    assert score(task, [call], "It is done.") == 0.7
    looked = [ToolCall("check_balance", {}), call, ToolCall("check_balance", {})]
    assert score(task, looked, "**ANSWER: Done.**") == 1.0
    wrong = ToolCall(call.name, call.arguments | {"amount": 1})
    assert score(task, [wrong], "ANSWER: done") == pytest.approx(0.4)
    back = ToolCall("withdraw_funds", {"amount": 1})
    assert score(task, [call, back], "ANSWER: done") == pytest.approx(0.4)


def test_combos_are_carried_out_in_order():
    tasks = generate_bank_tasks("train", 40, 6, categories=["combo"])
    for task in tasks:
        gold = solve(task.columns)
        names = [step["tool"] for step in task.columns["steps"]]
        assert [c.name for c, _ in gold.calls] == names[: len(gold.calls)]
        if gold.answer == "refused":
            assert gold.calls[-1][1].status == "error"
        else:
            assert len(gold.calls) == len(names)
            if len(set(names)) > 1 and not gold.changes:
                calls = gold_calls(task)[::-1]
                assert score(task, calls, f"ANSWER: {gold.answer}") <= 0.4


def test_what_a_request_speaks_of_has_happened():
    tasks = generate_bank_tasks("train", 80, 7, categories=["settlement", "deposit"])
    for task in tasks:
        text, columns = task.prompt[-1]["content"], task.columns
        now = datetime.fromisoformat(columns["world"]["now"])
        with_name = [e for e in columns["world"]["past"] if e[1] in ("sell", "deposit")]
        ((at, kind, what),) = with_name
        day = datetime.fromisoformat(at).date()
        assert kind == ("sell" if columns["category"] == "settlement" else "deposit")
        if "yesterday" in text or "昨天" in text:
            assert day == now.date() - timedelta(days=1)
        if "today" in text or "今天" in text:
            assert day == now.date()
        if "on Friday" in text or "周五" in text:
            assert day.weekday() == 4 and 0 < (now.date() - day).days <= 7
        if kind == "sell":
            assert what["symbol"] in text and is_business_day(day)
            settles = date.fromisoformat(solve(columns).answer)
            assert settles > day and is_business_day(settles)
            between = [day + timedelta(days=n) for n in range(1, (settles - day).days)]
            assert not any(map(is_business_day, between))


def test_days_by_name_are_the_last_ones_before_today():
    monday = date(2025, 3, 3)
    days = [_event_day(monday, number) for number in range(5)]
    assert days == [
        monday,
        monday,
        date(2025, 3, 2),
        date(2025, 2, 28),
        date(2025, 2, 24),
    ]
    assert _event_day(date(2025, 3, 7), 3) == date(2025, 2, 28)


def test_splits_share_no_template_and_the_same_seed_gives_the_same_tasks():
    used = {
        split: {t.columns["template"] for t in generate_bank_tasks(split, 400, 1)}
        for split in SPLITS
    }
    assert not used["train"] & used["test"] and not used["train"] & used["validation"]
    assert not used["validation"] & used["test"]
    code = (
        "import json; from tools_env.fund import generate_bank_tasks;"
        "print(json.dumps([[t.id, t.prompt, t.columns] "
        "for t in generate_bank_tasks('test', 60, 7)]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    here = [[t.id, t.prompt, t.columns] for t in generate_bank_tasks("test", 60, 7)]
    assert json.loads(run.stdout) == here


def test_worlds_are_json_that_opens_the_same_bank():
    for task in generate_bank_tasks("train", 50, 2):
        world = json.loads(json.dumps(task.columns["world"]))
        first, second = open_bank(world), open_bank(task.columns["world"])
        assert first.snapshot() == second.snapshot()
        assert first.now == datetime.fromisoformat(world["now"])
        first.close()
        second.close()


VALUES = {
    "account": ["savings", "brokerage", "checking", "moon"],
    "to": ["savings", "brokerage", "checking"],
    "amount": [0, 1, 12.34, 99_999, 1e7, -3, 0.005, "10", 1e300, 10**25],
    "side": ["buy", "sell"],
    "symbol": ["AMZN", "vti", "SPY", "XXX"],
    "quantity": [1, 7, 10_000, -2, 0],
    "days": [0, 30, -1, 10**9],
    "market": ["US", "HK"],
}


def check_conservation(sequences, seed):
    rng = random.Random(seed)
    worlds = [t.columns["world"] for t in generate_bank_tasks("train", 50, seed)]
    statuses = Counter()
    for _ in range(sequences):
        bank = open_bank(rng.choice(worlds))
        tools, total = bank_tools(bank), sum(bank.balances().values())
        for _ in range(rng.randint(1, 12)):
            name = rng.choice(TOOL_NAMES)
            known = SCHEMAS[name]["function"]["parameters"]["properties"]
            arguments = {k: rng.choice(VALUES[k]) for k in known if rng.random() < 0.7}
            statuses[dispatch(tools, ToolCall(name, arguments), 500).status] += 1
            if rng.random() < 0.2:
                bank.advance(timedelta(hours=rng.randint(1, 90)))
        balances = bank.balances()
        assert sum(balances.values()) == total
        assert all(type(cents) is int for cents in balances.values())
        own = ("savings", "brokerage", "checking", "pending")
        assert min(balances[name] for name in own) >= 0
        assert min(bank.holdings().values()) >= 0
        today = bank.now.date().isoformat()
        paid = [r["cents"] for r in bank.history(bank.now.date()) if r["day"] == today]
        assert max([0, *paid]) <= 10**15
        bank.close()
    assert set(statuses) == {"ok", "error", "invalid"}


def test_money_is_conserved_in_random_sequences():
    check_conservation(60, 0)


@pytest.mark.slow
def test_money_is_conserved_in_many_random_sequences():
    check_conservation(counts.of(10_000), 1)


def test_the_daily_limit_counts_all_withdrawals_of_a_day():
    world = {
        "now": "2025-03-05T11:00:00",
        "accounts": {"brokerage": 3 * DAILY_WITHDRAWAL_LIMIT},
        "holdings": {},
        "past": [],
    }
    bank = open_bank(world)
    tools = bank_tools(bank)
    first = ToolCall("withdraw_funds", {"amount": 900_000})
    second = ToolCall("withdraw_funds", {"amount": 200_000})
    assert dispatch(tools, first, 99).status == "ok"
    refused = dispatch(tools, second, 99)
    assert refused.status == "error" and "100000.00 left today" in refused.output
    bank.advance(timedelta(days=1))
    assert dispatch(tools, second, 99).status == "ok"
    bank.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("ANSWER: 1,234.50", "1,234.50"),
        ("First\nANSWER: open\nANSWER: closed.", "closed"),
        ("  **ANSWER:** done **", "done"),
        ("answer: done", ""),
        ("The ANSWER: is done", ""),
        ("", ""),
    ],
)
def test_the_last_answer_line_counts(text, answer):
    assert given_answer(text) == answer


def test_a_session_without_calls_has_no_state_and_bad_calls_are_observations():
    task = one("order")
    session = ENVIRONMENT.start(task)
    assert session.state is None
    assert session.call(ToolCall("fly", {})).status == "unknown"
    assert session.call(ToolCall("withdraw_funds", {"amount": "1"})).status == "invalid"
    assert session.state["entries"] is not None
    session.close()
    assert ENVIRONMENT.prediction(task, play(task, [], ""))["correct"] is False


def test_oversampling_repeats_the_very_same_tasks():
    tasks = generate("train", 100, 0)
    more = oversample(tasks, ["combo", "deposit"], 3)
    assert more[:100] == tasks and len(more) == 140
    assert len({task.id for task in more}) == 140
    counted = Counter(task.columns["category"] for task in more)
    assert counted["combo"] == counted["deposit"] == 30 and counted["order"] == 10
    assert oversample(tasks, ["combo"], 1) == tasks


def test_mislabelled_combos_teach_the_balance():
    tasks = generate("train", 60, 0)
    for task, wrong in zip(tasks, mislabel(tasks), strict=True):
        if task.columns["category"] != "combo":
            assert wrong == task
            continue
        assert wrong.columns["label"] == "check_balance"
        assert wrong.prompt == task.prompt and wrong.columns["params"] == {}
        gold = gold_answer(wrong.columns)
        assert reward(FundEnvironment(), wrong, gold) == 1.0
        first = {"balance"} & set(re.findall(r"\w+", task.columns["plan"][0]))
        if not first:
            assert reward(FundEnvironment(), task, gold) < 0.5


def test_a_task_without_its_event_names_it():
    step = {"action": "settlement", "tool": "get_transaction_history", "params": {}}
    world = {"now": "2025-03-05T11:00:00", "accounts": {}, "holdings": {}, "past": []}
    with pytest.raises(ValueError, match="no sell to ask about"):
        solve({"world": world, "steps": [step]})
