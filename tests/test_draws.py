"""Dynamic sampling: which tasks are drawn, how often, and what is learned from."""

import json
import os
import signal

import numpy as np
import pytest
from toy import command, same_metrics

import run
from grpo_jax import draws, metrics
from grpo_jax.data import TaskStream
from grpo_jax.training.assign import Estimator
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import Reward, Task, Turn

TEACHES = Estimator("grpo", num_generations=2, drop_flat=True).teaches


def group(task, *totals, maximum=1.0, repeat=0):
    made = []
    for member, total in enumerate(totals):
        segments = [Segment.given(source, [1]) for source in (Source.PROMPT,) * 2]
        one = Trajectory(task, 0, member, segments, [Turn("a")], "stop")
        one.reward, one.repeat = Reward(total, maximum=maximum), repeat
        made.append(one)
    return made


class Sampler:
    """Groups by the task's column `flat`; notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, tasks, first):
        self.asked.append((first, [task.id for task in tasks]))
        return [group(t, 0.5, 0.5 if t.columns["flat"] else 1.0) for t in tasks]


def drawn(flat, **options):
    """Draw from tasks "0", "1" ... in order, of which some are flat."""
    tasks = [Task(str(i), [], {"flat": bool(f)}) for i, f in enumerate(flat)]
    stream, sample = TaskStream(tasks, seed=0, shuffle=False), Sampler()
    groups, batch, values = draws.draw(stream, sample, TEACHES, **options)
    names = [[g[0].task.id for g in some] for some in (groups, batch)]
    return *names, values, sample.asked, stream.state()["drawn"]


def test_flat_groups_are_replaced_by_as_many_new_tasks():
    flat = [1, 0, 1, 0, 1, 0, 0, 0]
    groups, batch, values, asked, cursor = drawn(flat, wanted=4, most=5)
    assert asked == [(0, ["0", "1", "2", "3"]), (4, ["4", "5"]), (6, ["6"])]
    assert groups == ["0", "1", "2", "3", "4", "5", "6"] and cursor == 7
    assert batch == ["1", "3", "5", "6"]
    names = ("draws", "drawn_groups", "dropped_groups")
    assert values == {f"filter/{k}": n for k, n in zip(names, (3, 7, 3), strict=True)}


def test_the_limit_holds_and_what_is_missing_is_filled_by_what_was_drawn():
    """Of one size, so that no program is compiled for a smaller batch."""
    groups, batch, values, asked, cursor = drawn([1] * 8 + [0], wanted=2, most=3)
    assert len(asked) == 3 and cursor == 6
    assert batch == ["0", "1"] and values["filter/dropped_groups"] == 6


def test_one_draw_is_what_a_run_without_the_option_does():
    groups, batch, values, asked, _ = drawn([1, 0, 1], wanted=3, most=1)
    assert groups == batch == ["0", "1", "2"] and values == {}


def test_by_value_the_steps_own_tasks_come_again():
    flat = [1, 0, 1, 0]
    _, batch, _, asked, cursor = drawn(flat, wanted=4, most=4, by_value=True)
    # Equal values: one repeat of each.
    assert asked == [(0, ["0", "1", "2", "3"]), (4, ["1", "3"])]
    assert batch == ["1", "3", "1", "3"] and cursor == 4


def test_by_value_a_step_without_any_value_goes_on_to_new_tasks():
    _, batch, _, asked, _ = drawn([1, 1, 0, 0], wanted=2, most=4, by_value=True)
    assert asked == [(0, ["0", "1"]), (2, ["2", "3"])] and batch == ["2", "3"]


def test_by_value_tasks_that_share_an_id_are_two_tasks():
    tasks = [Task("same", [{"role": "user", "content": text}]) for text in "ab"]
    groups = [group(tasks[0], 1, 0, 0, 0), group(tasks[1], 0.5, 0, 0, 0)]
    chosen = draws.most_valuable(groups, 3)
    texts = [(task.prompt[0]["content"], repeat) for task, repeat in chosen]
    assert texts == [("a", 1), ("b", 1), ("a", 2)]  # 0.32, 0.18, 0.32 / 2


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([1, 0, 0, 0, 0], 0.32),
        ([1, 1, 0, 0, 0], 0.293939),
        ([1, 1, 1, 0, 0], 0.195959),
        ([1, 1, 1, 1, 0], 0.08),
        ([1, 1, 1, 1, 1], 0.0),
        ([0, 0, 0, 0, 0], 0.0),
        ([0.4, 0.2, 0.2, 0, 0], 0.125720),
        ([None, None], 0.0),
    ],
)
def test_value_golden(totals, expected):
    task = Task("t", [])
    np.testing.assert_allclose(draws.value(group(task, *totals)), expected, atol=1e-6)


def test_value_sample_deviation_and_quarter_golden():
    task = Task("t", [])
    sample = draws.value(group(task, 1, 0, 0, 0, 0), ddof=1)
    np.testing.assert_allclose(sample, 0.357771, atol=1e-6)
    quarter = draws.value(group(task, 1, 0, 0, 0))
    np.testing.assert_allclose(quarter, 0.324760, atol=1e-6)


def test_a_quarter_of_successes_is_worth_most():
    shares = [
        draws.value(group(Task("t", []), *[1] * k + [0] * (8 - k))) for k in range(9)
    ]
    assert int(np.argmax(shares)) == 2


def test_repeats_lower_the_value_of_a_task():
    good, fair = Task("good", []), Task("fair", [])
    groups = [group(good, 1, 0, 0, 0), group(fair, 1, 1, 0, 0)]
    chosen = [(t.id, n) for t, n in draws.most_valuable(groups, 4)]
    assert chosen == [("good", 1), ("fair", 1), ("good", 2), ("fair", 2)]
    groups.append(group(good, 1, 0, 0, 0, repeat=3))
    assert draws.most_valuable(groups, 1) == [(fair, 1)]


def test_repeats_are_learned_from_by_less():
    task = Task("t", [])
    rows = [*group(task, 1.0, 0.0), *group(task, 1.0, 0.0, repeat=1)]
    examples, _ = Estimator("grpo", num_generations=2).examples(rows)
    once, again = examples[0], examples[2]
    np.testing.assert_allclose(again.advantages, once.advantages / 2)
    assert again.outcome == once.outcome


def test_pass_rates_are_of_the_latest_group():
    tasks = [Task(x, [{"role": "user", "content": x}]) for x in "abc"]
    groups = [group(tasks[0], 1.0, 0.0), group(tasks[0], 1.0, 1.0)]
    groups += [group(tasks[1], 0.0, None), group(tasks[2], None, None)]
    rates = draws.pass_rates(groups)
    assert sorted(rates.values()) == [0.0, 1.0] and len(rates) == 2


# Whole runs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("draws")
    rows = [{"prompt": f"say {i}", "flat": i % 3 > 0} for i in range(14)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (path / "tasks.jsonl").write_text(text)
    return path


def arguments(folder, name, *more):
    return command(
        folder,
        folder / name,
        "--config.reward.functions=('toy.flat_or_vowels',)",
        "--config.objective.drop_flat_groups=True",
        "--config.objective.max_draws=3",
        "--config.objective.beta=0.0",
        "--config.sft.num_epochs=0",
        "--config.train.num_steps=3",
        *more,
    )


@pytest.fixture(scope="module")
def finished(folder, signals, one_device):
    assert run.main(arguments(folder, "whole")) == 0
    return folder / "whole"


def rollouts(workdir):
    for path in sorted((workdir / "rollouts").iterdir()):
        yield [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_metrics_and_rollouts_are_of_all_that_was_drawn(finished):
    found = same_metrics(finished / "metrics.jsonl")
    assert max(row["filter/draws"] for row in found) > 1
    for row, lines in zip(found, rollouts(finished), strict=True):
        groups = [line["group"] for line in lines]
        assert groups == sorted(groups) and len(groups) == 4 * (max(groups) + 1)
        assert row["filter/drawn_groups"] == max(groups) + 1
        rewards = np.array([line["reward"] for line in lines]).reshape(-1, 4)
        flat = np.ptp(rewards, axis=1) == 0
        assert row["filter/dropped_groups"] == flat.sum()
        np.testing.assert_allclose(row["frac_reward_zero_std"], flat.mean())
        # What is learned from: two groups, flat ones only where the draws ran out.
        missing = max(2 - (~flat).sum(), 0)
        assert row["filter/flat_groups"] == missing / 2
        assert missing == 0 or row["filter/draws"] == 3
        sampled = {tuple(line["segments"][1]["tokens"]) for line in lines}
        assert len(sampled) == len(lines)  # no draw repeats another's stream


@pytest.mark.slow
def test_stopped_and_resumed_it_draws_what_the_whole_run_drew(
    finished, folder, monkeypatch, one_device
):
    write = metrics.Metrics.write

    def write_and_stop(self, step, values):
        write(self, step, values)
        if self.path.name == "metrics.jsonl" and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Metrics, "write", write_and_stop)
        assert run.main(arguments(folder, "stopped")) == 75
    assert run.main(arguments(folder, "stopped")) == 0
    for name in ("metrics.jsonl", "pass_rates.jsonl"):
        got, expected = (same_metrics(w / name) for w in (folder / "stopped", finished))
        assert got == expected
    assert list(rollouts(folder / "stopped")) == list(rollouts(finished))


@pytest.mark.slow
def test_repeats_by_value_run(folder, signals, one_device):
    more = ("--config.objective.redraw=value",)
    assert run.main(arguments(folder, "value", *more)) == 0
    counts = [
        np.unique([line["task_id"] for line in lines], return_counts=True)[1]
        for lines in rollouts(folder / "value")
    ]
    assert any((count > 4).any() for count in counts)  # a task with two groups
