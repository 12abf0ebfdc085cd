"""DART: two adapters routed by token role, the same in prefill, decode and training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scripted import (
    SCRIPTED,
    Room,
    add,
    call,
    div,
    script,
    scripted_draws,
    tasks,
    tokenizer,
)
from trajectories import VOCABULARY, random_examples, tiny_parts

from grpo_jax import models, objective
from grpo_jax.config import BadInput
from grpo_jax.models import lora
from grpo_jax.models.blockwise import Packing
from grpo_jax.models.decoder import Linear
from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.engine import Engine, Limits
from grpo_jax.rollout.roles import RoleTable, Router
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate
from grpo_jax.training.interference import (
    LEAS_DESIGN,
    gradient_cosines,
    interference_term,
)
from grpo_jax.training.logprobs import adapter_routes
from grpo_jax.training.roles import by_role, role_weight
from grpo_jax.training.update import Loss
from grpo_jax.types import Source
from tools_env.pool import ToolPool
from tools_env.roles import ROLES

LENGTH, ROWS = 448, 1
HERMES = Router(tokenizer(), "hermes", VOCABULARY)


class Parity(Router):
    """The role of a token is that of the one before: odd ids call for the tool."""

    def __init__(self):
        odd = np.tile(np.arange(VOCABULARY) % 2, (2, 1)).astype(np.uint8)
        self.table = RoleTable(odd, np.arange(2, dtype=np.int32))
        self._rows = [row.tobytes() for row in odd]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    with scripted_draws():
        yield


@pytest.fixture(scope="module")
def parts():
    """Two different adapters, neither of them zero."""
    return tiny_parts(routed=True)


# Layers -----------------------------------------------------------------------------


def linear(a, b, rank):
    """One layer's Linear with kernel 1 and scale 2; a [I,2,R], b [2,R,O]."""
    width = len(a)
    config = models.LoraConfig(rank=rank, alpha=2.0 * rank, routed=True)
    axes = (width, "embed"), (width, "mlp")
    one = Linear(1, *axes, bias=False, lora=config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    one.kernel.set_value(jnp.eye(width))
    one.lora_a.set_value(jnp.asarray(a, jnp.float32))
    one.lora_b.set_value(jnp.asarray(b, jnp.float32))
    return one


def test_worked_example():
    a = np.array([[[1], [0]], [[0], [1]]])  # A_r = [1,0], A_t = [0,1]
    b = np.array([[[0, 1]], [[1, 0]]])  # B_r = [0,1]', B_t = [1,0]'
    h, routes = jnp.array([[[1.0, 2], [3, 4], [5, 6]]]), jnp.array([[0, 1, 0]])
    got = linear(a, b, 1)(h, routes=routes)
    np.testing.assert_array_equal(got[0], [[1, 4], [11, 4], [5, 16]])
    without = linear(a, b, 1)(h)  # all by the first
    np.testing.assert_array_equal(without[0], [[1, 4], [3, 10], [5, 16]])


def test_layer_against_float64():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((6, 2, 3)), rng.standard_normal((2, 3, 6))
    h, routes = rng.standard_normal((4, 5, 6)), rng.integers(0, 2, (4, 5))
    expected = np.zeros_like(h)
    for place in np.ndindex(4, 5):
        u = routes[place]
        expected[place] = h[place] + 2 * (h[place] @ a[:, u]) @ b[u]
    got = linear(a, b, 3)(jnp.asarray(h, jnp.float32), routes=jnp.asarray(routes))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_position_gives_gradient_to_its_own_adapter_only():
    rng = np.random.default_rng(1)
    one = linear(rng.standard_normal((6, 2, 3)), rng.standard_normal((2, 3, 6)), 3)
    graph, adapters, rest = nnx.split(one, nnx.LoRAParam, ...)
    h, routes = jnp.asarray(rng.standard_normal((1, 4, 6)), jnp.float32), [0, 1, 1, 0]

    def at(adapters, place):
        y = nnx.merge(graph, adapters, rest)(h, routes=jnp.array([routes]))
        return jnp.sum(jnp.sin(y[0, place]))

    for place, own in enumerate(routes):
        gradient = jax.grad(at)(adapters, place)
        a, b = gradient["lora_a"][...], gradient["lora_b"][...]
        assert not np.any(a[:, 1 - own]) and not np.any(b[1 - own])
        assert np.abs(a[:, own]).max() > 0.1 and np.abs(b[own]).max() > 0.1


def test_one_token_gives_gradient_to_its_own_adapter_only(parts):
    """The whole model, one position: nothing else can reach the other adapter."""
    graph, adapters, base = parts

    @jax.jit
    def gradient(route):
        def value(adapters):
            model = lora.merge(graph, adapters, base)
            one, zero = Packing.causal(1, 1), jnp.zeros((1, 1), jnp.int32)
            return jnp.sum(jnp.sin(model.hidden(zero, zero, one, routes=zero + route)))

        return jax.grad(value)(adapters)

    for own in range(2):
        for path, leaf in jax.tree.leaves_with_path(gradient(own)):
            halves = leaf.swapaxes(1, 2) if "lora_a" in str(path) else leaf
            assert not np.any(halves[:, 1 - own])
            if "'q'" not in str(path) and "'k'" not in str(path):  # one key: no choice
                assert np.any(halves[:, own])


def single(adapters, role):
    """One of the two adapters as the tree of an unrouted model."""
    one = tiny_parts()
    leaves = [
        leaf[:, :, role] if "lora_a" in str(path) else leaf[:, role]
        for path, leaf in jax.tree.leaves_with_path(adapters)
    ]
    return one[0], jax.tree.unflatten(jax.tree.structure(one[1]), leaves), one[2]


def forward(parts, tokens, role=None):
    """Final hidden states of whole rows, every position on one route."""

    @jax.jit
    def hidden(adapters, base):
        model = lora.merge(parts[0], adapters, base)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        packing = Packing.causal(*tokens.shape)
        routes = None if role is None else jnp.full(tokens.shape, role)
        return model.hidden(tokens, positions, packing, routes=routes)

    return np.asarray(hidden(*parts[1:]))


def test_one_route_is_the_model_with_that_adapter_alone(parts):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCABULARY, (2, 12)))
    found = [forward(parts, tokens, role) for role in range(2)]
    for role in range(2):
        alone = forward(single(parts[1], role), tokens)
        np.testing.assert_allclose(found[role], alone, atol=1e-4)
    np.testing.assert_allclose(forward(parts, tokens), found[0], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.1


# Rollouts against training ----------------------------------------------------------

LIMITS = Limits(
    max_prompt_length=64,
    max_completion_length=384,
    max_turn_length=300,
    max_tool_calling_iterations=3,
    max_calls_per_turn=2,
    slots=3,
    burst=7,  # bursts end inside tags and calls
)
TURNS = script(
    ["bye"],
    [call("add", a=1, b=2), "<tool_call>never closed"],
    ["hm" + call("add", a=3, b=4) + "so", call("div", a=1, b=4), "x"],
    [call("add", a=1, b=2) * 2, "three"],
)


@pytest.fixture
def collect(parts):
    """collect(room, router, **options): rollouts with the routed adapters."""
    with ToolPool(workers=2, timeout_s=20.0) as pool:

        def collect(room, router, *, slots=LIMITS.slots, turn=300, **options):
            graph, adapters, base = parts
            limits = dataclasses.replace(LIMITS, slots=slots, max_turn_length=turn)
            model, chat = lora.merge(*parts), Chat(tokenizer())
            table = router.table.placed()
            engine = Engine(graph, base, model, chat, room, pool, limits, table)
            return engine.collect(adapters, **options)[0]

        yield collect


def rescored(parts, trajectories, router, temperature):
    """(the sampler's, the trainer's) log-probs of all sampled tokens."""
    examples = [
        Example(t, np.ones(len(t.turns), np.float32), 1.0) for t in trajectories
    ]
    pairs = []
    for batch in collate(examples, row_length=LENGTH, rows=ROWS, router=router):
        graph, adapters, base = parts
        placed = update.place(batch)
        logprobs = update.score(graph, adapters, base, placed, temperature=temperature)
        pairs.append((batch.sampler_logprobs, np.asarray(logprobs), batch.action_mask))
    sampler, trainer, mask = (np.concatenate(x) for x in zip(*pairs, strict=True))
    return sampler[mask], trainer[mask]


def test_sampler_and_trainer_agree_over_several_turns(parts, collect):
    trajectories = collect(
        Room(add, div),
        HERMES,
        tasks=tasks(4),
        num_generations=1,
        sampling=SCRIPTED,
        key=TURNS.key,
    )
    calls = [len(t.calls) for t in trajectories]
    assert calls == [0, 2, 2, 2]  # an unclosed call is a malformed one
    sampler, trainer = rescored(parts, trajectories, HERMES, SCRIPTED.temperature)
    np.testing.assert_allclose(sampler, trainer, atol=1e-4)
    _, elsewhere = rescored(parts, trajectories, None, SCRIPTED.temperature)
    assert np.abs(sampler - elsewhere).max() > 0.1  # the routes do matter


def draws(collect, groups, members, **options):
    trajectories = collect(
        Room(),
        Parity(),
        tasks=tasks(groups),
        num_generations=members,
        sampling=Sampling(),
        key=jax.random.key(0),
        turn=24,
        **options,
    )
    return [
        np.concatenate([s.tokens for s in t.segments if s.source is Source.MODEL])
        for t in trajectories
    ], trajectories


def test_RN1_rollouts_do_not_depend_on_their_company(parts, collect):
    group, trajectories = draws(collect, 1, 8)
    sampler, trainer = rescored(parts, trajectories, Parity(), 1.0)
    np.testing.assert_allclose(sampler, trainer, atol=1e-4)
    batch, _ = draws(collect, 2, 8)
    packed, _ = draws(collect, 1, 8, slots=8)  # the last ones are decoded packed
    for number, tokens in enumerate(group):
        np.testing.assert_array_equal(batch[number], tokens)
        np.testing.assert_array_equal(packed[number], tokens)


# Batches ----------------------------------------------------------------------------


def test_packed_tokens_take_the_adapter_of_what_they_predict():
    examples = random_examples(3, groups=2, members=3, longest=6, turns=2)
    router = Parity()
    (batch,) = collate(examples, row_length=128, rows=2, router=router)
    routes = np.asarray(adapter_routes(batch))
    routed = np.zeros_like(batch.roles)
    for row, t in np.ndindex(batch.roles.shape):
        if batch.action_mask[row, t]:
            before = batch.previous[row, t]
            first = batch.turn_ids[row, t] != batch.turn_ids[row, before]
            sampled = batch.action_mask[row, before] and not first
            own = int(sampled and batch.tokens[row, before] % 2)
            assert batch.roles[row, t] == own
            routed[row, before] = max(own, routed[row, before])
        else:
            assert batch.roles[row, t] == 0
    np.testing.assert_array_equal(routes, routed)
    (plain,) = collate(examples, row_length=128, rows=2)
    assert not plain.roles.any() and batch.roles.any()


# The article's loss -----------------------------------------------------------------


def test_weighted_sum_of_the_means_by_role():
    losses = jnp.array([[0.5, 0.7, 0.3, 1.0, 2.0, 9.0]])
    batch = collate([], row_length=6, rows=1)[0].replace(
        action_mask=jnp.array([[True] * 5 + [False]]),
        roles=jnp.array([[0, 0, 0, 1, 1, 0]]),
    )

    def loss(weights, batch):
        terms = by_role(
            *("sft", batch, weights),
            lambda among: objective.losses.aggregate(losses, among & batch.action_mask),
        )
        means = {k: total / jnp.maximum(w, 1.0) for k, (total, w) in terms.items()}
        if not weights:
            return means["sft"]
        return sum(role_weight(name, weights) * x for name, x in means.items())

    np.testing.assert_allclose(loss((0.3, 0.7), batch), 1.2, rtol=1e-6)
    np.testing.assert_allclose(loss((), batch), 0.9, rtol=1e-6)
    alone = batch.replace(roles=jnp.zeros((1, 6), jnp.int32))
    np.testing.assert_allclose(loss((0.3, 0.7), alone), 0.3 * 0.9, rtol=1e-6)


WEIGHED = Loss("policy", role_weights=(0.3, 0.7), by_role=True, on_policy=True)
SMALL = dict(row_length=31, rows=2)


@pytest.fixture(scope="module")
def state(parts):
    optimizer = update.make_optimizer(1e-2, warmup_steps=0, total_steps=9)
    return update.new_state(parts[1], optimizer, jax.random.key(0))


@pytest.fixture(scope="module")
def batches():
    examples = random_examples(5, groups=6, members=2, longest=4, turns=2)
    return [update.place(b) for b in collate(examples, **SMALL, router=Parity())]


def test_the_weighted_gradient_is_made_of_both_and_ignores_the_cut(
    parts, state, batches
):
    assert len(batches) > 1
    graph, _, base = parts
    whole, pairs = update.gradient(graph, base, state, batches, WEIGHED)
    assert sum(float(p["roles/tool_share"][0]) for p in pairs) > 5
    expected = jax.tree.map(jnp.zeros_like, whole)
    for role, weight in enumerate(WEIGHED.role_weights):
        own = [
            b.replace(action_mask=b.action_mask & (b.roles == role)) for b in batches
        ]
        plain = dataclasses.replace(WEIGHED, role_weights=())
        part, _ = update.gradient(graph, base, state, own, plain)
        expected = jax.tree.map(lambda x, y, w=weight: x + w * y, expected, part)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.abs(y).max())  # float32 sums round by their largest terms
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale)


# Interference -----------------------------------------------------------------------


def cosine(one, other):
    one, other = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])
        for tree in (one, other)
    )
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


def test_gradient_cosines_and_their_control(parts, state, batches):
    """Against gradients of the trajectories' own batches, chosen on the host."""
    graph, _, base = parts
    found = gradient_cosines(graph, base, state, batches, WEIGHED)
    gradients = {}
    for role in range(2):
        for half in range(2):
            chosen = []
            for number, b in enumerate(batches):
                rows = number * b.tokens.shape[0] + np.arange(b.tokens.shape[0])
                own = (rows[:, None] + np.asarray(b.segment_ids)) % 2 == half
                own &= np.asarray(b.roles) == role
                chosen.append(b.replace(action_mask=b.action_mask & own))
            part, _ = update.gradient(graph, base, state, chosen, WEIGHED)
            gradients[role, half] = part
    across = cosine(gradients[0, 0], gradients[1, 1])
    across += cosine(gradients[0, 1], gradients[1, 0])
    name = "roles/gradient_cosine"
    assert found[f"{name}/across"] == pytest.approx(across / 2, abs=1e-5)
    for role, label in enumerate(ROLES):
        within = cosine(gradients[role, 0], gradients[role, 1])
        assert found[f"{name}/{label}"] == pytest.approx(within, abs=1e-5)


def test_equal_halves_have_cosine_one_and_a_missing_role_none(parts, state):
    one = random_examples(6, groups=1, members=1, longest=6, turns=1)[0]
    batches = [update.place(b) for b in collate([one, one], **SMALL, router=Parity())]
    graph, _, base = parts
    found = gradient_cosines(graph, base, state, batches, WEIGHED)
    for label in ROLES:
        assert found[f"roles/gradient_cosine/{label}"] == pytest.approx(1, abs=1e-5)
    batches = [update.place(b) for b in collate([one, one], **SMALL)]
    found = gradient_cosines(graph, base, state, batches, WEIGHED)
    assert found.keys() == {"roles/gradient_cosine/reasoning"}


# Export -----------------------------------------------------------------------------


def test_two_peft_folders_and_back(parts, tmp_path):
    model = lora.merge(*parts)
    models.save_peft(tmp_path, model, "owner/base")
    again = models.load_model("tiny", lora=model.lora)
    models.load_peft(tmp_path, again)
    pairs = zip(
        jax.tree.leaves(nnx.state(again, nnx.LoRAParam)),
        jax.tree.leaves(parts[1]),
        strict=True,
    )
    for found, expected in pairs:
        np.testing.assert_array_equal(found, expected)
    plain = dataclasses.replace(model.lora, routed=False)
    for role, name in enumerate(ROLES):
        one = models.load_model("tiny", lora=plain)
        models.load_peft(tmp_path / name, one)
        expected = jax.tree.leaves(single(parts[1], role)[1])
        found = jax.tree.leaves(nnx.state(one, nnx.LoRAParam))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_what_routed_adapters_cannot_be(parts, tmp_path):
    model = lora.merge(*parts)
    with pytest.raises(BadInput, match="routed adapters cannot be merged"):
        models.save_merged(tmp_path, model, tokenizer())
    models.save_peft(tmp_path / "both", model, "owner/base")
    plain = dataclasses.replace(model.lora, routed=False)
    with pytest.raises(BadInput, match=r"adapter_config\.json"):
        models.load_peft(tmp_path / "both", models.load_model("tiny", lora=plain))
    with pytest.raises(BadInput, match=r"reasoning.*adapter_config\.json"):
        models.load_peft(tmp_path / "both" / "tool", model)


def test_leas_golden():
    scores = (0.2, 0.3, 0.35, 0.4)
    np.testing.assert_allclose(interference_term(*scores), -0.05, atol=1e-9)
    got = interference_term(*scores, logits=True)
    np.testing.assert_allclose(got, -0.325422, atol=1e-6)
    np.testing.assert_allclose(np.linalg.det(LEAS_DESIGN), -1, atol=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        interference_term(0.0, 0.3, 0.35, 0.4, logits=True)


def test_leas_interaction_is_the_designs_last_effect():
    """Solving the six equations gives the same number, whatever the heads score."""
    scores = np.random.default_rng(0).random(6)
    effects = np.linalg.solve(np.array(LEAS_DESIGN, float), scores)
    base, reasoning, tool, both = scores[:4]
    expected = interference_term(base, reasoning, tool, both)
    np.testing.assert_allclose(effects[5], expected, atol=1e-9)
