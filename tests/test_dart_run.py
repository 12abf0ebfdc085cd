"""Runs with two adapters: metrics, a resume, what is refused, what is exported."""

import json

import pytest
from toy import command, same_metrics

import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals")]

DART = (
    "--config.lora.routed=True",
    "--config.objective.role_weights=(0.3,0.7)",
    "--config.objective.role_gradients_every=2",
    "--config.data.num_eval_tasks=0",
    "--config.train.num_minibatches=1",
    "--config.objective.lld=0.0",  # of a single update it is 0, and refused
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def start(folder, workdir, *more):
    return run.main(command(folder, folder / workdir, *DART, *more))


@pytest.fixture(scope="module")
def whole(folder):
    assert start(folder, "whole") == 0
    return folder / "whole"


def test_metrics_by_role_and_nothing_compiled_late(whole):
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["entropy/reasoning"] > 0 for row in rows)
    assert all(row["roles/tool_share"] == 0 for row in rows)  # it cannot write tags yet
    assert len({row["compile/count"] for row in rows}) == 1
    measured = ["roles/gradient_cosine/reasoning" in row for row in rows]
    assert measured == [False, True, False, True]
    assert all("roles/gradient_cosine/across" not in row for row in rows)
    gap = max(row["sampling/sampling_logp_difference/max"] for row in rows)
    assert gap < 1e-4


def test_a_resumed_run_is_the_whole_run(folder, whole):
    assert start(folder, "parts", "--config.train.num_steps=2") == 0
    assert start(folder, "parts") == 0
    found, expected = (
        same_metrics(folder / w / "metrics.jsonl") for w in ("parts", "whole")
    )
    assert found == expected


def test_one_adapter_does_not_go_on_as_two(folder, whole, capsys):
    assert start(folder, "whole", "--config.lora.routed=False") == 2
    assert "lora.routed is False" in capsys.readouterr().err.splitlines()[-1]
    # Nor does it begin from the other run's arrays, of which there are as many.
    start_from = f"--config.lora.init_from={whole}"
    plain = ("--config.lora.routed=False", "--config.lora.rank=8")
    assert start(folder, "other", start_from, *plain) == 2
    assert "lora_a" in capsys.readouterr().err.splitlines()[-1]


def test_the_export_is_a_start(folder, whole):
    assert start(folder, "whole", "--mode=export") == 0
    export = whole / "export"
    assert sorted(path.name for path in export.iterdir()) == ["reasoning", "tool"]
    options = (f"--config.lora.init_from={export}", "--config.train.num_steps=1")
    assert start(folder, "again", *options) == 0
