"""Runs with a critic and a teacher: compiled at once, resumed exactly, on any mesh."""

import shutil

import numpy as np
import pytest
from toy import assert_same_step, command, same_metrics

import run
from grpo_jax import metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals")]

CHOICES = (
    "--config=configs/tir.py:tiny,steppo",
    "--config.objective.token_weights=gear",
    "--config.objective.step=role",
    "--config.sft.num_epochs=0",
    "--config.train.row_length=192",  # room for the answer in the prompt
    "--config.data.num_eval_tasks=0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder):
    assert run.main(command(folder, folder / "whole", *CHOICES)) == 0
    return folder / "whole"


def rewound(finished, workdir):
    """The run as it was before its last step."""
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints" / "step_000004")
    return workdir


def test_critic_and_teacher_are_at_work(finished):
    found = metrics.read(finished / "metrics.jsonl")
    assert len({row["compile/count"] for row in found}) == 1
    for row in found:
        assert np.isfinite([row["loss"], row["critic/loss"]]).all()
        assert row["critic/grad_norm"] > 0 and row["critic/skipped"] == 0
        assert row["gear/taught"] == 1 and row["gear/divergence"] > 0
    # The first batch was judged by a critic that says 0, later ones by one that learns.
    values = [row["critic/value_mean"] for row in found]
    assert values[0] == 0 and all(values[1:])


def test_the_critic_goes_on_where_it_was(finished, folder):
    workdir = rewound(finished, folder / "rewound")
    assert run.main(command(folder, workdir, *CHOICES)) == 0
    name = "metrics.jsonl"
    assert same_metrics(workdir / name) == same_metrics(finished / name)


def test_the_critic_goes_on_with_other_devices(finished, folder):
    workdir = rewound(finished, folder / "remeshed")
    mesh = ("--config.mesh.fsdp=2", "--config.mesh.tensor=4")
    assert run.main(command(folder, workdir, *CHOICES, *mesh)) == 0
    names = ("loss", "critic/loss", "critic/value_mean", "gear/divergence")
    assert_same_step(workdir, finished, 4, names)


def test_a_run_without_a_critic_does_not_get_one(finished, folder, capsys):
    more = ("--config.objective.estimator=grpo", "--config.objective.step=turn")
    assert run.main(command(folder, finished, *CHOICES, *more)) == 2
    assert "critic" in capsys.readouterr().err.splitlines()[-1]
