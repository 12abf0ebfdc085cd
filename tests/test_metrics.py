"""Metrics: divided once, strict JSON, every step once, trackers on demand."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from configs.base import get_config
from grpo_jax import devices, metrics
from grpo_jax.config import BadInput
from grpo_jax.metrics import Means, Metrics


def trackers(**on):
    config = get_config().trackers
    config.update({"tensorboard": False} | on)
    return config


def test_ME1_clip_fraction_length_and_reward_are_divided_once():
    means = Means()
    means.update({"clip": (2, 10), "length": (10, 1)})  # rank or micro-batch 0
    means.update({"clip": (4, 5), "length": (5, 1)})
    for reward, turns in [(1.0, 3), (0.0, 1)]:  # by rollout, however many turns
        assert turns > 0
        means.add("reward", reward)
    assert means.values() == {"clip": 0.4, "length": 7.5, "reward": 0.5}


@pytest.mark.parametrize("fsdp, micro_batches", [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_ME1_same_numbers_on_any_devices_and_accumulation(fsdp, micro_batches):
    clipped = np.zeros((8, 10), np.float32)
    mask = np.zeros((8, 10), np.float32)
    mask[0], clipped[0, :2] = 1, 1
    mask[1, :5], clipped[1, :4] = 1, 1
    mesh = devices.make_mesh(ConfigDict({"fsdp": fsdp, "tensor": 8 // fsdp}))
    layout = NamedSharding(mesh, PartitionSpec("fsdp"))

    @jax.jit
    def pair(clipped, mask):
        return {"clip": (jnp.sum(clipped * mask), jnp.sum(mask))}

    means = Means()
    for rows in np.split(np.arange(8), micro_batches):
        means.update(pair(*jax.device_put((clipped[rows], mask[rows]), layout)))
    assert means.values() == {"clip": pytest.approx(0.4, abs=1e-7)}


def test_no_data_is_absent():
    means = Means()
    means.add("reward_std/with_tools", 0.0, 0.0)
    assert means.values() == {}


def test_lines_are_strict_json_with_step_first(tmp_path):
    writer = Metrics(tmp_path)
    writer.write(1, {"reward": np.float32(0.5), "kl": float("nan"), "x": None})
    writer.write(2, {"loss": jnp.float32(2.0), "n": np.int64(3), "inf": np.inf})
    writer.write(3, {"confusion": {"a": {"b": 1, "c": float("nan")}}, "note": "ok"})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "loss": 2.0, "n": 3},
        {"step": 3, "confusion": {"a": {"b": 1}}, "note": "ok"},
    ]
    assert all(line.startswith('{"step": ') for line in lines)


def test_CK1_a_resumed_run_holds_each_step_once(tmp_path):
    writer = Metrics(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"reward": step / 10})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "rew')  # killed in mid-line
    writer = Metrics(tmp_path, resume_step=3)
    for step in range(4, 7):
        writer.write(step, {"reward": step / 10})
    writer.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == [
        {"step": step, "reward": step / 10} for step in range(1, 7)
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_a_fresh_run_starts_an_empty_file_under_its_own_name(tmp_path):
    for _ in range(2):
        writer = Metrics(tmp_path, name="sft_metrics")
        writer.write(1, {"loss": 1.0})
        writer.close()
    assert len(metrics.read(tmp_path / "sft_metrics.jsonl")) == 1
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_only_the_first_host_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Metrics(tmp_path, trackers(tensorboard=True))
    writer.write(1, {"reward": 1.0})
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_numbers(tmp_path):
    writer = Metrics(tmp_path, trackers(tensorboard=True))
    writer.write(1, {"reward": 0.25, "note": "words stay out"})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    assert b"reward" in data and np.float32(0.25).tobytes() in data
    assert b"note" not in data


@pytest.mark.parametrize(
    "name, package",
    [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_missing_tracker_names_its_extra(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"trackers\.{name}.*grpo_jax\[{name}\]"):
        Metrics(tmp_path, trackers(**{name: True}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the tracker's own code
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):  # the second is a resumed run: the same id
        writer = Metrics(tmp_path, trackers(wandb=True), resume_step=step - 1)
        writer.write(step, {"reward": 0.5})
        writer.close()
    identity = (tmp_path / "run_id").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert files and any(b"reward" in file.read_bytes() for file in files)


class FakeTracker:
    """Stands for the wandb and trackio modules: notes what a run is told."""

    def __init__(self):
        self.said = []

    def init(self, **options):
        self.said.append(options)
        return self

    def log(self, numbers, step):
        self.said.append((step, numbers))

    def finish(self):
        self.said.append("finished")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_protocol_and_resume(tmp_path, monkeypatch, name):
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    for step in (1, 2):
        options = trackers(**{name: True, "project": "p"})
        writer = Metrics(tmp_path / "demo", options, resume_step=step - 1)
        writer.write(step, {"reward": 0.5, "note": "x"})
        writer.close()
    first, second = tracker.said[0], tracker.said[3]
    assert first == second and first["project"] == "p"
    assert tracker.said[1:3] == [(1, {"reward": 0.5}), "finished"]
    assert tracker.said[4:] == [(2, {"reward": 0.5}), "finished"]


def test_two_trackers_share_one_identity_and_keep_it(tmp_path, monkeypatch):
    wandb, trackio = FakeTracker(), FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for resume_step in (0, 1):
        options = trackers(wandb=True, trackio=True)
        Metrics(tmp_path / "demo", options, resume_step=resume_step).close()
    identity = (tmp_path / "demo" / "run_id").read_text()
    assert [said["id"] for said in wandb.said[::2]] == [identity] * 2
    assert [said["name"] for said in trackio.said[::2]] == [f"demo-{identity}"] * 2


def test_a_tracker_that_does_not_open_closes_the_others(tmp_path, monkeypatch):
    wandb, trackio = FakeTracker(), FakeTracker()
    trackio.init = None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with pytest.raises(BadInput, match=r"trackers\.trackio did not open \(TypeError"):
        Metrics(tmp_path, trackers(wandb=True, trackio=True))
    assert wandb.said[1:] == ["finished"]
