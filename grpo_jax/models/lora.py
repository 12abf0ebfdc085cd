"""Adapters as values: one model, several adapter trees.

A decoder built with a `LoraConfig` is split once into its graph, its adapters and its
frozen base. A policy is then a tree of adapters: the trained one, the frozen copy that
RL began with (the KL reference), or zeros, which is the base model exactly.

    graph, adapters, base = lora.split(model)
    model = lora.merge(graph, adapters, base)     # inside jit, no copy

`for_decoding` gives an equal policy whose adapters are part of the weights.

Only adapters reach the optimizer and the checkpoints; the base is never donated.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax import devices
from grpo_jax.models.decoder import Block, Decoder, Linear


def split(model: Decoder) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """(graph, adapters, base): the functional seam of the whole project."""
    return nnx.split(model, nnx.LoRAParam, ...)


def merge(graph: nnx.GraphDef, adapters: nnx.State, base: nnx.State) -> Decoder:
    """The model again; cheap enough to call inside every jitted function."""
    return nnx.merge(graph, adapters, base)


def zeros(adapters: nnx.State) -> nnx.State:
    """Adapters that leave the base model as it is, bit for bit."""
    return jax.tree.map(jnp.zeros_like, adapters)


def copy(adapters: nnx.State) -> nnx.State:
    """A copy that survives the donation of the original."""
    return jax.tree.map(jnp.copy, adapters)


def for_decoding(
    graph: nnx.GraphDef, adapters: nnx.State, base: nnx.State
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The parts of an equal model that decodes faster.

    In float32 the layers stand apart with the adapters in their kernels, for the price
    of a copy of the layers' weights. Another dtype would round most of an adapter
    away: there the parts come back as they are. Routed adapters stay beside the
    kernels: two kernels would be read where now it is one and a little. On a mesh the
    weights are copied to every part of the fsdp axis: see `devices.decoding_spec`.
    """
    model = merge(graph, adapters, base)
    if model.norm.scale.dtype == jnp.float32:
        model.layers = nnx.merge(*_unstacked(graph, adapters, base))
        if model.lora and not model.lora.routed:
            model.lora = None
    graph, adapters, base = split(model)
    return graph, devices.for_decoding(adapters), devices.for_decoding(base)


@functools.partial(jax.jit, static_argnames="graph")
def _unstacked(graph, adapters, base):
    blocks = merge(graph, adapters, base).blocks()
    return nnx.split(nnx.List([_folded(block) for block in blocks]))


def _folded(block: Block) -> Block:
    """The block without adapters, if not routed: kernel + alpha/r a @ b."""
    for _, linear in nnx.iter_graph(block):
        if isinstance(linear, Linear) and linear.lora and not linear.lora.routed:
            scale = linear.lora.alpha / linear.lora.rank
            update = scale * (linear.lora_a[...] @ linear.lora_b[...])
            linear.kernel[...] += update.astype(linear.kernel.dtype)
            del linear.lora_a, linear.lora_b
            linear.lora = None
    return block
