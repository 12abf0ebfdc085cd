"""A trajectory's calls judged against gold ones, as a set: the order does not matter.

The row's column `calls` lists them, {"name": ..., "arguments": {...}} each, and
`reward.functions=('tools_env.call_rewards.right_calls',)` scores them. Policies. A call
is right when name and arguments are: none missing, none extra, each equal. Numbers are
equal by value (10 = 10.0, never true); text is compared exactly, a list in its order.
Every gold call wants one of its own, so f(1) twice is not {f(1), f(2)}. A call that
could not be read is never right. Where no call is wanted (`calls` is []), a trajectory
without any is right if its last text has a word in it: rubbish is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WORD = re.compile(r"\w")


def right_calls(trajectories, calls, **columns) -> list[float | None]:
    """1 for exactly the gold calls, else 0; None where a row has no column `calls`."""
    return [
        None if gold is None else float(_right(one, gold))
        for one, gold in zip(trajectories, calls, strict=True)
    ]


def same_calls(gold: Sequence[Mapping], given: Sequence[Mapping]) -> bool:
    """Compare two collections of {"name", "arguments"}, in any order."""
    left = list(given)
    for call in gold:
        found = next((one for one in left if _same_call(call, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _right(trajectory: Any, gold: Sequence[Mapping]) -> bool:
    made = [
        {"name": call.name, "arguments": call.arguments}
        for turn in trajectory.turns
        for call in turn.calls
    ]
    if not gold:
        return not made and bool(_WORD.search(trajectory.answer))
    return same_calls(gold, made)


def _same_call(gold: Mapping, given: Mapping) -> bool:
    same_name = gold["name"] == given["name"]
    return same_name and _same(gold.get("arguments") or {}, given["arguments"])


def _same(gold: Any, given: Any) -> bool:
    if isinstance(gold, Mapping) and isinstance(given, Mapping):
        keys = gold.keys() == given.keys()
        return keys and all(_same(gold[key], given[key]) for key in gold)
    if isinstance(gold, list) and isinstance(given, list):
        return len(gold) == len(given) and all(map(_same, gold, given))
    if isinstance(gold, bool) or isinstance(given, bool):
        return gold is given
    if isinstance(gold, int | float) and isinstance(given, int | float):
        return gold == given
    return type(gold) is type(given) and gold == given
