"""Devices: the mesh, the table of logical axes, and multi-host start-up."""

from grpo_jax.devices.distributed import initialize_distributed
from grpo_jax.devices.mesh import (
    AXES,
    RULES,
    decoding_spec,
    for_decoding,
    grid,
    make_mesh,
    shard,
    shardings,
    spec,
)

__all__ = [
    "AXES",
    "RULES",
    "decoding_spec",
    "for_decoding",
    "grid",
    "initialize_distributed",
    "make_mesh",
    "shard",
    "shardings",
    "spec",
]
