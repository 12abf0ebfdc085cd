"""Which role a byte of a model turn has: reasoning, or part of a tool call.

A rule reads a turn byte by byte and knows, after each, what role the next byte has; so
the role of what comes is decided by what has been written alone. What opens a call (its
tag, its key) is still reasoning, what closes it still belongs to the call.

* "hermes": from `<tool_call>` to `</tool_call>`.
* "compact": from an `@` that begins a line to the end of that line.
* "action": in a JSON object, the value of its key `action` and the comma or brace
  behind it, as in the ReAct answers of the fund assistant.

Tags in thinking (`<think>`) open nothing, and inside a call's strings nothing closes
it, as in `tools_env.calls`; fenced text is not looked for. A call whose quotes do not
pair up may therefore last to the end of the turn.
"""

import functools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

ROLES = ("reasoning", "tool")
REASONING, TOOL = range(2)


@dataclass(frozen=True)
class Automaton:
    """A rule as tables; a turn begins in state 0.

    Attributes:
      after: [states][256], the state after a byte.
      roles: [states], the role of what is written next.
    """

    after: list[list[int]]
    roles: list[int]


@functools.cache
def automaton(rule: str) -> Automaton:
    """The tables of a rule: "hermes", "compact" or "action"."""
    match rule:
        case "hermes":
            return _tabulated(("text", b""), _tags(_HERMES), _in_call)
        case "compact":
            return _tabulated(("line", b""), _tags(_COMPACT), _in_call)
        case "action":
            return _tabulated((0, "between", False), _action, lambda state: state[2])
    raise ValueError(f"no rule {rule!r}: hermes, compact or action")


def _tabulated(start: Hashable, step: Callable, is_tool: Callable) -> Automaton:
    """Number the states that can be reached from `start` and write down every step."""
    numbers, after, waiting = {start: 0}, [], deque([start])
    while waiting:
        state = waiting.popleft()
        following = [step(state, bytes([byte])) for byte in range(256)]
        for new in following:
            if new not in numbers:
                numbers[new] = len(numbers)
                waiting.append(new)
        after.append([numbers[new] for new in following])
    return Automaton(
        after, [TOOL if is_tool(state) else REASONING for state in numbers]
    )


# Protocols by tags -------------------------------------------------------------------

# Mode -> the texts that end it, each with the mode that begins there.
_STRINGS = {
    "string": {b'"': "call", b"\\": "escape"},
    "escape": {bytes([byte]): "string" for byte in range(256)},
}
_HERMES = _STRINGS | {
    "text": {b"<tool_call>": "call", b"<think>": "thinking"},
    "thinking": {b"</think>": "text"},
    "call": {b"</tool_call>": "text", b'"': "string"},
}
_OUTSIDE = {b"<think>": "thinking", b"\n": "line"}
_COMPACT = _STRINGS | {
    "line": {b"@": "call", **_OUTSIDE},
    "text": _OUTSIDE,
    "thinking": {b"</think>": "line"},
    "call": {b"\n": "line", b'"': "string"},
}


def _tags(modes: dict[str, dict[bytes, str]]) -> Callable:
    """Steps over (mode, the longest beginning of a tag that was just written)."""

    def step(state, byte):
        mode, written = state
        written += byte
        for tag, new in modes[mode].items():
            if written.endswith(tag):
                return new, b""
        if mode == "line" and byte not in b" \t":
            mode = "text"
        while not any(tag.startswith(written) for tag in modes[mode]):
            written = written[1:]
        return mode, written

    return step


def _in_call(state) -> bool:
    return state[0] in ("call", "string", "escape")


# The value of a JSON object's key `action` -------------------------------------------

_KEY = b'action"'  # behind the opening quote
_DEEPEST = 12  # brackets in brackets; what is nested deeper is reasoning to its end


def _action(state, byte):
    """Steps over (open brackets, mode, whether it is inside the value).

    Mode: "between" strings, in a "string", behind its backslash ("escape"), behind the
    key ("named"), or the part of the key that was read.
    """
    depth, mode, tool = state
    if isinstance(mode, bytes):
        if _KEY == mode + byte:
            return depth, "named", tool
        if _KEY.startswith(mode + byte):
            return depth, mode + byte, tool
        mode = "string"  # of another text, and this byte is in it
    if mode == "escape":
        return depth, "string", tool
    if mode == "string":
        return depth, {b'"': "between", b"\\": "escape"}.get(byte, mode), tool
    if mode == "named" and byte in b" \t\r\n":
        return state
    if mode == "named" and byte == b":":
        return depth, "between", True
    return _between(depth, byte, tool)


def _between(depth, byte, tool):
    """A byte outside strings; outside of all brackets only `{` means something."""
    if depth > _DEEPEST:
        return depth, "between", False
    if byte == b"{" or (byte == b"[" and depth):
        depth += 1
        return depth, "between", tool and depth <= _DEEPEST
    if byte in b"}]" and depth:
        return depth - 1, "between", tool and depth > 1
    if byte == b"," and depth == 1:
        return depth, "between", False
    if byte == b'"' and depth:
        return depth, b"" if depth == 1 and not tool else "string", tool
    return depth, "between", tool
