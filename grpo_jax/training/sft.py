"""The cold start: supervised learning on gold trajectories, same rows, same update.

A demonstration becomes a `Trajectory` whose MODEL segments are the gold turns, stop
token included; tool results stand between them, masked, as in a rollout.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
import optax
from flax import nnx

from grpo_jax.config import BadInput
from grpo_jax.models import lora
from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.roles import Router
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate
from grpo_jax.training.update import Loss, TrainState
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Environment, Task, Turn

LOG = logging.getLogger(__name__)
_STREAM = 3  # random stream of dropout here; the RL loop has 0 to 2 of the same seed
_SHOWN = 5  # bad demonstrations that are named one by one


def gold_examples(
    environment: Environment,
    chat: Chat,
    tasks: Sequence[Task],
    *,
    max_length: int,
    min_tool_calls: int = 0,
    own_tools: bool = False,
    strict: bool = False,
) -> list[Example]:
    """The demonstrations that exist, fit into max_length tokens and call often enough.

    A task's column `demonstration` comes before what the environment would show; what
    that shows is joined over tasks until it has `min_tool_calls`. With `own_tools` a
    task that has a column `tools` is shown with those in its prompt. What the chat
    template refuses is named and skipped, or BadInput when `strict`.
    """
    examples, bad, skipped = [], [], Counter()
    shown = [(t, _demonstration(environment, t)) for t in tasks]
    skipped["without a gold answer"] = sum(gold is None for _, gold in shown)
    for group, (task, gold) in enumerate(_joined(shown, min_tool_calls)):
        trajectory = Trajectory(task, group, 0, [], _turns(gold))
        if len(trajectory.calls) < min_tool_calls:
            skipped[f"with fewer than {min_tool_calls} tool calls"] += 1
            continue
        own = own_tools and "tools" in task.columns
        try:
            tools = task.columns.get("tools")
            used = chat.with_tools(tools) if own else chat.offering(tools)
            trajectory.segments = _segments(used, task.prompt, gold)
        except ValueError as error:
            bad.append(f"{task.id}: {error}")
            continue
        if sum(len(segment.tokens) for segment in trajectory.segments) > max_length:
            skipped[f"longer than {max_length} tokens"] += 1
            continue
        turns = sum(segment.source is Source.MODEL for segment in trajectory.segments)
        examples.append(Example(trajectory, np.ones(turns, np.float32), 1.0))
    if bad and strict:
        raise BadInput(f"cold start: {bad[0]}")
    _report(skipped, bad)
    return share_prefix(examples)


def _demonstration(environment: Environment, task: Task) -> list[dict] | None:
    return task.columns.get("demonstration") or environment.demonstration(task)


def _joined(
    shown: Iterable[tuple[Task, list[dict] | None]], min_tool_calls: int
) -> Iterator[tuple[Task, list[dict]]]:
    """Gold conversations; an environment's own run on until they have enough calls.

    The next task's question follows the answer to the last one, so that the model calls
    its tool behind many results already (ASTER's interaction-dense cold start, arXiv
    2602.01204, has trajectories of more than nine calls; joining questions is this
    project's own way to make some). A remainder with too few calls comes last.
    """
    first, messages, calls = None, [], 0
    for task, gold in shown:
        if gold is None:
            continue
        if task.columns.get("demonstration"):
            yield task, gold
            continue
        question = [m for m in task.prompt if m["role"] != "system"]
        messages += gold if first is None else [*question, *gold]
        first = first or task
        calls += sum(m["role"] == "tool" for m in gold)
        if calls >= min_tool_calls:
            yield first, messages
            first, messages, calls = None, [], 0
    if first is not None:
        yield first, messages


def _turns(gold: Sequence[dict]) -> list[Turn]:
    """The model's turns; a result that follows one is a call of it."""
    turns = []
    for message in gold:
        if message["role"] == "assistant":
            turns.append(Turn(message.get("content") or ""))
        elif message["role"] == "tool" and turns:
            result = str(message.get("content") or "")
            name = message.get("name") or ""
            turns[-1].calls.append(CallRecord(name, None, "ok", result))
    return turns


def share_prefix(examples: Sequence[Example]) -> list[Example]:
    """Cut every prompt where the examples begin to differ.

    What comes before, the system prompt as a rule, is then the first segment of all of
    them, and packing computes it once a row instead of once an example.
    """
    prompts = [example.trajectory.prompt for example in examples]
    shortest = min((len(prompt) for prompt in prompts), default=0)
    columns = np.array([prompt[:shortest] for prompt in prompts]).reshape(
        len(prompts), shortest
    )
    equal = np.all(columns == columns[:1], axis=0)
    common = int(np.argmin(np.append(equal, False)))
    return [
        dataclasses.replace(e, trajectory=_cut_prompt(e.trajectory, common))
        for e in examples
    ]


def _cut_prompt(trajectory: Trajectory, length: int) -> Trajectory:
    """The same tokens with the prompt in two segments, of which neither is empty."""
    tokens = trajectory.prompt
    parts = [tokens[:length], tokens[length:]]
    segments = [Segment.given(Source.PROMPT, part) for part in parts if len(part)]
    return dataclasses.replace(
        trajectory, segments=[*segments, *trajectory.segments[1:]]
    )


def _segments(chat: Chat, prompt: list[dict], gold: list[dict]) -> list[Segment]:
    pieces = chat.demonstration([*prompt, *gold], num_prompt_messages=len(prompt))
    return [Segment.given(Source(source), ids) for source, ids in pieces]


def _report(skipped: Counter, bad: list[str]) -> None:
    reasons = [f"{number} {why}" for why, number in skipped.items() if number]
    if reasons:
        LOG.warning("cold start: left out %s", ", ".join(reasons))
    for line in bad[:_SHOWN]:
        LOG.warning("cold start: skipped %s", line)
    if bad:
        LOG.warning("cold start: skipped %d tasks that cannot be rendered", len(bad))


def new_state(
    adapters: nnx.State, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """A cold start before its first update; `adapters` are left alone."""
    key = jax.random.fold_in(jax.random.key(seed), _STREAM)
    return update.new_state(lora.copy(adapters), optimizer, key)


def updates(
    graph: nnx.GraphDef,
    base: nnx.State,
    state: TrainState,
    examples: Sequence[Example],
    optimizer: optax.GradientTransformation,
    *,
    loss: Loss,
    num_epochs: int,
    batch_size: int,
    row_length: int,
    rows: int,
    seed: int,
    done: int = 0,
    router: Router | None = None,
) -> Iterator[tuple[TrainState, dict[str, float]]]:
    """Fit the adapters to the examples: the state after each update, and its metrics.

    The next update consumes the state. `done` updates were made before `state`: what
    follows is what would have followed then.
    """
    order = np.random.default_rng(seed)
    number = 0
    for epoch in range(num_epochs):
        shuffled = order.permutation(len(examples))
        for start in range(0, len(examples), batch_size):
            number += 1
            if number <= done:
                continue
            chosen = [examples[i] for i in shuffled[start : start + batch_size]]
            packed = collate(chosen, row_length=row_length, rows=rows, router=router)
            batches = [update.place(batch) for batch in packed]
            state, pairs = update.minibatch(
                graph, base, state, batches, optimizer, loss
            )
            seen = (start + len(chosen)) / len(examples)
            calls = sum(len(example.trajectory.calls) for example in chosen)
            density = {"tools/call_frequency": calls / len(chosen)}
            yield state, update.read([pairs]) | density | {"epoch": epoch + seen}


def total_steps(num_examples: int, batch_size: int, num_epochs: int) -> int:
    """Updates of a cold start."""
    return num_epochs * -(-num_examples // batch_size)
