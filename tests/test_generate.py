"""`rollout.generate`: the contract's plain generation."""

import functools
import importlib

import jax
import numpy as np
import pytest
from flax import nnx
from trajectories import tiny_parts

from grpo_jax import models, rollout
from grpo_jax.models import lora

SHORT, LONG = [5, 70, 9], [12, 200, 31, 7, 7, 90, 255, 3, 44]
# Stop ids that nothing samples, two as where there are some: one program.
GREEDY = dict(max_new_tokens=32, temperature=0.0, stop_ids=(300, 301))
COLD = dict(max_new_tokens=20, temperature=0.5, top_k=16, top_p=0.98)


@pytest.fixture(scope="module")
def model():
    """Tiny, with adapters that do something."""
    return lora.merge(*tiny_parts())


@pytest.fixture(scope="module")
def plain():
    """Tiny, without adapters."""
    return models.load_model("tiny")


@pytest.fixture(scope="module")
def score(model):
    """prompt, tokens, temperature -> [n,V] log-probs by one full forward."""

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graph, state, tokens):
        return nnx.merge(graph, state)(tokens)

    def score(prompt, tokens, temperature=1.0, model=model):
        padded = np.zeros((1, 64), np.int32)
        row = [*prompt, *tokens]
        padded[0, : len(row)] = row
        scaled = (
            np.asarray(forward(*nnx.split(model), padded)[0], np.float64) / temperature
        )
        logprobs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
        return logprobs[len(prompt) - 1 : len(row) - 1]

    return score


def test_KV1_greedy_32_equal_argmax_of_full_forwards_alone_and_together(model, score):
    together = rollout.generate(model, [SHORT, LONG], **GREEDY)
    alone = rollout.generate(model, [SHORT], **GREEDY)
    assert alone[0][0] == together[0][0]
    for prompt, (tokens, logprobs, stop) in zip([SHORT, LONG], together, strict=True):
        expected = score(prompt, tokens)
        assert tokens == expected.argmax(-1).tolist() and len(tokens) == 32
        np.testing.assert_allclose(logprobs, expected.max(-1), atol=1e-4)
        assert stop == "length"
        assert all(type(token) is int for token in tokens)
        assert all(type(logprob) is float for logprob in logprobs)


def test_stop_ids_end_a_row_and_are_included(model):
    options = dict(max_new_tokens=32, temperature=0.0)
    free = [
        tokens for tokens, _, _ in rollout.generate(model, [SHORT, LONG], **options)
    ]
    stops = [free[0][3], free[1][9]]
    cut = rollout.generate(model, [SHORT, LONG], **{**GREEDY, "stop_ids": stops})
    for whole, (tokens, logprobs, stop) in zip(free, cut, strict=True):
        end = next(i for i, token in enumerate(whole) if token in stops)
        assert tokens == whole[: end + 1] and stop == "stop"
        assert len(logprobs) == len(tokens)
    (last,) = rollout.generate(model, [SHORT], **{**GREEDY, "max_new_tokens": 1})
    assert last[0] == free[0][:1] and last[2] == "length"


def test_LP1_logprobs_carry_the_temperature_and_no_filter(plain, score):
    results = rollout.generate(plain, [SHORT, LONG], **COLD)
    for prompt, (tokens, logprobs, _) in zip([SHORT, LONG], results, strict=True):
        expected = score(prompt, tokens, 0.5, plain)
        chosen = expected[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(logprobs, chosen, atol=1e-4)
        ranks = (expected > chosen[:, None]).sum(-1)
        assert ranks.max() < 16


def test_RN1_rows_have_streams_of_their_own(plain, monkeypatch):
    def sample(prompts, seed=0):
        results = rollout.generate(plain, prompts, seed=seed, **COLD)
        return [tuple(tokens) for tokens, _, _ in results]

    group = sample([np.asarray(SHORT)] * 8)
    assert sample([]) == []
    assert len(set(group)) == 8
    assert sample([SHORT] * 8) == group
    assert not set(sample([SHORT] * 8, seed=1)) & set(group)
    # Row i draws from stream i, whatever the others are and however many.
    assert sample([SHORT, LONG, LONG])[0] == group[0]
    monkeypatch.setattr(importlib.import_module(rollout.generate.__module__), "MANY", 8)
    many = sample([LONG] * 7 + [SHORT] + [LONG] * 10 + [SHORT])  # in three batches
    assert many[7] == group[7] and len(set(many)) == len(many) == 19


@pytest.mark.parametrize(
    "prompts,changes,message",
    [
        ([SHORT, []], {}, "prompt 1 is empty"),
        ([SHORT, [3, 264]], {}, "prompt 1 has id 264.* 264"),
        ([[-1]], {}, "prompt 0 has id -1"),
        ([[0.5]], {}, "prompt 0 is not a list of ids"),
        ([SHORT], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ([SHORT], {"temperature": -0.1}, "temperature .* not -0.1"),
        ([SHORT], {"temperature": float("nan")}, "temperature .* not nan"),
        ([SHORT], {"top_k": -1}, "top_k .* not -1"),
        ([SHORT], {"top_p": 0.0}, r"top_p must be in \(0, 1\], not 0.0"),
        ([SHORT], {"top_p": 1.5}, "top_p .* not 1.5"),
    ],
)
def test_bad_input_is_named(model, prompts, changes, message):
    with pytest.raises(ValueError, match=message):
        rollout.generate(model, prompts, **{"max_new_tokens": 2, **changes})
