"""kill -9 at any moment: whatever happened, the rerun ends as the whole run did."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
from nursery import Nursery
from toy import assert_same_run, command, same_metrics

from grpo_jax import checkpoints

STEPS = 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def nursery(folder, repository):
    paths = [str(repository), str(repository / "tests")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    made = Nursery(repository, environment)
    yield made
    made.close()


@pytest.fixture(scope="module")
def arguments(folder):
    """The command of twelve steps in a workdir."""

    def make(workdir):
        steps = f"--config.train.num_steps={STEPS}"
        return command(folder, workdir, steps, "--config.objective.lld=0.2")

    return make


@pytest.fixture(scope="module")
def finished(folder, nursery, arguments):
    """The workdir of an uninterrupted run."""
    errors = folder / "whole.txt"
    assert nursery.run(arguments(folder / "whole"), errors) == 0, errors.read_text()
    return folder / "whole"


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def kill_after(pid, workdir, moment, number=signal.SIGKILL):
    """A signal once floor(moment) steps are written and a part of a step has passed."""
    while lines(workdir / "metrics.jsonl") < int(moment) and alive(pid):
        time.sleep(0.005)
    time.sleep(0.3 * (moment % 1))
    if alive(pid):
        os.kill(pid, number)


def alive(pid):
    """It runs; what has ended waits as a zombie for its parent to ask."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_CK1_killed_ten_times_a_run_ends_as_if_it_had_not_been(
    folder, nursery, arguments, finished
):
    assert [row["step"] for row in same_metrics(finished / "metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    workdir, rng = folder / "killed", np.random.default_rng(0)
    errors = folder / "killed.txt"
    pid = nursery.start(arguments(workdir), errors)  # killed while it prepares itself
    time.sleep(rng.uniform(0.1, 4))
    os.kill(pid, signal.SIGKILL)
    codes = [nursery.wait()]
    moments = np.sort(rng.uniform(0, STEPS - 1, 9))
    print("killed at steps", moments)
    for moment in moments:
        kill_after(nursery.start(arguments(workdir), errors), workdir, moment)
        codes.append(nursery.wait())
    # Where the machine is fast, a run may end before its kill.
    assert set(codes) <= {-signal.SIGKILL, 0} and -signal.SIGKILL in codes
    assert nursery.run(arguments(workdir), errors) == 0, errors.read_text()
    assert_same_run(workdir, finished)


CHECKPOINTS = "grpo_jax.checkpoints"
# Where a run is killed, one after the other, and the call of it: each start goes on
# from what the one before left behind.
DEATHS = (
    "grpo_jax.training.update:minibatch#2",  # in the cold start: it begins anew
    f"{CHECKPOINTS}:_write_manifest#1",  # the very first save
    "grpo_jax.evaluate:evaluate#1",  # before RL
    f"{CHECKPOINTS}:_rename#1",  # a complete save without its name
    "grpo_jax.rollout.engine:Engine.warm_up#1",
    "grpo_jax.health:write_rollouts#1",
    "grpo_jax.training.learn:Learner.learn#2",
    "grpo_jax.metrics:Metrics.write#1",
    f"{CHECKPOINTS}:ocp.Checkpointer.save#1",
    f"{CHECKPOINTS}:_write_manifest#2",
    f"{CHECKPOINTS}:Checkpoints._prune#2",  # a step that stands beside older ones
    f"{CHECKPOINTS}:shutil.rmtree#1",
    "grpo_jax.config:os.replace#1",  # of metrics.jsonl, then of config.json
    "grpo_jax.config:os.replace#2",
)


def test_CK3_killed_at_each_stage_a_run_ends_as_if_it_had_not_been(
    folder, nursery, arguments, finished
):
    workdir, errors = folder / "stages", folder / "stages.txt"
    for place in DEATHS:
        before = newest_step(workdir)
        code = nursery.run(arguments(workdir), errors, die_in=place)
        assert code == -signal.SIGKILL, (place, errors.read_text())
        assert newest_step(workdir) >= before, place
    assert nursery.run(arguments(workdir), errors) == 0, errors.read_text()
    assert_same_run(workdir, finished)


def newest_step(workdir):
    steps = [int(p.name[-6:]) for p in (workdir / "checkpoints").glob("step_*")]
    return max(steps, default=-1)


def test_stopped_by_SIGTERM_the_process_exits_75(folder, nursery, arguments, finished):
    workdir, errors = folder / "stopped", folder / "stopped.txt"
    pid = nursery.start(arguments(workdir), errors)
    kill_after(pid, workdir, 5, signal.SIGTERM)
    assert nursery.wait() == 75, errors.read_text()
    assert errors.read_text().splitlines()[-1] == "stopped: SIGTERM"
    saved = checkpoints.find(workdir / "checkpoints")
    unwritten = saved.meta["unwritten"] is not None  # stopped behind an update
    assert saved.step == lines(workdir / "metrics.jsonl") + unwritten
    assert nursery.run(arguments(workdir), errors) == 0, errors.read_text()
    assert_same_run(workdir, finished)


def test_CK3_only_damaged_checkpoints_mean_a_run_from_the_start(
    folder, nursery, arguments, finished
):
    """Never a mixture: every damaged step is named, and step 1 is the first again."""
    workdir, errors = folder / "damaged", folder / "damaged.txt"
    shutil.copytree(finished, workdir)
    for step in (workdir / "checkpoints").glob("step_*"):
        (step / "manifest.json").write_text("{")
    assert nursery.run(arguments(workdir), errors) == 0, errors.read_text()
    assert errors.read_text().count("is incomplete") == 2
    assert_same_run(workdir, finished)
