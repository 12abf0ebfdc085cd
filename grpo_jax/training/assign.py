"""Stage 6: the rewards of a rollout batch become an advantage for every turn.

In this order: penalties that belong to the objective join the rewards, groups that
teach nothing are dropped, advantages are taken over what is left, and rows that must
not be learned from (void turns, truncation) go last: their rewards count in their
group's statistics, their tokens carry no loss (SimpleTIR, arXiv 2509.02479).

A reward that abstained leaves both. What a turn earned is `Reward.turns`; the rest of
the total is the outcome and belongs to the last turn.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax import objective
from grpo_jax.training.batching import Example
from grpo_jax.training.steps import Router, judge
from grpo_jax.types import Source, Trajectory
from tools_env.protocol import EXECUTED
from tools_env.terms import needs_tool

# Estimators with an advantage a turn; the others have one a trajectory.
TURN_LEVEL = ("gtpo", "mt_grpo", "gigpo")
PASSING = 1.0 - 1e-6  # total that counts as solved where no maximum is declared


@dataclasses.dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, and which rows carry loss.

    Attributes:
      name: "grpo", "rloo", "ngrpo", "lead", "gtpo", "mt_grpo", "gigpo" or "steppo".
      num_generations: members of a group.
      num_virtual: ngrpo: virtual samples that earn their group's `Reward.maximum`.
      ddof, scale: of standard deviations; what divides (`objective.group_advantages`).
      max_turns: turns that there can be.
      has_tools: gtpo: the first turn must call where the task needs a tool.
      gamma: discount a turn: gtpo, gigpo and steppo.
      lam: steppo: GAE's lambda a step.
      router: steppo: roles that cut turns into steps; None: a turn is a step.
      norm_scope: gtpo: "group" or "batch".
      lld_answer: "none", or what weighs answers in the likelihood-displacement penalty
        (`objective.answer_weight`): "paper" or "code".
      turn_weight: mt_grpo and gigpo: of the turn's part beside the outcome's.
      format_penalty: gtpo: what a malformed turn loses.
      lead_alpha, lead_min_length, lead_unfinished: see `objective.lead_advantages`;
        what a truncated failure earns, where others earn -1.
      overlong_buffer, max_length: tokens of the soft penalty's slope, 0 for none, and
        where it ends.
      drop_flat: leave out groups whose total rewards are equal, bonuses and turn terms
        included, the overlong penalty not: nothing but length tells them apart.
      drop_saturated: leave out groups of perfect outcomes alone, whatever else joined.
      mask_truncated, mask_void: leave out rows.
    """

    name: str
    num_generations: int
    num_virtual: int = 1
    ddof: int = 1
    scale: str = "std"
    max_turns: int = 1
    has_tools: bool = False
    gamma: float = 0.9
    lam: float = 1.0
    router: Router | None = None
    norm_scope: str = "group"
    lld_answer: str = "none"
    turn_weight: float = 1.0
    format_penalty: float = 0.1
    lead_alpha: float = 0.05
    lead_min_length: float = 4000.0
    lead_unfinished: float = 0.0
    overlong_buffer: int = 0
    max_length: int = 1
    drop_flat: bool = False
    drop_saturated: bool = False
    mask_truncated: bool = False
    mask_void: bool = False

    def examples(
        self,
        trajectories: Sequence[Trajectory],
        values: Sequence[np.ndarray] | None = None,
    ) -> tuple[list[Example], dict[str, float]]:
        """Rows to learn from (trajectories task-major), and the filters' metrics.

        `values`: steppo: the critic's, before each MODEL and TOOL token.
        """
        raw = self._grid(trajectories, lambda t: t.reward.total or 0.0)
        valid = self._grid(trajectories, lambda t: t.reward.total is not None, bool)
        dropped, metrics = self._dropped(trajectories, raw, valid)
        use = valid & ~dropped[:, None]
        penalty = self._overlong(trajectories)
        if self.overlong_buffer:
            metrics["rewards/overlong/mean"] = float(penalty.mean())
        outcome = self._outcome(trajectories, raw + penalty, use)
        made = self._made(trajectories, penalty, outcome, use, values, metrics)
        zero = np.array([not one["advantages"].any() for one in made])
        metrics["frac_advantage_zero"] = float(zero.reshape(use.shape).all(1).mean())
        kept = use.ravel() & self._carries_loss(trajectories, metrics)
        weight = self._answer_weight(trajectories, metrics)
        examples = [
            Example(trajectory, outcome=one, answer_weight=weight, **fields)
            for trajectory, one, fields in zip(
                trajectories, outcome.ravel().tolist(), made, strict=True
            )
        ]
        return list(itertools.compress(examples, kept)), metrics

    def _made(self, trajectories, penalty, outcome, use, values, metrics) -> list[dict]:
        """Per trajectory the fields of an `Example` that the estimator says."""
        if self.name != "steppo":
            turns = self._turns(trajectories, penalty, outcome, use)
            rows = zip(turns.reshape(len(trajectories), -1), trajectories, strict=True)
            return [{"advantages": _smoothed(one, row)} for row, one in rows]
        made, more = judge(
            trajectories,
            self._earned(trajectories, penalty).reshape(len(trajectories), -1),
            use.ravel(),
            values,
            router=self.router,
            whiten=self.scale != "none",
            gamma=self.gamma,
            lam=self.lam,
        )
        metrics |= more
        return made

    def teaches(self, group: Sequence[Trajectory]) -> bool:
        """No group filter would drop this group."""
        raw = self._grid(group, lambda t: t.reward.total or 0.0)
        valid = self._grid(group, lambda t: t.reward.total is not None, bool)
        return not self._dropped(group, raw, valid)[0].any()

    def _grid(self, trajectories, value: Callable, dtype=np.float32) -> np.ndarray:
        """A value of each trajectory as [P,G]."""
        values = np.array([value(t) for t in trajectories], dtype)
        return values.reshape(-1, self.num_generations)

    def _dropped(self, trajectories, raw, valid) -> tuple[np.ndarray, dict[str, float]]:
        """Which groups leave statistics and loss [P], and the share of each kind."""
        dropped, metrics = np.zeros(len(raw), bool), {}
        if self.drop_flat:
            flat = np.asarray(objective.flat_groups(raw, valid))
            metrics["filter/flat_groups"] = float(flat.mean())
            dropped |= flat
        if self.drop_saturated:
            passed = self._grid(trajectories, solved, bool)
            full = np.asarray(objective.saturated_groups(passed, valid))
            metrics["filter/saturated_groups"] = float(full.mean())
            dropped |= full
        return dropped, metrics

    def _overlong(self, trajectories) -> np.ndarray:
        lengths = self._grid(trajectories, lambda t: t.completion_length)
        if not self.overlong_buffer:
            return np.zeros_like(lengths)
        penalty = objective.overlong_penalty(
            lengths, max_length=self.max_length, buffer=self.overlong_buffer
        )
        return np.asarray(penalty)

    def _outcome(self, trajectories, rewards, use) -> np.ndarray:
        """The trajectory's own advantage [P,G]; it selects the rows of the LLD."""
        match self.name:
            case "rloo":
                advantages = objective.rloo_advantages(rewards, use)
            case "lead":
                advantages = self._lead(trajectories, use)
            case _:
                best = None
                if self.name == "ngrpo":
                    groups = self._groups(trajectories)
                    best = np.array([_maximum(group) for group in groups], np.float32)
                advantages = objective.group_advantages(
                    rewards,
                    use,
                    virtual_reward=best,
                    num_virtual=self.num_virtual,
                    ddof=self.ddof,
                    scale=self.scale,
                )
        return np.asarray(advantages)

    def _lead(self, trajectories, use):
        return objective.lead_advantages(
            self._grid(
                trajectories, lambda t: self.lead_unfinished if t.truncated else -1.0
            ),
            self._grid(trajectories, solved, bool),
            self._grid(trajectories, lambda t: t.completion_length),
            use,
            alpha=self.lead_alpha,
            min_length=self.lead_min_length,
            ddof=self.ddof,
        )

    def _turns(self, trajectories, penalty, outcome, use) -> np.ndarray:
        """The advantage of every turn [P,G,M]."""
        mask = self._turn_mask(trajectories, use)
        if self.name not in TURN_LEVEL:
            return np.where(mask, outcome[..., None], np.float32(0))
        size = mask.shape[-1]
        if self.name == "mt_grpo":
            given = self._given(trajectories)
            turns = objective.mt_grpo_advantages(
                given, mask, outcome, turn_weight=self.turn_weight, ddof=self.ddof
            )
            return np.asarray(turns)
        rewards = self._earned(trajectories, penalty)
        options = {"gamma": self.gamma, "ddof": self.ddof}
        if self.name == "gtpo":
            faults = np.stack([self._malformed(t, size) for t in trajectories])
            rewards -= self.format_penalty * faults.reshape(rewards.shape)
            options |= {"norm_scope": self.norm_scope, "scale": self.scale}
            return np.asarray(objective.turn_advantages(rewards, mask, **options))
        states = np.stack(
            [_states(group, size) for group in self._groups(trajectories)]
        )
        turns = objective.gigpo_advantages(
            rewards,
            mask,
            states,
            outcome,
            turn_weight=self.turn_weight,
            scale=self.scale,
            **options,
        )
        return np.asarray(turns)

    def _turn_mask(self, trajectories, use) -> np.ndarray:
        """Turns that there are, of trajectories in use [P,G,M]."""
        counts = self._counts(trajectories)
        return (np.arange(self._size(counts)) < counts[..., None]) & use[..., None]

    def _counts(self, trajectories) -> np.ndarray:
        """Turns of each trajectory [P,G]."""
        return self._grid(trajectories, lambda t: len(t.turns), np.int32)

    def _size(self, counts: np.ndarray) -> int:
        """M, the same in every step."""
        return max(self.max_turns, int(counts.max()))

    def _given(self, trajectories) -> np.ndarray:
        """What turns earned for themselves [P,G,M]."""
        size = self._size(self._counts(trajectories))
        given = np.stack([_turn_rewards(t, size) for t in trajectories])
        return given.reshape(-1, self.num_generations, size)

    def _earned(self, trajectories, penalty) -> np.ndarray:
        """The same, with the rest of the total in the last turn [P,G,M]."""
        given = self._given(trajectories)
        totals = self._grid(trajectories, lambda t: t.reward.total or 0.0)
        last = np.arange(given.shape[-1]) == self._counts(trajectories)[..., None] - 1
        rest = totals - given.sum(axis=2) + penalty
        return given + np.where(last, rest[..., None], np.float32(0))

    def _malformed(self, trajectory: Trajectory, size: int) -> np.ndarray:
        """1 for a turn with an unreadable call, or an opening one without a call."""
        faults = np.zeros(size, np.float32)
        for j, turn in enumerate(trajectory.turns):
            faults[j] = any(call.status == "malformed" for call in turn.calls)
            if (
                j == 0
                and not turn.calls
                and needs_tool(trajectory.task, self.has_tools)
            ):
                faults[j] = 1.0
        return faults

    def _answer_weight(self, trajectories, metrics: dict[str, float]) -> float:
        """Of answers in the LLD, by the executed calls a trajectory of this batch."""
        if self.lld_answer == "none":
            return 1.0
        calls = sum(call.status in EXECUTED for t in trajectories for call in t.calls)
        weight = objective.answer_weight(
            calls / len(trajectories), form=self.lld_answer
        )
        metrics["lld/answer_weight"] = weight
        return weight

    def _carries_loss(self, trajectories, metrics: dict[str, float]) -> np.ndarray:
        """Rows that the row filters leave in the loss [B]; adds the share of others."""
        kept = np.ones(len(trajectories), bool)
        if self.mask_truncated:
            kept &= [not t.truncated for t in trajectories]
        if self.mask_void:
            void = np.array([is_void(t) for t in trajectories])
            metrics["filter/void_rows"] = float(void.mean())
            kept &= ~void
        return kept

    def _groups(self, trajectories) -> list[Sequence[Trajectory]]:
        size = self.num_generations
        return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]


def _smoothed(trajectory: Trajectory, row: np.ndarray) -> np.ndarray:
    """Its turns' advantages, less the more often its task was sampled again (VSPO)."""
    return row[: len(trajectory.turns)] / np.float32(1 + trajectory.repeat)


def solved(trajectory: Trajectory) -> bool:
    """It earned its outcome's maximum; 1 where none is declared."""
    reward = trajectory.reward
    if reward.passed is not None:
        return reward.passed
    return reward.total is not None and reward.total >= PASSING


def is_void(trajectory: Trajectory) -> bool:
    r"""A turn has neither a readable call nor an answer.

    The last turn answers when the model ended it with some text, and with a \boxed{}
    where the environment looks for one (its part `boxed`).
    """
    *earlier, last = trajectory.turns
    turns = [*earlier, last] if last.calls else earlier
    if any(all(c.status == "malformed" for c in turn.calls) for turn in turns):
        return True
    if last.calls:
        return False
    boxed = trajectory.reward.parts.get("boxed")
    if boxed is not None:
        return boxed == 0
    return trajectory.truncated or not trajectory.answer.strip()


def _turn_rewards(trajectory: Trajectory, size: int) -> np.ndarray:
    values = np.zeros(size, np.float32)
    if trajectory.reward.turns is not None:
        values[: len(trajectory.turns)] = trajectory.reward.turns
    return values


def _states(group: Sequence[Trajectory], size: int) -> np.ndarray:
    """Numbers of the observations that turns began with [G,M]; equal ones are equal.

    That is the prompt of the first turn, the tool results before the later ones.
    """
    seen: dict[bytes, int] = {}
    states = np.zeros((len(group), size), np.int32)
    for row, trajectory in zip(states, group, strict=True):
        turn, before = 0, b""
        for segment in trajectory.segments:
            if segment.source is Source.MODEL:
                row[turn] = seen.setdefault(before, len(seen))
                turn += 1
            else:
                before = segment.tokens.tobytes()
    return states


def _maximum(group: Sequence[Trajectory]) -> float:
    """What the members of a group could have earned; 0 where all of them abstain."""
    known = [t.reward.maximum for t in group if t.reward.total is not None]
    return known[0] if known else 0.0
