"""What a device of a TPU topology has: memory, peak rates, and the mesh of a slice.

Figures a device as JAX counts them, from Google Cloud's pages on system architecture
(v4, v5e, v5p, v6e, TPU7x); a chip of v4 and TPU7x is two devices in these topologies.
"""

import os
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from grpo_jax.config import BadInput, did_you_mean
from grpo_jax.devices import AXES, grid

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      memory: bytes of HBM.
      flops: bfloat16 operations a second.
      bandwidth: bytes of HBM a second.
      links: bytes a second over all its links to other chips.
    """

    memory: int
    flops: float
    bandwidth: float
    links: float


CHIPS = {
    "v4": Chip(16 * GIB, 137.5e12, 614e9, 150e9),
    "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9),
    "v6e": Chip(32 * GIB, 918e12, 1640e9, 448e9),
    "tpu7x": Chip(96 * GIB, 1153e12, 3690e9, 600e9),
}


def chip(topology: str) -> Chip:
    """The device of a topology such as "v5e:4x4"; BadInput for one that is unknown."""
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise BadInput(
            f"plan.topology='{topology}': no chip '{name}', known are "
            f"{', '.join(CHIPS)}{did_you_mean(name, CHIPS)}"
        )
    return CHIPS[name]


def topology_mesh(topology: str, keys: ConfigDict) -> Mesh:
    """The mesh of `config.mesh` over the devices of a topology that is not there.

    Raises BadInput without libtpu, for an unknown topology, or for sizes that do not
    make its device count.
    """
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"plan.topology='{topology}' needs the TPU compiler (pip install -e "
            f"'.[plan]') and a topology that it knows, such as v5e:4x4 ({reason})"
        ) from error
    devices = found.devices
    shape = grid(keys, len(devices), topology)
    ordered = topologies.make_mesh(found, shape, AXES)
    return Mesh(ordered.devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe(topology: str, mesh: Mesh, dtype: str) -> str:
    """The first line of a plan."""
    one = chip(topology)
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (
        f"{topology}: {mesh.size} devices of {one.memory / GIB:.0f} GiB as {shape}; "
        f"jax {jax.__version__}, weights and activations in {dtype}"
    )
