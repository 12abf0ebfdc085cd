"""Every method variant makes two steps with the tiny model.

On one device, as they need no mesh, and with prompts of the size that these tasks have,
not of their limit: attention is quadratic in the packed row.
"""

import json

import numpy as np
import pytest

import run
from configs import fund, tir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals", "one_device")]

SHORT = {  # programs that compile in seconds
    "train.num_steps": 2,
    "train.micro_batch_size": 1,
    "rollout.max_completion_length": 64,
    "rollout.max_turn_length": 32,
    "rollout.max_tool_calling_iterations": 1,
    "rollout.slots": 3,  # too few for a second decoding program
    "rollout.burst": 32,
    "data.num_eval_tasks": 0,
    "eval.every": 0,
    "checkpoint.best": "",
}
# Bytes that hold the longest prompt, for aster two whole conversations.
PROMPTS = {"tir": 640, "fund": 384, "bank": 3200, "aster": 1400}
COLD = ("sft300", "sft1500", "aster")  # begin with a cold start
# aster2 goes on from a run of aster: test_staged.
METHODS = [("tir", name) for name in ("", *tir.VARIANTS) if name != "aster2"]
METHODS += [("fund", name) for name in fund.VARIANTS]


@pytest.mark.parametrize(("name", "variant"), METHODS)
def test_variant_makes_two_steps(name, variant, tmp_path, repository):
    longest = PROMPTS.get(variant, PROMPTS[name])
    cold = variant in COLD
    keys = SHORT | {"rollout.max_prompt_length": longest, "sft.num_epochs": int(cold)}
    arguments = [f"--config={repository}/configs/{name}.py:{variant},tiny"]
    arguments += [f"--config.{key}={value}" for key, value in keys.items()]
    assert run.main([*arguments, f"--workdir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "sft_metrics.jsonl").exists() == cold
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        if step.get("filter/void_rows") == 1:
            continue  # the random model answers nothing: no row carries loss
        assert np.isfinite([step["loss"], step["grad_norm"], step["entropy"]]).all()
        assert step["ratio/mean_by_position/1"] > 0
