"""The config's objective as parts of a learner: loss, estimator, critic, teacher."""

from flax import nnx
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerFast

from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.roles import Router
from grpo_jax.training.assign import Estimator
from grpo_jax.training.critic import Critic
from grpo_jax.training.teacher import Teacher, informed_prompts
from grpo_jax.training.update import Loss, make_optimizer
from tools_env.protocol import Environment


def make_loss(config: ConfigDict, extra_kl: float = 0.0) -> Loss:
    """The RL loss of the config, with `extra_kl` added to its KL weight.

    With beta > 0 old log-probs are scored too, by the program that scores the
    reference: the KL of equal adapters is then exactly 0.
    """
    choices = config.objective
    updates = config.train.num_minibatches * config.train.num_iterations
    beta = choices.beta + extra_kl
    return Loss(
        kind="policy",
        temperature=float(config.rollout.temperature),
        ratio=choices.ratio,
        clip=choices.clip,
        surrogate=choices.surrogate,
        epsilon=choices.epsilon,
        epsilon_high=choices.epsilon_high,
        dual_clip=choices.dual_clip,
        aggregation=choices.aggregation,
        max_length=config.rollout.max_completion_length,
        beta=beta,
        kl_estimator=choices.kl_estimator,
        lld=choices.lld,
        lld_gate=choices.lld_gate,
        lld_normalization=choices.lld_normalization,
        lld_answer=choices.lld_answer,
        entropy=choices.entropy,
        tis_cap=choices.tis_cap,
        tis_level=choices.tis_level,
        tis_mode=choices.tis_mode,
        on_policy=updates == 1 and not beta and not config.lora.dropout,
        remat=config.train.remat,
        dropout=config.lora.dropout > 0,
        **role_choices(config),
    )


def make_sft_loss(config: ConfigDict) -> Loss:
    """The cold start's loss."""
    return Loss(
        kind="sft",
        remat=config.train.remat,
        dropout=config.lora.dropout > 0,
        **role_choices(config),
    )


def role_choices(config: ConfigDict) -> dict:
    """What a loss knows of roles."""
    return {
        "by_role": uses_roles(config),
        "role_weights": tuple(map(float, config.objective.role_weights)),
    }


def uses_roles(config: ConfigDict) -> bool:
    """Something depends on whether a token is reasoning or part of a tool call."""
    choices = config.objective
    weighed = bool(choices.role_weights or choices.role_gradients_every)
    return config.lora.routed or weighed


def cuts_turns(config: ConfigDict) -> bool:
    """StepPO's steps are the thoughts and calls of a turn."""
    return config.objective.step == "role"


def make_router(
    config: ConfigDict, tokenizer: PreTrainedTokenizerFast, size: int
) -> Router | None:
    """What tells the roles of tokens; None where nothing depends on them.

    The fund assistant's answer calls its tool under `action`, all others call tools in
    the config's protocol.
    """
    if not uses_roles(config) and not cuts_turns(config):
        return None
    fund = config.tools.environment == "fund"
    return Router(tokenizer, "action" if fund else config.tools.protocol, size)


def make_estimator(
    config: ConfigDict, has_tools: bool, router: Router | None = None
) -> Estimator:
    """How the config's rewards become advantages, and which rows carry loss.

    `router`: what `make_router` made of the same config.
    """
    choices, rollout = config.objective, config.rollout
    dr_grpo = choices.estimator == "dr_grpo"
    return Estimator(
        name="grpo" if dr_grpo else choices.estimator,
        num_generations=rollout.num_generations,
        num_virtual=choices.num_virtual,
        ddof=choices.ddof,
        scale="none" if dr_grpo else choices.scale_rewards,
        max_turns=rollout.max_tool_calling_iterations + 1,
        has_tools=has_tools,
        gamma=choices.gamma,
        lam=choices.lam,
        router=router if cuts_turns(config) else None,
        norm_scope=choices.norm_scope,
        lld_answer=choices.lld_answer,
        turn_weight=choices.turn_weight,
        format_penalty=choices.format_penalty,
        lead_alpha=choices.lead_alpha,
        lead_min_length=choices.lead_min_length,
        lead_unfinished=choices.lead_unfinished,
        overlong_buffer=choices.overlong_buffer,
        max_length=rollout.max_completion_length,
        drop_flat=choices.drop_flat_groups,
        drop_saturated=choices.drop_saturated_groups,
        mask_truncated=choices.mask_truncated_completions,
        mask_void=choices.mask_void_turns,
    )


def make_critic(
    config: ConfigDict, graph: nnx.GraphDef, base: nnx.State, updates: int
) -> Critic | None:
    """The value function of the estimator that needs one."""
    if config.objective.estimator != "steppo":
        return None
    keys = config.critic
    optimizer = make_optimizer(
        keys.learning_rate,
        warmup_steps=keys.warmup_steps,
        total_steps=updates,
        weight_decay=keys.weight_decay,
        max_grad_norm=keys.max_grad_norm,
        b1=config.train.adam_b1,
        b2=config.train.adam_b2,
    )
    return Critic(graph, base, optimizer, float(keys.clip), config.train.remat)


def make_teacher(
    config: ConfigDict, environment: Environment, chat: Chat, row_length: int
) -> Teacher | None:
    """The policy that knows the answers, where token weights come from it."""
    choices = config.objective
    if choices.token_weights != "gear":
        return None
    return Teacher(
        prompt=informed_prompts(environment, chat),
        row_length=row_length,
        temperature=float(config.rollout.temperature),
        divergence=choices.gear_divergence,
        entropy=choices.gear_entropy,
        kappa=choices.gear_kappa,
        low=choices.gear_low,
        high=choices.gear_high,
    )
