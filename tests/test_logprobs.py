"""Chunked log-probs and their hand-written gradient against plain float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trajectories import VOCABULARY, random_examples

from grpo_jax.models import Decoder, tiny
from grpo_jax.training import update
from grpo_jax.training.batching import collate
from grpo_jax.training.logprobs import CHUNK, batch_logprobs, token_logprobs

V, D = 40, 12


def inputs(length, seed=0, share=0.5, rows=2):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, length, D)).astype(np.float32),
        rng.standard_normal((D, V)).astype(np.float32),
        rng.integers(0, V, (rows, length)).astype(np.int32),
        rng.random((rows, length)) < share,
    )


def reference(hidden, head, tokens, mask, temperature):
    """float64 log-probs and entropies, 0 where masked."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=-1)
    return np.where(mask, chosen, 0), np.where(mask, entropy, 0)


@partial(jax.jit, static_argnames="temperature")
def value_and_gradient(hidden, head, tokens, mask, weights, temperature):
    def total(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, tokens, mask, temperature)
        return jnp.sum(weights * logprobs + entropy), (logprobs, entropy)

    slopes, outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
    return outputs, slopes


@partial(jax.jit, static_argnames="temperature")
def plain_gradient(hidden, head, tokens, mask, weights, temperature):
    def total(hidden):
        logprobs = jax.nn.log_softmax(hidden @ head / temperature, axis=-1)
        chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(mask, weights * chosen, 0.0))

    return jax.grad(total)(hidden)


def check(arrays, temperature):
    hidden, head, tokens, mask = arrays
    weights = np.random.default_rng(9).standard_normal(mask.shape).astype(np.float32)
    arrays = tuple(map(jnp.asarray, arrays))
    (logprobs, entropy), (slope, head_slope) = value_and_gradient(
        *arrays, weights, temperature
    )
    chosen, spread = reference(hidden, head, tokens, mask, temperature)
    np.testing.assert_allclose(logprobs, chosen, atol=1e-5)
    np.testing.assert_allclose(entropy, spread, atol=1e-5)
    expected = plain_gradient(*arrays, weights, temperature)
    np.testing.assert_allclose(slope, expected, atol=2e-5)
    assert (np.asarray(slope)[~mask] == 0).all()
    assert (np.asarray(head_slope) == 0).all()  # the head is frozen


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_the_entropy_where_it_is_asked_for(tied, temperature):
    """Against float64: dH/dlogit_v = -p_v (log p_v + H)."""
    hidden, head, tokens, mask = inputs(CHUNK + 3, rows=1)
    weights = np.random.default_rng(4).standard_normal(mask.shape).astype(np.float32)
    given = jnp.asarray(head.T if tied else head)
    shape = {"tied": tied, "entropy_slope": True}

    def total(hidden):
        _, entropy = token_logprobs(
            *(hidden, given, jnp.asarray(tokens), jnp.asarray(mask), temperature),
            **shape,
        )
        return jnp.sum(weights * entropy)

    slope = jax.jit(jax.grad(total))(jnp.asarray(hidden))
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    entropy = -(np.exp(logs) * logs).sum(axis=-1, keepdims=True)
    by_logit = -np.exp(logs) * (logs + entropy) * (weights * mask)[..., None]
    expected = by_logit @ head.T.astype(np.float64) / temperature
    # Logits of 24 round to 2e-6, and their sums and weights carry that ten times as
    # far; how far depends on the order in which a CPU adds.
    np.testing.assert_allclose(slope, expected, atol=1e-4)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3000])
def test_any_row_length(length):
    check(inputs(length, share=0.7), 1.0)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_the_logits(temperature):
    check(inputs(CHUNK + 1), temperature)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_few_all_or_no_action_tokens(share):
    check(inputs(CHUNK + 1, share=share), 1.0)


def test_one_row_without_any_action_token():
    hidden, head, tokens, mask = inputs(CHUNK + 1)
    mask[1] = False
    check((hidden, head, tokens, mask), 1.0)


def test_large_logits_stay_finite():
    hidden, head, tokens, mask = inputs(CHUNK + 1, share=1.0)
    logprobs, entropy = token_logprobs(
        jnp.asarray(300 * hidden),
        jnp.asarray(head),
        jnp.asarray(tokens),
        jnp.asarray(mask),
        1.0,
    )
    assert np.isfinite(logprobs).all() and np.isfinite(entropy).all()
    assert (np.asarray(logprobs) <= 0).all()


def test_half_precision_gives_float32_logprobs_and_bfloat16_gradients():
    hidden, head, tokens, mask = map(jnp.asarray, inputs(CHUNK + 1))
    half = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16))
    weights = jnp.ones(mask.shape)
    (logprobs, _), (slope, _) = value_and_gradient(*half, tokens, mask, weights, 1.0)
    assert logprobs.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float32) for x in half]
    chosen, _ = reference(*exact, np.asarray(tokens), np.asarray(mask), 1.0)
    np.testing.assert_allclose(logprobs, chosen, atol=0.05)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_whole_model_with_either_head(tied, temperature):
    """Temperature 0 means the raw logits."""
    config = dataclasses.replace(tiny.CONFIG, tied=tied, num_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(0))
    examples = random_examples(3, groups=4, members=1)
    batch = update.place(collate(examples, row_length=64, rows=4)[0])
    got, entropy = jax.jit(batch_logprobs, static_argnames="temperature")(
        model, batch, temperature=temperature
    )
    mask, tokens = np.asarray(batch.action_mask), np.asarray(batch.tokens)
    # A group of one: a row holds plain conversations, here only the first is read.
    first = mask & (np.asarray(batch.segment_ids) <= 2)
    logits = np.asarray(model(batch.tokens), np.float64) / (temperature or 1.0)
    flat = np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
    eye = np.eye(VOCABULARY)
    chosen, spread = reference(flat, eye, tokens, first, 1.0)
    np.testing.assert_allclose(np.where(first, got, 0), chosen, atol=1e-5)
    np.testing.assert_allclose(np.where(first, entropy, 0), spread, atol=1e-5)


@pytest.mark.parametrize("entropy_slope", [False, True])
def test_a_masked_token_that_is_not_finite_spoils_no_gradient(entropy_slope):
    """An infinite hidden state: its log-prob is NaN, and the loss leaves it out."""
    hidden, head, tokens, mask = inputs(CHUNK + 3, share=1.0)
    hidden[0, 5] = np.inf

    def total(hidden):
        found = token_logprobs(
            *(hidden, jnp.asarray(head), jnp.asarray(tokens), jnp.asarray(mask), 1.0),
            entropy_slope=entropy_slope,
        )
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0)) for x in found), found

    slope, (logprobs, _) = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(hidden))
    assert np.isnan(logprobs[0, 5]) and np.isfinite(logprobs).sum() == mask.size - 1
    assert np.isfinite(slope).all() and (np.asarray(slope)[0, 5] == 0).all()
    assert np.abs(slope).max() > 0.1
