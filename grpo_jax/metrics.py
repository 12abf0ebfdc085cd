"""Metrics: one strict JSON object a step, and the same numbers to the trackers.

A number travels as (sum, weight) from the device or the rollout to `Means`, which
divides once; a mean of means under micro-batching would count short rows double. A
value that has no data is absent from the file, never 0, NaN or null.
"""

import json
import math
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpo_jax.config import BadInput

UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# A tracker takes a step and its numbers; its close() flushes them.
Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


class Means:
    """Named means accumulated as (sum, weight) over micro-batches, turns or hosts."""

    def __init__(self):
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Add a sum over `weight` items (tokens, rows, calls)."""
        self._sums[name][0] += float(total)
        self._sums[name][1] += float(weight)

    def update(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Add several (sum, weight) pairs, as the device returns them."""
        for name, (total, weight) in pairs.items():
            self.add(name, total, weight)

    def values(self) -> dict[str, float]:
        """Each mean; a name whose weight is 0 is absent."""
        return {name: total / w for name, (total, w) in self._sums.items() if w > 0}


class Metrics:
    """Writer of `workdir/{name}.jsonl` and of the trackers that are switched on.

    Starts by dropping lines after `resume_step` (0: all), so that every step stands
    there once however often the run was cut. Only the first host writes.
    """

    def __init__(
        self,
        workdir: str | Path,
        trackers: ConfigDict | None = None,
        *,
        name: str = "metrics",
        resume_step: int = 0,
    ):
        self.path = Path(workdir) / f"{name}.jsonl"
        self._file = None
        self._trackers: list[Tracker] = []
        if jax.process_index() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(self.path, resume_step)
        if trackers is not None:
            self._trackers = _open_trackers(trackers, self.path.parent, resume_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step; numbers that are not finite and None are left out."""
        if self._file is None:
            return
        plain = clean(values)
        line = json.dumps({"step": int(step)} | plain, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        numbers = {k: v for k, v in plain.items() if isinstance(v, int | float)}
        for log, _ in self._trackers:
            log(int(step), numbers)

    def close(self) -> None:
        """Close the file and flush the trackers."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for _, close in self._trackers:
            close()
        self._trackers = []


def json_text(value: Any, indent: int | None = None) -> str:
    """Strict JSON that stays readable, one line without `indent`, newline included.

    What some readers take for the end of a line, and half a surrogate pair, which UTF-8
    has not, is escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """One object as a file that a person may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(values, indent=2), encoding="utf-8")


def read(path: str | Path) -> list[dict]:
    """The lines of a metrics file; a last line cut off by a kill is left out."""
    return [record for record in map(_parse, _lines(Path(path))) if record]


def _lines(path: Path) -> Iterable[str]:
    if not path.is_file():
        return ()
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _parse(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`, replacing the file in one rename."""
    if not path.is_file():
        return
    kept = {r["step"]: r for r in read(path) if r["step"] <= step}
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for record in kept.values():
            stream.write(json.dumps(record, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values, nested mappings included, without what has no data."""
    pairs = ((str(name), _plain(value)) for name, value in values.items())
    return {name: value for name, value in pairs if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return clean(value)
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    number = np.asarray(value).item()
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return number


def _open_trackers(trackers: ConfigDict, workdir: Path, step: int) -> list[Tracker]:
    openers = {
        "tensorboard": _open_tensorboard,
        "wandb": _open_wandb,
        "trackio": _open_trackio,
    }
    # Once for all trackers: at step 0 every call makes a new one.
    identity = _run_id(workdir, step) if trackers.wandb or trackers.trackio else ""
    opened: list[Tracker] = []
    for name, opener in openers.items():
        if not trackers[name]:
            continue
        try:
            opened.append(opener(trackers.project, workdir, step, identity))
        except Exception as error:  # each has types of its own
            for _, close in opened:
                close()
            raise BadInput(_not_opened(name, error)) from error
    return opened


def _not_opened(name: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return (
            f"trackers.{name} needs a package that is not installed ({error}): "
            f"pip install 'grpo_jax[{name}]'"
        )
    return f"trackers.{name} did not open ({type(error).__name__}: {error})"


def _open_tensorboard(project, workdir: Path, step: int, identity) -> Tracker:
    from tensorboardX import SummaryWriter

    # purge_step hides what a killed run wrote after the checkpoint it resumes from.
    writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def log(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _open_wandb(project: str, workdir: Path, step, identity: str) -> Tracker:
    import wandb

    # Online or offline as WANDB_MODE says.
    run = wandb.init(
        project=project,
        name=workdir.name,
        dir=str(workdir),
        id=identity,
        resume="allow",
    )
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _open_trackio(project: str, workdir: Path, step, identity: str) -> Tracker:
    import trackio

    name = f"{workdir.name}-{identity}"
    run = trackio.init(project=project, name=name, resume="allow")
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _run_id(workdir: Path, step: int) -> str:
    """A name that a resumed run shares with the run it goes on from."""
    path = workdir / "run_id"
    if step == 0 or not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
