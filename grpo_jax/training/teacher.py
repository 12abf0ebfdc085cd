"""The self-teacher of GEAR: the policy itself, with the answer in its prompt.

It reads what the policy sampled, behind a prompt that ends in the ground truth, and its
log-probs tell at which tokens knowing the answer would have mattered
(`objective.gear_weights`, whose definition is this project's own). No second model and
no gradient: two more scoring passes a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpo_jax import objective
from grpo_jax.config import BadInput
from grpo_jax.models import lora
from grpo_jax.rollout.chat import Chat
from grpo_jax.training.batching import Example, Packer, unpack
from grpo_jax.training.logprobs import batch_logprobs
from grpo_jax.training.roles import mean_pair
from grpo_jax.types import Segment, Source, TrajectoryBatch
from tools_env.protocol import Environment, Task

HINT = "A right solution, which your own need not repeat:"
Score = Callable[[TrajectoryBatch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Weights of tokens from a policy that knows the answer.

    Attributes:
      prompt: a task's prompt with its answer, i32 [n]; None: there is no answer.
      row_length: tokens of a packed row; what gets longer is not taught.
      temperature: of log-probs.
      divergence, entropy, kappa, low, high: see `objective.gear_weights`.
    """

    prompt: Callable[[Task], np.ndarray | None]
    row_length: int
    temperature: float
    divergence: float
    entropy: float
    kappa: float
    low: float
    high: float

    def taught(
        self, examples: Sequence[Example], score: Score, pack: Packer
    ) -> tuple[list[Example], dict[str, float]]:
        """The examples with the teacher's log-probs, NaN for those without a teacher.

        Also gear/taught, the share of those that have one.
        """
        known = [self._informed(example) for example in examples]
        rows = [example for example in known if example is not None]
        batches, places = pack(rows)
        tables = jax.device_get([score(batch) for batch in batches])
        found = iter(unpack(tables, places))
        whole = [
            dataclasses.replace(
                example,
                teacher_logprobs=_unknown(example) if row is None else next(found),
            )
            for example, row in zip(examples, known, strict=True)
        ]
        return whole, {"gear/taught": len(rows) / len(examples)} if examples else {}

    def weigh(
        self,
        graph: nnx.GraphDef,
        adapters: nnx.State,
        base: nnx.State,
        batch: TrajectoryBatch,
    ) -> tuple[TrajectoryBatch, dict]:
        """The batch with its advantages weighted, and (sum, weight) metrics."""
        names = ("divergence", "entropy", "kappa", "low", "high")
        options = {name: getattr(self, name) for name in names}
        return _weigh(
            *(graph, adapters, base, batch, options), temperature=self.temperature
        )

    def _informed(self, example: Example) -> Example | None:
        """The same completion after the teacher's prompt; None where it cannot be."""
        trajectory = example.trajectory
        prompt = self.prompt(trajectory.task)
        if prompt is None:
            return None
        if len(prompt) + trajectory.completion_length > self.row_length:
            return None
        segments = [Segment.given(Source.PROMPT, prompt), *trajectory.segments[1:]]
        informed = dataclasses.replace(trajectory, segments=segments)
        return dataclasses.replace(example, trajectory=informed)


def _unknown(example: Example) -> np.ndarray:
    return np.full(example.trajectory.completion_length, np.nan, np.float32)


@functools.partial(jax.jit, static_argnames=("graph", "temperature"))
def _weigh(graph, adapters, base, batch, options, *, temperature):
    model = lora.merge(graph, adapters, base)
    logprobs, entropies = batch_logprobs(model, batch, temperature)
    weights, anchors = objective.gear_weights(
        *(batch.teacher_logprobs, logprobs, entropies, batch.action_mask),
        segment_ids=batch.segment_ids,
        **options,
    )
    gap, count = mean_pair(
        jnp.abs(batch.teacher_logprobs - logprobs), batch.action_mask
    )
    metrics = {
        "gear/divergence": (gap, count),
        "gear/anchors": (jnp.sum(anchors).astype(jnp.float32), count),
    }
    return batch.replace(advantages=batch.advantages * weights), metrics


def informed_prompts(
    environment: Environment, chat: Chat
) -> Callable[[Task], np.ndarray | None]:
    """Prompts with the ground truth at the end of their last message.

    That is the column `answer` or else the assistant's part of the demonstration, of a
    column or the environment's own. Each task is asked for once.
    """
    # By object, kept beside it: the rows of a user may share an id, even a question.
    known: dict[int, tuple[Task, np.ndarray | None]] = {}

    def prompt(task: Task) -> np.ndarray | None:
        if id(task) not in known:
            known[id(task)] = task, _informed_prompt(task, environment, chat)
        return known[id(task)][1]

    return prompt


def _informed_prompt(task, environment, chat) -> np.ndarray | None:
    truth = ground_truth(task, environment)
    if truth is None:
        return None
    *before, last = task.prompt
    told = {**last, "content": f"{last['content']}\n\n{HINT}\n{truth}"}
    offered = chat.offering(task.columns.get("tools"))
    return np.asarray(offered.prompt([*before, told]), np.int32)


def ground_truth(task: Task, environment: Environment) -> str | None:
    """The right answer to a task as text, None where nobody knows it."""
    answer = task.columns.get("answer")
    if answer is not None:
        return str(answer)
    shown = task.columns.get("demonstration") or environment.demonstration(task)
    if not shown:
        return None
    said = [m["content"] for m in shown if m["role"] == "assistant"]
    return "\n".join(said)


def check_ground_truth(tasks: Sequence[Task], environment: Environment) -> None:
    """BadInput where no task has an answer to teach from."""
    if all(ground_truth(task, environment) is None for task in tasks):
        raise BadInput(
            "objective.token_weights='gear' needs right answers, but no training task "
            "has one: give a column 'answer' or 'demonstration'"
        )
