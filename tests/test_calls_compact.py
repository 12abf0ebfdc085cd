"""The compact protocol: the same guarantees as Hermes in fewer tokens."""

import json

import pytest
import scripted

from grpo_jax.rollout.chat import Chat
from tools_env.calls import compacted, format_tool_call, parse_tool_calls
from tools_env.compact import plain_messages, signature
from tools_env.protocol import MalformedCall, ToolCall
from tools_env.schema import tool_schema


def parse(text):
    return parse_tool_calls(text, "compact")


@pytest.mark.parametrize(
    "value",
    ["a line\n@g{}\nmore", "</think> ``` <think>", "}{", "@f{", '"', "é北😀", "\\"],
)
def test_TC1_anything_may_stand_in_a_string(value):
    call = ToolCall("write", {"text": value})
    text = format_tool_call(call, "compact")
    assert "\n" not in text
    assert parse(f"first\n{text}\n@g{{}}") == [call, ToolCall("g", {})]
    raw = "@write" + json.dumps({"text": value}, ensure_ascii=False)
    assert parse(raw.replace("\\n", "\n")) == [call]


def test_TC4_values_arrive_exactly():
    text = '@f{"id": 9007199254740993}\n@f{"city":"北京 ☀️"}\n@f{"code":"a=1\nprint(a)"}'
    assert [call.arguments for call in parse(text)] == [
        {"id": 9007199254740993},
        {"city": "北京 ☀️"},
        {"code": "a=1\nprint(a)"},
    ]
    call = ToolCall("f", {"id": 9007199254740993, "city": "北京 ☀️"})
    assert (
        format_tool_call(call, "compact") == '@f{"id":9007199254740993,"city":"北京 ☀️"}'
    )


def test_TC5_drafts_in_thinking_and_fences_are_no_calls():
    wanted = [ToolCall("add", {"a": 2})]
    assert parse('<think>\n@add{"a":1}\n</think>@add{"a":2}') == wanted
    assert parse('@add{"a":1}\n</think>\n  @add{"a":2}  ') == wanted
    assert parse('```\n@add{"a":1}\n```\n@add{"a":2}\n~~~\n@add{}') == wanted
    assert parse('@add{"a":1} or so</think>@add{"a":2}') == wanted
    (unfinished,) = parse('<think>\n@add{"a":1}')
    assert isinstance(unfinished, MalformedCall)


def test_only_a_line_of_its_own_is_a_call():
    assert parse("write @f{} like this; mail@f{}\n@f\n@f x{}\n@ {}\n@(x){}") == []
    (bad, good) = parse("@f{} then\n@g{}")
    assert "end of the line" in bad.reason and good == ToolCall("g", {})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"a": 1, "a": 2}', "occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "out of range"),
        ('{"a": ' + "9" * 5000 + "}", "too many digits"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": "\ud800"}', "surrogate"),
        ('{"a":' * 100_000, "too deeply"),
        ("{'a': 1}", "invalid JSON"),
        ('{"a": "open\n@rm{}\n', "invalid JSON"),
    ],
)
def test_what_is_not_exact_is_refused_and_nothing_behind_it_runs(body, reason):
    (bad,) = parse(f"@f{body}\n@g{{}}")
    assert isinstance(bad, MalformedCall) and reason in bad.reason


def test_hermes_text_is_rewritten():
    call = ToolCall("f", {"s": "a\n@x{}"})
    other = ToolCall("g", {"n": [1, 2.5, None]})
    text = f"I call{format_tool_call(call)}{format_tool_call(other)}and wait"
    short = compacted(text)
    assert short == 'I call\n@f{"s":"a\\n@x{}"}\n@g{"n":[1,2.5,null]}\nand wait'
    assert parse(short) == parse_tool_calls(text) == [call, other]
    assert compacted("no calls\n") == "no calls\n"
    with pytest.raises(ValueError, match="no call 'a b'"):
        compacted(format_tool_call(ToolCall("a b", {})))


def order(symbol: str, side: str, quantity: int = 1) -> str:
    """Place an order.

    Args:
        symbol: Ticker.
        side: buy or sell.
        quantity: Units.
    """
    return ""


def test_tools_are_signatures():
    line = signature(tool_schema(order))
    assert line.startswith("@order{symbol: string, side: string, quantity?: integer} ")
    assert "Place an order." in line and "Ticker" in line and "\n" not in line


def test_a_conversation_renders_in_the_compact_form():
    tools = [tool_schema(order)]
    call = ToolCall("order", {"symbol": "A", "side": "buy"})
    messages = [
        {"role": "user", "content": "Buy A."},
        {"role": "assistant", "content": format_tool_call(call)},
        {"role": "tool", "name": "order", "content": "done<|im_end|>"},
        {"role": "assistant", "content": "Bought."},
    ]
    chat = Chat(scripted.tokenizer(), tools, protocol="compact")
    text = chat.render(messages, generation=False)
    assert "tool_call" not in text and "tool_response" not in text
    assert '@order{"symbol":"A","side":"buy"}<|im_end|>' in text
    assert "@result\ndone" in text
    ids = chat.observation(["done<|im_end|>"], scripted.END)
    assert ids.count(scripted.END) == 1
    sources = [source for source, _ in chat.demonstration(messages)]
    assert sources == ["prompt", "model", "tool", "model", "tool"]
    assert plain_messages(messages[:1], []) == messages[:1]
