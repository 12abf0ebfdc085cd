"""The floor's multiplier: golden step, limits, and a policy that drifts to text."""

import json

import numpy as np
import pytest
from toy import command

import run
from configs import tir
from grpo_jax import objective, setup
from grpo_jax.interaction import RATE, Controller
from grpo_jax.training.learn import Learner


def test_golden_step_of_the_multiplier():
    control = Controller(floor=0.5, rate=0.1)
    assert control.weight == 0.0
    assert control.take({RATE: 0.3})
    assert control.weight == pytest.approx(0.02)


def test_the_weight_rises_below_the_floor_and_falls_back_above_it():
    control = Controller(interaction=0.05, floor=0.5, rate=0.2, limit=0.15)
    weights = []
    for rate in [0.0] * 3 + [1.0] * 3:
        control.take({RATE: rate})
        weights.append(control.weight)
    assert weights == pytest.approx([0.15, 0.15, 0.15, 0.05, 0.05, 0.05])


def test_without_a_task_that_needs_a_tool_nothing_moves():
    control = Controller(floor=0.5, multiplier=0.1)
    assert not control.take({"reward": 0.3}) and control.weight == 0.1
    assert control.metrics({}) == {"interaction/weight": 0.1}


@pytest.mark.parametrize("mode", ["kl", "reject"])
def test_other_modes_say_that_the_batch_is_below_and_leave_the_weight(mode):
    control = Controller(interaction=0.1, floor=0.5, mode=mode)
    assert control.metrics({RATE: 0.4}) == {
        "interaction/weight": 0.1,
        "interaction/below_floor": 1.0,
    }
    assert control.take({RATE: 0.4}) and control.weight == 0.1
    assert not control.take({RATE: 0.5})


def test_off_by_default():
    control = Controller()
    assert not control.active and not control.take({RATE: 0.0})
    assert control.metrics({RATE: 0.0}) == {}


def test_the_state_is_json_and_goes_on_exactly():
    whole = Controller(floor=0.7, rate=0.13)
    for rate in (0.1, 0.6, 0.9, 0.33):
        whole.take({RATE: rate})
    resumed = Controller(floor=0.7, rate=0.13)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed == whole
    lower = Controller(interaction=0.1, floor=0.7, limit=0.11)
    lower.restore(whole.state())
    assert lower.weight == pytest.approx(0.11)
    lower.restore({})
    assert lower.weight == pytest.approx(0.1)


def drift(control, steps=800, group=16):
    """Mean call rate, over the second half, of a policy that text pays slightly more.

    Bernoulli(sigmoid(logit)) decides whether a trajectory calls its tool; a call earns
    .4 on average, text .5: the group-relative gradient drifts to text.
    """
    rng, logit, rates = np.random.default_rng(0), 1.5, []
    for _ in range(steps):
        rate = 1 / (1 + np.exp(-logit))
        calls = rng.random((4, group)) < rate
        rewards = np.where(calls, 0.4, 0.5) + 0.1 * rng.standard_normal(calls.shape)
        rewards = rewards + control.weight * calls
        control.take({RATE: float(calls.mean())})
        advantages = np.asarray(objective.group_advantages(rewards))
        logit += 0.2 * float((advantages * (calls - rate)).mean())
        rates.append(rate)
    return np.mean(rates[steps // 2 :])


def test_the_floor_restores_the_call_rate_of_a_policy_that_drifts_to_text():
    assert drift(Controller()) < 0.05
    # A multiplier swings around its constraint: the mean is what it holds.
    assert drift(Controller(floor=0.6, rate=0.02)) == pytest.approx(0.6, abs=0.1)


def test_below_the_floor_a_batch_is_learned_with_more_kl_or_not_at_all():
    config = tir.get_config("tiny")
    config.objective.beta = 0.01
    learner = object.__new__(Learner)
    for mode in ("bonus", "kl", "reject"):
        config.reward.floor_mode = mode
        config.reward.floor = 0.0
        assert setup.below_floor(config, learner) is learner
    config.reward.floor = 0.5
    assert setup.below_floor(config, learner) is None
    config.reward.floor_mode = "bonus"
    assert setup.below_floor(config, learner) is learner
    extra = setup.make_loss(config, config.reward.floor_kl)
    assert extra.beta == pytest.approx(0.11) and not extra.on_policy


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
def test_a_resumed_run_goes_on_with_the_weight_that_it_had(tmp_path):
    """The random model calls nothing: the weight rises by rate x floor a step."""
    options = [
        "--config.tools.environment=functions",
        "--config.tools.functions=('toy.vowels',)",
        "--config.reward.functions=('toy.vowel_reward',)",
        "--config.rollout.max_prompt_length=1024",
        "--config.sft.num_epochs=0",
        "--config.reward.floor=0.5",
    ]
    for steps in (2, 4):
        last = f"--config.train.num_steps={steps}"
        assert run.main(command(tmp_path, tmp_path / "run", *options, last)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["interaction/call_rate"] for row in rows] == [0.0] * 4
    weights = [row["interaction/weight"] for row in rows]
    assert weights == pytest.approx([0.0, 0.05, 0.1, 0.15], abs=1e-12)
    assert [row["interaction/below_floor"] for row in rows] == [1.0] * 4
    verdict = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert verdict["collapsed"] is False
