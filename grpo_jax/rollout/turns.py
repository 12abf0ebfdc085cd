"""A trajectory under way: its open turn, its budgets, its calls.

Host bookkeeping of `rollout.engine`, which moves these along and knows the device.
A segment is written here when its source is known, and never touched again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_jax.rollout.chat import Chat
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.dispatch import describe
from tools_env.protocol import (
    CallRecord,
    MalformedCall,
    Session,
    ToolCall,
    ToolResult,
    Turn,
)


@dataclass(frozen=True)
class Limits:
    """Sizes and budgets of a rollout, in tokens unless said.

    Attributes:
      max_prompt_length: longest prompt.
      max_completion_length: MODEL and TOOL tokens of a trajectory.
      max_turn_length: sampled tokens of one turn.
      max_tool_calling_iterations: turns whose calls are executed.
      max_calls_per_turn: calls of one turn that are executed; the rest is refused.
      slots: trajectories decoded at a time.
      burst: decode steps between two looks at the tools.
    """

    max_prompt_length: int
    max_completion_length: int
    max_turn_length: int
    max_tool_calling_iterations: int
    max_calls_per_turn: int
    slots: int
    burst: int

    @property
    def prompt_length(self) -> int:
        """Cache entries that a prompt can need, to the next multiple of 64."""
        return _round_up(self.max_prompt_length)

    def prompt_chunk(self, most: int) -> int:
        """Tokens of a prompt that one program takes, even parts: 96 is 2 x 48."""
        longest = self.max_prompt_length
        return -(-longest // -(-longest // most))

    @property
    def cache_length(self) -> int:
        """Cache entries that a slot can need, to the next multiple of 64."""
        return _round_up(self.max_prompt_length + self.max_completion_length)


@dataclass(eq=False)
class Ongoing:
    """A trajectory under way.

    Attributes:
      trajectory: its segments and turns so far.
      session: what it holds of the environment.
      number: its random stream.
      slot: where it is decoded, -1 before it is admitted.
      tokens, logprobs: of the open turn.
      pending: the stop id that ended the last turn; sampled, not in the cache yet.
      calls, results: of the last turn; a result is None until its tool returns.
      iterations: turns whose calls were executed.
    """

    trajectory: Trajectory
    session: Session
    number: int
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pending: int | None = None
    calls: list[ToolCall | MalformedCall] = field(default_factory=list)
    results: list[ToolResult | None] = field(default_factory=list)
    iterations: int = 0

    def room(self, limits: Limits) -> int:
        """Tokens that the completion may still take."""
        used = self.trajectory.completion_length + len(self.tokens)
        return limits.max_completion_length - used

    def budget(self, limits: Limits) -> int:
        """Tokens that the open turn may still take."""
        return min(self.room(limits), limits.max_turn_length - len(self.tokens))

    def take(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add sampled tokens to the open turn."""
        self.tokens += tokens.tolist()
        self.logprobs += logprobs.tolist()

    def close_turn(self, chat: Chat) -> str:
        """The open turn becomes a MODEL segment; returns its text."""
        tokens = np.asarray(self.tokens, np.int32)
        logprobs = np.asarray(self.logprobs, np.float32)
        text = chat.turn_text(self.tokens)
        self.trajectory.segments.append(Segment(Source.MODEL, tokens, logprobs))
        self.trajectory.turns.append(Turn(text))
        self.tokens, self.logprobs, self.pending = [], [], self.tokens[-1]
        return text

    def accept(
        self, calls: Sequence[ToolCall | MalformedCall], allowed: int
    ) -> list[ToolCall]:
        """Take over the calls of the last turn; returns those to run.

        The others are answered: malformed ones, and the first beyond `allowed`, which
        tells the model about the rest.
        """
        self.iterations += 1
        self.calls = list(calls[: allowed + 1])
        self.results = [_refusal(c, i, allowed) for i, c in enumerate(self.calls)]
        answers = zip(self.calls, self.results, strict=True)
        return [call for call, result in answers if result is None]

    def record(self, answers: Iterable[ToolResult]) -> list[str]:
        """Fill in the results of the calls that ran; returns the texts of all."""
        rest = iter(answers)
        results = [next(rest) if r is None else r for r in self.results]
        turn = self.trajectory.turns[-1]
        turn.calls = [
            _record(call, result)
            for call, result in zip(self.calls, results, strict=True)
        ]
        turn.final = next((r.output for r in results if r.final), None)
        faults = [r.output for r in results if r.status == "unavailable"]
        self.trajectory.fault = "; ".join(faults)
        self.calls, self.results = [], []
        return [result.output for result in results]

    @property
    def ended(self) -> str:
        """Why the last turn's results end the trajectory; "" when it goes on."""
        if self.trajectory.fault:
            return "fault"
        return "" if self.trajectory.turns[-1].final is None else "stop"

    def finish(self, stop: str) -> None:
        """Keep what the session leaves for the reward, and close it."""
        self.trajectory.stop = stop
        try:
            self.trajectory.state = getattr(self.session, "state", None)
        except Exception as error:  # of the user's objects
            self.trajectory.fault = describe(error)
        self.session.close()

    def observe(self, tokens: np.ndarray) -> None:
        """Append the tokens that answer the last turn."""
        self.trajectory.segments.append(Segment.given(Source.TOOL, tokens))


def _refusal(
    call: ToolCall | MalformedCall, index: int, allowed: int
) -> ToolResult | None:
    """The result of a call that is not executed, or None for one that is."""
    if index >= allowed:
        text = f"Not executed: at most {allowed} calls a turn."
        return ToolResult("invalid", text)
    if isinstance(call, MalformedCall):
        return ToolResult("malformed", f"Malformed tool call: {call.reason}")
    return None


def _record(call: ToolCall | MalformedCall, result: ToolResult) -> CallRecord:
    name, arguments = "", None
    if isinstance(call, ToolCall):
        name, arguments = call.name, call.arguments
    return CallRecord(name, arguments, result.status, result.output, result.seconds)


def _round_up(length: int) -> int:
    return -(-length // 64) * 64
