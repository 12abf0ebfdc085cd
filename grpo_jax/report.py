"""What a person reads: live progress, the summary table, and report.html.

Takes the metric names of evaluation (`eval/score/{category}`,
`eval/tool_accuracy/{category}`) and, for the page, what a run left in its folder:
metrics.jsonl and rollouts/. The page is one file without scripts or outside links.
"""

import dataclasses
import html
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table

from grpo_jax import metrics
from grpo_jax.config import BadInput
from grpo_jax.tool_alarms import Verdict

Number = int | float
EVALUATED = "eval/num_tasks"  # stands in the metrics of an evaluated step

# What the progress line shows, in this order, where it has data.
LIVE = {
    "loss": "loss",
    "reward": "reward",
    "reward_std": "std",
    "tools/call_rate": "calls",
    "kl": "kl",
    "grad_norm": "grad",
    "completions/mean_length": "length",
    "rollout/tokens_per_second": "tok/s",
    "step_time": "s/step",
}
TABLES = {"eval/score/": "Held-out score", "eval/tool_accuracy/": "Held-out tool"}
# Charts of the page that come first; all other numbers follow in a folded part.
CHARTS = (
    "reward",
    "frac_reward_zero_std",
    "tools/call_rate",
    "tools/failure_frequency",
    "kl",
    "entropy",
    "grad_norm",
    "completions/mean_length",
)
GROUPS_SHOWN = 4
CHART_WIDTH, CHART_HEIGHT, MARGIN = 300, 120, 6


class LiveProgress:
    """A bar on a terminal, one line a step anywhere else; both on stderr."""

    def __init__(self, name: str, total: int, done: int = 0):
        self.name, self.total = name, total
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(20), MofNCompleteColumn(), Remaining())
            numbers = TextColumn("{task.fields[numbers]}")
            console = Console(stderr=True)
            self._bar = Progress(name, *columns, numbers, console=console)
            self._task = self._bar.add_task(
                name, total=total, completed=done, numbers=""
            )
            self._bar.start()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show that `step` (from 1) is done, with its live metrics."""
        numbers = "  ".join(
            f"{label} {values[key]:.4g}" for key, label in LIVE.items() if key in values
        )
        if self._bar is None:
            line = f"{self.name} {step}/{self.total}  {numbers}"
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, completed=step, numbers=numbers)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()


def summary(
    before: Mapping[str, Number] | None,
    after: Mapping[str, Number],
    confusion: Mapping[str, Mapping[str, int]] | None = None,
    console: Console | None = None,
    verdict: Verdict | None = None,
) -> None:
    """Print held-out results by category before and after, the tool confusion, and the
    verdict on tool use.

    `before` and `after` are evaluation metrics; `confusion[expected][called]` counts
    tasks. Categories without data in either are left out.
    """
    console = console or Console()
    for prefix, title in TABLES.items():
        table = _before_after(prefix, title, before or {}, after)
        if table.row_count:
            console.print(table)
    if confusion:
        console.print(_confusion_table(confusion))
    if verdict is not None:
        console.print(str(verdict), style="bold" if verdict.collapsed else None)


def end(
    workdir: Path, before: Mapping[str, Number] | None, verdict: Verdict | None
) -> None:
    """Print a finished run's summary, from before RL to its last evaluation.

    The verdict is kept in summary.json.
    """
    rows = metrics.read(workdir / "metrics.jsonl")
    after = next((row for row in reversed(rows) if EVALUATED in row), {})
    summary(before, after, after.get("eval/confusion"), verdict=verdict)
    judged = {"collapsed": None} if verdict is None else dataclasses.asdict(verdict)
    metrics.write_json(workdir / "summary.json", {"steps": len(rows), **judged})


def write_eval(path: Path, values: Mapping[str, Any], **about: Any) -> None:
    """Write the numbers of an evaluation as JSON behind what they are `about`.

    Prints the numbers.
    """
    metrics.write_json(path, {**about, **values})
    for name, value in sorted(values.items()):
        if not isinstance(value, dict):
            print(f"{name:<40} {value:.4f}")
    summary(None, values, values.get("eval/confusion"))


def _before_after(
    prefix: str, title: str, before: Mapping[str, Number], after: Mapping[str, Number]
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("category")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    names = {k.removeprefix(prefix) for k in (*before, *after) if k.startswith(prefix)}
    for name in sorted(names - {"all"}) + ["all"] * ("all" in names):
        old, new = before.get(prefix + name), after.get(prefix + name)
        change = "" if old is None or new is None else f"{new - old:+.3f}"
        style = "bold" if name == "all" else None
        table.add_row(name, _number(old), _number(new), change, style=style)
    return table


def _confusion_table(confusion: Mapping[str, Mapping[str, int]]) -> Table:
    called = sorted({name for row in confusion.values() for name in row})
    # Expected names first, so that right calls lie on the diagonal.
    columns = [name for name in sorted(confusion) if name in called]
    columns += [name for name in called if name not in columns]
    table = Table(title="Expected tool (row) x called tool", title_justify="left")
    table.add_column("expected")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for expected in sorted(confusion):
        counts = [confusion[expected].get(name, 0) for name in columns]
        table.add_row(expected, *(str(count) if count else "." for count in counts))
    return table


def _number(value: Number | None) -> str:
    return "" if value is None else f"{value:.3f}"


def write_html(workdir: str | Path) -> Path:
    """Write `workdir/report.html` and return its path.

    Raises BadInput when the folder holds no metrics yet.
    """
    workdir = Path(workdir)
    records = metrics.read(workdir / "metrics.jsonl")
    if not records:
        raise BadInput(f"--mode=report: no metrics in '{workdir / 'metrics.jsonl'}'")
    rollouts = sorted((workdir / "rollouts").glob("step_*.jsonl"))
    body = [
        f"<h1>{html.escape(workdir.absolute().name)}</h1>",
        f"<p>{len(records)} steps, the last is {records[-1]['step']}</p>",
        *_chart_section(records),
        *(_rollout_section(rollouts[-1]) if rollouts else ()),
    ]
    path = workdir / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(_PAGE.format(body="\n".join(body)), encoding="utf-8")
    os.replace(partial, path)
    return path


def _chart_section(records: list[dict]) -> Iterable[str]:
    names = sorted({name for record in records for name in record} - {"step"})
    series = {}
    for name in names:
        points = [(r["step"], r[name]) for r in records if name in r]
        if all(isinstance(y, int | float) for _, y in points):
            series[name] = points
    first = [name for name in CHARTS if name in series]
    first += [name for name in series if name.startswith("eval/score/")]
    yield "<h2>Metrics</h2><div class=charts>"
    yield from (_chart(name, series[name]) for name in first)
    yield "</div><details><summary>All other metrics</summary><div class=charts>"
    yield from (_chart(name, series[name]) for name in series if name not in first)
    yield "</div></details>"


def _chart(name: str, points: list[tuple[int, Number]]) -> str:
    """One small line chart; a single point is a dot."""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    width, height = CHART_WIDTH - 2 * MARGIN, CHART_HEIGHT - 2 * MARGIN
    across = (steps[-1] - steps[0]) or 1
    up = (high - low) or 1
    dots = [
        (
            MARGIN + width * (step - steps[0]) / across,
            CHART_HEIGHT - MARGIN - height * (value - low) / up,
        )
        for step, value in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    x, y = dots[-1]
    return (
        f"<figure><figcaption>{html.escape(name)}<b>{values[-1]:.4g}</b></figcaption>"
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}">'
        f'<polyline points="{line}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3"/></svg>'
        f"<small>steps {steps[0]} to {steps[-1]}, from {low:.4g} to {high:.4g}</small>"
        "</figure>"
    )


def _rollout_section(path: Path) -> Iterable[str]:
    yield f"<h2>Trajectories of {html.escape(path.stem)}</h2>"
    groups: dict[str, list[dict]] = {}
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            task = str(row["task_id"])
            if task in groups or len(groups) < GROUPS_SHOWN:
                groups.setdefault(task, []).append(row)
    for task, rows in groups.items():
        yield f"<h3>Task {html.escape(task)}</h3>"
        yield from map(_trajectory, rows)


def _trajectory(row: dict) -> str:
    segments = "".join(
        f'<pre class="{html.escape(str(segment["source"]).lower())}">'
        f"{html.escape(segment['text'])}</pre>"
        for segment in row["segments"]
    )
    calls = "".join(
        f"<tr><td>{html.escape(str(call['name']))}</td>"
        f"<td><code>{html.escape(json.dumps(call['arguments']))}</code></td>"
        f"<td>{html.escape(str(call['status']))}</td>"
        f"<td><code>{html.escape(str(call['result']))}</code></td></tr>"
        for call in row["calls"]
    )
    header = "<tr><th>tool<th>arguments<th>status<th>result</tr>"
    table = f"<table>{header}{calls}</table>" if calls else ""
    reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
    title = f"reward {reward}, {len(row['calls'])} calls, ended by {row['stop']}"
    terms = html.escape(json.dumps(row["rewards"]))
    return (
        f"<details><summary>{html.escape(title)}</summary>"
        f"<p>terms <code>{terms}</code></p>{table}{segments}</details>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>grpo_jax report</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em;
  padding: 0 1em; color: #222; background: #fff }}
.charts {{ display: flex; flex-wrap: wrap; gap: 1em }}
figure {{ margin: 0; width: 18em; border: 1px solid #ddd; padding: .5em }}
figcaption {{ display: flex; justify-content: space-between }}
polyline {{ fill: none; stroke: #0b62a4; stroke-width: 1.5 }}
circle {{ fill: #0b62a4 }}
small {{ color: #666 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .4em;
  border-left: 4px solid #bbb }}
pre.model {{ border-color: #0b62a4; background: #f0f6fb }}
pre.tool {{ border-color: #c77700; background: #fdf6ec }}
table {{ border-collapse: collapse; margin: .5em 0 }}
td, th {{ border: 1px solid #ddd; padding: .2em .5em; text-align: left;
  vertical-align: top; overflow-wrap: anywhere }}
details {{ margin: .4em 0 }}
summary {{ cursor: pointer }}
</style></head><body>
{body}
</body></html>
"""
