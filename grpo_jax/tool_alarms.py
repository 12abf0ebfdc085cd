"""Alarms about tool use, and the verdict on a run: did the policy give up its tools?

Rules as in `alarms`. The threshold for the call rate comes from accounts of interaction
collapse; the others are this project's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_jax.alarms import WINDOW, Alarm, Row, mean, numbered, recent, rise, series

# Collapse: the call rate lost a fifth of its best, in means over blocks of 10 steps.
# Healthy runs drift by a few per cent. The drop must also exceed 4 standard errors of
# a rate, or a long run with small batches would raise it by chance.
RATE_DROP, RATE_BLOCK, RATE_ERRORS = 0.2, 10, 4.0

# The verdict at a run's end: half of its best call rate is lost. A fifth, where the
# alarm begins, can be a policy that learned which tasks need no tool.
COLLAPSED = 0.5

# Steps in a row in which no trajectory made a valid call although there are tools. With
# no call in a batch there is nothing that a reward could reinforce.
STEPS_WITHOUT_CALLS = 3

# Share of calls that were written but never reached a tool: malformed, of no tool, or
# with arguments that do not fit. Untrained models are below a tenth on a format they
# know; at three in ten the policy writes calls for their look.
NOT_EXECUTED = 0.3

# Nats a token by which the likelihood of correct trajectories behind tool results may
# fall, beyond that of their first turns, over three blocks of steps that all fall.
DISPLACED, DISPLACED_SHARE = 0.1, 0.2


def _no_calls(rows: Sequence[Row]) -> Alarm | None:
    rates = series(rows, "tools/call_rate")[-STEPS_WITHOUT_CALLS:]
    if len(rates) < STEPS_WITHOUT_CALLS or any(rates):
        return None
    return Alarm(
        "no_calls",
        f"no trajectory of the last {len(rates)} steps made a valid tool call although "
        "the environment has tools. The model does not know the call format, has no "
        "room for a call (rollout.max_turn_length), or is not allowed one "
        "(rollout.max_tool_calling_iterations=0). Read rollouts/; begin with a cold "
        "start (sft.num_epochs > 0) or with a model that calls tools",
    )


def _malformed_calls(rows: Sequence[Row]) -> Alarm | None:
    malformed = recent(rows, "tools/malformed_frequency")
    if malformed is None:
        return None
    invalid = recent(rows, "tools/invalid_frequency") or 0.0
    if malformed + invalid <= NOT_EXECUTED:
        return None
    return Alarm(
        "malformed_calls",
        f"{malformed + invalid:.0%} of the calls of the last {WINDOW} steps were "
        f"written but never executed: {malformed:.0%} could not be read, {invalid:.0%} "
        "named no tool or had arguments that do not fit. A policy that drops its tool "
        "goes through this. Read the calls in rollouts/; lengthen the cold start, "
        "reward executed calls, raise rollout.max_turn_length if they are cut off",
    )


def _no_tool_schemas(rows: Sequence[Row]) -> Alarm | None:
    share = rows[-1].get("tools/in_prompt", 1.0)
    if share == 1.0:
        return None
    return Alarm(
        "no_tool_schemas",
        f"{1 - share:.0%} of the prompts name no tool although the environment has "
        "some: the model cannot know what to call. The chat template leaves the "
        "schemas out. Look at the first segment of a rollout; use a tokenizer whose "
        "template takes tools, or describe them in a system message",
    )


def _likelihood_displacement(rows: Sequence[Row]) -> Alarm | None:
    """Of turns after the first, against the first, which saw no tool result."""
    excess = []
    for row in rows[-6 * RATE_BLOCK :]:  # some have no correct trajectory with a call
        turns = dict(numbered(row, "lld/nll_correct_by_turn/"))
        later = [nll for turn, nll in turns.items() if turn > 1]
        if later and 1 in turns:
            excess.append((sum(later) / len(later), turns[1]))
    change = rise([nll - first for nll, first in excess], RATE_BLOCK)
    if change is None:
        return None
    now = math.fsum(nll for nll, _ in excess[-RATE_BLOCK:]) / RATE_BLOCK
    if change <= max(DISPLACED, DISPLACED_SHARE * (now - change)):
        return None
    return Alarm(
        "likelihood_displacement",
        "correct trajectories become less likely behind their tool results: "
        f"{now:.3g} nats a token in turns after the first, {change:.3g} more than "
        f"{3 * RATE_BLOCK} steps ago and rising, while the first turn did not follow. "
        "Ratios, then entropy blow up next, and the policy learns to avoid its tools. "
        "Set objective.lld=0.2, ratio='cumulative' with clip='sqrt_log', or lower "
        "train.learning_rate",
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a run's policy gave up its tools.

    Collapsed: the call rate of the last block of steps (10, or half of a shorter run)
    is at most half of the best block's, by more than 4 standard errors.

    Attributes:
      collapsed: the verdict.
      rate, best: call rates of the last and the best block.
      steps: first and last step of the best block.
    """

    collapsed: bool
    rate: float
    best: float
    steps: tuple[int, int]

    def __str__(self) -> str:
        first, last = self.steps
        return (
            f"collapsed: {'yes' if self.collapsed else 'no'} (call rate {self.rate:.0%}"
            f" at the end, {self.best:.0%} at its best in steps {first}-{last}; "
            f"collapsed means at most {COLLAPSED:.0%} of the best)"
        )


def verdict(rows: Sequence[Row], trajectories: int) -> Verdict | None:
    """Judge a finished run; None where nothing calls tools, or of fewer than 2 steps.

    `trajectories` a step say how far a rate may be off by chance. Counted on tasks that
    need a tool.
    """
    name = "interaction/call_rate"
    found = _best_and_last(rows, name, min(RATE_BLOCK, len(series(rows, name)) // 2))
    if found is None:
        return None
    best, last = found
    peak, rate = mean(best, name), mean(last, name)
    noise = _noise(peak, len(last) * trajectories)
    collapsed = rate <= COLLAPSED * peak and peak - rate > noise
    return Verdict(collapsed, rate, peak, (int(best[0]["step"]), int(best[-1]["step"])))


def call_rate_drop(rows: Sequence[Row], trajectories: int) -> Alarm | None:
    """Collapse if the reward rose meanwhile, which hides it; else a notice."""
    found = _best_and_last(rows, "tools/call_rate", RATE_BLOCK)
    if found is None:
        return None
    best, last = found
    rate, peak = mean(last, "tools/call_rate"), mean(best, "tools/call_rate")
    noise = _noise(peak, RATE_BLOCK * trajectories)
    if peak - rate <= max(RATE_DROP * peak, noise):
        return None
    now, then = _outcome(last), _outcome(best)
    rising = now is not None and then is not None and now > then
    seen = (
        f"the share of trajectories that use a tool fell from {peak:.0%} (steps "
        f"{best[0]['step']:.0f}-{best[-1]['step']:.0f}) to {rate:.0%}"
    )
    advice = (
        "Compare reward with and without tools on hard tasks before going on "
        "(--mode=eval with eval.probe): where the tool does not help, this is what the "
        "reward asks for. Otherwise go back to a checkpoint from before the fall, with "
        "reward.floor, objective.ratio='cumulative' and clip='sqrt_log', "
        "objective.lld, or a longer cold start with more calls"
    )
    if rising:
        text = f"{seen} while the reward rose from {then:.3g} to {now:.3g}: collapse"
        return Alarm("tool_collapse", f"{text}. {advice}")
    return Alarm("call_rate_falling", f"{seen}. {advice}", severe=False)


def _best_and_last(
    rows: Sequence[Row], name: str, size: int
) -> tuple[Sequence[Row], Sequence[Row]] | None:
    """The block of `size` rows with the highest mean, and the last one after it."""
    rows = [row for row in rows if name in row]
    if not size:
        return None
    ends = range(size, len(rows) - size + 1, size)
    blocks = [rows[end - size : end] for end in ends]
    if not blocks:
        return None
    return max(blocks, key=lambda block: mean(block, name)), rows[-size:]


def _noise(rate: float, count: int) -> float:
    """What two rates of `count` trajectories each may differ by."""
    return RATE_ERRORS * math.sqrt(2 * rate * (1 - rate) / count)


def _outcome(rows: Sequence[Row]) -> float | None:
    """Mean reward, without the terms that pay for calls where they are told apart."""
    outcome = mean(rows, "rewards/outcome/mean")
    return mean(rows, "reward") if outcome is None else outcome


RULES = (_no_calls, _malformed_calls, _no_tool_schemas, _likelihood_displacement)
