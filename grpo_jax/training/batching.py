"""The only bridge from host to device: trajectories in, packed `TrajectoryBatch` out.

Rows have one fixed length, so every update runs the same compiled program. A row holds
units, each a prompt followed by those trajectories with this prompt that fit: it is
computed once for all of them.

    tokens       p p p a a a b b   two members a, b of one prompt p, then padding
    segment_ids  1 1 1 2 2 2 3 3
    prefix_ids   1 1 1 1 1 1 1 1   a and b see p besides themselves
    positions    0 1 2 3 4 5 3 4
    previous     0 0 1 2 3 4 2 6   b's first token is predicted from p's last
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.training.steps import token_steps
from grpo_jax.types import Source, Trajectory, TrajectoryBatch


@dataclasses.dataclass(frozen=True)
class Example:
    """A trajectory with what the objective says about it.

    Attributes:
      trajectory: the tokens.
      advantages: f32 [steps]; a step is a MODEL segment, unless `steps` says otherwise.
      outcome: the trajectory's own advantage.
      answer_weight: of its answer's tokens in the likelihood-displacement penalty.
      values, returns: f32 [steps], the critic's, if there is one.
      steps: i64 [MODEL and TOOL tokens], see `steps.token_steps`.
      teacher_logprobs: f32 [MODEL and TOOL tokens], the teacher's, if there is one.
    """

    trajectory: Trajectory
    advantages: np.ndarray
    outcome: float
    answer_weight: float = 1.0
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    steps: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None


FLOATS = (
    "sampler_logprobs",
    "advantages",
    "outcome_advantages",
    "lld_weights",
    "old_values",
    "returns",
    "teacher_logprobs",
)
Place = tuple[int, slice]  # row, counted over all batches, and tokens in it
Router = Callable[[np.ndarray], np.ndarray]  # a turn's tokens to their roles
# Examples to batches, and where each example's completion is.
Packer = Callable[[Sequence[Example]], tuple[list[TrajectoryBatch], list[Place]]]


def collate(
    examples: Sequence[Example],
    *,
    row_length: int,
    rows: int,
    router: Router | None = None,
) -> list[TrajectoryBatch]:
    """Pack examples into batches of `rows` rows (numpy; the last ones may be empty).

    `router` gives the roles of a turn's tokens (`rollout.roles`), None: all are 0.
    Raises ValueError for a trajectory longer than a row.
    """
    return pack(examples, row_length=row_length, rows=rows, router=router)[0]


def pack(
    examples: Sequence[Example],
    *,
    row_length: int,
    rows: int,
    router: Router | None = None,
) -> tuple[list[TrajectoryBatch], list[Place]]:
    """As `collate`, with where each example's completion is."""
    packed: list[_Row] = []
    places = []
    for example in examples:
        fits = (i for i, row in enumerate(packed) if row.cost(example) <= row.room)
        index = next(fits, len(packed))
        if index == len(packed):
            packed.append(_Row(row_length, router))
        places.append((index, packed[index].add(example)))
    count = max(-(-len(packed) // rows), 1)
    packed += [_Row(row_length, router) for _ in range(count * rows - len(packed))]
    batches = [
        _stack(packed[start : start + rows]) for start in range(0, len(packed), rows)
    ]
    return batches, places


def unpack(arrays: Sequence[np.ndarray], places: Sequence[Place]) -> list[np.ndarray]:
    """Of one [B,T] array a batch, each example's part: [MODEL and TOOL tokens]."""
    table = np.concatenate(arrays)
    return [table[place] for place in places]


class _Row:
    """A row being filled; `arrays` are the fields of a TrajectoryBatch, [T] each."""

    def __init__(self, length: int, router: Callable | None):
        self.length, self.router = length, router
        self.used = 0
        self.segments = 0
        self.prompts: dict[bytes, tuple[int, int, int]] = {}
        integers = dict.fromkeys(
            ("tokens", "positions", "segment_ids", "prefix_ids", "roles"), 0
        )
        self.arrays = {k: np.full(length, v, np.int32) for k, v in integers.items()}
        self.arrays["previous"] = np.zeros(length, np.int32)
        self.arrays["turn_ids"] = np.full(length, -1, np.int32)
        self.arrays["action_mask"] = np.zeros(length, bool)
        for name in FLOATS:
            self.arrays[name] = np.zeros(length, np.float32)

    @property
    def room(self) -> int:
        return self.length - self.used

    def cost(self, example: Example) -> int:
        """Tokens that the example would add."""
        trajectory = example.trajectory
        shared = _key(trajectory) in self.prompts
        return trajectory.completion_length + (not shared) * len(trajectory.prompt)

    def add(self, example: Example) -> slice:
        """Append the example, after its prompt if that is not here yet.

        Returns where its completion is.
        """
        trajectory = example.trajectory
        if self.cost(example) > self.room:
            raise ValueError(
                f"trajectory of task {trajectory.task.id} has "
                f"{self.cost(example)} tokens, a row {self.length}"
            )
        if _key(trajectory) not in self.prompts:
            self._add_prompt(trajectory)
        segment, length, last = self.prompts[_key(trajectory)]
        start = self.used
        self.segments += 1
        for piece in trajectory.segments[1:]:
            where = self._write(piece.tokens, self.segments, segment)
            self.arrays["sampler_logprobs"][where] = piece.logprobs
            if piece.source is Source.MODEL and self.router is not None:
                self.arrays["roles"][where] = self.router(piece.tokens)
        done = slice(start, self.used)
        self._write_steps(example, {k: v[done] for k, v in self.arrays.items()})
        if example.teacher_logprobs is not None:
            self.arrays["teacher_logprobs"][done] = example.teacher_logprobs
        own = np.arange(self.used - start)
        self.arrays["positions"][done] = length + own
        self.arrays["previous"][done] = start + own - 1
        if len(own):
            self.arrays["previous"][start] = last
        return done

    def _write_steps(self, example: Example, arrays: dict[str, np.ndarray]) -> None:
        """What the example says of its steps, in its part of the row."""
        steps = example.steps
        if steps is None:
            steps = token_steps(example.trajectory)
        live = steps >= 0
        arrays["turn_ids"][:] = steps
        arrays["action_mask"][:] = live
        arrays["outcome_advantages"][live] = example.outcome
        arrays["lld_weights"][live] = 1.0
        answer = _answer_length(example.trajectory)
        arrays["lld_weights"][len(live) - answer :] = example.answer_weight
        said = {
            "advantages": example.advantages,
            "old_values": example.values,
            "returns": example.returns,
        }
        for name, values in said.items():
            if values is not None:
                arrays[name][live] = values[steps[live]]

    def _add_prompt(self, trajectory: Trajectory) -> None:
        self.segments += 1
        start, segment = self.used, self.segments
        self._write(trajectory.prompt, segment, segment)
        own = np.arange(len(trajectory.prompt))
        self.arrays["positions"][start : self.used] = own
        self.arrays["previous"][start : self.used] = start + np.maximum(own - 1, 0)
        self.prompts[_key(trajectory)] = segment, len(own), self.used - 1

    def _write(self, tokens: np.ndarray, segment: int, prefix: int) -> slice:
        where = slice(self.used, self.used + len(tokens))
        self.arrays["tokens"][where] = tokens
        self.arrays["segment_ids"][where] = segment
        self.arrays["prefix_ids"][where] = prefix
        self.used += len(tokens)
        return where


def _answer_length(trajectory: Trajectory) -> int:
    """Tokens of the last turn if it calls nothing, else 0."""
    turns = trajectory.turns
    return 0 if not turns or turns[-1].calls else len(trajectory.segments[-1].tokens)


def _key(trajectory: Trajectory) -> bytes:
    """Trajectories with equal prompts share one, whichever group they are of."""
    return trajectory.prompt.tobytes()


def _stack(rows: Sequence[_Row]) -> TrajectoryBatch:
    fields = {k: np.stack([row.arrays[k] for row in rows]) for k in rows[0].arrays}
    blank = np.zeros_like(fields["advantages"])
    return TrajectoryBatch(**fields, old_logprobs=blank, ref_logprobs=blank)
