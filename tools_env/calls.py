"""Model text to tool calls, in one of two protocols.

"hermes" is what Qwen2.5 and its kin write: `<tool_call>`, one JSON object with exactly
"name" and "arguments", `</tool_call>`. "compact" takes fewer tokens: a line that begins
(after spaces, or right behind `</think>`) with `@name` and the JSON object of the
arguments, with nothing but spaces behind it:

    call = "@" name object;  name = word characters, ".", "/", ":", "-", at most 128

Calls inside thinking (`<think>` ... `</think>`) or inside fenced text (three or more
backticks or tildes up to a run at least as long) are not calls. A lone `</think>` ends
thinking that the prompt had opened: what stood before it is no call.

Where a call ends is decided by the JSON, not by tags or lines, so a string may hold
anything. Values arrive exactly as written or the block is a MalformedCall: repeated
keys, NaN, numbers that a float cannot hold (see `_exact`), lone surrogates and
over-deep nesting are refused, and the one thing mended is a literal control character
(a raw newline in code) in a string.
Nothing here raises for any text, and time is linear in its length.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from tools_env.protocol import MalformedCall, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
PROTOCOLS = ("hermes", "compact")
_AROUND = r"</?think>|`{3,}|~{3,}"
_COMPACT = r"(?:^|(?<=</think>))[ \t]*@(?P<name>\w[\w./:-]{0,127}) ?(?={)"
_EVENTS = {
    "hermes": re.compile(rf"<tool_call>|{_AROUND}"),
    "compact": re.compile(rf"{_COMPACT}|{_AROUND}", re.MULTILINE),
}
_LINE_END = re.compile(r"[ \t\r]*(?:\n|\Z)")
_FENCES = {"`": re.compile(r"`{3,}"), "~": re.compile(r"~{3,}")}
_SPACE = re.compile(r"[ \t\n\r]*")
_WINDOW = 512  # first slice given to the JSON decoder; doubled while it proves short
_MAX_DEPTH = 200  # what is nested deeper could not be written to a record again
_KEPT = 500  # characters of a malformed block that are kept for the record


class _Refused(ValueError):
    """The block is JSON to the decoder, but its value could not arrive exactly."""


Block = tuple[ToolCall | MalformedCall, int, int]  # with its place in the text


def parse_tool_calls(
    text: str, protocol: str = "hermes"
) -> list[ToolCall | MalformedCall]:
    """Read every call of a model turn, in order; malformed ones are among them."""
    return [call for call, _, _ in _blocks(text, protocol)]


def format_tool_call(call: ToolCall, protocol: str = "hermes") -> str:
    """Write a call as the model writes it; other scripts stay literal."""
    if protocol == "compact":
        return f"@{call.name}{_written(call.arguments, (',', ':'))}"
    body = _written({"name": call.name, "arguments": call.arguments})
    return f"{_OPEN}\n{body}\n{_CLOSE}"


def compacted(text: str) -> str:
    """Rewrite the well-formed Hermes calls of a text as compact ones, each on a line.

    Raises ValueError for a call that the compact protocol could not give back.
    """
    parts, position = [], 0
    for call, start, end in _blocks(text, "hermes"):
        if isinstance(call, ToolCall):
            line = format_tool_call(call, "compact")
            if parse_tool_calls(line, "compact") != [call]:
                raise ValueError(f"the compact protocol has no call {call.name!r}")
            before = text[position:start]
            gap = "" if not before or before.endswith("\n") else "\n"
            after = "" if text.startswith("\n", end) or end == len(text) else "\n"
            parts += [before, gap, line, after]
            position = end
    return "".join(parts) + text[position:]


def prose(text: str, protocol: str = "hermes") -> str:
    """The text of a turn without its well-formed calls, stripped."""
    parts, position = [], 0
    for call, start, end in _blocks(text, protocol):
        if isinstance(call, ToolCall):
            parts.append(text[position:start])
            position = end
    return "".join([*parts, text[position:]]).strip()


def _written(value: dict[str, Any], separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)


def _blocks(text: str, protocol: str) -> list[Block]:
    find = _Finder(text)
    events = _EVENTS[protocol]
    blocks: list[Block] = []
    position = 0
    while event := events.search(text, position):
        start, position = event.span()
        match event[0]:
            case "<tool_call>":
                call, position = _read_block(text, start, find)
                blocks.append((call, start, position))
            case "<think>":
                end = find(_THOUGHT, position)
                if end == len(text):
                    reason = f"the thinking is not closed by {_THOUGHT}"
                    blocks.append((_malformed(reason, text[start:]), start, end))
                position = min(end + len(_THOUGHT), len(text))
            case "</think>":
                blocks.clear()
            case fence if fence[0] in _FENCES:
                position = _fence_end(text, fence, position)
            case _:
                call, position = _read_line(text, event, find)
                blocks.append((call, start, position))
    return blocks


class _Finder:
    """Next place of a tag at or after a position that only grows: linear in total."""

    def __init__(self, text: str):
        self._text = text
        self._next: dict[str, int] = {}

    def __call__(self, tag: str, start: int) -> int:
        if self._next.get(tag, -1) < start:
            found = self._text.find(tag, start)
            self._next[tag] = len(self._text) if found < 0 else found
        return self._next[tag]


def _fence_end(text: str, fence: str, position: int) -> int:
    for run in _FENCES[fence[0]].finditer(text, position):
        if len(run[0]) >= len(fence):
            return run.end()
    return len(text)


def _read_block(
    text: str, start: int, find: _Finder
) -> tuple[ToolCall | MalformedCall, int]:
    """Read the block whose opening tag is at `start`; also where to go on."""
    begin = _skip_space(text, start + len(_OPEN))
    if not text.startswith("{", begin):
        reason = f"{_OPEN} must be followed by a JSON object"
        return _malformed(reason, text[start : start + _KEPT]), start + len(_OPEN)
    try:
        value, end = _decode(text, begin)
    except (ValueError, RecursionError) as error:
        # Skip the whole attempt: a call quoted inside broken JSON must not run.
        close = find(_CLOSE, begin)
        stop = min(close + len(_CLOSE), find(_THOUGHT, begin), len(text))
        return _malformed(_reason(error), text[start:stop]), stop
    after = _skip_space(text, end)
    if not text.startswith(_CLOSE, after):
        reason = f"the JSON object must be followed by {_CLOSE}"
        return _malformed(reason, text[start:after]), after
    after += len(_CLOSE)
    reason = _shape_problem(value)
    if reason:
        return _malformed(reason, text[start:after]), after
    return ToolCall(value["name"], value["arguments"]), after


def _read_line(
    text: str, event: re.Match[str], find: _Finder
) -> tuple[ToolCall | MalformedCall, int]:
    """Read the compact call whose `@name` was found; also where to go on."""
    start, begin = event.span()
    try:
        arguments, end = _decode(text, begin)
    except (ValueError, RecursionError) as error:
        # What follows may be the inside of a string: nothing of it must run.
        stop = find(_THOUGHT, begin)
        return _malformed(_reason(error), text[start:stop]), stop
    line_end = _LINE_END.match(text, end)
    if line_end is None:
        reason = "the arguments must be followed by the end of the line"
        stop = min(find("\n", end), find(_THOUGHT, end))
        return _malformed(reason, text[start:stop]), stop
    return ToolCall(event["name"], arguments), end


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _malformed(reason: str, text: str) -> MalformedCall:
    return MalformedCall(reason, text[:_KEPT])


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at character {error.pos}: {error.msg}"
    return f"invalid JSON: {error}"


def _shape_problem(value: dict[str, Any]) -> str | None:
    if extra := [key for key in value if key not in ("name", "arguments")]:
        return f'unexpected key {extra[0][:80]!r}; a call has "name" and "arguments"'
    if not isinstance(value.get("name"), str) or not value["name"]:
        return '"name" must be a non-empty string'
    if not isinstance(value.get("arguments"), dict):
        return '"arguments" must be a JSON object'
    return None


def _decode(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Decode the JSON value at `start`; give it and the place after it.

    The decoder sees a window, not the text: its errors count lines from the first
    character, which over many broken blocks would be quadratic.
    """
    size = _WINDOW
    while True:
        window = text[start : start + size]
        whole = start + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            ran_out = error.msg.startswith("Unterminated") or error.pos > size - 16
            if whole or not ran_out:
                raise
            size *= 2
            continue
        written = window[:end]
        if "\\u" in written or not written.isascii():
            _refuse_surrogates(value)
        if written.count("{") + written.count("[") > _MAX_DEPTH:
            _refuse_depth(value)
        return value, start + end


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Refused("a lone surrogate is not a character") from error


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        boxes = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for box in boxes for x in box if isinstance(x, dict | list)]
        if not level:
            return
    raise RecursionError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key[:80]!r} occurs twice")
            seen.add(key)
    return result


def _exact(literal: str) -> float:
    """The float that a literal with a fraction or exponent denotes.

    Accepted when the float's shortest text is the same decimal number: 0.1 and 1e22
    are, but 1e999, 1e-400, 9007199254740993.0 and a fraction with more digits than a
    float keeps (17 at most) would arrive as another number.
    """
    value = float(literal)
    if not math.isfinite(value):
        raise _Refused(f"the number {literal[:40]} is out of range")
    written = repr(value)
    if written != literal and not _same_decimal(written, literal):
        raise _Refused(
            f"the number {literal[:40]} would become {written}, which is another one"
        )
    return value


def _same_decimal(written: str, literal: str) -> bool:
    try:
        return Decimal(written) == Decimal(literal)
    except InvalidOperation:  # an exponent beyond what even a Decimal holds
        return False


def _integer(literal: str) -> int:
    try:
        return int(literal)
    except ValueError as error:  # Python's own limit on the number of digits
        raise _Refused("an integer has too many digits") from error


def _no_constant(literal: str) -> Any:
    raise _Refused(f"{literal} is not JSON")


_DECODER = json.JSONDecoder(
    strict=False,
    object_pairs_hook=_unique,
    parse_float=_exact,
    parse_int=_integer,
    parse_constant=_no_constant,
)
