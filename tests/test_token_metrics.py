"""One token that is not finite leaves the metrics of all others as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trajectories import random_examples, tiny_batches

from grpo_jax.training.roles import mean_pair
from grpo_jax.training.token_metrics import GAP, policy_metrics, token_metrics


@pytest.fixture(scope="module")
def batch():
    """Its roles alternate; its sampler's log-probs are random numbers."""
    (batch, *_) = tiny_batches(random_examples(0, groups=2, members=2), 64, 4)
    mask = np.asarray(batch.action_mask)
    return batch.replace(roles=jnp.asarray(np.cumsum(mask, axis=1) % 2 * mask))


def first(batch, of=None):
    """Index of the first action token (with role `of`)."""
    mask = np.asarray(batch.action_mask)
    mask = mask if of is None else mask & (np.asarray(batch.roles) == of)
    return tuple(np.argwhere(mask)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_entropy_is_the_mean_of_the_finite_ones(batch, bad):
    entropy = np.random.default_rng(0).random(batch.tokens.shape).astype(np.float32)
    mask, roles = np.asarray(batch.action_mask).copy(), np.asarray(batch.roles)
    where = first(batch, of=1)
    entropy[where], mask[where] = bad, False
    got = jax.jit(token_metrics, static_argnames="by_role")(entropy, batch, True)
    for name, own in (("entropy", mask), ("entropy/tool", mask & (roles == 1))):
        total, count = got[name]
        assert count == own.sum() > 0
        np.testing.assert_allclose(total, entropy[own].sum(), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_the_samplers_gap_is_that_of_the_finite_log_probs(batch, bad):
    rng = np.random.default_rng(1)
    old = rng.standard_normal(batch.tokens.shape).astype(np.float32)
    mask, where = np.asarray(batch.action_mask).copy(), first(batch)
    gap = np.abs(old - np.asarray(batch.sampler_logprobs))
    old[where], mask[where] = bad, False
    got = jax.jit(policy_metrics, static_argnames="ratio")(old, old, batch, "token")
    total, count = got[f"{GAP}/mean"]
    assert count == mask.sum()
    np.testing.assert_allclose(total, gap[mask].sum(), rtol=1e-5)
    np.testing.assert_allclose(got[f"{GAP}/max"], gap[mask].max(), rtol=1e-6)
    assert np.isfinite(jax.tree.leaves(got)).all()


def test_a_mean_of_nothing_has_no_weight():
    nothing = mean_pair(jnp.full((1, 2), jnp.nan), jnp.ones((1, 2), bool))
    assert nothing == (0, 0)
