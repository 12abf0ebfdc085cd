r"""Tool-integrated reasoning: problems that a policy solves with a Python interpreter.

Several turns; the tool `python` runs code in one stateful sandbox a trajectory, and the
last turn's \boxed{...} is the answer. The reward is the outcome alone: full marks for a
right answer, else 0. Problems come from reasoning-gym (`tools_env.reasoning`), judged
by the data set's own scorer, or from the user, judged against the column `answer`
(`tools_env.answers`). An answer outside \boxed{} earns nothing, so prompts without a
system message of their own begin with `SYSTEM_PROMPT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools_env.answers import check_answer, extract_boxed, normal_form
from tools_env.calls import format_tool_call
from tools_env.functions import dispatch
from tools_env.protocol import Reward, Task, Tool, ToolCall, ToolResult
from tools_env.reasoning import (
    DATASETS,
    SYSTEM_PROMPT,
    reasoning_gym_tasks,
    score_reasoning_gym,
    solving_program,
)
from tools_env.sandbox import (
    RANKS,
    PythonSandbox,
    SandboxUnavailable,
    strongest_level,
)
from tools_env.schema import tool_schema

__all__ = [
    "DATASETS",
    "SYSTEM_PROMPT",
    "PythonEnvironment",
    "check_answer",
    "reasoning_gym_tasks",
]


def python(code: str) -> ToolResult:
    """Run Python code and show what it prints.

    Args:
        code: Python source.
    """
    with PythonSandbox() as sandbox:
        return _run(sandbox, code)


class PythonEnvironment:
    """Mathematics with the tool `python`.

    `max_reward` is what a right answer earns. `timeout_s` is a call's deadline,
    `memory_mb` its memory, `output_bytes` the longest output; without `stateful` each
    call has a fresh interpreter. A tool result is cut to `max_result_chars`.
    `needed_columns` must be in every row of the user's: () where other rewards judge.
    `level` is what isolates the code; ValueError where that is weaker than `require`.
    """

    system_prompt = SYSTEM_PROMPT
    text_prompt = r"Answer in \boxed{}."

    def __init__(
        self,
        *,
        max_reward: float = 1.0,
        needed_columns: Sequence[str] = ("answer",),
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        output_bytes: int = 4096,
        stateful: bool = True,
        max_result_chars: int = 4096,
        require: str = "process",
    ):
        try:
            self.level = strongest_level(require)
        except SandboxUnavailable as error:
            raise ValueError(f"tools.sandbox.require={require!r}: {error}") from error
        self.max_reward = max_reward
        self.needed_columns = tuple(needed_columns)
        self._limits = {
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "output_bytes": output_bytes,
            "stateful": stateful,
            "level": self.level,
        }
        self._max_result_chars = max_result_chars
        self._schema = tool_schema(python)

    def tools(self) -> list[dict[str, Any]]:
        return [self._schema]

    def metrics(self) -> dict[str, float]:
        """The level in force: 2 namespaces, 1 filters, 0 limits only."""
        return {"tools/sandbox_level": RANKS[self.level]}

    def start(self, task: Task) -> PythonSession:
        sandbox = PythonSandbox(**self._limits)  # starts no process before a call
        return PythonSession(sandbox, self._schema, self._max_result_chars)

    def reward(self, task: Task, trajectory) -> Reward:
        """Parts: `right` and `boxed`, 0 or 1."""
        answer = extract_boxed(trajectory.answer)
        right = 0.0 if answer is None else _score(task, answer)
        parts = {"right": right, "boxed": float(answer is not None)}
        return Reward(self.max_reward * right, parts)

    def demonstration(self, task: Task) -> list[dict[str, Any]] | None:
        """Call, result of really running it, boxed answer; None without a program.

        None too when the program's answer does not score full marks.
        """
        if not _generated(task):
            return None
        code = solving_program(task.columns["dataset"], task.columns["entry"])
        if code is None:
            return None
        call = ToolCall("python", {"code": code})
        session = self.start(task)
        try:
            result = session.call(call)
        finally:
            session.close()
        answer = result.output.strip()
        if result.status != "ok" or not self._correct(task, None, answer):
            return None
        return [
            {"role": "assistant", "content": format_tool_call(call)},
            {"role": "tool", "name": "python", "content": result.output},
            {"role": "assistant", "content": rf"\boxed{{{answer}}}"},
        ]

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        """The first tool called; the answer's normal form is what votes count."""
        called = [call.name for turn in trajectory.turns for call in turn.calls]
        answer = extract_boxed(trajectory.answer)
        return {
            "expected": "python",
            "called": called[0] if called else None,
            "correct": self._correct(task, trajectory, answer),
            "answer": None if answer is None else normal_form(answer),
        }

    def _correct(self, task: Task, trajectory, answer: str | None) -> bool:
        if not _generated(task) and task.columns.get("answer") is None:
            total = trajectory.reward.total  # of other rewards: there is no gold answer
            return total is not None and total >= self.max_reward
        try:
            return answer is not None and _score(task, answer) == 1.0
        except RuntimeError:  # no scorer could be started: the reward abstained too
            return False


class PythonSession:
    """One trajectory's interpreter, started at its first call."""

    def __init__(
        self, sandbox: PythonSandbox, schema: dict[str, Any], max_result_chars: int
    ):
        self._sandbox = sandbox
        self._tools = {"python": Tool(schema, self._python)}
        self._max_result_chars = max_result_chars

    def call(self, call: ToolCall) -> ToolResult:
        return dispatch(self._tools, call, self._max_result_chars)

    def close(self) -> None:
        self._sandbox.close()

    def _python(self, code: str) -> ToolResult:
        return _run(self._sandbox, code)


def _run(sandbox: PythonSandbox, code: str) -> ToolResult:
    result = sandbox.run(code)
    return ToolResult(result.status, result.output, result.seconds)


def _generated(task: Task) -> bool:
    return {"dataset", "entry"} <= task.columns.keys()


def _score(task: Task, answer: str) -> float:
    columns = task.columns
    if _generated(task):
        return score_reasoning_gym(columns["dataset"], columns["entry"], answer)
    return check_answer(str(columns["answer"]), rf"\boxed{{{answer}}}")
