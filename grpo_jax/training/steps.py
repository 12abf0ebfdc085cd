"""StepPO's steps (arXiv 2604.18401), and what a critic makes of their rewards.

A step is a run of tokens that the model sampled, never what a tool said. In the paper
it is a whole turn. The collapse article counts thoughts and calls apart: turns are then
cut wherever the role of their tokens changes (`rollout.roles`), and what a turn earned
belongs to its last step.
"""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax import objective
from grpo_jax.types import Source, Trajectory

Router = Callable[[np.ndarray], np.ndarray]


def token_steps(trajectory: Trajectory, router: Router | None = None) -> np.ndarray:
    """The step of each MODEL and TOOL token from 0 on, -1 for TOOL: i64 [tokens].

    With a `router`, which tells the roles of a turn's tokens, a turn is cut by them.
    """
    pieces, count = [np.zeros(0, np.int64)], 0
    for segment in trajectory.segments[1:]:
        steps = np.full(len(segment.tokens), -1)
        if segment.source is Source.MODEL:
            roles = np.zeros(len(steps)) if router is None else router(segment.tokens)
            cuts = np.diff(roles, prepend=roles[:1]) != 0
            steps = count + np.cumsum(cuts)
            count += cuts.sum() + 1
        pieces.append(steps)
    return np.concatenate(pieces)


def first_tokens(steps: np.ndarray) -> np.ndarray:
    """Where the steps of `token_steps` begin."""
    return np.flatnonzero((steps >= 0) & (np.diff(steps, prepend=-1) != 0))


def turn_ends(trajectory: Trajectory) -> np.ndarray:
    """The last token of every turn, counted as in `token_steps`."""
    segments = trajectory.segments[1:]
    ends = np.cumsum([len(segment.tokens) for segment in segments]) - 1
    return ends[[segment.source is Source.MODEL for segment in segments]]


def judge(
    trajectories: Sequence[Trajectory],
    earned: np.ndarray,
    use: np.ndarray,
    values: Sequence[np.ndarray],
    *,
    router: Router | None,
    **options,
) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """Per trajectory the fields of an `Example` that concern steps, and metrics.

    `earned` [N,M] is what each turn earned, `use` [N] which trajectories count,
    `values` the critic's, before each MODEL and TOOL token; `options` those of
    `objective.step_advantages`.
    """
    steps = [token_steps(one, router) for one in trajectories]
    starts = [first_tokens(own) for own in steps]
    size = earned.shape[1]
    while size < max(map(len, starts)):  # few shapes: each compiles a program
        size *= 2
    rewards, before = np.zeros((2, len(steps), size), np.float32)
    mask = np.zeros(rewards.shape, bool)
    for i, one in enumerate(trajectories):
        last = steps[i][turn_ends(one)]
        rewards[i, last] = earned[i, : len(last)]
        before[i, : len(starts[i])] = values[i][starts[i]]
        mask[i, : len(starts[i])] = use[i]
    advantages, returns = map(
        np.asarray, objective.step_advantages(rewards, before, mask, **options)
    )
    explained = objective.explained_variance(before, returns, mask)
    metrics = {"critic/explained_variance": float(explained)}
    if mask.any():
        metrics["critic/value_mean"] = float(before[mask].mean())
        metrics["critic/return_mean"] = float(returns[mask].mean())
    names = ("advantages", "values", "returns")
    fields = [
        dict(zip(names, (x[: len(own)] for x in rows), strict=True)) | {"steps": of}
        for *rows, own, of in zip(
            advantages, before, returns, starts, steps, strict=True
        )
    ]
    return fields, metrics
