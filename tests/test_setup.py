"""From a config to the parts of a run, and what bad input gets before a run begins."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from toy import ToyEnvironment, command, vowel_reward

import run
from configs.tir import get_config
from grpo_jax import devices, models, policy, setup
from grpo_jax.checkpoints import Checkpoints
from grpo_jax.config import BadInput
from grpo_jax.training import update
from tools_env.functions import FunctionEnvironment
from tools_env.fund import FundEnvironment
from tools_env.python_tasks import PythonEnvironment

pytestmark = pytest.mark.usefixtures("signals")
KEYS = models.LoraConfig(4, 8.0, models.LORA_TARGETS, 0.0)


@pytest.fixture
def config():
    return get_config("tiny")


def adapters_of(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))]


def tiny(fill=None):
    """The tiny model; its adapters all of one value if one is given."""
    model = models.load_model("tiny", lora=KEYS)
    if fill is not None:
        state = nnx.state(model, nnx.LoRAParam)
        nnx.update(model, jax.tree.map(lambda x: 0 * x + fill, state))
    return model


def test_starts_from_a_peft_folder(tmp_path):
    models.save_peft(tmp_path, tiny(0.25), "tiny")
    model = tiny()
    policy.start_from(str(tmp_path), model)
    assert all((x == 0.25).all() for x in adapters_of(model))


def test_starts_from_another_runs_workdir(tmp_path):
    saved = nnx.state(tiny(0.5), nnx.LoRAParam)
    optimizer = update.make_optimizer(1e-3, warmup_steps=1, total_steps=4)
    state = update.new_state(saved, optimizer, jax.random.key(0))
    reference = nnx.state(tiny(-1.0), nnx.LoRAParam)
    arrays = {"state": state, "reference": reference}
    Checkpoints(tmp_path / "checkpoints", keep=1).save(7, arrays, {"base": "tiny"})
    model = tiny()
    policy.start_from(str(tmp_path), model)
    assert all((x == 0.5).all() for x in adapters_of(model))


@pytest.mark.parametrize("make", [False, True])
def test_nothing_to_start_from_is_bad_input(tmp_path, make):
    if make:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(BadInput, match=str(tmp_path)):
        policy.start_from(str(tmp_path), tiny())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fund", FundEnvironment),
        ("python", PythonEnvironment),
        ("functions", FunctionEnvironment),
        ("toy.ToyEnvironment", ToyEnvironment),
    ],
)
def test_environments_by_name(config, name, kind):
    with config.unlocked():
        config.tools.functions = ("toy.vowels",)
        config.reward.functions = ("toy.vowel_reward",)
    config.tools.environment = name
    environment = setup.make_environment(config)
    assert type(environment) is kind
    if kind is ToyEnvironment:
        assert environment.config is config


def _exits(config):
    raise SystemExit("bye")


def _is_none(config):
    return None


@pytest.mark.parametrize(
    ("name", "reason"), [("_exits", "SystemExit: bye"), ("_is_none", "has no")]
)
def test_a_users_environment_that_fails_is_named(config, name, reason):
    config.tools.environment = f"{__name__}.{name}"
    with pytest.raises(BadInput, match=f"{name}' ?:? ?{reason}"):
        setup.make_environment(config)


def test_reward_functions_and_their_weights(config):
    assert setup.make_rewards(config) is None
    with config.unlocked():
        config.reward.functions = ("toy.vowel_reward", "toy.constant")
        config.reward.weights = (1.0, 2.0)
    rewards = setup.make_rewards(config)
    assert rewards.functions[0] is vowel_reward and rewards.weights == [1.0, 2.0]


@pytest.mark.parametrize("path", ["toy.nothing", "no_such_module.f", "toy", ""])
def test_what_cannot_be_imported_is_named(config, path):
    with config.unlocked():
        config.reward.functions = (path,)
    with pytest.raises(BadInput, match="reward.functions"):
        setup.make_rewards(config)


def test_old_logprobs_are_scored_where_they_are_needed(config):
    """One update a batch, no KL and no dropout: the new log-probs are the old ones."""
    config.train.update(num_minibatches=1, num_iterations=1)
    config.objective.beta = 0.0
    assert setup.make_loss(config).on_policy
    for section, key, value in [
        ("train", "num_minibatches", 2),
        ("train", "num_iterations", 2),
        ("objective", "beta", 0.1),
        ("lora", "dropout", 0.1),
    ]:
        before = config[section][key]
        config[section][key] = value
        assert not setup.make_loss(config).on_policy, key
        config[section][key] = before


def test_positions_that_a_scaling_record_reaches(config):
    """YaRN's factor stretches the context that a checkpoint declares."""
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 32768))
    shape = dataclasses.replace(models.load_config("tiny"), max_positions=32768)
    assert shape.longest_context == 32768
    assert dataclasses.replace(shape, rope_scaling=yarn).longest_context == 131072
    llama3 = (("factor", 8.0), ("original_max_position_embeddings", 8192))
    shape = dataclasses.replace(shape, max_positions=131072, rope_scaling=llama3)
    assert shape.longest_context == 131072


def test_another_runs_adapters_under_another_scale_are_refused(tmp_path):
    saved = nnx.state(tiny(0.5), nnx.LoRAParam)
    arrays = {"state": {"adapters": saved}}
    Checkpoints(tmp_path / "checkpoints", keep=1).save(
        7, arrays, {"base": "tiny", "alpha": 4.0}
    )
    with pytest.raises(BadInput, match="lora.alpha was 4.0, the configuration has 8.0"):
        policy.start_from(str(tmp_path), tiny())


def test_length_of_a_run(config):
    config.train.update(num_steps=7, num_epochs=0, prompts_per_step=4)
    assert setup.num_steps(config, 100) == 7
    config.train.update(num_steps=0, num_epochs=2)
    assert setup.num_steps(config, 10) == 5  # 20 tasks
    assert setup.num_steps(config, 11) == 6  # 22: the last step begins epoch 3


def test_rows_hold_the_longest_trajectory(config):
    config.rollout.update(max_prompt_length=100, max_completion_length=60)
    assert setup.row_length(config) == 192
    config.train.row_length = 500
    assert setup.row_length(config) == 512


# Through the command line: exit 2, the reason last, nothing generated ----------------

BAD = {
    "model": (["model.source=/no/such/model"], "/no/such/model"),
    "data": (["data.source=/no/such.jsonl"], "/no/such.jsonl"),
    "prompts": (["rollout.max_prompt_length=8"], "max_prompt_length=8"),
    "positions": (
        ["rollout.max_prompt_length=16384"],
        "= 16408 tokens, but model.source 'tiny' has 16384 positions",
    ),
    "mesh": (["mesh.fsdp=3"], "mesh.fsdp=3"),
    "environment": (["tools.environment=toy.Missing"], "toy.Missing"),
    "adapter": (["lora.init_from=/no/such/adapter"], "/no/such/adapter"),
    "dtype": (["model.dtype=float8"], "float8"),
    "best": (["checkpoint.best=eval/rewards/all"], "is no metric to choose by"),
    "at k": (["checkpoint.best=eval/pass@7"], "is no metric to choose by"),
    "no held-out tasks": (
        ["checkpoint.best=eval/score/all", "data.num_eval_tasks=0"],
        "checkpoint.best='eval/score/all' needs held-out tasks",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_before_a_run_begins(tmp_path, name, capsys):
    settings, reason = BAD[name]
    workdir = tmp_path / "run"
    arguments = command(tmp_path, workdir, *[f"--config.{s}" for s in settings])
    assert run.main(arguments) == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]
    assert not (workdir / "rollouts").exists()
    assert not (workdir / "checkpoints").exists()


def test_a_tokenizer_beyond_the_embedding_is_refused():
    tokenizer = models.load_tokenizer("tiny")
    setup._check_vocabulary("tiny", tokenizer)
    tokenizer.add_tokens([f"new {i}" for i in range(3)])
    with pytest.raises(BadInput, match="'new 2' has id 266.* has 264 tokens"):
        setup._check_vocabulary("tiny", tokenizer)


def test_rows_without_a_needed_column(tmp_path, capsys):
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?"}, {"prompt": "3+3?"}]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (
        "--config.tools.environment=python",
        f"--config.data.source={path}",
        "--config.rollout.max_prompt_length=2048",
        "--config.data.strict=True",
    )
    assert run.main(command(tmp_path, tmp_path / "run", *more)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "problems.jsonl" in last and "2" in last and "answer" in last


def test_prepared_parts_fit_together(tmp_path, config):
    command(tmp_path, tmp_path / "run")  # writes the tasks
    with config.unlocked():
        config.tools.environment = "toy.ToyEnvironment"
        config.data.update(source=str(tmp_path / "tasks.jsonl"), num_eval_tasks=2)
    mesh = devices.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        job = setup.prepare(config, mesh)
    assert len(job.train_tasks) == 10 and len(job.eval_tasks) == 2
    assert len(job.sft_tasks) == config.sft.num_examples
    assert not {t.id for t in job.train_tasks} & {t.id for t in job.eval_tasks}
    for x in jax.tree.leaves(job.adapters):
        assert len(x.sharding.device_set) == mesh.size
