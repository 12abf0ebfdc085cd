"""The critic: where it reads values, what it learns, what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from trajectories import VOCABULARY, random_examples, tiny_batches, tiny_parts

from configs import tir
from grpo_jax import models
from grpo_jax.models import lora
from grpo_jax.models.blockwise import Packing
from grpo_jax.training import update
from grpo_jax.training.batching import pack
from grpo_jax.training.choices import make_estimator, make_router
from grpo_jax.training.critic import Critic, step_starts
from grpo_jax.training.steps import first_tokens, token_steps
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import CallRecord, Reward, Task, Turn

LENGTH, ROWS = 31, 4  # shapes of test_update: below 32 attention compiles fast
ADAM = update.make_optimizer(1e-2, warmup_steps=0, total_steps=99)


def make_critic(parts, clip=0.0, optimizer=ADAM):
    graph, _, base = parts
    return Critic(graph, base, optimizer, clip, False)


def packed(examples):
    batches, places = pack(examples, row_length=LENGTH, rows=ROWS)
    return [update.place(batch) for batch in batches], places


def step_values(critic, state, rows):
    """What the critic says before every turn."""
    known = zip(critic.values(state, rows, packed), rows, strict=True)
    return [values[first_tokens(token_steps(one))] for values, one in known]


def awake(critic, parts, seed=0):
    """A critic whose head is not zero."""
    state = critic.new_state(parts[1], jax.random.key(0))
    head = state.adapters["head"]
    kernel = np.random.default_rng(seed).normal(size=head["kernel"].shape)
    head["kernel"] = jnp.asarray(0.3 * kernel, jnp.float32)
    head["bias"] = jnp.float32(0.1)
    return state


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


@pytest.fixture(scope="module")
def examples():
    """Ragged trajectories, several to a row, with something to say of every turn."""
    made = random_examples(0, groups=7, members=3, longest=4, turns=2)
    rng = np.random.default_rng(5)
    return [
        dataclasses.replace(
            one,
            values=rng.normal(size=len(one.advantages)).astype(np.float32),
            returns=rng.normal(size=len(one.advantages)).astype(np.float32),
        )
        for one in made
    ]


@pytest.fixture(scope="module")
def batches(examples):
    return tiny_batches(examples, LENGTH, ROWS)


def alone(parts, state, trajectory):
    """Values before each turn, by a pass over nothing but the trajectory."""
    graph, _, base = parts
    tokens = np.concatenate([s.tokens for s in trajectory.segments])
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    hidden = hidden_states(graph, state.adapters["adapters"], base, padded)[0]
    head = jax.tree.map(np.asarray, state.adapters["head"])
    at, found = 0, []
    for segment in trajectory.segments:
        if segment.source is Source.MODEL:
            found.append(np.asarray(hidden)[at - 1] @ head["kernel"] + head["bias"])
        at += len(segment.tokens)
    return np.array(found)


def _hidden(graph, adapters, base, tokens):
    index = jnp.arange(tokens.shape[1])
    model = lora.merge(graph, adapters, base)
    return model.hidden(tokens, index[None], Packing.causal(*tokens.shape))


hidden_states = jax.jit(_hidden, static_argnames="graph")


def test_values_of_packed_rows_are_those_of_each_trajectory_alone(parts, examples):
    """Before the first token of a turn, shared prompts and tool results included."""
    critic = make_critic(parts)
    state = awake(critic, parts)
    rows = [example.trajectory for example in examples]
    got = step_values(critic, state, rows)
    assert len(got) == 21 and {len(values) for values in got} == {1, 2}
    for values, one in zip(got, rows, strict=True):
        np.testing.assert_allclose(values, alone(parts, state, one), atol=1e-5)


def test_members_of_a_group_have_one_value_before_their_first_turn(parts, examples):
    critic = make_critic(parts)
    rows = [example.trajectory for example in examples]
    got = step_values(critic, awake(critic, parts), rows)
    firsts = np.array([values[0] for values in got]).reshape(7, 3)
    np.testing.assert_allclose(firsts, firsts[:, :1] + np.zeros(3), atol=1e-5)
    assert len(set(firsts[:, 0].tolist())) == 7


def test_a_step_starts_where_a_turn_does(batches, examples):
    count = sum(int(step_starts(batch).sum()) for batch in batches)
    assert count == sum(len(one.returns) for one in examples)
    found = [np.asarray(b.returns)[np.asarray(step_starts(b))] for b in batches]
    wanted = np.concatenate([one.returns for one in examples])
    assert sorted(np.concatenate(found)) == sorted(wanted)


def test_a_new_critic_says_0_and_leaves_the_policy_alone(parts, examples, batches):
    critic = make_critic(parts)
    state = critic.new_state(parts[1], jax.random.key(0))
    rows = [example.trajectory for example in examples]
    assert all((values == 0).all() for values in critic.values(state, rows, packed))
    kept = [np.asarray(x).copy() for x in jax.tree.leaves(parts[1:])]
    for _ in range(2):  # the first only moves the head
        state, metrics = critic.update(state, batches)
    for before, after in zip(kept, jax.tree.leaves(parts[1:]), strict=True):
        assert (before == after).all()
    own = state.adapters["adapters"]
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), own, parts[1])
    assert all(jax.tree.leaves(changed))
    assert int(state.step) == 2
    shown = update.read([metrics])
    assert shown["critic/grad_norm"] > 0 and shown["critic/skipped"] == 0


def losses(critic, state, batches, updates):
    found = []
    for _ in range(updates):
        state, metrics = critic.update(state, batches)
        found.append(update.read([metrics])["critic/loss"])
    return state, found


def test_critic_fits_a_known_value_function(parts, examples):
    """Each turn's return is a function of what the critic has seen by then: the prompt
    and whether a tool has answered."""
    known = [
        dataclasses.replace(
            one,
            returns=np.float32(one.trajectory.group % 3 - 1)
            + 0.5 * np.arange(len(one.advantages), dtype=np.float32),
            values=np.zeros(len(one.advantages), np.float32),
        )
        for one in examples
    ]
    critic, batches = make_critic(parts), tiny_batches(known, LENGTH, ROWS)
    state = critic.new_state(parts[1], jax.random.key(0))
    state, found = losses(critic, state, batches, 40)
    assert found[-1] < 0.02 * found[0]
    got = step_values(critic, state, [one.trajectory for one in known])
    for values, one in zip(got, known, strict=True):
        np.testing.assert_allclose(values, one.returns, atol=0.3)


def gradient(critic, parts, batches, seed=0):
    state = awake(critic, parts, seed)
    before = jax.tree.map(np.array, state.adapters)
    state, metrics = critic.update(state, batches)
    change = jax.tree.map(lambda x, y: x - np.asarray(y), before, state.adapters)
    return update.read([metrics])["critic/loss"], jax.tree.leaves(change)


def assert_same(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for x, y in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, np.abs(y).max()))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [None, (8, 1), (2, 4)])
def test_loss_and_gradient_are_the_same_on_every_mesh_and_cut(parts, batches, grid):
    sgd = optax.sgd(1.0)
    whole = gradient(make_critic(parts, 0.5, sgd), parts, batches)
    assert max(np.abs(x).max() for x in whole[1]) > 1e-2
    one = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    size = 2 if grid is None else 8

    def cut():
        starts = range(0, len(one.tokens), size)
        rows = [jax.tree.map(lambda x, s=s: x[s : s + size], one) for s in starts]
        return [update.place(batch) for batch in rows]

    if grid is None:
        assert_same(gradient(make_critic(parts, 0.5, sgd), parts, cut()), whole)
        return
    devices = np.array(jax.devices()).reshape(grid)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        sharded = tiny_parts(mesh=mesh)
        got = gradient(make_critic(sharded, 0.5, sgd), sharded, cut())
    assert_same(got, whole)


def test_a_return_that_is_not_finite_is_left_out(parts, examples):
    first = examples[0]
    bad = dataclasses.replace(first, returns=np.full_like(first.returns, np.nan))
    spoilt = [bad, *examples[1:]]
    critic = make_critic(parts)
    state = critic.new_state(parts[1], jax.random.key(0))
    state, metrics = critic.update(state, tiny_batches(spoilt, LENGTH, ROWS))
    shown = update.read([metrics])
    assert np.isfinite(shown["critic/loss"]) and shown["critic/skipped"] == 0


# Steps that are thoughts and calls ----------------------------------------------------

CALL = 'so <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call><|im_end|>'


def conversation(reward):
    """A thought, a call, the end of the turn; a result; an answer: four steps."""
    encode = models.load_tokenizer("tiny").encode
    pieces = [(Source.PROMPT, "?"), (Source.MODEL, CALL), (Source.TOOL, "7")]
    pieces.append((Source.MODEL, "it is 7<|im_end|>"))
    segments = [
        Segment.given(source, encode(text, add_special_tokens=False))
        for source, text in pieces
    ]
    turns = [Turn(CALL, [CallRecord("a", {}, "ok", "7")]), Turn("it is 7")]
    made = Trajectory(Task("t", []), 0, 0, segments, turns, "stop")
    made.reward = Reward(reward)
    return made


def by_role():
    config = tir.get_config("tiny,steppo")
    config.rollout.num_generations = 2
    config.objective.step = "role"
    return config, make_router(config, models.load_tokenizer("tiny"), VOCABULARY)


def test_steps_by_role_go_through_packing_and_the_critic(parts):
    config, router = by_role()
    critic, state = make_critic(parts), awake(make_critic(parts), parts)
    rows = [conversation(1.0), conversation(0.0)]

    def packed(examples):
        batches, places = pack(examples, row_length=192, rows=1)
        return [update.place(batch) for batch in batches], places

    estimator = make_estimator(config, True, router)
    examples, _ = estimator.examples(rows, critic.values(state, rows, packed))
    assert [len(one.advantages) for one in examples] == [4, 4]  # of two turns each
    ((batch,), places) = packed(examples)
    starts, roles = (
        np.asarray(step_starts(batch))[0],
        router(rows[0].segments[1].tokens),
    )
    for one, (_, place) in zip(examples, places, strict=True):
        own = np.asarray(batch.turn_ids)[0][place]
        assert own.tolist() == one.steps.tolist() and starts[place].sum() == 4
        cuts = np.flatnonzero(starts[place])[1:3]  # the call, and what follows it
        assert cuts.tolist() == [np.argmax(roles), len(roles) - np.argmax(roles[::-1])]
        for name in ("advantages", "returns", "old_values"):
            field = "values" if name == "old_values" else name
            got = np.asarray(getattr(batch, name))[0][place][starts[place]]
            np.testing.assert_array_equal(got, getattr(one, field))
    _, metrics = critic.update(state, [batch])
    assert metrics["critic/loss"][1] == 8  # steps, not turns


def test_only_steps_by_role_have_a_router():
    config, router = by_role()
    assert make_estimator(config, True, router).router is router
    config.objective.step = "turn"
    assert make_estimator(config, True, router).router is None
    assert make_router(config, models.load_tokenizer("tiny"), VOCABULARY) is None
