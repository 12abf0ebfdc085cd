"""Mesh, logical axes, and what a mesh that does not fit the machine gets."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from configs.base import get_config
from grpo_jax import devices
from grpo_jax.config import BadInput
from grpo_jax.metrics import Means


def mesh(fsdp, tensor):
    return devices.make_mesh(ConfigDict({"fsdp": fsdp, "tensor": tensor}))


@pytest.mark.parametrize(
    "asked, shape",
    [((-1, 1), (8, 1)), ((-1, 2), (4, 2)), ((2, 4), (2, 4)), ((1, 8), (1, 8))],
)
def test_mesh_sizes(asked, shape):
    assert tuple(mesh(*asked).shape.values()) == shape


@pytest.mark.parametrize("asked", [(4, 1), (3, 2), (16, 1), (-1, 3), (-1, 16)])
def test_mesh_that_is_not_the_device_count_is_refused(asked):
    with pytest.raises(BadInput, match=rf"{asked[0]}.*{asked[1]}.*\b8\b"):
        mesh(*asked)


def test_spec_follows_the_table():
    assert devices.spec(("layers", "embed", "heads"), (2, 16, 8), mesh(2, 4)) == (
        PartitionSpec(None, "fsdp", "tensor")
    )
    assert devices.spec(("batch", "length", None), (8, 5, 3), mesh(8, 1)) == (
        PartitionSpec("fsdp", None, None)
    )


def test_a_mesh_axis_serves_one_dimension_only():
    layout = devices.spec(("batch", "embed"), (8, 16), mesh(8, 1))
    assert layout == PartitionSpec("fsdp", None)


def test_undivided_dimension_is_replicated_and_said_once(caplog):
    caplog.set_level(logging.INFO, "grpo_jax")
    for _ in range(3):  # 9 heads on 2 parts, the shape of SmolLM2-135M
        layout = devices.spec(("embed", "heads"), (576, 9), mesh(4, 2))
        assert layout == PartitionSpec("fsdp", None)
    assert [r.getMessage() for r in caplog.records] == [
        "'heads' of size 9 is replicated: mesh axis tensor has 2 parts"
    ]


def test_wrong_number_of_names_is_an_error():
    with pytest.raises(ValueError, match="2 axis names"):
        devices.spec(("batch", None), (8, 4, 2), mesh(8, 1))


def test_shard_pins_the_layout_under_a_mesh():
    grid = mesh(4, 2)

    @jax.jit
    def double(x):
        return devices.shard(2 * x, "batch", "vocab")

    with jax.set_mesh(grid):
        out = double(jnp.ones((8, 6)))
    assert out.sharding.is_equivalent_to(
        NamedSharding(grid, PartitionSpec("fsdp", "tensor")), 2
    )
    np.testing.assert_array_equal(out, 2 * np.ones((8, 6)))


def test_shard_without_a_mesh_changes_nothing():
    x = jnp.ones((3, 2))
    assert devices.shard(x, "batch", None) is x


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("items", [10, 2])
def test_DV1_rows_that_devices_do_not_divide_count_once(count, items):
    grid = Mesh(
        np.array(jax.devices()[:count]).reshape(count, 1),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
    )
    rewards = np.ones(items, np.float32)
    rewards[-1] = 0

    @jax.jit
    def pair(rewards):
        rewards = devices.shard(rewards, "batch")
        return {"score": (jnp.sum(rewards), jnp.sum(jnp.ones_like(rewards)))}

    means = Means()
    with jax.set_mesh(grid):
        means.update(pair(rewards))
    assert means.values() == {"score": pytest.approx((items - 1) / items)}


def test_state_is_placed_by_its_metadata():
    grid = mesh(4, 2)
    state = nnx.State(
        {
            "kernel": nnx.Param(jnp.ones((8, 6)), logical_axes=("embed", "heads")),
            "count": nnx.Param(jnp.zeros((3,))),
        }
    )
    placed = jax.device_put(state, devices.shardings(state, grid))
    assert placed["kernel"][...].sharding.spec == PartitionSpec("fsdp", "tensor")
    assert placed["count"][...].sharding.is_fully_replicated
    abstract = jax.eval_shape(lambda: state)
    layout = devices.shardings(abstract, grid)
    assert jax.tree.leaves(layout) == jax.tree.leaves(devices.shardings(state, grid))


def test_distributed_only_when_configured(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **k: calls.append(k))
    config = get_config()
    devices.initialize_distributed(config)
    assert calls == []
    config.distributed.coordinator = "auto"
    devices.initialize_distributed(config)
    config.distributed.update(coordinator="h0:1234", num_processes=2, process_id=1)
    devices.initialize_distributed(config)
    address = {"coordinator_address": "h0:1234", "num_processes": 2, "process_id": 1}
    assert calls == [{}, address]


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_no_cluster_to_join_is_bad_input(monkeypatch, error):
    def initialize():
        raise error("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    config = get_config()
    config.distributed.coordinator = "auto"
    with pytest.raises(BadInput, match="'auto' found no cluster.*should be defined"):
        devices.initialize_distributed(config)
