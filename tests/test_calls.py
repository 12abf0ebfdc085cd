"""The call parser: exact or a MalformedCall, never an exception, linear time."""

import json
import random
import time

import pytest

from tools_env import MalformedCall, ToolCall, format_tool_call, parse_tool_calls


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name="f", **arguments) -> str:
    return block(json.dumps({"name": name, "arguments": arguments}))


@pytest.mark.parametrize(
    "value",
    [
        "end tag is </tool_call> ok",
        "open tag is <tool_call> ok",
        "s = \"{'a': [1, 2}\"",
        "</think> ``` <think>",
        "</tool_call>" * 500,
    ],
)
def test_TC1_closing_tag_in_string(value):
    text = call("write", text=value)
    assert parse_tool_calls(text) == [ToolCall("write", {"text": value})]
    two = parse_tool_calls(f"first {text}\n{call('g', a=1)} last")
    assert two == [ToolCall("write", {"text": value}), ToolCall("g", {"a": 1})]


def test_TC1_compact_block():
    text = (
        '<tool_call>{"name":"write","arguments":'
        '{"text":"end tag is </tool_call> ok"}}</tool_call>'
    )
    (parsed,) = parse_tool_calls(text)
    assert parsed.arguments["text"] == "end tag is </tool_call> ok"


def test_TC4_values_arrive_exactly():
    text = block('{"name": "f", "arguments": {"id": 9007199254740993}}')
    text += block('{"name": "f", "arguments": {"city": "北京 ☀️"}}')
    text += block('{"name": "f", "arguments": {"code": "a=1\nprint(a)\tb"}}')
    values = [parsed.arguments for parsed in parse_tool_calls(text)]
    assert values == [
        {"id": 9007199254740993},
        {"city": "北京 ☀️"},
        {"code": "a=1\nprint(a)\tb"},
    ]


@pytest.mark.parametrize(
    "literal",
    ["0.1", "-0.10", "1e22", "1E+2", "2.50e-3", "0.0", "-0.0", "0e-999", "5e-324"]
    + ["9007199254740992.0", "1.7976931348623157e308", "0.30000000000000004"],
)
def test_TC4_decimals_that_a_float_holds_arrive(literal):
    (parsed,) = parse_tool_calls(call("f").replace("{}", f'{{"a": {literal}}}'))
    assert parsed == ToolCall("f", {"a": float(literal)})
    assert str(parsed.arguments["a"])[0] == "-" or literal[0] != "-"


def test_TC4_written_calls_keep_characters():
    original = ToolCall("f", {"id": 9007199254740993, "city": "北京 ☀️", "code": "a\nb"})
    written = format_tool_call(original)
    assert "9007199254740993" in written and "北京 ☀️" in written
    assert "\\u" not in written
    assert parse_tool_calls(written) == [original]


def test_TC5_draft_in_thinking_is_no_call():
    draft, real = call("add", a=1, b=1), call("add", a=2, b=3)
    wanted = [ToolCall("add", {"a": 2, "b": 3})]
    assert parse_tool_calls(f"<think>maybe {draft}? no</think>\n{real}") == wanted
    assert parse_tool_calls(f"<think>a <tool_call> b</think>{real}") == wanted
    # The prompt may have opened the thinking already.
    assert parse_tool_calls(f"maybe {draft}? no</think>\n{real}") == wanted
    assert parse_tool_calls(f"a <tool_call> b</think>{real}") == wanted
    assert parse_tool_calls(f"a <tool_call>{{b</think>{real}") == wanted


def test_TC5_unclosed_thinking_is_one_malformed_call():
    (parsed,) = parse_tool_calls(f"<think>let me see {call()}{call()}")
    assert isinstance(parsed, MalformedCall)
    assert "</think>" in parsed.reason


@pytest.mark.parametrize("fence", ["```", "````", "~~~"])
def test_fenced_calls_are_not_calls(fence):
    text = f"For example:\n{fence}json\n{call('a')}\n{fence}\n{call('b')}"
    assert parse_tool_calls(text) == [ToolCall("b", {})]
    assert parse_tool_calls(f"{fence}{call('a')}{fence}") == []
    assert parse_tool_calls(f"text {fence}\n{call('a')}") == []


def test_longer_fence_holds_shorter_ones():
    assert parse_tool_calls(f"````\n```\n{call()}\n```\n````") == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "f", "name": "g", "arguments": {}}', "'name' occurs twice"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' occurs twice"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "out of range"),
        ('{"name": "f", "arguments": {"a": 1e-400}}', "would become 0.0"),
        ('{"name": "f", "arguments": {"a": -1e-999999999999999999999}}', "become -0.0"),
        (
            '{"name": "f", "arguments": {"a": 9007199254740993.0}}',
            "would become 9007199254740992.0",
        ),
        ('{"name": "f", "arguments": {"a": 0.30000000000000001}}', "become 0.3"),
        (
            '{"name": "f", "arguments": {"a": 3.14159265358979323846}}',
            "which is another one",
        ),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": "\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, "too deeply"),
        ('{"name": "f", "arguments": {"a": 1,}}', "invalid JSON"),
        ("{'name': 'f', 'arguments': {}}", "invalid JSON"),
        ('{"name": "f", "arguments": {"a": True}}', "invalid JSON"),
        ('{"name": "f"}', '"arguments" must be'),
        ('{"name": "f", "arguments": null}', '"arguments" must be'),
        ('{"name": "f", "arguments": "{}"}', '"arguments" must be'),
        ('{"name": "", "arguments": {}}', '"name" must be'),
        ('{"name": 3, "arguments": {}}', '"name" must be'),
        ('{"name": "f", "parameters": {}}', "unexpected key 'parameters'"),
        ('[{"name": "f", "arguments": {}}]', "must be followed by a JSON object"),
        ('{"name": "f", "arguments": {}}}', "must be followed by </tool_call>"),
        ("", "must be followed by a JSON object"),
    ],
)
def test_malformed_blocks_say_why(body, reason):
    parsed = parse_tool_calls(f"{block(body)}\n{call('next')}")
    assert isinstance(parsed[0], MalformedCall)
    assert reason in parsed[0].reason
    assert len(parsed[0].text) <= 500
    if "{" * 2 not in body and '{"a":' * 9 not in body:
        assert parsed[1:] == [ToolCall("next", {})]


def test_nesting_is_exact_or_refused():
    for depth in (1, 150, 250, 900):
        text = block(
            '{"name": "f", "arguments": ' + '{"a":' * depth + "[]" + "}" * (depth + 1)
        )
        (parsed,) = parse_tool_calls(text)
        assert isinstance(parsed, ToolCall) == (depth < 200)


def test_surrogate_pair_is_a_character():
    text = block('{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}')
    assert parse_tool_calls(text)[0].arguments == {"a": "😀"}


def test_unfinished_call_is_malformed():
    whole = call("f", a=1)
    for end in range(len("<tool_call>"), len(whole)):
        (parsed,) = parse_tool_calls(whole[:end])
        assert isinstance(parsed, MalformedCall), whole[:end]


def test_missing_closing_tag_does_not_hide_the_next_call():
    first = '<tool_call>\n{"name": "f", "arguments": {}}\n'
    parsed = parse_tool_calls(first + call("g"))
    assert [type(p) for p in parsed] == [MalformedCall, ToolCall]


def test_call_quoted_in_broken_json_is_not_run():
    quoted = '<tool_call>{"name":"rm","arguments":{}}</tool_call>'
    text = f'<tool_call>{{"name": f, "arguments": "{quoted}"}}</tool_call>'
    assert [type(p) for p in parse_tool_calls(text)] == [MalformedCall]


def test_mention_in_prose_leaves_the_call():
    parsed = parse_tool_calls(f"I write <tool_call> now: {call('g')}")
    assert [type(p) for p in parsed] == [MalformedCall, ToolCall]


def test_plain_text_has_no_calls():
    assert parse_tool_calls("The answer is 4. </tool_call> {}") == []
    assert parse_tool_calls("") == []


def test_random_values_survive():
    rng = random.Random(0)
    alphabet = ' "\\/<>{}[]`~,:\n\té北😀' + "tool_callthink"

    def value(depth):
        kind = rng.randrange(7 if depth < 4 else 5)
        if kind < 2:
            return "".join(rng.choices(alphabet, k=rng.randrange(40)))
        if kind == 2:
            return rng.choice([rng.getrandbits(100) - 2**99, rng.uniform(-9, 9)])
        if kind < 5:
            return rng.choice([True, False, None, "</tool_call>", "<tool_call>"])
        if kind == 5:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {str(value(9)): value(depth + 1) for _ in range(rng.randrange(4))}

    for _ in range(300):
        calls = [ToolCall("f", {"x": value(0)}) for _ in range(rng.randrange(4))]
        text = "\nand ".join(map(format_tool_call, calls))
        assert parse_tool_calls(text) == calls


def test_mutated_text_never_raises():
    rng = random.Random(1)
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", "```", "\\ud800"]
    pieces += [
        '{"name": "f", "arguments": {',
        '"a": "',
        '"',
        "}",
        "1e999",
        "NaN",
        "\ud800",
    ]
    pieces += ["\n", "[", "]", ",", ":", "é", "\x00", "\\"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(30)))
        for parsed in parse_tool_calls(text):
            assert isinstance(parsed, ToolCall | MalformedCall)
        damaged = list(call("f", a=[1, "x"]) * 2)
        for _ in range(3):
            damaged[rng.randrange(len(damaged))] = rng.choice(pieces)
        parse_tool_calls("".join(damaged))


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"a":"',
        '<tool_call>{"a":1}',
        "<tool_call>{}</tool_call>",
        "<think>",
        "```",
        '<tool_call>{"name":"a","arguments":{"x":"</tool_call>"}}</tool_call>',
    ],
)
def test_time_is_linear(unit):
    def seconds(size):
        text = unit * (size // len(unit))
        start = time.process_time()
        parse_tool_calls(text)
        return time.process_time() - start

    # The least of some runs: a collection of garbage may fall into any of them.
    small, large = (min(seconds(n) for _ in range(3)) for n in (50_000, 400_000))
    assert large < 8 * 4 * small + 0.1
