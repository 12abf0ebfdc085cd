"""Conversations in the compact protocol: tools, calls and results in few tokens.

For chat templates of any kind: tools become signatures at the end of the system turn,
calls lines of the assistant's text (see `calls`), and the results of a turn one user
turn, each behind a line `@result`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tools_env.calls import compacted, format_tool_call
from tools_env.protocol import ToolCall

_INTRO = "You can call these tools (arguments with ? may be left out):"
_OUTRO = 'To call one, write on a line of its own: @NAME{"KEY":VALUE}'


def plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put tools, calls and results into plain system, assistant and user turns."""
    system = [m["content"] for m in messages[:1] if m["role"] == "system"]
    turns: list[dict[str, Any]] = []
    for role, run in groupby(messages[len(system) :], key=lambda m: m["role"]):
        if role == "tool":
            turns.append({"role": "user", "content": _results(run)})
        else:
            turns += [{"role": role, "content": _with_calls(m)} for m in run]
    if tools:
        system.append("\n".join([_INTRO, *map(signature, tools), _OUTRO]))
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return head + turns


def signature(tool: dict[str, Any]) -> str:
    """One line for an OpenAI schema: `@name{key: type, key?: type} description`."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    notes = [" ".join(function.get("description", "").split())]
    for key, schema in parameters.get("properties", {}).items():
        if note := " ".join(schema.get("description", "").split()):
            notes.append(f"{key}: {note}")
    text = " ".join(note for note in notes if note)
    return f"@{function['name']}{_object(parameters)} {text}".rstrip()


def _object(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    fields = [
        f"{key}{'' if key in required else '?'}: {_kind(inner)}"
        for key, inner in schema.get("properties", {}).items()
    ]
    return "{" + ", ".join(fields) + "}"


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(v, ensure_ascii=False) for v in schema["enum"])
    if "anyOf" in schema:
        return "|".join(map(_kind, schema["anyOf"]))
    match schema.get("type", "any"):
        case "array":
            return f"{_kind(schema.get('items', {}))}[]"
        case "object" if schema.get("properties"):
            return _object(schema)
        case list() as kinds:
            return "|".join(kinds)
        case kind:
            return kind


def _with_calls(message: dict[str, Any]) -> str:
    content = message["content"]
    if message["role"] != "assistant":
        return content
    lines = [compacted(content)] if content else []
    for call in message.get("tool_calls", []):
        function = call["function"]
        made = ToolCall(function["name"], function["arguments"])
        lines.append(format_tool_call(made, "compact"))
    return "\n".join(lines)


def _results(results: Iterable[dict[str, Any]]) -> str:
    return "\n".join(f"@result\n{result['content']}" for result in results)
