"""Held-out evaluation: scores by category, tool accuracy, avg@k, pass@k, maj@k.

Every task is rolled out k times by the same engine that trains. Averages are over
tasks; 95 % intervals are Wilson's for shares and normal ones for means.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from grpo_jax.metrics import Means
from grpo_jax.rollout.engine import Engine
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.types import Trajectory
from tools_env.protocol import Environment, Task
from tools_env.terms import used_tools

Z = 1.959963984540054  # two-sided 95 %


def evaluate(
    engine: Engine,
    adapters: nnx.State,
    tasks: Sequence[Task],
    score: Callable[[Sequence[Trajectory]], None],
    *,
    num_generations: int,
    sampling: Sampling,
    key: jax.Array,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict, list[Trajectory]]:
    """Roll out every task and report; `score` sets each trajectory's reward."""
    trajectories, _ = engine.collect(
        adapters,
        tasks,
        num_generations=num_generations,
        sampling=sampling,
        key=key,
        check=check,
    )
    score(trajectories)
    return metrics(engine.environment, trajectories, num_generations), trajectories


def metrics(
    environment: Environment, trajectories: Sequence[Trajectory], k: int
) -> dict:
    """eval/* numbers, and eval/confusion[expected][called]."""
    means = Means()
    confusion: dict[str, Counter] = defaultdict(Counter)
    by_task: dict[int, list[tuple[bool, object]]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.fault:
            continue
        seen = environment.prediction(trajectory.task, trajectory)
        _add_one(means, trajectory, seen)
        by_task[trajectory.group].append((seen["correct"], seen["answer"]))
        if seen["expected"] is not None:
            confusion[seen["expected"]][seen["called"] or "none"] += 1
        if environment.tools():
            means.add("eval/call_rate", used_tools(trajectory))
    values = means.values() | at_k(list(by_task.values()), k)
    values["eval/num_tasks"] = len(by_task)
    if confusion:
        values["eval/confusion"] = {name: dict(row) for name, row in confusion.items()}
    return values


def can_select(name: str, k: int) -> bool:
    """Whether a metric of this name may choose the best checkpoint, the highest.

    Some categories or levels may turn out not to exist; k samples a task.
    """
    parts = name.split("/")
    match parts:
        case ["eval", "score" | "tool_accuracy" | "reasoning_score" | "accuracy", _]:
            return True
        case ["eval", "accuracy" | "call_rate"]:
            return True
        case ["eval", share] | ["eval", share, "low" | "high"]:
            return share in (f"avg@{k}", f"pass@{k}", f"maj@{k}")
    return False


def _add_one(means: Means, trajectory: Trajectory, seen: dict) -> None:
    columns = trajectory.task.columns
    names = ["all"] + [str(columns["category"])] if "category" in columns else ["all"]
    for name in names:
        if trajectory.reward.total is not None:
            means.add(f"eval/score/{name}", trajectory.reward.total)
        if seen["expected"] is not None:
            means.add(f"eval/tool_accuracy/{name}", seen["called"] == seen["expected"])
        if (reasoning := _reasoning(trajectory, seen)) is not None:
            means.add(f"eval/reasoning_score/{name}", reasoning)
    if "level" in columns:
        means.add(f"eval/accuracy/{columns['level']}", seen["correct"])
    means.add("eval/accuracy", seen["correct"])
    means.add("eval/clipped_ratio", trajectory.truncated)


def _reasoning(trajectory: Trajectory, seen: dict) -> float | None:
    """How good the reasoning is, whatever the tools: the environment's own judgement.

    Without one it is whether the answer is right where the expected tool was called and
    no call failed; None elsewhere.
    """
    if "reasoning" in seen:
        return seen["reasoning"]
    called_right = seen["expected"] in (None, seen["called"])
    if called_right and all(call.status == "ok" for call in trajectory.calls):
        return float(seen["correct"])
    return None


def at_k(tasks: Sequence[Sequence[tuple[bool, object]]], k: int) -> dict[str, float]:
    """avg@k, pass@k and maj@k with interval ends, from (correct, answer) pairs.

    pass@k: any of a task's k samples is right. maj@k: its most frequent answer is (ties
    go to the answer seen first; None, no answer, never wins unless nothing else is
    there).
    """
    if not tasks:
        return {}
    shares = [np.mean([correct for correct, _ in task]) for task in tasks]
    passed = [any(correct for correct, _ in task) for task in tasks]
    voted = [_majority(task) for task in tasks]
    values = {}
    for name, (mean, low, high) in {
        "avg": mean_interval(shares),
        "pass": wilson_interval(sum(passed), len(passed)),
        "maj": wilson_interval(sum(voted), len(voted)),
    }.items():
        values[f"eval/{name}@{k}"] = mean
        values[f"eval/{name}@{k}/low"] = low
        values[f"eval/{name}@{k}/high"] = high
    return values


def _majority(samples: Sequence[tuple[bool, object]]) -> bool:
    answers = Counter(answer for _, answer in samples if answer is not None)
    if not answers:
        return False
    winner = answers.most_common(1)[0][0]
    return any(correct for correct, answer in samples if answer == winner)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): normal 95 % interval of a mean, sample standard deviation."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = Z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def wilson_interval(hits: int, count: int) -> tuple[float, float, float]:
    """(share, low, high): Wilson's 95 % interval of a share."""
    share = hits / count
    scale = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2) / scale
    return share, centre - half, centre + half
