"""Trajectories to metrics: rewards, lengths, and whether the policy uses its tools.

Names follow TRL where it has one (design.md section 5). Means are over trajectories,
or over calls and turns where the name says so; a value without data is absent.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from grpo_jax.metrics import Means, json_text
from grpo_jax.types import Source, Trajectory
from tools_env.protocol import EXECUTED, INVALID
from tools_env.terms import needs_tool


def rollout_metrics(
    trajectories: Sequence[Trajectory], *, executes_tools: bool
) -> dict[str, float]:
    """Metrics of one rollout batch, every trajectory scored."""
    values = reward_metrics(trajectories) | length_metrics(trajectories)
    values |= likelihood_metrics(trajectories)
    if executes_tools:
        values |= tool_metrics(trajectories)
    return values


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """reward, reward_std (within groups), frac_reward_zero_std, the terms' means."""
    means = Means()
    groups: dict[int, list[float]] = {}
    gaps: list[float] = []
    for trajectory in trajectories:
        reward = trajectory.reward
        for name, part in reward.parts.items():
            if part is not None:
                means.add(f"rewards/{name}/mean", part)
        means.add("rewards/abstained", reward.total is None)
        if reward.total is not None:
            means.add("reward", reward.total)
            groups.setdefault(trajectory.group, []).append(reward.total)
            if reward.maximum is not None:
                gaps.append(reward.maximum - reward.total)
            if (category := trajectory.task.columns.get("category")) is not None:
                means.add(f"category/{category}", reward.total)
    for rewards in groups.values():
        if len(rewards) > 1:
            spread = float(np.std(rewards, ddof=1))
            means.add("reward_std", spread)
            flat = np.ptp(rewards) <= 1e-6 * max(1.0, abs(np.mean(rewards)))
            means.add("frac_reward_zero_std", flat)
    values = means.values()
    if gaps:
        near = min(gaps)
        tied = [abs(gap - near) <= 1e-6 * max(1.0, abs(near)) for gap in gaps]
        values |= {"reward_gap": near, "frac_reward_best": float(np.mean(tied))}
    return values


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [t.completion_length for t in trajectories]
    if not lengths:
        return {}
    return {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": float(
            np.mean([t.truncated for t in trajectories])
        ),
    }


def likelihood_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of correct trajectories the sampler's -log p a token, by turn from 1; groups
    whose members are all the same tokens."""
    means = Means()
    groups: dict[int, list[bytes]] = {}
    for trajectory in trajectories:
        sampled = [s for s in trajectory.segments if s.source is Source.MODEL]
        written = b" ".join(segment.tokens.tobytes() for segment in sampled)
        groups.setdefault(trajectory.group, []).append(written)
        if not trajectory.reward.passed:
            continue
        for turn, segment in enumerate(sampled, 1):
            finite = segment.logprobs[np.isfinite(segment.logprobs)]
            name = f"lld/nll_correct_by_turn/{turn}"
            means.add(name, -finite.sum(dtype=np.float64), len(finite))
    for members in groups.values():
        if len(members) > 1:
            means.add("frac_group_identical", len(set(members)) == 1)
    return means.values()


def prompt_metrics(
    trajectories: Sequence[Trajectory],
    tools: Sequence[dict],
    decode: Callable[[list[int]], str],
) -> dict[str, float]:
    """tools/in_prompt: share of groups whose prompt names a tool, where there are."""
    means = Means()
    names = [tool["function"]["name"] for tool in tools]
    prompts = {trajectory.group: trajectory.prompt for trajectory in trajectories}
    for prompt in prompts.values():
        text = decode(prompt.tolist())
        if names:
            means.add("tools/in_prompt", any(name in text for name in names))
    return means.values()


def tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Call rates of the batch; `tools/call_rate` is the collapse alarm's statistic."""
    means = Means()
    split: dict[bool, list[float]] = {True: [], False: []}
    for trajectory in trajectories:
        calls = trajectory.calls
        executed = [call for call in calls if call.status in EXECUTED]
        means.add("tools/call_rate", bool(executed))
        if needs_tool(trajectory.task):
            means.add("interaction/call_rate", bool(executed))
        means.add("tools/fault_rate", bool(trajectory.fault))
        means.add("tools/call_frequency", len(executed))
        means.add("tools/turns_mean", len(trajectory.turns))
        failed = sum(call.status != "ok" for call in executed)
        late = sum(call.status == "timeout" for call in executed)
        broken = sum(call.status == "malformed" for call in calls)
        invalid = sum(call.status in INVALID for call in calls)
        means.add("tools/failure_frequency", failed, len(executed))
        means.add("tools/timeout_frequency", late, len(executed))
        means.add("tools/malformed_frequency", broken, len(calls))
        means.add("tools/invalid_frequency", invalid, len(calls))
        if trajectory.reward.total is not None:
            split[bool(executed)].append(trajectory.reward.total)
    values = means.values()
    for used, name in ((True, "with_tools"), (False, "without_tools")):
        if len(split[used]) > 1:
            values[f"reward_std/{name}"] = float(np.std(split[used], ddof=1))
    return values


def write_rollouts(
    path: Path, trajectories: Sequence[Trajectory], decode: Callable[[list[int]], str]
) -> None:
    """One strict JSON line a trajectory; `decode` turns ids to text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json_text(record(trajectory, decode)))


def _strict(number: np.floating) -> float | None:
    """As strict JSON has it: null stands for what is not finite."""
    return float(number) if np.isfinite(number) else None


def record(trajectory: Trajectory, decode) -> dict:
    """A trajectory as a line of the rollouts file; `decode` turns ids to text."""
    return {
        "task_id": trajectory.task.id,
        "group": trajectory.group,
        "segments": [
            {
                "source": segment.source.value,
                "text": decode(segment.tokens.tolist()),
                "tokens": segment.tokens.tolist(),
                "logprobs": [_strict(x) for x in segment.logprobs]
                if segment.source is Source.MODEL
                else [],
            }
            for segment in trajectory.segments
        ],
        "calls": [
            {
                "name": call.name,
                "arguments": call.arguments,
                "status": call.status,
                "result": call.result,
            }
            for call in trajectory.calls
        ],
        "rewards": trajectory.reward.parts,
        "reward": trajectory.reward.total,
        "stop": trajectory.stop,
    }
