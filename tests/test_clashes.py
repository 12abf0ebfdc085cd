"""Choices that cannot be composed are refused with the reason."""

import pytest

from configs import base
from grpo_jax import config as configuration
from grpo_jax.config import BadInput

CLASHES = [
    (
        {"estimator": "ngrpo", "drop_flat_groups": True},
        "all-wrong groups.*use drop_saturated_groups",
    ),
    ({"estimator": "gigpo", "scale_rewards": "batch"}, "use 'std' or 'none'"),
    ({"estimator": "steppo", "scale_rewards": "batch"}, "which knows no groups"),
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


def made(changes):
    config = base.get_config()
    config.objective.update(changes)
    return config


@pytest.mark.parametrize(("changes", "reason"), CLASHES + ROLES)
def test_clashes_are_refused(changes, reason):
    with pytest.raises(BadInput, match=rf"objective\.{next(reversed(changes))}.*"):
        configuration.check(made(changes))
    with pytest.raises(BadInput, match=reason):
        configuration.check(made(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "ngrpo", "drop_saturated_groups": True, "lld": 0.2},
        {"estimator": "gtpo", "ratio": "cumulative", "clip": "sqrt_log", "lld": 0.2},
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
