"""SIGTERM at every stage: exit 75, nothing lost that could be saved, an exact rerun.

The runs share this process, and so their compiled programs: only the first is slow.
"""

import functools
import itertools
import os
import re
import signal

import orbax.checkpoint as ocp
import pytest
from toy import ToyEnvironment, assert_same_run, command

import run
from grpo_jax import checkpoints, data, evaluate, health, models, setup
from grpo_jax.checkpoints import Checkpoints, SaveError
from grpo_jax.metrics import Metrics
from grpo_jax.rollout.engine import Engine
from grpo_jax.training import update
from grpo_jax.training.learn import Learner

pytestmark = pytest.mark.usefixtures("signals", "shared_programs")


@pytest.fixture(scope="module")
def shared_programs():
    """One optimizer a setting: jit takes another one for another program."""
    with pytest.MonkeyPatch.context() as patch:
        make = functools.cache(update.make_optimizer)
        patch.setattr(update, "make_optimizer", make)
        patch.setattr(setup, "make_optimizer", make)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stops")


@pytest.fixture(scope="module")
def arguments(folder):
    def make(name, *more):
        every = ("--config.eval.every=2", "--config.objective.beta=0.0")
        return command(folder, folder / name, *every, *more)

    return make


@pytest.fixture(scope="module")
def finished(folder, arguments):
    """The workdir of an uninterrupted run of four steps."""
    assert run.main(arguments("whole")) == 0
    return folder / "whole"


def in_call(monkeypatch, owner, name, act, number=1):
    """`act` at the beginning of the number-th call of a function."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*arguments, **keywords):
        if next(calls) == number:
            act()
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def newest(workdir):
    saved = checkpoints.find(workdir / "checkpoints")
    return saved.step, saved.meta


# Stage, the call of it in which the signal comes, then: step of the newest checkpoint,
# updates of a cold start that is not over, is the step's line unwritten? Each run goes
# on from the one before.
STOPS = {
    "cold start": (update, "minibatch", terminate, 0, 1, False),
    "before RL": (evaluate, "evaluate", terminate, 0, None, False),
    "compilation": (Engine, "warm_up", terminate, 0, None, False),
    "rollout": (Engine, "collect", terminate, 0, None, False),
    "reward": (ToyEnvironment, "reward", terminate, 0, None, False),
    "update": (Learner, "learn", terminate, 1, None, True),
    "metrics": (Metrics, "write", terminate, 1, None, False),
    "evaluation": (evaluate, "evaluate", terminate, 2, None, True),
    "save": (Checkpoints, "save", interrupt_twice, 2, None, False),
}


@pytest.mark.slow
def test_stopped_at_every_stage_a_run_ends_as_if_it_had_not_been(
    folder, arguments, finished, monkeypatch, capfd
):
    workdir = folder / "stopped"
    for stage, (owner, name, act, step, cold_start, unwritten) in STOPS.items():
        with monkeypatch.context() as patch:
            in_call(patch, owner, name, act)
            assert run.main(arguments("stopped")) == 75, stage
        errors = capfd.readouterr().err
        number = "SIGTERM" if act is terminate else "SIGINT"
        assert errors.splitlines()[-1] == f"stopped: {number}"
        assert errors.count(f"{number}: saving what can be saved") == 1
        found, meta = newest(workdir)
        state = (found, meta["cold_start"], meta["unwritten"] is not None)
        assert state == (step, cold_start, unwritten), stage
    assert run.main(arguments("stopped")) == 0
    assert_same_run(workdir, finished)


@pytest.mark.slow
def test_mode_sft_is_taken_up_too_and_then_mode_train(
    folder, arguments, finished, monkeypatch
):
    for _ in range(2):  # after the first update, and after the second and last
        with monkeypatch.context() as patch:
            in_call(patch, update, "minibatch", terminate)
            assert run.main(arguments("sft", "--mode=sft")) == 75
    for _ in range(2):  # done, and shown again
        assert run.main(arguments("sft", "--mode=sft")) == 0
    step, meta = newest(folder / "sft")
    assert (step, meta["cold_start"]) == (0, None) and meta["before"]
    assert run.main(arguments("sft")) == 0
    assert_same_run(folder / "sft", finished)
    assert run.main(arguments("sft", "--mode=sft")) == 2


def no_space():
    raise OSError(28, "No space left on device")


# Where the disk is full, in which call, what the error says, and the newest step that
# is whole afterwards. Each run goes on from the one before.
KEPT = "step 0 was not saved in .*; 0 is kept: .*No space"
FULL = {
    "first arrays": (ocp.Checkpointer, "save", 1, "there is none before it", None),
    "manifest": (checkpoints, "_write_manifest", 2, KEPT, 0),
    "name": (checkpoints, "_rename", 1, KEPT, 0),
    "rollouts": (health, "write_rollouts", 1, "No space", 0),
    "metrics": (Metrics, "write", 1, "No space", 0),
    "arrays": (ocp.Checkpointer, "save", 2, "step 2 .*; 1 is kept: .*No space", 1),
    "older step": (Checkpoints, "_prune", 2, "No space", 3),
}


@pytest.mark.slow
def test_CK3_a_full_disk_at_every_stage_loses_no_complete_save(
    folder, arguments, finished, monkeypatch
):
    workdir = folder / "full"
    for stage, (owner, name, number, message, step) in FULL.items():
        with monkeypatch.context() as patch:
            in_call(patch, owner, name, no_space, number)
            with pytest.raises((SaveError, OSError), match=message):
                run.main(arguments("full"))
        if step is None:
            assert not list(workdir.glob("checkpoints/step_*")), stage
        else:
            assert newest(workdir)[0] == step, stage
    assert run.main(arguments("full")) == 0
    assert_same_run(workdir, finished)


CHANGED = {
    "lora.rank=8": "lora.rank is 8.*began with 4",
    "lora.alpha=4.0": "lora.alpha is 4.0.*began with 8.0",
    "lora.targets=('q','v')": "lora.targets is",
    "data.seed=9": "data.seed changed since the checkpoint",
    "data.num_tasks=6": "the training data changed since the checkpoint",
    "model.source=/no/such/model": "model.source is '/no/such/model'",
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_a_checkpoint_does_not_fit_is_refused(finished, arguments, change, capsys):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert run.main(arguments("whole", f"--config.{change}")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(CHANGED[change], error), error
    after = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert after.keys() == before.keys()
    changed = {p.name for p in before if before[p] != after[p]}
    assert changed <= {"config.json"}


def test_other_held_out_tasks_are_announced(finished, arguments, monkeypatch, caplog):
    load = data.load_tasks

    def fewer(config, split, environment):
        return load(config, split, environment)[: 1 if split == "eval" else None]

    said = "the held-out tasks are not those of the results before RL"
    assert run.main(arguments("whole")) == 0 and said not in caplog.text
    monkeypatch.setattr(data, "load_tasks", fewer)
    assert run.main(arguments("whole")) == 0 and said in caplog.text


def test_without_its_config_a_run_still_knows_its_scale(finished, arguments, capsys):
    config = finished / "config.json"
    text = config.read_text()
    config.unlink()
    try:
        assert run.main(arguments("whole", "--config.lora.alpha=4.0")) == 2
    finally:
        config.write_text(text)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "lora.alpha was 8.0, the configuration has 4.0" in error


def test_other_base_weights_are_refused(finished, arguments, monkeypatch, capsys):
    monkeypatch.setattr(models, "base_fingerprint", lambda source: "other")
    for mode in ("train", "eval", "export"):
        assert run.main(arguments("whole", f"--mode={mode}")) == 2
        assert "other base weights" in capsys.readouterr().err.splitlines()[-1]


def test_a_changed_schedule_is_announced(finished, arguments, caplog):
    change = "--config.train.schedule=cosine"
    assert run.main(arguments("whole", change)) == 0  # over: only the summary
    assert "train.schedule is 'cosine', but the run in" in caplog.text
    assert run.main(arguments("whole")) == 0


def test_a_finished_run_shows_its_summary_and_compiles_nothing(
    finished, arguments, monkeypatch, capsys
):
    def compiles(*_):
        raise AssertionError("a program is compiled")

    for owner in (Engine, Learner):
        monkeypatch.setattr(owner, "warm_up", compiles)
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert run.main(arguments("whole")) == 0
    after = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    assert after == before
    assert "Held-out" in capsys.readouterr().out
