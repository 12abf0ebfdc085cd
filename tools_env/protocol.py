"""The data that passes between the rollout engine, the tools and the rewards.

Everything here is plain host data: no JAX, no model, no tokens. An environment owns
its tasks' tools and their reward; a session is what one trajectory holds of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# Statuses of a call that reached its tool; the others were answered without running.
EXECUTED = frozenset({"ok", "error", "timeout", "memory", "crashed"})
# A well-formed call, but of no tool or with arguments that do not fit its schema.
INVALID = frozenset({"invalid", "unknown"})


@dataclass(frozen=True)
class ToolCall:
    """One well-formed call as the model wrote it, not checked against a schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A call block that could not be read; `reason` is written for the model."""

    reason: str
    text: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave.

    `status`: the tool ran and gave "ok", "error", "timeout", "memory" or "crashed"; or
    it never ran: "invalid" (the arguments do not fit the schema), "unknown" (no such
    tool), "malformed" or "not_run" (an earlier call is stuck). "unavailable" is nobody
    else's fault but the infrastructure's: it ends the trajectory, which then has no
    reward. `output` is the observation's text, `seconds` the wall time. `final`: the
    trajectory ends here, `output` is its answer.
    """

    status: str
    output: str
    seconds: float = 0.0
    final: bool = False


class ToolUnavailable(Exception):
    """A tool's service cannot be reached or is broken, whatever the call was.

    Raise it in a tool: after the tool's retries the trajectory counts as invalid, not
    as wrong.
    """


@dataclass(frozen=True)
class CallRecord:
    """One call of a turn, as records and rewards see it; malformed: arguments None."""

    name: str
    arguments: dict[str, Any] | None
    status: str
    result: str
    seconds: float = 0.0


@dataclass
class Turn:
    """One model turn: its text without the stop token's, and what its calls gave.

    `final` is what a stop tool returned, if the turn called one: the answer.
    """

    text: str
    calls: list[CallRecord] = field(default_factory=list)
    final: str | None = None


@dataclass(frozen=True)
class Task:
    """A problem: chat messages (role, content) and every column that a reward needs."""

    id: str
    prompt: list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reward:
    """A trajectory's reward.

    Attributes:
      total: None abstains: the row leaves statistics and loss.
      parts: the terms, unweighted; may hold diagnostics beside them.
      turns: what of the total each turn earned; the rest of it is the outcome's, which
        belongs to the last turn. None: all of it is.
      maximum: the most that this trajectory could have earned, as far as declared.
      passed: it earned the declared maximum of its outcome; None: nothing is declared.
    """

    total: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    turns: list[float] | None = None
    maximum: float | None = None
    passed: bool | None = None


@dataclass(frozen=True)
class Tool:
    """A function, plain or async, that the model may call, and its OpenAI schema.

    Attributes:
      timeout_s: seconds of a call, waits and retries included; None: the pool's.
      retries: further attempts after an infrastructure fault.
      faults: exceptions that are such faults.
      slots: bounds the calls that run at a time, over all trajectories.
      final: a call that succeeds ends the trajectory, its result is the answer.
      owner: class whose method the function is; it then takes the object first.
    """

    schema: dict[str, Any]
    function: Callable[..., Any]
    timeout_s: float | None = None
    retries: int = 0
    faults: tuple[type[Exception], ...] = (ToolUnavailable, ConnectionError)
    slots: threading.Semaphore | None = None
    final: bool = False
    owner: str | None = None


@runtime_checkable
class Session(Protocol):
    """The state of one trajectory inside an environment.

    It may also have `state`, which the trajectory keeps for the reward; `parallel`,
    true where the calls of a turn may run at once; and `deadline_s(call)`, seconds of
    one call, or None for the pool's.
    """

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call. Never raises for what the model wrote.

        May block up to the tool deadline; runs in a worker thread.
        """
        ...

    def close(self) -> None:
        """Give back what the session holds; safe to call twice."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Tools, reward and gold answers for one kind of task.

    It may also have `tasks(split)`, its own tasks for "train" and "eval" ([] for the
    latter: some of the former are held out), `needed_columns`, the columns that every
    row must bring, `own_tools`, true where rows bring schemas that it does not have,
    `system_prompt`, with which prompts without a system message begin, `text_prompt`,
    which stands there where a probe offers no tools, `readable(trajectory)`, whether
    the answer has the form asked for, and `close()`, called at the end of the run.
    """

    max_reward: float

    def tools(self) -> list[dict[str, Any]]:
        """OpenAI schemas; [] when the environment executes none."""
        ...

    def start(self, task: Task) -> Session:
        """Begin a trajectory; cheap, heavy resources open at the first call."""
        ...

    def reward(self, task: Task, trajectory) -> Reward:
        """Judge a trajectory: `.turns`, `.answer` (last text), `.stop`, `.truncated`"""
        ...

    def demonstration(self, task: Task) -> list[dict[str, Any]] | None:
        """Gold messages after the prompt, for SFT; None if there are none.

        An assistant message's content is its exact text, call blocks included; a tool
        message is {"role": "tool", "name": ..., "content": ...}.
        """
        ...

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        """An evaluation row: `expected` and `called` tool, `correct`, `answer`.

        And `reasoning`, from 0 to 1, where it can be judged apart from the tool.
        """
        ...
