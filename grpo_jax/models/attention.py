"""Grouped-query attention: one function, the form that suits the machine.

Every model's block calls `attention`, or `blockwise_attention` for long rows. Queries
of one kv head are laid side by side, so that each product is a plain matrix product: on
a CPU the straightforward einsum costs two to ten times as much (layouts its matrix
library has no kernel for).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.models.blockwise import Packing, blockwise_attention

WHOLE = 1024  # rows up to here: mask and scores as whole arrays
MASKED = -1e30  # finite, so that a row that may attend to nothing gives no NaN


def row_attention(packing: Packing) -> Callable[..., Float[Array, "B T O"]]:
    """The attention of whole rows: q [B,T,N,H], k and v [B,T,K,H] -> [B,T,O]."""
    if packing.segment_ids.shape[1] > WHOLE:
        return functools.partial(blockwise_attention, packing=packing)
    mask = packing.mask()
    return lambda q, k, v: attention(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T O"]:
    """softmax(q k / sqrt(H)) v over the keys that the mask allows; float32 softmax.

    Keys come transposed, as the cache keeps them. Query heads n*G .. n*G+G-1 share kv
    head n. Returns the heads side by side (O = N * H).
    """
    rows, length, heads, width = q.shape
    kv_heads = v.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(rows, length, kv_heads, group, width)
    # [B,K,G*T,H]: head-major, so that one kv head's queries are one matrix.
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, width)
    form = _one_at_a_time if _prefers_single_products(length) else _attend
    out = form(grouped, k, v, mask)
    out = out.reshape(rows, kv_heads, group, length, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads * width)


@jax.custom_vjp
def _attend(q, k, v, mask):
    """q [*,K,G*T,H], k [*,K,H,S], v [*,K,S,H], mask [*,T,S] -> [*,K,G*T,H].

    Its backward pass computes the weights again instead of keeping them, and the sums
    that the softmax's gradient needs from the output (arXiv 2205.14135, 3.1).
    """
    return _attend_forward(q, k, v, mask)[0]


def _attend_forward(q, k, v, mask):
    scores = _scores(q, k, mask)
    shift = jnp.max(scores, axis=-1, keepdims=True)
    exps = jnp.exp(scores - shift)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    out = jnp.matmul((exps / total).astype(v.dtype), v)
    return out, (q, k, v, mask, out, shift, total)


def _attend_backward(residuals, gradient):
    q, k, v, mask, out, shift, total = residuals
    weights = jnp.exp(_scores(q, k, mask) - shift) / total
    v_rows = v.swapaxes(-1, -2)
    across = jnp.matmul(gradient, v_rows, preferred_element_type=jnp.float32)
    inner = jnp.sum(gradient.astype(jnp.float32) * out, axis=-1, keepdims=True)
    moved = (weights * (across - inner) * q.shape[-1] ** -0.5).astype(q.dtype)
    # Only narrow factors are transposed, never a [T,S] one.
    v_gradient = jnp.matmul(gradient.swapaxes(-1, -2), weights.astype(v.dtype))
    return (
        jnp.matmul(moved, k.swapaxes(-1, -2)),
        jnp.matmul(q.swapaxes(-1, -2), moved),
        v_gradient.swapaxes(-1, -2),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(q, k, mask):
    """Scaled products [*,K,G*T,S] in float32, MASKED where the mask is False."""
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    shape = scores.shape
    scores = scores.reshape(*shape[:-2], -1, *mask.shape[-2:])
    return jnp.where(mask[..., None, None, :, :], scores, MASKED).reshape(shape)


def _one_at_a_time(q, k, v, mask):
    """The same, one kv head of one row after the other."""
    rows, kv_heads = q.shape[:2]
    flat = [x.reshape(rows * kv_heads, 1, *x.shape[2:]) for x in (q, k, v)]
    masks = jnp.repeat(mask, kv_heads, axis=0)

    def step(_, inputs):
        return None, _attend(*inputs)

    _, out = jax.lax.scan(step, None, (*flat, masks), unroll=min(len(masks), 8))
    return out.reshape(q.shape)


def _prefers_single_products(length: int) -> bool:
    """A single CPU device runs one large product at a time best, threads inside it."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() == "cpu" and mesh.size <= 1 and length >= 32
