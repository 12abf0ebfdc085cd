"""The two central structures: trajectories on the host, one packed batch on the device.

A `Trajectory` is an append-only list of segments whose source is known when each token
is born. `training.batching.collate` alone turns trajectories into `TrajectoryBatch`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import flax.struct
import numpy as np

from tools_env.protocol import Reward, Task, Turn

# A field of a pytree: an array of JAX or NumPy; under jax.tree.map anything, such as a
# shape, a sharding or None.
Leaf = Any


class Source(Enum):
    """Who wrote a segment's tokens."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one source.

    Attributes:
      source: MODEL holds exactly the sampled ids, its stop id included; template text
        belongs to PROMPT and TOOL.
      tokens: i32 [n].
      logprobs: f32 [n], the sampler's natural log-probs; zeros off MODEL.
    """

    source: Source
    tokens: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def given(cls, source: Source, tokens) -> "Segment":
        """A segment that nobody sampled."""
        tokens = np.asarray(tokens, np.int32)
        return cls(source, tokens, np.zeros(len(tokens), np.float32))


@dataclass
class Trajectory:
    """One rollout of one task.

    Attributes:
      task: what was asked.
      group: index of the task within the step; members of a group share it.
      member: index within the group.
      segments: the conversation, a PROMPT segment first.
      turns: the model's turns with the calls of each; turn j wrote MODEL segment j.
      stop: why it ended: "stop", "length", "turn_length", "max_calls" or "fault".
      reward: set once the environment has scored it.
      policy_step: RL steps that the policy which sampled it had made.
      state: what its session left for the reward, such as a stateful tool's objects.
      fault: how the infrastructure failed it; such a row has no reward. "": it did not.
      repeat: how often its task had been sampled again in its step (`draws`).
    """

    task: Task
    group: int
    member: int
    segments: list[Segment]
    turns: list[Turn] = field(default_factory=list)
    stop: str = ""
    reward: Reward | None = None
    policy_step: int = 0
    state: Any = None
    fault: str = ""
    repeat: int = 0

    @property
    def prompt(self) -> np.ndarray:
        return self.segments[0].tokens

    @property
    def answer(self) -> str:
        """Text of the last turn, or what the stop tool that it called returned."""
        if not self.turns:
            return ""
        last = self.turns[-1]
        return last.text if last.final is None else last.final

    @property
    def truncated(self) -> bool:
        """A limit ended it, not the model."""
        return self.stop not in ("stop", "fault")

    @property
    def completion_length(self) -> int:
        """MODEL and TOOL tokens."""
        return sum(len(segment.tokens) for segment in self.segments[1:])

    @property
    def calls(self):
        return [call for turn in self.turns for call in turn.calls]


@flax.struct.dataclass
class TrajectoryBatch:
    """Packed rows; every array is [B, T] and indexed by the token it describes.

    A row holds units: a prompt once, then the members of its group that fit. Members
    attend to their prompt and to themselves, never to each other.

    Attributes:
      tokens: i32.
      positions: i32, position within the token's own trajectory.
      segment_ids: i32, one id a prompt and one a member; 0 is padding.
      prefix_ids: i32, the segment that the token sees besides its own: a member's
        prompt; its own id elsewhere.
      previous: i32, index in the row of the token whose hidden state predicts this one.
      action_mask: bool, tokens that the model sampled and that carry loss.
      turn_ids: i32, turn within the trajectory (StepPO: step, which may be a part of a
        turn), -1 off action tokens.
      roles: i32, 1 for action tokens of a tool call, where a router tells them; else 0.
      sampler_logprobs: f32, what the sampler reported.
      old_logprobs: f32, the trainer's, before the first update on this batch.
      ref_logprobs: f32, of the KL reference.
      teacher_logprobs: f32, of the policy that also knows the answer; NaN without one.
      advantages: f32, of the token's turn.
      outcome_advantages: f32, of the token's trajectory; selects rows for LLD.
      lld_weights: f32, of the token in the likelihood-displacement penalty.
      old_values: f32, the critic's value of the token's step before the first update.
      returns: f32, what the critic should say there.
    """

    tokens: Leaf
    positions: Leaf
    segment_ids: Leaf
    prefix_ids: Leaf
    previous: Leaf
    action_mask: Leaf
    turn_ids: Leaf
    roles: Leaf
    sampler_logprobs: Leaf
    old_logprobs: Leaf
    ref_logprobs: Leaf
    teacher_logprobs: Leaf
    advantages: Leaf
    outcome_advantages: Leaf
    lld_weights: Leaf
    old_values: Leaf
    returns: Leaf
