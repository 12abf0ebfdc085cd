"""The one way from a model's call to an observation.

`dispatch` looks the tool up, checks the arguments, calls, renders the value as text and
cuts it to length. Whatever the model wrote and whatever the tool does, it returns a
ToolResult. Async tools run on the background loop; an infrastructure fault is tried
again, then "unavailable", which is nobody's wrong answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tools_env import background
from tools_env.protocol import Tool, ToolCall, ToolResult, ToolUnavailable
from tools_env.schema import validate_arguments

_PAUSE_S = 0.1  # before the first retry; doubled with each, up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 2.0


def dispatch(
    tools: Mapping[str, Tool], call: ToolCall, max_result_chars: int
) -> ToolResult:
    """Run one call against the tools; never raises for what the model wrote.

    A tool's own ToolResult keeps its status; any other value is rendered as text.
    """
    start = time.monotonic()
    result = _run(tools, call)
    seconds = time.monotonic() - start
    text = truncate(_printable(result.output), max_result_chars)
    return dataclasses.replace(result, output=text, seconds=seconds)


def _run(tools: Mapping[str, Tool], call: ToolCall) -> ToolResult:
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools) or "none"
        text = f"Unknown tool {call.name[:80]!r}. Known tools: {known}."
        return ToolResult("unknown", text)
    arguments, problem = validate_arguments(tool.schema, call.arguments)
    if arguments is None:
        return ToolResult("invalid", f"Invalid arguments for {call.name}: {problem}.")
    try:
        with _slot(tool):
            value = _attempt(tool, arguments)
        if not isinstance(value, ToolResult):
            value = ToolResult("ok", render(value))
    except background.Late as error:
        return ToolResult("timeout", f"Timeout: {error}.")
    except tool.faults as error:
        return ToolResult("unavailable", f"The tool is unavailable: {describe(error)}")
    except (Exception, SystemExit) as error:  # a tool must not end the trainer
        return ToolResult("error", describe(error))
    final = (tool.final or value.final) and value.status == "ok"
    return dataclasses.replace(value, final=final)


@contextlib.contextmanager
def _slot(tool: Tool) -> Iterator[None]:
    """Wait for one of the tool's slots, for half of its time at most."""
    if tool.slots is None:
        yield
        return
    limit = None if tool.timeout_s is None else tool.timeout_s / 2
    if not tool.slots.acquire(timeout=limit):
        raise ToolUnavailable("too many calls of it are running")
    try:
        yield
    finally:
        tool.slots.release()


def _attempt(tool: Tool, arguments: dict[str, Any]) -> Any:
    """Call the tool, again after an infrastructure fault while it has retries left."""
    for number in range(tool.retries + 1):
        try:
            value = tool.function(**arguments)
            if inspect.isawaitable(value):
                value = background.run(_awaited(value), tool.timeout_s)
            return value
        except tool.faults:
            if number == tool.retries:
                raise
            time.sleep(min(_PAUSE_S * 2**number, _LONGEST_PAUSE_S))
    raise AssertionError("unreachable")


async def _awaited(value: Any) -> Any:
    return await value


def describe(error: BaseException) -> str:
    """Write an exception as "TypeName: message", even if its own text raises."""
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def render(value: Any) -> str:
    """Write a tool's value as text: strings as they are, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def truncate(text: str, max_chars: int) -> str:
    """Cut the middle out of a long text; the mark counts toward `max_chars`."""
    if len(text) <= max_chars:
        return text
    mark = f"\n[... {len(text) - max_chars} characters cut ...]\n"
    room = max(max_chars - len(mark), 0)
    head = (room + 1) // 2
    return (text[:head] + mark + text[len(text) - (room - head) :])[:max_chars]


def _printable(text: str) -> str:
    """Write lone surrogates as escapes, so that the text is valid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
