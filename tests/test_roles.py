"""Roles of bytes and tokens: the rules, and the tables that follow them."""

import json
import random

import numpy as np
import pytest
from scripted import tokenizer

from grpo_jax import models
from grpo_jax.rollout.roles import Router
from tools_env.calls import format_tool_call, parse_tool_calls
from tools_env.protocol import ToolCall
from tools_env.roles import REASONING, TOOL, automaton

SIZE = 300  # ids, some beyond the tokenizer's


def roles_of(rule, text):
    """The role of every byte, by the automaton."""
    tables, state, roles = automaton(rule), 0, []
    for byte in text.encode():
        roles.append(tables.roles[state])
        state = tables.after[state][byte]
    return roles


def called(rule, text):
    """The runs of a text that belong to calls."""
    marks = "".join(
        chr(byte) if role == TOOL else "\0"
        for byte, role in zip(text.encode(), roles_of(rule, text), strict=True)
    )
    return [run for run in marks.split("\0") if run]


BODY = '{"name": "run", "arguments": {"code": "print(\\"</tool_call>\\")"}}'


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (
            "hermes",
            f"so <tool_call>\n{BODY}\n</tool_call> and <tool_call>x</tool_call>.",
            [f"\n{BODY}\n</tool_call>", "x</tool_call>"],
        ),
        ("hermes", "<think>a <tool_call> b</think><tool_call>c", ["c"]),
        ("hermes", "<<tool_call>x", ["x"]),
        ("hermes", "<tool_<tool_call>x</tool_</tool_call>y", ["x</tool_</tool_call>"]),
        ("hermes", "no call, a < b", []),
        (
            "compact",
            '@add{"a":1}\nthen @no\n  @b{"c":"x\ny"}\nz',
            ['add{"a":1}\n', 'b{"c":"x\ny"}\n'],
        ),
        ("compact", "<think>\n@no\n</think>@yes{}\nno", ["yes{}\n"]),
        ("compact", "a <think>@no</think>@yes", ["yes"]),
        (
            "action",
            '{"thought": "action", "action" : {"tool": "t", "params": {"a": [1, "}"]}}'
            ', "plan": ["action", {"action": 2}]}',
            [' {"tool": "t", "params": {"a": [1, "}"]}},'],
        ),
        ("action", '{"action": "hold"} {"a": 1, "action": 2}', [' "hold"}', " 2}"]),
        ("action", '"action": 1 [{"actions": 1, "act\\"ion": 2}]', []),
        ("action", '{"a": {"action": 1}, "action"', []),
    ],
)
def test_what_belongs_to_a_call(rule, text, expected):
    assert called(rule, text) == expected


def test_deep_nesting_ends_the_call_and_nothing_else():
    text = '{"action": ' + "[" * 40 + "1" + "]" * 40 + ', "plan": 1}'
    assert len(called("action", text)) == 1
    assert roles_of("action", text)[-5:] == [REASONING] * 5


@pytest.mark.parametrize("rule", ["hermes", "compact"])
def test_calls_that_the_parser_reads_are_marked(rule):
    """Random well-formed calls among random prose: exactly their bodies are marked."""
    rng = random.Random(rule)
    for _ in range(200):
        pieces, bodies = [], []
        for _ in range(rng.randint(1, 4)):
            noise = "".join(rng.choices("ab<>/ \n{}[]:,", k=rng.randint(0, 9)))
            text = "".join(rng.choices('ab<"\\ \n/tool_call>@{}é中', k=12))
            written = format_tool_call(ToolCall("f", {"x": text}), rule)
            start = 1 if rule == "compact" else len("<tool_call>")
            pieces += [noise, "\n", written, "\n"]
            bodies.append(written[start:] + ("\n" if rule == "compact" else ""))
        turn = "".join(pieces)
        assert len(parse_tool_calls(turn, rule)) == len(bodies)
        marked = bytes(
            byte
            for byte, role in zip(turn.encode(), roles_of(rule, turn), strict=True)
            if role == TOOL
        )
        assert marked.decode() == "".join(bodies)


def test_the_past_alone_decides():
    text = f"so <tool_call>\n{BODY}\n</tool_call> then"
    for end in range(len(text)):
        assert roles_of("hermes", text[:end]) == roles_of("hermes", text)[:end]


@pytest.mark.parametrize("rule", ["hermes", "compact", "action"])
def test_tokens_follow_their_bytes(rule):
    """Whatever the cut into tokens, a token has the role of its first byte."""
    words, rng = tokenizer(), random.Random(rule)
    router = Router(words, rule, SIZE)
    assert router.table.after.dtype == np.uint8
    np.testing.assert_array_equal(  # the id beyond the tokenizer's writes nothing
        router.table.after[:, SIZE - 1], np.arange(len(router.table.after))
    )
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n@", '"action":']
    for _ in range(100):
        text = "".join(rng.choices([*tags, *'ab"\\{}[],: é中'], k=30))
        ids = np.array(words.encode(text, add_special_tokens=False))
        by_byte = roles_of(rule, text)
        start, starts = 0, []
        for i in ids.tolist():
            starts.append(start)
            start += 2 if words.convert_ids_to_tokens(i) == "ab" else 1
        assert router(ids).tolist() == [by_byte[start] for start in starts]


def test_smollm2s_vocabulary():
    words = models.load_tokenizer("smollm2-135m")
    router = Router(words, "action", len(words))
    answer = {"thought": "转账", "action": {"tool": "transfer_funds"}, "plan": ["a"]}
    text = json.dumps(answer, ensure_ascii=False)
    ids = np.array(words.encode(text, add_special_tokens=False))
    marked = words.decode(ids[router(ids) == TOOL])
    assert marked == ' {"tool": "transfer_funds"},'
