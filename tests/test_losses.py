import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective
from grpo_jax.objective.losses import aggregate, clip_window

RATIOS = ("token", "sequence", "cumulative", "step")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


def loss_and_gradient(new, advantages, mask, old=None, **options):
    """loss and its gradient with respect to the new log-probs."""
    new = jnp.asarray(new, jnp.float32)
    old = jnp.zeros_like(new) if old is None else old

    def loss(x):
        return objective.policy_loss(
            x, old, jnp.asarray(advantages, jnp.float32), mask, **options
        ).loss

    return jax.jit(jax.value_and_grad(loss))(new)


# --- golden values of algorithms.md ---------------------------------------------------

MASK = np.array([[1, 1, 1, 0], [1, 0, 1, 0]], bool)
LOG_RATIO = np.array([[0.10, -0.30, 0.25, 5.0], [-0.40, 7.0, 0.30, -3.0]], np.float32)
ADVANTAGES = np.array([1.0, -0.5], np.float32)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [*zip(AGGREGATIONS, (-0.394212, -0.238933, -0.985530, -0.123191), strict=True)],
)
def test_aggregations_golden(aggregation, expected):
    got, _ = loss_and_gradient(
        LOG_RATIO, ADVANTAGES, MASK, aggregation=aggregation, max_length=8
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_clip_higher_golden():
    got, _ = loss_and_gradient(LOG_RATIO, ADVANTAGES, MASK, epsilon_high=0.28)
    np.testing.assert_allclose(got, -0.410212, atol=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "live"),
    [
        (1, 1.2, -1.2, True),
        (1, 1.25, -1.24, False),
        (-1, 0.85, 0.85, True),
        (-1, 0.8, 0.84, False),
        (-1, 1.3, 1.3, True),
    ],
)
def test_ngrpo_clip_golden(advantage, ratio, expected, live):
    got, gradient = loss_and_gradient(
        [[np.log(ratio)]], [advantage], np.ones((1, 1), bool),
        epsilon=0.16, epsilon_high=0.24,
    )  # fmt: skip
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (gradient[0, 0] != 0) == live


def test_dual_clip_golden():
    mask = np.ones((1, 1), bool)
    got, _ = loss_and_gradient([[1.5]], [-0.5], mask)
    np.testing.assert_allclose(got, 2.240845, atol=1e-5)
    got, gradient = loss_and_gradient([[1.5]], [-0.5], mask, dual_clip=3.0)
    np.testing.assert_allclose(got, 1.5, atol=1e-5)
    assert gradient == 0


def test_gspo_golden():
    options = {
        "ratio": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "aggregation": "seq_mean_token_mean",
    }
    got, gradient = loss_and_gradient(LOG_RATIO, ADVANTAGES, MASK, **options)
    np.testing.assert_allclose(got, -0.250275, atol=1e-5)
    assert (gradient == 0).all()
    inside = np.array([[9e-4, -3e-4, 3e-4]])
    got, gradient = loss_and_gradient(inside, [1], np.ones((1, 3), bool), **options)
    np.testing.assert_allclose(got, -1.00030005, atol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.33343335] * 3], atol=1e-6)


CTPO_MASK = np.array([[1, 1, 0, 0, 1, 1, 0]], bool)
CTPO_LOG_RATIO = np.array([[0.02, 0.05, 9, -3, 0.03, -0.08, 4]], np.float32)
CTPO = {"ratio": "cumulative", "clip": "sqrt_log", "epsilon": 0.025,
        "epsilon_high": 0.05}  # fmt: skip


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "expected", "slopes"),
    [
        (1, None, -1.050844, [-0.255050, -0.268127, 0, 0, 0, -0.255050, 0]),
        (-1, None, 1.054520, [0.255050, 0.268127, 0, 0, 0.276293, 0.255050, 0]),
        (-1, 0.05, 1.050844, [0.255050, 0.268127, 0, 0, 0, 0.255050, 0]),
    ],
)
def test_ctpo_golden(advantage, dual_clip, expected, slopes):
    got, gradient = loss_and_gradient(
        CTPO_LOG_RATIO, [advantage], CTPO_MASK, dual_clip=dual_clip, **CTPO
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(gradient, [slopes], atol=1e-5)


def test_ctpo_negative_golden():
    got = objective.policy_loss(
        jnp.array([[-0.03, 0.01, -0.05]]), jnp.zeros((1, 3)), -jnp.ones(1),
        jnp.ones((1, 3), bool), aggregation="seq_mean_token_sum", **CTPO,
    )  # fmt: skip
    np.testing.assert_allclose(got.total, 0.975310 + 0.980199 + 0.957623, atol=1e-5)
    assert got.metrics["clip_ratio/low"] == (2, 3)
    assert got.metrics["clip_ratio/region"] == (2, 3)


def test_ctpo_windows_golden():
    position = jnp.array([[1, 100, 1024, 8000]])
    low, high = clip_window("sqrt_log", position, 0.025, 0.05)
    low, high = np.exp(low), np.exp(high)
    np.testing.assert_allclose(low, [[0.9753, 0.7788, 0.4493, 0.107]], rtol=2e-3)
    np.testing.assert_allclose(high, [[1.0513, 1.6487, 4.953, 87.5]], rtol=2e-3)


def test_linear_window_stops_clipping_low():
    """The article's form: 1 - .2 sqrt(25) = 0, below which no ratio lies."""
    mask = np.ones((1, 30), bool)
    new = jnp.zeros((1, 30)).at[:, 0].set(-9.0)
    got = objective.policy_loss(
        new, jnp.zeros((1, 30)), -jnp.ones(1), mask, ratio="cumulative",
        clip="sqrt_linear", epsilon=0.2,
    )  # fmt: skip
    assert got.metrics["clip_ratio/low"] == (24, 30)


# --- an independent reference ---------------------------------------------------------


def reference_log_ratios(ratio, new, old, use, segments, turns):
    """float64 loops -> (value, passes gradient) of each token."""
    d = np.clip(
        np.where(use, new, 0).astype(np.float64) - np.where(use, old, 0), -20, 20
    )
    value = d.copy()
    for b, t in zip(*np.nonzero(use), strict=True):
        same = use[b] & (segments[b] == segments[b, t])
        if ratio == "step":
            same &= turns[b] == turns[b, t]
        if ratio == "cumulative":
            same &= np.arange(use.shape[1]) <= t
        if ratio != "token":
            value[b, t] = d[b, same].sum() / (
                1 if ratio == "cumulative" else same.sum()
            )
    raw = np.where(use, new, 0).astype(np.float64) - np.where(use, old, 0)
    passes = np.abs(raw) < 20 if ratio == "token" else value < 10
    return np.minimum(value, 20 if ratio == "token" else 10), passes


def reference_loss(new, old, advantages, mask, segments, turns, options):
    """(total, weight, gradient, clipped low, clipped high) by plain loops."""
    eps, eps_high = options["epsilon"], options["epsilon_high"]
    clip, dual, how = options["clip"], options["dual_clip"], options["aggregation"]
    use = mask & np.isfinite(new) & np.isfinite(old) & (segments > 0)
    logs, passes = reference_log_ratios(
        options["ratio"], new, old, use, segments, turns
    )
    total, rows, gradient, low, high = 0.0, set(), np.zeros(use.shape), 0, 0
    for b, t in zip(*np.nonzero(use), strict=True):
        peers = use[b] & (segments[b] == segments[b, t])
        root = np.sqrt(peers[: t + 1].sum())
        bounds = {
            "fixed": (1 - eps, 1 + eps_high),
            "sqrt_log": (np.exp(-eps * root), np.exp(eps_high * root)),
            "sqrt_linear": (1 - eps * root, 1 + eps_high * root),
            "none": (-np.inf, np.inf),
        }[clip]
        a, r = advantages[b, t], np.exp(logs[b, t])
        loss, slope = -a * r, -a * r * passes[b, t]
        if -a * np.clip(r, *bounds) > loss:
            loss, slope = -a * np.clip(r, *bounds), 0.0
        low += a < 0 and r < bounds[0]
        high += a > 0 and r > bounds[1]
        if dual is not None and a < 0:
            ceiling = -a * (np.exp(dual * root) if clip.startswith("sqrt") else dual)
            if ceiling < loss:
                loss, slope = ceiling, 0.0
        share = 1 / peers.sum() if how == "seq_mean_token_mean" else 1.0
        share *= options["tis_weights"][b, t]
        total += share * loss
        gradient[b, t] = share * slope
        rows.add((b, segments[b, t]))
    weight = use.sum() if how == "token_mean" else len(rows)
    weight *= options["max_length"] if how == "constant" else 1
    return total, weight, gradient, low, high


def random_batch(packed):
    """4 rows of 24: masked rows and turns, huge and non-finite log-probs."""
    rng = np.random.default_rng(7)
    old = rng.normal(size=(4, 24)).astype(np.float32) - 2
    new = old + 0.2 * rng.normal(size=(4, 24)).astype(np.float32)
    segments = np.ones((4, 24), np.int32)
    if packed:
        segments = np.repeat([[1, 2, 2, 5, 6, 0]], 4, axis=0).repeat(4, axis=1)
    turns = np.repeat([[0, 1, 1, 3, 4, 5, 5, 9]], 4, axis=0).repeat(3, axis=1)
    mask = rng.random((4, 24)) < 0.75
    mask[1] = False
    mask[0, 4:8] = mask[2, :3] = True
    new[2, 1], old[2, 2], new[0, 5] = np.nan, -np.inf, old[0, 5] + 30
    new[~mask], old[~mask] = np.nan, np.inf
    advantages = rng.normal(size=(4, 24)).astype(np.float32)
    advantages[3, :6] = 0
    advantages[~mask] = np.nan
    return new, old, advantages, mask, segments, np.where(mask, turns, -1)


CASES = [  # ratio, clip, aggregation, dual_clip, packed
    ("token", "fixed", "token_mean", None, False),
    ("token", "sqrt_linear", "constant", 0.3, True),
    ("sequence", "fixed", "seq_mean_token_mean", 1.1, True),
    ("sequence", "none", "seq_mean_token_sum", None, False),
    ("cumulative", "sqrt_log", "seq_mean_token_mean", 0.1, True),
    ("cumulative", "fixed", "constant", None, False),
    ("step", "sqrt_log", "seq_mean_token_sum", None, True),
    ("step", "fixed", "token_mean", 1.2, False),
]


@pytest.mark.parametrize(("ratio", "clip", "aggregation", "dual_clip", "packed"), CASES)
def test_policy_loss_against_reference(ratio, clip, aggregation, dual_clip, packed):
    new, old, advantages, mask, segments, turns = random_batch(packed)
    weights = np.random.default_rng(8).random((4, 24)).astype(np.float32)
    options = {
        "ratio": ratio, "clip": clip, "epsilon": 0.1, "epsilon_high": 0.15,
        "dual_clip": dual_clip, "aggregation": aggregation, "max_length": 24,
        "tis_weights": weights,
    }  # fmt: skip
    ids = jnp.asarray(segments) if packed else None

    def total(x):
        result = objective.policy_loss(
            x, old, advantages, mask, segment_ids=ids, turn_ids=turns, **options
        )
        return result.total, result

    (_, got), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(new)
    expected = reference_loss(new, old, advantages, mask, segments, turns, options)
    np.testing.assert_allclose(got.total, expected[0], rtol=1e-5, atol=1e-5)
    assert got.weight == expected[1]
    np.testing.assert_allclose(gradient, expected[2], rtol=1e-4, atol=1e-4)
    assert got.metrics["clip_ratio/low"][0] == expected[3]
    assert got.metrics["clip_ratio/high"][0] == expected[4]
    action = (mask & (segments > 0)).sum()
    assert got.metrics["nonfinite_tokens"] == (2, action)


# --- packing, sharding, dtypes, safety ------------------------------------------------


def pack(rows, lengths, prompt):
    """[N,T] rows -> one packed row with `prompt` leading positions, 3 of padding."""
    parts = [np.zeros(prompt, rows.dtype)]
    parts += [row[:n] for row, n in zip(rows, lengths, strict=True)]
    return np.concatenate([*parts, np.zeros(3, rows.dtype)])[None]


@pytest.mark.parametrize("ratio", ["sequence", "cumulative", "step"])
def test_packed_equals_unpacked(ratio):
    """A shared prompt, then three members; the prompt's segment adds nothing."""
    rng = np.random.default_rng(9)
    lengths = [8, 5, 7]
    old = rng.normal(size=(3, 8)).astype(np.float32)
    new = old + 0.1 * rng.normal(size=(3, 8)).astype(np.float32)
    mask = (rng.random((3, 8)) < 0.7) & (np.arange(8) < np.array(lengths)[:, None])
    turns = np.where(mask, [[0, 0, 0, 1, 1, 1, 2, 2]] * 3, -1)
    advantages = np.array([[1.0], [-0.5], [0.3]], np.float32).repeat(8, axis=1)
    segments = np.array([[2], [3], [9]], np.int32).repeat(8, axis=1)
    options = {"ratio": ratio, "clip": "sqrt_log", "epsilon": 0.05,
               "aggregation": "seq_mean_token_mean"}  # fmt: skip
    plain = objective.policy_loss(new, old, advantages, mask, turn_ids=turns, **options)
    packed = [pack(x, lengths, 4) for x in (new, old, advantages, mask, segments)]
    packed[4][0, :4] = 1
    together = objective.policy_loss(
        *packed[:4], segment_ids=packed[4], turn_ids=pack(turns, lengths, 4), **options
    )
    np.testing.assert_allclose(together.total, plain.total, atol=1e-6)
    assert together.weight == plain.weight == 3
    for name, (value, weight) in plain.metrics.items():
        assert together.metrics[name] == (value, weight)


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradients_are_finite_for_wild_values(ratio):
    """+-1e4 log-ratios, NaN where masked, zero advantages, an all-masked row."""
    new = np.array([[1e4, -1e4, np.nan, 3.0, 1e4]] * 3 + [[np.nan] * 5], np.float32)
    mask = np.array([[1, 1, 0, 1, 1]] * 3 + [[0] * 5], bool)
    turns = np.where(mask, [[0, 0, 0, 1, 1]], -1)
    value, gradient = loss_and_gradient(
        new, [0.0, 1.0, -1.0, np.nan], mask, ratio=ratio, turn_ids=turns,
        clip="fixed" if ratio == "token" else "sqrt_log", epsilon=60.0, dual_clip=40.0,
    )  # fmt: skip
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert (gradient[0] == 0).all() and (gradient[~mask] == 0).all()


def test_bf16_inputs_are_widened():
    new = jnp.full((1, 2000), 0.03, jnp.bfloat16)
    result, gradient = jax.value_and_grad(
        lambda x: objective.policy_loss(
            x, jnp.zeros_like(x), jnp.ones(1), jnp.ones((1, 2000), bool),
            ratio="cumulative", clip="none",
        ).loss
    )(new)  # fmt: skip
    step = float(new[0, 0])
    exact = -np.exp(np.minimum(step * np.arange(1, 2001), 10)).mean()
    assert result.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(result, exact, rtol=1e-5)


def test_tis_weights_scale_rows_and_are_detached():
    tis = jnp.array([2.0, 0.0])
    options = {"aggregation": "seq_mean_token_sum"}
    plain = loss_and_gradient(LOG_RATIO[:1], ADVANTAGES[:1], MASK[:1], **options)
    scaled = loss_and_gradient(LOG_RATIO, ADVANTAGES, MASK, tis_weights=tis, **options)
    np.testing.assert_allclose(scaled[0] * 2, plain[0] * 2, atol=1e-6)
    np.testing.assert_allclose(scaled[1][0] * 2, plain[1][0] * 2, atol=1e-6)
    assert (scaled[1][1] == 0).all()


def test_gradient_does_not_reach_old_log_probs_or_advantages():
    def loss(old, advantages):
        return objective.policy_loss(LOG_RATIO, old, advantages, MASK).total

    for gradient in jax.grad(loss, (0, 1))(jnp.zeros((2, 4)), jnp.asarray(ADVANTAGES)):
        assert (gradient == 0).all()


def test_bad_choices_are_named():
    args = (jnp.zeros((2, 4)), jnp.zeros((2, 4)), jnp.ones(2), jnp.asarray(MASK))
    segments = jnp.ones((2, 4), jnp.int32)
    for options, match in (
        ({"ratio": "tokens"}, "ratio must be one of token, sequence, cumulative, step"),
        ({"clip": "ppo"}, "clip must be one of fixed"),
        ({"aggregation": "mean"}, "aggregation must be one of token_mean"),
        ({"aggregation": "constant"}, "needs max_length"),
        ({"ratio": "step"}, "needs turn_ids"),
        ({"segment_ids": segments}, "advantages must be"),
    ):
        with pytest.raises(ValueError, match=match):
            objective.policy_loss(*args, **options)


def test_micro_batches_add_up():
    losses = jnp.array([[1.0, 2, 3], [10, 0, 0]])
    mask = jnp.array([[1, 1, 1], [1, 0, 0]], bool)
    parts = [aggregate(losses[i : i + 1], mask[i : i + 1]) for i in range(2)]
    assert sum(p[0] for p in parts) / sum(p[1] for p in parts) == 4.0


# --- CISPO ----------------------------------------------------------------------------


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    """arXiv 2506.13585: d loss / d log p = -A clip(ratio), whatever the ratio is."""
    options = {"surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 0.2}
    got, gradient = loss_and_gradient(LOG_RATIO, ADVANTAGES, MASK, **options)
    weight = np.minimum(np.exp(LOG_RATIO.astype(np.float64)), 1.2)
    slopes = -ADVANTAGES[:, None] * np.where(MASK, weight, 0) / 5
    np.testing.assert_allclose(gradient, slopes, atol=1e-6)
    expected = (slopes * np.where(MASK, LOG_RATIO, 0)).sum()
    np.testing.assert_allclose(got, expected, atol=1e-6)
    metrics = objective.policy_loss(
        LOG_RATIO, np.zeros((2, 4)), ADVANTAGES, MASK, **options
    ).metrics
    assert metrics["clip_ratio/high"] == (2, 5) and metrics["clip_ratio/low"] == (0, 5)


def test_cispo_is_finite_for_wild_values_and_has_no_dual_clip():
    new = np.array([[1e4, -1e4, np.nan, 3.0]], np.float32)
    value, gradient = loss_and_gradient(
        new, [1.0], np.array([[1, 1, 0, 1]], bool), surrogate="cispo"
    )
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[0, 2] == 0
    with pytest.raises(ValueError, match="dual_clip"):
        loss_and_gradient(new, [1.0], MASK[:1], surrogate="cispo", dual_clip=3.0)
    with pytest.raises(ValueError, match="surrogate must be one of ppo, cispo"):
        loss_and_gradient(new, [1.0], MASK[:1], surrogate="reinforce")
