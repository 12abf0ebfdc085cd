"""The probe: pass rates with and without tools, beside the data, and read again."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from toy import ToyEnvironment, command, write_tasks

import run
from configs import base
from grpo_jax import data, probe
from grpo_jax.config import BadInput
from tools_env.protocol import Task
from tools_env.python_tasks import PythonEnvironment

pytestmark = pytest.mark.usefixtures("signals")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def task(name="t", **columns):
    return Task(name, [{"role": "user", "content": f"what is {name}?"}], columns)


@pytest.mark.parametrize(
    "text, tool, needs",
    [
        (0.0, 0.25, True),
        (0.5, 1.0, True),
        (0.5, 0.625, False),  # one sample of eight is chance
        (0.0, 0.0, False),
        (1.0, 1.0, False),
        (0.9, 0.2, False),
    ],
)
def test_a_task_needs_a_tool_if_the_tool_helps_by_a_quarter(text, tool, needs):
    line = probe.record(task(), 8, text, tool)
    assert line["needs_tool"] is needs
    assert (line["pass_rate_text"], line["pass_rate_tool"]) == (text, tool)
    alone = probe.record(task(), 8, text)
    assert alone["needs_tool"] is False and "pass_rate_tool" not in alone


def test_pass_rates_by_group():
    class Environment(ToyEnvironment):
        def prediction(self, task, trajectory):
            return {"correct": trajectory.right}

    environment = Environment()
    batch = [
        SimpleNamespace(task=None, group=group, right=right, fault=fault)
        for group, right, fault in [
            (0, True, ""),
            (0, False, ""),
            (1, False, ""),
            (1, False, "gone"),
            (2, False, "gone"),
            (3, True, ""),
            (3, False, "gone"),
        ]
    ]
    rates = probe.pass_rates(environment, batch)
    assert rates == {0: 0.5, 1: 0.0, 3: 1.0}  # a fault is no failure
    tasks = [task(name) for name in "abcd"]
    lines = probe.records(tasks, 2, {"text": {0: 0.0, 1: 0.0, 2: 1.0}, "tool": rates})
    assert [line["id"] for line in lines] == ["a", "b"]
    assert [line["pass_rate_tool"] for line in lines] == [0.5, 0.0]


def test_without_tools_a_task_is_not_told_of_any():
    environment = PythonEnvironment()
    system = {"role": "system", "content": environment.system_prompt}
    told = Task("t", [system, {"role": "user", "content": "?"}], {"tools": [1], "a": 2})
    made = probe.bare(told, environment)
    assert "python" not in made.prompt[0]["content"] and made.columns == {"a": 2}
    assert made.prompt[1:] == told.prompt[1:]
    own = Task("t", [{"role": "system", "content": "be brief"}])
    assert probe.bare(own, environment).prompt == own.prompt


def written(folder, tasks, rates, name="tasks.probe.jsonl"):
    rows = [probe.record(t, 8, *rate) for t, rate in zip(tasks, rates, strict=True)]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(source, **keys):
    config = base.get_config()
    config.data.source = str(source)
    config.data.num_eval_tasks = 0
    config.update_from_flattened_dict({f"data.{k}": v for k, v in keys.items()})
    return config


def test_results_beside_the_data_become_columns_and_filter(tmp_path):
    source = write_tasks(tmp_path / "tasks.jsonl", 4)
    tasks = data.load_tasks(settings(source), "train")
    assert not any("needs_tool" in one.columns for one in tasks)
    rates = [(0.0, 0.0), (0.0, 0.5), (0.25, 0.5), (1.0, 1.0)]
    written(tmp_path, tasks, rates)
    probed = data.load_tasks(settings(source), "train")
    assert [one.columns["needs_tool"] for one in probed] == [False, True, True, False]
    kept = data.load_tasks(settings(source, pass_rate=(0.1, 0.9)), "train")
    assert [one.id for one in kept] == [tasks[1].id, tasks[2].id]
    with pytest.raises(BadInput, match=r"pass_rate=\(0.6, 0.9\) leaves none of 4"):
        data.load_tasks(settings(source, pass_rate=(0.6, 0.9)), "train")


def test_a_prompt_that_changed_since_has_no_result(tmp_path):
    source = write_tasks(tmp_path / "tasks.jsonl", 3)
    tasks = data.load_tasks(settings(source), "train")
    other = [Task(t.id, [{"role": "user", "content": "else"}]) for t in tasks[:1]]
    written(tmp_path, other + tasks[1:], [(0.5, 0.5)] * 3)
    kept = data.load_tasks(settings(source, pass_rate=(0.0, 1.0)), "train")
    assert [one.id for one in kept] == [t.id for t in tasks[1:]]


def test_a_system_message_does_not_change_what_was_asked():
    plain = task()
    system = {"role": "system", "content": "be brief"}
    assert data.probe_key(plain) == data.probe_key(
        Task(plain.id, [system, *plain.prompt], {"a": 1})
    )
    assert data.probe_key(plain) != data.probe_key(task("u"))


def test_rates_that_are_missing_or_no_probe_are_named(tmp_path):
    source = write_tasks(tmp_path / "tasks.jsonl", 3)
    with pytest.raises(BadInput, match="no task has a pass rate.*eval.probe=true"):
        data.load_tasks(settings(source, pass_rate=(0.1, 0.9)), "train")
    with pytest.raises(BadInput, match="no such file"):
        data.load_tasks(settings(source, probe=str(tmp_path / "none.jsonl")), "train")
    with pytest.raises(BadInput, match="tasks.jsonl:1: neither a probe's line"):
        data.load_tasks(settings(source, probe=str(source)), "train")


def test_rates_of_the_users_own_columns_filter_too():
    tasks = [task(str(rate), pass_rate_text=rate) for rate in (0.0, 0.5, 1.0)]
    kept = data.with_pass_rates(tasks, (0.1, 0.9))
    assert [one.id for one in kept] == ["0.5"]


@pytest.mark.slow
def test_probe_by_command_and_a_run_that_trains_on_its_results(tmp_path, capsys):
    """The tiny model with a real tool: both arms, the file, the columns again."""
    write_tasks(tmp_path / "tasks.jsonl", 5)
    tools = [
        "--config.tools.environment=functions",
        "--config.tools.functions=('toy.vowels',)",
        "--config.reward.functions=('toy.vowel_reward',)",
        "--config.rollout.max_prompt_length=1024",
        "--config.sft.num_epochs=0",
        "--config.data.num_eval_tasks=1",
    ]
    arguments = command(tmp_path, tmp_path / "run", *tools)
    assert run.main([*arguments, "--mode=eval", "--config.eval.probe=true"]) == 0
    rows = lines(tmp_path / "tasks.probe.jsonl")
    assert len(rows) == 4 and len({row["id"] for row in rows}) == 4
    for row in rows:
        assert row["k"] == 4 and np.isin(4 * row["pass_rate_text"], range(5))
        assert {"pass_rate_tool", "needs_tool", "key"} <= row.keys()
    assert "pass_rate_tool" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert run.main([*arguments, "--config.eval.probe=true"]) == 2
    assert "belongs to --mode=eval" in capsys.readouterr().err
