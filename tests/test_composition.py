"""Every choice of the objective with the others: finite, float32, packed, sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import pack

from grpo_jax import objective
from grpo_jax.objective.losses import AGGREGATIONS, CLIPS, SURROGATES
from grpo_jax.objective.ratios import RATIOS

GATES = ("action", "response", "token")
NORMS = ("paper", "code", "tokens")
LEVELS = ("token", "sequence", "geometric")

# Every ratio with every window, and every other choice in turn.
COMPOSED = [
    {
        "ratio": RATIOS[i % 4],
        "clip": CLIPS[i // 4],
        "aggregation": AGGREGATIONS[(i + i // 4) % 4],
        "surrogate": SURROGATES[i // 2 % 2],
        "kl": ("k2", "k3")[i % 2],
        "gate": GATES[i % 3],
        "normalization": NORMS[i // 3 % 3],
        "level": LEVELS[(i + 1) % 3],
        "mode": ("truncate", "mask")[i // 3 % 2],
        "packed": i % 3 != 1,
    }
    for i in range(16)
]


def total_loss(new, entropy, old, sampler, advantages, mask, turns, ids, choice):
    """The sum of all terms, each over its weight, as the trainer adds them."""
    ids = ids if choice["packed"] else None
    scale = {"aggregation": choice["aggregation"], "max_length": 8, "segment_ids": ids}
    weights = objective.tis_weights(
        *(old, sampler, mask),
        cap=2.0,
        level=choice["level"],
        mode=choice["mode"],
        segment_ids=ids,
    )
    policy = objective.policy_loss(
        *(new, old, advantages, mask),
        ratio=choice["ratio"],
        clip=choice["clip"],
        surrogate=choice["surrogate"],
        epsilon_high=0.3,
        dual_clip=3.0 if choice["surrogate"] == "ppo" else None,
        turn_ids=turns,
        tis_weights=weights,
        **scale,
    )
    terms = [
        (policy.total, policy.weight),
        objective.kl_penalty(new, sampler, mask, estimator=choice["kl"], **scale),
        objective.entropy_bonus(entropy, mask, **scale),
        objective.lld_penalty(
            *(new, old, advantages, mask),
            gate=choice["gate"],
            normalization=choice["normalization"],
            segment_ids=ids,
        ),
    ]
    return sum(total / jnp.maximum(weight, 1.0) for total, weight in terms)


@pytest.mark.parametrize("number", range(len(COMPOSED)))
def test_every_composition_is_finite_for_wild_values(number):
    """+-1e4 apart, NaN where masked and at one sampled token, flat and empty rows.

    k3 of a difference of 20 nats is e^20: large, and finite.
    """
    new = np.array([[1e4, -1e4, np.nan, 3.0, 1e4, 0.2]] * 4, np.float32)
    new[3] = np.nan
    new[2, 4] = np.nan
    mask = np.array([[1, 1, 0, 1, 1, 1]] * 3 + [[0] * 6], bool)
    old = np.where(mask, np.float32(0.1), np.float32(np.inf))
    sampler = np.where(mask, new[:, ::-1], np.float32(-np.inf))
    entropy = np.where(mask, np.float32(1.5), np.float32(np.nan))
    by_row = np.array([0.0, 1.0, -1.0, np.nan], np.float32)
    turns = np.where(mask, [[0, 0, 0, 1, 1, 1]], -1).astype(np.int32)
    ids = np.array([[1, 1, 1, 2, 2, 2]] * 4, np.int32)
    arrays = old, sampler, by_row[:, None].repeat(6, 1), mask, turns, ids

    @jax.jit
    def value_and_slopes(new, entropy):
        choice = COMPOSED[number]
        function = lambda *x: total_loss(*x, *arrays, choice)  # noqa: E731
        return jax.value_and_grad(function, argnums=(0, 1))(new, entropy)

    value, slopes = value_and_slopes(new, entropy)
    assert np.isfinite(value)
    for slope in slopes:
        assert np.isfinite(slope).all() and (np.asarray(slope)[~mask] == 0).all()
    assert slopes[0][2, 4] == 0


# bfloat16: a sum of 2,000 equal terms would stand still at a few of them -------------

HALF = jnp.full((1, 2000), 0.03, jnp.bfloat16)
STEP = float(HALF[0, 0])
ZEROS, EVERY, ONE = jnp.zeros_like(HALF), jnp.ones((1, 2000), bool), jnp.ones(1)


@pytest.mark.parametrize("ratio", ["sequence", "step"])
def test_bf16_means_over_rows_and_turns_are_taken_in_float32(ratio):
    turns = jnp.arange(2000)[None] // 1500

    def loss(x):
        return objective.policy_loss(
            x, ZEROS, ONE, EVERY, ratio=ratio, clip="none", turn_ids=turns
        ).loss

    value, slope = jax.value_and_grad(loss)(HALF)
    assert value.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, -np.exp(STEP), rtol=1e-5)


def test_bf16_lost_likelihoods_are_added_in_float32():
    def penalty(x):
        total, weight = objective.lld_penalty(x, ZEROS, ONE, EVERY, gate="response")
        return total / weight

    value, slope = jax.value_and_grad(penalty)(-HALF)
    assert value.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, STEP, rtol=1e-5)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_bf16_importance_weights_are_added_in_float32(level):
    gap = (HALF / 16).astype(jnp.bfloat16)
    small = float(gap[0, 0])
    got = objective.tis_weights(gap, ZEROS, EVERY, cap=1e4, level=level)
    expected = np.exp(small * (2000 if level == "sequence" else 1))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4)


# One device against eight, packed against not ----------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_and_eight_devices_agree(ratio, packed):
    rng = np.random.default_rng(10)
    new, old = rng.normal(size=(2, 8, 16)).astype(np.float32) * 0.1
    mask = rng.random((8, 16)) < 0.7
    ids = np.repeat([[1, 2, 2, 3]], 8, axis=0).repeat(4, axis=1).astype(np.int32)
    by_segment = rng.normal(size=(8, 4)).astype(np.float32)
    advantages = np.take_along_axis(by_segment, ids, axis=1)
    turns = np.where(mask, np.arange(16) // 2, -1).astype(np.int32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("x"))

    @jax.jit
    def both(new, old, advantages, mask, turns, ids):
        def loss(x):
            result = objective.policy_loss(
                *(x, old, advantages, mask),
                ratio=ratio,
                turn_ids=turns,
                segment_ids=ids if packed else None,
                aggregation="seq_mean_token_mean",
            )
            return result.loss, result.weight

        return jax.value_and_grad(loss, has_aux=True)(new)

    arrays = new, old, advantages, mask, turns, ids
    (value, weight), slope = both(*arrays)
    (other, same), spread = both(*jax.device_put(arrays, rows))
    np.testing.assert_allclose(other, value, atol=1e-5)
    assert same == weight
    np.testing.assert_allclose(spread, slope, atol=1e-5)


LENGTHS = [8, 5, 7]


@pytest.fixture(scope="module")
def members():
    """Three trajectories, and the same in one packed row behind a prompt."""
    rng = np.random.default_rng(9)
    old, new = rng.normal(size=(2, 3, 8)).astype(np.float32)
    mask = (rng.random((3, 8)) < 0.7) & (np.arange(8) < np.array(LENGTHS)[:, None])
    turns = np.where(mask, [[0, 0, 0, 1, 1, 1, 2, 2]] * 3, -1)
    advantages = np.array([[1.0], [-0.5], [0.3]], np.float32).repeat(8, axis=1)
    apart = {"new": new, "old": old, "advantages": advantages, "mask": mask}
    apart |= {"turns": turns, "ids": None}
    segments = np.array([[2], [3], [9]], np.int32).repeat(8, axis=1)
    packed = {"ids": segments} | {k: v for k, v in apart.items() if k != "ids"}
    packed = {name: pack(x, LENGTHS, 4) for name, x in packed.items()}
    packed["ids"][0, :4] = 1
    return apart, packed


def kl(x):
    given = x["new"], x["old"], x["mask"]
    how = "seq_mean_token_mean"
    return objective.kl_penalty(*given, aggregation=how, segment_ids=x["ids"])


def cispo(x):
    given = x["new"], x["old"], x["advantages"], x["mask"]
    options = {"surrogate": "cispo", "ratio": "cumulative", "epsilon": 1.0}
    found = objective.policy_loss(*given, segment_ids=x["ids"], **options)
    return found.total, found.weight, found.metrics


def by_position(x):
    given = x["new"], x["old"], x["mask"]
    return objective.ratio_by_position(
        *given, ratio="step", segment_ids=x["ids"], turn_ids=x["turns"]
    )


def gates(x):
    given = x["new"], x["old"], x["advantages"], x["mask"]
    return [
        objective.lld_gate_rate(*given, gate=gate, segment_ids=x["ids"])
        for gate in GATES
    ]


@pytest.mark.parametrize("function", [kl, cispo, by_position, gates])
def test_packed_equals_unpacked(function, members):
    apart, packed = (jax.tree.leaves(function(x)) for x in members)
    assert np.abs(apart).max() > 0
    np.testing.assert_allclose(packed, apart, atol=1e-5)
