"""The fund assistant as an environment: one turn, in which the policy picks a tool.

Nothing is executed: the answer's `action` is judged against the task's label. The bank
and its tools (`tools_env.fund.tools.FundTools`) serve whoever wants the calls carried
out, through `tools_env.functions`.
"""

from __future__ import annotations

import functools
from typing import Any

from tools_env.fund import reward as rewards
from tools_env.fund.tasks import ANSWER_FORMATS, gold_answer
from tools_env.fund.tools import TOOL_NAMES
from tools_env.protocol import Reward, Task, ToolCall, ToolResult

# Each reward, and the most that it can give.
_REWARDS = {
    "graded": (rewards.graded_reward, 1.0),
    "article": (rewards.article_reward, 0.9),
    "capped": (rewards.capped_reward, 0.8),
}


class FundEnvironment:
    """Single-turn tool selection.

    `reward` is "graded", "article" or "capped" (see `tools_env.fund.reward`);
    `overuse_penalty` is what an uncalled-for check_market_status costs; `answer_format`
    is what the prompts ask for ("react" with the article's reward, not "tool" with the
    capped one). `max_reward` is 1.0, or the .9 or .8 at which the others stop.
    """

    def __init__(
        self,
        reward: str = "graded",
        overuse_penalty: float = 0.3,
        answer_format: str = "react",
    ):
        if reward not in _REWARDS:
            known = ", ".join(_REWARDS)
            raise ValueError(f"unknown reward.fund {reward!r}; known: {known}")
        if overuse_penalty < 0:
            raise ValueError(
                f"reward.overuse_penalty must be >= 0, not {overuse_penalty}"
            )
        if answer_format not in ANSWER_FORMATS:
            known = ", ".join(ANSWER_FORMATS)
            raise ValueError(
                f"unknown data.answer_format {answer_format!r}; known: {known}"
            )
        if reward == "article" and answer_format != "react":
            raise ValueError(
                f"reward.fund='article' judges the react format, not {answer_format!r}"
            )
        if reward == "capped" and answer_format == "tool":
            raise ValueError("reward.fund='capped' judges no answer_format 'tool'")
        self._format = {} if reward == "article" else {"answer_format": answer_format}
        function, self.max_reward = _REWARDS[reward]
        self._reward = functools.partial(
            function, overuse_penalty=overuse_penalty, **self._format
        )

    def tools(self) -> list[dict[str, Any]]:
        """Nothing is executed, so the template gets no tools; the prompt names them."""
        return []

    def start(self, task: Task) -> NoTools:
        return NoTools()

    def reward(self, task: Task, trajectory) -> Reward:
        return self._reward(task, trajectory.answer)

    def readable(self, trajectory) -> bool:
        """The answer is one JSON object."""
        return rewards.parse_answer(trajectory.answer) is not None

    def demonstration(self, task: Task) -> list[dict[str, Any]]:
        return [
            {"role": "assistant", "content": gold_answer(task.columns, **self._format)}
        ]

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        """The tool expected and called; an unknown name counts as "unknown"."""
        label = task.columns["label"]
        answer = rewards.parse_answer(trajectory.answer)
        called = rewards.called_tool(answer, **self._format)
        if called is not None and called not in TOOL_NAMES:
            called = "unknown"
        return {
            "expected": label,
            "called": called,
            "correct": called == label,
            "answer": called,
            "reasoning": self._reasoning(task, trajectory),
        }

    def _reasoning(self, task: Task, trajectory) -> float | None:
        """The share of thought and plan that is there; None in a format without."""
        parts = self._reward(task, trajectory.answer).parts
        wanted = [parts[name] for name in ("thought", "plan") if name in parts]
        return sum(wanted) / len(wanted) if wanted else None


class NoTools:
    """A session without tools."""

    def call(self, call: ToolCall) -> ToolResult:
        return ToolResult("unknown", f"there is no tool {call.name!r} to call here")

    def close(self) -> None:
        return None
