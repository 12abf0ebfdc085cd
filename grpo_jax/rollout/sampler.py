"""The device half of a rollout: slots with kept KV caches, and what moves them on.

A `SamplerState` is one pytree of slots. Three jitted programs act on it:

* `extend` appends given tokens (a prompt, or a tool's answer) to some slots; `append`
  does so for texts of any length, in chunks of one shape;
* `place` copies a prefilled prompt to a slot;
* `decode` samples until slots stop, run out of budget, or a burst of steps has passed,
  in all slots or, packed together, in a few.

Between programs a slot holds the hidden state that predicts its next token. The token
that ended a turn is sampled but not in the cache yet: it is the caller's to send
first with the next `extend`. So nothing is ever computed twice.

Routed adapters (`LoraConfig`): `decode` steps a `RoleTable` with every token that it
draws, and processes the token with the adapter of the role that comes next. What
`extend` appends was not sampled: it belongs to the first adapter, and a turn begins
behind it.

Random streams: token number n of a trajectory is drawn with fold_in(its key, n), so a
draw does not depend on batch company or on timing. Log-probs are those of
log_softmax(logits / temperature) over the full vocabulary, before top-k and top-p;
at temperature 0 those of the raw logits.
"""

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from grpo_jax.devices import shard
from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import KVCache
from grpo_jax.rollout.roles import RoleTable
from grpo_jax.types import Leaf

RUNNING, STOPPED, OUT_OF_BUDGET = 0, 1, 2


@flax.struct.dataclass
class Sampling:
    """How tokens are drawn. temperature 0 is argmax; top_k 0 and top_p 1 are off.

    One program serves all temperatures.
    """

    temperature: Leaf = 1.0
    top_k: int = flax.struct.field(pytree_node=False, default=0)
    top_p: float = flax.struct.field(pytree_node=False, default=1.0)


@flax.struct.dataclass
class SamplerState:
    """Slots of a rollout.

    Attributes:
      cache: keys and values, [slots, ...] a layer.
      lengths: i32 [slots], entries of the cache in use.
      hidden: [slots, D], the state that predicts the next token.
      keys: typed PRNG keys [slots], one stream a trajectory.
      drawn: i32 [slots], tokens drawn from the stream so far.
      modes: i32 [slots], state of the turn in the role table.
    """

    cache: KVCache
    lengths: Leaf
    hidden: Leaf
    keys: Leaf
    drawn: Leaf
    modes: Leaf

    def part(self, slots: Int[Array, " W"] | None, live: int) -> "SamplerState":
        """A state of those slots (None: all) with the first `live` cache entries."""
        state = self.replace(cache=self.cache.head(live))
        return state if slots is None else jax.tree.map(lambda x: x[slots], state)

    def with_part(
        self, slots: Int[Array, " W"] | None, part: "SamplerState"
    ) -> "SamplerState":
        """This state with `part` back in its place; slots beyond the last are lost."""
        if slots is None:
            return part.replace(cache=self.cache.with_head(part.cache))
        state = self.replace(cache=self.cache.with_rows(slots, part.cache))
        for name in ("lengths", "hidden", "keys", "drawn", "modes"):
            whole, new = getattr(self, name), getattr(part, name)
            state = state.replace(**{name: whole.at[slots].set(new, mode="drop")})
        return state


@flax.struct.dataclass
class Burst:
    """What `decode` sampled, column 0 first; entries past `counts` are padding.

    Attributes:
      tokens: i32 [slots, steps].
      logprobs: f32 [slots, steps].
      counts: i32 [slots].
      status: i32 [slots], RUNNING, STOPPED or OUT_OF_BUDGET.
    """

    tokens: Leaf
    logprobs: Leaf
    counts: Leaf
    status: Leaf


def empty_state(config: ModelConfig, slots: int, length: int, dtype) -> SamplerState:
    """Slots with no tokens and room for `length` cache entries each."""
    state = SamplerState(
        cache=KVCache.zeros(config, slots, length, dtype),
        lengths=jnp.zeros(slots, jnp.int32),
        hidden=jnp.zeros((slots, config.width), dtype),
        keys=jax.random.split(jax.random.key(0), slots),
        drawn=jnp.zeros(slots, jnp.int32),
        modes=jnp.zeros(slots, jnp.int32),
    )
    return _laid_out(state)


def logical_axes(
    path: tuple, x: jax.Array | jax.ShapeDtypeStruct
) -> tuple[str | None, ...]:
    """Of an array of a `SamplerState` at this path."""
    if path[0].name == "cache":
        return "batch", "kv_heads", None, None
    return "batch", *(None,) * (x.ndim - 1)


def _laid_out(state: SamplerState) -> SamplerState:
    """One layout on the mesh after every program, so that each is compiled once."""
    return jax.tree.map_with_path(
        lambda path, x: shard(x, *logical_axes(path, x)), state
    )


@functools.partial(jax.jit, static_argnames=("graph", "live"), donate_argnames="state")
def extend(
    graph: nnx.GraphDef,
    adapters: nnx.State,
    base: nnx.State,
    state: SamplerState,
    slots: Int[Array, " N"],
    tokens: Int[Array, "N T"],
    counts: Int[Array, " N"],
    *,
    live: int,
) -> SamplerState:
    """Append tokens[i, :counts[i]] to slots[i]; a slot beyond the last is padding."""
    model = lora.merge(graph, adapters, base)
    steps = jnp.arange(tokens.shape[1])
    starts = state.lengths[slots]
    positions = starts[:, None] + steps
    # Padding writes beyond the cache, that is, nowhere.
    positions = jnp.where(steps < counts[:, None], positions, state.cache.length)
    hidden, cache = model.extend(state.cache, slots, tokens, positions, live)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    kept = jnp.where((counts > 0)[:, None], hidden, state.hidden[slots])
    state = state.replace(
        cache=cache,
        lengths=state.lengths.at[slots].add(counts, mode="drop"),
        hidden=state.hidden.at[slots].set(kept, mode="drop"),
        modes=state.modes.at[slots].set(0, mode="drop"),
    )
    return _laid_out(state)


def append(
    graph: nnx.GraphDef,
    adapters: nnx.State,
    base: nnx.State,
    state: SamplerState,
    slots: Sequence[int],
    texts: Sequence[Sequence[int] | np.ndarray],
    *,
    rows: int,
    chunk: int,
    live: int,
) -> SamplerState:
    """Append texts[i] to slots[i] with `extend`, `rows` x `chunk` tokens at a time.

    At most `rows` texts; without any, one `extend` of padding.
    """
    targets = np.full(rows, state.lengths.shape[0], np.int32)
    targets[: len(slots)] = slots
    for start in range(0, max([1, *map(len, texts)]), chunk):
        tokens = np.zeros((rows, chunk), np.int32)
        counts = np.zeros(rows, np.int32)
        for row, text in enumerate(texts):
            piece = text[start : start + chunk]
            tokens[row, : len(piece)], counts[row] = piece, len(piece)
        state = extend(graph, adapters, base, state, targets, tokens, counts, live=live)
    return state


@functools.partial(jax.jit, donate_argnames="state")
def place(
    state: SamplerState,
    prompts: SamplerState,
    row: Int[Array, ""],
    slot: Int[Array, ""],
    key,
    number: Int[Array, ""],
) -> SamplerState:
    """Copy prompt `row` to `slot` and start stream fold_in(key, number) there."""

    def copied(store, given):
        start = (slot,) + (0,) * (store.ndim - 1)
        return jax.lax.dynamic_update_slice(store, given[row][None], start)

    state = SamplerState(
        cache=jax.tree.map(copied, state.cache, prompts.cache),
        lengths=state.lengths.at[slot].set(prompts.lengths[row]),
        hidden=state.hidden.at[slot].set(prompts.hidden[row]),
        keys=state.keys.at[slot].set(jax.random.fold_in(key, number)),
        drawn=state.drawn.at[slot].set(0),
        modes=state.modes.at[slot].set(0),
    )
    return _laid_out(state)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "steps", "live"),
    donate_argnames="state",
)
def decode(
    graph: nnx.GraphDef,
    adapters: nnx.State,
    base: nnx.State,
    state: SamplerState,
    slots: Int[Array, " W"] | None,
    budgets: Int[Array, " W"],
    stop_ids: Int[Array, " E"],
    *,
    sampling: Sampling,
    steps: int,
    live: int,
    table: RoleTable | None = None,
) -> tuple[SamplerState, Burst]:
    """Sample up to `steps` tokens in `slots` (None: all), each within its budget.

    Slots beyond the last and those with budget 0 are padding. Row i of the burst is
    slots[i]. Reads the first `live` cache entries; the caller makes sure that lengths
    + steps fit. The token that ends a slot is not put into the cache. `table` chooses
    among routed adapters, None: the first.
    """
    model = lora.merge(graph, adapters, base)
    width = budgets.shape[0]
    burst = Burst(
        tokens=jnp.zeros((width, steps), jnp.int32),
        logprobs=jnp.zeros((width, steps), jnp.float32),
        counts=jnp.zeros(width, jnp.int32),
        status=jnp.where(budgets > 0, RUNNING, STOPPED),
    )

    def step(carry):
        index, state, burst = carry  # state.cache: its live entries only
        running = burst.status == RUNNING
        logits = shard(model.logits(state.hidden), "batch", "vocab")
        token, logprob = draw(logits, state.keys, state.drawn, sampling)
        counts = burst.counts + running
        stopped = jnp.isin(token, stop_ids)
        status = jnp.where(counts >= budgets, OUT_OF_BUDGET, RUNNING)
        status = jnp.where(stopped, STOPPED, status)
        burst = Burst(
            tokens=burst.tokens.at[:, index].set(jnp.where(running, token, 0)),
            logprobs=burst.logprobs.at[:, index].set(jnp.where(running, logprob, 0.0)),
            counts=counts,
            status=jnp.where(running, status, burst.status),
        )
        on = burst.status == RUNNING
        positions = jnp.where(on, state.lengths, live)
        modes, routes = state.modes, None
        if table is not None:
            modes = jnp.where(on, table.after[modes, token], modes)
            routes = table.roles[modes]
        hidden, cache = model.decode(state.cache, token, positions, routes)
        state = state.replace(
            cache=cache,
            lengths=state.lengths + on,
            hidden=jnp.where(on[:, None], hidden, state.hidden),
            drawn=state.drawn + running,
            modes=modes,
        )
        return index + 1, state, burst

    def unfinished(carry):
        index, _, burst = carry
        return (index < steps) & jnp.any(burst.status == RUNNING)

    start = (0, state.part(slots, live), burst)
    _, part, burst = jax.lax.while_loop(unfinished, step, start)
    return _laid_out(state.with_part(slots, part)), burst


def draw(
    logits: Float[Array, "S V"], keys, drawn: Int[Array, " S"], sampling: Sampling
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """One token a slot and its log-prob (see the module docstring for which)."""
    greedy = sampling.temperature == 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    uniforms = jax.vmap(_uniform)(keys, drawn)
    drawn_tokens = inverse_cdf(_filtered(logprobs, sampling), uniforms)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.where(greedy, best, drawn_tokens)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen


def _uniform(key, number):
    return jax.random.uniform(jax.random.fold_in(key, number))


def _filtered(logprobs: Float[Array, "S V"], sampling: Sampling) -> Float[Array, "S V"]:
    """Probabilities with what top-k and top-p exclude set to 0; not renormalised.

    top-p counts the mass of what top-k left. Ties with the last token kept stay in.
    """
    probs = jnp.exp(logprobs)
    top_k = min(sampling.top_k, probs.shape[-1]) or probs.shape[-1]
    if top_k == probs.shape[-1] and sampling.top_p >= 1:
        return probs
    ordered, _ = jax.lax.top_k(probs, top_k)
    floor = ordered[:, -1]
    if sampling.top_p < 1:
        # Keep tokens until the mass before them reaches top_p: always the first.
        before = jnp.cumsum(ordered, axis=-1) - ordered
        allowed = sampling.top_p * ordered.sum(axis=-1, keepdims=True)
        floor = jnp.where(before < allowed, ordered, jnp.inf).min(axis=-1)
    return jnp.where(probs >= floor[:, None], probs, 0.0)


def inverse_cdf(
    weights: Float[Array, "S V"], uniforms: Float[Array, " S"], block: int = 256
) -> Int[Array, " S"]:
    """Index i with probability weights[i] / sum(weights), from one uniform a row.

    Two levels of running sums (blocks, then inside one block): a single uniform and two
    short scans in place of a random number for every token of the vocabulary. An index
    of weight 0 is never chosen.
    """
    rows, size = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -size % block)))
    blocks = padded.reshape(rows, -1, block)
    totals = blocks.sum(axis=-1)
    ends = jnp.cumsum(totals, axis=-1)
    target = uniforms * ends[:, -1]
    chosen = _first_above(totals, ends, target)
    starts = jnp.pad(ends, ((0, 0), (1, 0)))
    rest = target - jnp.take_along_axis(starts, chosen[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)[:, 0]
    index = chosen * block + _first_above(inside, jnp.cumsum(inside, axis=-1), rest)
    return jnp.minimum(index, size - 1).astype(jnp.int32)  # NaN weights: in range


def _first_above(
    weights: Float[Array, "S n"], sums: Float[Array, "S n"], target: Float[Array, " S"]
) -> Int[Array, " S"]:
    """First index with weight whose running sum exceeds the target, or the last one
    with weight: rounding may leave the target at or past the whole sum."""
    above = (weights > 0) & (sums > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    return jnp.where(above.any(axis=-1), jnp.argmax(above, axis=-1), last)
