"""The three rewards of the fund assistant, and the reading of its answer.

`graded_reward` (default) looks at the label. For a ReAct answer: thought .1, plan .1,
known tool .1, parameters that fit the tool's schema .1, the right tool .4, the right
parameters .2; an uncalled-for check_market_status costs `overuse_penalty`; the total is
clipped to [0, 1]. A wrong tool in perfect form earns .4. In the shorter formats what
they lack goes to the label: .3 and, where a tool's name is the whole answer, .2.
`article_reward` is the form that the article prints, kept for study: it never looks at
the label, any known tool in full form earns .9 and nothing earns more, while the
article's virtual best sample is 1.0. `capped_reward` is the earlier form: it stops
at .8 and gives every well-formed answer the same.

Policies. The answer is one strict JSON object, white space around it allowed; a code
fence, prose beside it, a duplicate key or NaN make it unreadable, and unreadable
answers earn 0. Parameters are right when none is missing, none is extra and each
equals the gold one: numbers and written amounts by value (100000 = 100000.0 = "10万"),
text without regard to case. Market words are looked for in the user's messages only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tools_env.fund.amounts import as_number
from tools_env.fund.tools import SCHEMAS, TOOL_NAMES
from tools_env.protocol import Reward, Task
from tools_env.schema import validate_arguments

_PARTS = ("thought", "plan", "known_tool", "schema", "right_tool", "right_params")
WEIGHTS = {  # in tenths, so that a gold answer sums to exactly 1.0
    "react": dict(zip(_PARTS, (1, 1, 1, 1, 4, 2), strict=True)),
    "reasoning_action": dict(zip(_PARTS, (1, 0, 1, 1, 5, 2), strict=True)),
    "tool": dict(zip(_PARTS, (0, 0, 2, 0, 8, 0), strict=True)),
}
_MARKET_WORDS = re.compile(
    r"\b(markets?|exchanges?|trading|sessions?|open(s|ing)?|clos(e|es|ed|ing)|bell"
    r"|after.hours|holidays?|nyse|nasdaq|hkex)\b"
    r"|市场|股市|大盘|开盘|收盘|休市|开市|闭市|盘中|盘前|盘后|交易时间|交易日|开没开|开始交易|今天交易|交易所",
    re.IGNORECASE,
)


def parse_answer(text: str) -> dict[str, Any] | None:
    """Read a ReAct answer: one strict JSON object, or None. Never raises."""
    try:
        answer = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def called_tool(
    answer: Mapping[str, Any] | None, answer_format: str = "react"
) -> str | None:
    """The tool an answer calls, known or not; None if it names none."""
    tool = _action(answer or {}, answer_format).get("tool")
    return tool if isinstance(tool, str) else None


def _action(answer: Mapping[str, Any], answer_format: str) -> Mapping[str, Any]:
    action = answer if answer_format == "tool" else answer.get("action")
    return action if isinstance(action, dict) else {}


def graded_reward(
    task: Task,
    text: str,
    overuse_penalty: float = 0.3,
    answer_format: str = "react",
) -> Reward:
    """Score an answer against the task's label and params; parts are 0 or 1 each."""
    answer = parse_answer(text) or {}
    tool, label = called_tool(answer, answer_format), task.columns["label"]
    params = _action(answer, answer_format).get("params")
    right_tool = tool == label
    thought = "reasoning" if answer_format == "reasoning_action" else "thought"
    parts = {
        "thought": _is_text(answer.get(thought)),
        "plan": _is_plan(answer.get("plan")),
        "known_tool": tool in TOOL_NAMES,
        "schema": tool in TOOL_NAMES and _fits_schema(tool, params),
        "right_tool": right_tool,
        "right_params": right_tool and same_params(task.columns["params"], params),
    }
    weights = WEIGHTS[answer_format]
    parts = {name: parts[name] for name, weight in weights.items() if weight}
    overused = not right_tool and _overuses_market(task, tool)
    total = sum(weights[name] * earned for name, earned in parts.items()) / 10
    total = round(max(0.0, min(1.0, total - overuse_penalty * overused)), 9)
    parts["overuse"] = overused
    return Reward(total, {name: float(value) for name, value in parts.items()})


def article_reward(task: Task, text: str, overuse_penalty: float = 0.3) -> Reward:
    """Score an answer's form as the article prints it (maximum .9); blind to the label.

    `right_tool` and `right_params` are reported beside it and add nothing.
    """
    answer = parse_answer(text) or {}
    action = answer.get("action")
    action = action if isinstance(action, dict) else {}
    tool = called_tool(answer)
    terms = {
        "thought": 2 * ("thought" in answer),
        "action": 2 * ("tool" in action),
        "known_tool": 2 * (tool in TOOL_NAMES),
        "params": 1 * ("tool" in action and "params" in action),
        "plan": 2 * ("plan" in answer),
    }
    overused = _overuses_market(task, tool)
    total = sum(terms.values()) / 10 - overuse_penalty * overused
    parts = {name: float(value > 0) for name, value in terms.items()}
    right_tool = tool == task.columns["label"]
    right_params = right_tool and same_params(
        task.columns["params"], action.get("params")
    )
    parts |= {
        "right_tool": float(right_tool),
        "right_params": float(right_params),
        "overuse": float(overused),
    }
    return Reward(round(max(0.0, min(1.0, total)), 9), parts)


def capped_reward(
    task: Task,
    text: str,
    overuse_penalty: float = 0.0,
    answer_format: str = "reasoning_action",
) -> Reward:
    """Score an answer's form as the article did at first (maximum .8).

    A thought or reason .2, a tool named .3, a known one .2, parameters .1; blind to the
    label.
    """
    answer = parse_answer(text) or {}
    action, tool = _action(answer, answer_format), called_tool(answer, answer_format)
    thought = "reasoning" if answer_format == "reasoning_action" else "thought"
    terms = {
        "thought": 2 * (thought in answer),
        "action": 3 * ("tool" in action),
        "known_tool": 2 * (tool in TOOL_NAMES),
        "params": 1 * ("tool" in action and "params" in action),
    }
    overused = _overuses_market(task, tool)
    total = sum(terms.values()) / 10 - overuse_penalty * overused
    parts = {name: float(value > 0) for name, value in terms.items()}
    parts |= {
        "right_tool": float(tool == task.columns["label"]),
        "overuse": float(overused),
    }
    return Reward(round(max(0.0, min(1.0, total)), 9), parts)


def same_params(expected: Mapping[str, Any], given: object) -> bool:
    """Compare parameters by value: none missing, none extra, each equal.

    A None among the expected ones is no parameter: columnar files fill gaps with nulls.
    """
    stated = {name: value for name, value in expected.items() if value is not None}
    return (
        isinstance(given, dict)
        and given.keys() == stated.keys()
        and all(_same_value(stated[name], given[name]) for name in stated)
    )


def mentions_market(text: str) -> bool:
    """Tell whether a request speaks of the market, in English or Chinese."""
    return bool(_MARKET_WORDS.search(text))


def no_market_words(task: Task) -> bool:
    """The user's messages do not speak of the market."""
    asked = (m["content"] for m in task.prompt if m["role"] == "user")
    return not any(map(mentions_market, asked))


def _overuses_market(task: Task, tool: str | None) -> bool:
    return tool == "check_market_status" and no_market_words(task)


def _same_value(expected: object, given: object) -> bool:
    number = as_number(expected)
    if number is not None:
        return as_number(given) == number
    if isinstance(expected, str) and isinstance(given, str):
        return expected.strip().casefold() == given.strip().casefold()
    return type(expected) is type(given) and expected == given


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_plan(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _fits_schema(tool: str, params: object) -> bool:
    _, problem = validate_arguments(SCHEMAS[tool], params)
    return problem is None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
