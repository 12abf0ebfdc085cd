import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.objective import scans

running_sum = jax.jit(scans.running_sum)
segment_sum = jax.jit(scans.segment_sum)
running_count = jax.jit(scans.running_count)
running_sum_and_count = jax.jit(scans.running_sum_and_count)
segment_count = jax.jit(scans.segment_count)
discounted_sum = jax.jit(scans.discounted_sum)


def random_starts(rng, shape):
    starts = rng.random(shape) < 0.3
    starts[:, 0] = True
    return starts


def loop_running(x, starts):
    out = np.zeros_like(x, np.float64)
    for b in range(x.shape[0]):
        total = 0.0
        for t in range(x.shape[1]):
            total = x[b, t] if starts[b, t] else total + x[b, t]
            out[b, t] = total
    return out


def loop_segment(x, starts):
    out = np.zeros_like(x, np.float64)
    ids = np.cumsum(starts, axis=1)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            out[b, t] = x[b, ids[b] == ids[b, t]].astype(np.float64).sum()
    return out


def test_running_sum_golden():
    x = jnp.array([[0.1, 0.2, 0.3, -0.1, 0.4]])
    starts = jnp.array([[1, 0, 1, 0, 0]], bool)
    got = running_sum(x, starts)
    np.testing.assert_allclose(got, [[0.1, 0.3, 0.3, 0.2, 0.6]], atol=1e-6)


def test_discounted_sum_golden():
    delta = jnp.array([[0.1, -0.2, 0.3, 0.05]])
    decay = jnp.array([[0.9, 0.0, 0.8, 0.7]])
    got = discounted_sum(delta, decay)
    np.testing.assert_allclose(got, [[-0.08, -0.2, 0.34, 0.05]], atol=1e-6)


def test_sums_against_loops():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 17)).astype(np.float32)
    starts = random_starts(rng, x.shape)
    running = running_sum(jnp.asarray(x), jnp.asarray(starts))
    np.testing.assert_allclose(running, loop_running(x, starts), atol=1e-5)
    whole = segment_sum(jnp.asarray(x), jnp.asarray(starts))
    np.testing.assert_allclose(whole, loop_segment(x, starts), atol=1e-5)
    one_row = np.zeros_like(starts)
    one_row[:, 0] = True
    np.testing.assert_allclose(
        running_sum(jnp.asarray(x)), loop_running(x, one_row), atol=1e-5
    )
    np.testing.assert_allclose(
        segment_sum(jnp.asarray(x)), loop_segment(x, one_row), atol=1e-5
    )


@pytest.mark.parametrize("length", [1, 17, 128])
def test_counts_against_loops(length):
    rng = np.random.default_rng(4)
    mask = rng.random((5, length)) < 0.4
    starts = random_starts(rng, mask.shape)
    running = running_count(jnp.asarray(mask), jnp.asarray(starts))
    np.testing.assert_array_equal(running, loop_running(mask.astype(int), starts))
    x = rng.normal(size=mask.shape).astype(np.float32)
    sums, same = running_sum_and_count(*map(jnp.asarray, (x, mask, starts)))
    np.testing.assert_allclose(sums, loop_running(x, starts), atol=1e-5)
    np.testing.assert_array_equal(same, running)
    counts = segment_count(jnp.asarray(mask), jnp.asarray(starts))
    assert counts.dtype == running.dtype == jnp.int32
    np.testing.assert_array_equal(counts, loop_segment(mask, starts))
    whole = segment_count(jnp.asarray(mask))
    np.testing.assert_array_equal(
        whole, np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)
    )


def test_segment_sum_is_the_same_number_at_every_position():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(5, 17)), jnp.float32)
    starts = jnp.asarray(random_starts(rng, x.shape))
    sums, ids = segment_sum(x, starts), np.cumsum(starts, axis=1)
    for row in range(5):
        for segment in np.unique(ids[row]):
            assert len(np.unique(np.asarray(sums)[row, ids[row] == segment])) == 1


def test_running_sum_error_over_8192_tokens():
    x = np.random.default_rng(2).normal(size=(2, 8192)).astype(np.float32) * 0.0366
    exact = np.cumsum(x.astype(np.float64), axis=1)
    assert np.abs(running_sum(jnp.asarray(x)) - exact).max() < 1e-5


def test_rows_of_one_token():
    x, start = jnp.full((1, 1), 2.0), jnp.ones((1, 1), bool)
    assert running_sum(x, start) == segment_sum(x, start) == discounted_sum(x, x) == 2


def test_run_starts():
    mask = jnp.array([[1, 1, 0, 0, 1, 1, 1, 0]], bool)
    packed = scans.segment_starts(jnp.array([[1, 1, 1, 2, 2, 3, 3, 0]]))
    assert jax.jit(scans.run_starts)(mask, None).tolist()[0] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert jax.jit(scans.run_starts)(mask, packed).tolist()[0] == [
        1,
        0,
        0,
        1,
        1,
        1,
        0,
        1,
    ]


def test_turn_starts_bridge_masked_tokens():
    turns = jnp.array([[-1, 0, 0, -1, 0, -1, 1, 1]])
    mask = jnp.array([[0, 1, 1, 0, 1, 0, 1, 1]], bool)
    assert jax.jit(scans.turn_starts)(turns, mask, None).tolist()[0] == [
        1,
        1,
        0,
        0,
        0,
        0,
        1,
        0,
    ]


def test_long_rows_are_scanned_in_blocks():
    """Two levels of eight, one and no block left, all-zero starts, integers too."""
    rng = np.random.default_rng(5)
    for length in (128, 64, 72, 16):
        x = rng.normal(size=(3, length)).astype(np.float32)
        starts = random_starts(rng, x.shape)
        starts[1, 1:] = False
        np.testing.assert_allclose(
            running_sum(x, starts), loop_running(x, starts), atol=1e-5
        )
        np.testing.assert_allclose(
            segment_sum(x, starts), loop_segment(x, starts), atol=1e-5
        )
        np.testing.assert_allclose(
            running_sum(x), np.cumsum(x, axis=1, dtype=np.float64), atol=1e-5
        )
        counts = starts.astype(np.int32)
        np.testing.assert_array_equal(running_sum(counts), np.cumsum(counts, axis=1))
