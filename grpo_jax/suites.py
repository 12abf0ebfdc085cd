"""Other people's tests: `--mode=eval --config.eval.suite=NAME`.

The policy of the workdir (or `lora.init_from`, or the model as it is) rolls out the
suite's tasks with `eval.temperature`, `eval.num_generations` times each, and leaves

    eval_KIND.json     the numbers: eval/* as in any evaluation, and the suite's own
    eval_KIND.jsonl    a line a trajectory, as in rollouts/
    bfcl/BFCL_v4_SET_score.json   bfcl: the leaderboard's own score files

`bfcl` is the Berkeley Function Calling Leaderboard (`tools_env.bfcl`): bfcl/SET are the
shares that its checker finds right, bfcl/non_live_ast its summary, when all sets ran.
`reasoning_gym:SET` are problems of that package with the Python tool, judged by the
set's own scorer; accuracy by set and by level (`tools_env.reasoning`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import evaluate, health, report
from grpo_jax.config import BadInput
from grpo_jax.environments import suite_parts
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.scoring import score_trajectories
from grpo_jax.setup import Job
from grpo_jax.types import Trajectory
from tools_env import bfcl


def check(config: ConfigDict, mode: str) -> None:
    """Refuse `eval.suite` where it would do nothing, and names that do not exist."""
    keys = config.eval
    if keys.limit and not keys.suite:
        raise BadInput(f"eval.limit={keys.limit} counts tasks of eval.suite: set it")
    if not keys.suite:
        return
    if mode != "eval":
        raise BadInput(f"eval.suite belongs to --mode=eval, not to --mode={mode}")
    if keys.probe:
        raise BadInput("eval.probe and eval.suite are two evaluations: set one of them")
    suite_parts(keys.suite)


def run(
    config: ConfigDict,
    workdir: Path,
    job: Job,
    adapters: nnx.State,
    key: jax.Array,
    check: Callable[[], None],
) -> None:
    """Roll the suite out, print its numbers and write the files."""
    kind, _ = suite_parts(config.eval.suite)
    values, trajectories = evaluate.evaluate(
        job.engine,
        adapters,
        job.eval_tasks,
        lambda rows: score_trajectories(job.environment, None, rows),
        num_generations=config.eval.num_generations,
        sampling=Sampling(float(config.eval.temperature)),
        key=key,
        check=check,
    )
    if kind == "bfcl":
        values |= _leaderboard(values, trajectories)
        _write_scores(workdir / "bfcl", job.environment, trajectories)
    path = workdir / f"eval_{kind}.json"
    health.write_rollouts(path.with_suffix(".jsonl"), trajectories, job.chat.decode)
    report.write_eval(path, values)


def _leaderboard(values: dict, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The leaderboard's columns, and the share of answers with an unreadable call."""
    scores = {
        name: values[f"eval/score/{name}"]
        for name in bfcl.SETS
        if f"eval/score/{name}" in values
    }
    numbers = bfcl.leaderboard_numbers(scores)
    unread = [t.reward.parts["malformed"] for t in trajectories]
    numbers["malformed"] = sum(unread) / len(unread)
    return {f"bfcl/{name}": value for name, value in numbers.items()}


def _write_scores(
    folder: Path, environment: bfcl.Leaderboard, trajectories: Sequence[Trajectory]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(t.task.columns["category"] for t in trajectories):
        lines = bfcl.score_lines(environment, name, trajectories)
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
        (folder / f"BFCL_v4_{name}_score.json").write_text(text, encoding="utf-8")
