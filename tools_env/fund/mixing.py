"""What the article did to its training data, for those who want to see what it does.

Neither helped there: repeated samples of weak categories brought no new signal and all
others fell back, and with the wrong label of combos no objective learned them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tools_env.fund.requests import CATEGORIES, require
from tools_env.protocol import Task


def oversample(
    tasks: Sequence[Task], categories: Sequence[str], times: int
) -> list[Task]:
    """The tasks, and those of some categories `times` as often: the very same again.

    Repeats come at the end and bear their number in the id. ValueError for an unknown
    category.
    """
    if categories:
        require("category", categories, CATEGORIES)
    weak = [task for task in tasks if task.columns["category"] in categories]
    repeats = [
        dataclasses.replace(task, id=f"{task.id}+{number}")
        for number in range(1, times)
        for task in weak
    ]
    return [*tasks, *repeats]


def mislabel(tasks: Sequence[Task]) -> list[Task]:
    """The article's first combo labels: check_balance, whatever the first step is."""
    wrong = {
        "label": "check_balance",
        "params": {},
        "thought": "Several steps; check the balance.",
    }
    return [
        dataclasses.replace(task, columns=task.columns | wrong)
        if task.columns["category"] == "combo"
        else task
        for task in tasks
    ]
