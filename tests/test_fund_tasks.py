"""The generator of fund tasks: categories, amounts, splits, determinism."""

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import pytest

from tools_env.fund import CATEGORIES, FundEnvironment, generate
from tools_env.fund.amounts import as_number, draw_amount, read_amount
from tools_env.fund.reward import mentions_market, parse_answer
from tools_env.fund.tasks import LANGUAGES, gold_answer, system_prompt
from tools_env.fund.templates import SPLITS


def _answering(text):
    return SimpleNamespace(answer=text)


def _user(task):
    return task.prompt[-1]["content"]


@pytest.mark.parametrize("split", SPLITS)
def test_gold_answers_score_one_in_every_category(split):
    environment = FundEnvironment()
    tasks = generate(split, 800, 11)
    for task in tasks:
        (message,) = environment.demonstration(task)
        reward = environment.reward(task, _answering(message["content"]))
        assert reward.total == 1.0, (task, message)
        assert "\n" not in message["content"]
    assert Counter(t.columns["category"] for t in tasks) == dict.fromkeys(
        CATEGORIES, 80
    )
    assert {t.columns["difficulty"] for t in tasks} == {"simple", "complex", "combo"}
    assert {t.columns["language"] for t in tasks} == {"en", "zh"}


def test_texts_are_filled_and_gold_values_come_from_the_text():
    for task in generate("train", 600, 5) + generate("test", 300, 5):
        text, params = _user(task), task.columns["params"]
        assert not re.search(r"[{}]", text)
        if "symbol" in params:
            assert params["symbol"] in text
        if "quantity" in params:
            assert str(params["quantity"]) in text


def test_combo_label_is_its_first_step_and_its_plan_lists_all():
    for task in generate("train", 200, 2, languages=["en"], categories=["combo"]):
        columns = task.columns
        assert len(columns["plan"]) in (2, 3)
        first = {
            "transfer": "transfer_funds",
            "withdraw": "withdraw_funds",
            "buy": "place_order",
            "sell": "place_order",
            "check": {"check balance": "check_balance"}.get(
                columns["plan"][0], "check_market_status"
            ),
            "read": "get_transaction_history",
        }[columns["plan"][0].split()[0]]
        assert columns["label"] == first
    text, columns = "先转账10万再提现5万", generate("train", 1, 0, categories=["combo"])
    assert read_amount(text[3:6]) == 100_000 and columns[0].columns["label"]


def test_market_tools_are_expected_only_where_the_request_mentions_the_market():
    for split in SPLITS:
        for task in generate(split, 1500, 8):
            if task.columns["label"] == "check_market_status":
                assert mentions_market(_user(task)), _user(task)


def test_hard_negatives_mention_the_market_without_asking_about_it():
    tasks = generate("train", 2000, 4)
    misleading = Counter(
        task.columns["category"]
        for task in tasks
        if mentions_market(_user(task))
        and task.columns["label"] != "check_market_status"
    )
    expected = {"balance", "history", "transfer", "withdraw", "order", "deposit"}
    assert set(misleading) >= expected | {"settlement"}
    settlement = [t for t in tasks if t.columns["category"] == "settlement"]
    assert any("balance" in _user(t) or "余额" in _user(t) for t in settlement)


def _texts(words, split):
    for templates in words.REQUESTS[split].values():
        yield from (template.text for template in templates)
    for templates in words.PHRASES[split].values():
        yield from (template.text for template in templates)
    yield from words.CONNECTORS[split]


@pytest.mark.parametrize("language", LANGUAGES)
def test_splits_share_no_template(language):
    words = LANGUAGES[language]
    plain = {
        split: {re.sub(r"[\W_]", "", text.lower()) for text in _texts(words, split)}
        for split in SPLITS
    }
    assert not plain["train"] & plain["test"]
    assert not plain["train"] & plain["validation"]
    assert not plain["validation"] & plain["test"]
    used = {s: {t.columns["template"] for t in generate(s, 600, 1)} for s in SPLITS}
    assert not used["train"] & used["test"]
    assert not used["train"] & used["validation"]


@pytest.mark.parametrize(
    ("language", "split", "least"),
    [("en", "train", 12), ("en", "test", 6), ("en", "validation", 3)]
    + [("zh", "train", 8), ("zh", "test", 4), ("zh", "validation", 2)],
)
def test_every_category_has_many_templates(language, split, least):
    words = LANGUAGES[language]
    counts = {c: len(set(t)) for c, t in words.REQUESTS[split].items()}
    counts["combo"] = len(set(words.CONNECTORS[split]))
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= least, counts


def test_same_seed_gives_the_same_tasks_in_a_new_process():
    code = (
        "import json; from tools_env.fund import generate;"
        "print(json.dumps([[t.id, t.prompt, t.columns] "
        "for t in generate('train', 120, 7)]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    here = [[t.id, t.prompt, t.columns] for t in generate("train", 120, 7)]
    assert json.loads(run.stdout) == here
    assert here != [[t.id, t.prompt, t.columns] for t in generate("train", 120, 8)]


def test_categories_can_be_named_and_weighed():
    tasks = generate("train", 40, 0, categories={"combo": 3, "balance": 1, "order": 0})
    counts = Counter(task.columns["category"] for task in tasks)
    assert counts == {"combo": 30, "balance": 10}
    named = generate("train", 7, 0, languages=["zh"], categories=["deposit"])
    assert {t.columns["category"] for t in named} == {"deposit"}
    assert {t.columns["language"] for t in named} == {"zh"}
    assert len(named) == 7


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"split": "dev"}, "split 'dev'"),
        ({"languages": ["fr"]}, "language 'fr'"),
        ({"languages": []}, "language none given"),
        ({"categories": ["bond"]}, "category 'bond'"),
        ({"categories": {"order": 0}}, "weights"),
        ({"prompt_style": "long"}, "prompt style 'long'"),
    ],
)
def test_unknown_choices_are_refused_by_name(arguments, match):
    with pytest.raises(ValueError, match=match):
        generate(**({"split": "train", "count": 1, "seed": 0} | arguments))


def test_prompts_and_gold_answers_are_short():
    assert len(system_prompt()) < 260
    assert "quantity?: integer" in system_prompt("full")
    tasks = generate("train", 400, 0, languages=["en"])
    assert sum(len(gold_answer(t.columns)) for t in tasks) / 400 < 190
    assert max(len(t.columns["thought"].split()) for t in tasks) <= 12


def test_gold_answer_reads_back():
    (task,) = generate("train", 1, 0, categories=["order"])
    answer = parse_answer(gold_answer(task.columns))
    assert answer["action"]["params"] == task.columns["params"]
    assert list(answer) == ["thought", "action", "plan"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10万", 100_000),
        ("10 lakh", 1_000_000),
        ("1,00,000", 100_000),
        ("$1,200", 1200),
        ("$1,200.50", Decimal("1200.5")),
        ("1.5k", 1500),
        ("1.5万元", 15_000),
        ("五千", 5000),
        ("两万", 20_000),
        ("３千", 3000),
        ("2 crore", 20_000_000),
        ("1200 dollars", 1200),
        ("-5", -5),
        ("", None),
        ("k", None),
        ("12 apples", None),
        ("1 2", None),
        ("1e5", None),
        ("9" * 50, None),
    ],
)
def test_amounts_as_people_write_them(text, value):
    assert read_amount(text) == value


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_drawn_amount_reads_back(language):
    rng = random.Random(0)
    for _ in range(2000):
        value, text = draw_amount(rng, language)
        assert read_amount(text) == as_number(value), text


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        (("train", 256, 0), "886223e738258b54"),
        (("test", 400, 0), "94f6ab0578453c12"),
        (("validation", 100, 3, ("en", "zh")), "fdc37ce3cbe85e2f"),
    ],
)
def test_results_on_record_stay_comparable(arguments, digest):
    """A change here makes every earlier measurement one of other tasks."""
    split, count, seed, *languages = arguments
    tasks = generate(split, count, seed, languages=(languages or [("en",)])[0])
    content = [[task.id, task.prompt, task.columns] for task in tasks]
    text = json.dumps(content, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)
