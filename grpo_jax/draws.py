"""Stages 1 to 3 of a step: tasks, scored rollouts, and which of them are learned from.

A group that a filter of the objective would drop teaches nothing. DAPO (arXiv
2503.14476) draws further tasks in its place until the batch is full; here exactly as
many as are missing, at most `objective.max_draws` rollouts a step. What is still
missing then stays missing: the batch is filled up with groups that carry no loss.

VSPO (arXiv 2512.07478) puts tasks of high value in their place instead, value
V = (R_max - mean) * std of the task's rewards. The paper's summary is all that was
found. That the tasks of this step's other groups are sampled again, and that the
advantages of a task's n-th repeat are divided by 1 + n ("smoothing"), is this project's
own definition.

Every draw depends on the task cursor and on what was drawn before alone, so that a
resumed run draws what the uninterrupted one would have drawn.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from grpo_jax import health
from grpo_jax.data import TaskStream, probe_key
from grpo_jax.metrics import Means
from grpo_jax.rollout.engine import Counters
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.scoring import score_trajectories
from grpo_jax.setup import Job
from grpo_jax.training.assign import solved
from grpo_jax.types import Trajectory
from grpo_jax.watch import timed
from tools_env.protocol import Task

Group = list[Trajectory]


@dataclasses.dataclass
class Rollouts:
    """The rollouts of one step under one policy, and what they cost.

    Attributes:
      job: engine, environment and rewards.
      adapters: of the policy.
      num_generations: members of a group.
      sampling: temperature, top-k, top-p.
      key: of the step; trajectory number i of the step draws from fold_in(key, i).
      bonus: the interaction weight.
      check: called between bursts; may raise to give the step up.
      counters: tokens of the engine, and its waits for tools.
      times: seconds by stage.
      scored: means of what scoring counts.
    """

    job: Job
    adapters: nnx.State
    num_generations: int
    sampling: Sampling
    key: jax.Array
    bonus: float
    check: Callable[[], None]
    counters: Counters = dataclasses.field(default_factory=Counters)
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    scored: Means = dataclasses.field(default_factory=Means)

    def sample(self, tasks: list[Task], first: int) -> list[Group]:
        """A scored group of every task; the first is group `first` of the step."""
        job, size = self.job, self.num_generations
        with timed(self.times, "rollout"):
            trajectories, counters = job.engine.collect(
                self.adapters,
                tasks,
                num_generations=size,
                sampling=self.sampling,
                key=self.key,
                first=first * size,
                check=self.check,
            )
        self.counters.add(counters)
        with timed(self.times, "reward"):
            values = score_trajectories(
                *(job.environment, job.rewards, trajectories, job.shaping),
                bonus=self.bonus,
            )
        for name, share in values.items():
            self.scored.add(name, share * len(trajectories), len(trajectories))
        for trajectory in trajectories:
            trajectory.group += first
        return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict:
        """Of all that was drawn: rewards, lengths, tools, cost."""
        environment, decode = self.job.environment, self.job.chat.decode
        tools = environment.tools()
        waited = {"time/tools": self.counters.waited_s} if tools else {}
        seconds = self.times["time/rollout"]
        return {
            **self.scored.values(),
            **health.rollout_metrics(trajectories, executes_tools=bool(tools)),
            **health.prompt_metrics(trajectories, tools, decode),
            **getattr(environment, "metrics", dict)(),
            "rollout/prefill_tokens": self.counters.prefill_tokens,
            "rollout/tokens_per_second": self.counters.sampled_tokens / seconds,
            **self.times,
            **waited,
        }


def draw(
    stream: TaskStream,
    sample: Callable[[list[Task], int], list[Group]],
    teaches: Callable[[Group], bool],
    *,
    wanted: int,
    most: int,
    by_value: bool = False,
) -> tuple[list[Group], list[Group], dict[str, float]]:
    """Draw until `wanted` groups teach something, in at most `most` rollouts.

    `sample(tasks, first)` rolls out a scored group of every task, the first of them
    being group number `first` of the step. Returns all groups; the `wanted` to learn
    from, in the order drawn, filled up with groups that teach nothing; and metrics,
    none where `most` is 1.
    """
    groups: list[Group] = []
    useful: list[bool] = []
    draws = 0
    while draws < most and sum(useful) < wanted:
        missing = wanted - sum(useful)
        good = [group for group, good in zip(groups, useful, strict=True) if good]
        if by_value and good:
            repeated = most_valuable(good, missing)
        else:
            repeated = [(task, 0) for task in stream.next(missing)]
        fresh = sample([task for task, _ in repeated], len(groups))
        for group, (_, repeat) in zip(fresh, repeated, strict=True):
            for trajectory in group:
                trajectory.repeat = repeat
        groups += fresh
        useful += map(teaches, fresh)
        draws += 1
    metrics = {
        "filter/draws": float(draws),
        "filter/drawn_groups": float(len(groups)),
        "filter/dropped_groups": float(len(groups) - sum(useful)),
    }
    return groups, _batch(groups, useful, wanted), metrics if most > 1 else {}


def pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """By `data.probe_key`, the share of a task's latest group that solved it.

    `data` reads them back, so that a later run can leave out what this one learned.
    """
    rates = {}
    for group in groups:
        judged = [solved(t) for t in group if t.reward.total is not None]
        if judged:
            rates[probe_key(group[0].task)] = sum(judged) / len(judged)
    return rates


def _batch(groups: list[Group], useful: list[bool], wanted: int) -> list[Group]:
    """`wanted` groups: those that teach, then others, in the order drawn."""
    first = sorted(range(len(groups)), key=lambda i: (not useful[i], i))[:wanted]
    return [groups[i] for i in sorted(first)]


def most_valuable(groups: Sequence[Group], number: int) -> list[tuple[Task, int]]:
    """`number` tasks of `groups` to sample again, each with its count of repeats.

    One at a time the task with the largest V / (1 + repeats so far); of equal ones the
    first. A task's value is that of its latest group.
    """
    keys = [probe_key(group[0].task) for group in groups]  # ids may be shared
    pairs = [(value(group), group[0].task) for group in groups]
    values = dict(zip(keys, pairs, strict=True))
    repeats = Counter()
    for task, group in zip(keys, groups, strict=True):
        repeats[task] = max(repeats[task], group[0].repeat)
    chosen = []
    for _ in range(number):
        best = max(values, key=lambda i: values[i][0] / (1 + repeats[i]))
        repeats[best] += 1
        chosen.append((values[best][1], repeats[best]))
    return chosen


def value(group: Group, ddof: int = 0) -> float:
    """VSPO's V = (R_max - mean) * std of a group's rewards.

    The population deviation by default, as no source says which one; `ddof` 1 makes
    every value of equally large groups larger by the same factor, so that the order in
    which tasks are chosen is the same.

    R_max is 1 if none is declared. At its largest, for a binary reward, where a quarter
    of the group succeeds.
    """
    scored = [t.reward for t in group if t.reward.total is not None]
    if not scored:
        return 0.0
    totals = [reward.total for reward in scored]
    best = 1.0 if scored[0].maximum is None else scored[0].maximum
    return float((best - np.mean(totals)) * np.std(totals, ddof=ddof))
