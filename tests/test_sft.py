"""The cold start's training: the loss falls, the gold answer becomes likely."""

import itertools

import jax
import numpy as np
import pytest
from toy import ToyEnvironment
from trajectories import tiny_batches, tiny_parts

from grpo_jax import models
from grpo_jax.rollout.chat import Chat
from grpo_jax.training import sft, update
from grpo_jax.training.update import Loss
from grpo_jax.types import Source
from tools_env.protocol import Task

LENGTH, ROWS = 128, 4
OPTIMIZER = update.make_optimizer(1e-2, warmup_steps=1, total_steps=99)


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


@pytest.fixture(scope="module")
def examples():
    tasks = [Task(str(i), [{"role": "user", "content": f"say {i}"}]) for i in range(6)]
    chat = Chat(models.load_tokenizer("tiny"))
    return sft.gold_examples(ToyEnvironment(), chat, tasks, max_length=LENGTH)


def train(parts, examples, **options):
    """Adapters after the last update, and the metrics of each."""
    options = dict(num_epochs=4, batch_size=4) | options
    start = sft.new_state(parts[1], OPTIMIZER, seed=0)
    seen = list(updates(parts, examples, start, **options))
    return seen[-1][0].adapters, [values for _, values in seen]


def updates(parts, examples, state, **options):
    graph, _, base = parts
    fixed = dict(loss=Loss("sft"), row_length=LENGTH, rows=ROWS, seed=0)
    return sft.updates(graph, base, state, examples, OPTIMIZER, **fixed, **options)


@pytest.fixture(scope="module")
def trained(parts, examples):
    return train(parts, examples)


def test_gold_examples_end_with_the_end_of_turn(examples):
    tokenizer = models.load_tokenizer("tiny")
    for example in examples:
        model = [s for s in example.trajectory.segments if s.source is Source.MODEL]
        assert [tokenizer.decode(s.tokens) for s in model] == ["aeiou<|im_end|>"]


def test_loss_falls_and_the_gold_answer_becomes_likely(parts, examples, trained):
    graph, before, base = parts
    after, rows = trained
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    epochs = [values["epoch"] for values in rows]
    assert len(epochs) == 8
    np.testing.assert_allclose(epochs[:4], [4 / 6, 1, 1 + 4 / 6, 2])
    (batch,) = tiny_batches(examples, LENGTH, ROWS)
    scores = [
        np.sum(update.score(graph, a, base, batch, temperature=1.0))
        for a in (before, after)
    ]
    assert scores[1] > scores[0] + 20


def test_first_loss_is_the_mean_over_gold_tokens(parts, examples):
    """All examples in one update: minus the mean log-prob that `score` gives."""
    graph, adapters, base = parts
    (batch,) = tiny_batches(examples, LENGTH, ROWS)
    logprobs = np.asarray(update.score(graph, adapters, base, batch, temperature=1.0))
    _, rows = train(parts, examples, num_epochs=1, batch_size=6)
    mask = np.asarray(batch.action_mask)
    assert mask.sum() == 6 * len("aeiou.")  # and the end of turn
    np.testing.assert_allclose(rows[0]["loss"], -logprobs[mask].mean(), rtol=1e-5)


def test_same_seed_same_adapters_and_the_start_is_left_alone(parts, examples, trained):
    kept = [np.array(x) for x in jax.tree.leaves(parts[1])]
    again, rows = train(parts, examples)
    for x, y in zip(*map(jax.tree.leaves, (again, trained[0])), strict=True):
        np.testing.assert_array_equal(x, y)
    assert rows == trained[1]
    for x, y in zip(kept, jax.tree.leaves(parts[1]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_CK1_taken_up_after_any_update_it_goes_on_the_same(parts, examples, trained):
    options = dict(num_epochs=4, batch_size=4)
    for done in (1, 3, 7):
        start = sft.new_state(parts[1], OPTIMIZER, seed=0)
        first = updates(parts, examples, start, **options)
        middle, _ = list(itertools.islice(first, done))[-1]
        rest = list(updates(parts, examples, middle, done=done, **options))
        assert [values for _, values in rest] == trained[1][done:]
        leaves = map(jax.tree.leaves, (rest[-1][0].adapters, trained[0]))
        for x, y in zip(*leaves, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("examples", "batch", "epochs", "steps"), [(8, 4, 1, 2), (9, 4, 3, 9), (1, 8, 2, 2)]
)
def test_number_of_updates(examples, batch, epochs, steps):
    assert sft.total_steps(examples, batch, epochs) == steps


def test_nothing_that_fits_is_no_error(examples):
    assert sft.share_prefix([]) == []
    assert len(sft.share_prefix(examples)) == len(examples)
