"""The programs of a run, from abstract arrays: what `setup` builds, without weights.

Shapes, shardings and options are those that the trainer and the engine use for the
same config.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from grpo_jax import devices, setup
from grpo_jax.models import ModelConfig, abstract_model, lora
from grpo_jax.models.blockwise import BLOCK
from grpo_jax.rollout import sampler
from grpo_jax.rollout.engine import PROMPTS, RESULTS
from grpo_jax.training import batching, update
from grpo_jax.training.choices import make_loss
from grpo_jax.types import TrajectoryBatch

STOP_IDS = 2
FLOATS = (*batching.FLOATS, "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Program:
    """One program of a step.

    Attributes:
      name: prefill, extend, decode, score or update.
      trace: makes it, traced for its arrays.
      while_trips: how often its loops of unknown length run.
      tokens: positions that it computes.
      phase: "rollout" or "update": what else is in memory beside it.
    """

    name: str
    trace: Callable[[], object]
    while_trips: int | float
    tokens: int
    phase: str


@dataclass(frozen=True)
class Parts:
    """What a run holds, abstract and laid out on the mesh.

    Attributes:
      config: shape of the model.
      graph, adapters, base: the decoder, split.
      state: adapters, optimizer and key.
      decoder: adapters and base as decoding wants them.
      slots: the slots of a rollout.
      batch: one micro-batch.
    """

    config: ModelConfig
    graph: nnx.GraphDef
    adapters: nnx.State
    base: nnx.State
    state: update.TrainState
    decoder: tuple[nnx.State, nnx.State]
    slots: sampler.SamplerState
    batch: TrajectoryBatch


def make_parts(config: ConfigDict, shape: ModelConfig, mesh: Mesh, dtype: str) -> Parts:
    """Abstract parts for a checked config."""
    model = abstract_model(shape, dtype, setup.lora_config(config))
    graph, adapters, base = lora.split(model)
    decoder = tuple(_for_decoding(x, mesh) for x in (adapters, base))
    adapters, base = (laid_out(x, devices.shardings(x, mesh)) for x in (adapters, base))
    limits = setup.make_limits(config)
    optimizer = setup.rl_optimizer(config, steps=100)
    key = _abstract(mesh, jax.eval_shape(lambda: jax.random.key(0)))
    state = jax.eval_shape(
        lambda a, k: update.new_state(a, optimizer, k), adapters, key
    )
    rows = (config.train.micro_batch_size, setup.row_length(config))
    slots = (limits.slots, limits.cache_length)
    return Parts(
        *(shape, graph, adapters, base),
        state=_like_adapters(state, adapters, mesh),
        decoder=decoder,
        slots=_slots(shape, *slots, jnp.dtype(dtype), mesh),
        batch=_batch(rows, mesh),
    )


def programs(config: ConfigDict, parts: Parts, mesh: Mesh) -> Iterator[Program]:
    """Every program of a step; their arrays are those of the largest buckets."""
    limits, shape = setup.make_limits(config), parts.config
    model = (parts.graph, parts.adapters, parts.base)
    dtype = parts.slots.hidden.dtype

    def ints(*sizes):
        return _abstract(mesh, jax.ShapeDtypeStruct(sizes, jnp.int32))

    def extend(state, rows, chunk, live):
        given = (state, ints(rows), ints(rows, chunk), ints(rows))
        return lambda: sampler.extend.trace(*model, *given, live=live)

    rows, chunk = PROMPTS[0], limits.prompt_chunk(PROMPTS[1])
    prompts = _slots(shape, rows, limits.prompt_length, dtype, mesh)
    traced = extend(prompts, rows, chunk, limits.prompt_length)
    yield Program("prefill", traced, 1, rows * chunk, "rollout")
    rows, chunk = RESULTS
    traced = extend(parts.slots, rows, chunk, limits.cache_length)
    yield Program("extend", traced, 1, rows * chunk, "rollout")

    def decode():
        return sampler.decode.trace(
            *(parts.graph, *parts.decoder),
            *(parts.slots, None, ints(limits.slots), ints(STOP_IDS)),
            sampling=setup.make_sampling(config),
            steps=limits.burst,
            live=limits.cache_length,
        )

    size = limits.burst * limits.slots
    yield Program("decode", decode, limits.burst, size, "rollout")
    loss, batch = make_loss(config), parts.batch
    blocks = (-(-batch.tokens.shape[1] // BLOCK) + 1) / 2  # visited a block, on average
    size = batch.tokens.size

    def score():
        options = {"temperature": loss.temperature}
        return update.score.trace(*model, batch, **options)

    yield Program("score", score, blocks, size, "update")

    def accumulate():
        with jax.set_mesh(mesh):
            weights = jax.eval_shape(
                lambda b: update.divisors(b, loss=loss), parts.batch
            )
        weights = _abstract(mesh, weights)
        given = (weights, parts.adapters, parts.state.key)
        return update.accumulate.trace(*model, batch, *given, loss=loss)

    yield Program("update", accumulate, blocks, size, "update")


def laid_out(tree, layouts):
    """ShapeDtypeStructs with their shardings."""
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        tree,
        layouts,
    )


def device_bytes(tree) -> int:
    """What a device holds of abstract arrays with shardings."""
    total = 0
    for x in jax.tree.leaves(tree):
        size = 1
        for one in x.sharding.shard_shape(x.shape):
            size *= one
        total += size * (x.dtype.itemsize if x.dtype != _KEY else 8)
    return total


_KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype


def _for_decoding(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Abstract weights as `lora.for_decoding` lays them out in bfloat16."""

    def one(variable):
        x = variable.get_raw_value()
        layout = NamedSharding(mesh, devices.decoding_spec(variable, mesh))
        return variable.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout))

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _abstract(mesh: Mesh, tree):
    """The same on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree
    )


def _by_axes(mesh: Mesh, x, *axes):
    layout = NamedSharding(mesh, devices.spec(axes, x.shape, mesh))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)


def _like_adapters(state, adapters, mesh):
    """Moments are laid out as their adapters, by shape and place in the tree."""
    leaves = jax.tree.leaves(adapters)
    layouts = {(x.shape, x.dtype): x.sharding for x in leaves}
    whole = NamedSharding(mesh, PartitionSpec())

    def one(x):
        layout = layouts.get((x.shape, x.dtype), whole)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(one, state)


def _slots(shape: ModelConfig, slots: int, length: int, dtype, mesh: Mesh):
    state = jax.eval_shape(lambda: sampler.empty_state(shape, slots, length, dtype))
    return jax.tree.map_with_path(
        lambda path, x: _by_axes(mesh, x, *sampler.logical_axes(path, x)), state
    )


def _batch(shape: tuple[int, int], mesh: Mesh) -> TrajectoryBatch:
    fields = TrajectoryBatch.__dataclass_fields__
    arrays = {}
    for name in fields:
        dtype = jnp.float32 if name in FLOATS else jnp.int32
        dtype = jnp.bool_ if name == "action_mask" else dtype
        x = jax.ShapeDtypeStruct(shape, dtype)
        arrays[name] = _by_axes(mesh, x, "batch", "length")
    return TrajectoryBatch(**arrays)
