"""Importance weights of trainer over sampler, and the diagnostics by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective

GAP = np.array([[0.1, 1.2, -0.9, 30.0]], np.float32)
MASK = np.array([[1, 1, 1, 0]], bool)


def weights(gap=GAP, mask=MASK, **options):
    return np.asarray(objective.tis_weights(gap, np.zeros_like(gap), mask, **options))


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [1.105171, 2, 0.406570, 0]),
        ("token", "mask", [1.105171, 0, 0.406570, 0]),
        ("sequence", "truncate", [1.491825] * 3 + [0]),
        ("geometric", "truncate", [1.142631] * 3 + [0]),
    ],
)
def test_tis_golden(level, mode, expected):
    got = weights(cap=2.0, level=level, mode=mode)
    np.testing.assert_allclose(got[0], expected, atol=1e-6)


def test_tis_caps_and_masks_whole_sequences():
    assert weights(cap=1.2, level="sequence").tolist() == [
        pytest.approx([1.2] * 3 + [0])
    ]
    assert (weights(cap=1.2, level="sequence", mode="mask") == 0).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_tis_against_reference(level):
    rng = np.random.default_rng(0)
    old, sampler = rng.normal(size=(2, 3, 16)).astype(np.float32)
    mask = rng.random((3, 16)) < 0.7
    segments = np.repeat([[1, 2, 2, 0]], 3, axis=0).repeat(4, axis=1)
    old[0, 1], sampler[1, 6], mask[0, 1], mask[1, 6] = np.nan, -np.inf, True, True
    got = objective.tis_weights(
        old, sampler, mask, cap=1.5, level=level, segment_ids=jnp.asarray(segments)
    )
    use = mask & (segments > 0) & np.isfinite(old) & np.isfinite(sampler)
    for b, t in np.ndindex(3, 16):
        peers = use[b] & (segments[b] == segments[b, t])
        gap = (old[b, peers].astype(np.float64) - sampler[b, peers]).clip(-20, 20)
        value = {"token": old[b, t] - sampler[b, t], "sequence": gap.sum()}.get(
            level, gap.mean() if len(gap) else 0.0
        )
        expected = min(np.exp(value), 1.5) if use[b, t] else 0.0
        np.testing.assert_allclose(got[b, t], expected, rtol=1e-5)


def test_tis_is_detached():
    def total(x):
        return objective.tis_weights(x, jnp.zeros((1, 4)), MASK, cap=2.0).sum()

    assert (jax.grad(total)(jnp.asarray(GAP)) == 0).all()


def test_bad_tis_choices_are_named():
    for options, match in (({"level": "turn"}, "level"), ({"mode": "drop"}, "mode")):
        with pytest.raises(ValueError, match=f"{match} must be one of"):
            weights(cap=1.0, **options)


# --- ratios by position ---------------------------------------------------------------


def test_ratio_by_position_against_loops():
    rng = np.random.default_rng(1)
    new = 0.1 * rng.normal(size=(2, 40)).astype(np.float32)
    mask = rng.random((2, 40)) < 0.8
    sums, counts, maxima = objective.ratio_by_position(
        new, np.zeros_like(new), mask, ratio="cumulative"
    )
    buckets = [[] for _ in objective.POSITIONS]
    for b in range(2):
        total = 0.0
        for position, t in enumerate(np.nonzero(mask[b])[0], 1):
            total += float(new[b, t])
            buckets[int(np.log(position) / np.log(4) + 1e-9)].append(np.exp(total))
    assert counts.tolist() == [len(bucket) for bucket in buckets]
    np.testing.assert_allclose(sums, [sum(x) for x in buckets], rtol=1e-5)
    np.testing.assert_allclose(maxima, [max(x, default=0) for x in buckets], rtol=1e-5)


def test_a_fixed_window_clips_ever_more_positions_and_ctpos_does_not():
    """Stale log-probs, sd .0366 a token (arXiv 2605.07331). A clipped token is one
    without a gradient."""
    rng = np.random.default_rng(2)
    new = 0.0366 * rng.normal(size=(256, 1024)).astype(np.float32)
    advantages = rng.choice([-1.0, 1.0], 256).astype(np.float32)

    def clipped(**options):
        """Share of clipped tokens: early, in the middle, late."""

        def loss(x):
            zeros, mask = jnp.zeros_like(x), jnp.ones(x.shape, bool)
            return objective.policy_loss(
                x, zeros, advantages, mask, ratio="cumulative", **options
            ).total

        dead = np.asarray(jax.jit(jax.grad(loss))(new)) == 0
        return [dead[:, a:b].mean() for a, b in ((16, 48), (128, 256), (768, 1024))]

    early, middle, late = clipped(epsilon=0.2)
    assert early + 0.1 < middle < late - 0.05
    early, middle, late = clipped(clip="sqrt_log", epsilon=0.025, epsilon_high=0.05)
    assert abs(late - middle) < 0.05 and abs(middle - early) < 0.05
    assert 0.1 < late < 0.25


# --- gates of the likelihood-displacement penalty -------------------------------------


@pytest.mark.parametrize(
    ("gate", "expected"), [("action", (2, 3)), ("response", (1, 2)), ("token", (4, 7))]
)
def test_gate_rate_counts_gates_of_preferred_rows(gate, expected):
    """The worked example: two runs and a row of one run; the bad row has no gates."""
    mask = np.array([[1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1] * 5 + [0] * 2])
    drop = np.array(
        [[0.3, -0.1, 0.05, 9, 9, -0.4, 0.1], [-0.02, 0.05] + [7] * 5, [0.5] * 7]
    )
    got = objective.lld_gate_rate(
        -drop.astype(np.float32), np.zeros((3, 7)), np.array([0.7, 0.0, -0.7]),
        mask.astype(bool), gate=gate,
    )  # fmt: skip
    assert tuple(map(int, got)) == expected
