"""The fund assistant for real: tools act on a bank, its end state is the reward.

Several turns. A trajectory earns nothing unless it called the tool of every step; then,
where the request moves money or shares, .1 for that, .6 for the very end state that the
solver reaches and .3 for the right answer; where it moves none, .2, .1 and .7. Reading
more than asked costs nothing, moving anything else loses the end state.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from tools_env.calls import format_tool_call
from tools_env.dispatch import dispatch
from tools_env.fund.amounts import as_number
from tools_env.fund.bank import Bank
from tools_env.fund.bank_tasks import SYSTEM_PROMPT, bank_tools, solve
from tools_env.fund.tools import SCHEMAS
from tools_env.fund.worlds import open_bank
from tools_env.protocol import Reward, Task, ToolCall, ToolResult

_ANSWER = re.compile(r"^[ \t*]*ANSWER:[ \t*]*(.*?)[ \t.*]*$", re.MULTILINE)
_ACTION = {"tools": 1, "end_state": 6, "answer": 3}  # tenths
_QUESTION = {"tools": 2, "end_state": 1, "answer": 7}


class FundBankEnvironment:
    """Multi-turn fund tasks; `max_result_chars` cuts a tool's result."""

    max_reward = 1.0
    needed_columns = ("world", "steps")
    system_prompt = SYSTEM_PROMPT

    def __init__(self, max_result_chars: int = 4096):
        self._max_result_chars = max_result_chars

    def tools(self) -> list[dict[str, Any]]:
        return list(SCHEMAS.values())

    def start(self, task: Task) -> BankSession:
        return BankSession(task.columns["world"], self._max_result_chars)

    def reward(self, task: Task, trajectory) -> Reward:
        """Parts: `tools`, `end_state` and `answer`, 0 or 1; see the module."""
        gold = solve(task.columns)
        calls = [call for turn in trajectory.turns for call in turn.calls]
        tried = iter([c.name for c in calls if c.status in ("ok", "error")])
        parts = {
            "tools": all(call.name in tried for call, _ in gold.calls),
            "end_state": _end(task, trajectory) == gold.end,
            "answer": _same(gold.answer, given_answer(trajectory.answer)),
        }
        weights = _ACTION if gold.changes else _QUESTION
        total = sum(weights[name] * value for name, value in parts.items()) / 10
        earned = {name: float(value) for name, value in parts.items()}
        return Reward(total if parts["tools"] else 0.0, earned)

    def demonstration(self, task: Task) -> list[dict[str, Any]]:
        """The solver's calls one a turn, their results, and the answer."""
        gold = solve(task.columns)
        messages: list[dict[str, Any]] = []
        for call, result in gold.calls:
            text = result.output[: self._max_result_chars]
            messages += [
                {"role": "assistant", "content": format_tool_call(call)},
                {"role": "tool", "name": call.name, "content": text},
            ]
        return [*messages, {"role": "assistant", "content": f"ANSWER: {gold.answer}"}]

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        calls = [call.name for turn in trajectory.turns for call in turn.calls]
        return {
            "expected": task.columns["label"],
            "called": calls[0] if calls else None,
            "correct": self.reward(task, trajectory).total == self.max_reward,
            "answer": given_answer(trajectory.answer) or None,
        }


class BankSession:
    """One trajectory's bank, opened at its first call."""

    def __init__(self, world: dict[str, Any], max_result_chars: int):
        self._world = world
        self._max_result_chars = max_result_chars
        self._bank: Bank | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> dict[str, Any] | None:
        """The bank's snapshot; None while nothing was called, or after `close`."""
        with self._lock:
            return None if self._bank is None else self._bank.snapshot()

    def call(self, call: ToolCall) -> ToolResult:
        with self._lock:
            if self._bank is None:
                self._bank = open_bank(self._world)
                self._tools = bank_tools(self._bank)
            return dispatch(self._tools, call, self._max_result_chars)

    def close(self) -> None:
        with self._lock:
            bank, self._bank = self._bank, None
        if bank is not None:
            bank.close()


def given_answer(text: str) -> str:
    """What the text's last ANSWER line says; "" without one."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else ""


def _same(gold: str, given: str) -> bool:
    number = as_number(gold)
    if number is not None:
        return as_number(given) == number
    return gold == given.casefold()


def _end(task: Task, trajectory) -> dict[str, Any]:
    """The end state: what the session left, or the untouched world."""
    state = getattr(trajectory, "state", None)
    if state is not None:
        return state
    bank = open_bank(task.columns["world"])
    try:
        return bank.snapshot()
    finally:
        bank.close()
