"""Devices: the mesh, the table of logical axes, and multi-host start-up."""

from grpo_jax.devices.distributed import initialize_distributed
from grpo_jax.devices.mesh import RULES, make_mesh, shard, shardings, spec

__all__ = ["RULES", "initialize_distributed", "make_mesh", "shard", "shardings", "spec"]
