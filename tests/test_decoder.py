"""The decoder's two forwards against each other, its attention against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from grpo_jax.devices import RULES
from grpo_jax.models import KVCache, LoraConfig, ModelConfig, abstract_model
from grpo_jax.models.attention import attention
from grpo_jax.models.blockwise import Packing

QWEN2 = ModelConfig(
    vocab_size=64,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=48,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    qkv_bias=True,
    qk_norm=False,
    tied=True,
    max_positions=256,
    architecture="qwen2",
)
QWEN3 = dataclasses.replace(
    QWEN2, head_width=16, qkv_bias=False, qk_norm=True, tied=False, architecture="qwen3"
)
LORA = LoraConfig(rank=2, alpha=4.0)


def build(config, lora=LORA):
    """A random decoder whose biases, norms and adapters all do something."""
    model = abstract_model(config, lora=lora)
    generator = np.random.default_rng(0)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = 0.2 * generator.standard_normal(variable.shape, np.float32)
        variable.set_value(jnp.asarray(values + (path[-1] == "scale")))
    return model


class Programs:
    """The forwards of one decoder, compiled."""

    def __init__(self, config):
        self.model = build(config)
        graph, self.state = nnx.split(self.model)

        def hidden(state, *args):
            return nnx.merge(graph, state).hidden(*args)

        def extend(state, *args):
            return nnx.merge(graph, state).extend(*args)

        def decode(state, *args):
            return nnx.merge(graph, state).decode(*args)

        self._hidden = jax.jit(hidden)
        self._decode = jax.jit(decode)
        self._extend = jax.jit(extend, static_argnums=5)

    def hidden(self, *args):
        return self._hidden(self.state, *args)

    def extend(self, *args):
        return self._extend(self.state, *args)

    def decode(self, *args):
        return self._decode(self.state, *args)


@pytest.fixture(scope="module")
def programs():
    return Programs(QWEN3)


def causal(rows, length):
    positions = np.broadcast_to(np.arange(length), (rows, length))
    return jnp.asarray(positions), Packing.causal(rows, length)


# Attention --------------------------------------------------------------------------


def plain_attention(q, k, v, mask):
    """One head, one row and one query after the other, in float64."""
    rows, length, heads, width = q.shape
    group = heads // v.shape[1]
    out = np.zeros(q.shape)
    for b in range(rows):
        for n in range(heads):
            keys, values = k[b, n // group].astype(np.float64), v[b, n // group]
            for t in range(length):
                scores = q[b, t, n] @ keys / np.sqrt(width)
                weights = np.exp(scores - scores[mask[b, t]].max()) * mask[b, t]
                out[b, t, n] = weights / weights.sum() @ values
    return out.reshape(rows, length, heads * width)


@pytest.mark.parametrize("length", [1, 5, 33])  # from 32 on, a CPU goes head by head
def test_attention_is_softmax_over_the_allowed_keys(length):
    generator = np.random.default_rng(length)
    q = generator.standard_normal((2, length, 6, 4), np.float32)
    k = generator.standard_normal((2, 3, 4, 40), np.float32)
    v = generator.standard_normal((2, 3, 40, 4), np.float32)
    mask = generator.random((2, length, 40)) < 0.3
    mask[..., 7] = True  # every query sees something
    out = jax.jit(attention)(q, k, v, mask)
    np.testing.assert_allclose(out, plain_attention(q, k, v, mask), atol=1e-5)


def test_a_query_that_sees_nothing_gives_numbers():
    ones = np.ones((1, 1, 2, 4), np.float32)
    keys, values = np.ones((1, 1, 4, 3), np.float32), np.ones((1, 1, 3, 4), np.float32)
    out = attention(*map(jnp.asarray, (ones, keys, values, np.zeros((1, 1, 3), bool))))
    assert np.isfinite(out).all()


# Two forwards -----------------------------------------------------------------------


def test_chunks_in_a_cache_give_the_hidden_states_of_whole_rows(programs):
    """Three slots of five, out of order, chunks of 6 with ragged ends."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 64, (3, 20))
    whole = programs.hidden(jnp.asarray(tokens), *causal(3, 20))
    cache = KVCache.zeros(QWEN3, 5, 32, jnp.float32)
    slots, done, hidden = np.array([4, 0, 2]), np.zeros(3, int), np.zeros((3, 20, 32))
    while (done < 20).any():
        counts = np.minimum(generator.integers(0, 7, 3), 20 - done)
        steps = np.arange(6)
        positions = np.where(steps < counts[:, None], done[:, None] + steps, 32)
        chunk = tokens[np.arange(3)[:, None], np.minimum(positions, 19)]
        out, cache = programs.extend(cache, slots, jnp.asarray(chunk), positions, 32)
        for row in range(3):
            span = slice(done[row], done[row] + counts[row])
            hidden[row, span] = out[row, : counts[row]]
        done += counts
    np.testing.assert_allclose(hidden, whole, atol=1e-5)
    # Padding and other slots: nothing was written.
    k, v = np.stack(cache.k), np.stack(cache.v)
    assert not k[:, [1, 3]].any() and not v[:, [1, 3]].any()
    assert not k[..., 20:].any() and not v[..., 20:, :].any()
    assert k[:, slots][..., :20].all(axis=(0, 2, 3)).all()


def test_single_tokens_in_a_cache_give_the_hidden_states_of_whole_rows(programs):
    """Three slots that take turns at being silent."""
    tokens = np.random.default_rng(5).integers(0, 64, (3, 9))
    whole = programs.hidden(jnp.asarray(tokens), *causal(3, 9))
    cache, done, step = KVCache.zeros(QWEN3, 3, 16, jnp.float32), np.zeros(3, int), 0
    while (done < 9).any():
        on = (done < 9) & (np.arange(3) != step % 4)
        positions = np.where(on, done, 16)
        column = tokens[np.arange(3), np.minimum(done, 8)]
        out, cache = programs.decode(cache, jnp.asarray(column), positions)
        for row in np.flatnonzero(on):
            np.testing.assert_allclose(out[row], whole[row, done[row]], atol=1e-5)
        done, step = done + on, step + 1
    assert not np.stack(cache.k)[..., 9:].any()


def test_entries_beyond_live_are_not_read(programs):
    tokens, positions = jnp.full((2, 1), 5), np.array([[3], [15]])
    outs = []
    for rest in (0.0, 1e6):
        cache = KVCache.zeros(QWEN3, 2, 32, jnp.float32)
        full = jax.tree.map(lambda store, rest=rest: store + rest, cache)
        cache = full.with_head(cache.head(16))
        slots = np.arange(2)
        outs.append(programs.extend(cache, slots, tokens, positions, 16)[0])
    np.testing.assert_array_equal(*outs)


def test_hidden_states_see_the_past_only(programs):
    tokens = np.random.default_rng(2).integers(0, 64, (1, 12))
    changed = tokens.copy()
    changed[0, 7:] = (changed[0, 7:] + 1) % 64
    before = programs.hidden(jnp.asarray(tokens), *causal(1, 12))
    after = programs.hidden(jnp.asarray(changed), *causal(1, 12))
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert (np.abs(before[0, 7:] - after[0, 7:]).max(-1) > 1e-3).all()


def test_positions_matter_only_by_their_differences(programs):
    """Rotary embedding: shifting a whole row changes nothing but rounding."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 64, (1, 12)))
    positions, packing = causal(1, 12)
    here = programs.hidden(tokens, positions, packing)
    there = programs.hidden(tokens, positions + 100, packing)
    np.testing.assert_allclose(here, there, atol=1e-4)
    spread = programs.hidden(tokens, positions * 3, packing)
    assert np.abs(here - spread).max() > 1e-2


@pytest.mark.slow
def test_remat_changes_neither_values_nor_gradients():
    model = build(QWEN2)
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 64, (2, 8)))

    def total(adapters, remat):
        model = nnx.merge(graph, adapters, base)
        hidden = model.hidden(tokens, *causal(2, 8), remat=remat)
        return jnp.sum(jnp.square(model.logits(hidden)))

    gradient = jax.jit(jax.value_and_grad(total), static_argnums=1)
    plain, rematted = gradient(adapters, False), gradient(adapters, True)
    for one, other in zip(*map(jax.tree.leaves, (plain, rematted)), strict=True):
        # Sums of many float32 products: an entry near 0 is exact to the array's scale.
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain[1]))


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_every_variable_names_its_axes(config):
    model = abstract_model(config, lora=LORA)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == len(variable.shape), path
        assert all(name is None or name in RULES for name in axes), path
