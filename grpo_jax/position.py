"""Where a run stands: what a checkpoint holds of it, and what it goes on from."""

import dataclasses

from flax import nnx

from grpo_jax.training.update import TrainState


@dataclasses.dataclass
class Position:
    """A run between two of its updates.

    Attributes:
      step: RL steps learned.
      state: the policy after them.
      reference: adapters of the KL reference.
      cursor: of the task stream after them.
      num_tokens: prefilled and sampled in them.
      values: metrics of the last step while they are not written yet, else None.
      cold_start: updates made of a cold start that is not over, else None.
      saved: the newest checkpoint holds just this.
    """

    step: int
    state: TrainState
    reference: nnx.State
    cursor: dict
    num_tokens: int = 0
    values: dict | None = None
    cold_start: int | None = None
    saved: bool = False

    @property
    def written(self) -> int:
        """Steps that stand in metrics.jsonl."""
        return self.step - (self.values is not None)
