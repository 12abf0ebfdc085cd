"""The cold start's examples from rows and environments, and what prompts begin with."""

import json

import numpy as np
import pytest

from configs import base, tir
from grpo_jax import data, models, setup
from grpo_jax.config import BadInput
from grpo_jax.rollout.chat import Chat
from grpo_jax.training import sft
from grpo_jax.types import Source
from tools_env.functions import FunctionEnvironment
from tools_env.protocol import Task
from tools_env.python_tasks import SYSTEM_PROMPT, PythonEnvironment
from tools_env.rewards import RewardSet

SYSTEM = {"role": "system", "content": SYSTEM_PROMPT}
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def chat():
    tokenizer = models.load_tokenizer("tiny")
    return Chat(tokenizer, PythonEnvironment().tools())


def text(chat, example, source):
    segments = example.trajectory.segments
    parts = [chat.decode(s.tokens.tolist()) for s in segments if s.source is source]
    return "".join(parts)


def gold(tmp_path, chat, *rows, length=4096, strict=False, min_tool_calls=0, **keys):
    """The examples that a run on the Python environment makes of an sft.source."""
    config = tir.get_config("tiny")
    config.sft.source = write(tmp_path / "gold.jsonl", *rows)
    config.sft.update(keys)
    environment = setup.make_environment(config)
    tasks = setup.load_sft_tasks(config, [], environment)
    return sft.gold_examples(
        *(environment, chat, tasks),
        max_length=length,
        min_tool_calls=min_tool_calls,
        own_tools=True,
        strict=strict,
    )


def test_rows_with_messages_are_shown_whatever_the_environment_is(tmp_path, chat):
    request = {"function": {"name": "search", "arguments": "{}"}}
    calling = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [request]},
        {"role": "tool", "content": "found"},
        ANSWER,
    ]
    own, plain = gold(
        tmp_path,
        chat,
        {"messages": calling, "tools": [SEARCH]},
        {"messages": [USER, ANSWER]},
    )
    model = text(chat, own, Source.MODEL)
    assert '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>' in model
    assert "found" in text(chat, own, Source.TOOL) and "found" not in model
    np.testing.assert_array_equal(own.advantages, [1.0, 1.0])
    for example, tool, other in (
        (own, '"name": "search"', '"name": "python"'),
        (plain, '"name": "python"', '"name": "search"'),
    ):
        prompt = text(chat, example, Source.PROMPT)
        assert tool in prompt and other not in prompt
        assert SYSTEM_PROMPT in prompt
    assert text(chat, plain, Source.MODEL).startswith("2")


def test_a_row_with_tools_that_the_environment_lacks_is_skipped_by_name(chat, caplog):
    columns = {"demonstration": [ANSWER], "tools": [SEARCH]}
    task = Task("t", [USER], columns)
    assert not sft.gold_examples(PythonEnvironment(), chat, [task], max_length=4096)
    assert "skipped t: its column 'tools' names 'search'" in caplog.text


def test_tasks_without_a_gold_answer_or_room_are_counted(chat, caplog):
    tasks = [Task("a", [USER], {"answer": "2"})]
    tasks += [Task(x, [USER], {"demonstration": [ANSWER]}) for x in "bc"]
    tasks += [Task("d", [USER], {"demonstration": [{**ANSWER, "content": "2" * 5000}]})]
    examples = sft.gold_examples(PythonEnvironment(), chat, tasks, max_length=4096)
    assert [example.trajectory.task.id for example in examples] == ["b", "c"]
    assert "left out 1 without a gold answer, 1 longer than 4096 tokens" in caplog.text


def tool_results(example):
    return len(example.trajectory.calls)


@pytest.mark.parametrize(("least", "dense"), [(9, [9, 10, 14, 12]), (10, [10, 14, 12])])
def test_sparse_rows_are_left_out(tmp_path, chat, caplog, least, dense):
    """The golden selection: of 3, 9, 10, 14, 0, 12 calls those of more than nine
    (ASTER), or of at least nine (the article)."""
    call = [{"role": "assistant", "content": "c"}, {"role": "tool", "content": "1"}]
    rows = [{"messages": [USER, *call * n, ANSWER]} for n in (3, 9, 10, 14, 0, 12)]
    kept = gold(tmp_path, chat, *rows, min_tool_calls=least)
    assert [tool_results(example) for example in kept] == dense
    left = 6 - len(dense)
    assert f"left out {left} with fewer than {least} tool calls" in caplog.text
    for example in kept:
        sources = [segment.source for segment in example.trajectory.segments]
        assert sources.count(Source.MODEL) == tool_results(example) + 1
        assert len(example.advantages) == tool_results(example) + 1


def test_built_in_trajectories_are_joined_until_they_are_dense(chat):
    config = tir.get_config("tiny")
    config.data.update(num_tasks=7, datasets=("chain_sum", "gcd"))
    environment = PythonEnvironment()
    tasks = data.load_tasks(config, "train")
    options = {"max_length": 9000}
    sparse = sft.gold_examples(environment, chat, tasks, **options)
    assert [tool_results(example) for example in sparse] == [1] * 7
    dense = sft.gold_examples(environment, chat, tasks, min_tool_calls=3, **options)
    assert [tool_results(example) for example in dense] == [3, 3]  # one is left over
    written = text(chat, dense[0], Source.MODEL)
    assert written.count("<tool_call>") == 3 and written.count("boxed") == 3
    asked = text(chat, dense[0], Source.TOOL)
    for task in tasks[1:3]:
        assert task.prompt[-1]["content"] in asked
    assert SYSTEM_PROMPT not in asked


def test_conversations_that_the_template_refuses_are_named(tmp_path, caplog):
    tokenizer = models.load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system must come first') }}{% endif %}{% endfor %}"
        + tokenizer.chat_template
    )
    chat = Chat(tokenizer)
    odd = {"id": "odd", "messages": [USER, ANSWER, {"role": "system", "content": "x"}]}
    (kept,) = gold(tmp_path, chat, odd, {"messages": [USER, ANSWER]})
    assert kept.trajectory.task.id == "gold.jsonl:2"
    assert "skipped odd: " in caplog.text and "system must come first" in caplog.text
    with pytest.raises(BadInput, match="cold start: odd: .*system must come first"):
        gold(tmp_path, chat, odd, {"messages": [USER, ANSWER]}, strict=True)


def test_rows_of_sft_source_need_a_demonstration_and_are_counted(tmp_path, chat):
    row = {"messages": [USER, ANSWER]}
    assert len(gold(tmp_path, chat, *[row] * 3, num_examples=2)) == 2
    assert len(gold(tmp_path, chat, *[row] * 3, num_examples=0)) == 3
    with pytest.raises(BadInput, match="gold.jsonl:1: no column 'demonstration'"):
        gold(tmp_path, chat, {"prompt": "x"})


def test_without_sft_source_the_first_training_tasks_are_shown():
    config = base.get_config()
    config.sft.num_examples = 2
    tasks = [Task(x, [USER]) for x in "abc"]
    environment = PythonEnvironment()
    assert setup.load_sft_tasks(config, tasks, environment) == []  # no epochs
    config.sft.num_epochs = 1
    assert setup.load_sft_tasks(config, tasks, environment) == tasks[:2]
    config.sft.source = "missing.jsonl"
    with pytest.raises(BadInput, match="missing.jsonl"):
        setup.load_sft_tasks(config, tasks, environment)


def test_prompts_without_a_system_message_get_the_environments():
    own = [{"role": "system", "content": "mine"}, USER]
    tasks = [Task("a", [USER], {"answer": 2}), Task("b", own)]
    first, second = setup.instructed(tasks, PythonEnvironment())
    assert first == Task("a", [SYSTEM, USER], {"answer": 2})
    assert second is tasks[1] and tasks[0].prompt == [USER]
    other = FunctionEnvironment([], rewards=RewardSet([]))
    assert setup.instructed(tasks, other) == tasks


def test_python_needs_an_answer_unless_other_rewards_judge(tmp_path):
    config = tir.get_config("tiny")
    config.data.source = write(tmp_path / "a.jsonl", {"prompt": "1+1?"})
    with pytest.raises(BadInput, match="a.jsonl:1: no column 'answer'"):
        data.load_tasks(config, "train", setup.make_environment(config))
    config.reward.functions = ("tools_env.rewards.load_function",)
    environment = setup.make_environment(config)
    assert len(data.load_tasks(config, "train", environment)) == 1
    config.data.source = "reasoning_gym"
    config.data.num_tasks = 2
    assert len(data.load_tasks(config, "train", PythonEnvironment())) == 2
