"""Checkpoints: exact, atomic, and independent of the mesh that wrote them."""

import hashlib
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax import checkpoints
from grpo_jax.checkpoints import Checkpoints, SaveError
from grpo_jax.config import BadInput
from grpo_jax.training import update


def make_state(mesh=None, scale=1.0, rank=4):
    """Adapters, their optimizer and a key: what the trainer saves, in small."""
    a = scale * jnp.arange(16.0 * rank).reshape(16, rank) / 7
    adapters = nnx.State({"q": {"a": nnx.LoRAParam(a), "b": nnx.LoRAParam(a.T)}})
    optimizer = optax.adamw(1e-3).init(adapters)
    state = {"adapters": adapters, "opt": optimizer, "key": jax.random.key(3)}
    if mesh is None:
        return state

    def sharding(x):  # matrices over fsdp where it divides them, the rest everywhere
        spec = PartitionSpec("fsdp") if x.shape[:1] == (16,) else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.device_put(state, jax.tree.map(sharding, state))


def make_mesh(fsdp, tensor):
    devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def bits(tree):
    def raw(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [raw(x) for x in jax.tree.leaves(tree)]


def folder_hash(path):
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()


def restore_latest(saver, abstract):
    """(step, arrays, meta) as the trainer restores them, or None."""
    saved = saver.newest()
    return saved and (saved.step, saver.restore(saved, abstract), saved.meta)


def adapters_of(directory, adapters):
    return checkpoints.read_adapters(checkpoints.find(directory), adapters)


@pytest.fixture
def two_steps(tmp_path):
    """A folder with complete steps 10 and 20 that hold different values."""
    saver = Checkpoints(tmp_path / "checkpoints", keep=3)
    saver.save(10, make_state(scale=1.0), {"cursor": 10})
    saver.save(20, make_state(scale=2.0), {"cursor": 20})
    saver.close()
    return tmp_path / "checkpoints"


def test_round_trip_is_bitwise_and_keeps_structure(tmp_path):
    state = make_state()
    saver = Checkpoints(tmp_path, keep=2)
    assert saver.newest() is None
    meta = {"cursor": {"epoch": 1, "position": 7}, "names": ["a", "b"]}
    saver.save(3, state, meta)
    step, restored, restored_meta = restore_latest(saver, state)
    assert (step, restored_meta) == (3, meta)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert jax.random.bits(restored["key"]) == jax.random.bits(state["key"])


def test_keeps_the_newest(tmp_path):
    saver = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        saver.save(step, make_state(), {})
    assert saver.steps() == [3, 4]


def test_keeps_the_best_too(tmp_path):
    saver = Checkpoints(tmp_path, keep=1, best_metric="eval/score")
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5)]:
        saver.save(step, make_state(), {}, score=score)
    assert saver.steps() == [2, 4]
    assert saver.best_step() == 2


def cut_in_half(step):
    file = max(
        (p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(step):
    file = next(p for p in sorted((step / "arrays" / "d").iterdir()))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_manifest(step):
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text[: len(text) // 2])


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    "cut_in_half": cut_in_half,
    "bit_flip": flip_a_bit,
    "cut_manifest": cut_manifest,
    "other_manifest": lambda step: (step / "manifest.json").write_text("[]"),
    "no_manifest": lambda step: (step / "manifest.json").unlink(),
    "no_metadata": lambda step: (step / "arrays" / "_METADATA").unlink(),
    "empty": empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_CK3_damaged_newest_is_named_and_the_one_before_is_used(
    two_steps, damage, caplog
):
    DAMAGES[damage](two_steps / "step_000020")
    saver = Checkpoints(two_steps, keep=1)
    step, arrays, meta = restore_latest(saver, make_state())
    assert (step, meta) == (10, {"cursor": 10})
    assert bits(arrays) == bits(make_state(scale=1.0))
    assert "step_000020 is incomplete" in caplog.text
    # It does not count as one of the kept steps, nor block the same step.
    saver.save(20, make_state(scale=3.0), {})
    assert saver.steps() == [20]
    assert bits(restore_latest(saver, make_state())[1]) == bits(make_state(scale=3.0))


def test_CK3_temporary_name_is_never_chosen(two_steps):
    shutil.copytree(two_steps / "step_000020", two_steps / "partial-step_000030")
    shutil.copytree(two_steps / "step_000020", two_steps / "step_000040.tmp")
    assert restore_latest(Checkpoints(two_steps, keep=1), make_state())[0] == 20


@pytest.mark.parametrize("where", ["arrays", "manifest", "rename"])
def test_CK3_failed_save_leaves_the_old_step_as_it_was(two_steps, where, monkeypatch):
    before = {step: folder_hash(two_steps / f"step_{step:06d}") for step in (10, 20)}
    saver = Checkpoints(two_steps, keep=1)

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        match where:
            case "arrays":
                patch.setattr(saver._checkpointer, "save", no_space)
            case "manifest":
                patch.setattr(checkpoints, "_write_manifest", no_space)
            case "rename":
                patch.setattr(os, "rename", no_space)
        with pytest.raises(
            SaveError, match="step 30 was not saved.*20 is kept.*No space"
        ):
            saver.save(30, make_state(scale=3.0), {})
    after = {step: folder_hash(two_steps / f"step_{step:06d}") for step in (10, 20)}
    assert after == before
    assert saver.steps() == [10, 20]
    assert restore_latest(saver, make_state())[0] == 20


def test_nothing_whole_left_means_a_fresh_start(two_steps, caplog):
    for step in (10, 20):
        empty(two_steps / f"step_{step:06d}")
    assert restore_latest(Checkpoints(two_steps, keep=2), make_state()) is None
    assert caplog.text.count("is incomplete") == 2


def test_other_shapes_are_refused_by_name(two_steps):
    saver = Checkpoints(two_steps, keep=2)
    with pytest.raises(BadInput, match=r"'q'.*\[16, 4\].*\[16, 8\]"):
        restore_latest(saver, make_state(rank=8))
    assert saver.steps() == [10, 20]


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (4, 1), (2, 4)])
def test_CK5_restores_on_another_mesh(tmp_path, grid):
    state = make_state(make_mesh(8, 1))
    saver = Checkpoints(tmp_path, keep=1)
    saver.save(1, state, {"cursor": 5})
    target = make_state(make_mesh(*grid), scale=0.0)
    _, restored, meta = restore_latest(saver, target)
    assert bits(restored) == bits(state) and meta == {"cursor": 5}
    for got, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
    ):
        assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)


RESTORE_ON_ONE_DEVICE = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 1)
sys.path.insert(0, "tests")
from test_checkpoints import *
assert jax.device_count() == 1
saver = Checkpoints(Path(sys.argv[1]), keep=1)
_, arrays, _ = restore_latest(saver, make_state(make_mesh(1, 1)))
assert bits(arrays) == bits(make_state())
"""


def test_CK5_restores_where_the_saved_devices_do_not_exist(tmp_path, repository):
    Checkpoints(tmp_path, keep=1).save(1, make_state(make_mesh(4, 2)), {})
    command = [sys.executable, "-c", RESTORE_ON_ONE_DEVICE, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=repository, env=environment, check=True, timeout=120)


def save_run(directory, step, scale, optimizer=optax.adamw):
    """What the trainer saves, around other adapters and any optimizer."""
    adapters = make_state(scale=scale)["adapters"]
    state = update.TrainState(
        step=jnp.int32(step),
        adapters=adapters,
        opt_state=optimizer(1e-3).init(adapters),
        key=jax.random.key(0),
    )
    arrays = {"state": state, "reference": make_state(scale=-1.0)["adapters"]}
    Checkpoints(directory, keep=9).save(step, arrays, {})


@pytest.mark.parametrize("optimizer", [optax.adamw, optax.sgd])
@pytest.mark.parametrize("grid", [None, (2, 4)])
def test_adapters_of_another_run_whatever_its_optimizer(tmp_path, optimizer, grid):
    save_run(tmp_path, 1, scale=1.0)
    save_run(tmp_path, 2, scale=2.0, optimizer=optimizer)
    target = make_state(grid and make_mesh(*grid), scale=0.0)["adapters"]
    got = adapters_of(tmp_path, target)
    assert jax.tree.structure(got) == jax.tree.structure(target)
    assert bits(got) == bits(make_state(scale=2.0)["adapters"])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_CK3_damaged_adapters_of_another_run_are_not_used_nor_moved(tmp_path, caplog):
    for step in (1, 2):
        save_run(tmp_path, step, scale=float(step))
    flip_a_bit(tmp_path / "step_000002")
    before = folder_hash(tmp_path)
    got = adapters_of(tmp_path, make_state()["adapters"])
    assert bits(got) == bits(make_state(scale=1.0)["adapters"])
    assert "step_000002 is incomplete" in caplog.text
    assert folder_hash(tmp_path) == before


def test_other_adapters_or_none_at_all_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no complete checkpoint$"):
        adapters_of(tmp_path, make_state()["adapters"])
    save_run(tmp_path, 1, scale=1.0)
    with pytest.raises(BadInput, match=r"'q'.*\[16, 4\].*\[16, 8\]"):
        adapters_of(tmp_path, make_state(rank=8)["adapters"])
    empty(tmp_path / "step_000001")
    with pytest.raises(BadInput, match=r"step_000001: no manifest"):
        adapters_of(tmp_path, make_state()["adapters"])
