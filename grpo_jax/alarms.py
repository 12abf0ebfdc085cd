"""Alarms about learning: the reward, the gradient, the likelihoods.

A rule looks at the numbers of the steps so far, as metrics.jsonl holds them, and gives
an alarm or None; `monitor` asks all rules after every step. `tool_alarms` has those
about tool use.

The thresholds for flat groups and a gradient of 0 come from practice with GRPO on tool
selection; the others are this project's own. They are constants, not keys: an alarm
that is tuned away is no use.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Steps that are averaged, so that one odd rollout batch raises nothing.
WINDOW = 5

# More than this share of groups without reward variance: the step learns from less than
# half of what it sampled. Under 0.3 is healthy, so 0.3 is worth a notice.
FLAT_GROUPS, SOME_FLAT_GROUPS = 0.5, 0.3

# Steps in a row without a learning signal. One is chance when a step has few groups.
STEPS_WITHOUT_GRADIENT = 5

# A gradient this many times the running median is no sampling noise: group-relative
# gradients vary by two or three between steps. The median needs a few steps to mean
# something, and the last 50 are what the policy is like now.
GRADIENT_FACTOR, GRADIENT_HISTORY, GRADIENT_LEAST = 10.0, 50, 10

# Mean difference of the sampler's and the trainer's log-probs, nats a token. One engine
# in float32 agrees to 1e-5 and in bfloat16 to about 1e-2; at 0.05 a completion of 100
# tokens has a ratio e^5 off: different weights, temperature or tokens.
LOGPROB_GAP = 0.05

# Entropy against that of the first 10 steps: twice, and half a nat more, since doubling
# a very small entropy is ordinary exploration.
ENTROPY_FACTOR, ENTROPY_RISE, ENTROPY_START = 2.0, 0.5, 10

# Best reward below the maximum and the same, and the share that ties there: a reward
# that cannot tell its best answers apart. A tenth may tie by chance in a graded reward.
STUCK_STEPS, STUCK_SHARE = 10, 0.3

# Groups whose members are all the same: they cost G rollouts and teach nothing.
IDENTICAL = 0.5

# Largest ratio at the last positions against those at the first, in the same update.
# Token ratios do not grow; 2.3 nats of displaced likelihood are a factor of 10.
RATIO_LARGE, RATIO_GROWTH = 10.0, 3.0

# A category lost this much of its reward, in blocks of 20 steps or two evaluations,
# while another gained half of it. Blocks must also differ by 4 standard errors.
CATEGORY_DROP, CATEGORY_BLOCK, CATEGORY_ERRORS = 0.15, 20, 4.0

GAP = "sampling/sampling_logp_difference/mean"

Row = Mapping[str, int | float]


@dataclass(frozen=True)
class Alarm:
    """Something that a person should look at.

    Attributes:
      name: which alarm.
      message: what was seen, what causes it, what to do.
      severe: the run is losing what it is for; other alarms are notices.
    """

    name: str
    message: str
    severe: bool = True


def series(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def mean(rows: Sequence[Row], name: str) -> float | None:
    values = series(rows, name)
    return statistics.fmean(values) if values else None


def recent(rows: Sequence[Row], name: str) -> float | None:
    """Mean of the last WINDOW values; None before there are as many."""
    values = series(rows, name)[-WINDOW:]
    return statistics.fmean(values) if len(values) == WINDOW else None


def numbered(row: Row, prefix: str) -> list[tuple[int, float]]:
    """(k, value) of the names `prefix` + k, k ascending."""
    names = (name for name in row if name.startswith(prefix))
    return sorted((int(name.removeprefix(prefix)), row[name]) for name in names)


def rise(values: Sequence[float], size: int) -> float | None:
    """How much the means of the last four blocks rose, if each is above the one before.

    A block has `size` values; None before there are enough, or where one fell.
    """
    last = values[-4 * size :]
    if len(last) < 4 * size:
        return None
    means = [statistics.fmean(last[i : i + size]) for i in range(0, 4 * size, size)]
    rising = all(a < b for a, b in zip(means, means[1:], strict=False))
    return means[-1] - means[0] if rising else None


def _flat_groups(rows: Sequence[Row]) -> Alarm | None:
    share = recent(rows, "frac_reward_zero_std")
    if share is None or share <= SOME_FLAT_GROUPS:
        return None
    severe = share > FLAT_GROUPS
    reward = recent(rows, "reward")
    level = "" if reward is None else f" at a mean reward of {reward:.3g}"
    text = (
        f"{share:.0%} of the groups of the last {WINDOW} steps had no reward variance"
        f"{level}, so that they teach nothing. The reward does not tell their answers "
        "apart, or the tasks are all too easy or all too hard. Give the reward more "
        "grades and check that its maximum can be reached, mend wrong labels, drop "
        "tasks that every sample solves; objective.estimator='ngrpo' gives flat groups "
        "below the maximum a signal"
    )
    return Alarm("flat_groups" if severe else "some_flat_groups", text, severe)


def _no_gradient(rows: Sequence[Row]) -> Alarm | None:
    last = rows[-STEPS_WITHOUT_GRADIENT:]
    silent = [
        row.get("grad_norm") == 0.0
        or row.get("frac_advantage_zero") == 1.0
        or row.get("interaction/rejected") == 1.0
        for row in last
    ]
    if len(last) < STEPS_WITHOUT_GRADIENT or not all(silent):
        return None
    return Alarm(
        "no_gradient",
        f"the last {len(last)} steps had no learning signal: grad_norm is 0, or every "
        "advantage is, or the batch was rejected. All trajectories of each group earn "
        "the same reward, or all rows are left out (abstaining rewards, "
        "mask_truncated_completions, reward.floor_mode='reject'). Look at the rewards "
        "in rollouts/; raise rollout.temperature or num_generations",
    )


def _gradient_explosion(rows: Sequence[Row]) -> Alarm | None:
    if "grad_norm" not in rows[-1]:
        return None
    before = series(rows[:-1], "grad_norm")[-GRADIENT_HISTORY:]
    before = [norm for norm in before if norm > 0.0]
    if len(before) < GRADIENT_LEAST:
        return None
    norm, median = rows[-1]["grad_norm"], statistics.median(before)
    if norm <= GRADIENT_FACTOR * median:
        return None
    return Alarm(
        "gradient_explosion",
        f"grad_norm {norm:.3g} is {norm / median:.0f} times its running median "
        f"{median:.3g}. Ratios far from 1 (stale or displaced likelihoods) or a few "
        "tokens of tiny probability drive it. Lower train.learning_rate or "
        "train.num_iterations, narrow objective.epsilon_high, try "
        "objective.ratio='cumulative' with clip='sqrt_log', objective.lld or a "
        "larger objective.beta",
    )


def _gradient_not_finite(rows: Sequence[Row]) -> Alarm | None:
    if not rows[-1].get("update/skipped"):
        return None
    return Alarm(
        "gradient_not_finite",
        "an update was left out because its gradient was not finite. Look at "
        "nonfinite_tokens; lower train.learning_rate, or use model.dtype='float32'",
    )


def _nonfinite_tokens(rows: Sequence[Row]) -> Alarm | None:
    share = rows[-1].get("nonfinite_tokens", 0.0)
    if share <= 0.0:
        return None
    return Alarm(
        "nonfinite_tokens",
        f"{share:.2%} of the sampled tokens have no finite log-prob, advantage or "
        "weight and were left out of the loss. The sampler and the trainer disagree "
        "about what is possible, or activations overflow: use model.dtype='float32', "
        "lower train.learning_rate, look at rollout.top_p and the base weights",
        severe=False,
    )


def _logprob_gap(rows: Sequence[Row]) -> Alarm | None:
    gap = rows[-1].get(GAP, 0.0)
    if gap <= LOGPROB_GAP:
        return None
    return Alarm(
        "logprob_gap",
        f"sampler and trainer differ by {gap:.3g} nats a token, so that ratios do not "
        "start at 1. Numerical noise is far smaller: suspect other weights, precision "
        "or attention in one of them. Compare with model.dtype='float32'; "
        "objective.tis_cap=2 bounds the damage",
    )


def _entropy_blowup(rows: Sequence[Row]) -> Alarm | None:
    values = series(rows, "entropy")
    if len(values) < ENTROPY_START + WINDOW:
        return None
    start = statistics.fmean(values[:ENTROPY_START])
    now = statistics.fmean(values[-WINDOW:])
    if now <= max(ENTROPY_FACTOR * start, start + ENTROPY_RISE):
        return None
    return Alarm(
        "entropy_blowup",
        f"entropy rose from {start:.3g} to {now:.3g} nats a token: the policy comes "
        "apart, often after likelihoods behind tool results were pushed down. Go back "
        "to an earlier checkpoint with a lower train.learning_rate, a larger "
        "objective.beta or objective.lld",
    )


def _reward_ceiling(rows: Sequence[Row]) -> Alarm | None:
    last = [row for row in rows[-STUCK_STEPS:] if "reward_gap" in row]
    if len(last) < STUCK_STEPS:
        return None
    gaps = series(last, "reward_gap")
    share = mean(last, "frac_reward_best") or 0.0
    least, most = min(gaps), max(gaps)
    if least <= 1e-6 or most - least > 1e-3 * most or share <= STUCK_SHARE:
        return None
    return Alarm(
        "reward_ceiling",
        f"the best reward of the last {len(last)} steps stays {most:.3g} below its "
        f"maximum, and {share:.0%} of the trajectories tie there. Either the maximum "
        "cannot be reached, so that right answers are not told apart (and a virtual "
        "best pushes them down), or the tasks are too hard. Add up the terms of a gold "
        "answer; mend the reward or its declared maximum (reward.maxima)",
    )


def _identical_samples(rows: Sequence[Row]) -> Alarm | None:
    share = recent(rows, "frac_group_identical")
    if share is None or share <= IDENTICAL:
        return None
    return Alarm(
        "identical_samples",
        f"in {share:.0%} of the groups of the last {WINDOW} steps all members sampled "
        "the same tokens, so that nothing tells them apart. The policy has become "
        "certain, or the sampling is too narrow: raise rollout.temperature, look at "
        "rollout.top_p and top_k and at entropy; a longer cold start than needed does "
        "this too",
    )


def _ratio_growth(rows: Sequence[Row]) -> Alarm | None:
    spans = [numbered(row, "ratio/max_by_position/") for row in rows[-WINDOW:]]
    spans = [span for span in spans if len(span) > 1]
    if len(spans) < WINDOW:
        return None
    first = statistics.fmean(span[0][1] for span in spans)
    last = statistics.fmean(span[-1][1] for span in spans)
    if last <= RATIO_LARGE or last <= RATIO_GROWTH * first:
        return None
    return Alarm(
        "ratio_growth",
        f"importance ratios grow along the trajectory: up to {last:.3g} from position "
        f"{spans[-1][-1][0]} on, {first:.3g} at its start. The policy has moved far "
        "from the one that sampled, most where tool results came before. Use "
        "objective.clip='sqrt_log' with ratio='cumulative', fewer updates a rollout "
        "batch (train.num_iterations, num_minibatches), or a lower learning rate",
    )


def _category_falls(rows: Sequence[Row]) -> Alarm | None:
    """By held-out scores where they are frequent enough, else by training rewards."""
    evaluated = [row for row in rows if "eval/score/all" in row]
    changes = _changes(evaluated, "eval/score/", 2)
    changes = changes or _changes(rows, "category/", CATEGORY_BLOCK)
    changes.pop("all", None)
    fell = {n: c for n, c in changes.items() if c < -CATEGORY_DROP}
    rose = {n: c for n, c in changes.items() if c > CATEGORY_DROP / 2}
    if not fell or not rose:
        return None
    down, up = min(fell, key=fell.get), max(rose, key=rose.get)
    return Alarm(
        "category_falls",
        f"the reward of category '{down}' fell by {-fell[down]:.2f} while that of "
        f"'{up}' rose by {rose[up]:.2f}: one is learned at the other's cost. The share "
        "of each category in the data decides this more than the objective does. Put "
        f"back tasks of '{down}', repeat no others, and check its labels",
    )


def _changes(rows: Sequence[Row], prefix: str, size: int) -> dict[str, float]:
    """Change of each name's mean from its best block of `size` values, or from its
    first where it rose, to its last; 0 where that is within noise."""
    recent_rows = rows[-size:]
    names = {name for row in recent_rows for name in row if name.startswith(prefix)}
    changes = {}
    for name in sorted(names):
        values = series(rows, name)
        ends = range(size, len(values) - size + 1, size)
        blocks = [values[end - size : end] for end in ends]
        if not blocks:
            continue
        last, best = values[-size:], max(blocks, key=statistics.fmean)
        fall = statistics.fmean(last) - statistics.fmean(best)
        gain = statistics.fmean(last) - statistics.fmean(blocks[0])
        noise = CATEGORY_ERRORS * _error(best, last)
        change = fall if fall < -CATEGORY_DROP else gain
        changes[name.removeprefix(prefix)] = change if abs(change) > noise else 0.0
    return changes


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """Standard error of the difference of two means; 0 for pairs, too few to tell."""
    spread = statistics.variance(one) + statistics.variance(other)
    return math.sqrt(spread / len(one)) if len(one) > 2 else 0.0


RULES = (
    _flat_groups,
    _no_gradient,
    _gradient_explosion,
    _gradient_not_finite,
    _nonfinite_tokens,
    _logprob_gap,
    _entropy_blowup,
    _reward_ceiling,
    _identical_samples,
    _ratio_growth,
    _category_falls,
)
