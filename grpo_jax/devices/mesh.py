"""The mesh and the one table from logical axis names to mesh axes.

Every room names dimensions by meaning ("batch", "heads", ...); only this table knows
which devices share them. Axis types are Auto: the compiler chooses layouts and
`shard` pins the few that matter (after the embedding, at block outputs, on logits).
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from grpo_jax.config import BadInput

AXES = ("fsdp", "tensor")

# "embed" is the model width of *weights*; activations name that dimension None, as
# their rows already take the fsdp axis.
RULES: dict[str, str | None] = {
    "batch": "fsdp",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "rank": None,
    "length": None,
    "residual": "tensor",  # positions of a row between the layers, in training
    "head_width": None,
}


def make_mesh(mesh: ConfigDict) -> Mesh:
    """Build the fsdp x tensor mesh over all devices from `config.mesh`.

    Raises BadInput if the sizes do not multiply to the device count.
    """
    shape = grid(mesh, jax.device_count(), jax.default_backend())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2)


def grid(mesh: ConfigDict, count: int, where: str) -> tuple[int, int]:
    """Sizes of the mesh over `count` devices; BadInput if they do not make as many."""
    tensor = mesh.tensor
    fsdp = max(count // tensor, 1) if mesh.fsdp == -1 else mesh.fsdp
    if fsdp * tensor != count:
        raise BadInput(
            f"mesh.fsdp={mesh.fsdp} x mesh.tensor={tensor} does not make the "
            f"{count} device(s) there are ({where})"
        )
    return fsdp, tensor


def spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Map logical axis names to a PartitionSpec for an array of this shape.

    A dimension that its mesh axis does not divide is replicated, said once. A mesh
    axis serves one dimension of an array: the first that names it.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axis names {axes} for shape {tuple(shape)}")
    entries: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        axis = None if name is None else RULES[name]
        if axis is not None and size % mesh.shape[axis]:
            _say_replicated(name, size, axis, mesh.shape[axis])
            axis = None
        entries.append(None if axis in entries else axis)
    return PartitionSpec(*entries)


def shard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin `x` to the layout of its logical axes; as it is where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def shardings(state: nnx.State, mesh: Mesh) -> Any:
    """The NamedSharding of every variable, from its `logical_axes` metadata.

    Takes concrete or abstract state. The result has the structure of `state` with a
    sharding for each array, as jax.device_put and jit's shardings want it; a variable
    without `logical_axes` is replicated.
    """

    def sharding(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_raw_value()
        axes = variable.get_metadata().get("logical_axes")
        layout = PartitionSpec() if axes is None else spec(axes, value.shape, mesh)
        return variable.replace(NamedSharding(mesh, layout))

    return jax.tree.map(
        sharding, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )


def decoding_spec(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where a weight lies while tokens are decoded: shared by the tensor axis alone.

    Over fsdp it is whole, so that nothing is gathered for every token. Of a single
    layer's weight the axis names still begin with that of the layers.
    """
    axes = variable.get_metadata().get("logical_axes")
    if axes is None:
        return PartitionSpec()
    shape = variable.get_raw_value().shape
    axes = [None if RULES.get(name) == "fsdp" else name for name in axes]
    return spec(axes[len(axes) - len(shape) :], shape, mesh)


def for_decoding(state: nnx.State) -> nnx.State:
    """Weights laid out by `decoding_spec`; as they are where fsdp has one part."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return state
    return _for_decoding(state)


@jax.jit
def _for_decoding(state):
    mesh = jax.sharding.get_abstract_mesh()

    def laid_out(variable):
        value = jax.lax.with_sharding_constraint(
            variable.get_raw_value(), decoding_spec(variable, mesh)
        )
        return variable.replace(value)

    return jax.tree.map(
        laid_out, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )


@functools.cache
def _say_replicated(name: str, size: int, axis: str, parts: int) -> None:
    logging.getLogger(__name__).info(
        "'%s' of size %d is replicated: mesh axis %s has %d parts",
        name,
        size,
        axis,
        parts,
    )
