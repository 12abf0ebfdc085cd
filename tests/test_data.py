"""Reading rows, prompt budgets, and the stream's order and resumption."""

import json
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict
from test_chat import make_tokenizer

from grpo_jax import rows
from grpo_jax.config import BadInput
from grpo_jax.data import TaskStream, fit_prompts, load_tasks, read_tasks
from grpo_jax.models.chat_template import HERMES_CHATML
from grpo_jax.rollout.chat import Chat
from tools_env.calls import parse_tool_calls
from tools_env.protocol import Task, ToolCall


def write(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def config(source, **changes):
    keys = dict(
        source=source,
        eval_source="",
        num_tasks=0,
        num_eval_tasks=0,
        languages=("en",),
        categories=(),
        category_weights=(),
        oversample=(),
        oversample_times=3,
        flawed_labels=False,
        datasets=("basic_arithmetic",),
        prompt_style="short",
        answer_format="react",
        probe="",
        pass_rate=(),
        seed=0,
        strict=False,
    )
    return ConfigDict({"data": keys | changes, "eval": {"probe": False}})


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def sft_row(schema, request):
    return {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [request]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "done"},
        ],
        "tools": [schema],
    }


def test_strings_and_messages_become_prompts(tmp_path):
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write(
        tmp_path / "a.jsonl",
        {"prompt": "2+3?", "answer": "5", "level": 1},
        "",
        {"prompt": history, "id": 7},
    )
    first, second = read_tasks(source, strict=True)
    assert first == Task(
        "a.jsonl:1",
        [{"role": "user", "content": "2+3?"}],
        {"answer": "5", "level": 1},
    )
    assert second == Task("7", history, {})


def test_TC4_digits_and_characters_survive(tmp_path):
    line = '{"prompt": "北京 ☀️", "id": "é", "answer": 9007199254740993}'
    (task,) = read_tasks(write(tmp_path / "a.jsonl", line), strict=True)
    assert task.prompt[0]["content"] == "北京 ☀️"
    assert task.columns["answer"] == 9007199254740993
    arguments = '{"id": 9007199254740993, "city": "北京", "code": "a=1\\nprint(a)"}'
    request = {"function": {"name": "add", "arguments": arguments}}
    (task,) = read_tasks(
        write(tmp_path / "b.jsonl", sft_row(tool("add"), request)), strict=True
    )
    chat = Chat(make_tokenizer(HERMES_CHATML))
    text = chat.render(task.columns["messages"], generation=False)
    assert '{"id": 9007199254740993, "city": "北京", "code": "a=1\\nprint(a)"}' in text


BAD_ROWS = {
    '{"prompt": "x"': "invalid JSON",
    '{"prompt": "x", "answer": NaN}': "NaN is not JSON",
    '{"prompt": "\\ud800"}': "surrogate",
    "[" * 100_000: "invalid JSON",
    "[1]": "must be an object, not a list",
    '{"question": "x"}': "no column 'prompt'",
    '{"prompt": null}': "no column 'prompt'",
    '{"prompt": " "}': "'prompt' is empty",
    '{"prompt": 3}': "must be text or messages, not a number",
    '{"prompt": []}': "not nothing",
    '{"prompt": ["x"]}': "prompt[0] must be an object, not text",
    '{"prompt": [{"role": "root", "content": "x"}]}': "role 'root' is not one of",
    '{"prompt": [{"role": "user", "content": {}}]}': "content must be text",
    '{"messages": [{"role": "user", "content": "x"}]}': "no assistant message",
    '{"prompt": "x", "tools": "{"}': "invalid JSON",
    '{"prompt": "x", "tools": {}}': "'tools' must be a list",
    '{"prompt": [{"role": "assistant", "tool_calls": [{}]}]}': "a function name",
    '{"prompt": [{"role": "assistant", "tool_calls": {}}]}': "must be a list",
    '{"prompt": "x", "demonstration": "y"}': "'demonstration' must be",
    '{"prompt": "x", "demonstration": [{"role": "tool"}]}': "begin with an assistant",
    '{"prompt": "x", "demonstration": [{"role": "assistant", "content": "<think>",'
    ' "tool_calls": [{"name": "add"}]}]}': "calls of 'add' could not be read back",
}


@pytest.mark.parametrize(("line", "reason"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_bad_rows_are_named(tmp_path, caplog, line, reason):
    source = write(tmp_path / "bad.jsonl", {"prompt": "good"}, line)
    with pytest.raises(BadInput) as error:
        read_tasks(source, strict=True)
    assert str(error.value).startswith("bad.jsonl:2: ") and reason in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert len(read_tasks(source, strict=False)) == 1
    assert "bad.jsonl:2: " in caplog.text and "skipped 1 of 2 rows" in caplog.text


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "bom"}\n{"prompt": "\xff"}\n')
    (task,) = read_tasks(str(path), strict=False)
    assert task.prompt[0]["content"] == "bom"


def test_no_usable_row(tmp_path):
    with pytest.raises(BadInput, match=r"no usable row; the first: a.jsonl:1: no col"):
        read_tasks(write(tmp_path / "a.jsonl", {"x": 1}), strict=False)
    with pytest.raises(BadInput, match="no usable row at all"):
        read_tasks(write(tmp_path / "b.jsonl", ""), strict=False)


@pytest.mark.parametrize("source", ["gone.jsonl", "gone.parquet", "word", "a/b/c"])
def test_a_missing_source(source):
    with pytest.raises(BadInput, match="data source '" + source):
        read_tasks(source, strict=False)


def test_needed_columns(tmp_path):
    source = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "answer": 1})
    environment = SimpleNamespace(needed_columns=("answer",))
    assert [t.id for t in load_tasks(config(source), "train", environment)] == [
        "a.jsonl:2"
    ]
    with pytest.raises(BadInput, match="a.jsonl:1: no column 'answer'"):
        load_tasks(config(source, strict=True), "train", environment)


DS1_ROWS = [
    sft_row(tool("add", a={"type": "integer"}), call("add", a=2)),
    sft_row(tool("find", q={"type": "string", "default": None}), call("find", q="x")),
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}]},
]


GOLD = [
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "done"},
]


def as_table(path, data):
    """Write rows to Parquet, through the nulls that Arrow fills in."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(data), path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_become_a_prompt_and_a_demonstration(tmp_path, kind):
    system = {"role": "system", "content": "s"}
    first = sft_row(tool("add"), call("add", a=2))
    first["messages"].insert(0, system)
    first["level"] = 1
    plain = {"messages": [{"role": "user", "content": "hi"}, *GOLD[-1:]], "level": 3}
    if kind == "jsonl":
        source = write(tmp_path / "a.jsonl", first, plain)
    else:
        first["tools"] = json.dumps(first["tools"])
        source = as_table(tmp_path / "a.parquet", [first, plain])
    with_call, without = read_tasks(source, strict=True, needed=("demonstration",))
    assert with_call.id == f"a.{kind}:1"
    assert with_call.prompt == [system, {"role": "user", "content": "?"}]
    assert with_call.columns["demonstration"] == GOLD
    assert with_call.columns["tools"] == [tool("add")]
    assert without.prompt == [{"role": "user", "content": "hi"}]
    assert without.columns["demonstration"] == GOLD[-1:]
    assert "tools" not in without.columns and without.columns["level"] == 3


def test_calls_follow_the_words_of_their_message(tmp_path):
    several = [call("add", a="</tool_call>"), {"name": "add", "arguments": '{"b": 1}'}]
    said = {"role": "assistant", "content": "I add.", "tool_calls": several}
    row = {"prompt": "x", "demonstration": [said, {"role": "tool", "content": "1"}]}
    (task,) = read_tasks(write(tmp_path / "a.jsonl", row), strict=True)
    text = task.columns["demonstration"][0]["content"]
    assert text.startswith("I add.\n<tool_call>\n")
    assert parse_tool_calls(text) == [
        ToolCall("add", {"a": "</tool_call>"}),
        ToolCall("add", {"b": 1}),
    ]
    assert "tool_calls" not in task.columns["demonstration"][0]


def test_rows_without_a_demonstration_are_named_where_one_is_needed(tmp_path):
    source = write(tmp_path / "a.jsonl", {"prompt": "x", "demonstration": None})
    assert len(read_tasks(source, strict=True)) == 1
    with pytest.raises(BadInput, match="a.jsonl:1: no column 'demonstration'"):
        read_tasks(source, strict=True, needed=("demonstration",))


def ds1_prompts(source):
    chat = Chat(make_tokenizer(HERMES_CHATML))
    return [
        chat.with_tools(task.columns.get("tools", [])).render(task.columns["messages"])
        for task in read_tasks(source, strict=True)
    ]


def test_DS1_jsonl_keeps_a_null_default(tmp_path):
    add, find, hi = ds1_prompts(write(tmp_path / "a.jsonl", *DS1_ROWS))
    assert '"q"' not in add and '"a"' not in find
    assert '"q": {"type": "string", "default": null}' in find
    assert '{"name": "find", "arguments": {"q": "x"}}' in find
    assert "None" not in add + find + hi and "null" not in add + hi


@pytest.mark.parametrize("as_text", [False, True])
def test_DS1_parquet_gives_the_same_prompts(tmp_path, as_text):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = json.loads(json.dumps(DS1_ROWS))
    for row in data if as_text else []:
        row["tools"] = json.dumps(row["tools"]) if "tools" in row else None
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(data), path)
    expected = ds1_prompts(write(tmp_path / "a.jsonl", *DS1_ROWS))
    assert ds1_prompts(str(path)) == expected


def test_parquet_rows_are_named_and_broken_files_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": ["x", None], "answer": [1, None]})
    parquet.write_table(table, path)
    (task,) = read_tasks(str(path), strict=False)
    assert (task.id, task.columns) == ("a.parquet:1", {"answer": 1})
    with pytest.raises(BadInput, match="a.parquet:2: no column 'prompt'"):
        read_tasks(str(path), strict=True)
    path.write_bytes(b"no parquet")
    with pytest.raises(BadInput, match="a.parquet"):
        read_tasks(str(path), strict=True)


class HubSplit:
    """What `datasets` gives for one split, as far as it is used."""

    def __init__(self, table):
        self.table = table

    def with_format(self, name):
        assert name == "arrow"
        return self

    def __getitem__(self, rows):
        assert rows == slice(None)
        return self.table


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl", {"prompt": "x"})

    def refuse(path, *mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInput, match="a.jsonl' cannot be read: .*Permission denied"):
        read_tasks(source, strict=False)


def test_hub_ids(monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")

    def load_dataset(name):
        if name != "owner/set":
            raise ConnectionError(f"no route to {name}")
        names = ("test", "train")
        return {n: HubSplit(pyarrow.table({"prompt": [f"{n} row"]})) for n in names}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    keys = config("owner/set", eval_source="owner/set", num_eval_tasks=4)
    (train,), (held_out,) = (load_tasks(keys, split) for split in ("train", "eval"))
    assert train.prompt[0]["content"] == "train row" and train.id == "owner/set:1"
    assert held_out.prompt[0]["content"] == "test row"
    with pytest.raises(BadInput, match="'no/set': no route"):
        load_tasks(config("no/set"), "train")
    fake.load_dataset = lambda name: {}  # and whatever else it does
    with pytest.raises(BadInput, match="'owner/set': StopIteration"):
        load_tasks(config("owner/set"), "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"grpo_jax\[data\]"):
        load_tasks(config("owner/set"), "train")


def test_files_are_split_once_for_training_and_evaluation(tmp_path, caplog):
    lines = [{"prompt": str(i)} for i in range(10)]
    source = write(tmp_path / "a.jsonl", *lines)
    keys = config(source, num_eval_tasks=64)
    train, held_out = (load_tasks(keys, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (8, 2)
    ids = {task.id for task in train + held_out}
    assert len(ids) == 10
    with caplog.at_level(logging.INFO):
        assert len(load_tasks(config(source, num_tasks=3), "train")) == 3
    assert "data.num_tasks=3: using 3 of 10" in caplog.text
    other = write(tmp_path / "b.jsonl", {"prompt": "x"})
    keys = config(source, eval_source=other, num_eval_tasks=64)
    assert len(load_tasks(keys, "train")) == 10
    assert [task.id for task in load_tasks(keys, "eval")] == ["b.jsonl:1"]


def test_fund_tasks_come_from_the_generator():
    keys = config("fund", num_tasks=20, num_eval_tasks=10, categories=("order",))
    train, held_out = (load_tasks(keys, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (20, 10)
    assert {task.columns["category"] for task in train} == {"order"}
    templates = [{task.columns["template"] for task in t} for t in (train, held_out)]
    assert not templates[0] & templates[1]
    with pytest.raises(BadInput, match="data: .*hats"):
        load_tasks(config("fund", num_tasks=5, categories=("hats",)), "train")
    with pytest.raises(BadInput, match="data.num_tasks"):
        load_tasks(config("fund"), "train")
    assert load_tasks(config("fund"), "eval") == []


def test_reasoning_gym_tasks_come_from_the_generator():
    keys = config("reasoning_gym", num_tasks=6, num_eval_tasks=3, datasets=("gcd",))
    train, held_out = (load_tasks(keys, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (6, 3)
    questions = [{task.prompt[-1]["content"] for task in t} for t in (train, held_out)]
    assert not questions[0] & questions[1]
    keys = config("reasoning_gym", num_tasks=6, datasets=("hats",))
    with pytest.raises(BadInput, match="data: .*hats"):
        load_tasks(keys, "train")


def padded_task(chat, tokens):
    """A task with a system text whose prompt has exactly `tokens` tokens."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": ""}]
    free = tokens - len(chat.prompt(messages))
    messages[1]["content"] = "\x01" * free  # a byte that no merge touches
    assert len(chat.prompt(messages)) == tokens
    return Task(f"t{tokens}", messages, {})


def test_DS3_long_prompts_are_dropped_whole(caplog):
    chat = Chat(make_tokenizer(HERMES_CHATML), [tool("a")])
    least = len(chat.prompt([{"role": "system", "content": "s"}])) + 64
    tasks = [padded_task(chat, least + extra) for extra in (-1, 0, 1, 436)]
    with caplog.at_level(logging.WARNING):
        kept, dropped = fit_prompts(tasks, chat, least)
    assert kept == tasks[:2]
    assert dropped == [(2, least + 1), (3, least + 436)]
    assert f"dropped 2 of 4 prompts longer than {least} tokens: t{least + 1}" in (
        caplog.text
    )
    with pytest.raises(BadInput, match=f"max_prompt_length={least} .* has {least + 1}"):
        fit_prompts(tasks[2:], chat, least)
    assert fit_prompts(tasks[:2], chat, least) == (tasks[:2], [])


def test_prompts_that_the_template_refuses_are_skipped_and_counted(caplog):
    template = HERMES_CHATML + (
        "{% if messages[-1]['role'] == 'system' %}"
        "{{ raise_exception('no question') }}{% endif %}"
    )
    chat = Chat(make_tokenizer(template))
    good = Task("good", [{"role": "user", "content": "go"}])
    odd = [Task(f"odd{i}", [{"role": "system", "content": "x"}]) for i in range(7)]
    with caplog.at_level(logging.WARNING):
        assert fit_prompts([*odd, good], chat, 4096) == ([good], [])
    assert "skipped task odd4: " in caplog.text and "odd5" not in caplog.text
    assert "skipped 7 of 8 prompts" in caplog.text
    with pytest.raises(BadInput, match="task odd0: .*no question"):
        fit_prompts([good, *odd], chat, 4096, strict=True)
    with pytest.raises(BadInput, match="no task has a usable prompt.*task odd0: "):
        fit_prompts(odd, chat, 4096)


def tasks_of(n):
    return [Task(str(i), [{"role": "user", "content": str(i)}], {}) for i in range(n)]


def ids(tasks):
    return [task.id for task in tasks]


def test_stream_passes_over_every_task_once_an_epoch():
    stream = TaskStream(tasks_of(7), seed=3)
    assert stream.epoch == 0
    drawn = ids(stream.next(5) + stream.next(5) + stream.next(11))
    assert stream.epoch == 3
    epochs = [drawn[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(TaskStream(tasks_of(7), seed=3).next(21)) == drawn
    assert ids(TaskStream(tasks_of(7), seed=4).next(21)) != drawn


def test_stream_without_shuffling_and_batches_beyond_an_epoch():
    stream = TaskStream(tasks_of(3), seed=0, shuffle=False)
    assert ids(stream.next(8)) == list("01201201")
    assert stream.epoch == 2


@pytest.mark.parametrize("before", [0, 3, 7, 20])
def test_stream_resumes_exactly(before):
    whole = ids(TaskStream(tasks_of(7), seed=3).next(before + 9))
    first = TaskStream(tasks_of(7), seed=3)
    first.next(before)
    second = TaskStream(tasks_of(7), seed=3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.epoch == first.epoch
    assert ids(second.next(9)) == whole[before:]


def test_stream_notices_other_data():
    state = TaskStream(tasks_of(7), seed=3).state()
    changed = tasks_of(7)
    changed[2].columns["answer"] = "new"
    for stream, what in [
        (TaskStream(changed, 3), "the training data"),
        (TaskStream(tasks_of(6), 3), "the training data"),
        (TaskStream(tasks_of(7), 4), "data.seed"),
        (TaskStream(tasks_of(7), 3, shuffle=False), "data.shuffle"),
    ]:
        with pytest.raises(BadInput, match=f"{what} changed"):
            stream.restore(state)
    with pytest.raises(BadInput, match="no tasks"):
        TaskStream([], 0)


def test_rows_of_a_reader_can_be_checked_one_by_one():
    assert rows.task({"prompt": "x"}, "here").id == "here"
    with pytest.raises(ValueError, match="no column 'answer'"):
        rows.task({"prompt": "x"}, "here", ["answer"])


def test_a_row_s_own_tools_choose_among_the_environment_s():
    chat = Chat(make_tokenizer(HERMES_CHATML), [tool("add"), tool("find")])
    prompt = [{"role": "user", "content": "go"}]
    chosen = Task("one", prompt, {"tools": [tool("find")]})
    text = chat.offering(chosen.columns["tools"]).render(prompt)
    assert '"find"' in text and '"add"' not in text
    assert chat.offering(None).render(prompt) == chat.render(prompt)
    assert fit_prompts([chosen], chat, 4096) == ([chosen], [])
    other = Task("two", prompt, {"tools": [tool("fly")]})
    with pytest.raises(BadInput, match="task two: .* names 'fly', .* has: add, find"):
        fit_prompts([chosen, other], chat, 4096, strict=True)
    assert fit_prompts([chosen, other], chat, 4096) == ([chosen], [])


def test_fund_data_can_be_weighed_repeated_and_mislabelled():
    def load(split, source="fund", **changes):
        keys = {"num_tasks": 40, "num_eval_tasks": 20} | changes
        return load_tasks(config(source, **keys), split)

    def count(tasks, category):
        return sum(task.columns["category"] == category for task in tasks)

    weighed = {"categories": ("combo", "order"), "category_weights": (3, 1)}
    tasks = load("train", **weighed)
    assert (count(tasks, "combo"), count(tasks, "order")) == (30, 10)
    assert len(load("train", "fund_bank", **weighed)) == 40
    repeated = {"oversample": ("combo",), "oversample_times": 3}
    assert len(load("train", **repeated)) == 48  # 4 of 40, three times
    assert len(load("eval", **repeated)) == 20
    flawed = load("train", flawed_labels=True, categories=("combo",))
    assert {task.columns["label"] for task in flawed} == {"check_balance"}
    assert load("eval", flawed_labels=True) == load("eval")
    with pytest.raises(BadInput, match="category_weights has 1 entries for 10"):
        load("train", category_weights=(1,))
    with pytest.raises(BadInput, match="unknown fund category 'gold'"):
        load("train", oversample=("gold",))
