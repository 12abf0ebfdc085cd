"""Attention in blocks against whole scores in float64: values, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention
from grpo_jax.models.blockwise import Packing, blockwise_attention

HEADS = [(4, 4), (4, 2), (6, 1)]


def random_packing(rng, rows, length):
    """Units of a prompt and members in places of any size, and padding behind them."""
    segments, prefixes = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        at, number = 0, 0
        while at < length - 1 and number < 12:
            number += 1
            prompt, members = number, rng.integers(0, 3)
            for member in range(members + 1):
                end = min(at + int(rng.integers(1, max(length // 5, 2))), length)
                number += member > 0
                segments[row, at:end], prefixes[row, at:end] = number, prompt
                at = end
    return Packing(jnp.asarray(segments), jnp.asarray(prefixes))


def visible(packing):
    """The definition, position by position."""
    own, prefix = map(np.asarray, (packing.segment_ids, packing.prefix_ids))
    rows, length = own.shape
    return np.array(
        [
            [
                [s <= t and b[s] in (b[t], p[t]) for s in range(length)]
                for t in range(length)
            ]
            for b, p in zip(own, prefix, strict=True)
        ]
    ).reshape(rows, length, length)


def reference(q, k, v, mask, given):
    """Output [B,T,N*H] and the gradients of sum(output * given), all in float64."""
    q, k, v, given = (np.asarray(x, np.float64) for x in (q, k, v, given))
    rows, length, heads, width = q.shape
    group = heads // k.shape[2]
    out, to_q, to_k, to_v = (np.zeros_like(x) for x in (q, q, k, v))
    given = given.reshape(q.shape)
    for b, n in np.ndindex(rows, heads):
        keys, values, g = k[b, :, n // group], v[b, :, n // group], given[b, :, n]
        scores = np.where(mask[b], q[b, :, n] @ keys.T / np.sqrt(width), -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        out[b, :, n] = p @ values
        across = g @ values.T
        moved = p * (across - (p * across).sum(1, keepdims=True)) / np.sqrt(width)
        to_q[b, :, n] = moved @ keys
        to_k[b, :, n // group] += moved.T @ q[b, :, n]
        to_v[b, :, n // group] += p.T @ g
    return out.reshape(rows, length, -1), (to_q, to_k, to_v)


def inputs(rng, rows, length, heads, kv_heads, width=8):
    shapes = [(rows, length, n, width) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes)
    return q, k, v, rng.standard_normal((rows, length, heads * width), np.float32)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_blocks_give_the_attention_of_whole_rows(length, heads, kv_heads):
    rng = np.random.default_rng(length)
    packing = random_packing(rng, 2, length)
    q, k, v, given = inputs(rng, 2, length, heads, kv_heads)
    mask = visible(packing)
    np.testing.assert_array_equal(packing.mask(), mask)
    expected, gradients = reference(q, k, v, mask, given)

    def value(*qkv):
        out = blockwise_attention(*qkv, packing, block=16)
        return jnp.sum(out * given), out

    found = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_allclose(found[1], expected, atol=1e-5)
    for one, other in zip(found[0], gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_large_scores_do_not_overflow():
    rng = np.random.default_rng(0)
    packing = random_packing(rng, 1, 40)
    q, k, v, given = inputs(rng, 1, 40, 2, 1)
    expected, _ = reference(100 * q, 100 * k, v, visible(packing), given)
    found = blockwise_attention(100 * q, 100 * k, v, packing, block=16)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_long_rows_take_the_blocks_and_give_the_same(monkeypatch):
    """Either side of the limit, one function and one result."""
    rng = np.random.default_rng(1)
    packing = random_packing(rng, 2, 48)
    q, k, v, _ = inputs(rng, 2, 48, 4, 2)
    whole = attention.row_attention(packing)(q, k, v)
    monkeypatch.setattr(attention, "WHOLE", 47)
    blocks = attention.row_attention(packing)(q, k, v)
    np.testing.assert_allclose(whole, blocks, atol=1e-5)


def test_memory_does_not_grow_with_the_square_of_the_length():
    """Value and gradient at 16,384 tokens; whole scores alone would take 1 GiB."""
    length = 16384
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    heads = [jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (2, 1, 1)]

    def value(q, k, v, ids):
        return jnp.sum(attention.row_attention(Packing(ids, ids))(q, k, v))

    program = jax.jit(jax.grad(value, (0, 1, 2))).lower(*heads, ids).compile()
    assert program.memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_eight_devices_give_the_same():
    rng = np.random.default_rng(2)
    packing = random_packing(rng, 8, 32)
    q, k, v, given = inputs(rng, 8, 32, 4, 2)

    def value(q, k, v, packing):
        return jnp.sum(blockwise_attention(q, k, v, packing, block=16) * given)

    program = jax.jit(jax.value_and_grad(value, (0, 1, 2)))
    one = program(q, k, v, packing)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    rows = jax.NamedSharding(mesh, jax.P("x", None, "y"))
    ids = jax.NamedSharding(mesh, jax.P("x"))
    two = program(*jax.device_put((q, k, v), rows), jax.device_put(packing, ids))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
