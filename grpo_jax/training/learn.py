"""Stages 4 to 7 of a step: trajectories and rewards in, a better policy out.

Advantage, batch, re-score, update, in this order.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
import optax
from flax import nnx

from grpo_jax.models import lora
from grpo_jax.rollout.roles import Router
from grpo_jax.training import update
from grpo_jax.training.assign import Estimator
from grpo_jax.training.batching import Example, Place, pack
from grpo_jax.training.critic import Critic
from grpo_jax.training.interference import gradient_cosines
from grpo_jax.training.teacher import Teacher
from grpo_jax.training.update import Loss, TrainState
from grpo_jax.types import Trajectory, TrajectoryBatch
from grpo_jax.watch import timed


@dataclasses.dataclass(frozen=True)
class Learner:
    """Updates of one run.

    Attributes:
      graph, base: the decoder without adapters.
      optimizer: over the adapters.
      loss: the objective's choices.
      estimator: how rewards become advantages, and which rows carry loss.
      reference: "start" (the adapters RL began with) or "base" (none).
      num_minibatches: optimizer updates a pass over a rollout batch.
      num_iterations: passes.
      row_length: tokens of a packed row.
      rows: packed rows of a micro-batch.
      critic: what tells the estimator the values of states; None: it asks for none.
      teacher: what weighs advantages token by token; None: nothing does.
      router: tells the roles of tokens where something depends on them.
      role_gradients_every: steps between measurements of the angle between the roles'
        gradients; 0: never.
    """

    graph: nnx.GraphDef
    base: nnx.State
    optimizer: optax.GradientTransformation
    loss: Loss
    estimator: Estimator
    reference: str
    num_minibatches: int
    num_iterations: int
    row_length: int
    rows: int
    critic: Critic | None = None
    teacher: Teacher | None = None
    router: Router | None = None
    role_gradients_every: int = 0

    def new_state(self, adapters: nnx.State, key: jax.Array) -> TrainState:
        """A state at step 0, around copies of some adapters."""
        state = update.new_state(lora.copy(adapters), self.optimizer, key)
        if self.critic is None:
            return state
        return state.replace(critic=self.critic.new_state(adapters, key))

    def learn(
        self,
        state: TrainState,
        reference: nnx.State,
        trajectories: Sequence[Trajectory],
    ) -> tuple[TrainState, dict[str, float]]:
        """Every update on one rollout batch, and their metrics."""
        known = None
        if self.critic is not None:
            known = self.critic.values(state.critic, trajectories, self._pack)
        examples, values = self.estimator.examples(trajectories, known)
        with timed(values, "score"):
            if self.teacher is not None:
                score = functools.partial(self._score, state.adapters)
                examples, more = self.teacher.taught(examples, score, self._pack)
                values |= more
            # A minibatch that lost its rows makes no update: AdamW would move anyway.
            minibatches = [
                self._scored(state, reference, self._collate(part))
                for part in split_groups(examples, self.num_minibatches)
                if part
            ]
            if self.role_gradients_every and minibatches:
                if (trajectories[0].policy_step + 1) % self.role_gradients_every == 0:
                    values |= self._cosines(state, minibatches)
            jax.block_until_ready(minibatches)
        pairs = []
        with timed(values, "update"):
            if self.teacher is not None:
                minibatches = [
                    self._weighed(state, part, pairs) for part in minibatches
                ]
            for _ in range(self.num_iterations):
                for batches in minibatches:
                    state, metrics = self._update(state, batches)
                    pairs.append(metrics)
            learned = update.read(pairs)
        return state, values | learned

    def warm_up(self, state: TrainState, reference: nnx.State) -> None:
        """Compile every program of `learn` on an empty batch; `state` is left alone."""
        copy = jax.tree.map(lambda x: x.copy(), state)
        batches = self._collate([])
        if self.critic is not None:
            self.critic.score(state.critic, batches[0])
        batches = self._scored(state, reference, batches)
        if self.role_gradients_every:
            self._cosines(state, [batches])
        if self.teacher is not None:
            batches = self._weighed(state, batches, [])
        self._update(copy, batches)

    def _cosines(self, state, minibatches) -> dict[str, float]:
        batches = [batch for part in minibatches for batch in part]
        return gradient_cosines(self.graph, self.base, state, batches, self.loss)

    def _collate(self, examples: Sequence[Example]) -> list[TrajectoryBatch]:
        return self._pack(examples)[0]

    def _pack(
        self, examples: Sequence[Example]
    ) -> tuple[list[TrajectoryBatch], list[Place]]:
        """Examples on the devices, and where the completion of each is."""
        batches, places = pack(
            examples, row_length=self.row_length, rows=self.rows, router=self.router
        )
        return [update.place(batch) for batch in batches], places

    def _scored(self, state, reference, batches) -> list[TrajectoryBatch]:
        """Fill in old and reference log-probs where the loss asks for them."""
        if not self.loss.on_policy:
            batches = [
                b.replace(old_logprobs=self._score(state.adapters, b)) for b in batches
            ]
        if self.loss.beta:
            anchor = lora.zeros(reference) if self.reference == "base" else reference
            batches = [b.replace(ref_logprobs=self._score(anchor, b)) for b in batches]
        return batches

    def _weighed(self, state, batches, pairs: list[dict]) -> list[TrajectoryBatch]:
        """Batches with the teacher's weights; adds the metrics to `pairs`."""
        weigh, weighed = self.teacher.weigh, []
        for batch in batches:
            batch, metrics = weigh(self.graph, state.adapters, self.base, batch)
            weighed.append(batch)
            pairs.append(metrics)
        return weighed

    def _score(self, adapters: nnx.State, batch: TrajectoryBatch) -> jax.Array:
        return update.score(
            self.graph,
            adapters,
            self.base,
            batch,
            temperature=self.loss.temperature,
        )

    def _update(self, state, batches) -> tuple[TrainState, dict]:
        state, metrics = update.minibatch(
            self.graph, self.base, state, batches, self.optimizer, self.loss
        )
        if self.critic is None:
            return state, metrics
        critic, more = self.critic.update(state.critic, batches)
        return state.replace(critic=critic), metrics | more


def split_groups(examples: Sequence[Example], parts: int) -> list[list[Example]]:
    """Cut into `parts` minibatches of whole groups, in order; some may be empty."""
    groups: dict[int, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.trajectory.group, []).append(example)
    ordered = list(groups.values())
    chunks = np.array_split(np.arange(len(ordered)), parts)
    return [[e for i in chunk for e in ordered[i]] for chunk in chunks]
