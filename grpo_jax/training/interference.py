"""Whether reasoning and tool calls pull the adapters in different directions.

DART (arXiv 2602.00994) reports about 90 degrees between the gradients of the two kinds
of tokens and under 30 within one kind. Random vectors of this size are at 90 degrees
too, so a cosine across roles says nothing without its control: both are taken here
between gradients of disjoint halves of the same trajectories. Routed adapters meet in
attention alone; their cosine across roles is near 0 by construction, and the one to
look at is that of a single adapter.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from grpo_jax.training import update
from grpo_jax.training.update import Loss, TrainState
from grpo_jax.types import TrajectoryBatch
from tools_env.roles import REASONING, TOOL

NAME = "roles/gradient_cosine"
# DART's analysis of interference (LEAS): which of six effects each of six models has,
# the first that of the base model, the last that of learning both together.
LEAS_DESIGN = (
    (1, 0, 0, 0, 0, 0),  # base
    (1, 0, 1, 0, 1, 0),  # trained on reasoning
    (1, 1, 0, 1, 0, 0),  # trained on tool calls
    (1, 1, 1, 1, 1, 1),  # trained on both
    (1, 1, 0, 0, 0, 0),  # tool calls of the hybrid
    (1, 0, 1, 0, 0, 0),  # reasoning of the hybrid
)


def interference_term(
    base: float, reasoning: float, tool: float, both: float, *, logits: bool = False
) -> float:
    """DART's interaction term both - tool - reasoning + base; negative: interference.

    Of the scores, 0 to 1, of four models on the same questions (`eval/...`), or of
    their logits, in which a score of 0 or 1 has no value (ValueError).
    """
    scores = (base, reasoning, tool, both)
    if logits:
        if not all(0 < score < 1 for score in scores):
            raise ValueError(f"logits need scores between 0 and 1; got {scores}")
        scores = tuple(math.log(score / (1 - score)) for score in scores)
    base, reasoning, tool, both = scores
    return both - tool - reasoning + base


def gradient_cosines(
    graph: nnx.GraphDef,
    base: nnx.State,
    state: TrainState,
    batches: Sequence[TrajectoryBatch],
    loss: Loss,
) -> dict[str, float]:
    """Cosines of the loss's gradients at the policy that sampled the batches.

    `roles/gradient_cosine/across` is the mean over (reasoning of one half, tool calls
    of the other) both ways, `.../reasoning` and `.../tool` are between the halves of
    one role. One with a gradient of zero is left out. Runs the compiled passes of the
    update, four times.
    """

    def half(role, number):
        chosen = [_only(b, i, role, number) for i, b in enumerate(batches)]
        return update.gradient(graph, base, state, chosen, loss)[0]

    reasoning = [half(REASONING, number) for number in range(2)]
    tool = [half(TOOL, number) for number in range(2)]
    pairs = {
        "across": [(reasoning[0], tool[1]), (reasoning[1], tool[0])],
        "reasoning": [reasoning],
        "tool": [tool],
    }
    cosines = {
        f"{NAME}/{name}": np.mean([float(_cosine(*pair)) for pair in those])
        for name, those in pairs.items()
    }
    return {name: float(x) for name, x in cosines.items() if np.isfinite(x)}


@jax.jit
def _only(batch: TrajectoryBatch, index, role, half) -> TrajectoryBatch:
    """The batch with the tokens of one role in every other trajectory.

    Neighbours in a row have consecutive segments; rows that hold one trajectory each
    take turns.
    """
    rows = index * batch.tokens.shape[0] + jnp.arange(batch.tokens.shape[0])
    own = (rows[:, None] + batch.segment_ids) % 2 == half
    mask = batch.action_mask & own & (batch.roles == role)
    return batch.replace(action_mask=mask)


@jax.jit
def _cosine(one: nnx.State, other: nnx.State) -> jax.Array:
    norms = optax.tree.norm(one) * optax.tree.norm(other)
    return optax.tree.vdot(one, other) / norms  # NaN where one of them is zero
