import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objective

LLD_MASK = np.array(
    [[1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]], bool
)
LLD_DROP = np.array(
    [
        [0.30, -0.10, 0.05, 9, 9, -0.40, 0.10],
        [-0.02, 0.05, 7, 7, 7, 7, 7],
        [0.5, 0.5, 0.5, 0.5, 0.5, 3, 3],
    ],
    np.float32,
)
LLD_ADVANTAGES = np.array([0.7, 0.0, -0.7], np.float32)


def lld(drop=LLD_DROP, mask=LLD_MASK, advantages=LLD_ADVANTAGES, **options):
    """Penalty and its gradient with respect to the new log-probs; old is 0."""

    def penalty(new):
        total, weight = objective.lld_penalty(
            new, jnp.zeros_like(new), advantages, mask, **options
        )
        return total / jnp.maximum(weight, 1)

    return jax.jit(jax.value_and_grad(penalty))(-jnp.asarray(drop))


@pytest.mark.parametrize(
    ("gate", "normalization", "expected"),
    [
        ("action", "paper", 0.0475),
        ("action", "code", 0.40 / 12),
        ("token", "tokens", 0.071429),
        ("response", "tokens", 0.007143),
        ("token", "paper", (0.45 / 5 + 0.05 / 2) / 2),
        ("response", "code", 0.05 / 12),
    ],
)
def test_lld_golden(gate, normalization, expected):
    value, _ = lld(gate=gate, normalization=normalization)
    np.testing.assert_allclose(value, expected, atol=1e-6)


def test_lld_gradient_golden():
    for normalization, values in (("paper", (-0.1, -0.25)), ("code", (-1 / 12,) * 2)):
        _, gradient = lld(normalization=normalization)
        expected = np.zeros((3, 7))
        expected[0, [0, 2]], expected[1, 1] = values
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_lld_token_weights_scale_answers():
    weights = np.ones((3, 7), np.float32)
    weights[0, 0], weights[0, 3] = 0.6, np.nan
    value, _ = lld(token_weights=weights)
    np.testing.assert_allclose(value, ((0.6 * 0.3 + 0.05) / 5 + 0.025) / 2, atol=1e-6)


def test_lld_answer_weight_golden():
    assert objective.answer_weight(1.2, form="paper") == pytest.approx(0.6)
    assert 0.2 * objective.answer_weight(1.2, form="code") == pytest.approx(0.04)
    for calls, paper, code in ((0.0, 0, 0), (1.0, 0.5, 0), (2.0, 1, 1), (9.0, 1, 1)):
        assert objective.answer_weight(calls, form="paper") == paper
        assert objective.answer_weight(calls, form="code") == code
    with pytest.raises(ValueError, match="form must be one of paper, code"):
        objective.answer_weight(1.0, form="none")


@pytest.mark.parametrize("gate", ["action", "response", "token"])
def test_lld_is_inert_on_policy(gate):
    value, gradient = lld(drop=np.zeros_like(LLD_DROP), gate=gate)
    assert value == 0 and (gradient == 0).all()


def test_lld_without_good_rows_is_zero():
    value, gradient = lld(advantages=np.full(3, -1, np.float32))
    assert value == 0 and (gradient == 0).all()


def reference_lld(new, old, advantages, mask, segments, gate, normalization):
    """Plain float64 loops -> (total, weight, gradient with respect to new)."""
    total, weight, gradient = 0.0, 0, np.zeros(mask.shape)
    if normalization == "code":
        weight = (mask & (segments > 0)).sum()
    for b in range(mask.shape[0]):
        for segment in np.unique(segments[b][segments[b] > 0]):
            tokens = np.nonzero((segments[b] == segment) & mask[b])[0]
            if len(tokens) == 0 or advantages[b, tokens[0]] < 0:
                continue
            share = 1 / len(tokens) if normalization == "paper" else 1.0
            weight += {"paper": 1, "tokens": len(tokens), "code": 0}[normalization]
            breaks = np.nonzero(np.diff(tokens) > 1)[0] + 1
            parts = {
                "action": np.split(tokens, breaks),
                "response": [tokens],
                "token": tokens[:, None],
            }[gate]
            for part in parts:
                drop = old[b, part].astype(np.float64) - new[b, part]
                if drop.sum() > 0:
                    total += share * np.maximum(drop, 0).sum()
                    gradient[b, part] = -share * (drop > 0)
    return total, weight, gradient


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("gate", "normalization"),
    [("action", "paper"), ("response", "code"), ("token", "tokens")],
)
def test_lld_against_reference(gate, normalization, packed):
    rng = np.random.default_rng(0)
    new, old = rng.normal(size=(2, 4, 24)).astype(np.float32)
    mask = rng.random((4, 24)) < 0.7
    mask[3] = False
    segments = np.ones((4, 24), np.int32)
    if packed:
        segments = np.repeat([[1, 2, 2, 4, 5, 0]], 4, axis=0).repeat(4, axis=1)
    by_segment = rng.normal(size=(4, 6)).astype(np.float32)
    advantages = by_segment[:, segments[0]]
    args = (old, advantages, mask)
    ids = jnp.asarray(segments) if packed else None

    def total(new):
        return objective.lld_penalty(
            new, *args, gate=gate, normalization=normalization, segment_ids=ids
        )

    (value, weight), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(new)
    expected = reference_lld(new, *args, segments, gate, normalization)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert weight == expected[1]
    np.testing.assert_allclose(gradient, expected[2], atol=1e-5)


def test_lld_row_advantages_equal_token_advantages():
    spread = np.repeat(LLD_ADVANTAGES[:, None], 7, axis=1)
    assert lld()[0] == lld(advantages=spread)[0]


# --- KL -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "expected"), [(0.2, 0.018731), (-0.2, 0.021403)]
)  # log pi - log ref
def test_k3_golden(difference, expected):
    new, mask = jnp.full((1, 1), difference), jnp.ones((1, 1), bool)
    total, weight = objective.kl_penalty(new, jnp.zeros((1, 1)), mask)
    np.testing.assert_allclose(total, expected, atol=1e-6)
    assert weight == 1


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_against_reference(estimator):
    rng = np.random.default_rng(1)
    new, ref = rng.normal(size=(2, 3, 8)).astype(np.float32)
    mask = rng.random((3, 8)) < 0.6
    mask[2] = False
    new[0, 0], mask[0, 0] = np.nan, True
    ref[~mask] = np.inf

    def total(x):
        return objective.kl_penalty(
            x, ref, mask, estimator=estimator, aggregation="seq_mean_token_mean"
        )

    use = mask & np.isfinite(new)
    share = use / np.maximum(use.sum(axis=1, keepdims=True), 1)
    d = np.where(use, ref, 0).astype(np.float64) - np.where(use, new, 0)
    value = np.exp(d) - d - 1 if estimator == "k3" else d**2 / 2
    slope = 1 - np.exp(d) if estimator == "k3" else -d
    (got, weight), gradient = total(new), jax.grad(lambda x: total(x)[0])(new)
    np.testing.assert_allclose(got, (value * share).sum(), rtol=1e-5)
    assert weight == use.any(axis=1).sum()
    np.testing.assert_allclose(gradient, slope * share, atol=1e-5)


def test_kl_is_exactly_zero_at_the_reference():
    new, mask = jnp.full((2, 3), -1.3), jnp.ones((2, 3), bool)
    value, gradient = jax.value_and_grad(
        lambda x: objective.kl_penalty(x, new, mask)[0]
    )(new)
    assert value == 0 and (gradient == 0).all()


def test_bad_choices_are_named():
    new, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="k1"):
        objective.kl_penalty(new, new, mask, estimator="k1")
    with pytest.raises(ValueError, match="estimator must be one of k2, k3"):
        objective.kl_penalty(new, new, mask, estimator="k4")
    with pytest.raises(ValueError, match="max_length"):
        objective.kl_penalty(new, new, mask, aggregation="constant")
    with pytest.raises(ValueError, match="gate must be one of"):
        objective.lld_penalty(new, new, jnp.ones(1), mask, gate="row")
    with pytest.raises(ValueError, match="normalization must be one of"):
        objective.lld_penalty(new, new, jnp.ones(1), mask, normalization="mean")
    with pytest.raises(ValueError, match="advantages must be"):
        objective.lld_penalty(
            new, new, jnp.ones(1), mask, segment_ids=jnp.ones((1, 2), jnp.int32)
        )
