"""Attention of whole rows that keeps no array of the size of its scores.

The scores of long rows are visited a block of queries and a block of keys at a time,
with a running maximum and sum (FlashAttention, arXiv 2205.14135); blocks behind the
diagonal are not visited at all. The backward pass computes the scores again. Plain
JAX, so that TPU, GPU and CPU run the same code, and the mask of packed rows with shared
prompts, which kernels do not know, is computed where it is needed.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.devices import shard
from grpo_jax.types import Leaf

BLOCK = 512  # queries and keys of one visit
NEVER = -1e30  # a score that weighs nothing; finite, so that no maximum is -inf


@flax.struct.dataclass
class Packing:
    """What the positions of packed rows see: themselves, what lies before them in their
    own segment, and before them in their prefix.

    Attributes:
      segment_ids: i32 [B,T].
      prefix_ids: i32 [B,T], one more segment that a position sees; its own for none.
    """

    segment_ids: Leaf
    prefix_ids: Leaf

    @classmethod
    def causal(cls, rows: int, length: int) -> "Packing":
        """Rows of one segment each."""
        ids = jnp.ones((rows, length), jnp.int32)
        return cls(ids, ids)

    def mask(self) -> Bool[Array, "B T T"]:
        """mask[b,t,s]: position t sees position s."""
        index = jnp.arange(self.segment_ids.shape[1])
        return _sees(index, index, self.segment_ids, self.prefix_ids, self.segment_ids)


def _sees(queries, keys, own, prefix, of_keys):
    """From indices [T], [S] and ids [B,T], [B,T], [B,S]: bool [B,T,S]."""
    known = (own[:, :, None] == of_keys[:, None]) | (
        prefix[:, :, None] == of_keys[:, None]
    )
    return (queries[:, None] >= keys) & known


def blockwise_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    packing: Packing,
    block: int = BLOCK,
) -> Float[Array, "B T O"]:
    """softmax(q k / sqrt(H)) v over what each position sees; float32 softmax.

    Query heads n*G .. n*G+G-1 share kv head n. Returns the heads side by side
    (O = N * H). Differentiable in q, k and v.
    """
    rows, length, heads, width = q.shape
    kv_heads, spare = k.shape[2], -length % block

    def blocks(x):  # [B,T,*] -> [C,B,block,*]; padding sees itself alone
        x = jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, -1, block, *x.shape[2:]).swapaxes(0, 1)

    def heads_first(x):  # [B,T,K,*,H] -> [C,B,K,*,S,H], whole rows on a device
        x = jnp.moveaxis(blocks(x), 2, -2)
        return shard(x, None, "batch", "kv_heads", *(None,) * (x.ndim - 3))

    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, width)
    ids = [blocks(x) for x in (packing.segment_ids, packing.prefix_ids)]
    ids = tuple(shard(x, None, "batch", None) for x in ids)
    out = _blockwise(heads_first(grouped), heads_first(k), heads_first(v), ids)
    out = jnp.moveaxis(out, -2, 2).swapaxes(0, 1)  # [B,C,block,K,G,H]
    return out.reshape(rows, -1, heads * width)[:, :length]


@jax.custom_vjp
def _blockwise(q, k, v, ids):
    """q [C,B,K,G,S,H], k and v [C,B,K,S,H], ids [C,B,S] twice -> [C,B,K,G,S,H]."""
    return _forward(q, k, v, ids)[0]


def _forward(q, k, v, ids):
    def one_block(inputs):
        index, queries = inputs

        def visit(j, carry):
            shift, total, out = carry
            scores = _scores(index, queries, j, k, ids)
            new_shift = jnp.maximum(shift, scores.max(-1, keepdims=True))
            weights, fade = jnp.exp(scores - new_shift), jnp.exp(shift - new_shift)
            more = _product("bkgts,bksh->bkgth", weights.astype(v.dtype), v[j])
            total = total * fade + weights.sum(-1, keepdims=True)
            return new_shift, total, out * fade + more

        thin = jnp.zeros((*queries.shape[:-1], 1), jnp.float32)
        start = (thin + NEVER, thin, jnp.zeros(queries.shape, jnp.float32))
        shift, total, out = jax.lax.fori_loop(0, index + 1, visit, start)
        return (out / total).astype(q.dtype), shift + jnp.log(total)

    out, log_total = jax.lax.map(one_block, (jnp.arange(len(q)), q))
    return out, (q, k, v, ids, out, log_total)


def _backward(residuals, gradient):
    q, k, v, ids, out, log_total = residuals
    inner = jnp.sum(gradient.astype(jnp.float32) * out, axis=-1, keepdims=True)

    def one_block(carry, inputs):
        index, queries, given, own_inner, own_log_total = inputs

        def visit(j, carry):
            to_q, to_k, to_v = carry
            scores = _scores(index, queries, j, k, ids)
            weights = jnp.exp(scores - own_log_total)
            across = _product("bkgth,bksh->bkgts", given, v[j])
            moved = weights * (across - own_inner) * q.shape[-1] ** -0.5
            moved, weights = moved.astype(q.dtype), weights.astype(q.dtype)
            to_q += _product("bkgts,bksh->bkgth", moved, k[j])
            to_k = to_k.at[j].add(_product("bkgts,bkgth->bksh", moved, queries))
            to_v = to_v.at[j].add(_product("bkgts,bkgth->bksh", weights, given))
            return to_q, to_k, to_v

        zero = jnp.zeros(queries.shape, jnp.float32)
        to_q, *carry = jax.lax.fori_loop(0, index + 1, visit, (zero, *carry))
        return tuple(carry), to_q.astype(q.dtype)

    nothing = jnp.zeros(k.shape, jnp.float32)
    inputs = (jnp.arange(len(q)), q, gradient, inner, log_total)
    (to_k, to_v), to_q = jax.lax.scan(one_block, (nothing, nothing), inputs)
    return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None


_blockwise.defvjp(_forward, _backward)


def _scores(index, queries, j, k, ids):
    """Scaled products of query block `index` and key block j; NEVER where unseen."""
    own, prefix = ids
    block = queries.shape[-2]
    places = jnp.arange(block)
    sees = _sees(
        index * block + places, j * block + places, own[index], prefix[index], own[j]
    )
    scores = _product("bkgth,bksh->bkgts", queries, k[j])
    return jnp.where(sees[:, None, None], scores * queries.shape[-1] ** -0.5, NEVER)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
