"""Typed Python functions and classes as tools, and the environment that serves them.

A typed function, plain or async, is a stateless tool. A class with a `reset` method is
a stateful one: every trajectory has an object of its own, each public method is a tool,
and `reset` gets the task's columns that it names before the first call. Rewards find a
trajectory's objects in `trajectory.state`, by class name. `options` says what a
function or method needs besides its schema.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools_env.dispatch import describe, dispatch
from tools_env.protocol import Reward, Task, Tool, ToolCall, ToolResult, ToolUnavailable
from tools_env.schema import tool_schema

if typing.TYPE_CHECKING:
    from tools_env.rewards import RewardSet

_log = logging.getLogger(__name__)
_NO_OBJECT = object()  # stands for `self` where only a method's signature is read


def options(
    *,
    timeout_s: float | None = None,
    retries: int = 0,
    faults: Sequence[type[Exception]] = (),
    max_concurrency: int | None = None,
    final: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function or method with what its tool needs (see `Tool`).

    `faults` are exceptions that count as infrastructure faults besides ToolUnavailable
    and ConnectionError; `max_concurrency` bounds its calls that run at a time. Raises
    ValueError for a value that cannot be meant.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, not {retries}")
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, not {max_concurrency}")
    slots = None if max_concurrency is None else threading.Semaphore(max_concurrency)
    given = {
        "timeout_s": timeout_s,
        "retries": retries,
        "faults": (ToolUnavailable, ConnectionError, *faults),
        "slots": slots,
        "final": final,
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.tool_options = given
        return function

    return decorate


def make_tool(function: Callable[..., Any], owner: str | None = None) -> Tool:
    """Give the tool of a typed, documented function (see `tool_schema` for errors).

    With an `owner`, the name of a class, it is a method of that.
    """
    given = getattr(function, "tool_options", {})
    schema = tool_schema(function.__get__(_NO_OBJECT) if owner else function)
    hints = typing.get_type_hints(function)
    if not any(_holds_enum(hint) for hint in hints.values()):
        return Tool(schema, function, owner=owner, **given)

    @functools.wraps(function)
    def with_members(*args: Any, **arguments: Any) -> Any:
        members = {k: _member(hints[k], v) for k, v in arguments.items()}
        return function(*args, **members)

    return Tool(schema, with_members, owner=owner, **given)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _holds_enum(hint: Any) -> bool:
    return _is_enum(hint) or any(map(_holds_enum, typing.get_args(hint)))


def _member(hint: Any, value: Any) -> Any:
    """Turn the plain value of an enum, alone, in a union or a list, into its member."""
    if _is_enum(hint):
        return hint(value)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list and isinstance(value, list):
        return [_member(args[0], item) for item in value]
    for arg in filter(_is_enum, args):
        if any(type(m.value) is type(value) and m.value == value for m in arg):
            return arg(value)
    return value


def make_tools(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    """Give tools by name. Raises ValueError when two functions share a name."""
    return by_name([make_tool(function) for function in functions])


def make_methods(cls: type) -> dict[str, Tool]:
    """Give the tools of a class with `reset`: its public methods but reset and close.

    Raises ValueError that names the class when it has no such method.
    """
    names = [name for name in dir(cls) if not name.startswith("_")]
    methods = [getattr(cls, n) for n in names if n not in ("reset", "close")]
    methods = [m for m in methods if inspect.isfunction(m)]
    if not methods or not callable(getattr(cls, "reset", None)):
        raise ValueError(f"class {cls.__name__} needs `reset` and methods as tools")
    return by_name([make_tool(method, cls.__name__) for method in methods])


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Put tools in a table. ValueError when two of them share a name."""
    table: dict[str, Tool] = {}
    for tool in tools:
        name = tool.schema["function"]["name"]
        if name in table:
            raise ValueError(f"two tools are named {name!r}")
        table[name] = tool
    return table


class FunctionSession:
    """A trajectory over tools: stateless ones, and those of its own objects."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        max_result_chars: int,
        classes: Mapping[str, type] | None = None,
        columns: Mapping[str, Any] | None = None,
    ):
        self._tools = tools
        self._max_result_chars = max_result_chars
        self._classes = classes or {}
        self._columns = columns or {}
        self._objects: dict[str, Any] = {}
        self.parallel = not self._classes

    @property
    def state(self) -> dict[str, Any]:
        """The trajectory's objects by class name; those not called yet are made."""
        return {name: self._object(name) for name in self._classes}

    def deadline_s(self, call: ToolCall) -> float | None:
        tool = self._tools.get(call.name)
        return tool.timeout_s if tool else None

    def call(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None or tool.owner is None:
            return dispatch(self._tools, call, self._max_result_chars)

        def method(**arguments: Any) -> Any:
            return tool.function(self._object(tool.owner), **arguments)

        tools = {call.name: replace(tool, function=method)}
        return dispatch(tools, call, self._max_result_chars)

    def close(self) -> None:
        """Close the objects that have a `close`, each once; never raises."""
        objects, self._objects = self._objects, {}
        for name, one in objects.items():
            try:
                getattr(one, "close", lambda: None)()
            except Exception as error:
                _log.warning("closing a %s failed: %s", name, describe(error))

    def _object(self, name: str) -> Any:
        """The trajectory's object of a class. ToolUnavailable when it cannot be made.

        The calls of a turn come one after another where there are objects.
        """
        if name not in self._objects:
            try:
                made = self._classes[name]()
                made.reset(**_named(made.reset, self._columns))
            except Exception as error:
                raise ToolUnavailable(f"{name}: {describe(error)}") from error
            self._objects[name] = made
        return self._objects[name]


class FunctionEnvironment:
    """Serves a user's functions and classes, judged by the user's reward functions.

    `servers` have further `tools`, and are closed with it (see `tools_env.mcp`). A
    task's `label` column, where it has one, names the tool that ought to be called, and
    its `demonstration` column holds gold messages for the cold start. Its own `tools`
    column is the choice of tools, by name, that its trajectories have.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        rewards: RewardSet,
        max_reward: float = 1.0,
        max_result_chars: int = 4096,
        servers: Sequence[Any] = (),
    ):
        self.max_reward = max_reward
        classes = [f for f in functions if isinstance(f, type)]
        plain = [f for f in functions if not isinstance(f, type)]
        tables = [make_tools(plain), *map(make_methods, classes)]
        own = [tool for table in tables for tool in table.values()]
        served = [tool for server in servers for tool in server.tools]
        self._tools = by_name([*own, *served])
        self._servers = servers
        self._classes = {cls.__name__: cls for cls in classes}
        self._rewards = rewards
        self._max_result_chars = max_result_chars

    def tools(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def start(self, task: Task) -> FunctionSession:
        tools = self._tools
        if chosen := task.columns.get("tools"):
            tools = {n: tools[n] for n in map(tool_name, chosen) if n in tools}
        owners = {tool.owner for tool in tools.values()}
        classes = {n: cls for n, cls in self._classes.items() if n in owners}
        return FunctionSession(tools, self._max_result_chars, classes, task.columns)

    def reward(self, task: Task, trajectory) -> Reward:
        return self._rewards.score(task, [trajectory])[0]

    def demonstration(self, task: Task) -> list[dict[str, Any]] | None:
        return task.columns.get("demonstration")

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        # Scored already, in a run: not once more, a judge may be slow or dear.
        reward = getattr(trajectory, "reward", None) or self.reward(task, trajectory)
        total = reward.total
        calls = [call.name for turn in trajectory.turns for call in turn.calls]
        return {
            "expected": task.columns.get("label"),
            "called": calls[0] if calls else None,
            "correct": total is not None and total >= self.max_reward - 1e-9,
            "answer": trajectory.answer.strip() or None,
        }


def tool_name(chosen: Any) -> str:
    """The name that an entry of a row's `tools` stands for: a schema, or the name."""
    if isinstance(chosen, Mapping):
        chosen = chosen.get("function", chosen).get("name")
    return str(chosen)


def _named(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes by name, all of them with **keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    return {p.name: columns[p.name] for p in parameters if p.name in columns}
