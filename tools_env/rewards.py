"""Reward functions in TRL's keyword form, and their weighted combination.

A function is called once for a batch of trajectories,

    f(prompts=, completions=, completion_ids=, trajectories=, **columns)

with one list entry a trajectory: prompts and completions as chat messages, the ids the
policy produced (where the caller has them), the trajectories themselves, and every
column of the tasks (None where a task lacks it). It gets only the keywords it names,
or all when it takes `**kwargs`, and returns for each trajectory a number, None to
abstain, or a list with one number a turn (its sum counts toward the total). It may be
async, and then has a deadline for the batch.

An abstaining term is left out of the weighted sum; when every term abstains, so does
the row (total None). After the start-up check a NaN, an infinity, a value beyond 1e18
or that is no number, an exception, or a missed deadline is an abstention too, and
`NAME/failed` in the parts is then 1, else 0; a wrong number of values is always an
error, since it cannot be told which row is whose.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from tools_env import background
from tools_env.protocol import Reward, Task

_log = logging.getLogger(__name__)
_FAILED = object()
LARGEST = 1e18  # float32, in which advantages are computed, can still square it


class RewardCountError(ValueError):
    """A reward function gave another number of values than there are trajectories."""


class RewardSet:
    """Several reward functions, weighted; the total is sum(weight * value).

    `maxima` declares the most that each can give; `maximum` is then the total's. An
    async function has `timeout_s` seconds for a batch (None: as long as it takes).
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        maxima: Sequence[float] | None = None,
        *,
        timeout_s: float | None = None,
    ):
        count = len(functions)
        self.functions = list(functions)
        self.weights = [1.0] * count if weights is None else list(weights)
        self.names = [_name(f) for f in functions] if names is None else list(names)
        self.maxima = None if maxima is None else list(maxima)
        self.timeout_s = timeout_s
        for what in ("weights", "names", "maxima"):
            given = getattr(self, what)
            if given is not None and len(given) != count:
                raise ValueError(
                    f"reward.{what} has {len(given)} entries for {count} functions"
                )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward function names must differ: {self.names}")

    @property
    def maximum(self) -> float | None:
        """The most that the total can be; None where that is not declared.

        The least that a function can give is not declared, so that a negative weight
        leaves it open.
        """
        if self.maxima is None or min(self.weights, default=0.0) < 0:
            return None
        pairs = zip(self.weights, self.maxima, strict=True)
        return math.fsum(weight * most for weight, most in pairs)

    def __call__(
        self,
        tasks: Sequence[Task],
        trajectories: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Reward]:
        """Score a batch; a bad function raises nothing but RewardCountError."""
        keywords = _keywords(tasks, trajectories, completion_ids)
        columns = [
            self._values(function, name, keywords, trajectories)
            for function, name in zip(self.functions, self.names, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else [()] * len(tasks)
        return [self._combine(row) for row in rows]

    def score(self, task: Task, trajectories: Sequence[Any]) -> list[Reward]:
        """Score trajectories of one task."""
        return self([task] * len(trajectories), trajectories)

    def check_at_start(
        self,
        trajectories: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Call every function on made-up trajectories, one by one, before any training.

        Raises ValueError that names the function when it raises, gives a wrong number
        of values, or a value that is no finite number, None or one number a turn.
        """
        for i, trajectory in enumerate(trajectories):
            ids = None if completion_ids is None else [completion_ids[i]]
            keywords = _keywords([trajectory.task], [trajectory], ids)
            for function, name in zip(self.functions, self.names, strict=True):
                _check(function, name, keywords, trajectory, self.timeout_s)

    def _values(self, function, name: str, keywords, trajectories) -> list[Any]:
        try:
            returned = _returned(function, keywords, self.timeout_s)
        except (Exception, SystemExit) as error:  # its fault must not end a long run
            _log.warning("reward function %s raised %r; it abstains", name, error)
            return [_FAILED] * len(trajectories)
        values = _checked_count(returned, name, len(trajectories))
        read = [_read(v, t) for v, t in zip(values, trajectories, strict=True)]
        if failed := sum(value is _FAILED for value in read):
            _log.warning("reward function %s gave %d unusable values", name, failed)
        return read

    def _combine(self, row: Sequence[Any]) -> Reward:
        """Weigh one trajectory's values: floats, lists of floats, None or _FAILED."""
        parts: dict[str, float | None] = {}
        total, turns = None, None
        for name, weight, value in zip(self.names, self.weights, row, strict=True):
            parts[f"{name}/failed"] = float(value is _FAILED)
            if value is _FAILED:
                value = None
            if isinstance(value, list):
                scaled = [weight * one for one in value]
                base = turns or [0.0] * len(scaled)
                turns = [a + b for a, b in zip(base, scaled, strict=True)]
                value = math.fsum(value)
            parts[name] = value
            if value is not None:
                total = (total or 0.0) + weight * value
        return Reward(total, parts, turns)


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module.name` (or `package.module:name`).

    Raises ValueError that names the path and what is wrong with it.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise ValueError(f"{path!r} is not of the form package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{path!r}: cannot import {module_name!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not callable" if hasattr(module, name) else "does not exist"
        raise ValueError(f"{path!r}: {name!r} in module {module_name!r} {what}")
    return function


def completion_messages(trajectory: Any) -> list[dict[str, Any]]:
    """A trajectory's turns as chat messages, tool results included."""
    messages: list[dict[str, Any]] = []
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages += [
            {"role": "tool", "name": call.name, "content": call.result}
            for call in turn.calls
        ]
    return messages


def _check(
    function,
    name: str,
    keywords: dict[str, list],
    trajectory: Any,
    timeout_s: float | None,
) -> None:
    try:
        returned = _returned(function, keywords, timeout_s)
    except (Exception, SystemExit) as error:
        calls = sum(len(turn.calls) for turn in trajectory.turns)
        raise ValueError(
            f"reward function {name} failed its start-up call on a made-up trajectory "
            f"with {calls} tool calls: {error!r}"
        ) from error
    (value,) = _checked_count(returned, name, 1)
    if _read(value, trajectory) is _FAILED:
        raise ValueError(
            f"reward function {name} gave {value!r} in its start-up call; "
            "expected a number up to 1e18, None, or a list with one number a turn"
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _keywords(tasks, trajectories, completion_ids) -> dict[str, list]:
    names = dict.fromkeys(name for task in tasks for name in task.columns)
    columns = {name: [task.columns.get(name) for task in tasks] for name in names}
    ids = {} if completion_ids is None else {"completion_ids": list(completion_ids)}
    return (
        columns
        | ids
        | {
            "prompts": [task.prompt for task in tasks],
            "completions": [completion_messages(t) for t in trajectories],
            "trajectories": list(trajectories),
        }
    )


def _returned(
    function: Callable[..., Any], keywords: dict[str, list], timeout_s: float | None
) -> Any:
    """Call a function; an async one runs on the background loop, with the deadline."""
    returned = function(**_accepted(function, keywords))
    if inspect.iscoroutine(returned):
        returned = background.run(returned, timeout_s)
    return returned


def _accepted(
    function: Callable[..., Any], keywords: dict[str, list]
) -> dict[str, list]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    return {p.name: keywords[p.name] for p in parameters if p.name in keywords}


def _checked_count(returned: Any, name: str, expected: int) -> list[Any]:
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, list | tuple):
        got = f"one {type(returned).__name__}, not a list"
    elif len(returned) != expected:
        got = str(len(returned))
    else:
        return list(returned)
    raise RewardCountError(
        f"reward function {name}: expected {expected} values, received {got}"
    )


def _read(value: Any, trajectory: Any) -> Any:
    """A float, a list of floats (one a turn), None, or _FAILED."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        numbers = [_read(one, None) for one in value]
        fits = trajectory is not None and len(value) == len(trajectory.turns)
        return numbers if fits and all(type(n) is float for n in numbers) else _FAILED
    if value is None:
        return None
    if isinstance(value, int | float) and abs(value) <= LARGEST:
        return float(value)  # NaN compares false
    return _FAILED
