"""The jitted half of learning: scoring, gradients of a micro-batch, the optimizer.

A loss term is (sum, weight). Its divisor is taken over the whole minibatch before the
first gradient (`divisors`), so that micro-batches simply add up and the result does
not depend on the cut. A token whose new log-prob is not finite is dropped from its
term's sum and counted, but was counted in the divisor.

Optimizer: AdamW on the adapters after clipping by global norm. Base weights are an
argument of every function, never donated and never part of a gradient. A gradient that
is not finite leaves the state as it was, and is counted.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from grpo_jax import objective
from grpo_jax.devices import shard
from grpo_jax.metrics import Means
from grpo_jax.models import lora
from grpo_jax.training.logprobs import batch_logprobs
from grpo_jax.training.roles import by_role, role_weight
from grpo_jax.training.token_metrics import RATIO_MAX, policy_metrics, token_metrics
from grpo_jax.types import Leaf, TrajectoryBatch


@struct.dataclass
class TrainState:
    """What an optimizer step changes.

    Attributes:
      step: i32 [], optimizer updates made.
      adapters: the policy's adapters, float32; of a critic its parameters.
      opt_state: optax state over the adapters.
      key: PRNG key of LoRA dropout.
      critic: the state of the policy's critic, where it has one.
    """

    step: Leaf
    adapters: nnx.State | dict
    opt_state: optax.OptState
    key: Leaf
    critic: "TrainState | None" = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """Which loss: `kind` "policy" with the objective's choices, or "sft".

    `tis_cap` None: no importance weights of trainer over sampler. `on_policy` says
    that this is the only update on its rollout batch: old log-probs are then the new
    ones, detached, and no pass is spent on them. `role_weights`: see `training.roles`;
    `by_role` adds metrics by role.
    """

    kind: str
    temperature: float = 1.0
    ratio: str = "token"
    clip: str = "fixed"
    surrogate: str = "ppo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    aggregation: str = "token_mean"
    max_length: int | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    lld: float = 0.0
    lld_gate: str = "action"
    lld_normalization: str = "paper"
    lld_answer: str = "none"
    entropy: float = 0.0
    tis_cap: float | None = None
    tis_level: str = "token"
    tis_mode: str = "truncate"
    on_policy: bool = False
    remat: bool = False
    dropout: bool = False
    by_role: bool = False
    role_weights: tuple[float, ...] = ()


def new_state(
    adapters: nnx.State | dict, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """A state at step 0."""
    # Not jitted: the moments then take the layout of the adapters on the mesh.
    return TrainState(jnp.int32(0), adapters, optimizer.init(adapters), key)


def make_optimizer(
    learning_rate: float,
    *,
    warmup_steps: int,
    total_steps: int,
    schedule: str = "constant",
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    """AdamW with linear warm-up to `learning_rate`, then `schedule` to total_steps.

    Updates count from 1. Number k of the warm-up has k / warmup_steps of the peak; the
    decay begins at its last one (without warm-up, at update 1) and is 0 at total_steps.
    """
    warm = max(warmup_steps, 1)
    rest = max(total_steps - warm, 1)
    match schedule:
        case "constant":
            after = optax.constant_schedule(learning_rate)
        case "linear":
            after = optax.linear_schedule(learning_rate, 0.0, rest)
        case "cosine":
            after = optax.cosine_decay_schedule(learning_rate, rest)
        case _:
            raise ValueError(f"schedule {schedule!r}: constant, linear or cosine")

    def rate(count):
        number = count + 1
        rise = learning_rate * number / warm
        return jnp.where(number < warm, rise, after(number - warm))

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay),
    )


def place(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Move a packed batch to the devices, rows over the batch axis."""
    return _place(batch)


@jax.jit
def _place(batch):
    return jax.tree.map(lambda x: shard(x, "batch", "length"), batch)


@functools.partial(jax.jit, static_argnames=("graph", "temperature"))
def score(
    graph: nnx.GraphDef,
    adapters: nnx.State,
    base: nnx.State,
    batch: TrajectoryBatch,
    *,
    temperature: float,
) -> jax.Array:
    """Log-probs [B,T] of a batch's action tokens under some adapters, no dropout."""
    model = lora.merge(graph, adapters, base)
    return batch_logprobs(model, batch, temperature)[0]


@functools.partial(jax.jit, static_argnames="loss")
def divisors(batch: TrajectoryBatch, *, loss: Loss) -> dict[str, jax.Array]:
    """Weights of the loss terms on a micro-batch; add them up over a minibatch."""
    terms, _ = _terms(batch.old_logprobs, batch, loss)
    return {name: weight for name, (_, weight) in terms.items()}


@functools.partial(jax.jit, static_argnames=("graph", "loss"), donate_argnames="total")
def accumulate(
    graph: nnx.GraphDef,
    adapters: nnx.State,
    base: nnx.State,
    batch: TrajectoryBatch,
    weights: dict[str, jax.Array],
    total: nnx.State,
    key: jax.Array,
    *,
    loss: Loss,
) -> tuple[nnx.State, dict]:
    """Add a micro-batch's gradient to `total`; returns it and (sum, weight) metrics."""

    def objective_value(adapters):
        model = lora.merge(graph, adapters, base)
        dropout_key = key if loss.dropout else None
        logprobs, entropy = batch_logprobs(
            *(model, batch, loss.temperature),
            dropout_key=dropout_key,
            remat=loss.remat,
            entropy_slope=loss.entropy > 0,
        )
        terms, metrics = _terms(logprobs, batch, loss, entropy)
        parts = {k: v[0] / jnp.maximum(weights[k], 1.0) for k, v in terms.items()}
        value = sum(_coefficient(k, loss) * part for k, part in parts.items())
        more = token_metrics(entropy, batch, loss.by_role)
        if loss.kind == "policy":
            new = jax.lax.stop_gradient(logprobs)
            old = new if loss.on_policy else batch.old_logprobs
            more |= policy_metrics(new, old, batch, loss.ratio)
        return value, metrics | more | {"loss": (value, jnp.float32(1))}

    own, metrics = jax.grad(objective_value, has_aux=True)(adapters)
    return jax.tree.map(jnp.add, total, own), metrics


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def apply(
    state: TrainState, gradient: nnx.State | dict, *, optimizer
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer update; metrics grad_norm (before clipping) and update/skipped."""
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), gradient)
    updates, opt_state = optimizer.update(safe, state.opt_state, state.adapters)
    adapters = optax.apply_updates(state.adapters, updates)

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new = state.replace(
        step=state.step + 1,
        adapters=keep(adapters, state.adapters),
        opt_state=keep(opt_state, state.opt_state),
    )
    return new, {"grad_norm": norm, "update/skipped": 1.0 - finite}


def gradient(
    graph: nnx.GraphDef,
    base: nnx.State,
    state: TrainState,
    batches: Sequence[TrajectoryBatch],
    loss: Loss,
) -> tuple[nnx.State, list[dict]]:
    """The gradient of a minibatch, and the metrics of each of its micro-batches."""
    weights = added([divisors(batch, loss=loss) for batch in batches])
    total = jax.tree.map(jnp.zeros_like, state.adapters)
    pairs = []
    for index, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), index)
        total, metrics = accumulate(
            graph, state.adapters, base, batch, weights, total, key, loss=loss
        )
        pairs.append(metrics)
    return total, pairs


def minibatch(
    graph: nnx.GraphDef,
    base: nnx.State,
    state: TrainState,
    batches: Sequence[TrajectoryBatch],
    optimizer: optax.GradientTransformation,
    loss: Loss,
) -> tuple[TrainState, dict]:
    """One optimizer update over micro-batches, and its (sum, weight) metrics."""
    total, pairs = gradient(graph, base, state, batches, loss)
    state, last = apply(state, total, optimizer=optimizer)
    one = jnp.float32(1)
    # The loss is already divided by the whole minibatch's weight: parts add up.
    value = sum(metrics.pop("loss")[0] for metrics in pairs)
    for name in [
        name for name, pair in pairs[0].items() if not isinstance(pair, tuple)
    ]:
        # Pairwise: a stack would be a new program for every number of micro-batches.
        values = [metrics.pop(name) for metrics in pairs]
        last[name] = functools.reduce(jnp.maximum, values, jnp.float32(0))
    return state, added(pairs) | {
        "loss": (value, one),
        **{name: (number, one) for name, number in last.items()},
    }


def read(pairs: Sequence[dict]) -> dict[str, float]:
    """Fetch the metrics of several updates and divide each sum once.

    Of ratios the largest counts: in the first of several updates all of them are 1.
    """
    means, maxima = Means(), {}
    for metrics in jax.device_get(pairs):
        for name in [name for name in metrics if name.startswith(RATIO_MAX)]:
            maximum = float(metrics.pop(name)[0])
            maxima[name] = max(maximum, maxima.get(name, 0.0))
        means.update(metrics)
    # A bucket of positions that no trajectory reached has no ratio.
    return means.values() | {name: x for name, x in maxima.items() if x > 0}


def added(trees: Sequence[dict]) -> dict:
    """The sum of dicts of arrays."""
    return jax.tree.map(lambda *x: sum(x), *trees)


def _coefficient(term: str, loss: Loss) -> float:
    known = {"policy": 1.0, "sft": 1.0, "kl": loss.beta, "lld": loss.lld}
    known |= {"entropy": -loss.entropy}
    return known[term] if term in known else role_weight(term, loss.role_weights)


def _terms(logprobs, batch: TrajectoryBatch, loss: Loss, entropy=0.0):
    """{term: (sum, weight)} and the objective's own metrics."""
    mask = batch.action_mask
    if loss.kind == "sft":
        used = mask & jnp.isfinite(logprobs)
        terms = by_role(
            *("sft", batch, loss.role_weights),
            lambda among: objective.aggregate(-logprobs, used & among),
        )
        return terms, {}
    old = jax.lax.stop_gradient(logprobs) if loss.on_policy else batch.old_logprobs
    shared = dict(segment_ids=batch.segment_ids)
    scale = dict(aggregation=loss.aggregation, max_length=loss.max_length)

    def policy(among):
        return objective.policy_loss(
            logprobs,
            old,
            batch.advantages,
            mask,
            ratio=loss.ratio,
            clip=loss.clip,
            surrogate=loss.surrogate,
            epsilon=loss.epsilon,
            epsilon_high=loss.epsilon_high,
            dual_clip=loss.dual_clip,
            turn_ids=batch.turn_ids,
            tis_weights=_tis_weights(old, batch, loss),
            among=among,
            **scale,
            **shared,
        )

    parts = by_role("policy", batch, loss.role_weights, policy)
    terms = {name: (part.total, part.weight) for name, part in parts.items()}
    (part, *_) = parts.values()
    metrics = {
        f"{name}_mean" if name.startswith("clip_ratio/") else name: pair
        for name, pair in part.metrics.items()
    }
    if loss.beta:
        terms["kl"] = objective.kl_penalty(
            logprobs,
            batch.ref_logprobs,
            mask,
            estimator=loss.kl_estimator,
            **scale,
            **shared,
        )
        # Of the policy that sampled: both scored by one program, so that it is exactly
        # 0 for equal adapters.
        metrics["kl"] = objective.kl_penalty(
            batch.old_logprobs, batch.ref_logprobs, mask, **shared
        )
    if loss.entropy:
        entropy = jnp.broadcast_to(entropy, mask.shape)  # of a divisor: none is known
        terms["entropy"] = objective.entropy_bonus(entropy, mask, **scale, **shared)
    if loss.lld:
        terms["lld"] = objective.lld_penalty(
            logprobs,
            old,
            batch.outcome_advantages,
            mask,
            gate=loss.lld_gate,
            normalization=loss.lld_normalization,
            token_weights=None if loss.lld_answer == "none" else batch.lld_weights,
            **shared,
        )
        metrics["lld/loss"] = terms["lld"]
        metrics["lld/gate_rate"] = objective.lld_gate_rate(
            logprobs,
            old,
            batch.outcome_advantages,
            mask,
            gate=loss.lld_gate,
            **shared,
        )
    return terms, metrics


def _tis_weights(old, batch: TrajectoryBatch, loss: Loss):
    """Truncated importance weights, trainer over sampler; None when they are off."""
    if loss.tis_cap is None:
        return None
    return objective.tis_weights(
        old,
        batch.sampler_logprobs,
        batch.action_mask,
        cap=loss.tis_cap,
        level=loss.tis_level,
        mode=loss.tis_mode,
        segment_ids=batch.segment_ids,
    )
