"""The device sampler: kept caches against whole forwards, draws against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trajectories import tiny_parts

from grpo_jax.models import lora
from grpo_jax.rollout import sampler
from grpo_jax.rollout.sampler import (
    OUT_OF_BUDGET,
    RUNNING,
    STOPPED,
    Sampling,
    inverse_cdf,
)

SLOTS, LENGTH, CHUNK, STEPS = 4, 192, 16, 12
NO_STOPS = np.array([-1, -1], np.int32)  # two, as where there are some: one program


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


@pytest.fixture(scope="module")
def score(parts):
    """tokens -> log_softmax(logits / temperature) of one full forward, [T,V]."""
    forward = jax.jit(lambda adapters, base, x: lora.merge(parts[0], adapters, base)(x))

    def score(tokens, temperature=1.0):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(forward(*parts[1:], padded)[0], np.float64)
        scaled = logits[: len(tokens)] / temperature
        return scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)

    return score


def random_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


class Slots:
    """The sampler's programs on one model, with the conversation of every slot."""

    def __init__(self, parts, sampling, seed=0):
        self.parts, self.sampling = parts, sampling
        config = lora.merge(*parts).config
        state = sampler.empty_state(config, SLOTS, LENGTH, jnp.float32)
        keys = jax.random.split(jax.random.key(seed), SLOTS)
        self.state = state.replace(keys=keys)
        self.tokens = [[] for _ in range(SLOTS)]
        self.sampled = [[] for _ in range(SLOTS)]  # (index, log-prob)
        self.pending = [[] for _ in range(SLOTS)]

    def append(self, texts):
        """texts: slot -> ids. What was sampled last goes first."""
        whole = [self.pending[slot] + text for slot, text in texts.items()]
        shape = dict(rows=SLOTS, chunk=CHUNK, live=LENGTH)
        self.state = sampler.append(
            *self.parts, self.state, list(texts), whole, **shape
        )
        for slot, text in texts.items():
            self.tokens[slot] += text
            self.pending[slot] = []

    def decode(self, budgets, stops=NO_STOPS):
        """budgets: slot -> tokens; returns the burst."""
        left = np.zeros(SLOTS, np.int32)
        left[list(budgets)] = list(budgets.values())
        options = dict(sampling=self.sampling, steps=STEPS, live=LENGTH)
        self.state, burst = sampler.decode(
            *self.parts, self.state, None, left, stops, **options
        )
        burst = jax.device_get(burst)
        for slot in budgets:
            for i in range(burst.counts[slot]):
                logprob = float(burst.logprobs[slot, i])
                self.sampled[slot].append((len(self.tokens[slot]), logprob))
                self.tokens[slot].append(int(burst.tokens[slot, i]))
            if burst.status[slot] != RUNNING:
                self.pending[slot] = self.tokens[slot][-1:]
        return burst


# Kept caches against whole forwards -------------------------------------------------


def test_greedy_tokens_and_logprobs_equal_a_full_forward(parts, score):
    slots = Slots(parts, Sampling(temperature=0.0))
    slots.append({0: random_ids(3, 1), 2: random_ids(37, 2)})
    for _ in range(3):
        slots.decode({0: 100, 2: 100})
    for slot in (0, 2):
        logprobs = score(slots.tokens[slot])
        assert len(slots.sampled[slot]) == 3 * STEPS
        for index, logprob in slots.sampled[slot]:
            assert slots.tokens[slot][index] == logprobs[index - 1].argmax()
            assert logprob == pytest.approx(logprobs[index - 1].max(), abs=1e-4)


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.5, top_k=20)],
    ids=["plain", "cold top-k"],
)
def test_logprobs_over_tool_turns_equal_one_full_forward(parts, score, sampling, turns):
    """Prefill, then decode and extend by turns; slots differ in every length."""
    slots = Slots(parts, sampling)
    slots.append({1: random_ids(5), 2: random_ids(33, 1), 3: random_ids(16, 2)})
    for turn in range(turns):
        slots.decode({1: 2, 2: 7, 3: 11})
        answer = {1: random_ids(20, turn), 2: random_ids(1, turn)}
        slots.append(answer if turn % 2 else {**answer, 3: random_ids(15, turn)})
        if turn % 2:  # slot 3 waits for its tools while the others decode
            slots.decode({1: 3, 2: 4})
            slots.append({1: random_ids(2), 2: random_ids(9), 3: random_ids(4)})
    slots.decode({1: 9, 2: 9, 3: 9})
    for slot in (1, 2, 3):
        logprobs = score(slots.tokens[slot], sampling.temperature)
        assert len(slots.sampled[slot]) > 9 * turns / 5
        for index, logprob in slots.sampled[slot]:
            expected = logprobs[index - 1, slots.tokens[slot][index]]
            assert logprob == pytest.approx(expected, abs=1e-4)
        # The token that ended the last turn is the only one not in the cache.
        assert int(slots.state.lengths[slot]) == len(slots.tokens[slot]) - 1


def test_a_placed_prompt_is_the_prompt_itself(parts, score):
    """Two slots take over prompt 1 of another state; old contents do not matter."""
    slots = Slots(parts, Sampling(temperature=0.0))
    slots.append({slot: random_ids(60, slot) for slot in range(SLOTS)})
    prompts = Slots(parts, Sampling())
    texts = {0: random_ids(40, 5), 1: random_ids(23, 6)}
    prompts.append(texts)
    for slot in (0, 3):
        key = jax.random.key(7)
        slots.state = sampler.place(slots.state, prompts.state, 1, slot, key, slot)
        slots.tokens[slot] = list(texts[1])
    slots.decode({slot: STEPS for slot in range(SLOTS)})
    for slot in (0, 3):
        logprobs = score(slots.tokens[slot])
        assert slots.tokens[slot][23:] == logprobs[22:-1].argmax(-1).tolist()
    assert slots.state.drawn.tolist() == [STEPS] * SLOTS
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(7), 3))
    assert jax.random.key_data(slots.state.keys)[3].tolist() == expected.tolist()


@pytest.mark.parametrize("pad", [0, 97, 256])
def test_KV1_positions_do_not_depend_on_padding(parts, score, pad):
    """A row of 3 alone and beside one of 9, padded to 16 with any id."""
    model, row, other = lora.merge(*parts), random_ids(3, 3), random_ids(9, 4)
    alone = score(row)[-1]
    for texts in ([row], [row, other]):
        state = sampler.empty_state(model.config, SLOTS, LENGTH, jnp.float32)
        tokens = np.full((SLOTS, CHUNK), pad, np.int32)
        counts = np.zeros(SLOTS, np.int32)
        for i, text in enumerate(texts):
            tokens[i, : len(text)], counts[i] = text, len(text)
        rows = np.arange(SLOTS, dtype=np.int32)
        state = sampler.extend(*parts, state, rows, tokens, counts, live=LENGTH)
        assert state.lengths.tolist() == counts.tolist()
        logprobs = jax.nn.log_softmax(model.logits(state.hidden)[0])
        np.testing.assert_allclose(logprobs, alone, atol=1e-4)
        assert logprobs.argmax() == alone.argmax()


# What ends a burst ------------------------------------------------------------------


def test_ST1_bursts_end_at_any_stop_id_budget_or_step_count(parts):
    plain = Slots(parts, Sampling(temperature=0.0))
    prompts = {slot: random_ids(4 + slot, slot) for slot in range(3)}
    plain.append(prompts)
    plain.decode({slot: STEPS for slot in prompts})
    free = [plain.tokens[slot][4 + slot :] for slot in prompts]

    first, second = free[0][2], free[1][4]  # ends slot 0 and slot 1, if not earlier
    slots = Slots(parts, Sampling(temperature=0.0))
    slots.append(prompts)
    burst = slots.decode({0: 99, 1: 99, 2: 3}, np.array([first, second], np.int32))
    for slot in (0, 1):
        end = next(i for i, t in enumerate(free[slot]) if t in (first, second)) + 1
        assert slots.tokens[slot][4 + slot :] == free[slot][:end]
        assert burst.counts[slot] == end and burst.status[slot] == STOPPED
    assert not {first, second} & set(free[2][:3])
    assert burst.counts[2] == 3 and burst.status[2] == OUT_OF_BUDGET
    assert burst.counts[3] == 0 and burst.status[3] != RUNNING  # was not active
    assert not burst.tokens[0, burst.counts[0] :].any()
    assert not burst.logprobs[0, burst.counts[0] :].any()
    assert slots.state.drawn.tolist() == burst.counts.tolist()


def test_a_stop_id_at_the_end_of_the_budget_is_a_stop(parts):
    slots = Slots(parts, Sampling(temperature=0.0))
    slots.append({0: random_ids(4)})
    last = slots.decode({0: 1}).tokens[0, 0]
    again = Slots(parts, Sampling(temperature=0.0))
    again.append({0: random_ids(4)})
    burst = again.decode({0: 1}, np.array([last, last], np.int32))
    assert burst.status[0] == STOPPED and burst.counts[0] == 1


def test_RN1_draws_depend_on_the_stream_and_the_number_alone(parts):
    """Interrupted bursts and other slots' doings leave a slot's draws as they are."""
    texts = {slot: random_ids(6, slot) for slot in range(SLOTS)}
    whole = Slots(parts, Sampling())
    whole.append(texts)
    whole.decode(dict.fromkeys(texts, 99))
    whole.decode(dict.fromkeys(texts, 99))
    parted = Slots(parts, Sampling())
    parted.append({2: texts[2]})
    parted.decode({2: 5})
    parted.append({2: []})  # the token that ended the burst
    parted.append({0: texts[0]})
    parted.decode({2: 7, 0: 3})
    parted.append({2: []})
    parted.decode({2: STEPS})
    assert parted.tokens[2] == whole.tokens[2]
    assert len({tuple(tokens[6:]) for tokens in whole.tokens}) == SLOTS


# Draws ------------------------------------------------------------------------------


invert = jax.jit(inverse_cdf, static_argnames="block")


@functools.partial(jax.jit, static_argnames="count")
def draws(logits, sampling, count, seed=0):
    """`count` tokens of one row of logits, each from a stream of its own."""
    keys = jax.random.split(jax.random.key(seed), count)
    rows = jnp.broadcast_to(logits, (count, len(logits)))
    return sampler.draw(rows, keys, jnp.zeros(count, jnp.int32), sampling)


def chi_square(counts, probabilities):
    """(statistic - dof) / its standard deviation; counts where p = 0 must be 0."""
    assert not counts[probabilities == 0].any()
    kept = probabilities > 0
    expected = counts.sum() * probabilities[kept]
    statistic = np.sum((counts[kept] - expected) ** 2 / expected)
    dof = kept.sum() - 1
    return (statistic - dof) / np.sqrt(2 * dof)


@pytest.mark.parametrize("size,block", [(300, 256), (64, 16), (7, 256)])
def test_inverse_cdf_draws_in_proportion_to_the_weights(size, block):
    generator = np.random.default_rng(size + block)
    weights = generator.exponential(size=size) * (generator.random(size) < 0.7)
    uniforms = jax.random.uniform(jax.random.key(block), 20_000)
    rows = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (20_000, size))
    indices = np.asarray(invert(rows, uniforms, block))
    counts = np.bincount(indices, minlength=size)
    assert chi_square(counts, weights / weights.sum()) < 4
    # The plain inverse: of float64 sums, so at a boundary it may differ by rounding.
    targets = np.asarray(uniforms, np.float64) * weights.sum()
    expected = np.searchsorted(np.cumsum(weights), targets, side="right")
    assert np.mean(indices == expected) > 0.999


@pytest.mark.parametrize("block", [4, 256])
def test_inverse_cdf_at_its_edges(block):
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    rows = [
        ([0, 0, 0, 0, 0, 2, 1, 0, 0, 0], 0.0, 5),  # zeros in front are passed over
        ([0, 0, 0, 0, 0, 2, 1, 0, 0, 0], almost_one, 6),  # zeros behind never chosen
        ([0, 0, 0, 3, 0, 0, 0, 0, 0, 0], 0.5, 3),  # a lone weight
        ([0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0], 0.5, 1),  # at a boundary: the next one
        ([0.5, 0, 0, 0, 0, 0, 0, 0, 0.5, 0], 0.5, 8),
        ([1e-30, 0, 0, 0, 0, 0, 0, 0, 0, 1e-30], almost_one, 9),  # no scale needed
        ([1, 0, 0, 0, 0, 0, 0, 0, 0, 0], almost_one, 0),
        ([np.nan] * 10, 0.5, 9),  # a broken policy gives an id all the same
    ]
    weights, uniforms, expected = zip(*rows, strict=True)
    drawn = invert(
        jnp.asarray(weights, jnp.float32), jnp.asarray(uniforms, jnp.float32), block
    )
    assert drawn.tolist() == list(expected)


def test_inverse_cdf_never_chooses_weight_zero():
    """Running sums of 151,936 entries round; the draws at the seams stay legal."""
    generator = np.random.default_rng(0)
    weights = generator.exponential(size=151_936).astype(np.float32)
    weights *= generator.random(151_936) < 0.01
    sums = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    seams = sums[generator.integers(0, len(sums), 60)].astype(np.float32)
    uniforms = np.concatenate([seams, [0, np.nextafter(1, 0, dtype=np.float32)]])
    rows = jnp.broadcast_to(weights, (len(uniforms), len(weights)))
    drawn = np.asarray(invert(rows, jnp.minimum(uniforms, 1 - 2**-24)))
    assert (weights[drawn] > 0).all()


def reference_kept(logits, sampling):
    """The ids that may be drawn: top-k, then top-p of what is left, ties included."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    probs = np.exp(np.asarray(logits, np.float64) / sampling.temperature)
    order = order[: sampling.top_k or None]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if mass >= sampling.top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    return {i for i in range(len(logits)) if logits[i] >= logits[kept[-1]]}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=3),
        Sampling(temperature=2.0, top_k=100),
        Sampling(top_p=0.6),
        Sampling(top_k=5, top_p=0.7),  # of the five's mass, not of the whole
    ],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_and_top_p_keep_what_the_reference_keeps(sampling, ties):
    logits = np.array([0.1, 2.0, -0.5, 1.4, 0.7, 1.9, -0.2, 1.1, 0.4, -0.9])
    if ties:
        logits = np.round(logits)
    tokens, logprobs = draws(jnp.asarray(logits, jnp.float32), sampling, 4_000)
    kept = reference_kept(logits, sampling)
    assert set(np.asarray(tokens).tolist()) == kept
    # Log-probs are of the full distribution, before the filters; draws renormalise.
    scaled = logits / sampling.temperature
    expected = scaled - np.logaddexp.reduce(scaled)
    np.testing.assert_allclose(logprobs, expected[np.asarray(tokens)], atol=1e-5)
    if len(kept) > 1:
        masked = np.where([i in kept for i in range(10)], np.exp(expected), 0)
        counts = np.bincount(np.asarray(tokens), minlength=10)
        assert chi_square(counts, masked / masked.sum()) < 5


def test_LP1_temperature_zero_and_precision():
    def logprobs(logits, temperature):
        """id -> log-prob of what 2,000 draws gave."""
        tokens, values = draws(jnp.asarray(logits), Sampling(temperature), 2_000)
        assert np.isfinite(values).all() and (np.asarray(values) <= 0).all()
        return dict(zip(np.asarray(tokens).tolist(), np.asarray(values), strict=True))

    half = logprobs([2.0, 1.0, 0.0], 0.5)
    assert half == pytest.approx(
        {0: -0.1429316, 1: -2.1429316, 2: -4.1429316}, abs=1e-5
    )
    one = logprobs([2.0, 1.0, 0.0], 1.0)
    assert one == pytest.approx({0: -0.4076060, 1: -1.4076060, 2: -2.4076060}, abs=1e-5)
    greedy = logprobs([1.0, 3.0, 3 - 1e-6], 0.0)
    assert greedy == pytest.approx({1: -0.7586}, abs=1e-3)  # of the raw logits
    fine = logprobs([20.0625, 19.9375, 3.0], 1.0)
    assert fine == pytest.approx({0: -0.632599, 1: -0.757599}, abs=1e-5)
