"""Real TPU programs of configs/tir.py, fewer layers, compiled for slices of chips."""

import dataclasses
import importlib.util

import jax
import pytest

import configs.tir
from grpo_jax import plan
from grpo_jax.models.known import known_config
from grpo_jax.planning.chips import chip, topology_mesh
from grpo_jax.planning.programs import device_bytes, make_parts, programs

pytestmark = [
    pytest.mark.libtpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs the TPU compiler: pip install -e '.[plan]'",
    ),
]
LAYERS = 2
# topology -> slots and trajectories of a micro-batch, at 32,768 tokens each
SLICES = {"v5e:4x4": (16, 8), "v6e:2x4": (32, 16)}


@pytest.fixture(scope="module", params=SLICES)
def made(request):
    topology = request.param
    config = configs.tir.get_config()
    config.mesh.tensor = 4
    config.rollout.slots, config.train.micro_batch_size = SLICES[topology]
    source = known_config(config.model.source)
    shape = dataclasses.replace(source, num_layers=LAYERS)
    mesh = topology_mesh(topology, config.mesh)
    made = plan.make_plan(config, shape, mesh, chip(topology), topology, "bfloat16")
    return config, made, {cost.name: cost for cost in made.costs}


def test_every_program_of_a_step_compiles_and_fits(made):
    _, made, costs = made
    assert list(costs) == ["prefill", "extend", "decode", "score", "update"]
    assert all(cost.fits for cost in costs.values())
    assert made.advice == ["not counted: the cold start"]
    assert all(0 < peak < made.memory for peak in made.peaks.values())


def test_decoding_gathers_no_weight_and_copies_no_cache(made):
    config, made, costs = made
    taken = sum(size for _, size in costs["decode"].collectives.values())
    layer = made.kept["weights for decoding"] / LAYERS
    assert taken / config.rollout.burst < layer / 20
    # On v6e the compiler keeps the keys in another layout while it decodes: half of the
    # cache is copied once a burst (docs/tpu.md). Nothing may copy more.
    keys = made.kept["KV cache"] / 2 if config.rollout.slots == 32 else 0
    assert costs["decode"].temporaries < keys + 64 * 2**20  # logits and the like


def test_what_does_not_fit_is_said_with_the_compilers_figure():
    """A cache of 34 GiB a device; the error is the compiler's own."""
    config = configs.tir.get_config()
    config.mesh.tensor, config.rollout.slots = 4, 4096
    shape = dataclasses.replace(known_config(config.model.source), num_layers=LAYERS)
    mesh, one = topology_mesh("v5e:4x4", config.mesh), chip("v5e:4x4")
    with jax.set_mesh(mesh):
        parts = make_parts(config, shape, mesh, "bfloat16")
        made = programs(config, parts, mesh)
        (decode,) = [program for program in made if program.name == "decode"]
        cost = plan._cost(decode, mesh.size, one)
    assert not cost.fits and cost.needed > device_bytes(parts.slots) > one.memory


def test_operations_are_those_of_the_model(made):
    """Scoring: the projections and the head once a position, half of the scores."""
    config, _, costs = made
    shape = dataclasses.replace(known_config(config.model.source), num_layers=LAYERS)
    width, length = shape.width, 32768
    heads = shape.num_heads * shape.head_width
    kv_heads = shape.num_kv_heads * shape.head_width
    weights = 2 * width * heads + 2 * width * kv_heads + 3 * width * shape.mlp_width
    scores = 2 * heads * length / 2  # products with keys and with values
    position = 2 * LAYERS * (weights + scores) + 2 * width * shape.vocab_size
    expected = position * config.train.micro_batch_size * length
    devices = 16 if config.rollout.slots == 16 else 8
    assert costs["score"].flops * devices == pytest.approx(expected, rel=0.05)
