"""The critic's loss and explained variance against float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective


def numbers(seed, shape=(6, 9)):
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, *shape)).astype(np.float32)
    return values, old, returns, rng.random(shape) < 0.5


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5])
def test_loss_and_gradient_against_reference(clip):
    values, old, returns, mask = numbers(0)
    (total, weight), (clipped, _) = objective.value_loss(
        values, old, returns, mask, clip=clip
    )
    v, o, r = (x[mask].astype(np.float64) for x in (values, old, returns))
    error = (v - r) ** 2
    bounded = (o + np.clip(v - o, -clip, clip) - r) ** 2 if clip else error
    np.testing.assert_allclose(total, np.maximum(error, bounded).sum() / 2, rtol=1e-5)
    assert weight == mask.sum() and clipped == (bounded > error).sum()
    assert bool(clip) == bool(clipped)

    def loss(values):
        return objective.value_loss(values, old, returns, mask, clip=clip)[0][0]

    expected = np.zeros(values.shape)
    expected[mask] = np.where(bounded > error, 0.0, v - r)
    np.testing.assert_allclose(jax.grad(loss)(values), expected, atol=1e-5)


def test_a_value_beyond_the_clip_gains_nothing():
    """Return 2: the value has moved from 0 by .4 and .6, which counts as .5."""
    old, returns, mask = jnp.zeros(2), jnp.full(2, 2.0), jnp.ones(2, bool)
    (total, _), (clipped, _) = objective.value_loss(
        jnp.array([0.4, 0.6]), old, returns, mask, clip=0.5
    )
    np.testing.assert_allclose(total, (1.6**2 + 1.5**2) / 2, rtol=1e-6)
    assert clipped == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_masked_and_non_finite_steps_reach_neither_loss_nor_gradient(bad):
    values, old, returns, mask = numbers(1)
    good = objective.value_loss(values, old, returns, mask, clip=0.5)
    spoilt = [np.where(mask, x, np.float32(bad)) for x in (values, old, returns)]
    assert objective.value_loss(*spoilt, mask, clip=0.5) == good
    if np.isfinite(bad):
        return
    row, column = np.argwhere(mask)[0]
    values[row, column] = bad

    def loss(values):
        return objective.value_loss(values, old, returns, mask, clip=0.5)[0][0]

    slope = jax.grad(loss)(values)
    assert np.isfinite(loss(values)) and np.isfinite(slope).all()
    assert slope[row, column] == 0


def test_no_steps_make_no_loss():
    values, old, returns, _ = numbers(2)
    nothing = np.zeros(values.shape, bool)
    (total, weight), _ = objective.value_loss(values, old, returns, nothing, clip=0.5)
    assert total == 0 and weight == 0


def test_explained_variance_against_reference():
    values, _, returns, mask = numbers(3)
    left = (returns - values)[mask].astype(np.float64)
    expected = 1 - left.var() / returns[mask].astype(np.float64).var()
    spoilt = np.where(mask, values, np.nan)
    got = objective.explained_variance(spoilt, returns, mask)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert objective.explained_variance(returns, returns, mask) == 1
    assert objective.explained_variance(0 * returns, returns, mask) == 0
    # Equal returns, or none at all, leave nothing to explain.
    assert np.isnan(objective.explained_variance(values, np.full((6, 9), 0.1), mask))
    assert np.isnan(objective.explained_variance(values, returns, mask & False))
