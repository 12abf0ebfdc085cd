"""Which adapters a mode works on, also while a training beside deletes old steps."""

import json
import logging

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import checkpoints, models, policy
from grpo_jax.checkpoints import Checkpoints
from grpo_jax.config import BadInput
from grpo_jax.training import update

KEYS = models.LoraConfig(4, 8.0, models.LORA_TARGETS, 0.0)


@pytest.fixture(scope="module")
def fresh():
    return nnx.state(models.load_model("tiny", lora=KEYS), nnx.LoRAParam)


def tree(adapters, value):
    """What a training saves, every adapter of one value."""
    filled = jax.tree.map(lambda x: 0 * x + value, adapters)
    optimizer = update.make_optimizer(1e-3, warmup_steps=1, total_steps=4)
    return {"state": update.new_state(filled, optimizer, jax.random.key(0))}


def values(adapters):
    return {float(x) for leaf in jax.tree.leaves(adapters) for x in np.unique(leaf)}


class Training:
    """Keeps its newest step, and the best one by `best`."""

    def __init__(self, workdir, adapters, best=""):
        self.saver = Checkpoints(workdir / "checkpoints", keep=1, best_metric=best)
        self.adapters = adapters

    def save(self, step, score=None, base="tiny"):
        meta = {"base": base, "alpha": 8.0}
        self.saver.save(step, tree(self.adapters, step), meta, score)


def keys(load, best=""):
    given = {"checkpoint": {"load": load, "best": best}, "lora": {"alpha": 8.0}}
    return ConfigDict(given | {"model": {"source": "tiny"}})


@pytest.mark.parametrize(("load", "best"), [("newest", ""), ("best", "eval/a")])
def test_a_step_that_is_deleted_after_it_was_chosen_is_chosen_again(
    tmp_path, fresh, load, best
):
    training, config = Training(tmp_path, fresh, best), keys(load, best)
    training.save(1, score=0.1)
    found = policy.find(config, tmp_path)
    training.save(2, score=0.2)  # while the model is loaded
    assert not found.path.exists()
    saved, adapters = policy.read(config, tmp_path, found, fresh)
    assert saved.step == 2 and values(adapters) == {2.0}


def test_so_is_one_that_is_deleted_while_it_is_read(tmp_path, fresh, monkeypatch):
    training, original = Training(tmp_path, fresh), checkpoints.read_adapters
    training.save(1)

    def late(saved, adapters):
        if saved.step < 3:
            training.save(saved.step + 1)
        return original(saved, adapters)

    monkeypatch.setattr(checkpoints, "read_adapters", late)
    config = keys("newest")
    found = policy.find(config, tmp_path)
    saved, adapters = policy.read(config, tmp_path, found, fresh)
    assert saved.step == 3 and values(adapters) == {3.0}


def test_a_step_that_was_named_and_is_gone_has_no_stand_in(tmp_path, fresh):
    training, config = Training(tmp_path, fresh), keys("1")
    training.save(1)
    found = policy.find(config, tmp_path)
    training.save(2)
    with pytest.raises(BadInput, match="step_000001 was deleted before it could be"):
        policy.read(config, tmp_path, found, fresh)


def test_what_is_wrong_with_a_whole_step_is_said_at_once(tmp_path, fresh, caplog):
    training, config = Training(tmp_path, fresh), keys("newest")
    training.save(1)
    found = policy.find(config, tmp_path)
    with caplog.at_level(logging.INFO), pytest.raises(BadInput, match="makes it"):
        policy.read(config, tmp_path, found, nnx.State({}))
    assert "choosing again" not in caplog.text


# Where a run starts -------------------------------------------------------------------


def test_another_runs_adapters_for_another_base_are_refused(tmp_path, fresh):
    Training(tmp_path, fresh).save(1, base="of another model")
    model = models.load_model("tiny", lora=KEYS)
    with pytest.raises(BadInput, match="step_000001 was trained on other base weights"):
        policy.start_from(str(tmp_path), model)


@pytest.mark.parametrize("name", ["tiny", "someone/else"])
def test_a_peft_folder_of_another_base_is_named(tmp_path, caplog, name):
    model = models.load_model("tiny", lora=KEYS)
    models.save_peft(tmp_path, model, name)
    with caplog.at_level(logging.WARNING):
        policy.start_from(str(tmp_path), model)
    assert ("was trained on 'someone/else'" in caplog.text) == (name != "tiny")
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text()) | {"base_model_name_or_path": None}
    file.write_text(json.dumps(raw))
    caplog.clear()
    policy.start_from(str(tmp_path), model)
    assert caplog.text == ""
