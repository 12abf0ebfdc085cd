"""One optimizer update: what it depends on, what it leaves alone, what it counts."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from toy import ToyEnvironment
from trajectories import (
    VOCABULARY,
    random_examples,
    tiny_batches,
    tiny_parts,
    trajectory,
)

from grpo_jax import models
from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.engine import Engine, Limits
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.training import update
from grpo_jax.training.batching import Example
from grpo_jax.training.update import Loss
from tools_env.pool import ToolPool
from tools_env.protocol import Task

LENGTH = 31  # below 32 attention takes the form that compiles fast
ROWS = 4  # of a micro-batch; few shapes and few losses, since each pair compiles
SGD = optax.sgd(1.0)  # the parameters' change is the gradient
ADAM = update.make_optimizer(1e-2, warmup_steps=0, total_steps=9, weight_decay=0.1)
# Everything that a row's own company could disturb, at once.
FULL = Loss(
    kind="policy",
    ratio="cumulative",
    clip="sqrt_log",
    epsilon=0.025,
    epsilon_high=0.05,
    aggregation="seq_mean_token_mean",
    beta=0.1,
    lld=0.2,
    tis_cap=2.0,
    entropy=0.05,
)
PLAIN = Loss(kind="policy", max_length=24)


def scale(adapters, factor):
    return jax.tree.map(lambda x: factor * x, adapters)


def score(parts, batch, adapters=None, temperature=1.0):
    graph, own, base = parts
    chosen = own if adapters is None else adapters
    return update.score(graph, chosen, base, batch, temperature=temperature)


def scored(parts, batches, old=1.0, reference=1.0):
    """Old and reference log-probs of scaled adapters; scale 1: the policy's own."""
    adapters = parts[1]
    return [
        b.replace(
            old_logprobs=score(parts, b, scale(adapters, old)),
            ref_logprobs=score(parts, b, scale(adapters, reference)),
        )
        for b in batches
    ]


def step(parts, batches, loss, optimizer=SGD, state=None):
    """(state after, metrics) of one update; the parts stay usable."""
    graph, adapters, base = parts
    if state is None:
        copy = jax.tree.map(jnp.copy, adapters)
        state = update.new_state(copy, optimizer, jax.random.key(0))
    state, pairs = update.minibatch(graph, base, state, batches, optimizer, loss)
    return state, update.read([pairs])


def gradient(parts, batches, loss):
    """The loss and its gradient, on the host."""
    state, metrics = step(parts, batches, loss)
    change = jax.tree.map(
        lambda old, new: np.asarray(old) - np.asarray(new), parts[1], state.adapters
    )
    return metrics["loss"], jax.tree.leaves(change)


def assert_same(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(got[0], expected[0], atol=tolerance)
    for x, y in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


@pytest.fixture(scope="module")
def examples():
    return random_examples(0, groups=7, members=3, longest=4, turns=2)


@pytest.fixture(scope="module")
def batches(parts, examples):
    """Two unequal micro-batches, with log-probs of three different policies."""
    return scored(parts, tiny_batches(examples, LENGTH, ROWS), 0.9, 0.8)


@pytest.fixture(scope="module")
def own(parts, examples):
    """The same, old and reference log-probs being the policy's own."""
    return scored(parts, tiny_batches(examples, LENGTH, ROWS))


@pytest.fixture(scope="module")
def whole(parts, batches):
    return gradient(parts, batches, FULL)


def cut(batches, rows):
    """The same rows in micro-batches of `rows`."""
    one = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    starts = range(0, len(one.tokens), rows)
    return [
        update.place(jax.tree.map(lambda x, s=s: x[s : s + rows], one)) for s in starts
    ]


def make_mesh(fsdp, tensor):
    devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("grid", "rows"),
    [((2, 4), 4)]
    + [slow((1, 1), rows) for rows in (8, 4, 2)]
    + [slow((8, 1), rows) for rows in (8, 2)]
    + [slow((4, 2), rows) for rows in (8, 4, 2)]
    + [slow((2, 4), rows) for rows in (8, 2)],
)
def test_loss_and_gradient_are_the_same_on_every_mesh_and_cut(
    batches, whole, grid, rows
):
    mesh = make_mesh(*grid)
    with jax.set_mesh(mesh):
        parts = tiny_parts(mesh=mesh)
        kernel = parts[2]["layers"]["mlp"]["up"]["kernel"][...]
        assert len(kernel.sharding.device_set) == mesh.size
        if mesh.size > 1:
            assert not kernel.sharding.is_fully_replicated
        got = gradient(parts, cut(batches, rows), FULL)
    assert_same(got, whole)
    assert max(np.abs(x).max() for x in whole[1]) > 1e-2


@pytest.mark.parametrize(
    "aggregation",
    ["token_mean", slow("seq_mean_token_mean"), slow("seq_mean_token_sum")]
    + [slow("constant")],
)
def test_LN1_loss_and_gradient_do_not_depend_on_the_cut(parts, batches, aggregation):
    loss = dataclasses.replace(PLAIN, aggregation=aggregation)
    expected = gradient(parts, batches, loss)
    assert_same(gradient(parts, cut(batches, 2), loss), expected)
    assert_same(gradient(parts, batches[::-1], loss), expected)
    masked = tiny_batches([], LENGTH, ROWS)
    assert_same(gradient(parts, batches + masked, loss), expected)
    value, nothing = gradient(parts, masked, loss)
    assert value == 0 and all((x == 0).all() for x in nothing)


def test_LN1_token_mean_is_over_the_whole_minibatch(parts, batches):
    """Against the surrogate written out in numpy, over unequal micro-batches."""
    total = count = 0.0
    for batch in batches:
        mask = np.asarray(batch.action_mask)
        ratio = np.exp(score(parts, batch) - batch.old_logprobs)[mask]
        a = np.asarray(batch.advantages)[mask]
        total -= np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).sum()
        count += mask.sum()
    assert batches[0].action_mask.sum() != batches[1].action_mask.sum()
    value, _ = gradient(parts, batches, PLAIN)
    np.testing.assert_allclose(value, total / count, atol=1e-5)


LABELS = (
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
    "advantages",
    "outcome_advantages",
)


@pytest.mark.parametrize("value", [-5.0, 123.0, np.nan])
def test_LM1_tool_tokens_change_neither_loss_nor_gradient(parts, batches, whole, value):
    def disturbed(batch):
        off = ~np.asarray(batch.action_mask)
        labels = {
            n: np.where(off, np.float32(value), getattr(batch, n)) for n in LABELS
        }
        return batch.replace(**jax.tree.map(jnp.asarray, labels))

    got = gradient(parts, [disturbed(batch) for batch in batches], FULL)
    assert got[0] == whole[0]
    assert all((x == y).all() for x, y in zip(got[1], whole[1], strict=True))


def flat(batches, name):
    """A field's values at the action tokens of all micro-batches."""
    return np.concatenate(
        [np.asarray(getattr(b, name))[np.asarray(b.action_mask)] for b in batches]
    )


def test_old_logprobs_of_the_same_policy_make_the_loss_minus_the_mean_advantage(
    parts, own
):
    value, slope = gradient(parts, own, PLAIN)
    np.testing.assert_allclose(value, -flat(own, "advantages").mean(), atol=1e-5)
    # One update a rollout batch needs no pass for old log-probs: same result.
    on_policy = dataclasses.replace(PLAIN, on_policy=True)
    assert_same(gradient(parts, own, on_policy), (value, slope))


def test_entropy_bonus_is_subtracted_and_raises_the_entropy(parts, own):
    bonus = dataclasses.replace(PLAIN, entropy=0.5)
    value, _ = gradient(parts, own, PLAIN)
    state, first = step(parts, own, bonus, ADAM)
    np.testing.assert_allclose(first["loss"], value - 0.5 * first["entropy"], atol=1e-5)
    indifferent = [b.replace(advantages=jnp.zeros_like(b.advantages)) for b in own]
    state, before = step(parts, indifferent, bonus, ADAM)
    _, after = step(parts, indifferent, bonus, ADAM, state)
    assert after["entropy"] > before["entropy"] + 1e-3


def test_LP4_second_update_has_ratios_of_its_own(parts, own):
    state, first = step(parts, own, PLAIN, ADAM)
    assert first["clip_ratio/region_mean"] == 0
    moved = [b.replace(old_logprobs=score(parts, b, state.adapters)) for b in own]
    _, second = step(parts, own, PLAIN, ADAM, state)
    assert second["clip_ratio/region_mean"] > 0
    ratio = np.exp(flat(moved, "old_logprobs") - flat(own, "old_logprobs"))
    a = flat(own, "advantages")
    clipped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    np.testing.assert_allclose(second["clip_ratio/region_mean"], clipped.mean())
    expected = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).mean()
    np.testing.assert_allclose(second["loss"], expected, atol=1e-5)


def test_kl_is_exactly_0_before_the_first_update_and_not_after(parts, own):
    state, metrics = step(parts, own, FULL, ADAM)
    assert metrics["kl"] == 0.0
    later = [b.replace(old_logprobs=score(parts, b, state.adapters)) for b in own]
    _, metrics = step(parts, later, FULL, ADAM, state)
    assert metrics["kl"] > 1e-4


def test_ME1_metrics_are_divided_once(parts, batches):
    """Clip share, entropy and sampler gap over unequal micro-batches."""
    _, together = step(parts, batches, PLAIN)
    _, apart = step(parts, cut(batches, 2), PLAIN)
    assert together.keys() == apart.keys()
    for name in together:
        np.testing.assert_allclose(apart[name], together[name], rtol=2e-5, atol=1e-6)
    gap = np.abs(flat(batches, "old_logprobs") - flat(batches, "sampler_logprobs"))
    name = "sampling/sampling_logp_difference"
    np.testing.assert_allclose(together[f"{name}/mean"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(together[f"{name}/max"], gap.max(), rtol=1e-5)


def test_one_bad_log_prob_is_counted_and_the_other_tokens_are_learned_from(
    parts, batches
):
    where = tuple(np.argwhere(np.asarray(batches[0].action_mask))[0])
    bad = batches[0].replace(old_logprobs=batches[0].old_logprobs.at[where].set(np.nan))
    without = batches[0].replace(
        action_mask=batches[0].action_mask.at[where].set(False)
    )
    got, same = gradient(parts, [bad], PLAIN), gradient(parts, [without], PLAIN)
    assert_same(got, same)
    _, shown = step(parts, [bad], PLAIN)
    count = int(batches[0].action_mask.sum())
    np.testing.assert_allclose(shown["nonfinite_tokens"], 1 / count, rtol=1e-5)
    assert shown["update/skipped"] == 0 and np.isfinite(list(shown.values())).all()
    assert "sampling/sampling_logp_difference/mean" in shown


def test_answers_weigh_less_in_the_lld_penalty_where_asked(parts, batches):
    """With weights of 0 nothing is charged, with weights of 1 what was before."""
    charged = dataclasses.replace(PLAIN, lld=0.2)
    masked = dataclasses.replace(charged, lld_answer="paper")
    _, plain = step(parts, batches, charged)
    _, same = step(parts, batches, masked)
    assert same["lld/loss"] == pytest.approx(plain["lld/loss"], rel=1e-5)
    assert plain["lld/loss"] > 0
    nothing = [b.replace(lld_weights=jnp.zeros_like(b.lld_weights)) for b in batches]
    _, free = step(parts, nothing, masked)
    assert free["lld/loss"] == 0 and free["lld/gate_rate"] == plain["lld/gate_rate"]


def digest(state):
    total = hashlib.sha256()
    for x in jax.tree.leaves(state):
        total.update(np.asarray(x).tobytes())
    return total.hexdigest()


def test_OP1_base_stays_and_moments_are_the_adapters_alone(parts, batches):
    before, state = digest(parts[2]), None
    for _ in range(5):
        state, _ = step(parts, batches, FULL, ADAM, state)
    assert digest(parts[2]) == before
    assert int(state.step) == 5
    shapes = sorted(x.shape for x in jax.tree.leaves(parts[1]))
    moments = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sorted(moments) == sorted(2 * shapes)
    moved = [
        bool((a != b).any())
        for a, b in zip(*map(jax.tree.leaves, (parts[1], state.adapters)), strict=True)
    ]
    assert all(moved)


def test_gradient_that_is_not_finite_changes_nothing_and_is_counted(parts):
    adapters = jax.tree.map(jnp.copy, parts[1])
    state = update.new_state(adapters, ADAM, jax.random.key(0))
    poison = jax.tree.map(jnp.ones_like, adapters)
    poison["layers"]["attention"]["q"]["lora_a"][...] *= jnp.nan
    before = digest([parts[1], state.opt_state])
    state, metrics = update.apply(state, poison, optimizer=ADAM)
    assert digest([state.adapters, state.opt_state]) == before
    assert metrics["update/skipped"] == 1
    good = jax.tree.map(jnp.ones_like, parts[1])
    state, metrics = update.apply(state, good, optimizer=ADAM)
    assert metrics["update/skipped"] == 0 and np.isfinite(metrics["grad_norm"])
    assert digest([state.adapters, state.opt_state]) != before


def test_gradients_are_clipped_by_their_global_norm(parts):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    size = sum(x.size for x in jax.tree.leaves(parts[1]))
    state = update.new_state(
        jax.tree.map(jnp.copy, parts[1]), optimizer, jax.random.key(0)
    )
    threes = jax.tree.map(lambda x: jnp.full_like(x, 3.0), parts[1])
    after, metrics = update.apply(state, threes, optimizer=optimizer)
    np.testing.assert_allclose(metrics["grad_norm"], 3 * size**0.5, rtol=1e-5)
    change = jax.tree.map(lambda x, y: x - y, parts[1], after.adapters)
    np.testing.assert_allclose(optax.tree.norm(change), 1.0, rtol=1e-4)


def test_one_update_raises_a_rewarded_trajectory_and_lowers_a_punished_one(parts):
    rng = np.random.default_rng(0)
    prompt = np.arange(5)
    good, bad = (trajectory(rng, 0, i, prompt, [6]) for i in range(2))
    batches = tiny_batches(
        [Example(good, np.ones(1, np.float32), 1.0)]
        + [Example(bad, -np.ones(1, np.float32), -1.0)],
        LENGTH,
        ROWS,
    )
    before = score(parts, batches[0])
    state, _ = step(parts, scored(parts, batches), PLAIN, ADAM)
    change = np.asarray(score(parts, batches[0], state.adapters) - before)
    sign = np.asarray(batches[0].advantages)
    assert change[sign > 0].sum() > 0.1 and change[sign < 0].sum() < -0.1


def rates(schedule, updates, warmup=4, total=12, peak=1e-3):
    """The rate of each update, read off the change that Adam makes: it is the rate
    when the gradient never changes."""
    optimizer = update.make_optimizer(
        peak,
        warmup_steps=warmup,
        total_steps=total,
        schedule=schedule,
        max_grad_norm=1e9,
    )
    x = jnp.zeros(())
    state, seen = optimizer.init(x), []
    for _ in range(updates):
        change, state = optimizer.update(jnp.ones(()), state, x)
        seen.append(-float(change) / peak)
    return seen


def test_CK1_learning_rate_of_every_update():
    """The case's schedule shifted by one, so that update 1 moves."""
    cosine = [0.25, 0.5, 0.75, 1, 0.9619398, 0.8535534]
    np.testing.assert_allclose(rates("cosine", 6), cosine, rtol=1e-4)
    linear = [0.25, 0.5, 0.75] + [1 - i / 8 for i in range(9)]
    np.testing.assert_allclose(rates("linear", 12), linear, rtol=1e-4, atol=1e-6)
    for warmup in (0, 1):
        assert rates("linear", 3, warmup, 5) == pytest.approx([1, 0.75, 0.5], rel=1e-4)
        np.testing.assert_allclose(rates("constant", 3, warmup), 1, rtol=1e-4)
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        rates("step", 1)


# Rollouts and the trainer's own scoring -------------------------------------------


LIMITS = Limits(
    max_prompt_length=64,
    max_completion_length=24,
    max_turn_length=24,
    max_tool_calling_iterations=1,
    max_calls_per_turn=1,
    slots=8,
    burst=8,
)


def roll_out(parts, sampling, seed=0):
    """Four trajectories of each of two tasks, packed in the rows of an update."""
    graph, adapters, base = parts
    model = models.lora.merge(*parts)
    chat = Chat(models.load_tokenizer("tiny"))
    with ToolPool(1, 1.0) as pool:
        engine = Engine(graph, base, model, chat, ToyEnvironment(), pool, LIMITS)
        tasks = [
            Task(str(i), [{"role": "user", "content": f"say {i}"}], {})
            for i in range(2)
        ]
        trajectories, _ = engine.collect(
            adapters,
            tasks,
            num_generations=4,
            sampling=sampling,
            key=jax.random.key(seed),
        )
    ones = np.ones(1, np.float32)
    return tiny_batches([Example(t, ones, 1.0) for t in trajectories], 128, 4)


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.5, 3)])
def test_ratio_is_1_with_unchanged_weights(parts, sampling):
    batches = roll_out(parts, sampling)
    assert sum(int(b.action_mask.sum()) for b in batches) > 100
    for batch in batches:
        ours = score(parts, batch, temperature=sampling.temperature)
        mask = np.asarray(batch.action_mask)
        ratio = np.exp(np.asarray(ours - batch.sampler_logprobs))[mask]
        np.testing.assert_allclose(ratio, 1.0, atol=1e-5)


def test_LO3_dropout_acts_in_the_update_and_nowhere_else(own):
    dropping, greedy = tiny_parts(dropout=0.5), Sampling(0.0)
    (batch, *_), (again, *_) = (roll_out(dropping, greedy) for _ in range(2))
    assert (np.asarray(batch.tokens) == np.asarray(again.tokens)).all()
    first = score(dropping, batch, temperature=0.0)
    second = score(dropping, batch, temperature=0.0)
    assert (np.asarray(first) == np.asarray(second)).all()
    gap = np.asarray(first - batch.sampler_logprobs)[np.asarray(batch.action_mask)]
    np.testing.assert_allclose(np.exp(gap), 1.0, atol=1e-5)
    # In the update it is on, also after all that scoring; without it the loss would be
    # minus the mean advantage.
    value, _ = gradient(dropping, own, dataclasses.replace(PLAIN, dropout=True))
    assert abs(value + flat(own, "advantages").mean()) > 1e-3


def test_vocabulary_is_what_the_random_tokens_assume(parts):
    assert parts[2]["embed"]["table"].shape[0] == VOCABULARY
