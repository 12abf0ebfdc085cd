"""Does a task need a tool? Each training task sampled with and without them.

`--mode=eval --config.eval.probe=true` samples every training task k times in either
way, as training samples (`rollout.temperature` and so on; k is `eval.num_generations`,
or with 1 the group size), and writes one line a task beside the data, or into the
workdir for generated and hub data:

    id, key, k, pass_rate_text, pass_rate_tool, needs_tool

A pass is what the environment calls correct. A sample that a tool's infrastructure
failed says nothing: it is left out, and so is a task without any other in one of the
ways. A task needs a tool if the tools raise its pass rate by at least a quarter: with
k = 8 that is two samples, less is chance. A task that is solved in neither way shows no
need. Without tools the prompts have no schemas,
and the environment's `text_prompt`, if it has one, in place of its `system_prompt`.
`data` reads the file again: `needs_tool` rows get the interaction bonus and count for
the floor, `data.pass_rate` leaves out what is known or hopeless.
"""

import copy
import dataclasses
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import data, report, setup
from grpo_jax.config import BadInput
from grpo_jax.metrics import json_text
from grpo_jax.rollout.engine import Engine
from grpo_jax.scoring import score_trajectories
from grpo_jax.setup import Job
from tools_env.protocol import Environment, Task, ToolCall, ToolResult

LOG = logging.getLogger(__name__)
NEED = 0.25  # least gain of the pass rate


def check(config: ConfigDict, mode: str) -> None:
    """Refuse `eval.probe` where it would do nothing, or not all."""
    if config.eval.probe and mode != "eval":
        raise BadInput(f"eval.probe belongs to --mode=eval, not to --mode={mode}")
    if config.eval.probe and config.data.pass_rate:
        raise BadInput("eval.probe measures all tasks: leave data.pass_rate at ()")
    if config.eval.probe and config.rollout.temperature == 0:
        raise BadInput("eval.probe with rollout.temperature=0: equal samples, no rate")


def run(
    config: ConfigDict,
    workdir: Path,
    job: Job,
    adapters: nnx.State,
    key: jax.Array,
    check: Callable[[], None],
) -> Path:
    """Probe every training task, print what came out, return the file."""
    number = config.eval.num_generations
    number = number if number > 1 else config.rollout.num_generations
    engines = {"text": _without_tools(job)}
    if job.environment.tools():
        engines["tool"] = job.engine
    size = config.train.prompts_per_step
    chunks = [job.train_tasks[i:][:size] for i in range(0, len(job.train_tasks), size)]
    progress = report.LiveProgress("probe", len(chunks))
    lines = []
    for step, tasks in enumerate(chunks, 1):
        rates = {}
        for arm, (name, engine) in enumerate(engines.items()):
            offered = (
                tasks if name == "tool" else [bare(t, job.environment) for t in tasks]
            )
            trajectories, _ = engine.collect(
                adapters,
                offered,
                num_generations=number,
                sampling=setup.make_sampling(config),
                key=jax.random.fold_in(jax.random.fold_in(key, arm), step),
                check=check,
            )
            score_trajectories(job.environment, job.rewards, trajectories)
            rates[name] = pass_rates(job.environment, trajectories)
        lines += records(tasks, number, rates)
        progress.step(step, {})
    progress.close()
    if len(lines) < len(job.train_tasks):
        missing = len(job.train_tasks) - len(lines)
        LOG.warning("%d tasks have no valid sample: tools failed them all", missing)
    if not lines:
        raise BadInput("eval.probe: no task has a valid sample, the tools failed them")
    path = data.probe_file(config.data) or workdir / "probe.jsonl"
    _write(path, lines)
    _print(path, lines)
    return path


def records(
    tasks: Sequence[Task], number: int, rates: dict[str, dict[int, float]]
) -> list[dict[str, Any]]:
    """A line of each task that has a rate in every arm, in order."""
    return [
        record(task, number, **{name: found[group] for name, found in rates.items()})
        for group, task in enumerate(tasks)
        if all(group in found for found in rates.values())
    ]


def record(
    task: Task, number: int, text: float, tool: float | None = None
) -> dict[str, Any]:
    """A task's line; `tool` is None where the environment has no tools."""
    line = {"id": task.id, "key": data.probe_key(task), "k": number}
    line["pass_rate_text"] = text
    if tool is not None:
        line["pass_rate_tool"] = tool
    line["needs_tool"] = tool is not None and tool - text >= NEED - 1e-9
    return line


def pass_rates(environment: Environment, trajectories: Sequence) -> dict[int, float]:
    """Share of a group's valid trajectories that are correct, where there are any."""
    passed = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.fault:
            continue
        seen = environment.prediction(trajectory.task, trajectory)
        passed[trajectory.group].append(bool(seen["correct"]))
    return {group: sum(found) / len(found) for group, found in passed.items()}


def _without_tools(job: Job) -> Engine:
    engine = copy.copy(job.engine)
    engine.chat = job.chat.with_tools([])
    engine.environment = _NoTools()
    engine.executes_tools = False
    return engine


class _NoTools:
    """What a rollout needs of an environment: sessions without anything to call."""

    def start(self, task: Task) -> "_NoTools":
        return self

    def call(self, call: ToolCall) -> ToolResult:
        return ToolResult("unknown", f"there is no tool {call.name!r} to call here")

    def close(self) -> None:
        return None


def bare(task: Task, environment: Environment) -> Task:
    """The task without tools of its own, and without being told of tools."""
    columns = {name: v for name, v in task.columns.items() if name != "tools"}
    prompt = list(task.prompt)
    told = getattr(environment, "system_prompt", None)
    if prompt and prompt[0] == {"role": "system", "content": told}:
        text = getattr(environment, "text_prompt", told)
        prompt[0] = {"role": "system", "content": text}
    return dataclasses.replace(task, prompt=prompt, columns=columns)


def _write(path: Path, lines: Sequence[dict]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(map(json_text, lines))
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be written: {error}") from error


def _print(path: Path, lines: Sequence[dict]) -> None:
    for name in ("pass_rate_text", "pass_rate_tool"):
        rates = [line[name] for line in lines if name in line]
        if not rates:
            continue
        never, always = (sum(r == end for r in rates) / len(rates) for end in (0, 1))
        print(
            f"{name:<16} {sum(rates) / len(rates):.3f}  never {never:.0%}, always "
            f"{always:.0%} of {len(rates)} tasks"
        )
    need = sum(line["needs_tool"] for line in lines) / len(lines)
    print(f"{'needs_tool':<16} {need:.3f}")
    print(path)
