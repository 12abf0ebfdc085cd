"""Reward terms that this project brings, added to the outcome of a trajectory.

The outcome is the environment's own reward or that of the user's functions. `Shaping`
adds, each where the config asks for it and in this order:

* stages (progressive reward shaping, arXiv 2512.07478): nothing for what cannot be
  read, a tenth of the maximum for readable text without an answer, the rest by the
  outcome. The paper's stages are not public; these are this project's own definition.
* failure bonus (ReTool, arXiv 2504.11536, as in verl's recipe): a failed trajectory
  earns `failed_score` of the maximum in place of its outcome, the more turns it made
  with tools the less bad; a success earns what it did.
* similarity (GTPO, arXiv 2511.14846): a failed trajectory gets alpha times the mean
  similarity of its code to that of the group's passing ones. The paper compares text
  embeddings; the default here is the overlap of code tokens, which needs no model.
* turn terms: `parsed`, `schema_valid` and `executed`, the shares of a turn's calls that
  could be read, that fit a tool's schema, that ran without an error. A trajectory's sum
  is the mean over its turns with calls: at most 1 however many it makes, and 0 without
  any, so that a term pays neither for many calls nor for broken ones.
* overuse: a penalty, once, for a trajectory that calls a tool uncalled for.
* interaction: a bonus, once, for at least one executed call on a task that needs one.

A trajectory without a reward stays without one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools_env.protocol import EXECUTED, CallRecord, Environment, Reward, Task

READABLE = 0.1  # share of the maximum for a readable text without an answer
_TOKEN = re.compile(r"\w+|[^\w\s]")
_NEAR = 1e-6  # two rewards are the same


def parsed(trajectories: Sequence[Any]) -> list[list[float]]:
    """Share of a turn's calls that could be read, over the number of turns with calls.

    One value a turn; so are `schema_valid` and `executed`.
    """
    return [_per_turn(t, lambda call: call.status != "malformed") for t in trajectories]


def schema_valid(trajectories: Sequence[Any]) -> list[list[float]]:
    """The same for calls of a known tool with arguments that fit its schema."""
    return [_per_turn(t, lambda call: call.status in EXECUTED) for t in trajectories]


def executed(trajectories: Sequence[Any]) -> list[list[float]]:
    """The same for calls that ran without an error."""
    return [_per_turn(t, lambda call: call.status == "ok") for t in trajectories]


TURN_TERMS = {"parsed": parsed, "schema_valid": schema_valid, "executed": executed}


def used_tools(trajectory: Any) -> bool:
    """At least one call was executed."""
    return any(call.status in EXECUTED for call in trajectory.calls)


def failed_score(num_turns: int) -> float:
    """verl's score of a wrong answer for ReTool: min(-.6, -1 + .1 (num_turns - 2) / 2).

    `num_turns` counts the messages, the question among them: 2 without a call, 2 more
    for each turn with calls and its results. 2, 4, 6, 10, 16 give -1, -.9, -.8, -.6,
    -.6. A right answer's is 1.
    """
    return min(-0.6, -1.0 + 0.1 * (num_turns - 2) / 2)


def needs_tool(task: Task, has_tools: bool = True) -> bool:
    """The task's column `needs_tool`; without one, whether there are tools at all."""
    stated = task.columns.get("needs_tool")
    return has_tools if stated is None else has_tools and bool(stated)


def code_overlap(one: str, other: str) -> float:
    """Tokens that two programs share over those that either has, counted: 0 to 1."""
    a, b = Counter(_TOKEN.findall(one)), Counter(_TOKEN.findall(other))
    return (a & b).total() / max((a | b).total(), 1)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of two embeddings, at least 0: unlike code costs nothing."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = math.hypot(*one) * math.hypot(*other)
    return max(dot / lengths, 0.0) if lengths else 0.0


def code(trajectory: Any) -> str:
    """The text that all executed calls of a trajectory brought, in order."""
    values = [
        value
        for call in trajectory.calls
        if call.status in EXECUTED
        for value in (call.arguments or {}).values()
    ]
    return "\n".join(
        value if isinstance(value, str) else str(value) for value in values
    )


@dataclasses.dataclass(frozen=True)
class Overuse:
    """`penalty` for calling `tool` on a task for which `uncalled_for(task)` is true."""

    tool: str
    uncalled_for: Callable[[Task], bool]
    penalty: float


@dataclasses.dataclass(frozen=True)
class Shaping:
    """The terms of a run.

    Attributes:
      environment: whose tools and predictions count.
      outcome: the most that an outcome can earn; None: not declared.
      maximum: the most that outcome and static terms can earn; None: not declared.
      weights: of the turn terms, by name.
      overuse: the penalties.
      stages: grade the outcome by stages.
      failure_bonus: failures earn `failed_score`.
      similarity: alpha of the shaping of failed trajectories; 0: none.
      embed: texts to vectors; None: overlap of code tokens.
      interaction: there is a bonus, which varies and comes with every call.
    """

    environment: Environment
    outcome: float | None = None
    maximum: float | None = None
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    overuse: tuple[Overuse, ...] = ()
    stages: bool = False
    failure_bonus: bool = False
    similarity: float = 0.0
    embed: Callable[[Sequence[str]], Sequence[Sequence[float]]] | None = None
    interaction: bool = False

    def apply(self, trajectory: Any, bonus: float = 0.0) -> Reward:
        """The reward of a scored trajectory with every term but similarity."""
        task, reward = trajectory.task, trajectory.reward
        if reward.total is None:
            return reward
        needed = needs_tool(task, bool(self.environment.tools()))
        passed = None
        if self.outcome is not None:
            passed = reward.total >= self.outcome - _NEAR
        maximum = None if self.maximum is None else self.maximum + bonus * needed
        parts = reward.parts
        if self._adds:  # else the total says it
            parts = parts | {"outcome": reward.total}
        reward = dataclasses.replace(
            reward, maximum=maximum, passed=passed, parts=parts
        )
        if self.stages:
            reward = self._staged(trajectory, reward)
        if self.failure_bonus and not passed:
            calling = sum(bool(turn.calls) for turn in trajectory.turns)
            score = failed_score(2 + 2 * calling)
            parts = reward.parts | {"failed_score": score}
            reward = dataclasses.replace(
                reward, total=self.outcome * score, parts=parts, turns=None
            )
        for name, weight in self.weights.items():
            (values,) = TURN_TERMS[name]([trajectory])
            reward = _add(reward, name, values, weight)
        for rule in self.overuse:
            reward = self._overuse(trajectory, reward, rule)
        if self.interaction and needed:
            values = _first(trajectory, lambda call: call.status in EXECUTED)
            reward = _add(reward, "interaction", values, bonus)
        return reward

    @property
    def _adds(self) -> bool:
        terms = (self.weights, self.overuse, self.stages, self.similarity)
        return any(terms) or self.interaction or self.failure_bonus

    def shape_failures(self, trajectories: Sequence[Any]) -> None:
        """Give failed trajectories the similarity term; `passed` must be known."""
        groups = defaultdict(list)
        for trajectory in trajectories:
            if trajectory.reward.passed is not None:
                groups[trajectory.group].append(trajectory)
        for group in groups.values():
            passing = [t for t in group if t.reward.passed]
            failed = [t for t in group if not t.reward.passed]
            if passing and failed:
                self._shape(failed, passing)

    def _shape(self, failed: Sequence[Any], passing: Sequence[Any]) -> None:
        texts = [code(t) for t in (*failed, *passing)]
        compare: Callable[[Any, Any], float] = code_overlap
        if self.embed is not None:
            texts, compare = list(self.embed(texts)), cosine
        for trajectory, text in zip(failed, texts, strict=False):
            likeness = [compare(text, other) for other in texts[len(failed) :]]
            value = math.fsum(likeness) / len(passing)
            if not math.isfinite(value):
                raise ValueError(f"the similarity is {value}")
            reward = trajectory.reward
            total = reward.total + self.similarity * value
            parts = reward.parts | {"similarity": value}
            trajectory.reward = dataclasses.replace(reward, total=total, parts=parts)

    def _staged(self, trajectory: Any, reward: Reward) -> Reward:
        readable = getattr(self.environment, "readable", _readable)(trajectory)
        seen = self.environment.prediction(trajectory.task, trajectory)
        share = 0.0
        if readable:
            quality = min(max(reward.total / self.outcome, 0.0), 1.0)
            answered = seen["answer"] is not None
            share = READABLE + (1 - READABLE) * quality * answered
        parts = reward.parts | {"readable": float(readable)}
        total = self.outcome * share
        return dataclasses.replace(reward, total=total, parts=parts, turns=None)

    def _overuse(self, trajectory: Any, reward: Reward, rule: Overuse) -> Reward:
        if not any(call.name == rule.tool for call in trajectory.calls):
            seen = self.environment.prediction(trajectory.task, trajectory)
            values = [0.0] * len(trajectory.turns)
            values[-1] = float(seen["called"] == rule.tool)
        else:
            values = _first(trajectory, lambda call: call.name == rule.tool)
        if any(values) and not rule.uncalled_for(trajectory.task):
            values = [0.0] * len(values)
        return _add(reward, f"overuse_{rule.tool}", values, -rule.penalty)


def _per_turn(trajectory: Any, good: Callable[[CallRecord], bool]) -> list[float]:
    calling = max(sum(bool(turn.calls) for turn in trajectory.turns), 1)
    return [
        sum(map(good, turn.calls)) / (max(len(turn.calls), 1) * calling)
        for turn in trajectory.turns
    ]


def _first(trajectory: Any, chosen: Callable[[CallRecord], bool]) -> list[float]:
    """1 at the first turn with a chosen call, 0 at the others."""
    having = [any(map(chosen, turn.calls)) for turn in trajectory.turns]
    return [float(has and not any(having[:i])) for i, has in enumerate(having)]


def _add(reward: Reward, name: str, values: list[float], weight: float) -> Reward:
    value = math.fsum(values)
    turns = reward.turns or [0.0] * len(values)
    return dataclasses.replace(
        reward,
        total=reward.total + weight * value,
        parts=reward.parts | {name: value},
        turns=[a + weight * b for a, b in zip(turns, values, strict=True)],
    )


def _readable(trajectory: Any) -> bool:
    """Some text, and no call that could not be read."""
    broken = any(call.status == "malformed" for call in trajectory.calls)
    return bool(trajectory.answer.strip()) and not broken
