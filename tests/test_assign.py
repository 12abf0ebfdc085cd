"""Rewards of a rollout batch to advantages of turns: order, filters, estimators."""

import numpy as np
import pytest

from configs import tir
from grpo_jax import objective
from grpo_jax.training.assign import Estimator, is_void, solved
from grpo_jax.training.batching import collate
from grpo_jax.training.choices import make_estimator
from grpo_jax.training.steps import first_tokens, token_steps
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Reward, Task, Turn


def rollout(total, *statuses, turns=None, stop="stop", text="a", tokens=2, **more):
    """A trajectory that calls once a status, each observed by its own text, and then
    answers `text` (None: it does not)."""
    said = [Turn("", [CallRecord("python", {}, s, "")]) for s in statuses]
    said += [] if text is None else [Turn(text)]
    segments = [Segment.given(Source.PROMPT, [1])]
    for i, _ in enumerate(said):
        segments += [Segment.given(Source.TOOL, [7, i])] if i else []
        segments.append(Segment.given(Source.MODEL, [2] * tokens))
    made = Trajectory(Task("t", []), 0, 0, segments, said, stop)
    made.reward = Reward(total, turns=turns, **more)
    return made


def advantages(trajectories, **options):
    """Each row's advantages of turns, None for rows that are left out; metrics."""
    options = {"name": "grpo", "num_generations": len(trajectories)} | options
    examples, metrics = Estimator(**options).examples(trajectories)
    rows = {id(e.trajectory): e.advantages for e in examples}
    return [rows.get(id(t)) for t in trajectories], metrics


def test_an_outcome_goes_to_every_turn():
    rows, metrics = advantages([rollout(1.0, "ok"), rollout(0.0), rollout(0.0)] * 2)
    np.testing.assert_allclose(rows[0], [1.290993] * 2, atol=1e-5)
    np.testing.assert_allclose(rows[1], [-0.645496], atol=1e-5)
    assert metrics == {"frac_advantage_zero": 0.0}


def test_gtpo_golden():
    """The worked example: a success in three turns, a failure that began malformed."""
    group = [rollout(1.0, "ok", "ok"), rollout(0.0, "malformed")]
    rows, _ = advantages(group, name="gtpo", max_turns=4)
    np.testing.assert_allclose(rows[0], [0.545810, 0.716376, 0.905893], atol=1e-5)
    np.testing.assert_allclose(rows[1], [-1.178798, -0.989281], atol=1e-5)


def test_gtpo_first_turn_must_call_where_a_tool_is_needed():
    group = [rollout(1.0), rollout(1.0)]
    free, _ = advantages(group, name="gtpo")
    assert [row.tolist() for row in free] == [[0], [0]]
    group[1] = rollout(1.0, "ok")
    rows, _ = advantages(group, name="gtpo", has_tools=True, gamma=1.0, max_turns=2)
    assert rows[0][0] < 0 < rows[1][0]


def test_gtpo_pools_the_batch_where_asked():
    group = [rollout(1.0, "ok"), rollout(0.0, "ok"), rollout(0.5), rollout(0.5)]
    options = {"name": "gtpo", "num_generations": 2, "gamma": 1.0, "max_turns": 2}
    own, _ = advantages(group, **options)
    pooled, _ = advantages(group, norm_scope="batch", **options)
    assert own[2] == 0 and pooled[2] == 0 and own[0][0] != pooled[0][0]


def test_identical_successes_punish_their_opening_turns_unless_dropped():
    group = [rollout(1.0, "ok", "ok"), rollout(1.0, "ok", "ok")]
    rows, _ = advantages(group, name="gtpo", max_turns=3)
    np.testing.assert_allclose(rows[0], [-1.097913, -0.039211, 1.137124], atol=2e-5)
    rows, metrics = advantages(group, name="gtpo", max_turns=3, drop_flat=True)
    assert rows == [None, None]
    assert metrics == {"filter/flat_groups": 1.0, "frac_advantage_zero": 1.0}


def test_turn_rewards_stay_with_their_turn_and_the_rest_is_the_last_ones():
    """gamma 0: the pool is [.25, .75] and [0, 0]."""
    group = [rollout(1.0, "ok", turns=[0.25, 0.0]), rollout(0.0, "ok")]
    rows, _ = advantages(group, name="gtpo", gamma=0.0, max_turns=2)
    pool = np.array([0.25, 0.75, 0, 0])
    expected = (pool - pool.mean()) / pool.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)


def test_mt_grpo_adds_the_turns_own_rewards_before_the_answer():
    turns = [[1.0, 0.0], [0.0, 0.0]]
    group = [rollout(1.0, "ok", turns=t) for t in turns]
    rows, _ = advantages(group, name="mt_grpo", max_turns=2, turn_weight=0.5)
    assert rows[0][1] == rows[1][1] == 0  # equal totals: no outcome advantage
    np.testing.assert_allclose([rows[0][0], rows[1][0]], [0.353553, -0.353553], 1e-4)


def test_gigpo_compares_turns_with_equal_observations():
    """Both first turns saw the prompt, both second ones [7, 1]; the third is alone."""
    group = [rollout(1.0, "ok"), rollout(0.0, "ok", "ok")]
    rows, _ = advantages(
        group, name="gigpo", max_turns=3, gamma=1.0, scale="none", turn_weight=2.0
    )
    np.testing.assert_allclose(rows[0], [1.5, 1.5], atol=1e-5)
    np.testing.assert_allclose(rows[1], [-1.5, -1.5, -0.5], atol=1e-5)


def test_lead_shortens_and_grades_failures():
    group = [rollout(1.0, tokens=80), rollout(1.0, tokens=60), rollout(0.0)]
    group.append(rollout(0.0, stop="length"))
    options = {"name": "lead", "lead_min_length": 0.0, "max_turns": 1}
    rows, _ = advantages(group, **options)
    assert rows[1] > rows[0] > rows[3] > rows[2]  # unfinished above wrong, as released
    rows, _ = advantages(group, lead_unfinished=-1.0, **options)
    assert rows[3] == rows[2]


def test_rloo():
    rows, _ = advantages([rollout(x) for x in (1.0, 0.0, 0.5)], name="rloo")
    np.testing.assert_allclose(np.concatenate(rows), [0.75, -0.75, 0], atol=1e-6)


def test_ngrpo_keeps_groups_that_failed_and_drops_those_that_succeeded():
    group = [rollout(x, maximum=1.0, passed=x == 1) for x in (0.0, 0.0, 1.0, 1.0)]
    rows, metrics = advantages(
        group, name="ngrpo", num_generations=2, drop_saturated=True
    )
    np.testing.assert_allclose(rows[0], -1 / 3**0.5, atol=1e-5)
    assert rows[2:] == [None, None]
    assert metrics["filter/saturated_groups"] == 0.5


def test_simpletir_void_rows_leave_the_loss_and_stay_in_the_statistics():
    group = [rollout(1.0), rollout(0.0), rollout(0.0, text=" "), rollout(1.0)]
    rows, metrics = advantages(group, mask_void=True)
    kept = [0.866024, -0.866024, 0.866024]
    np.testing.assert_allclose(np.concatenate([*rows[:2], rows[3]]), kept, atol=1e-5)
    assert rows[2] is None and metrics["filter/void_rows"] == 0.25


@pytest.mark.parametrize(
    ("made", "void"),
    [
        (rollout(0.0), False),
        (rollout(0.0, "ok"), False),
        (rollout(0.0, "error", text=None, stop="max_calls"), False),
        (rollout(0.0, "malformed"), True),
        (rollout(0.0, text=""), True),
        (rollout(0.0, stop="length"), True),
        (rollout(0.0, stop="length", parts={"boxed": 1.0}), False),
        (rollout(0.0, parts={"boxed": 0.0}), True),
    ],
)
def test_void_turns(made, void):
    assert is_void(made) == void


def test_truncated_and_abstaining_rows():
    group = [rollout(1.0), rollout(0.0, stop="length"), rollout(None), rollout(0.0)]
    rows, _ = advantages(group, mask_truncated=True)
    assert rows[1] is None and rows[2] is None
    np.testing.assert_allclose(rows[0], 1.154699, atol=1e-5)  # of three rewards


def test_overlong_answers_lose_up_to_1():
    group = [rollout(1.0, tokens=n) for n in (10, 15, 20)]
    rows, metrics = advantages(group, scale="none", overlong_buffer=10, max_length=20)
    np.testing.assert_allclose(np.concatenate(rows), [0.5, 0, -0.5], atol=1e-6)
    np.testing.assert_allclose(metrics["rewards/overlong/mean"], -0.5)


def test_solved_is_the_declared_maximum_or_else_1():
    assert solved(rollout(0.9, passed=True)) and not solved(rollout(1.2, passed=False))
    assert solved(rollout(1.0)) and not solved(rollout(0.9))
    assert not solved(rollout(None))


STEPPO_VALUES = [np.float32([0.5, 0.6, 0.8]), np.float32([0.4, 0.3])]


def steppo(trajectories, values=STEPPO_VALUES, **options):
    options = {"name": "steppo", "num_generations": 2, "gamma": 0.99} | options
    steps = [token_steps(one, options.get("router")) for one in trajectories]
    pairs = zip(values, steps, strict=True)  # NaN where no value is to be read
    known = [np.append(given, np.nan)[own] for given, own in pairs]
    for row, own in zip(known, steps, strict=True):
        row[np.delete(np.arange(len(row)), first_tokens(own))] = np.nan
    return Estimator(**options).examples(trajectories, known)


def test_steppo_golden():
    """The worked example: a success in three turns, a failure in two."""
    group = [rollout(1.0, "ok", "ok"), rollout(0.0, "ok")]
    (one, two), metrics = steppo(group, lam=0.95, max_turns=4)
    np.testing.assert_allclose(
        one.advantages, [0.984656, 0.800749, 0.336757], atol=1e-5
    )
    np.testing.assert_allclose(two.advantages, [-1.170767, -0.951395], atol=1e-5)
    np.testing.assert_allclose(one.returns, [0.951484, 0.9801, 1], atol=1e-5)
    np.testing.assert_allclose(two.returns, [0.01485, 0], atol=1e-5)
    assert one.values.tolist() == STEPPO_VALUES[0].tolist()
    raw, _ = steppo(group, scale="none")
    np.testing.assert_allclose(raw[0].advantages, [0.4801, 0.39, 0.2], atol=1e-5)
    returns = np.concatenate([one.returns, two.returns])
    left = returns - np.concatenate(STEPPO_VALUES)
    np.testing.assert_allclose(
        metrics["critic/explained_variance"], 1 - left.var() / returns.var(), atol=1e-5
    )
    np.testing.assert_allclose(metrics["critic/return_mean"], returns.mean(), atol=1e-5)
    np.testing.assert_allclose(metrics["critic/value_mean"], 0.52, atol=1e-5)


def test_steppo_a_turns_own_reward_stays_with_it():
    group = [rollout(1.0, "ok", turns=[0.25, 0.0]), rollout(0.0)]
    zeros = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
    (one, _), _ = steppo(group, zeros, gamma=1.0, scale="none", max_turns=2)
    np.testing.assert_allclose(one.returns, [1.0, 0.75], atol=1e-6)


def test_steppo_learns_from_equal_rewards_and_alone_and_not_from_abstentions():
    """There is no group to compare with: the critic says what was to be expected."""
    group = [rollout(1.0), rollout(1.0), rollout(None), rollout(1.0)]
    values = [np.float32([v]) for v in (0.0, 1.0, np.nan, 0.5)]
    found, metrics = steppo(group, values, num_generations=1, scale="none")
    assert [one.advantages.tolist() for one in found] == [[1.0], [0.0], [0.5]]
    assert [one.returns.tolist() for one in found] == [[1.0]] * 3
    assert np.isnan(metrics["critic/explained_variance"])


def thirds(tokens):
    """Roles of a turn: a call after the first two tokens, then reasoning again."""
    return (np.arange(len(tokens)) // 2 == 1).astype(np.int32)


def test_steppo_steps_are_parts_of_turns_where_roles_say_so():
    """Turns of five and of two tokens: three steps and one; a turn's reward is its last
    step's."""
    one = rollout(1.0, "ok", turns=[0.25, 0.0], tokens=5)
    one.segments[-1] = Segment.given(Source.MODEL, [2, 2])
    steps = token_steps(one, thirds)
    assert steps.tolist() == [0, 0, 1, 1, 2, -1, -1, 3, 3]
    assert first_tokens(steps).tolist() == [0, 2, 4, 7]
    values = [np.float32([0.5, 0.25, 0.75, 1.0])]
    options = {"num_generations": 1, "gamma": 1.0, "lam": 0.0, "scale": "none"}
    (found,), _ = steppo([one], values, router=thirds, **options)
    np.testing.assert_allclose(found.advantages, [-0.25, 0.5, 0.5, -0.25], atol=1e-6)
    np.testing.assert_allclose(found.returns, [0.25, 0.75, 1.25, 0.75], atol=1e-6)
    assert found.steps.tolist() == steps.tolist()


def test_gtpo_only_centres_where_asked():
    group = [rollout(1.0, "ok"), rollout(0.0)]
    rows, _ = advantages(group, name="gtpo", scale="none", gamma=1.0, max_turns=2)
    np.testing.assert_allclose(rows[0], [1 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(rows[1], [-2 / 3], atol=1e-6)


def test_flat_is_said_of_total_rewards_and_not_of_lengths():
    """A bonus tells two successes apart; an overlong answer alone does not."""
    bonus = [rollout(1.1, "ok", turns=[0.1, 0.0]), rollout(1.0)]
    rows, metrics = advantages(bonus, drop_flat=True, max_turns=2)
    assert rows[0][0] > 0 > rows[1][0] and metrics["filter/flat_groups"] == 0
    lengths = [rollout(1.0, tokens=20), rollout(1.0, tokens=10)]
    options = {"overlong_buffer": 10, "max_length": 20}
    rows, metrics = advantages(lengths, drop_flat=True, **options)
    assert rows == [None, None] and metrics["filter/flat_groups"] == 1
    rows, _ = advantages(lengths, **options)
    assert rows[0] < 0 < rows[1]


def test_the_default_stack_learns_nothing_from_identical_successes():
    """A discount below 1 would punish their opening turns."""
    estimator = make_estimator(tir.get_config(), True)
    group = [rollout(1.0, "ok", "ok") for _ in range(16)]
    assert estimator.gamma < 1 and estimator.examples(group)[0] == []
    group[3] = rollout(0.0, "ok", "ok")
    assert len(estimator.examples(group)[0]) == 16


@pytest.mark.parametrize("form, weight", [("none", 1.0), ("paper", 0.6), ("code", 0.2)])
def test_answers_weigh_by_the_executed_calls_of_the_batch(form, weight):
    """Six in five trajectories, 1.2 each; what could not be read does not count."""
    group = [rollout(1.0, "ok", "error", "malformed"), rollout(0.0, *["ok"] * 4)]
    group += [rollout(0.0, "unknown"), rollout(0.0), rollout(1.0)]
    made = Estimator("grpo", 5, max_turns=5, lld_answer=form)
    examples, metrics = made.examples(group)
    assert [one.answer_weight for one in examples] == pytest.approx([weight] * 5)
    if form != "none":
        assert metrics["lld/answer_weight"] == pytest.approx(weight)


def test_simpletir_denominator_golden():
    """r = 1, 0, 0, 1, the third void: its row leaves the sequence mean too."""
    group = [rollout(1.0), rollout(0.0), rollout(0.0, text=" "), rollout(1.0)]
    made = Estimator("grpo", 4, mask_void=True)
    (batch,) = collate(made.examples(group)[0], row_length=16, rows=1)
    zeros = np.zeros(batch.tokens.shape, np.float32)
    loss = objective.policy_loss(
        *(zeros, zeros, batch.advantages, batch.action_mask),
        aggregation="seq_mean_token_mean",
        segment_ids=batch.segment_ids,
    )
    assert loss.weight == 3
    np.testing.assert_allclose(-loss.loss, 0.288675, atol=1e-6)
    np.testing.assert_allclose(-loss.total / 4, 0.216506, atol=1e-6)
