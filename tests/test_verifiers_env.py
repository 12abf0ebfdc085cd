"""Environments of the package verifiers: their data, tools and rubrics, unchanged."""

import json
import signal
from types import SimpleNamespace

import pytest
import scripted_run

from grpo_jax.scoring import score_trajectories
from grpo_jax.types import Trajectory
from tools_env.calls import format_tool_call
from tools_env.protocol import CallRecord, ToolCall, Turn
from tools_env.verifiers_env import VerifiersEnvironment

vf = pytest.importorskip("verifiers", reason="the extra 'verifiers' is not installed")
shop = pytest.importorskip("shop_env")


@pytest.fixture
def opened():
    """Wraps environments and closes them."""
    made = []

    def wrap(make, **keys):
        made.append(VerifiersEnvironment(make, **keys))
        return made[-1]

    yield wrap
    for environment in made:
        environment.close()


def play(environment, task, *calls, say="", answer):
    """A trajectory of one turn with calls, if any, and one that answers."""
    session = environment.start(task)
    turns = []
    if calls:
        text = "\n".join([say, *map(format_tool_call, calls)])
        results = [session.call(call) for call in calls]
        records = [
            CallRecord(call.name, call.arguments, result.status, result.output)
            for call, result in zip(calls, results, strict=True)
        ]
        turns.append(Turn(text, records))
        play.final = [result.final for result in results]
    turns.append(Turn(answer))
    state = session.state
    session.close()
    session.close()
    one = SimpleNamespace(
        task=task, turns=turns, answer=answer, truncated=False, state=state
    )
    one.reward = environment.reward(task, one)
    return one


def test_a_real_environment_of_the_package(opened):
    """ReasoningGymEnv: its prompts, and its rubric's verdict on right and wrong."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    made = []

    def make():
        sizes = {"num_train_examples": 12, "num_eval_examples": 3}
        made.append(vf.ReasoningGymEnv("gcd", seed=5, **sizes))
        return made[0]

    environment = opened(make)
    real = made[0]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert environment.tools() == [] and environment.max_reward == 1.0
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (12, 3)
    assert len({task.id for task in train + held_out}) == 15
    for task in (*train, *held_out):
        entry = real.rg_dataset[int(task.columns["answer"])]
        assert [m["role"] for m in task.prompt] == ["system", "user"]
        assert task.prompt[1]["content"] == entry["question"]
        right = play(environment, task, answer=f"<answer>{entry['answer']}</answer>")
        assert right.reward.total == 1.0
        assert right.reward.parts["check_answer_reward_func"] == 1.0
        wrong = play(environment, task, answer="<answer>-3</answer>")
        assert wrong.reward.total < 0.1
        seen = environment.prediction(task, right)
        assert seen["correct"] and seen["expected"] is None
        assert not environment.prediction(task, wrong)["correct"]


def test_an_answer_is_no_code_for_the_trainer(opened, tmp_path):
    """ReasoningGymEnv judges in the sandbox; its own scorer would run the answer."""
    sizes = {"num_train_examples": 2, "num_eval_examples": 1}
    environment = opened(
        lambda: vf.ReasoningGymEnv("polynomial_multiplication", **sizes)
    )
    marker = tmp_path / "marker"
    task = environment.tasks("train")[0]
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    assert play(environment, task, answer=f"<answer>{code}</answer>").reward.total == 0
    assert not marker.exists()
    gold = environment._env.rg_dataset[int(task.columns["answer"])]["answer"]
    right = play(environment, task, answer=f"<answer>{gold}</answer>")
    assert right.reward.total == 1.0


def test_a_tool_environment(opened):
    environment = opened(lambda: shop.load_environment(2))
    assert environment.max_reward == 1.2
    tea, rice, *more = environment.tasks("train")
    assert len(more) == 2 and environment.tasks("eval") == []
    assert tea.prompt[0] == {"role": "system", "content": "Look it up."}
    (schema,) = environment.tools()
    assert schema["function"]["name"] == "stock"
    assert schema["function"]["parameters"]["required"] == ["item"]
    call = ToolCall("stock", {"item": "tea"})
    one = play(environment, tea, call, say="I look.", answer="3")
    assert [(c.status, c.result) for c in one.turns[0].calls] == [("ok", "3")]
    assert one.reward.total == pytest.approx(1.2)
    assert one.reward.parts == {
        "right": 1.0,
        "looked": 1.0,
        "num_turns": 2.0,
        "total_tool_calls": 1.0,
        "stock_calls": 1.0,
    }
    assert play(environment, rice, answer="0").reward.total == pytest.approx(1.0)
    assert play(environment, rice, call, answer="3").reward.total == pytest.approx(0.2)


def test_calls_that_fail_are_answered_in_the_environments_words(opened):
    environment = opened(shop.load_environment)
    task = environment.tasks("train")[0]
    session = environment.start(task)
    results = [
        session.call(ToolCall("stock", {"item": "moon"})),
        session.call(ToolCall("stock", {"item": 3})),
        session.call(ToolCall("shelf", {})),
        session.call(ToolCall("stock", {"item": "rice"})),
    ]
    session.close()
    assert [r.status for r in results] == ["error", "invalid", "unknown", "ok"]
    assert results[0].output == "It failed: KeyError('moon')"
    assert results[3].output == "0"


def test_state_is_the_rollouts_own_and_hidden_arguments_stay_hidden(opened):
    made = []

    def make():
        made.append(shop.till())
        return made[0]

    environment = opened(make)
    (schema,) = environment.tools()
    assert list(schema["function"]["parameters"]["properties"]) == ["cents"]
    assert len(environment.tasks("eval")) == 1
    task = environment.tasks("train")[0]
    pay = [ToolCall("pay", {"cents": cents}) for cents in (3, 4)]
    one = play(environment, task, *pay, answer="done")
    assert [c.result for c in one.turns[0].calls] == ["7 left", "3 left"]
    assert one.reward.total == pytest.approx(0.7) and play.final == [False, False]
    other = play(environment, task, ToolCall("pay", {"cents": 10}), answer="done")
    assert other.turns[0].calls[0].result == "0 left" and play.final == [True]
    assert other.reward.total == pytest.approx(1.0)
    assert made[0].ended == [3, 0]  # each cleaned up once
    session = environment.start(task)
    assert session.call(ToolCall("pay", {"cents": 999})).status == "unavailable"
    session.close()


def broken(completion) -> float:
    raise KeyError("the judge is away")


async def late(completion) -> float:
    raise ConnectionError("the judge is away")


@pytest.mark.parametrize("function", [broken, late])
def test_a_rubric_function_that_raises_abstains(opened, function):
    """The rubric itself would make a 0 of it, and a wrong answer of a fault."""
    data = shop.Dataset.from_list(shop.ROWS)
    inner = vf.Rubric(funcs=[shop.right, function], weights=[1.0, 0.5])
    group = vf.RubricGroup([vf.Rubric(funcs=[shop.right]), inner])
    for rubric in (inner, group):
        environment = opened(
            lambda rubric=rubric: vf.SingleTurnEnv(dataset=data, rubric=rubric)
        )
        task = environment.tasks("train")[0]
        one = Trajectory(task, 0, 0, [], [Turn("3")], "stop")
        session = environment.start(task)
        one.state = session.state
        values = score_trajectories(environment, None, [one])
        session.close()
        assert one.reward.total is None and values == {"rewards/failed": 1.0}


def test_a_metric_that_raises_costs_nothing(opened):
    data = shop.Dataset.from_list(shop.ROWS)
    rubric = vf.Rubric(funcs=[shop.right, broken], weights=[1.0, 0.0])
    environment = opened(lambda: vf.SingleTurnEnv(dataset=data, rubric=rubric))
    task = environment.tasks("train")[0]
    assert play(environment, task, answer="3").reward.total == 1.0


class Talks(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on."}]


def of_group(completions) -> list[float]:
    return [0.0] * len(completions)


def test_what_cannot_be_used_is_refused(opened):
    data = shop.Dataset.from_list(shop.ROWS)
    with pytest.raises(ValueError, match="Talks speaks to the model"):
        opened(lambda: Talks(dataset=data, rubric=vf.Rubric(funcs=[shop.right])))
    group = vf.Rubric(funcs=[of_group])
    with pytest.raises(ValueError, match="judges groups"):
        opened(lambda: vf.SingleTurnEnv(dataset=data, rubric=group))
    with pytest.raises(ValueError, match="int is no environment"):
        opened(lambda: 3)


@pytest.mark.slow
def test_a_scripted_training_step(tmp_path):
    """Every trajectory calls the tool; half of them read the result rightly."""
    text = (scripted_run.ROOT / "tests/shop_env.py").read_text()
    (tmp_path / "shop_env.py").write_text(text)
    settings = {
        "tools.environment": "verifiers",
        "tools.verifiers": "shop-env",
        "tools.verifiers_args": json.dumps({"times": 8}),
        "tools.timeout_s": 120.0,
        "data.source": "environment",
        "data.num_eval_tasks": 0,
        "rollout.max_prompt_length": 1280,
        "rollout.max_completion_length": 320,
        "rollout.max_turn_length": 128,
        "sft.num_epochs": 0,
        "train.num_steps": 1,
        "objective.lld": 0.0,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    flags += ["--config=configs/tir.py:tiny", f"--workdir={tmp_path / 'run'}"]
    call = format_tool_call(ToolCall("stock", {"item": "tea"}))
    scripted_run.run(tmp_path, [[call, "3"], [call, "0"]], flags)
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert row["tools/call_rate"] == 1.0 and row["tools/fault_rate"] == 0.0
    assert row["reward"] == pytest.approx(0.7) and row["grad_norm"] > 0.0
    assert row["rewards/right/mean"] == 0.5 and row["rewards/stock_calls/mean"] == 1.0
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        (called,) = line["calls"]
        assert (called["status"], called["result"]) == ("ok", "3")
