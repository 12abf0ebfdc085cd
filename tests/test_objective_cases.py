"""The objective-level cases of public bug reports, each under its id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective
from grpo_jax.objective import losses

aggregate = jax.jit(losses.aggregate, static_argnames="aggregation")

LM1_MASK = np.array([[1, 1, 0, 0, 0, 0, 0, 1]], bool)


@jax.jit
@jax.value_and_grad
def lm1_loss(new, beta):
    zeros = jnp.zeros((1, 8))
    policy = objective.policy_loss(new, zeros, jnp.ones(1), LM1_MASK).loss
    total, weight = objective.kl_penalty(new, zeros, LM1_MASK)
    return policy + beta * total / weight


@pytest.mark.parametrize("masked", [5.0, -5.0, 0.0, 0.37, np.nan, np.inf])
def test_LM1_tool_tokens_never_change_the_loss(masked):
    new = np.full((1, 8), masked, np.float32)
    new[LM1_MASK] = 0, 0.1, -0.1
    for beta in (0.0, 0.5):
        value, gradient = lm1_loss(new, beta)
        d = new[LM1_MASK].astype(np.float64)
        kl = np.exp(-d) + d - 1
        expected = -np.exp(d).mean() + beta * kl.mean()
        np.testing.assert_allclose(value, expected, atol=1e-5)
        if beta == 0:
            np.testing.assert_allclose(value, -1.0033361, atol=1e-5)
        slopes = (-np.exp(d) + beta * (1 - np.exp(-d))) / 3
        np.testing.assert_allclose(gradient[LM1_MASK], slopes, atol=1e-6)
        assert (gradient[~LM1_MASK] == 0).all()


def test_LP1_one_sided_temperature_shows_in_the_ratio():
    logits = jnp.array([2.0, 1.0, 0.0])
    cold, warm = jax.nn.log_softmax(logits / 0.5), jax.nn.log_softmax(logits)
    np.testing.assert_allclose(cold, [-0.1429316, -2.1429316, -4.1429316], atol=1e-6)
    tokens = jnp.array([0, 2])
    mask, ones = jnp.ones((1, 2), bool), jnp.ones(1)

    def ratio(new, old, token):
        one = objective.policy_loss(
            new[token].reshape(1, 1), old[token].reshape(1, 1), ones, mask[:, :1],
            clip="none",
        )  # fmt: skip
        return -one.loss

    same = [ratio(cold, cold, t) for t in tokens]
    np.testing.assert_allclose(same, 1.0, atol=1e-6)
    one_sided = [ratio(warm, cold, t) for t in tokens]
    np.testing.assert_allclose(one_sided, [0.7674558, 5.6707743], atol=1e-5)


def test_AD1_flat_groups_and_groups_of_one():
    rewards = jnp.array([[1.0] * 4, [0.5] * 4, [1.0, 0, 0, 0]])
    centred = objective.group_advantages(rewards, scale="none")
    assert (centred[:2] == 0).all()
    np.testing.assert_allclose(centred[2], [0.75, -0.25, -0.25, -0.25], atol=1e-6)
    scaled = objective.group_advantages(rewards)
    assert (scaled[:2] == 0).all() and np.isfinite(scaled).all()
    no_signal = np.mean(np.all(np.asarray(scaled) == 0, axis=1))
    np.testing.assert_allclose(no_signal, 2 / 3)
    assert objective.group_advantages(jnp.array([[0.7]])) == 0


def test_AD1_batch_of_flat_groups_has_zero_loss_and_gradient():
    advantages = objective.group_advantages(jnp.full((2, 4), 0.7)).reshape(-1)
    mask = jnp.ones((8, 3), bool)

    def loss(x):
        return objective.policy_loss(x, jnp.zeros((8, 3)), advantages, mask).loss

    value, gradient = jax.value_and_grad(loss)(jnp.full((8, 3), 0.4))
    assert value == 0 and (gradient == 0).all()


def test_AD3_one_documented_standard_deviation():
    rewards = jnp.array([[2.0, 0, 0, 1]])
    for options, expected in (
        ({"ddof": 0}, [1.5075567, -0.9045340, -0.9045340, 0.3015113]),
        ({}, [1.3055824, -0.7833495, -0.7833495, 0.2611165]),
        ({"scale": "none"}, [1.25, -0.75, -0.75, 0.25]),
    ):
        got = objective.group_advantages(rewards, **options)
        np.testing.assert_allclose(got[0], expected, atol=1e-5)


def advantages_by_id(ids, rewards, **options):
    rows, real = objective.rows_by_group(ids)
    advantages = objective.group_advantages(rewards[rows], real, **options)
    out = np.full(len(rewards), np.nan, np.float32)
    out[rows[real]] = np.asarray(advantages)[real]
    return out


def test_AD4_groups_follow_ids_not_positions():
    ids = np.array(["q1", "q2"] * 3)
    rewards = np.array([1, 0, 0, 0, 0.5, 3], np.float32)
    centred = np.array([0.5, -1, -0.5, -1, 0, 2])
    scaled = [1.2247449, -0.7071068, -1.2247449, -0.7071068, 0, 1.4142136]
    rng = np.random.default_rng(0)
    for order in (np.arange(6), *(rng.permutation(6) for _ in range(5))):
        got = advantages_by_id(ids[order], rewards[order], scale="none")
        np.testing.assert_allclose(got, centred[order], atol=1e-6)
        got = advantages_by_id(ids[order], rewards[order], ddof=0)
        np.testing.assert_allclose(got, np.array(scaled)[order], atol=1e-5)


def test_RW3_abstaining_and_infinite_rewards_leave_the_group():
    expected = [[0.5, 0, -0.5, 0]]
    for missing in (np.nan, np.inf, -np.inf):
        rewards = jnp.array([[1, missing, 0, 0.5]])
        got = objective.group_advantages(rewards, scale="none")
        np.testing.assert_allclose(got, expected, atol=1e-6)
    valid = jnp.array([[True, False, True, True]])
    got = objective.group_advantages(jnp.array([[1, 9, 0, 0.5]]), valid, scale="none")
    np.testing.assert_allclose(got, expected, atol=1e-6)


LN1 = {"A": [4.0], "B": [1.0, 3.0], "C": [1.0, 1.0, 1.0, 1.0, 6.0], "D": []}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 2.25), ("seq_mean_token_mean", 2.6666667), ("constant", 0.75)],
)
@pytest.mark.parametrize("row_d", ["", "D"])
def test_LN1_loss_does_not_depend_on_the_cut(aggregation, expected, row_d):
    def loss(cut):
        totals = weights = 0.0
        for part in cut:
            rows = np.full((len(part), 5), np.nan, np.float32)
            for i, name in enumerate(part):
                rows[i, : len(LN1[name])] = LN1[name]
            total, weight = aggregate(
                jnp.asarray(rows), jnp.asarray(np.isfinite(rows)), aggregation, 8
            )
            totals, weights = totals + total, weights + weight
        return totals / max(weights, 1)

    for cut in (["ABC" + row_d], ["AB", "C" + row_d], ["A", "B", "C", *row_d], ["CBA"]):
        np.testing.assert_allclose(loss(cut), expected, rtol=1e-6)
    assert loss(["D"]) == 0


def test_KL1_estimators():
    policy, reference = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.25, 0.25])
    new = jnp.asarray(np.log(policy)[:, None], jnp.float32)
    ref = jnp.asarray(np.log(reference)[:, None], jnp.float32)
    mask = jnp.ones((1, 1), bool)
    for estimator, expected in (
        ("k2", [0.0166206, 0.0166206, 0.4197944]),
        ("k3", [0.0156549, 0.0156549, 0.5837093]),
    ):
        got = [
            objective.kl_penalty(
                new[i : i + 1], ref[i : i + 1], mask, estimator=estimator
            )[0]
            for i in range(3)
        ]
        np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(policy @ np.array(got), 0.0724603, atol=1e-6)
    with pytest.raises(ValueError, match="k1"):
        objective.kl_penalty(new, ref, jnp.ones((3, 1), bool), estimator="k1")


@jax.jit
@jax.value_and_grad
def token_loss(new, advantage):
    ones = jnp.ones((1, 1))
    return objective.policy_loss(new, 0 * ones, advantage * ones, ones > 0).total


def surrogate(advantage, log_ratio):
    value, gradient = token_loss(jnp.array([[log_ratio]]), advantage)
    return -float(value), float(gradient[0, 0])


def test_KL1_clip_table():
    table = {1.0: (0.5, 1.0, 1.2), -1.0: (-0.8, -1.0, -1.5)}
    for advantage, values in table.items():
        for ratio, expected in zip((0.5, 1.0, 1.5), values, strict=True):
            value, slope = surrogate(advantage, float(np.log(ratio)))
            np.testing.assert_allclose(value, expected, atol=1e-6)
            assert (slope == 0) == ((advantage, ratio) in {(1.0, 1.5), (-1.0, 0.5)})


def test_KL1_overflow_and_nan():
    assert surrogate(0.0, 1000.0) == (0.0, 0.0)
    for advantage in (1.0, -1.0):
        assert np.isfinite(surrogate(advantage, 1000.0)).all()
    mask = jnp.ones((1, 2), bool)
    new = jnp.array([[jnp.nan, 0.1]])
    got = objective.policy_loss(new, jnp.zeros((1, 2)), jnp.ones(1), mask)
    np.testing.assert_allclose(got.loss, -np.exp(0.1), atol=1e-6)
    assert got.weight == 1 and got.metrics["nonfinite_tokens"] == (1, 2)
    total, weight = objective.kl_penalty(new, jnp.zeros((1, 2)), mask)
    assert np.isfinite(total) and weight == 1


def test_ME1_clip_fraction_is_not_a_mean_of_means():
    sums = weights = 0.0
    for clipped, tokens in ((2, 10), (4, 5)):
        new = np.where(np.arange(10) < clipped, 1.0, 0.0)[None].astype(np.float32)
        mask = np.arange(10)[None] < tokens
        loss = objective.policy_loss(new, jnp.zeros((1, 10)), jnp.ones(1), mask)
        for name in ("high", "region"):
            assert loss.metrics[f"clip_ratio/{name}"] == (clipped, tokens)
        value, weight = loss.metrics["clip_ratio/high"]
        sums, weights = sums + value, weights + weight
    np.testing.assert_allclose(sums / weights, 0.4)


def test_ST1_masks_decide_what_counts_whatever_the_ids():
    """Rows of true lengths 3, 2, 5: every sampled end token carries loss."""
    mask = jnp.arange(5) < jnp.array([[3], [2], [5]])

    def loss(x):
        return objective.policy_loss(x, jnp.zeros((3, 5)), jnp.ones(3), mask)

    result = loss(jnp.zeros((3, 5)))
    assert result.weight == 10
    gradient = jax.grad(lambda x: loss(x).total)(jnp.zeros((3, 5)))
    np.testing.assert_array_equal(gradient, np.where(mask, -1.0, 0.0))
