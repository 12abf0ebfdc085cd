"""RLOO, GRPO-LEAD, MT-GRPO, GiGPO and the group filters against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_advantages import reference_standardise

from grpo_jax import objective
from grpo_jax.objective.credit import difficulty_weight

NAN = np.nan


def random_groups(seed=0, shape=(5, 6)):
    """Rewards, validity and lengths; a flat group, an invalid one, a NaN."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=shape).astype(np.float32)
    valid = rng.random(shape) < 0.8
    rewards[1], valid[2], rewards[3, 0] = 0.7, False, NAN
    return rewards, valid, rng.integers(10, 9000, shape).astype(np.float32)


def test_rloo_against_reference():
    rewards, valid, _ = random_groups()
    got = objective.rloo_advantages(rewards, valid)
    use = valid & np.isfinite(rewards)
    for p, g in np.ndindex(*rewards.shape):
        others = rewards[p, use[p] & (np.arange(6) != g)].astype(np.float64)
        expected = rewards[p, g] - others.mean() if use[p, g] and len(others) else 0
        np.testing.assert_allclose(got[p, g], expected, atol=1e-5)
    assert (got[1] == 0).all() and (got[2] == 0).all()


# --- GRPO-LEAD ------------------------------------------------------------------------


def test_lead_golden():
    lengths = np.array([[8000, 6000, 9000, 7000]])
    correct = np.array([[1, 1, 0, 0]], bool)
    got = objective.lead_advantages(-np.ones((1, 4)), correct, lengths)
    expected = [[1.183034, 1.269744, -1.226389, -1.226389]]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_lead_weighs_by_difficulty_golden():
    correct = np.arange(8)[None] < 1
    same = np.full((1, 8), 100)
    got = objective.lead_advantages(-np.ones((1, 8)), correct, same)
    np.testing.assert_allclose(got, [[3.707060] + [-0.228031] * 7], atol=1e-5)
    mirrored = objective.lead_advantages(-np.ones((1, 8)), ~correct, same)
    np.testing.assert_allclose(mirrored, [[-3.707060] + [0.228031] * 7], atol=1e-5)


def test_lead_difficulty_golden():
    got = difficulty_weight(jnp.array([0, 0.25, 0.5, 0.75, 0.875, 1]))
    expected = [1.499392, 1.492638, 1.416556, 0.95, 0.644970, 0.483444]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_lead_pushes_down_on_all_correct_groups():
    """Eight correct lengths 7600 ... 9000: the weights break the zero sum."""
    lengths = np.linspace(7600, 9000, 8)[None]
    got = objective.lead_advantages(np.zeros((1, 8)), np.ones((1, 8), bool), lengths)
    np.testing.assert_allclose(got[0, [0, -1]], [0.704860, -2.098676], atol=2e-5)
    assert -3.5 < got.sum() < -3
    short = objective.lead_advantages(
        np.zeros((1, 8)), np.ones((1, 8), bool), lengths, min_length=7801.0
    )
    assert (short == 0).all()


def reference_lead(rewards, correct, lengths, use, min_length):
    out = np.zeros(len(rewards))
    earned = np.where(correct, 1.0, rewards).astype(np.float64)
    right = use & correct
    shortest = np.sort(lengths[use])[:3]
    long = len(shortest) < 3 or shortest.mean() > min_length
    if right.sum() > 1 and long:
        those = lengths[right].astype(np.float64)
        z = (those - those.mean()) / (those.std(ddof=1) + 1e-6)
        earned[right] = np.exp(-0.05 * z)
    out[use] = reference_standardise(earned[use], 1, 1e-6)
    rho = (earned[use] > 0).mean() if use.any() else 0.0
    share = np.where(out > 0, rho, 1 - rho)
    return out * (0.4 + 1.1 / (1 + np.exp(10 * (share - 0.75))))


@pytest.mark.parametrize("min_length", [0.0, 2500.0])
def test_lead_against_reference(min_length):
    _, valid, lengths = random_groups(1)
    correct = np.random.default_rng(2).random(valid.shape) < 0.5
    wrong = np.where(np.arange(6) % 2, -1.0, 0.0) * np.ones((5, 1))
    got = objective.lead_advantages(
        wrong, correct, lengths, valid, min_length=min_length
    )
    for p in range(5):
        expected = reference_lead(
            wrong[p], correct[p], lengths[p], valid[p], min_length
        )
        np.testing.assert_allclose(got[p], expected, atol=1e-5)


# --- turns ----------------------------------------------------------------------------


def random_turns(seed=0):
    """[3,4,5] turn rewards, ragged masks, states out of few, outcome advantages."""
    rng = np.random.default_rng(seed)
    shape = (3, 4, 5)
    rewards = np.round(rng.normal(size=shape), 1).astype(np.float32)
    mask = np.arange(5) < rng.integers(1, 6, (3, 4, 1))
    mask[1, 2] = False
    rewards[~mask] = NAN
    return rewards, mask, rng.integers(0, 4, shape), rng.normal(size=(3, 4))


def test_mt_grpo_two_turns():
    """The turn of a call has both parts, the answer only the outcome."""
    rewards = np.array([[[1, 9], [0, 9], [0, 9], [1, 9]]], np.float32)
    outcome = np.array([[1.5, -0.5, -0.5, -0.5]], np.float32)
    got = objective.mt_grpo_advantages(
        rewards, np.ones((1, 4, 2), bool), outcome, turn_weight=0.5
    )
    turn = 0.866024 * np.array([1, -1, -1, 1])
    np.testing.assert_allclose(got[0, :, 0], outcome[0] + 0.5 * turn, atol=1e-5)
    np.testing.assert_array_equal(got[0, :, 1], outcome[0])


def test_mt_grpo_against_reference():
    rewards, mask, _, outcome = random_turns()
    got = objective.mt_grpo_advantages(rewards, mask, outcome, turn_weight=0.7)
    for p in range(3):
        for j in range(5):
            use = mask[p, :, j]
            expected = np.zeros(4)
            expected[use] = reference_standardise(rewards[p, use, j], 1, 1e-6)
            later = mask[p, :, j + 1] if j < 4 else np.zeros(4, bool)
            expected = outcome[p] + np.where(later, 0.7 * expected, 0)
            np.testing.assert_allclose(got[p, :, j], expected * use, atol=1e-5)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_gigpo_against_reference(scale):
    rewards, mask, states, outcome = random_turns(1)
    got = objective.gigpo_advantages(
        rewards, mask, states, outcome, gamma=0.9, turn_weight=0.6, scale=scale
    )
    returns = np.zeros(rewards.shape)
    for p, g, j in np.ndindex(*rewards.shape):
        tail = rewards[p, g, j:][mask[p, g, j:]].astype(np.float64)
        returns[p, g, j] = (tail * 0.9 ** np.arange(len(tail))).sum()
    for p, g, j in np.ndindex(*rewards.shape):
        pool = returns[p][mask[p] & (states[p] == states[p, g, j])]
        step = returns[p, g, j] - pool.mean() if len(pool) > 1 else 0.0
        if scale == "std" and len(pool) > 1:
            step /= pool.std(ddof=1) + 1e-6
        expected = (outcome[p, g] + 0.6 * step) * mask[p, g, j]
        np.testing.assert_allclose(got[p, g, j], expected, atol=2e-5)


def test_gigpo_state_that_is_met_once_adds_nothing():
    states = np.arange(4).reshape(1, 2, 2)
    got = objective.gigpo_advantages(
        np.ones((1, 2, 2)), np.ones((1, 2, 2), bool), states, np.ones((1, 2)), gamma=1.0
    )
    assert (got == 1).all()


def test_turn_estimators_are_detached():
    rewards, mask, states, outcome = random_turns()
    outcome = jnp.asarray(outcome, jnp.float32)

    def total(x):
        both = objective.mt_grpo_advantages(rewards, mask, x)
        both += objective.gigpo_advantages(rewards, mask, states, x, gamma=0.9)
        return both.sum()

    assert (jax.grad(total)(outcome) == 0).all()


# --- filters --------------------------------------------------------------------------


def test_flat_and_saturated_groups():
    rewards = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, NAN, 1], [1, 0, 0]])
    valid = np.array([[1, 1, 1]] * 4 + [[1, 0, 0]], bool)
    flat = objective.flat_groups(rewards, valid)
    assert flat.tolist() == [True, True, False, True, True]
    saturated = objective.saturated_groups(rewards == 1, valid & np.isfinite(rewards))
    assert saturated.tolist() == [True, False, False, True, True]
    none = objective.saturated_groups(np.ones((1, 3), bool), np.zeros((1, 3), bool))
    assert not none.any()


def test_overlong_golden():
    lengths = np.array([16384, 17408, 20480, 22000])
    options = {"max_length": 20480, "buffer": 4096}
    paper = objective.overlong_penalty(lengths, **options)
    np.testing.assert_allclose(paper, [0, -0.25, -1, -1], atol=1e-6)
    code = objective.overlong_penalty(lengths, **options, floor=-np.inf)
    np.testing.assert_allclose(code, [0, -0.25, -1, -1.371094], atol=1e-6)
