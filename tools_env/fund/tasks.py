"""Seeded single-turn tasks of the fund assistant, with their gold answers.

`generate` draws requests category by category from the templates of a split; the same
arguments give the same tasks in any process. `requests` says which tool a category
calls.

Columns: category, difficulty (simple | complex | combo), language, template, label (the
expected tool), params, plan, thought.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tools_env.fund.requests import (
    CATEGORIES,
    LANGUAGES,
    Request,
    apportion,
    category_weights,
    draw,
    require,
)
from tools_env.fund.templates import SPLITS
from tools_env.fund.tools import SCHEMAS, TOOL_NAMES
from tools_env.protocol import Task

__all__ = ["ANSWER_FORMATS", "CATEGORIES", "generate", "gold_answer", "system_prompt"]
ANSWER_FORMATS = {  # the fund article's three, from the shortest to its last
    "tool": '{"tool": "..."}',
    "reasoning_action": '{"reasoning": "...", "action": {"tool": "...", "params": {}}}',
    "react": '{"thought": "...", "action": {"tool": "...", "params": {}}, '
    '"plan": ["..."]}',
}
_SHORT_PROMPT = (
    "Answer with one line of JSON and the first tool to call: "
    f"{', '.join(TOOL_NAMES[:-1])} or {TOOL_NAMES[-1]}.\n"
)
_PARAMS_HINT = "params: only what the request states; amounts are plain numbers."
_HINTS = {
    "tool": "",
    "reasoning_action": f"reasoning: one short sentence. {_PARAMS_HINT}\n",
    "react": f"thought: one short sentence. {_PARAMS_HINT} plan: every step in order "
    "of execution.\n",
}


def generate(
    split: str,
    count: int,
    seed: int,
    *,
    languages: Sequence[str] = ("en", "zh"),
    categories: Sequence[str] | Mapping[str, float] | None = None,
    prompt_style: str = "short",
    answer_format: str = "react",
) -> list[Task]:
    """Generate `count` tasks of a split, in random order.

    `categories` names some, or weighs them; all ten weigh the same by default. Counts
    follow the weights as evenly as whole numbers allow, and each category goes through
    all its templates before one comes again. `prompt_style` "short" names the six
    tools (for small models and quick runs), "full" adds their parameters;
    `answer_format` is what the prompt asks for: "react", "reasoning_action" or "tool".

    Raises ValueError for an unknown split, language, category, style or format.
    """
    weights = category_weights(categories)
    require("split", [split], SPLITS)
    require("language", languages, LANGUAGES)
    system = system_prompt(prompt_style, answer_format)
    rng = random.Random(f"fund/{split}/{seed}")
    drawn = []
    for category, number in apportion(count, weights).items():
        for language, share in apportion(number, dict.fromkeys(languages, 1)).items():
            requests = draw(rng, split, language, category)
            drawn += itertools.islice(requests, share)
    rng.shuffle(drawn)
    return [
        Task(
            id=f"fund-{split}-{seed}-{index}",
            prompt=[
                {"role": "system", "content": system},
                {"role": "user", "content": request.text},
            ],
            columns=_columns(request),
        )
        for index, request in enumerate(drawn)
    ]


def system_prompt(style: str = "short", answer_format: str = "react") -> str:
    """The system message; "short" costs under 75 tokens, "full" documents the tools."""
    require("prompt style", [style], ("short", "full"))
    require("answer format", [answer_format], ANSWER_FORMATS)
    shape = ANSWER_FORMATS[answer_format]
    if style == "short":
        return _SHORT_PROMPT + shape
    tools = "\n".join(_describe(schema["function"]) for schema in SCHEMAS.values())
    return (
        "You are a fund assistant. Choose the tool to call first for the request.\n"
        f"Tools:\n{tools}\n"
        f"{_HINTS[answer_format]}"
        f"Answer with one line of JSON:\n{shape}"
    )


def gold_answer(columns: Mapping[str, Any], answer_format: str = "react") -> str:
    """The one-line answer that a task's columns describe, nulls left out."""
    params = {k: v for k, v in columns["params"].items() if v is not None}
    action = {"tool": columns["label"], "params": params}
    thought = columns["thought"]
    answers = {
        "tool": {"tool": columns["label"]},
        "reasoning_action": {"reasoning": thought, "action": action},
        "react": {"thought": thought, "action": action, "plan": columns["plan"]},
    }
    return json.dumps(answers[answer_format], ensure_ascii=False)


def _describe(function: Mapping[str, Any]) -> str:
    parameters = function["parameters"]
    required = parameters.get("required", ())
    described = [
        name + ("" if name in required else "?") + ": " + _type(schema)
        for name, schema in parameters["properties"].items()
    ]
    return f"- {function['name']}({', '.join(described)}): {function['description']}"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(value for value in schema["enum"] if value is not None)
    kinds = schema["type"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " | ".join(kind for kind in kinds if kind != "null")


def _columns(request: Request) -> dict[str, Any]:
    first = request.steps[0]
    return {
        "category": request.category,
        "difficulty": request.difficulty,
        "language": request.language,
        "template": request.template,
        "label": first.tool,
        "params": first.params,
        "plan": [step.plan for step in request.steps],
        "thought": request.thought,
    }
