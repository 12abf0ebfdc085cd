"""Tasks from a generator, a file or the hub, and the stream that feeds the trainer.

Stage 1 of a step. `rows` says what a row of a user's file holds; a bad one is named
with its file and line, and skipped, or ends the run under `data.strict`.

Prompts are never cut: `fit_prompts` drops what is longer than its budget. The order of
an epoch depends on (seed, epoch) alone and a `TaskStream` is a single counter, so that
a resumed run draws exactly what the uninterrupted one would have drawn.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from grpo_jax import rows
from grpo_jax.bounds import GENERATORS
from grpo_jax.config import BadInput
from grpo_jax.rollout.chat import Chat
from tools_env import fund, reasoning
from tools_env.protocol import Task

LOG = logging.getLogger(__name__)
PROBED = ("pass_rate_text", "pass_rate_tool", "needs_tool")
LEARNED = "pass_rate_train"  # column: share of its latest group in an earlier run
_SHOWN = 5  # bad rows that are named one by one


def load_tasks(config: ConfigDict, split: str, environment: Any = None) -> list[Task]:
    """Return the tasks of `split` ("train" or "eval").

    `data.eval_source` gives the held-out tasks, or else `data.source` does: a generator
    makes others, of a file up to a fifth of the rows, spread by hash, stay out of
    training. An environment's `needed_columns`, if it has any, must be in every row.
    Training tasks get the results of a probe, if there are any, and are filtered by
    `data.pass_rate`. Raises BadInput for a source that is missing, unreadable, or has
    no good row.
    """
    tasks, number = _split_tasks(config.data, split, environment)
    if split == "train" and not config.eval.probe:
        tasks = with_pass_rates(_with_probe(tasks, config.data), config.data.pass_rate)
    if split == "train" and 0 < number < len(tasks):
        LOG.info("data.num_tasks=%d: using %d of %d", number, number, len(tasks))
    return tasks[:number] if number or split == "eval" else tasks


def _split_tasks(
    data: ConfigDict, split: str, environment: Any
) -> tuple[list[Task], int]:
    """Every task of a split, and how many of them are wanted (0: all)."""
    held_out = split == "eval"
    shared = not data.eval_source
    source = data.eval_source if held_out and not shared else data.source
    number = data.num_eval_tasks if held_out else data.num_tasks
    if source in GENERATORS:
        made = _generate(source, data, number, held_out)
        return made, len(made)  # repeats of data.oversample included
    if source == "environment":
        tasks, alike = _own_tasks(environment, split)
        shared = shared and alike
    else:
        needed = getattr(environment, "needed_columns", ())
        tasks = read_tasks(source, data.strict, needed, "train" if shared else split)
    if shared:
        apart = _held_out(len(tasks), data.num_eval_tasks)
        tasks = [task for i, task in enumerate(tasks) if (i in apart) == held_out]
    return tasks, number


def _own_tasks(environment: Any, split: str) -> tuple[list[Task], bool]:
    """An environment's own tasks of a split, and whether both splits share them."""
    if not hasattr(environment, "tasks"):
        raise BadInput("data.source='environment': this environment brings no tasks")
    try:
        held_out = environment.tasks("eval")
        tasks = held_out if split == "eval" and held_out else environment.tasks("train")
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"data.source='environment': {error}") from error
    if not tasks:
        raise BadInput(f"data.source='environment' has no tasks to {split}")
    return tasks, not held_out


def probe_file(data: ConfigDict) -> Path | None:
    """Where the probe of `data.source` lies; None for data that lie nowhere."""
    if data.probe:
        return Path(data.probe)
    path = Path(data.source)
    return path.with_suffix(".probe.jsonl") if path.is_file() else None


def probe_key(task: Task) -> str:
    """Hash of what a probe was about, whatever system message it began with."""
    asked = [message for message in task.prompt if message["role"] != "system"]
    return _digest(json.dumps([task.id, asked], sort_keys=True, default=str)).hex()[:16]


def with_pass_rates(tasks: list[Task], limits: Sequence[float]) -> list[Task]:
    """Keep the tasks whose pass rate is within `limits` (low, high); () keeps all.

    The rate is that of an earlier run, else of a probe with tools, else without. A task
    without any is left out.
    """
    if not limits:
        return tasks
    low, high = limits
    order = (LEARNED, "pass_rate_tool", "pass_rate_text")
    rates = [
        next((task.columns[name] for name in order if name in task.columns), None)
        for task in tasks
    ]
    for task, rate in zip(tasks, rates, strict=True):
        if rate is not None and not isinstance(rate, int | float):
            raise BadInput(f"task {task.id}: a pass rate is a number; got {rate!r}")
    if all(rate is None for rate in rates):
        raise BadInput(
            f"data.pass_rate={tuple(limits)}, but no task has a pass rate: probe them "
            "with --mode=eval --config.eval.probe=true, or name a file in data.probe"
        )
    kept = [
        task
        for task, rate in zip(tasks, rates, strict=True)
        if rate is not None and low <= rate <= high
    ]
    if not kept:
        raise BadInput(
            f"data.pass_rate={tuple(limits)} leaves none of {len(tasks)} tasks"
        )
    LOG.info("data.pass_rate kept %d of %d tasks", len(kept), len(tasks))
    return kept


def _with_probe(tasks: list[Task], data: ConfigDict) -> list[Task]:
    """Add a probe's columns to the tasks that it was about.

    The file is a probe's, or the pass_rates.jsonl of a training run's folder, in which
    the last line about a task counts.
    """
    path = probe_file(data)
    if path is None or not path.is_file():
        if data.probe:
            raise BadInput(f"data.probe '{path}': no such file")
        return tasks
    found: dict[str, dict] = {}
    for where, row in rows.read(str(path), "train"):
        match row:
            case {"key": key, "needs_tool": _}:
                found[key] = {k: row[k] for k in PROBED if k in row}
            case {"pass_rates": dict(rates)}:
                found |= {key: {LEARNED: rate} for key, rate in rates.items()}
            case _:
                raise BadInput(f"{where}: neither a probe's line nor pass rates")
    probed = [
        dataclasses.replace(task, columns=task.columns | found.get(probe_key(task), {}))
        for task in tasks
    ]
    known = sum(probe_key(task) in found for task in tasks)
    LOG.info("'%s': probe results of %d of %d tasks", path, known, len(tasks))
    return probed


def read_tasks(
    source: str, strict: bool, needed: Sequence[str] = (), split: str = "train"
) -> list[Task]:
    """Read every good row of a .jsonl or .parquet file or a hub data set."""
    tasks, bad = [], []
    for where, row in rows.read(source, split):
        try:
            tasks.append(rows.task(row, where, needed))
        except ValueError as error:
            if strict:
                raise BadInput(f"{where}: {error}") from error
            bad.append(f"{where}: {error}")
    for line in bad[:_SHOWN]:
        LOG.warning("skipped %s", line)
    if bad:
        LOG.warning("%s: skipped %d of %d rows", source, len(bad), len(bad + tasks))
    if not tasks:
        reason = f"; the first: {bad[0]}" if bad else " at all"
        raise BadInput(f"data source '{source}' has no usable row{reason}")
    return tasks


def fit_prompts(
    tasks: Sequence[Task], chat: Chat, max_prompt_length: int, *, strict: bool = False
) -> tuple[list[Task], list[tuple[int, int]]]:
    """Drop the tasks whose rendered prompt is too long; never cut one.

    Also those that the model's template refuses, or all of it if `strict`: BadInput.
    Returns what is kept and (row, tokens) of what is too long, rows counted from 0.
    """
    kept, dropped, refused = [], [], []
    for row, task in enumerate(tasks):
        try:
            offered = chat.offering(task.columns.get("tools"))
            length = len(offered.prompt(task.prompt))
        except ValueError as error:
            if strict:
                raise BadInput(f"task {task.id}: {error}") from error
            refused.append(f"task {task.id}: {error}")
            continue
        if length <= max_prompt_length:
            kept.append(task)
        else:
            dropped.append((row, length))
    _say_refused(refused, len(tasks))
    if tasks and not kept:
        shortest = min(length for _, length in dropped)
        raise BadInput(
            f"every prompt is longer than rollout.max_prompt_length="
            f"{max_prompt_length} tokens; the shortest has {shortest}"
        )
    if dropped:
        named = [f"{tasks[row].id} ({length})" for row, length in dropped[:_SHOWN]]
        LOG.warning(
            "dropped %d of %d prompts longer than %d tokens: %s%s",
            *(len(dropped), len(tasks), max_prompt_length, ", ".join(named)),
            ", ..." if len(dropped) > _SHOWN else "",
        )
    return kept, dropped


def _say_refused(refused: list[str], number: int) -> None:
    """Name the tasks without a prompt; BadInput if that is all of them."""
    if refused and len(refused) == number:
        raise BadInput(f"no task has a usable prompt; the first: {refused[0]}")
    for line in refused[:_SHOWN]:
        LOG.warning("skipped %s", line)
    if refused:
        LOG.warning("skipped %d of %d prompts", len(refused), number)


class TaskStream:
    """An endless pass over tasks, in a new order every epoch when `shuffle` is set."""

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool = True):
        if not tasks:
            raise BadInput("there are no tasks to draw from")
        self.tasks = list(tasks)
        self.seed = seed
        self.shuffle = shuffle
        self._drawn = 0
        self._fingerprint = fingerprint(self.tasks)
        self._order = (-1, [])  # the epoch that the cached order belongs to

    @property
    def epoch(self) -> int:
        """Completed passes over the tasks."""
        return self._drawn // len(self.tasks)

    def next(self, n: int) -> list[Task]:
        """Draw `n` tasks; the next epoch begins where one ends."""
        drawn = []
        for _ in range(n):
            position = self._drawn % len(self.tasks)
            drawn.append(self.tasks[self._epoch_order(self.epoch)[position]])
            self._drawn += 1
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the cursor as JSON values."""
        return {
            "drawn": self._drawn,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a cursor; BadInput when data, seed or shuffling have changed."""
        now = self.state()
        for key, what in [
            ("fingerprint", "the training data"),
            ("seed", "data.seed"),
            ("shuffle", "data.shuffle"),
        ]:
            if state[key] != now[key]:
                raise BadInput(
                    f"{what} changed since the checkpoint was saved; start a new"
                    " --workdir or restore it"
                )
        self._drawn = state["drawn"]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            if self.shuffle:
                # Sorted by hash: the same order on every platform and version.
                order.sort(key=lambda i: _digest(f"{self.seed}/{epoch}/{i}"))
            self._order = (epoch, order)
        return self._order[1]


def fingerprint(tasks: Iterable[Task]) -> str:
    """Hash the ids, prompts and columns of `tasks`, in order."""
    total = hashlib.sha256()
    for task in tasks:
        content = [task.id, task.prompt, task.columns]
        total.update(json.dumps(content, sort_keys=True, default=_type_name).encode())
    return total.hexdigest()


def _held_out(num_rows: int, wanted: int) -> set[int]:
    """Choose rows for evaluation: the same ones whatever the seed."""
    by_hash = sorted(range(num_rows), key=lambda i: _digest(f"held out/{i}"))
    return set(by_hash[: min(wanted, num_rows // 5)])


def _type_name(value: Any) -> str:
    return type(value).__name__


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _generate(source: str, data: ConfigDict, number: int, held_out: bool) -> list[Task]:
    if not number and not held_out:
        raise BadInput(f"data.num_tasks=0: '{source}' generates, so it needs a number")
    split = "test" if held_out else "train"
    try:
        if source in ("fund", "fund_bank"):
            return _fund_tasks(source, data, number, split)
        return reasoning.reasoning_gym_tasks(data.datasets, number, data.seed, split)
    except ValueError as error:
        raise BadInput(f"data: {error}") from error


def _fund_tasks(source: str, data: ConfigDict, number: int, split: str) -> list[Task]:
    categories = tuple(data.categories) or fund.CATEGORIES
    weights = tuple(data.category_weights) or (1.0,) * len(categories)
    if len(weights) != len(categories):
        raise ValueError(
            f"data.category_weights has {len(weights)} entries for "
            f"{len(categories)} categories"
        )
    keys = {
        "languages": data.languages,
        "categories": dict(zip(categories, weights, strict=True)),
    }
    if source == "fund_bank":
        tasks = fund.generate_bank_tasks(split, number, data.seed, **keys)
    else:
        keys |= {"prompt_style": data.prompt_style, "answer_format": data.answer_format}
        tasks = fund.generate(split, number, data.seed, **keys)
    if split != "train":
        return tasks
    if data.flawed_labels:
        tasks = fund.mislabel(tasks)
    return fund.oversample(tasks, data.oversample, data.oversample_times)
