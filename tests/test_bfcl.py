"""The leaderboard's sets and checker, in their own process, and as a suite of a run.

The wheel is fetched once into the user's cache; without a network these tests fail.
"""

import json
from types import SimpleNamespace

import pytest
import scripted_run

import run
from grpo_jax import suites
from grpo_jax.config import BadInput, load
from grpo_jax.environments import make_suite
from tools_env import bfcl, wheels
from tools_env.calls import parse_tool_calls
from tools_env.protocol import ToolCall

# Gold answers that the checker itself turns to text before it compares numbers.
OUT_OF_REACH = {"simple_java_36", "simple_java_65"}
COUNTS = dict(zip(bfcl.SETS, (400, 100, 50, 200, 200, 200, 240), strict=True))


@pytest.fixture(scope="module")
def leaderboard():
    environment = bfcl.Leaderboard()
    yield environment
    environment.close()
    environment.close()


def answered(task, text):
    return SimpleNamespace(task=task, answer=text)


@pytest.mark.parametrize("name", bfcl.SETS)
def test_a_perfect_policy_scores_one_by_the_suites_own_checker(leaderboard, name):
    tasks = leaderboard.tasks(name)
    assert len(tasks) == COUNTS[name]
    wrong = set()
    for task in tasks:
        (message,) = leaderboard.demonstration(task)
        reward = leaderboard.reward(task, answered(task, message["content"]))
        assert reward.parts["malformed"] == 0.0
        if reward.total != 1.0:
            wrong.add(task.id)
    assert wrong == (OUT_OF_REACH if name == "simple_java" else set())


def test_a_perfect_policy_in_the_compact_protocol(leaderboard):
    compact = SimpleNamespace(protocol="compact", check=leaderboard.check)
    for name in ("simple_python", "parallel"):
        for task in leaderboard.tasks(name, 20):
            text = bfcl.Leaderboard.demonstration(compact, task)[0]["content"]
            one = answered(task, text)
            assert bfcl.Leaderboard.reward(compact, task, one).total == 1.0


def test_wrong_values_names_counts_and_broken_calls_score_nothing(leaderboard):
    (task,) = leaderboard.tasks("simple_python", 1)
    (gold,) = bfcl.gold_calls(task)
    assert gold == ToolCall(
        "calculate_triangle_area", {"base": 10, "height": 5, "unit": "units"}
    )

    def verdict(*calls):
        return leaderboard.check(task, calls)["error_type"]

    changed = ToolCall(gold.name, gold.arguments | {"base": 11})
    assert verdict(changed) == "value_error:others"
    typed = ToolCall(gold.name, gold.arguments | {"base": "10"})
    assert verdict(typed) == "type_error:simple"
    more = ToolCall(gold.name, gold.arguments | {"colour": "red"})
    assert "unexpected_param" in verdict(more)
    assert "wrong_func_name" in verdict(ToolCall("area", gold.arguments))
    assert "wrong_count" in verdict(gold, gold) and "wrong_count" in verdict()
    broken = parse_tool_calls("<tool_call>\n{}}\n</tool_call>")
    assert verdict(*broken) == "ast_decoder"
    assert leaderboard.check(task, [gold])["valid"]
    # Values that the checker does not expect end its verdict, not its process.
    odd = ToolCall(gold.name, {"base": {"a": [10]}, "height": [[5]], "unit": None})
    assert not leaderboard.check(task, [odd])["valid"]
    assert leaderboard.check(task, [gold])["valid"]


def test_parallel_calls_are_a_set(leaderboard):
    (task,) = leaderboard.tasks("parallel", 1)
    calls = bfcl.gold_calls(task)
    assert len(calls) == 2 and calls[0] != calls[1]
    assert leaderboard.check(task, calls[::-1])["valid"]
    assert not leaderboard.check(task, [calls[0], calls[0]])["valid"]


def test_AV3_no_call_is_right_only_where_none_is_wanted(leaderboard):
    """An unreadable call is the leaderboard's "no call"; it is counted beside that."""
    (task,) = leaderboard.tasks("irrelevance", 1)
    call = '<tool_call>\n{"name": "determine_body_mass_index", "arguments": {}}\n'
    for text, total, malformed in [
        ("I cannot do that with these functions.", 1.0, 0.0),
        (call + "</tool_call>", 0.0, 0.0),
        ("<tool_call>\n@@@\n</tool_call>", 1.0, 1.0),
    ]:
        reward = leaderboard.reward(task, answered(task, text))
        assert (reward.total, reward.parts["malformed"]) == (total, malformed)
    (other,) = leaderboard.tasks("multiple", 1)
    for text in ("@@@", "", "<tool_call>\n@@@\n</tool_call>"):
        assert leaderboard.reward(other, answered(other, text)).total == 0.0


def test_tasks_show_json_schemas_and_spread_over_the_set(leaderboard):
    tasks = leaderboard.tasks("multiple", 4)
    assert [task.id for task in tasks] == [f"multiple_{n}" for n in (0, 50, 100, 150)]
    kinds = set()

    def look(schema):
        if isinstance(schema, dict):
            if isinstance(schema.get("type"), str):
                kinds.add(schema["type"])
            for one in schema.values():
                look(one)

    for task in leaderboard.tasks("simple_java") + leaderboard.tasks("parallel"):
        assert task.prompt[-1]["role"] == "user" and task.prompt[-1]["content"]
        for tool in task.columns["tools"]:
            look(tool["function"]["parameters"])
    assert kinds <= {"string", "integer", "number", "boolean", "array", "object"}
    with pytest.raises(ValueError, match="unknown set 'simple'"):
        leaderboard.tasks("simple")


def test_summary_is_the_leaderboards():
    scores = dict(zip(bfcl.SETS, (0.9, 0.3, 0.6, 0.8, 0.4, 0.2, 0.7), strict=True))
    numbers = bfcl.leaderboard_numbers(scores)
    assert numbers["simple_ast"] == pytest.approx(0.6)
    assert numbers["non_live_ast"] == pytest.approx((0.6 + 0.8 + 0.4 + 0.2) / 4)
    assert bfcl.leaderboard_numbers({"parallel": 0.5}) == {"parallel": 0.5}


def test_the_cached_wheel_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path))
    good = b"a wheel"
    (tmp_path / "w.whl").write_bytes(b"half a file")

    def download(requirement, folder, hint):
        (folder / "w.whl").write_bytes(good)
        return folder / "w.whl"

    monkeypatch.setattr(wheels, "download", download)
    with pytest.raises(ValueError, match="does not have sha256"):
        wheels.fetch("w==1", "w.whl", "0" * 64)
    sha = wheels.digest(download("w==1", tmp_path, ""))
    (tmp_path / "w.whl").write_bytes(b"half a file")
    assert wheels.fetch("w==1", "w.whl", sha).read_bytes() == good
    monkeypatch.setattr(wheels, "download", None)
    assert wheels.fetch("w==1", "w.whl", sha) == tmp_path / "w.whl"


def test_a_wheel_that_cannot_be_had_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="put w.whl into"):
        wheels.fetch("./no-such-wheel-here.whl", "w.whl", "00")
    assert list(tmp_path.iterdir()) == []


# As a suite of a run ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason", "keys"),
    [
        ("eval", "did you mean 'bfcl'", {"suite": "bfcll"}),
        ("eval", "has no set 'simple'", {"suite": "bfcl:simple"}),
        ("eval", "reasoning_gym:gcd", {"suite": "reasoning_gym"}),
        ("eval", "set one of them", {"suite": "bfcl", "probe": True}),
        ("eval", "eval.limit=3", {"limit": 3}),
        ("train", "belongs to --mode=eval", {"suite": "bfcl"}),
    ],
)
def test_wrong_suites_are_refused(mode, reason, keys):
    config = load("configs/tir.py:tiny")
    for key, value in keys.items():
        config.eval[key] = value
    with pytest.raises(BadInput, match=reason):
        suites.check(config, mode)


def test_an_unknown_reasoning_gym_set_is_refused():
    config = load("configs/tir.py:tiny")
    config.eval.suite, config.eval.limit = "reasoning_gym:no_such_set", 1
    with pytest.raises(BadInput, match="no_such_set"):
        make_suite(config)


@pytest.mark.parametrize(("limit", "reason"), [(1, "every prompt"), (2, "for 1 of")])
def test_no_task_of_a_suite_is_left_out(tmp_path, signals, capsys, limit, reason):
    """Prompts of 753 and 954 bytes."""
    flags = ["--config=configs/tir.py:tiny", "--mode=eval"]
    flags += [f"--workdir={tmp_path / 'run'}", "--config.eval.suite=bfcl:irrelevance"]
    flags += [f"--config.eval.limit={limit}"]
    flags += [f"--config.rollout.max_prompt_length={800 if limit == 2 else 700}"]
    assert run.main(flags) == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_scripted_perfect_policy_runs_the_suite(tmp_path, leaderboard):
    """Every set through the engine; all answers are the gold ones, but for one."""
    tasks = [task for name in bfcl.SETS for task in leaderboard.tasks(name, 2)]
    golds = [leaderboard.demonstration(task)[0]["content"] for task in tasks]
    golds[0] = "It is 25."
    flags = [
        "--config=configs/tir.py:tiny",
        f"--workdir={tmp_path / 'run'}",
        "--mode=eval",
        "--config.eval.suite=bfcl",
        "--config.eval.limit=2",
        "--config.rollout.max_prompt_length=8192",
        "--config.rollout.max_completion_length=1024",
        "--config.rollout.max_turn_length=1024",
        "--config.rollout.burst=128",
    ]
    scripted_run.run(tmp_path, [[gold] for gold in golds], flags, purpose=1)
    values = json.loads((tmp_path / "run/eval_bfcl.json").read_text())
    assert values["eval/num_tasks"] == 14
    for name in bfcl.SETS:
        assert values[f"bfcl/{name}"] == (0.5 if name == "simple_python" else 1.0)
    simple = (0.5 + 1 + 1) / 3
    assert values["bfcl/simple_ast"] == pytest.approx(simple)
    assert values["bfcl/non_live_ast"] == pytest.approx((simple + 3) / 4)
    assert values["bfcl/malformed"] == 0.0
    path = tmp_path / "run/bfcl/BFCL_v4_simple_python_score.json"
    head, wrong = map(json.loads, path.read_text().splitlines())
    assert head == {"accuracy": 0.5, "correct_count": 1, "total_count": 2}
    assert wrong["id"] == "simple_python_0" and "wrong_count" in wrong["error_type"]
    assert len((tmp_path / "run/eval_bfcl.jsonl").read_text().splitlines()) == 14
