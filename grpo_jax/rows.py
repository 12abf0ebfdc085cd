"""Rows of a user's data: read from JSONL, Parquet or the hub, checked, made tasks.

RL rows have a `prompt` (a string or chat messages); SFT rows have `messages` and
perhaps `tools` (a list or its JSON text). Their prompt is what precedes the first
assistant message; the rest becomes the column `demonstration`, which a row with a
prompt may also bring itself. Its calls are written out as text, as a model writes them.
`id` names the task, else file and line do. Every other column goes to `Task.columns`
as it is; numbers keep all their digits and text its characters.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config import BadInput
from tools_env.calls import format_tool_call, parse_tool_calls
from tools_env.protocol import Task, ToolCall

ROLES = ("system", "user", "assistant", "tool")
CHAT_COLUMNS = {"prompt", "messages", "demonstration", "tools"}
_CHUNK = 1024  # rows that an Arrow table turns into Python objects at a time

Row = tuple[str, Any]  # where it is ("data.jsonl:3"), and its value


def read(source: str, split: str) -> Iterator[Row]:
    """Yield every row of a .jsonl or .parquet file or a hub data set, with its place.

    A line that cannot be read is yielded as its ValueError. Raises BadInput for a
    source that is missing or unreadable as a whole.
    """
    path = Path(source)
    match path.suffix:
        case ".jsonl" | ".parquet" if not path.is_file():
            raise BadInput(f"data source '{source}': no such file")
        case ".jsonl":
            return _jsonl_rows(path)
        case ".parquet":
            return _table_rows(_parquet(path), path.name)
    if path.exists() or source.count("/") != 1:
        raise BadInput(
            f"data source '{source}' is neither a generator, a .jsonl or"
            " .parquet file, nor a hub id (owner/name)"
        )
    return _table_rows(_hub(source, split), source)


def task(row: Any, where: str, needed: Sequence[str] = ()) -> Task:
    """Check a row and make it a task; ValueError says what is wrong with it."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {_kind(row)}")
    _check_unicode(row)
    columns = {k: v for k, v in row.items() if k not in ("prompt", "id")}
    if "tools" in columns:
        columns["tools"] = _tools(columns["tools"])
    for column in ("messages", "demonstration"):
        if columns.get(column) is not None:
            columns[column] = _messages(columns[column], column)
    prompt = _split(row.get("prompt"), columns)
    for column in needed:
        if row.get(column) is None and columns.get(column) is None:
            raise ValueError(f"no column '{column}'")
    name = row.get("id")
    return Task(where if name is None else str(name), prompt, columns)


def _split(prompt: Any, columns: dict[str, Any]) -> list[dict]:
    """Return the prompt; leave what follows it, if given, in `demonstration`."""
    messages, gold = columns.get("messages"), columns.get("demonstration")
    if prompt is not None:
        prompt = _prompt(prompt)
    elif messages is not None:
        start = _first_answer(messages)
        prompt, gold = messages[:start], gold or messages[start:]
    else:
        raise ValueError("no column 'prompt' (or 'messages')")
    if gold is not None:
        columns["demonstration"] = _gold(gold)
    return prompt


def _jsonl_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as lines:
            yield from _json_lines(lines, path.name)
    except OSError as error:
        raise BadInput(f"data source '{path}' cannot be read: {error}") from error


def _json_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield f"{name}:{number}", _json(line.decode("utf-8-sig"))
        except ValueError as error:
            yield f"{name}:{number}", error


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parquet(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadInput(f"{path}: Parquet needs 'grpo_jax[data]'") from error
    try:
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"data source '{path}': {error}") from error


def _hub(source: str, split: str) -> Any:
    """Return the Arrow table of a hub data set's split for training or evaluation."""
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"{source}: a hub id needs 'grpo_jax[data]'") from error
    try:
        splits = datasets.load_dataset(source)
        wanted = ("train",) if split == "train" else ("test", "validation", "train")
        name = next((name for name in wanted if name in splits), next(iter(splits)))
        return splits[name].with_format("arrow")[:]
    except Exception as error:  # network, names, several configs: dozens of types
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"data source '{source}': {reason}") from error


def _table_rows(table: Any, name: str) -> Iterator[Row]:
    """Yield an Arrow table's rows without the nulls that columns of structs add.

    A struct column has the keys of all rows: in messages and tools a null there stands
    for an absent key. `default` is kept where no row has a value for it: then null is
    the default itself. Tools that differ in more than that belong in a JSON column.
    """
    number = 0
    for batch in table.to_batches(max_chunksize=_CHUNK):
        for row in batch.to_pylist():
            number += 1
            row = {key: value for key, value in row.items() if value is not None}
            for key in row.keys() & CHAT_COLUMNS:
                row[key] = _unfilled(row[key], table.schema.field(key).type)
            yield f"{name}:{number}", row


def _unfilled(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return [_unfilled(item, kind.value_type) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {field.name: field.type for field in kind}
    return {
        key: _unfilled(item, fields[key])
        for key, item in value.items()
        if item is not None or (key == "default" and str(fields[key]) == "null")
    }


def _check_unicode(row: dict) -> None:
    try:
        json.dumps(row, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        raise ValueError("text with half a surrogate pair") from error


def _prompt(prompt: Any) -> list[dict]:
    if not isinstance(prompt, str):
        return _messages(prompt, "prompt")
    if not prompt.strip():
        raise ValueError("'prompt' is empty")
    return [{"role": "user", "content": prompt}]


def _first_answer(messages: list[dict]) -> int:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:]:
        raise ValueError("'messages' has no assistant message after a first one")
    return roles.index("assistant", 1)


def _gold(messages: list[dict]) -> list[dict]:
    """Return gold messages with every call in its message's text."""
    if messages[0]["role"] != "assistant":
        raise ValueError("'demonstration' must begin with an assistant message")
    return [_written(message) for message in messages]


def _written(message: dict) -> dict:
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [ToolCall(**call["function"]) for call in message["tool_calls"]]
    try:
        blocks = [format_tool_call(call) for call in calls]
    except (TypeError, ValueError) as error:
        raise ValueError(f"a tool call's arguments are not JSON: {error}") from error
    text = "\n".join([message["content"], *blocks] if message["content"] else blocks)
    if parse_tool_calls(text)[-len(calls) :] != calls:
        names = ", ".join(repr(call.name) for call in calls)
        raise ValueError(f"calls of {names} could not be read back from their message")
    return rest | {"content": text}


def _messages(messages: Any, column: str) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        wanted = "text or messages" if column == "prompt" else "messages"
        raise ValueError(f"'{column}' must be {wanted}, not {_kind(messages)}")
    return [_message(m, f"{column}[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> dict:
    """Return a message without its null keys, its calls' arguments as objects."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object, not {_kind(message)}")
    if message.get("role") not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"{where}: role {message.get('role')!r} is not one of {known}")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _content(clean.get("content", ""), where)
    calls = clean.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, not {_kind(calls)}")
    if calls:
        clean["tool_calls"] = [_call(call, where) for call in calls]
    return clean


def _content(content: Any, where: str) -> str:
    """Return text, also of a list of text parts."""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) else part for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be text, not {_kind(content)}")
    return content


def _call(call: Any, where: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.tool_calls needs objects with a function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.tool_calls: arguments must be an object")
    function = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "function": function}


def _tools(tools: Any) -> list[dict]:
    if isinstance(tools, str):
        tools = _json(tools)
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("'tools' must be a list of tool schemas, or its JSON text")
    return tools


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    if value is None or value == []:
        return "nothing"
    return names.get(type(value), "a number")
