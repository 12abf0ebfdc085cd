"""The monitor: alarms over the metric history, each reported once until it clears.

Stage 9 of a step. Everything a monitor knows follows from the rows it has seen, so that
`replay` of the metrics file brings a resumed run to where it was.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax import alarms, tool_alarms
from grpo_jax.alarms import GAP, Alarm, Row
from grpo_jax.tool_alarms import Verdict

WATCHED = (
    "reward",
    "reward_gap",
    "frac_reward_best",
    "rewards/outcome/mean",
    "frac_reward_zero_std",
    "frac_advantage_zero",
    "frac_group_identical",
    "grad_norm",
    "update/skipped",
    "nonfinite_tokens",
    "tools/call_rate",
    "tools/malformed_frequency",
    "tools/invalid_frequency",
    "tools/in_prompt",
    "interaction/call_rate",
    "interaction/rejected",
    GAP,
    "entropy",
)
# Families of names: with a category or a number behind.
WATCHED_PREFIXES = (
    "eval/score/",
    "category/",
    "lld/nll_correct_by_turn/",
    "ratio/max_by_position/",
)


class Monitor:
    """Watches one run's metrics.

    `action` is `monitor.action`: with "stop" a severe alarm sets `must_stop`, with
    "warn" nothing does. `trajectories_per_step` says how noisy a step's rates are.
    """

    def __init__(self, action: str, trajectories_per_step: int):
        self.action = action
        self.must_stop = False
        self._trajectories = trajectories_per_step
        self._rows: list[Row] = []
        self._active: set[str] = set()

    def check(self, step: int, values: Mapping[str, Any]) -> list[Alarm]:
        """Take in a step's metrics; return the alarms that were not there before."""
        self._rows.append({"step": step} | _numbers(values))
        found = [rule(self._rows) for rule in (*alarms.RULES, *tool_alarms.RULES)]
        found.append(tool_alarms.call_rate_drop(self._rows, self._trajectories))
        ringing = [alarm for alarm in found if alarm]
        new = [alarm for alarm in ringing if alarm.name not in self._active]
        self._active = {alarm.name for alarm in ringing}
        if self.action == "stop" and any(alarm.severe for alarm in new):
            self.must_stop = True
        return new

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in the lines of a metrics file; their alarms were reported back then.

        `must_stop` stays: whoever starts a stopped run again wants it to go on.
        """
        stopping = self.must_stop
        for row in rows:
            self.check(row["step"], row)
        self.must_stop = stopping

    def verdict(self) -> Verdict | None:
        """Did the policy give up its tools? None: there is nothing to judge."""
        return tool_alarms.verdict(self._rows, self._trajectories)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The watched values that are finite, as the metrics file keeps them."""
    watched = {
        name: float(value)
        for name, value in values.items()
        if name in WATCHED or name.startswith(WATCHED_PREFIXES)
    }
    return {name: value for name, value in watched.items() if math.isfinite(value)}
