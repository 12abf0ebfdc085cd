"""Multi-turn tasks of the fund assistant: carry the request out on a bank of its own.

The requests are those of the single-turn tasks, so splits share no template here
either; each comes with a world (`worlds`). `solve` computes the gold calls, the answer
and the end state from the same database that the policy's calls act on. A step that the
bank refuses ends the request.

Columns: category, difficulty, language, template, label (the first tool), world, steps
(action, tool and params each).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tools_env.dispatch import dispatch
from tools_env.fund.bank import Bank
from tools_env.fund.requests import (
    LANGUAGES,
    Request,
    Step,
    apportion,
    category_weights,
    draw,
    require,
)
from tools_env.fund.templates import SPLITS
from tools_env.fund.tools import SCHEMAS, FundTools
from tools_env.fund.worlds import draw_world, open_bank
from tools_env.protocol import Task, Tool, ToolCall, ToolResult

SYSTEM_PROMPT = (
    "You are a fund assistant. Carry the request out with the tools, its steps in "
    "order, with no parameters but those that the request states. If a step is "
    "refused, stop there. Then end with one line, ANSWER: and for the last step one of "
    "these.\nBalance: the amount available, such as 1234.50. Deposit: pending or "
    "cleared. Money of a sale: its settlement day, such as 2025-03-06. History: the "
    "number of movements listed. Market or same-day trade: open or closed. Transfer, "
    "withdrawal, order: done. Refused: refused."
)
_RESULT_CHARS = 4096


@dataclass(frozen=True)
class Solution:
    """What a perfect policy does: its calls with their results, the bank at its end,
    and the answer. `changes`: the end state differs from the beginning."""

    calls: list[tuple[ToolCall, ToolResult]]
    end: dict[str, Any]
    answer: str
    changes: bool


def generate_bank_tasks(
    split: str,
    count: int,
    seed: int,
    *,
    languages: Sequence[str] = ("en", "zh"),
    categories: Sequence[str] | Mapping[str, float] | None = None,
) -> list[Task]:
    """Generate `count` tasks of a split, in random order, as `tasks.generate` does."""
    require("split", [split], SPLITS)
    require("language", languages, LANGUAGES)
    rng = random.Random(f"fund_bank/{split}/{seed}")
    drawn = []
    shares = apportion(count, category_weights(categories))
    for category, number in shares.items():
        for language, share in apportion(number, dict.fromkeys(languages, 1)).items():
            for request in itertools.islice(
                draw(rng, split, language, category), share
            ):
                drawn.append((request, draw_world(rng, request)))
    rng.shuffle(drawn)
    return [
        Task(
            f"fund_bank-{split}-{seed}-{index}",
            [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": request.text},
            ],
            _columns(request, world),
        )
        for index, (request, world) in enumerate(drawn)
    ]


def solve(columns: Mapping[str, Any]) -> Solution:
    """Carry a task's steps out on its world. ValueError for steps without a world."""
    with closing(open_bank(columns["world"])) as bank:
        begin = bank.snapshot()
        tools = bank_tools(bank)
        calls, answer = [], "refused"
        for step in columns["steps"]:
            params = {k: v for k, v in step["params"].items() if v is not None}
            call = ToolCall(step["tool"], params)
            result = dispatch(tools, call, _RESULT_CHARS)
            calls.append((call, result))
            if result.status != "ok":
                answer = "refused"
                break
            answer = _answer(bank, step["action"], params)
        end = bank.snapshot()
    return Solution(calls, end, answer, end != begin)


def bank_tools(bank: Bank) -> dict[str, Tool]:
    """The six tools on a bank."""
    methods = FundTools(bank)
    return {name: Tool(SCHEMAS[name], getattr(methods, name)) for name in SCHEMAS}


def _answer(bank: Bank, action: str, params: Mapping[str, Any]) -> str:
    """What the last line must say after a step, read from the bank itself."""
    match action:
        case "balance":
            balances = bank.balances()
            account = params.get("account")
            names = [account] if account else ["brokerage", "checking", "savings"]
            return f"{sum(balances[name] for name in names) / 100:.2f}"
        case "deposit":
            settled = _latest(bank, "deposit", None)["settled"]
            return "cleared" if settled else "pending"
        case "settlement":
            return _latest(bank, "sell", params.get("symbol"))["settles"]
        case "history":
            rows = _history(bank, params.get("symbol"), params.get("days", 30))
            return str(len(rows))
        case "market" | "intraday":
            market = params.get("market", "US")
            return "open" if bank.market_is_open(market) else "closed"
    return "done"


def _latest(bank: Bank, kind: str, symbol: str | None) -> dict:
    for row in _history(bank, symbol):
        if row["kind"] == kind:
            return row
    raise ValueError(f"the task's world has no {kind} to ask about")


def _history(bank: Bank, symbol: str | None = None, days: int = 365) -> list[dict]:
    return bank.history(bank.now.date() - timedelta(days=days), symbol)


def _columns(request: Request, world: dict[str, Any]) -> dict[str, Any]:
    return {
        "category": request.category,
        "difficulty": request.difficulty,
        "language": request.language,
        "template": request.template,
        "label": request.steps[0].tool,
        "world": world,
        "steps": [_step(step) for step in request.steps],
    }


def _step(step: Step) -> dict[str, Any]:
    return {"action": step.action, "tool": step.tool, "params": step.params}
