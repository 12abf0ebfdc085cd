from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective
from grpo_jax.objective import ratios

MASK = np.array([[1, 1, 0, 0, 1, 1, 0]], bool)
LOG_RATIO = np.array([[0.02, 0.05, 9, -3, 0.03, -0.08, 4]], np.float32)


def test_ctpo_golden():
    cumulative, position = objective.cumulative_log_ratio(LOG_RATIO, MASK)
    expected = [[0.02, 0.07, 0.07, 0.07, 0.10, 0.02, 0.02]]
    np.testing.assert_allclose(cumulative, expected, atol=1e-6)
    assert position.tolist() == [[1, 2, 2, 2, 3, 4, 4]]
    assert position.dtype == jnp.int32


def loop_cumulative(log_ratio, mask, segments):
    cumulative, position = np.zeros(mask.shape), np.ones(mask.shape, int)
    for b in range(mask.shape[0]):
        for segment in np.unique(segments[b]):
            total, count = 0.0, 0
            for t in np.nonzero(segments[b] == segment)[0]:
                if mask[b, t] and segment > 0 and np.isfinite(log_ratio[b, t]):
                    total += min(max(float(log_ratio[b, t]), -20.0), 20.0)
                    count += 1
                cumulative[b, t], position[b, t] = total, max(count, 1)
    return cumulative, position


@pytest.mark.parametrize("packed", [False, True])
def test_cumulative_against_reference(packed):
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(size=(4, 24)).astype(np.float32)
    mask = rng.random((4, 24)) < 0.7
    mask[1] = False
    log_ratio[0, 3:6] = 1e4, -1e4, np.nan
    log_ratio[2, 5] = np.inf
    mask[0, 3:6] = mask[2, 5] = True
    log_ratio[~mask] = np.nan
    segments = np.repeat([[1, 1, 2, 5, 6, 0]], 4, axis=0).repeat(4, axis=1)
    segments = segments if packed else np.ones_like(segments)
    got = objective.cumulative_log_ratio(
        log_ratio, mask, jnp.asarray(segments) if packed else None
    )
    expected = loop_cumulative(log_ratio, mask, segments)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(got[1], expected[1])


def test_cumulative_is_detached_and_uncapped():
    log_ratio = jnp.full((1, 4), 15.0)
    mask = jnp.ones((1, 4), bool)
    cumulative, _ = objective.cumulative_log_ratio(log_ratio, mask)
    assert cumulative[0, -1] == 60

    def total(x):
        return objective.cumulative_log_ratio(x, mask)[0].sum()

    assert (jax.grad(total)(log_ratio) == 0).all()


def test_scan_of_bf16_runs_in_float32():
    log_ratio = jnp.full((1, 4096), 0.0366, jnp.bfloat16)
    cumulative, _ = objective.cumulative_log_ratio(log_ratio, jnp.ones((1, 4096), bool))
    assert cumulative.dtype == jnp.float32
    exact = float(log_ratio[0, 0]) * 4096
    np.testing.assert_allclose(cumulative[0, -1], exact, rtol=1e-6)


@partial(jax.jit, static_argnames="ratio")
def values_and_jacobian(ratio, new, mask, turn_ids=None):
    def log_ratio(x):
        old = jnp.zeros_like(x)
        use = ratios.usable_tokens(mask, None, x)
        return ratios.policy_log_ratio(ratio, x, old, use, None, turn_ids)

    return log_ratio(new), jax.jacobian(log_ratio)(new)[0, :, 0, :]


@pytest.mark.parametrize("ratio", ["token", "sequence", "cumulative", "step"])
def test_gradient_goes_through_the_current_token_only(ratio):
    turns = jnp.where(MASK, jnp.array([[0, 0, 0, 0, 1, 1, 0]]), -1)
    values, jacobian = values_and_jacobian(
        ratio, jnp.asarray(LOG_RATIO), jnp.asarray(MASK), turns
    )
    np.testing.assert_array_equal(jacobian, np.diag(MASK[0].astype(float)))
    expected = {
        "token": [0.02, 0.05, 0.03, -0.08],
        "sequence": [0.005] * 4,
        "cumulative": [0.02, 0.07, 0.10, 0.02],
        "step": [0.035, 0.035, -0.025, -0.025],
    }[ratio]
    np.testing.assert_allclose(values[MASK], expected, atol=1e-6)


def test_step_ratio_golden():
    new = jnp.array([[0.01, -0.02, 0.004]])
    mask = jnp.ones((1, 3), bool)
    values, _ = values_and_jacobian("step", new, mask, jnp.zeros((1, 3), int))
    np.testing.assert_allclose(jnp.exp(values), 0.998002, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "top"), [("token", 20), ("sequence", 10), ("cumulative", 10)]
)
def test_limits(ratio, top):
    mask = jnp.ones((1, 3), bool)
    values, _ = values_and_jacobian(ratio, jnp.full((1, 3), 1e4), mask)
    assert values[0, 0] == top
    values, _ = values_and_jacobian(ratio, jnp.full((1, 3), -1e4), mask)
    assert values[0, 0] == -20
