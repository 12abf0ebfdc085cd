"""Packing: what each token sees, where it is predicted from, and that nothing changes.

The reference is always the trajectory alone: its own tokens in order, and for the model
`model(tokens)`, which knows nothing of packing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trajectories import (
    all_tokens,
    per_token,
    random_examples,
    tiny_parts,
    trajectory,
)

from grpo_jax.models import lora
from grpo_jax.models.blockwise import Packing
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate, pack, unpack
from grpo_jax.training.logprobs import batch_logprobs
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Task, Turn

LENGTH, ROWS = 96, 4


def segments(*pieces):
    """Segments from (source, ids) pairs."""
    return [
        Segment(source, np.array(ids, np.int32), np.zeros(len(ids), np.float32))
        for source, ids in pieces
    ]


def example(pieces, group=0, advantages=(1.0,)):
    one = Trajectory(Task("t", [], {}), group, 0, segments(*pieces))
    return Example(one, np.asarray(advantages, np.float32), 2.0)


@pytest.mark.parametrize("calls", [0, 1])
def test_answer_weight_is_of_the_last_turn_if_it_calls_nothing(calls):
    pieces = [(Source.PROMPT, [1]), (Source.MODEL, [2, 3]), (Source.TOOL, [4])]
    one = example([*pieces, (Source.MODEL, [5, 6])], advantages=(1.0, 1.0))
    call = CallRecord("t", {}, "ok", "")
    one.trajectory.turns += [Turn("", [call]), Turn("a", [call] * calls)]
    one = dataclasses.replace(one, answer_weight=0.25)
    (batch,) = collate([one, example(pieces[:2])], row_length=12, rows=1)
    last = 1.0 if calls else 0.25
    expected = [0, 1, 1, 0, last, last, 1, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(batch.lld_weights[0], np.float32(expected))


def test_layout_of_the_module_docstring():
    p, a, b = [10, 11, 12], [20, 21, 22], [30, 31]
    (batch,) = collate(
        [
            example([(Source.PROMPT, p), (Source.MODEL, a)]),
            example([(Source.PROMPT, p), (Source.MODEL, b)]),
        ],
        row_length=10,
        rows=1,
    )
    expected = {
        "tokens": p + a + b + [0, 0],
        "segment_ids": [1, 1, 1, 2, 2, 2, 3, 3, 0, 0],
        "prefix_ids": [1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        "positions": [0, 1, 2, 3, 4, 5, 3, 4, 0, 0],
        "previous": [0, 0, 1, 2, 3, 4, 2, 6, 0, 0],
        "turn_ids": [-1] * 3 + [0] * 5 + [-1] * 2,
        "action_mask": [False] * 3 + [True] * 5 + [False] * 2,
    }
    for name, values in expected.items():
        assert getattr(batch, name)[0].tolist() == values, name


def test_turns_tools_and_advantages():
    pieces = [
        (Source.PROMPT, [1, 2]),
        (Source.MODEL, [3, 4]),
        (Source.TOOL, [5, 6, 7]),
        (Source.MODEL, [8]),
    ]
    (batch,) = collate([example(pieces, advantages=[0.5, -0.5])], row_length=9, rows=1)
    assert batch.action_mask[0].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, 0, -1, -1, -1, 1, -1]
    assert batch.advantages[0].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, -0.5, 0]
    assert batch.outcome_advantages[0].tolist() == [0, 0, 2, 2, 0, 0, 0, 2, 0]


def test_ST1_sampled_end_tokens_count_whatever_their_id():
    """pad = eos = 9, a second end id 8; the prompt holds a 9 too."""
    sampled = [[4, 5, 9], [6, 8], [4, 4, 4, 4, 4]]
    rows = [
        collate(
            [example([(Source.PROMPT, [9, 1]), (Source.MODEL, ids)])],
            row_length=7,
            rows=1,
        )[0]
        for ids in sampled
    ]
    masks = [row.action_mask[0, 2:].tolist() for row in rows]
    assert masks == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    for row, ids in zip(rows, sampled, strict=True):
        sees = np.asarray(sees_of(row))[0]
        used = 2 + len(ids)
        assert (sees[:used, :used] == np.tril(np.ones((used, used), bool))).all()
        assert row.segment_ids[0].tolist() == [1, 1] + [2] * len(ids) + [0] * (7 - used)


def test_a_trajectory_longer_than_a_row_is_refused_by_name():
    pieces = [(Source.PROMPT, [1] * 4), (Source.MODEL, [2] * 5)]
    assert len(collate([example(pieces)], row_length=9, rows=1)) == 1
    with pytest.raises(ValueError, match="task t has 9 tokens, a row 8"):
        collate([example(pieces)], row_length=8, rows=1)


def test_a_prompt_is_there_once_a_row():
    rng = np.random.default_rng(0)
    prompt = np.arange(50)
    group = [trajectory(rng, 0, i, prompt, [20]) for i in range(4)]
    examples = [Example(one, np.ones(1, np.float32), 1.0) for one in group]
    batches = collate(examples, row_length=90, rows=1)
    assert [int((b.segment_ids > 0).sum()) for b in batches] == [90, 90]


def test_no_examples_make_one_batch_of_padding():
    (batch,) = collate([], row_length=16, rows=2)
    assert batch.tokens.shape == (2, 16)
    assert not batch.action_mask.any() and not batch.segment_ids.any()


def test_batches_are_filled_with_empty_rows():
    rng = np.random.default_rng(0)
    examples = [
        Example(trajectory(rng, i, 0, [1], [9]), np.ones(1, np.float32), 1.0)
        for i in range(5)
    ]
    batches = collate(examples, row_length=10, rows=4)
    assert [int(b.action_mask.any(axis=1).sum()) for b in batches] == [4, 1]


def test_unpack_takes_each_completion_back():
    """Shared prompts, several members a row, more batches than one."""
    examples = random_examples(3, groups=4, members=3)
    batches, places = pack(examples, row_length=48, rows=2)
    assert len(batches) > 1
    for got, one in zip(
        unpack([b.tokens for b in batches], places), examples, strict=True
    ):
        expected = [s.tokens for s in one.trajectory.segments[1:]]
        assert got.tolist() == np.concatenate(expected).tolist()


def test_values_and_returns_stand_at_their_turn():
    pieces = [
        (Source.PROMPT, [1, 2]),
        (Source.MODEL, [3, 4]),
        (Source.TOOL, [5]),
        (Source.MODEL, [8]),
    ]
    one = example(pieces, advantages=[1, 1])
    said = {"values": np.float32([0.5, 0.25]), "returns": np.float32([1.0, 2.0])}
    one = dataclasses.replace(one, **said)
    (batch,) = collate([one], row_length=7, rows=1)
    assert batch.old_values[0].tolist() == [0, 0, 0.5, 0.5, 0, 0.25, 0]
    assert batch.returns[0].tolist() == [0, 0, 1, 1, 0, 2, 0]


def test_steps_may_be_parts_of_turns():
    pieces = [(Source.PROMPT, [1, 2]), (Source.MODEL, [3, 4, 5]), (Source.TOOL, [6])]
    one = example([*pieces, (Source.MODEL, [7])], advantages=[1.0, 2.0, 3.0])
    one = dataclasses.replace(one, steps=np.array([0, 0, 1, -1, 2]))
    (batch,) = collate([one], row_length=8, rows=1)
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, 0, 1, -1, 2, -1]
    assert batch.advantages[0].tolist() == [0, 0, 1, 1, 2, 0, 3, 0]
    assert batch.action_mask[0].tolist() == [0, 0, 1, 1, 1, 0, 1, 0]


def sees_of(batch):
    return Packing(batch.segment_ids, batch.prefix_ids).mask()


def prefixes(batches):
    """(what a token sees and itself, what predicts it) for every action token."""
    for batch in batches:
        sees = np.asarray(sees_of(batch))
        for row, at in np.argwhere(batch.action_mask):
            seen = np.flatnonzero(sees[row, at])
            order = seen[np.argsort(batch.positions[row, seen])]
            assert batch.positions[row, order].tolist() == list(range(len(order)))
            assert order[-1] == at and order[-2] == batch.previous[row, at]
            before = np.flatnonzero(sees[row, order[-2]])
            assert set(before) == set(order[:-1])
            labels = (
                int(batch.turn_ids[row, at]),
                float(batch.sampler_logprobs[row, at]),
                float(batch.advantages[row, at]),
                float(batch.outcome_advantages[row, at]),
            )
            yield tuple(batch.tokens[row, order].tolist()), labels


def expected_prefixes(examples):
    for one in examples:
        tokens, sampled = all_tokens(one.trajectory)
        logprobs = np.concatenate([s.logprobs for s in one.trajectory.segments])
        count = len(one.advantages)
        turns = per_token(one.trajectory, np.arange(count))
        advantages = per_token(one.trajectory, one.advantages)
        for at in np.flatnonzero(sampled):
            labels = (
                int(turns[at]),
                float(logprobs[at]),
                float(advantages[at]),
                float(np.float32(one.outcome)),
            )
            yield tuple(tokens[: at + 1].tolist()), labels


@pytest.mark.parametrize("seed", range(12))
def test_every_action_token_sees_its_own_trajectory_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    examples = random_examples(
        seed, int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(1, 10))
    )
    order = rng.permutation(len(examples))
    batches = collate([examples[i] for i in order], row_length=LENGTH, rows=ROWS)
    assert sorted(prefixes(batches)) == sorted(expected_prefixes(examples))


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


def alone(parts, examples, weights):
    """Log-probs of each trajectory through model(tokens), and the gradient of their
    weighted sum."""
    graph, adapters, base = parts
    tokens = np.zeros((len(examples), LENGTH), np.int32)
    weight = np.zeros((len(examples), LENGTH), np.float32)
    for i, one in enumerate(examples):
        ids, _ = all_tokens(one.trajectory)
        tokens[i, : len(ids)] = ids
        weight[i, : len(ids)] = per_token(one.trajectory, weights[i])

    @jax.jit
    def total(adapters):
        logits = lora.merge(graph, adapters, base)(jnp.asarray(tokens))
        logprobs = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
        chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(weight[:, 1:] * chosen), chosen

    gradient, chosen = jax.grad(total, has_aux=True)(adapters)
    found = {}
    for i, one in enumerate(examples):
        ids, sampled = all_tokens(one.trajectory)
        for at in np.flatnonzero(sampled):
            found[i, at - len(one.trajectory.prompt)] = chosen[i, at - 1]
    return found, gradient


def packed(parts, examples, rows):
    """The same through packed rows; advantages are the weights."""
    graph, adapters, base = parts
    (batch,) = collate(examples, row_length=LENGTH, rows=rows)
    placed = update.place(batch)

    @jax.jit
    def total(adapters):
        logprobs, _ = batch_logprobs(lora.merge(graph, adapters, base), placed, 1.0)
        return jnp.sum(batch.advantages * logprobs), logprobs

    gradient, logprobs = jax.grad(total, has_aux=True)(adapters)
    assert (np.asarray(logprobs)[~batch.action_mask] == 0).all()
    found = {}
    for row, at in np.argwhere(batch.action_mask):
        index = int(batch.outcome_advantages[row, at])
        segment = batch.segment_ids[row, at]
        start = np.flatnonzero(batch.segment_ids[row] == segment)[0]
        found[index, at - start] = logprobs[row, at]
    return found, gradient


def assert_close(got, expected, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(y).max()))
        np.testing.assert_allclose(x, y, atol=tolerance * scale)


def test_packed_rows_give_each_trajectorys_own_logprobs_and_gradients(parts):
    examples = random_examples(0, groups=3, members=4)
    named = [
        Example(e.trajectory, e.advantages, float(i)) for i, e in enumerate(examples)
    ]
    expected, slope = alone(parts, named, [e.advantages for e in named])
    found, packed_slope = packed(parts, named, rows=6)
    assert found.keys() == expected.keys()
    keys = sorted(found)
    np.testing.assert_allclose(
        [found[k] for k in keys], [expected[k] for k in keys], atol=1e-5
    )
    assert_close(packed_slope, slope, 1e-5)
    assert any(float(jnp.abs(x).max()) > 0.1 for x in jax.tree.leaves(slope))
