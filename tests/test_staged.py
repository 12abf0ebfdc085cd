"""Two runs in a row: the second learns what the first left unsolved (tir.py:aster)."""

import json

import numpy as np
import pytest
from toy import command

import run
from configs import tir
from grpo_jax import data
from tools_env.protocol import Task

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals", "one_device")]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def staged(folder, variants, workdir, *more):
    """The documented command on the toy tasks, with the budgets of `tiny`."""
    given = command(folder, workdir, "--config.train.num_steps=4")
    kept = [a for a in given if "max_completion" not in a and "--config=" not in a]
    kept += ["--config.reward.functions=('toy.flat_or_vowels',)"]
    return [f"--config=configs/tir.py:{variants}", *kept, *more]


def test_what_all_rollouts_solved_in_stage_1_is_left_out_of_stage_2(tmp_path, caplog):
    rows = [{"prompt": f"say {i}", "flat": i % 2 == 0} for i in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "tasks.jsonl").write_text(text)
    one, two = tmp_path / "aster", tmp_path / "aster2"
    assert (
        run.main(staged(tmp_path, "aster,tiny", one, "--config.sft.num_epochs=0")) == 0
    )
    probe = f"--config.data.probe={one / 'pass_rates.jsonl'}"
    init = f"--config.lora.init_from={one}"
    assert run.main(staged(tmp_path, "tiny,aster2", two, probe, init)) == 0

    budgets = [
        json.loads((w / "config.json").read_text())["rollout"]["max_completion_length"]
        for w in (one, two)
    ]
    assert budgets == [68, 128]  # 18K and 32K, scaled down
    drawn = {
        line["task_id"]: line["reward"]
        for path in sorted((one / "rollouts").iterdir())
        for line in lines(path)
    }
    solved = {task for task, reward in drawn.items() if reward == 1.0}
    assert solved and len(drawn) > len(solved)
    later = {
        line["task_id"] for path in (two / "rollouts").iterdir() for line in lines(path)
    }
    assert later <= drawn.keys() - solved
    assert "data.pass_rate kept" in caplog.text
    assert not (two / "sft_metrics.jsonl").exists()


def test_of_several_passes_over_a_task_the_last_one_counts(tmp_path):
    """No run is needed for this: the file is read line by line."""
    tasks = [Task(str(i), [{"role": "user", "content": str(i)}]) for i in range(3)]
    keys = [data.probe_key(task) for task in tasks]
    path = tmp_path / "pass_rates.jsonl"
    rates = [{keys[0]: 1.0, keys[1]: 0.0}, {keys[0]: 0.5, keys[1]: 1.0}]
    path.write_text(
        "".join(
            json.dumps({"step": step, "pass_rates": row}) + "\n"
            for step, row in enumerate(rates, 1)
        )
    )
    source = tmp_path / "tasks.jsonl"
    source.write_text(
        "".join(json.dumps({"id": t.id, "prompt": t.prompt}) + "\n" for t in tasks)
    )
    config = tir.get_config("tiny,aster2")
    config.data.update(source=str(source), probe=str(path), num_eval_tasks=0)
    kept = data.load_tasks(config, "train")
    assert [task.id for task in kept] == ["0"]
    np.testing.assert_allclose(kept[0].columns["pass_rate_train"], 0.5)
