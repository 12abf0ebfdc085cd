import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective


def group(rewards, **options):
    rewards = jnp.asarray(rewards, jnp.float32)
    return np.asarray(objective.group_advantages(rewards[None], **options))[0]


def reference_standardise(pool, ddof, eps, pool_extra=()):
    """float64: standardised pool, statistics over pool and extra samples."""
    samples = np.concatenate([np.asarray(pool, np.float64), pool_extra])
    if len(samples) < 2:
        return np.zeros(len(pool))
    mean = samples.mean()
    if np.ptp(samples) <= 1e-6 * max(1, abs(mean)):
        return np.zeros(len(pool))
    return (np.asarray(pool) - mean) / (samples.std(ddof=ddof) + eps)


# --- groups ---------------------------------------------------------------------------


def test_one_deviation_for_the_group_golden():
    """Not the spread of those who call punishes them, but a lower mean: 3/8 and 4/8
    right answers; a mean of a half with any spread costs nothing."""
    right = np.array([1] * 3 + [0] * 5 + [1] * 4 + [0] * 4, np.float32)
    tool, text = np.split(np.asarray(group(right)), 2)
    np.testing.assert_allclose([tool.mean(), text.mean()], [-0.121987, 0.121987], 1e-5)
    spread = np.array([1, 0] * 4 + [0.5] * 8, np.float32)
    tool, text = np.split(np.asarray(group(spread)), 2)
    np.testing.assert_allclose([tool.mean(), text.mean()], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([1, 0, 0, 0], {}, [1.499997] + [-0.499999] * 3),
        ([1, 0, 0, 0], {"eps": 1e-4}, [1.4997] + [-0.4999] * 3),
        ([1, 0, 0, 0], {"ddof": 0}, [1.732047] + [-0.577349] * 3),
        ([1, 0, 0, 0], {"scale": "none"}, [0.75] + [-0.25] * 3),
        ([1, 0, 0, 1], {}, [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1] + [0] * 7, {}, [2.474867] + [-0.353552] * 7),
        ([1] + [0] * 7, {"ddof": 0}, [2.645743] + [-0.377963] * 7),
    ],
)
def test_group_golden(rewards, options, expected):
    np.testing.assert_allclose(group(rewards, **options), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([0.8] * 4, {}, [-0.447209] * 4),
        ([0.8] * 4, {"ddof": 0}, [-0.499994] * 4),
        ([0] * 8, {}, [-0.333332] * 8),
        ([0] * 8, {"ddof": 0}, [-0.353552] * 8),
        ([1] + [0] * 7, {}, [1.763830] + [-0.503951] * 7),
        ([1] + [0] * 7, {"ddof": 0}, [1.870824] + [-0.534521] * 7),
        ([0, 0, 1, 0], {}, [-0.730295, -0.730295, 1.095443, -0.730295]),
        ([0, 0, 1, 0], {"num_virtual": 2}, [-0.912869, -0.912869, 0.912869, -0.912869]),
        ([1] * 4, {}, [0] * 4),
        ([0.7], {}, [-0.707104]),
        ([1 - 1e-3] * 4, {}, [-0.4462] * 4),
    ],
)
def test_ngrpo_golden(rewards, options, expected):
    got = group(rewards, virtual_reward=1.0, **options)
    np.testing.assert_allclose(got, expected, atol=3e-5)


def test_ngrpo_leaves_invalid_rows_out():
    valid = jnp.array([[True, True, True, False]])
    got = group([0.8, 0.8, 0.8, np.nan], valid=valid, virtual_reward=1.0)
    np.testing.assert_allclose(got, [-0.5, -0.5, -0.5, 0], atol=1e-5)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.99])
def test_ngrpo_pushes_flat_groups_down_equally_at_any_level(level):
    got = group([level] * 4, virtual_reward=1.0)
    np.testing.assert_allclose(got, -1 / np.sqrt(5), atol=1e-4)


def test_saturated_groups_within_tolerance_are_flat():
    assert (group([1 - 1e-7] * 4, virtual_reward=1.0) == 0).all()


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("eps", [1e-6, 1e-8])
def test_flat_groups_are_exactly_zero(scale, eps):
    rewards = jnp.full((2, 7), 0.1)  # float32: the mean differs from 0.1
    assert (objective.group_advantages(rewards, scale=scale, eps=eps) == 0).all()


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
def test_groups_of_one_or_none_are_zero(scale):
    valid = jnp.array([[True, False], [False, False]])
    rewards = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    assert (objective.group_advantages(rewards, valid, scale=scale) == 0).all()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("virtual", [None, 1.0])
def test_groups_against_reference(ddof, virtual):
    rng = np.random.default_rng(ddof)
    rewards = rng.random((6, 5)).astype(np.float32)
    rewards[1] = rewards[1, 0]
    rewards[2] = 1e3 + 0.01 * rewards[2]
    valid = rng.random((6, 5)) < 0.8
    options = {"ddof": ddof, "virtual_reward": virtual, "num_virtual": 2}
    got = objective.group_advantages(rewards, valid, **options)
    extra = () if virtual is None else (virtual,) * 2
    expected = np.zeros(rewards.shape)
    for p in range(6):
        expected[p, valid[p]] = reference_standardise(
            rewards[p, valid[p]].astype(np.float64), ddof, 1e-6, extra
        )
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_batch_scale_against_reference():
    rewards = np.random.default_rng(3).random((4, 5)).astype(np.float32)
    valid = np.ones((4, 5), bool)
    valid[0, 2] = False
    got = objective.group_advantages(rewards, valid, scale="batch")
    kept = np.where(valid, rewards, np.nan).astype(np.float64)
    centred = kept - np.nanmean(kept, axis=1, keepdims=True)
    expected = np.nan_to_num(centred / (np.nanstd(kept, ddof=1) + 1e-6))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_small_spread_around_a_large_mean():
    rewards = np.float32(100) + np.arange(4, dtype=np.float32)[None] / 1024
    expected = reference_standardise(rewards[0].astype(np.float64), 1, 1e-6)
    np.testing.assert_allclose(group(rewards[0]), expected, atol=1e-5)


def test_bad_choices_are_named():
    with pytest.raises(ValueError, match="scale must be one of std, none, batch"):
        objective.group_advantages(jnp.ones((1, 2)), scale="sd")
    with pytest.raises(ValueError, match="num_virtual"):
        objective.group_advantages(jnp.ones((1, 2)), num_virtual=-1)
    with pytest.raises(ValueError, match="norm_scope must be one of group, batch"):
        objective.turn_advantages(
            jnp.ones((1, 2, 1)), jnp.ones((1, 2, 1), bool), gamma=1.0, norm_scope="all"
        )


def test_results_are_detached():
    rewards = jnp.array([[1.0, 0.0, 0.5]])
    gradient = jax.grad(lambda r: objective.group_advantages(r).max())(rewards)
    assert (gradient == 0).all()


# --- turns ----------------------------------------------------------------------------


def two_rollouts(second):
    """Three turns that succeed, and two given ones that fail."""
    rewards = jnp.array([[[0.0, 0.0, 1.0], [*second, 7.0]]])
    mask = jnp.array([[[1, 1, 1], [1, 1, 0]]], bool)
    return rewards, mask


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([-0.1, 0], [0.545810, 0.716376, 0.905893, -1.178798, -0.989281]),
        ([-0.1, 0.3], [0.463991, 0.703986, 0.970647, -1.242641, -0.895982]),
    ],
)
def test_gtpo_golden(second, expected):
    got = objective.turn_advantages(*two_rollouts(second), gamma=0.9)
    np.testing.assert_allclose(got.reshape(-1)[:5], expected, atol=1e-5)
    assert got[0, 1, 2] == 0


def test_gtpo_all_pass_group_is_not_flat_below_gamma_one():
    rewards = jnp.array([[[0.0, 0.0, 1.0]] * 2])
    mask = jnp.ones(rewards.shape, bool)
    got = objective.turn_advantages(rewards, mask, gamma=0.9)
    expected = [[[-1.097913, -0.039211, 1.137124]] * 2]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert (objective.turn_advantages(rewards, mask, gamma=1.0) == 0).all()


def test_single_turns_reduce_to_grpo():
    rewards = np.random.default_rng(4).random((3, 4)).astype(np.float32)
    mask = np.ones((3, 4, 1), bool)
    turns = objective.turn_advantages(rewards[..., None], mask, gamma=0.9)
    groups = objective.group_advantages(rewards)
    np.testing.assert_allclose(turns[..., 0], groups, atol=1e-6)


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_turns_against_reference(scope):
    rng = np.random.default_rng(5)
    rewards = rng.normal(size=(3, 4, 6)).astype(np.float32)
    lengths = rng.integers(0, 7, size=(3, 4))
    mask = np.arange(6) < lengths[..., None]
    got = objective.turn_advantages(
        np.where(mask, rewards, np.nan), mask, gamma=0.8, norm_scope=scope
    )
    returns = np.zeros(rewards.shape)
    for p, g, m in zip(*np.nonzero(mask), strict=True):
        later = range(m, lengths[p, g])
        returns[p, g, m] = sum(0.8 ** (k - m) * rewards[p, g, k] for k in later)
    expected = np.zeros(rewards.shape)
    pools = [np.ones_like(mask)] if scope == "batch" else []
    for p in range(3) if scope == "group" else ():
        pools.append(np.arange(3)[:, None, None] == p)
    for pool in pools:
        use = mask & pool
        expected[use] = reference_standardise(returns[use], 1, 1e-6)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_non_finite_turn_reward_leaves_its_trajectory_out():
    rewards = jnp.array([[[0.0, jnp.nan], [0.0, 1.0], [1.0, 0.0]]])
    got = objective.turn_advantages(rewards, jnp.ones((1, 3, 2), bool), gamma=0.9)
    alone = objective.turn_advantages(
        rewards[:, 1:], jnp.ones((1, 2, 2), bool), gamma=0.9
    )
    assert (got[0, 0] == 0).all()
    np.testing.assert_allclose(got[0, 1:], alone[0], atol=1e-6)


# --- steps ----------------------------------------------------------------------------

STEPS = {
    "rewards": jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 5.0]]),
    "values": jnp.array([[0.5, 0.6, 0.8], [0.4, 0.3, jnp.nan]]),
    "mask": jnp.array([[1, 1, 1], [1, 1, 0]], bool),
}


@pytest.mark.parametrize(
    ("gamma", "lam", "raw", "returns", "white"),
    [
        (1, 1, [0.5, 0.4, 0.2, -0.4, -0.3], [1, 1, 1, 0, 0],
         [1.027758, 0.783054, 0.293645, -1.174581, -0.929877]),
        (0.99, 0.95, [0.451484, 0.3801, 0.2, -0.38515, -0.3],
         [0.951484, 0.9801, 1, 0.01485, 0],
         [0.984656, 0.800749, 0.336757, -1.170767, -0.951395]),
        (0.99, 1, [0.4801, 0.39, 0.2, -0.4, -0.3], [0.9801, 0.99, 1, 0, 0],
         [1.0111, 0.786759, 0.313678, -1.180264, -0.931273]),
    ],
)  # fmt: skip
def test_steppo_golden(gamma, lam, raw, returns, white):
    got, got_returns = objective.step_advantages(
        **STEPS, gamma=gamma, lam=lam, whiten=False
    )
    np.testing.assert_allclose(got.reshape(-1)[:5], raw, atol=1e-5)
    np.testing.assert_allclose(got_returns.reshape(-1)[:5], returns, atol=1e-5)
    got, white_returns = objective.step_advantages(**STEPS, gamma=gamma, lam=lam)
    np.testing.assert_allclose(got.reshape(-1)[:5], white, atol=1e-5)
    np.testing.assert_allclose(white_returns, got_returns, atol=1e-6)
    assert got[1, 2] == 0 and got_returns[1, 2] == 0


def test_steps_against_reference():
    rng = np.random.default_rng(6)
    rewards, values = rng.normal(size=(2, 5, 7)).astype(np.float32)
    lengths = np.array([7, 3, 0, 1, 5])
    mask = np.arange(7) < lengths[:, None]
    got, returns = objective.step_advantages(
        np.where(mask, rewards, np.inf), values, mask, gamma=0.9, lam=0.8
    )
    raw = np.zeros((5, 7))
    for n, length in enumerate(lengths):
        following, next_value = 0.0, 0.0
        for k in reversed(range(length)):
            delta = rewards[n, k] + 0.9 * next_value - values[n, k]
            following = raw[n, k] = delta + 0.9 * 0.8 * following
            next_value = values[n, k]
    np.testing.assert_allclose(returns, np.where(mask, raw + values, 0), atol=1e-5)
    expected = np.zeros((5, 7))
    expected[mask] = reference_standardise(raw[mask], 1, 1e-8)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_single_step_in_the_batch_is_finite():
    one = jnp.ones((1, 1))
    advantages, returns = objective.step_advantages(
        one, one * 0.5, one.astype(bool), gamma=1.0, lam=1.0
    )
    assert advantages == 0 and returns == 1


def test_rows_by_group_pads_short_groups():
    rows, real = objective.rows_by_group(["a", "b", "a", "c", "a", "b"])
    assert rows.tolist() == [[0, 2, 4], [1, 5, 0], [3, 0, 0]]
    assert real.sum(axis=1).tolist() == [3, 2, 1]
    assert objective.rows_by_group([])[0].shape == (0, 0)
