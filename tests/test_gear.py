"""GEAR's token weights: worked example, float64 reference; and the self-teacher."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from toy import ToyEnvironment
from trajectories import random_examples, tiny_parts

from grpo_jax import models, objective
from grpo_jax.config import BadInput
from grpo_jax.rollout.chat import Chat
from grpo_jax.training import update
from grpo_jax.training.batching import pack
from grpo_jax.training.teacher import (
    HINT,
    Teacher,
    check_ground_truth,
    ground_truth,
    informed_prompts,
)
from grpo_jax.types import Segment, Source
from tools_env.protocol import Task

D = np.array([[0.1, 0.1, 1.6, 0.2, 0.1, 0.1, 2.1, 0.3]], np.float32)
H = np.array([[0.2, 0.3, 0.9, 0.4, 0.3, 1.4, 1.2, 0.2]], np.float32)
ALL = np.ones(D.shape, bool)


def weights(gaps, entropies, mask, **options):
    """For divergences: the student's log-probs are 0, the teacher's any sign."""
    signs = np.where(np.arange(gaps.shape[1]) % 2, 1, -1).astype(np.float32)
    return objective.gear_weights(signs * gaps, 0 * gaps, entropies, mask, **options)


def reference(gaps, entropies, mask, kappa=0.5, low=0.2, high=3.0):
    """One trajectory, token by token, in float64; thresholds 1."""
    value, carried = np.where(gaps < 1e-4, 0, gaps.astype(np.float64)), None
    for t, live in enumerate(mask):
        if not live:
            carried = None  # what a tool says ends the turn
        elif gaps[t] > 1:
            carried = value[t]
        elif entropies[t] > 1:
            carried = None
        if live and carried is not None:
            value[t] = carried
    used = value[mask]
    raw = 1 + kappa * (used - used.mean()) / (used.std() + 1e-6)
    found = np.ones(len(gaps))
    found[mask] = np.clip(raw, low, high)
    found[mask] /= found[mask].mean()
    return found


def test_golden():
    got, anchors = weights(D, H, ALL)
    expected = [0.371663] * 2 + [1.258727] * 3 + [0.371663] + [1.554415] * 2
    np.testing.assert_allclose(got[0], expected, atol=1e-5)
    assert anchors[0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    scaled = [0.29733] * 2 + [1.006982] * 3 + [0.29733] + [1.243532] * 2
    np.testing.assert_allclose(0.8 * got[0], scaled, atol=1e-5)


@pytest.mark.parametrize("limits", [{}, {"kappa": 2.0, "low": 0.5, "high": 1.5}])
def test_against_reference_packed_and_not(limits):
    """Masked tokens hold what must not reach a result; a clip binds."""
    rng = np.random.default_rng(0)
    gaps, entropies = rng.exponential(0.8, (2, 6, 40)).astype(np.float32)
    mask = rng.random((6, 40)) < 0.8
    expected = np.stack(
        [reference(*row, **limits) for row in zip(gaps, entropies, mask, strict=True)]
    )
    bad = np.where(mask, gaps, np.nan)
    got, _ = weights(bad, entropies, mask, **limits)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose((got * mask).sum(1) / mask.sum(1), 1.0, atol=1e-5)

    def one(x):
        return x.reshape(2, 120)

    ids = one(np.repeat(np.arange(1, 7)[:, None] % 3 + 1, 40, 1))
    packed, _ = weights(one(bad), one(entropies), one(mask), segment_ids=ids, **limits)
    np.testing.assert_allclose(packed, one(expected), atol=1e-5)


def test_equal_divergences_change_nothing():
    got, anchors = weights(np.full_like(D, 0.3), H, ALL)
    np.testing.assert_allclose(got, 1.0, atol=1e-5)
    assert not anchors.any()
    high, anchors = weights(np.full_like(D, 3.0), H, ALL)
    np.testing.assert_allclose(high, 1.0, atol=1e-5)
    assert anchors.all()


def test_signs_stay_and_the_advantage_is_only_moved():
    rng = np.random.default_rng(1)
    gaps = rng.exponential(3.0, (8, 30)).astype(np.float32)
    got, _ = weights(gaps, gaps[::-1], gaps >= 0, kappa=9.0)
    assert (got > 0).all()
    np.testing.assert_allclose(got.mean(axis=1), 1.0, atol=1e-5)


def test_no_teacher_and_no_tokens_mean_weight_1():
    nothing = jnp.full(D.shape, jnp.nan)
    for teacher, mask in ((nothing, ALL), (D, ~ALL)):
        got, anchors = objective.gear_weights(teacher, 0 * D, H, mask)
        assert (got == 1).all() and not anchors.any()


# The self-teacher ---------------------------------------------------------------------

LENGTH, ROWS = 31, 4
LIMITS = dict(divergence=1.0, entropy=1.0, kappa=0.5, low=0.2, high=3.0)


def packed(examples):
    batches, places = pack(examples, row_length=LENGTH, rows=ROWS)
    return [update.place(batch) for batch in batches], places


@pytest.fixture(scope="module")
def parts():
    return tiny_parts()


@pytest.fixture(scope="module")
def examples():
    return random_examples(0, groups=5, members=2, longest=4, turns=2)


def scorer(parts):
    graph, adapters, base = parts
    return lambda batch: update.score(graph, adapters, base, batch, temperature=1.0)


def told(task):
    """Three more tokens for every task but one, and too many for another."""
    number = int(task.id[-1])
    return [np.arange(5), None, np.arange(40), np.arange(7), np.arange(6)][number]


def scores(parts, examples):
    """Log-probs of every completion, by the program of the update."""
    batches, places = packed(examples)
    tables = np.concatenate([np.asarray(scorer(parts)(b)) for b in batches])
    return [tables[place] for place in places]


def test_the_teacher_reads_the_completion_behind_its_own_prompt(parts, examples):
    teacher = Teacher(told, LENGTH, 1.0, **LIMITS)
    found, metrics = teacher.taught(examples, scorer(parts), packed)
    assert metrics == {"gear/taught": 0.6}
    for got, one in zip(found, examples, strict=True):
        prompt = told(one.trajectory.task)
        if one.trajectory.group in (1, 2):
            assert np.isnan(got.teacher_logprobs).all()
            continue
        segments = [Segment.given(Source.PROMPT, prompt)]
        segments += one.trajectory.segments[1:]
        alone = dataclasses.replace(one.trajectory, segments=segments)
        (expected,) = scores(parts, [dataclasses.replace(one, trajectory=alone)])
        np.testing.assert_allclose(got.teacher_logprobs, expected, atol=1e-5)
        assert got.trajectory is one.trajectory


def test_advantages_are_weighted_where_there_is_a_teacher(parts, examples):
    graph, adapters, base = parts
    teacher = Teacher(told, LENGTH, 1.0, **LIMITS)
    found, _ = teacher.taught(examples, scorer(parts), packed)
    batches, places = packed(found)
    done = [teacher.weigh(graph, adapters, base, batch) for batch in batches]
    factors = np.concatenate(
        [
            np.where(old.action_mask, new.advantages / old.advantages, np.nan)
            for (new, _), old in zip(done, batches, strict=True)
        ]
    )
    means = [np.nanmean(factors[place]) for place in places]
    np.testing.assert_allclose(means, 1.0, atol=1e-5)
    spreads = np.array([np.nanstd(factors[place]) for place in places])
    assert (spreads[2:6] < 1e-5).all() and spreads.max() > 0.1
    shown = update.read([metrics for _, metrics in done])
    assert shown["gear/divergence"] > 0 and 0 < shown["gear/anchors"] < 1


def test_a_teachers_infinite_log_prob_leaves_the_divergence_of_the_others(
    parts, examples
):
    graph, adapters, base = parts
    teacher = Teacher(told, LENGTH, 1.0, **LIMITS)
    found, _ = teacher.taught(examples, scorer(parts), packed)
    batch = packed(found)[0][0]
    known = np.array(batch.action_mask & np.isfinite(batch.teacher_logprobs))
    where = tuple(np.argwhere(known)[0])
    bad = batch.replace(teacher_logprobs=batch.teacher_logprobs.at[where].set(-np.inf))
    gap = np.abs(batch.teacher_logprobs - scorer(parts)(batch))
    known[where] = False
    _, metrics = teacher.weigh(graph, adapters, base, bad)
    total, count = metrics["gear/divergence"]
    assert count == known.sum() > 0
    np.testing.assert_allclose(total, gap[known].sum(), rtol=1e-5)


def test_a_teacher_that_knows_no_more_leaves_every_advantage(parts, examples):
    graph, adapters, base = parts
    prompts = {e.trajectory.task.id: e.trajectory.prompt for e in examples}
    teacher = Teacher(lambda task: prompts[task.id], LENGTH, 1.0, **LIMITS)
    found, metrics = teacher.taught(examples, scorer(parts), packed)
    assert metrics == {"gear/taught": 1.0}
    for batch in packed(found)[0]:
        weighed, _ = teacher.weigh(graph, adapters, base, batch)
        assert (weighed.advantages == batch.advantages).all()


class Shown(ToyEnvironment):
    """Its demonstrations stand in the column `shown`."""

    def demonstration(self, task):
        return task.columns.get("shown")


CALLS = [
    {"role": "assistant", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "three"},
]


def task(**columns):
    messages = [{"role": "user", "content": "How many?"}]
    return Task("t", messages, columns)


def test_the_ground_truth_is_a_column_or_a_demonstration():
    truth = functools.partial(ground_truth, environment=Shown())
    assert truth(task(answer=7, shown=CALLS)) == "7"
    assert truth(task(shown=CALLS)) == "one\nthree"
    assert truth(task(demonstration=CALLS[:1], shown=CALLS)) == "one"
    assert truth(task()) is None
    check_ground_truth([task(), task(answer=0)], Shown())
    with pytest.raises(BadInput, match="token_weights='gear' needs right answers"):
        check_ground_truth([task(), task()], Shown())


def test_the_teachers_prompt_ends_with_the_truth():
    chat = Chat(models.load_tokenizer("tiny"))
    prompts = informed_prompts(Shown(), chat)
    text = chat.decode(prompts(task(answer=7)).tolist())
    own = chat.decode(chat.prompt(task().prompt))
    assert text == own.replace("How many?", f"How many?\n\n{HINT}\n7")
    assert informed_prompts(Shown(), chat)(task()) is None


def test_tasks_of_one_id_have_each_their_own_truth():
    chat = Chat(models.load_tokenizer("tiny"))
    prompts = informed_prompts(Shown(), chat)
    texts = [chat.decode(prompts(task(answer=n)).tolist()) for n in (7, 8)]
    assert [
        text.count(f"{HINT}\n{n}") for text, n in zip(texts, (7, 8), strict=True)
    ] == [1, 1]
