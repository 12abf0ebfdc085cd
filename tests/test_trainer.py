"""Runs of the tiny model through the command line: files, metrics, stops, resumes."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from toy import assert_same_run, assert_same_step, command, same_metrics

import run
from grpo_jax import (
    checkpoints,
    data,
    devices,
    metrics,
    models,
    policy,
    setup,
    trainer,
)
from grpo_jax.config import leaves
from grpo_jax.models import lora
from grpo_jax.rollout.chat import Chat
from grpo_jax.training import choices
from tools_env.rewards import RewardCountError

pytestmark = pytest.mark.usefixtures("signals")

# Contract names that need no tools and no penalty.
NAMES = """reward reward_std frac_reward_zero_std rewards/vowels/mean
frac_advantage_zero grad_norm entropy kl clip_ratio/low_mean clip_ratio/high_mean
clip_ratio/region_mean completions/mean_length completions/min_length
completions/max_length completions/clipped_ratio num_tokens step_time
sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
rollout/prefill_tokens rollout/tokens_per_second update/tokens_per_second time/rollout
time/update time/reward time/score time/save compile/count""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder):
    """The workdir of an uninterrupted run of four steps."""
    assert run.main(command(folder, folder / "whole")) == 0
    return folder / "whole"


def rows(path):
    def refuse(constant):
        raise AssertionError(f"{path} holds {constant}")

    lines = path.read_text().strip("\n").split("\n")
    return [json.loads(line, parse_constant=refuse) for line in lines]


def trajectories(workdir, step):
    return rows(workdir / "rollouts" / f"step_{step:06d}.jsonl")


def test_every_step_stands_once_under_the_contracts_names(finished):
    found = rows(finished / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(next(iter(row)) == "step" for row in found)
    for row in found:
        assert not set(NAMES) - row.keys()
        numbers = [v for v in row.values() if not isinstance(v, dict)]
        assert all(math.isfinite(v) for v in numbers)
    last = found[-1]
    for name in ("eval/score/all", "eval/avg@1", "eval/pass@1", "eval/maj@1"):
        assert 0 <= last[name] <= 1 and name not in found[0]
    assert last["eval/num_tasks"] == 2


def test_programs_are_compiled_before_the_first_step(finished):
    counts = [row["compile/count"] for row in rows(finished / "metrics.jsonl")]
    assert len(set(counts)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", ["lora.init_from={}", "sft.num_epochs=0"])
def test_so_they_are_with_loaded_and_with_fresh_adapters(folder, finished, start):
    workdir = folder / start[:4]
    more = f"--config.{start.format(finished)}"
    assert run.main([*command(folder, workdir), more]) == 0
    test_programs_are_compiled_before_the_first_step(workdir)


def test_metrics_follow_from_the_rollouts_file(finished):
    total = 0
    for row in rows(finished / "metrics.jsonl"):
        lines = trajectories(finished, row["step"])
        assert len(lines) == 8 and {line["group"] for line in lines} == {0, 1}
        rewards = np.array([line["reward"] for line in lines]).reshape(2, 4)
        np.testing.assert_allclose(row["reward"], rewards.mean())
        np.testing.assert_allclose(
            row["reward_std"], rewards.std(axis=1, ddof=1).mean()
        )
        sizes = [[len(s["tokens"]) for s in line["segments"]] for line in lines]
        lengths = [sum(size[1:]) for size in sizes]
        np.testing.assert_allclose(row["completions/mean_length"], np.mean(lengths))
        assert row["completions/max_length"] == max(lengths)
        cut = np.mean([line["stop"] != "stop" for line in lines])
        np.testing.assert_allclose(row["completions/clipped_ratio"], cut)
        # A prompt is prefilled once for its group of four.
        assert row["rollout/prefill_tokens"] == sizes[0][0] + sizes[4][0]
        total += row["rollout/prefill_tokens"] + sum(lengths)
        assert row["num_tokens"] == total


def test_rollouts_hold_what_was_sampled(finished):
    for line in trajectories(finished, 1):
        prompt, answer = line["segments"]
        assert (prompt["source"], answer["source"]) == ("prompt", "model")
        assert (
            len(answer["logprobs"]) == len(answer["tokens"]) and not prompt["logprobs"]
        )
        assert all(x <= 0 for x in answer["logprobs"])
        assert line["calls"] == [] and line["rewards"]["vowels"] == line["reward"]


def test_members_differ_and_so_do_steps(finished):
    tokens = [
        tuple(line["segments"][1]["tokens"])
        for step in (1, 2, 3, 4)
        for line in trajectories(finished, step)
    ]
    assert len(set(tokens)) == len(tokens)


def test_kl_is_exactly_0_at_the_first_step_and_grows(finished):
    values = [row["kl"] for row in rows(finished / "metrics.jsonl")]
    assert values[0] == 0 and min(values[1:]) > 0


def test_cold_start_has_its_own_file(finished):
    found = rows(finished / "sft_metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2]
    assert found[1]["loss"] < found[0]["loss"]


def test_SIGTERM_exits_75_and_the_rerun_equals_the_whole_run(
    finished, folder, monkeypatch
):
    workdir, write = folder / "stopped", metrics.Metrics.write

    def write_and_stop(self, step, values):
        write(self, step, values)
        if self.path.name == "metrics.jsonl" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Metrics, "write", write_and_stop)
        assert run.main(command(folder, workdir)) == 75
    assert len(rows(workdir / "metrics.jsonl")) == 2
    assert (workdir / "checkpoints" / "step_000002").is_dir()
    assert run.main(command(folder, workdir)) == 0
    assert_same_run(workdir, finished)


def test_CK3_damaged_newest_checkpoint_repeats_its_step(finished, folder, caplog):
    workdir = folder / "damaged"
    shutil.copytree(finished, workdir)
    newest = workdir / "checkpoints" / "step_000004"
    (newest / "manifest.json").unlink()
    assert run.main(command(folder, workdir)) == 0
    assert "step_000004 is incomplete" in caplog.text
    assert_same_run(workdir, finished)


@pytest.mark.slow
def test_CK5_goes_on_with_other_devices(finished, folder):
    """Saved on 8x1, resumed on 2x4: the data position and the rollouts are the same."""
    workdir = folder / "remeshed"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints" / "step_000004")
    mesh = ("--config.mesh.fsdp=2", "--config.mesh.tensor=4")
    assert run.main(command(folder, workdir, *mesh)) == 0
    got, expected = (same_metrics(w / "metrics.jsonl") for w in (workdir, finished))
    assert got[:3] == expected[:3]
    names = ("grad_norm", "loss", "reward", "kl", "entropy")
    assert_same_step(workdir, finished, 4, names)


def test_a_checkpoint_of_other_adapters_is_refused(finished, folder, capsys):
    more = ("--config.lora.rank=8",)
    assert run.main(command(folder, finished, *more)) == 2
    assert "lora.rank" in capsys.readouterr().err.splitlines()[-1]


def test_eval_and_export_of_a_finished_run(finished, folder, capsys):
    assert run.main(command(folder, finished, "--mode=eval")) == 0
    found = json.loads((finished / "eval.json").read_text())
    assert found["step"] == 4
    expected = rows(finished / "metrics.jsonl")[-1]
    assert found["eval/score/all"] == expected["eval/score/all"]
    assert run.main(command(folder, finished, "--mode=export")) == 0
    exported = capsys.readouterr().out.splitlines()[-1]
    keys = models.LoraConfig(4, 8.0, models.LORA_TARGETS, 0.0)
    one, two = (models.load_model("tiny", lora=keys) for _ in range(2))
    policy.start_from(exported, one)
    policy.start_from(str(finished), two)
    fresh = models.load_model("tiny", lora=keys)
    pairs = [jax.tree.leaves(nnx.state(m, nnx.LoRAParam)) for m in (one, two, fresh)]
    for x, y, z in zip(*pairs, strict=True):
        np.testing.assert_array_equal(x, y)
        assert (np.asarray(x) != np.asarray(z)).any()


@pytest.mark.parametrize("mode", ["eval", "export"])
def test_a_step_deleted_while_the_model_is_loaded_is_not_missed(
    finished, folder, monkeypatch, mode, caplog
):
    """A training beside has saved another by then; here an older one stands for it."""
    workdir, load = folder / f"pruned_{mode}", setup.load_model
    shutil.copytree(finished, workdir)

    def load_and_prune(*arguments, **options):
        shutil.rmtree(workdir / "checkpoints" / "step_000004", ignore_errors=True)
        return load(*arguments, **options)

    monkeypatch.setattr(setup, "load_model", load_and_prune)
    assert run.main(command(folder, workdir, f"--mode={mode}")) == 0
    if mode == "eval":
        assert json.loads((workdir / "eval.json").read_text())["step"] == 3
    else:
        assert f"exporting {workdir / 'checkpoints' / 'step_000003'}" in caplog.text


def test_a_refused_resume_leaves_the_runs_config_as_it_was(finished, folder, capsys):
    workdir = folder / "refused"
    shutil.copytree(finished, workdir)
    before = (workdir / "config.json").read_bytes()
    more = ("--config.data.seed=5", "--config.train.num_steps=6")
    assert run.main(command(folder, workdir, *more)) == 2
    assert "data.seed changed" in capsys.readouterr().err.splitlines()[-1]
    assert (workdir / "config.json").read_bytes() == before


def test_a_start_that_is_refused_leaves_no_config(folder, capsys):
    workdir = folder / "no_gold"
    more = ("--config.sft.min_tool_calls=3",)
    assert run.main(command(folder, workdir, *more)) == 2
    assert "no task has a gold answer" in capsys.readouterr().err.splitlines()[-1]
    assert not (workdir / "config.json").exists()


def test_trackers_open_before_anything_takes_long(folder, monkeypatch, capsys):
    class Offline(types.ModuleType):
        def init(self, **options):
            raise ConnectionError("no route to the server")

    monkeypatch.setitem(sys.modules, "wandb", Offline("wandb"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    workdir = folder / "offline"
    assert run.main(command(folder, workdir, "--config.trackers.wandb=True")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "trackers.wandb did not open (ConnectionError: no route to the" in last
    assert not (workdir / "sft_metrics.jsonl").exists()


def test_RW3_abstentions_leave_every_parameter_finite(folder):
    workdir = folder / "abstains"
    more = ("--config.reward.functions=('toy.sometimes_abstains',)",)
    more += ("--config.train.num_steps=2", "--config.sft.num_epochs=0")
    assert run.main(command(folder, workdir, *more)) == 0
    for row in rows(workdir / "metrics.jsonl"):
        assert row["rewards/abstained"] == 0.5
        lines = trajectories(workdir, row["step"])
        valid = [line["reward"] for line in lines if line["reward"] is not None]
        np.testing.assert_allclose(row["reward"], np.mean(valid))
    keys = models.LoraConfig(4, 8.0, models.LORA_TARGETS, 0.0)
    adapters = nnx.state(models.load_model("tiny", lora=keys), nnx.LoRAParam)
    saved = checkpoints.read_adapters(
        checkpoints.find(workdir / "checkpoints"), adapters
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(saved))


@pytest.mark.parametrize(
    ("function", "virtual", "flat"),
    [("constant", False, 1.0), ("constant", True, 0.0), ("never_scores", False, 1.0)],
)
def test_groups_without_signal(folder, function, virtual, flat):
    """A flat group moves nothing, unless a virtual best sample joins it."""
    workdir = folder / f"{function}-{virtual}"
    estimator = "ngrpo" if virtual else "grpo"
    more = (
        "--config=configs/tir.py:tiny,grpo",
        f"--config.reward.functions=('toy.{function}',)",
        f"--config.objective.estimator={estimator}",
        "--config.objective.virtual_reward=1.0",
        "--config.objective.beta=0.0",  # whose gradient is rounding, not 0, by itself
        "--config.train.num_steps=1",
        "--config.sft.num_epochs=0",
        "--config.data.num_eval_tasks=0",
    )
    assert run.main(command(folder, workdir, *more)) == 0
    (row,) = rows(workdir / "metrics.jsonl")
    assert row["frac_advantage_zero"] == flat
    if function == "constant":
        assert (row["grad_norm"] == 0) == (flat == 1.0)
        assert row["frac_reward_zero_std"] == 1.0
    else:  # nothing is left: no update, and none of its metrics
        assert row["rewards/abstained"] == 1.0
        absent = {"reward", "reward_std", "frac_reward_zero_std", "grad_norm", "loss"}
        assert not absent & row.keys()


@pytest.mark.parametrize("function", ["one_too_many", "fails", "no_such_function"])
def test_bad_reward_function_is_found_at_the_start(folder, function, capsys):
    workdir = folder / "never"
    more = (f"--config.reward.functions=('toy.{function}',)",)
    assert run.main(command(folder, workdir, *more)) == 2
    assert function in capsys.readouterr().err.splitlines()[-1]
    assert not (workdir / "rollouts").exists()


def test_wrong_number_of_rewards_later_ends_the_run(folder):
    more = ("--config.reward.functions=('toy.one_too_many_later',)",)
    more += ("--config.sft.num_epochs=0", "--config.data.num_eval_tasks=0")
    with pytest.raises(RewardCountError, match="one_too_many_later"):
        run.main(command(folder, folder / "count", *more))


def held_out(folder, items):
    """Arguments of an evaluation of items of which all but the last earn 1."""
    path = folder / f"held_out_{items}.jsonl"
    scores = [1.0] * (items - 1) + [0.0]
    rows = [{"prompt": f"say {i}", "score": score} for i, score in enumerate(scores)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        "--mode=eval",
        f"--config.data.eval_source={path}",
        f"--config.data.num_eval_tasks={items}",
        "--config.reward.functions=('toy.by_score',)",
    )


@pytest.mark.parametrize("items", [10, 2])
def test_DV1_items_that_slots_and_devices_do_not_divide_count_once(folder, items):
    workdir = folder / f"held_out_{items}"
    assert run.main(command(folder, workdir, *held_out(folder, items))) == 0
    values = json.loads((workdir / "eval.json").read_text())
    assert values["eval/num_tasks"] == items
    assert values["eval/score/all"] == pytest.approx((items - 1) / items)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_DV1_with_any_number_of_devices(folder, repository, devices):
    workdir = folder / f"held_out_on_{devices}"
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(repository / "tests"),
    }
    subprocess.run(
        [sys.executable, "run.py", *command(folder, workdir, *held_out(folder, 10))],
        cwd=repository,
        env=environment,
        check=True,
        capture_output=True,
    )
    values = json.loads((workdir / "eval.json").read_text())
    assert values["eval/num_tasks"] == 10
    assert values["eval/score/all"] == pytest.approx(0.9)


# Every key is read -----------------------------------------------------------------


class Reads:
    """Notes which keys of a config the product reads by name, its checks left out."""

    def __init__(self, monkeypatch, repository):
        self.names = set()
        rooms = tuple(str(repository / name) for name in ("grpo_jax", "tools_env"))
        checks = [str(repository / "grpo_jax" / f) for f in ("config.py", "clashes.py")]

        def noting(original):
            def read(config, name):
                caller = sys._getframe(1).f_code.co_filename
                if caller.startswith(rooms) and caller not in checks:
                    self.names.add((id(config), name))
                return original(config, name)

            return read

        for method in ("__getattr__", "__getitem__"):
            noted = noting(getattr(ConfigDict, method))
            monkeypatch.setattr(ConfigDict, method, noted)

    def of(self, config):
        sections = {}
        for name, section in config.items():
            sections[id(section)] = name
            for key, value in section.items():
                if isinstance(value, ConfigDict):
                    sections[id(value)] = f"{name}.{key}"
        return {
            f"{sections[owner]}.{name}"
            for owner, name in self.names
            if owner in sections
        }


def test_every_key_is_read_by_someone(folder, monkeypatch, repository):
    """A run, and what only other choices of environment and data would read."""
    reads, kept = Reads(monkeypatch, repository), []
    begin = trainer.main

    def keep(config, workdir, mode):
        kept.append(config)
        begin(config, workdir, mode)

    monkeypatch.setattr(trainer, "main", keep)
    more = (
        "--config.train.num_steps=2",
        "--config.eval.every=2",
        "--config.objective.estimator=ngrpo",
        "--config.objective.virtual_reward=1.0",
        "--config.trackers.tensorboard=True",
    )
    assert run.main(command(folder, folder / "read", *more)) == 0
    (config,) = kept
    with config.unlocked():
        config.reward.functions = ("toy.vowel_reward",)
        config.tools.functions = ("toy.vowels",)
        config.train.update(num_steps=0, num_epochs=1)
    assert setup.num_steps(config, num_tasks=12) == 6
    for environment in ("fund", "python", "functions"):
        config.tools.environment = environment
        setup.make_environment(config)
    for source in ("fund", "reasoning_gym"):
        config.data.update(source=source, num_tasks=2)
        data.load_tasks(config, "train")
    config.objective.update(estimator="steppo", token_weights="gear")
    graph, _, base = lora.split(models.load_model("tiny"))
    assert choices.make_critic(config, graph, base, updates=2)
    environment = setup.make_environment(config)
    chat = Chat(models.load_tokenizer("tiny"))
    assert choices.make_teacher(config, environment, chat, row_length=64)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    config.distributed.coordinator = "host:1234"
    devices.initialize_distributed(config)
    # mesh.context is a name of the contract of which the check admits only 1;
    # reward.floor_kl is read below the floor in its mode "kl".
    # checkpoint.load, export.format and plan.topology are of other modes.
    unread = {"mesh.context", "reward.floor_kl", "checkpoint.load", "export.format"}
    unread |= {"plan.topology"}
    # And these by tools.environment='verifiers': tests/test_verifiers_env.py.
    unread |= {"tools.verifiers", "tools.verifiers_args"}
    assert set(leaves(config)) - reads.of(config) == unread
