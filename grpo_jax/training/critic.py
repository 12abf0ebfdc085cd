"""StepPO's critic (arXiv 2604.18401): what a trajectory will still earn, step by step.

    V_k = w . hidden + b    at the last token before step k, and 0 after the last step

A set of adapters of its own on the policy's base model, a copy of those that RL began
with, and a linear head that starts at 0; its own optimizer trains both. The paper's
public code takes a second model of the same weights. Of a step
(`training.steps`) the loss takes the beginning alone, as there, and it is clipped as in
verl, which that code is built on. No dropout.

Values are read before the first update on a rollout batch. Every update of the policy
is then followed by one of the critic, on the same rows.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from grpo_jax import objective
from grpo_jax.devices import shard
from grpo_jax.models import lora
from grpo_jax.objective.scans import changes
from grpo_jax.training import update
from grpo_jax.training.batching import Example, Packer, unpack
from grpo_jax.training.logprobs import predicting_hidden
from grpo_jax.training.update import TrainState
from grpo_jax.types import Trajectory, TrajectoryBatch


@dataclasses.dataclass(frozen=True)
class Critic:
    """How a critic reads values and learns them; its parameters are a `TrainState`.

    Attributes:
      graph, base: the decoder without adapters.
      optimizer: over adapters and head.
      clip: how far a value may usefully move in a step's updates; 0: anywhere.
      remat: recompute layers in the backward pass.
    """

    graph: nnx.GraphDef
    base: nnx.State
    optimizer: optax.GradientTransformation
    clip: float
    remat: bool

    def new_state(self, adapters: nnx.State, key: jax.Array) -> TrainState:
        """A critic whose values are all 0, around a copy of some adapters."""
        width = lora.merge(self.graph, adapters, self.base).config.width
        head = {"kernel": jnp.zeros(width), "bias": jnp.zeros(())}
        parameters = {"adapters": lora.copy(adapters), "head": head}
        # A key of its own: a buffer in two places of a state cannot be donated.
        key = jax.random.fold_in(key, 1)
        return update.new_state(parameters, self.optimizer, key)

    def values(
        self, state: TrainState, trajectories: Sequence[Trajectory], pack: Packer
    ) -> list[np.ndarray]:
        """Values before every MODEL and TOOL token: f32 [tokens] a trajectory."""
        rows = [Example(t, np.zeros(len(t.segments)), 0.0) for t in trajectories]
        batches, places = pack(rows)
        tables = [self.score(state, batch) for batch in batches]
        return unpack(jax.device_get(tables), places)

    def score(self, state: TrainState, batch: TrajectoryBatch) -> jax.Array:
        """Values [B,T] before every token, the same on all devices."""
        return _score(self.graph, state.adapters, self.base, batch)

    def update(
        self, state: TrainState, batches: Sequence[TrajectoryBatch]
    ) -> tuple[TrainState, dict]:
        """One optimizer update over micro-batches, and its (sum, weight) metrics."""
        steps = sum(_count_steps(batch) for batch in batches)
        total = jax.tree.map(jnp.zeros_like, state.adapters)
        pairs = []
        for batch in batches:
            total, metrics = _accumulate(
                *(self.graph, state.adapters, self.base, batch, steps, total),
                clip=self.clip,
                remat=self.remat,
            )
            pairs.append(metrics)
        state, last = update.apply(state, total, optimizer=self.optimizer)
        one = jnp.float32(1)
        return state, update.added(pairs) | {
            "critic/grad_norm": (last["grad_norm"], one),
            "critic/skipped": (last["update/skipped"], one),
        }


def step_starts(batch: TrajectoryBatch) -> Bool[Array, "B T"]:
    """The first token of every step."""
    new = changes(batch.turn_ids) | changes(batch.segment_ids)
    return batch.action_mask & new


def _values(graph, parameters, base, batch, remat=False) -> Float[Array, "B T"]:
    model = lora.merge(graph, parameters["adapters"], base)
    hidden = predicting_hidden(model, batch, remat=remat).astype(jnp.float32)
    head = parameters["head"]
    return hidden @ head["kernel"] + head["bias"]


@functools.partial(jax.jit, static_argnames="graph")
def _score(graph, parameters, base, batch):
    return shard(_values(graph, parameters, base, batch), None, None)


@jax.jit
def _count_steps(batch):
    return jnp.sum(step_starts(batch)).astype(jnp.float32)


@functools.partial(
    jax.jit, static_argnames=("graph", "clip", "remat"), donate_argnames="total"
)
def _accumulate(graph, parameters, base, batch, steps, total, *, clip, remat):
    """Add a micro-batch's gradient of the mean over all `steps` to `total`."""

    def loss(parameters):
        (error, count), clipped = objective.value_loss(
            _values(graph, parameters, base, batch, remat),
            batch.old_values,
            batch.returns,
            step_starts(batch),
            clip=clip,
        )
        metrics = {"critic/loss": (error, count), "critic/clip_ratio": clipped}
        return error / jnp.maximum(steps, 1.0), metrics

    gradient, metrics = jax.grad(loss, has_aux=True)(parameters)
    return jax.tree.map(jnp.add, total, gradient), metrics
