"""From a checked config to the objects a run works with, cheapest checks first.

Tasks, tools, rewards and the tokenizer are ready, and every prompt measured, before
the weights are read; all of it before anything is compiled.
"""

import contextlib
import dataclasses
import logging
from pathlib import Path

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import data, devices, evaluate, models, policy
from grpo_jax.config import BadInput
from grpo_jax.environments import make_environment, make_suite
from grpo_jax.incentives import (
    check_tasks,
    make_rewards,
    make_shaping,
    translated,
)
from grpo_jax.models import lora
from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.engine import Engine, Limits
from grpo_jax.rollout.roles import Router
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.scoring import check_rewards
from grpo_jax.training import sft
from grpo_jax.training.batching import Example
from grpo_jax.training.choices import (
    make_critic,
    make_estimator,
    make_loss,
    make_router,
    make_teacher,
)
from grpo_jax.training.learn import Learner
from grpo_jax.training.teacher import check_ground_truth
from grpo_jax.training.update import make_optimizer
from tools_env.pool import ToolPool
from tools_env.protocol import Environment, Task
from tools_env.rewards import RewardSet
from tools_env.terms import Shaping

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Job:
    """Everything a run needs besides its training state.

    Attributes:
      environment: tools, gold answers, built-in reward.
      rewards: the user's reward functions; None: the environment's own reward.
      shaping: the terms that join them in training.
      chat: the token format of the model's template.
      train_tasks, eval_tasks: prompts that fit.
      sft_tasks: what the cold start shows, if there is one.
      graph, base: the decoder without adapters; `adapters` are those it starts from.
      engine: rollouts.
      router: tells reasoning from tool calls, where something depends on it.
    """

    environment: Environment
    rewards: RewardSet | None
    shaping: Shaping
    chat: Chat
    train_tasks: list[Task]
    eval_tasks: list[Task]
    sft_tasks: list[Task]
    graph: nnx.GraphDef
    base: nnx.State
    adapters: nnx.State
    engine: Engine
    router: Router | None


def prepare(
    config: ConfigDict, mesh: jax.sharding.Mesh, *, resuming: bool = False
) -> Job:
    """Build a run's parts. BadInput for anything that the user must mend."""
    asked = (_suite if config.eval.suite else _asked)(config)
    with contextlib.ExitStack() as undo:
        undo.callback(getattr(asked[0], "close", lambda: None))
        job = _assembled(config, mesh, *asked, resuming=resuming)
        undo.pop_all()
    return job


def _assembled(
    config: ConfigDict,
    mesh: jax.sharding.Mesh,
    environment: Environment,
    rewards: RewardSet | None,
    shaping: Shaping,
    train_tasks: list[Task],
    eval_tasks: list[Task],
    *,
    resuming: bool,
) -> Job:
    """Everything after what is asked: prompts measured, then the weights."""
    tokenizer = models.load_tokenizer(config.model.source)
    _check_vocabulary(config.model.source, tokenizer)
    _check_positions(config)
    stop_ids = models.stop_ids(config.model.source, tokenizer)
    form = {
        "stop_ids": stop_ids,
        "protocol": config.tools.protocol,
        "own_tools": getattr(environment, "own_tools", False),
    }
    chat = translated(Chat, tokenizer, environment.tools(), **form)
    longest = config.rollout.max_prompt_length
    strict = config.data.strict or bool(config.eval.suite)
    train_tasks, _ = data.fit_prompts(train_tasks, chat, longest, strict=strict)
    eval_tasks, dropped = data.fit_prompts(eval_tasks, chat, longest, strict=strict)
    if dropped and config.eval.suite:
        raise BadInput(
            f"rollout.max_prompt_length={longest} is too short for {len(dropped)} of "
            f"eval.suite's tasks; the longest has {max(n for _, n in dropped)} tokens"
        )
    _check_best(config, eval_tasks)
    if config.objective.token_weights == "gear":
        check_ground_truth(train_tasks, environment)
    sft_tasks = load_sft_tasks(config, train_tasks, environment)
    model = load_model(config, mesh)
    if config.lora.init_from and not resuming:
        policy.start_from(config.lora.init_from, model)
    graph, adapters, base = lora.split(model)
    # Loaded or fresh, one layout: another would compile every program a second time.
    adapters = jax.device_put(adapters, devices.shardings(adapters, mesh))
    pool = ToolPool(config.tools.workers, call_deadline(config))
    router = make_router(config, tokenizer, model.config.vocab_size)
    table = router.table.placed() if config.lora.routed else None
    limits = make_limits(config)
    engine = Engine(graph, base, model, chat, environment, pool, limits, table)
    return Job(
        environment=environment,
        rewards=rewards,
        shaping=shaping,
        chat=chat,
        train_tasks=train_tasks or eval_tasks,  # of a suite: nothing is trained on
        eval_tasks=eval_tasks,
        sft_tasks=sft_tasks,
        graph=graph,
        base=base,
        adapters=adapters,
        engine=engine,
        router=router,
    )


def _asked(config: ConfigDict):
    """Environment, rewards, shaping, training and held-out tasks."""
    environment = make_environment(config)
    rewards = make_rewards(config)
    shaping = make_shaping(config, environment, rewards)
    train_tasks, eval_tasks = (
        instructed(data.load_tasks(config, split, environment), environment)
        for split in ("train", "eval")
    )
    check_tasks(config, shaping, train_tasks)
    if rewards is not None:
        translated(check_rewards, rewards, train_tasks[0], environment.tools())
    return environment, rewards, shaping, train_tasks, eval_tasks


def _suite(config: ConfigDict):
    """The same for a suite, which is all held out and judges by itself."""
    environment, tasks = make_suite(config)
    return environment, None, Shaping(environment), [], tasks


def load_model(
    config: ConfigDict, mesh: jax.sharding.Mesh, source: str | Path | None = None
) -> models.Decoder:
    """The base with fresh adapters; from another `source`, as it is."""
    return models.load_model(
        source or config.model.source,
        _dtype(config.model.dtype),
        lora=None if source else lora_config(config),
        mesh=mesh if mesh.size > 1 else None,
        seed=config.train.seed,
    )


def _check_vocabulary(source: str, tokenizer) -> None:
    """Refuse a tokenizer with ids beyond the embedding: they would be read as others.

    Some checkpoints carry a padding token of which the model knows nothing; no row
    holds it.
    """
    size = models.load_config(source).vocab_size
    vocabulary = tokenizer.get_vocab()
    token = max(vocabulary.keys() - {tokenizer.pad_token}, key=vocabulary.get)
    if vocabulary[token] >= size:
        raise BadInput(
            f"model.source {source!r}: the tokenizer's {token!r} has id "
            f"{vocabulary[token]}, but the model's vocabulary has {size} tokens"
        )


def _check_positions(config: ConfigDict) -> None:
    """Refuse trajectories longer than the positions that the model was trained on."""
    rollout = config.rollout
    most = models.load_config(config.model.source).longest_context
    longest = rollout.max_prompt_length + rollout.max_completion_length
    if longest > most:
        raise BadInput(
            f"rollout.max_prompt_length={rollout.max_prompt_length} + "
            f"rollout.max_completion_length={rollout.max_completion_length} = "
            f"{longest} tokens, but model.source '{config.model.source}' has "
            f"{most} positions"
        )


def _check_best(config: ConfigDict, eval_tasks: list[Task]) -> None:
    """Refuse a `checkpoint.best` that no held-out result of training can be."""
    best, k = config.checkpoint.best, config.eval.num_generations
    if not best or config.eval.probe or config.eval.suite:
        return
    if not evaluate.can_select(best, k):
        raise BadInput(
            f"checkpoint.best='{best}' is no metric to choose by; some are "
            f"eval/score/all, eval/tool_accuracy/all, eval/accuracy, eval/pass@{k}"
        )
    if not eval_tasks:
        raise BadInput(
            f"checkpoint.best='{best}' needs held-out tasks: see data.num_eval_tasks "
            "and data.eval_source"
        )


def instructed(tasks: list[Task], environment: Environment) -> list[Task]:
    """Begin prompts that have no system message with the environment's, if it has one.

    So a user's plain question also says in what form the environment wants the answer.
    """
    text = getattr(environment, "system_prompt", "")
    if not text:
        return tasks
    system = {"role": "system", "content": text}
    return [
        task
        if any(message["role"] == "system" for message in task.prompt)
        else dataclasses.replace(task, prompt=[system, *task.prompt])
        for task in tasks
    ]


def load_sft_tasks(
    config: ConfigDict, train_tasks: list[Task], environment: Environment
) -> list[Task]:
    """The cold start's tasks: rows of `sft.source`, or else the first to train on."""
    keys = config.sft
    if not keys.num_epochs:
        return []
    tasks = train_tasks
    if keys.source:
        tasks = data.read_tasks(keys.source, config.data.strict, ("demonstration",))
        tasks = instructed(tasks, environment)
    return tasks[: keys.num_examples or None]


def gold_examples(config: ConfigDict, job: Job) -> list[Example]:
    """What the cold start learns from; BadInput when there is nothing."""
    examples = sft.gold_examples(
        job.environment,
        job.chat,
        job.sft_tasks,
        max_length=row_length(config),
        min_tool_calls=config.sft.min_tool_calls,
        own_tools=bool(config.sft.source),
        strict=config.data.strict,
    )
    if not examples:
        raise BadInput(
            "sft.num_epochs > 0, but no task has a gold answer that fits (and has "
            f"sft.min_tool_calls={config.sft.min_tool_calls}); set sft.num_epochs=0 or "
            "give some in sft.source"
        )
    return examples


def call_deadline(config: ConfigDict) -> float:
    """Seconds after which the pool gives a call up.

    Plain functions have no other deadline. Sandboxes and sessions keep `timeout_s`
    themselves and say what was lost; the pool's is for one that fails to.
    """
    tools = config.tools
    return tools.timeout_s + (0.0 if tools.environment == "functions" else 5.0)


def make_limits(config: ConfigDict) -> Limits:
    rollout = config.rollout
    return Limits(
        max_prompt_length=rollout.max_prompt_length,
        max_completion_length=rollout.max_completion_length,
        max_turn_length=rollout.max_turn_length,
        max_tool_calling_iterations=rollout.max_tool_calling_iterations,
        max_calls_per_turn=config.tools.max_calls_per_turn,
        slots=rollout.slots,
        burst=rollout.burst,
    )


def make_sampling(config: ConfigDict) -> Sampling:
    rollout = config.rollout
    return Sampling(float(rollout.temperature), rollout.top_k, float(rollout.top_p))


def make_learner(config: ConfigDict, job: Job, steps: int) -> Learner:
    """The update stages for a run of `steps` rollout batches."""
    train = config.train
    return Learner(
        graph=job.graph,
        base=job.base,
        optimizer=rl_optimizer(config, steps),
        loss=make_loss(config),
        estimator=make_estimator(config, bool(job.environment.tools()), job.router),
        reference=config.objective.reference,
        num_minibatches=train.num_minibatches,
        num_iterations=train.num_iterations,
        row_length=row_length(config),
        rows=train.micro_batch_size,
        critic=make_critic(config, job.graph, job.base, total_updates(config, steps)),
        teacher=make_teacher(config, job.environment, job.chat, row_length(config)),
        router=job.router,
        role_gradients_every=config.objective.role_gradients_every,
    )


def below_floor(config: ConfigDict, learner: Learner) -> Learner | None:
    """What learns from a batch below the call-rate floor; None: it is rejected."""
    reward = config.reward
    if not reward.floor or reward.floor_mode == "bonus":
        return learner
    if reward.floor_mode == "reject":
        return None
    loss = make_loss(config, extra_kl=reward.floor_kl)
    return dataclasses.replace(learner, loss=loss)


def num_steps(config: ConfigDict, num_tasks: int) -> int:
    """Rollout batches of the run."""
    if config.train.num_steps:
        return config.train.num_steps
    wanted = config.train.num_epochs * num_tasks
    return -(-wanted // config.train.prompts_per_step)


def total_updates(config: ConfigDict, steps: int) -> int:
    """Optimizer updates of so many rollout batches."""
    return steps * config.train.num_minibatches * config.train.num_iterations


def rl_optimizer(config: ConfigDict, steps: int) -> optax.GradientTransformation:
    train = config.train
    return make_optimizer(
        train.learning_rate,
        warmup_steps=train.warmup_steps,
        # One more, so that the last update has a rate above 0.
        total_steps=total_updates(config, steps) + 1,
        schedule=train.schedule,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        b1=train.adam_b1,
        b2=train.adam_b2,
    )


def row_length(config: ConfigDict) -> int:
    """Tokens of a packed row: the longest trajectory, or train.row_length if more."""
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    return -(-max(longest, config.train.row_length) // 64) * 64


def lora_config(config: ConfigDict) -> models.LoraConfig:
    """The adapters that `config.lora` describes."""
    keys = config.lora
    return models.LoraConfig(
        keys.rank,
        float(keys.alpha),
        tuple(keys.targets),
        float(keys.dropout),
        keys.routed,
    )


def _dtype(name: str) -> str:
    if name != "auto":
        return name
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
