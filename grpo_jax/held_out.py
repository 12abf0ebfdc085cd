"""Held-out results of a run's adapters, in training and in mode eval."""

from collections.abc import Callable
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import evaluate, policy, probe, report, suites
from grpo_jax.checkpoints import Saved
from grpo_jax.config import BadInput
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.scoring import score_trajectories
from grpo_jax.setup import Job


def sampling(config: ConfigDict) -> Sampling:
    """How held-out answers are drawn."""
    return Sampling(float(config.eval.temperature))


def results(
    config: ConfigDict,
    job: Job,
    adapters: nnx.State,
    key: jax.Array,
    check: Callable[[], None],
) -> dict:
    """Held-out metrics of some adapters; {} when there are no held-out tasks."""
    if not job.eval_tasks:
        return {}
    values, _ = evaluate.evaluate(
        job.engine,
        adapters,
        job.eval_tasks,
        lambda rows: score_trajectories(job.environment, job.rewards, rows),
        num_generations=config.eval.num_generations,
        sampling=sampling(config),
        key=key,
        check=check,
    )
    return values


def check_best(config: ConfigDict, before: dict) -> None:
    """Refuse a `checkpoint.best` of a category or level that no task has."""
    best = config.checkpoint.best
    if best and best not in before:
        known = ", ".join(sorted(k for k in before if "/all" in k or "@" in k))
        raise BadInput(
            f"checkpoint.best='{best}' is no held-out metric of this run; some are: "
            f"{known}"
        )


def run(
    config: ConfigDict,
    workdir: Path,
    job: Job,
    saved: Saved | None,
    key: jax.Array,
    check: Callable[[], None],
) -> None:
    """Mode eval: a checkpoint, or without one the starting adapters, held out."""
    adapters = job.adapters
    if saved is not None:
        saved, adapters = policy.read(config, workdir, saved, adapters)
    if config.eval.probe or config.eval.suite:
        part = probe if config.eval.probe else suites
        part.run(config, workdir, job, adapters, key, check)
        return
    values = results(config, job, adapters, key, check)
    if not values:
        raise BadInput("--mode=eval without held-out tasks: see data.eval_source")
    step = saved.step if saved else None
    report.write_eval(workdir / "eval.json", values, step=step)
