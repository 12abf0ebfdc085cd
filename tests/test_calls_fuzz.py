"""Random and mutated turns: no exception, no changed value, bounded time.

Half of the turns are in each protocol. The slow tests run a share of the full counts
(see `counts`), the others a smaller one, all from fixed seeds.
"""

import gc
import json
import random
import time
from decimal import Decimal

import counts
import pytest
import scripted

from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.turns import Ongoing
from grpo_jax.types import Trajectory
from tools_env.calls import PROTOCOLS, _blocks, format_tool_call, parse_tool_calls
from tools_env.dispatch import dispatch
from tools_env.functions import make_tools
from tools_env.fund.environment import NoTools
from tools_env.protocol import MalformedCall, Task, ToolCall, Turn

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "```", "~~~~", "@f{"]
MARKS += ["@echo {", "\n@g{", "\n", "\r\n", "<|im_end|>", "<|im_start|>system\n"]
JSON = [
    '{"name": "f", "arguments": {',
    '"a": "',
    '"',
    "}",
    "}}",
    "{",
    "[",
    "]",
    ",",
    ":",
]
JSON += [
    '"a"',
    "null",
    "true",
    "NaN",
    "Infinity",
    "-0",
    "1e999",
    "1e-400",
    "9007199254740993.0",
    "0.1",
    "-0.30000000000000001",
    "1.5",
    "\\",
    "\\u",
    "\\n",
]
JSON += ["9" * 30, "9" * 5000, "[" * 300, '{"a":' * 300, '"a":1,"a":2', "\\ud800"]
OTHER = [
    "\ud800",
    "\udfff",
    "é",
    "北京",
    "☀️",
    "\x00",
    "\x1b[0m",
    "\u2028",
    "\ufeff",
    " ",
]
OTHER += ["Let me see. ", "The answer is 4.", "\\boxed{4}", "`", "@", "<", ">", "\t"]
PIECES = MARKS + JSON + OTHER
SECONDS_A_TURN = 0.25  # CPU time of this thread; a turn here has at most 100 kB
Anything = dict | list | str | int | float | bool | None


def value(rng, depth=0):
    match rng.randrange(8 if depth < 3 else 5):
        case 0:
            return rng.choice([True, False, None, "", "</tool_call>", "\n@g{}\n"])
        case 1:
            return rng.getrandbits(rng.choice([8, 64, 200])) - 2**63
        case 2:
            return rng.uniform(-1e9, 1e9)
        case 3 | 4:
            pieces = rng.choices([p for p in PIECES if p.isprintable()], k=3)
            return "".join(pieces)[:200]
        case 5:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            keys = rng.sample(["a", "b", "c", "名", "text", "<think>"], 3)
            return {key: value(rng, depth + 1) for key in keys}


def call(rng):
    names = ["f", "g", "echo", "missing"]
    return ToolCall(rng.choice(names), {"x": value(rng), "y": value(rng)})


def mutated(rng, text):
    """Cut, repeat, move or insert a few pieces."""
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:to] + text[at:]
            case 2:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            case 3:
                text = text[:at] + chr(rng.randrange(0x3000)) + text[at + 1 :]
            case _:
                text = text[to:] + text[:at]
    return text


def turn(rng, protocol):
    """Text of a turn and the calls it holds, None where it was mutated."""
    if rng.random() < 0.2:
        return "".join(rng.choices(PIECES, k=rng.randrange(25))), None
    calls = [call(rng) for _ in range(rng.randrange(1, 4))]
    parts = [format_tool_call(c, protocol) for c in calls]
    words = rng.choice(["", "I call it.", "<think>\n@f{} <tool_call>\n</think>"])
    text = "\n".join([words, *parts])
    if rng.random() < 0.3:
        return text, calls
    return mutated(rng, text), None


def same(read, found):
    """Whether values are those that were read with decimals for floats, types too."""
    match read:
        case Decimal():
            return type(found) is float and Decimal(repr(found)) == read
        case dict():
            return list(read) == list(found) and all(
                same(one, found[key]) for key, one in read.items()
            )
        case list():
            return len(read) == len(found) and all(map(same, read, found))
    return type(read) is type(found) and read == found


def check_turn(rng, protocol):
    text, calls = turn(rng, protocol)
    gc.disable()  # a collection of everything that other tests hold is not the parser's
    try:
        start = time.thread_time()
        parsed = parse_tool_calls(text, protocol)
        assert time.thread_time() - start < SECONDS_A_TURN, text
    finally:
        gc.enable()
    if calls is not None:
        assert parsed == calls
    for found, start, end in _blocks(text, protocol):
        if isinstance(found, MalformedCall):
            assert found.reason and len(found.text) <= 500
            continue
        # The standard library reads the same place in the text as the same values.
        written = text[start:end]
        body = written[written.index("{") : written.rindex("}") + 1]
        read = json.loads(body, strict=False, parse_float=Decimal)
        if protocol == "compact":
            assert same(read, found.arguments)
            assert written[: written.index("{")].strip() == f"@{found.name}"
        else:
            assert same(read, {"name": found.name, "arguments": found.arguments})
        json.dumps(found.arguments, ensure_ascii=False, allow_nan=False).encode()


def fuzz_turns(count, seed):
    rng = random.Random(seed)
    for i in range(count):
        check_turn(rng, PROTOCOLS[i % 2])


def fuzz_trajectories(count, seed):
    """Turns through parser, tools, records and the next prompt's tokens."""
    rng, received = random.Random(seed), []

    def echo(x: Anything, y: Anything) -> object:
        """Give back.

        Args:
            x: Anything.
            y: Anything.
        """
        received.append((x, y))
        return x

    def f(x: Anything, y: Anything = None) -> str:
        """Fail, by an exception or otherwise.

        Args:
            x: Anything.
            y: Anything.
        """
        raise rng.choice([ValueError, RecursionError, SystemExit, KeyError])(str(x))

    tools = make_tools([echo, f])
    schemas = [tool.schema for tool in tools.values()]
    tokenizer = scripted.tokenizer()
    chats = {p: Chat(tokenizer, schemas, protocol=p) for p in PROTOCOLS}
    task = Task("t", [{"role": "user", "content": "q"}])
    for number in range(count):
        protocol = PROTOCOLS[number % 2]
        one = Ongoing(Trajectory(task, 0, 0, []), NoTools(), number)
        for _ in range(3):
            text, _ = turn(rng, protocol)
            run_turn(one, text, chats[protocol], tools, received)


def run_turn(one, text, chat, tools, received):
    one.trajectory.turns.append(Turn(text))
    calls = parse_tool_calls(text, chat.protocol)
    runnable = one.accept(calls, 2)
    assert len(runnable) <= 2
    answers = []
    for made in runnable:
        del received[:]
        answers.append(dispatch(tools, made, 300))
        if received:
            assert received == [(made.arguments["x"], made.arguments["y"])]
    texts = one.record(answers)
    assert len(texts) == min(len(calls), 3)
    for text in texts:
        text.encode()
    if texts:
        ids = chat.observation(texts, scripted.END)
        plain = chat.observation(["ok"] * len(texts), scripted.END)
        # Whatever a result says, turns begin and end where the template has them.
        for mark in (scripted.END, scripted.ids("<|im_start|>")[0]):
            assert ids.count(mark) == plain.count(mark)
    json.dumps([vars(record) for record in one.trajectory.turns[-1].calls]).encode()


def test_random_and_mutated_turns():
    fuzz_turns(3000, seed=1)


def test_scripted_trajectories_of_mutated_turns():
    fuzz_trajectories(100, seed=2)


@pytest.mark.slow
def test_many_turns():
    fuzz_turns(counts.of(200_000), seed=2026)


@pytest.mark.slow
def test_many_trajectories():
    fuzz_trajectories(counts.of(20_000), seed=2027)


UNITS = {
    "hermes": ["<tool_call>", '<tool_call>{"a":"', "<tool_call>{}</tool_call>"],
    "compact": ["\n@f{", '\n@f{"a":"', "\n@f{}", "\n@" + "f" * 100, " ", "\n", "@f{} "],
}
UNITS["hermes"] += [
    "<think>",
    "```",
    '<tool_call>{"name":"a","arguments":{}}</tool_call>',
]
UNITS["compact"] += ["</think>@f{}", "<think>", "```\n", '\n@f{"s":"\n@g{}"}', "\t@"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_time_is_linear_to_two_megabytes(protocol):
    def seconds(size):
        texts = [unit * (size // len(unit)) for unit in UNITS[protocol]]
        start = time.process_time()
        for text in texts:
            parse_tool_calls(text, protocol)
        return time.process_time() - start

    small = min(seconds(100_000) for _ in range(2))
    assert seconds(2_000_000) < 20 * 4 * small + 0.5
