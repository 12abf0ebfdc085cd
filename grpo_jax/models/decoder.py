"""The decoder of Qwen2.5, Qwen3 and Llama checkpoints, as one Flax NNX module.

Letters: B rows, T query positions, S key positions, D model width, N query heads,
K kv heads, G = N / K, H head width, F mlp width, V vocabulary, L layers, R rank.

Layers are stacked along a leading axis and scanned. Three forwards share every block:
`hidden` sees whole rows under an attention mask (training, scoring); `extend` appends
chunks of tokens to a few slots of a KV cache, and `decode` one token to all of them
(rollouts). None touches the vocabulary: `logits` does that, for the positions that
need it. `decode` alone visits the layers one by one, each with its own weights and
cache: a scan would copy every layer's share out of the stack for every token.

Base weights are `nnx.Param`, adapters `nnx.LoRAParam`; every variable carries its
`logical_axes`, which `grpo_jax.devices` maps to the mesh.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from grpo_jax.devices import shard
from grpo_jax.models import rope
from grpo_jax.models.attention import attention, row_attention
from grpo_jax.models.blockwise import Packing
from grpo_jax.models.config import LoraConfig, ModelConfig
from grpo_jax.types import Leaf


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer; entry s of a slot belongs to position s.

    Attributes:
      k: L arrays [slots, K, H, S], rotated keys, transposed as the scores want them.
      v: L arrays [slots, K, S, H].
    """

    k: tuple[Leaf, ...]
    v: tuple[Leaf, ...]

    @classmethod
    def zeros(cls, config: ModelConfig, slots: int, length: int, dtype) -> "KVCache":
        rows, layers = (slots, config.num_kv_heads), range(config.num_layers)
        k, v = (*rows, config.head_width, length), (*rows, length, config.head_width)
        return cls(
            tuple(jnp.zeros(k, dtype) for _ in layers),
            tuple(jnp.zeros(v, dtype) for _ in layers),
        )

    @property
    def length(self) -> int:
        return self.v[0].shape[2]

    def head(self, length: int) -> "KVCache":
        """The first `length` entries of every slot."""
        k = tuple(keys[..., :length] for keys in self.k)
        return KVCache(k, tuple(values[:, :, :length] for values in self.v))

    def with_head(self, head: "KVCache") -> "KVCache":
        """This cache with `head` for its first entries."""
        length = head.length
        if length == self.length:
            return head
        pairs = zip(self.k, head.k, strict=True)
        k = tuple(keys.at[..., :length].set(new) for keys, new in pairs)
        pairs = zip(self.v, head.v, strict=True)
        return KVCache(k, tuple(x.at[:, :, :length].set(new) for x, new in pairs))

    def with_rows(self, slots: Int[Array, " B"], rows: "KVCache") -> "KVCache":
        """This cache with `rows` at the head of some slots; drops those beyond."""
        length, pairs = rows.length, zip(self.k, rows.k, strict=True)
        k = [x.at[slots, :, :, :length].set(new, mode="drop") for x, new in pairs]
        pairs = zip(self.v, rows.v, strict=True)
        v = [x.at[slots, :, :length].set(new, mode="drop") for x, new in pairs]
        return KVCache(tuple(k), tuple(v))

    def rows(self, slots: Int[Array, " B"]) -> "KVCache":
        """Those slots of every layer; one beyond the last gives what the last holds."""
        return jax.tree.map(lambda store: store[slots], self)


class Linear(nnx.Module):
    """Stacked x @ kernel (+ bias) (+ alpha/r (x @ lora_a) @ lora_b).

    Routed adapters lie side by side, [I,2,R] and [2,R,O]; `routes` [B,T] says which of
    the two each position uses (DART, arXiv 2602.00994), None: all the first.
    """

    def __init__(self, layers, in_axis, out_axis, *, bias, lora, dtype, rngs):
        (in_width, in_name), (out_width, out_name) = in_axis, out_axis
        kernel = _normal(rngs.params(), (layers, in_width, out_width), in_width**-0.5)
        self.kernel = _param(kernel.astype(dtype), "layers", in_name, out_name)
        self.has_bias, self.lora = bias, lora
        if bias:
            zeros = jnp.zeros((layers, out_width), dtype)
            self.bias = _param(zeros, "layers", out_name)
        if lora:
            two, pair = ((2,), (None,)) if lora.routed else ((), ())
            shape = (layers, in_width, *two, lora.rank)
            a = _normal(rngs.params(), shape, in_width**-0.5)
            b = jnp.zeros((layers, *two, lora.rank, out_width), jnp.float32)
            self.lora_a = _adapter(a, "layers", in_name, *pair, "rank")
            self.lora_b = _adapter(b, "layers", *pair, "rank", out_name)

    def __call__(
        self,
        x: Float[Array, "B T I"],
        dropout_key=None,
        routes: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T O"]:
        y = x @ self.kernel[...]
        if self.has_bias:
            y = y + self.bias[...]
        if self.lora is None:
            return y
        rate = self.lora.dropout
        if dropout_key is not None and rate > 0:
            keep = jax.random.bernoulli(dropout_key, 1 - rate, x.shape)
            x = jnp.where(keep, x / (1 - rate), 0)
        # One long axis: the adapters' gradients are then plain matrix products.
        flat = x.reshape(-1, x.shape[-1])
        a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
        if self.lora.routed:
            update = _routed(flat, a, b, routes)
        else:
            update = flat @ a @ b
        scale = self.lora.alpha / self.lora.rank
        return y + scale * update.reshape(y.shape)


def _routed(flat, a, b, routes):
    """flat [N,I] @ the adapter of each row's route; the other one's share is zero.

    One product of twice the rank, with half of its inner values masked.
    """
    if routes is None:
        return flat @ a[:, 0] @ b[0]
    (width, two, rank), flags = a.shape, routes.reshape(-1, 1) == jnp.arange(2)
    inner = (flat @ a.reshape(width, two * rank)).reshape(-1, two, rank)
    inner = jnp.where(flags[:, :, None], inner, 0).reshape(-1, two * rank)
    return inner @ b.reshape(two * rank, -1)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32."""

    def __init__(self, shape, axes, eps, dtype):
        self.scale = _param(jnp.ones(shape, dtype), *axes)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.eps)).astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Grouped-query projections; what is attended to comes from the caller."""

    def __init__(self, c: ModelConfig, linear: Callable, dtype):
        embed = (c.width, "embed")
        heads = (c.num_heads * c.head_width, "heads")
        kv_heads = (c.num_kv_heads * c.head_width, "kv_heads")
        self.q = linear("q", embed, heads, bias=c.qkv_bias)
        self.k = linear("k", embed, kv_heads, bias=c.qkv_bias)
        self.v = linear("v", embed, kv_heads, bias=c.qkv_bias)
        self.o = linear("o", heads, embed, bias=False)
        self.head_width, self.qk_norm = c.head_width, c.qk_norm
        if c.qk_norm:
            shape, axes = (c.num_layers, c.head_width), ("layers", None)
            self.q_norm = RMSNorm(shape, axes, c.norm_eps, dtype)
            self.k_norm = RMSNorm(shape, axes, c.norm_eps, dtype)

    def project(self, x, cos, sin, keys, routes):
        """x [B,T,D] -> rotated q [B,T,N,H], rotated k and v [B,T,K,H]."""
        split = (*x.shape[:2], -1, self.head_width)
        q = self.q(x, keys[0], routes).reshape(split)
        k = self.k(x, keys[1], routes).reshape(split)
        v = self.v(x, keys[2], routes).reshape(split)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, c: ModelConfig, linear: Callable):
        embed, mlp = (c.width, "embed"), (c.mlp_width, "mlp")
        self.gate = linear("gate", embed, mlp, bias=False)
        self.up = linear("up", embed, mlp, bias=False)
        self.down = linear("down", mlp, embed, bias=False)

    def __call__(self, x, keys, routes):
        gate = jax.nn.silu(self.gate(x, keys[0], routes))
        inner = shard(gate * self.up(x, keys[1], routes), "batch", None, "mlp")
        return self.down(inner, keys[2], routes)


class Block(nnx.Module):
    """One decoder layer (all of them, until the scan takes a slice)."""

    def __init__(self, c: ModelConfig, lora: LoraConfig | None, dtype, rngs):
        def linear(name, in_axis, out_axis, bias):
            adapter = lora if lora and name in lora.targets else None
            options = dict(bias=bias, lora=adapter, dtype=dtype, rngs=rngs)
            return Linear(c.num_layers, in_axis, out_axis, **options)

        shape, axes = (c.num_layers, c.width), ("layers", None)
        self.input_norm = RMSNorm(shape, axes, c.norm_eps, dtype)
        self.attention = Attention(c, linear, dtype)
        self.post_norm = RMSNorm(shape, axes, c.norm_eps, dtype)
        self.mlp = MLP(c, linear)

    def __call__(self, x, cos, sin, attend, dropout_key=None, routes=None):
        """attend(q, k, v) -> [B,T,N*H]; it may keep the keys and values."""
        keys = [None] * 7
        if dropout_key is not None:
            keys = jax.random.split(dropout_key, 7)
        # Gathered once for all projections that read it.
        normed = shard(self.input_norm(x), "batch", None, None)
        q, k, v = self.attention.project(normed, cos, sin, keys[:3], routes)
        heads = shard(attend(q, k, v), "batch", None, "heads")
        x = x + self.attention.o(heads, keys[3], routes)
        normed = shard(self.post_norm(x), "batch", None, None)
        x = x + self.mlp(normed, keys[4:], routes)
        # What the backward pass keeps of a layer lies on all devices of a row.
        return shard(x, "batch", "residual" if x.shape[1] > 1 else None, None)


class Decoder(nnx.Module):
    """Token ids to logits; see the module docstring for the two forwards."""

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraConfig | None = None,
        *,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.lora = lora
        table = _normal(rngs.params(), (config.vocab_size, config.width), 0.02)
        self.embed = nnx.Dict(table=_param(table.astype(dtype), "vocab", "embed"))
        self.layers = Block(config, lora, dtype, rngs)
        self.norm = RMSNorm((config.width,), (None,), config.norm_eps, dtype)
        if not config.tied:
            kernel = _normal(rngs.params(), (config.width, config.vocab_size), 0.02)
            param = _param(kernel.astype(dtype), "embed", "vocab")
            self.head = nnx.Dict(kernel=param)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits (float32) of right-padded rows: padding reaches nothing before it."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        packing = Packing.causal(*tokens.shape)
        return self.logits(self.hidden(tokens, positions, packing))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        packing: Packing,
        *,
        routes: Int[Array, "B T"] | None = None,
        dropout_key=None,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        """Final hidden states of whole rows, in which `packing` says who sees whom.

        `routes`: which of two routed adapters each position uses (see `Linear`).
        """
        cos, sin = rope.rotations(self.config, positions)
        graph, layers = nnx.split(self.layers)
        attend = row_attention(packing)

        def step(x, inputs):
            state, index = inputs
            key = None
            if dropout_key is not None:
                key = jax.random.fold_in(dropout_key, index)
            return nnx.merge(graph, state)(x, cos, sin, attend, key, routes), None

        step = jax.checkpoint(step) if remat else step
        indices = jnp.arange(self.config.num_layers)
        x, _ = jax.lax.scan(step, self._embed(tokens), (layers, indices))
        return self.norm(x)

    def extend(
        self,
        cache: KVCache,
        slots: Int[Array, " B"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        live: int,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Append tokens to a few `slots` of the cache and return their hidden states.

        A position at or beyond the cache's length writes nothing, and neither does a
        slot beyond the last: that is how callers mark padding. Only the first `live`
        cache entries are read. Of routed adapters the first is used: nobody sampled
        these tokens.
        """
        cos, sin = rope.rotations(self.config, positions)
        mask = jnp.arange(live) <= positions[:, :, None]
        graph, layers = nnx.split(self.layers)
        rows = cache.head(live).rows(slots)

        def step(x, inputs):
            state, k_rows, v_rows = inputs
            new = []

            def attend(q, k, v):
                new.extend((k.astype(k_rows.dtype), v.astype(v_rows.dtype)))
                own = jnp.arange(len(tokens))
                keys, values = _write(k_rows, v_rows, own, positions, *new)
                return attention(q, keys, values, mask)

            return nnx.merge(graph, state)(x, cos, sin, attend), tuple(new)

        inputs = (layers, jnp.stack(rows.k), jnp.stack(rows.v))
        x, (k, v) = jax.lax.scan(step, self._embed(tokens), inputs)
        written = [
            _write(*stores, slots, positions, k[layer], v[layer])
            for layer, stores in enumerate(zip(cache.k, cache.v, strict=True))
        ]
        return self.norm(x), KVCache(*zip(*written, strict=True))

    def decode(
        self,
        cache: KVCache,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        routes: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Append one token to every slot of the cache; returns their hidden states.

        Padding as in `extend`. Reads the whole cache: see `KVCache.head`.
        """
        places = positions[:, None]
        if routes is not None:
            routes = routes[:, None]
        cos, sin = rope.rotations(self.config, places)
        mask = jnp.arange(cache.length) <= places[:, :, None]
        slots, x, written = jnp.arange(len(tokens)), self._embed(tokens[:, None]), []
        for block, *stores in zip(self.blocks(), cache.k, cache.v, strict=True):

            def attend(q, k, v, stores=stores):
                new = (k.astype(stores[0].dtype), v.astype(stores[1].dtype))
                written.append(_write(*stores, slots, places, *new))
                return attention(q, *written[-1], mask)

            x = block(x, cos, sin, attend, routes=routes)
        return self.norm(x)[:, 0], KVCache(*zip(*written, strict=True))

    def blocks(self) -> list[Block]:
        """The layers, one by one."""
        if not isinstance(self.layers, Block):
            return list(self.layers)
        graph, layers = nnx.split(self.layers)

        def block(layer):
            return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[layer], layers))

        return [block(layer) for layer in range(self.config.num_layers)]

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Next-token logits, float32."""
        if self.config.tied:
            table, form = self.embed["table"][...], "...d,vd->...v"
        else:
            table, form = self.head["kernel"][...], "...d,dv->...v"
        return jnp.einsum(form, hidden, table, preferred_element_type=jnp.float32)

    def _embed(self, tokens):
        return shard(self.embed["table"][...][tokens], "batch", "length", None)


def _write(k_store, v_store, rows, positions, k, v):
    """Put k and v [B,T,K,H] at `positions` [B,T] of `rows` of one layer's cache."""
    place = (rows[:, None], slice(None))
    keys = k_store.at[*place, :, positions].set(k, mode="drop")
    return keys, v_store.at[*place, positions].set(v, mode="drop")


def _normal(key, shape, scale):
    return scale * jax.random.normal(key, shape, jnp.float32)


def _param(value, *axes):
    return nnx.Param(value, logical_axes=axes)


def _adapter(value, *axes):
    return nnx.LoRAParam(value, logical_axes=axes)
