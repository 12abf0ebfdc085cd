"""Choices that cannot be composed are refused with the reason."""

import pytest

from configs import base, tir
from grpo_jax import config as configuration
from grpo_jax.config import BadInput

CLASHES = [
    (
        {"estimator": "ngrpo", "drop_flat_groups": True},
        "all-wrong groups.*use drop_saturated_groups",
    ),
    ({"estimator": "gigpo", "scale_rewards": "batch"}, "use 'std' or 'none'"),
    ({"estimator": "steppo", "scale_rewards": "batch"}, "which knows no groups"),
    ({"estimator": "dr_grpo", "scale_rewards": "batch"}, "which never divides"),
    ({"estimator": "gtpo", "scale_rewards": "batch"}, "objective.norm_scope='batch'"),
    ({"estimator": "rloo", "scale_rewards": "batch"}, "never divides; use 'std' or"),
    ({"estimator": "lead", "scale_rewards": "none"}, "always divides"),
    ({"estimator": "lead", "overlong_buffer": 64}, "=64 would not be read"),
    ({"lld": 0.2}, "exactly 0 with one update a rollout batch"),
    ({"lld_answer": "paper"}, "part of objective.lld, which is 0"),
    ({"step": "role"}, "'grpo' has no steps"),
    ({"overlong_buffer": 600}, "=600 is above rollout.max_completion_length=512"),
    ({"dual_clip": 1.0}, r"must be above 1\.0 with objective\.clip='fixed'"),
    ({"clip": "sqrt_log", "dual_clip": 0.0}, r"must be above 0\.0"),
    ({"max_draws": 2}, "set objective.drop_flat_groups or"),
    ({"redraw": "value"}, "max_draws=1 replaces none"),
    ({"surrogate": "cispo", "dual_clip": 3.0}, "bounds every weight already"),
    ({"tis_level": "sequence"}, "not used without objective.tis_cap"),
    ({"tis_mode": "mask"}, "not used without objective.tis_cap"),
]


ROLES = [
    ({"role_weights": (0.3,)}, "must be .. or .reasoning, tool."),
    ({"role_weights": (0.3, -0.7)}, "at least 0"),
    ({"role_weights": (0, 0)}, "not both 0"),
    ({"role_weights": ("a", 1)}, "numbers"),
]


def made(changes, **keys):
    config = base.get_config()
    config.objective.update(changes)
    config.update_from_flattened_dict(
        {k.replace("__", "."): v for k, v in keys.items()}
    )
    return config


def refused(config, reason):
    with pytest.raises(BadInput, match=reason):
        configuration.check(config)


UNREAD = {
    "parsed": 0.1,
    "schema_valid": 0.1,
    "executed": 0.1,
    "interaction": 0.1,
    "floor": 0.5,
    "overuse": (("t", "toy.vowels", 0.3),),
    "stages": True,
    "failure_bonus": True,
    "similarity": 0.5,
}


@pytest.mark.parametrize("name", UNREAD)
def test_lead_reads_no_reward_beside_right_and_wrong(name):
    config = made({}, **{f"reward__{name}": UNREAD[name]})
    configuration.check(config)
    config.objective.estimator = "lead"
    refused(config, rf"reward\.{name}=.*would not be read.*'lead' sets the rewards")
    config.reward.floor_mode = "kl"  # no reward
    if name == "floor":
        configuration.check(config)


def test_mt_grpo_needs_a_reward_by_turn():
    config = made({"estimator": "mt_grpo"})
    refused(config, "'mt_grpo' without a reward by turn is 'grpo'")
    for keys in (
        {"reward__executed": 0.2},
        {"reward__interaction": 0.1},
        {"reward__functions": ("toy.vowel_reward",)},
        {"tools__environment": "toy.ToyEnvironment"},
    ):
        configuration.check(made({"estimator": "mt_grpo"}, **keys))
    config = made({"estimator": "mt_grpo", "scale_rewards": "none"})
    config.reward.executed = 0.2
    refused(config, "turns are always divided")


def test_the_lld_penalty_needs_a_second_update_or_dropout():
    for keys in (
        {"train__num_minibatches": 2},
        {"train__num_iterations": 2},
        {"lora__dropout": 0.1},
    ):
        configuration.check(made({"lld": 0.2, "lld_answer": "code"}, **keys))


def test_variants_that_leave_the_lld_penalty_without_effect_are_refused():
    configuration.check(tir.get_config("llds"))
    refused(tir.get_config("rloo,llds"), "exactly 0 with one update")


def test_two_ways_to_grade_failures_are_refused():
    refused(made({}, reward__stages=True, reward__failure_bonus=True), "use one")


@pytest.mark.parametrize(("changes", "reason"), CLASHES + ROLES)
def test_clashes_are_refused(changes, reason):
    with pytest.raises(BadInput, match=rf"objective\.{next(reversed(changes))}.*"):
        configuration.check(made(changes))
    with pytest.raises(BadInput, match=reason):
        configuration.check(made(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "ngrpo", "drop_saturated_groups": True},
        {"estimator": "gtpo", "ratio": "cumulative", "clip": "sqrt_log"},
        {"estimator": "gtpo", "scale_rewards": "none", "norm_scope": "batch"},
        {"estimator": "gigpo", "scale_rewards": "none"},
        {"tis_level": "sequence", "tis_mode": "mask", "tis_cap": 3.0},
        {"overlong_buffer": 512, "surrogate": "cispo"},
        {"max_draws": 3, "drop_flat_groups": True, "redraw": "value"},
        {"estimator": "ngrpo", "max_draws": 3, "drop_saturated_groups": True},
    ],
)
def test_what_goes_together_passes(changes):
    configuration.check(made(changes))


@pytest.mark.parametrize("key", ["routed", "role_weights", "role_gradients_every"])
def test_roles_need_reasoning_beside_the_call(key):
    config = base.get_config()
    config.lora.routed = key == "routed"
    config.objective.role_weights = (0.3, 0.7) if key == "role_weights" else ()
    config.objective.role_gradients_every = int(key == "role_gradients_every")
    configuration.check(config)
    config.data.answer_format = "tool"
    with pytest.raises(BadInput, match=f"{key} needs reasoning beside the tool call"):
        configuration.check(config)
