"""From reward keys to terms: what a virtual best earns, and what cannot work."""

import re

import pytest
from toy import ToyEnvironment

from configs import base, fund
from grpo_jax import incentives
from grpo_jax.config import BadInput
from grpo_jax.incentives import make_controller, make_rewards, make_shaping
from tools_env.fund import FundEnvironment
from tools_env.protocol import Task
from tools_env.python_tasks import PythonEnvironment


def config(**keys):
    made = base.get_config()
    made.update_from_flattened_dict({k.replace("__", "."): v for k, v in keys.items()})
    return made


def ngrpo(**keys):
    return config(objective__estimator="ngrpo", **keys)


def maximum(made, environment):
    return make_shaping(made, environment, make_rewards(made)).maximum


def test_virtual_best_is_the_declared_most_with_the_static_terms():
    assert maximum(ngrpo(), PythonEnvironment()) == 1.0
    terms = {"reward__parsed": 0.1, "reward__executed": 0.2, "reward__interaction": 0.3}
    most = maximum(ngrpo(**terms), PythonEnvironment())
    assert most == pytest.approx(1.3)  # the bonus comes on top, as it is that step
    made = ngrpo(
        reward__functions=("toy.constant", "toy.vowel_reward"),
        reward__weights=(1.0, 0.5),
        reward__maxima=(0.5, 1.0),
    )
    assert maximum(made, ToyEnvironment()) == 1.0


@pytest.mark.parametrize("reward, best", [("graded", 1.0), ("article", 0.9)])
def test_virtual_best_out_of_reach_is_refused_with_both_numbers(reward, best):
    environment = FundEnvironment(reward)
    made = fund.get_config()
    assert maximum(made, environment) == best
    made.objective.virtual_reward = best
    assert maximum(made, environment) == best
    made.objective.virtual_reward = best + 0.05
    told = re.escape(f"virtual_reward={best + 0.05}") + f".*at most {best:g}"
    with pytest.raises(BadInput, match=told):
        maximum(made, environment)
    made.reward.allow_unreachable = True
    assert maximum(made, environment) == best + 0.05


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"reward__weights": (-1.0,), "reward__maxima": (1.0,)},
    ],
)
def test_a_most_that_is_not_declared_needs_an_explicit_value(keys):
    made = ngrpo(reward__functions=("toy.constant",), **keys)
    with pytest.raises(BadInput, match="reward.maxima.*objective.virtual_reward"):
        maximum(made, ToyEnvironment())
    made.objective.virtual_reward = 3.0
    assert maximum(made, ToyEnvironment()) == 3.0
    made.objective.estimator = "grpo"
    assert maximum(made, ToyEnvironment()) is None


@pytest.mark.parametrize("key", incentives.NEEDING_TOOLS)
def test_terms_of_calls_need_tools(key):
    value = True if key == "failure_bonus" else 0.5
    made = config(**{f"reward__{key}": value})
    with pytest.raises(BadInput, match=f"reward.{key}={value} needs .*'fund' has none"):
        make_shaping(made, FundEnvironment(), None)
    make_shaping(made, PythonEnvironment(), None)


def test_answer_masking_goes_by_executed_calls():
    made = config(objective__lld_answer="paper")
    with pytest.raises(BadInput, match="lld_answer='paper'.*'fund' executes none"):
        make_shaping(made, FundEnvironment(), None)
    make_shaping(made, PythonEnvironment(), None)


@pytest.mark.parametrize(
    "key, value", [("stages", True), ("similarity", 0.5), ("failure_bonus", True)]
)
def test_what_grades_the_outcome_needs_its_most(key, value):
    made = config(reward__functions=("toy.constant",), **{f"reward__{key}": value})
    with pytest.raises(BadInput, match=f"reward.{key}=.*reward.maxima"):
        make_shaping(made, PythonEnvironment(), make_rewards(made))


def never(task):
    return False


def fails(task):
    raise KeyError("column")


def embed(texts):
    return [[1.0, float(len(text))] for text in texts]


def embed_one(texts):
    return [[1.0]]


def test_overuse_condition_is_loaded_and_called_once():
    name = "tools_env.fund.reward.no_market_words"
    made = config(reward__overuse=(("check_market_status", name, 0.3),))
    shaping = make_shaping(made, FundEnvironment(), None)
    (rule,) = shaping.overuse
    asks = [Task(t, [{"role": "user", "content": t}]) for t in ("balance", "market?")]
    assert [rule.uncalled_for(task) for task in asks] == [True, False]
    incentives.check_tasks(made, shaping, asks)

    made = config(reward__overuse=(("look", f"{__name__}.fails", 0.3),))
    shaping = make_shaping(made, FundEnvironment(), None)
    with pytest.raises(BadInput, match="overuse '.*fails': KeyError"):
        incentives.check_tasks(made, shaping, asks)
    with pytest.raises(BadInput, match="reward.overuse 'no.such'"):
        make_shaping(
            config(reward__overuse=(("a", "no.such", 1),)), ToyEnvironment(), None
        )


@pytest.mark.parametrize("name, good", [("embed", True), ("embed_one", False)])
def test_an_embedding_is_tried(name, good):
    made = config(reward__similarity=0.5, reward__embedding=f"{__name__}.{name}")
    shaping = make_shaping(made, PythonEnvironment(), None)
    if good:
        incentives.check_tasks(made, shaping, [Task("t", [])])
        return
    with pytest.raises(BadInput, match="two texts must give two vectors"):
        incentives.check_tasks(made, shaping, [Task("t", [])])


@pytest.mark.parametrize("value", ["false", 1, 0.5])
def test_needs_tool_is_a_truth_value(value):
    made = config()
    shaping = make_shaping(made, PythonEnvironment(), None)
    with pytest.raises(BadInput, match="task x: needs_tool must be true or false"):
        incentives.check_tasks(made, shaping, [Task("x", [], {"needs_tool": value})])


def test_a_bonus_that_no_task_can_earn_is_refused():
    made = config(reward__floor=0.5)
    shaping = make_shaping(made, PythonEnvironment(), None)
    without = [Task("x", [], {"needs_tool": False})] * 2
    with pytest.raises(BadInput, match="reward.floor=0.5, but no training task"):
        incentives.check_tasks(made, shaping, without)
    incentives.check_tasks(made, shaping, [*without, Task("y", [])])


def test_controller_of_the_config():
    made = config(reward__floor=0.4, reward__floor_rate=0.2, reward__interaction=0.1)
    control = make_controller(made)
    assert control.take({"interaction/call_rate": 0.0})
    assert control.weight == pytest.approx(0.18)
    assert make_shaping(made, PythonEnvironment(), None).interaction
