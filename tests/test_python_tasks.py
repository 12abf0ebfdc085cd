"""Python reasoning tasks: answers by value, generated problems, real demonstrations."""

import dataclasses
import json
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from tools_env.answers import _Verifier, check_answer, extract_boxed
from tools_env.calls import parse_tool_calls
from tools_env.protocol import CallRecord, Reward, Task, ToolCall, Turn
from tools_env.python_tasks import PythonEnvironment
from tools_env.reasoning import DATASETS, reasoning_gym_tasks, solving_program

EQUAL = [
    ("3/4", "0.75"),
    ("1234", "1,234"),
    ("7", "7.0"),
    ("-0", "0"),
    (r"\frac{1}{2}", r"it is \boxed{\frac{1}{2}}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("(2, 2.5)", r"(2,\frac{5}{2})"),
    ("{1,2}", "{2,1}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("5", "x=5"),
    ("42", " 42. "),
    ("12", "１２"),
    ("12", r"first \boxed{3}, no: \boxed{12}"),
    (r"\boxed{12}", "12"),
    ("1/2", r"\dfrac{1}{2}"),
    ("-3", "\N{MINUS SIGN}3"),
    ("7", "$7$"),
    ("B", "b "),
    ("Friday", "friday"),
]
DIFFERENT = [
    ("B", ""),
    ("B", "A or B or C"),
    ("12", "2"),
    ("12", "112"),
    ("12", ""),
    ("12", r"\boxed{12} and \boxed{3}"),
    ("12", r"\boxed{12} and \boxed{"),
    ("12", r"\boxed{}"),
    ("1/3", "0.333333"),
    ("stop", "spot"),
    ("2", "1 or 2"),
    ("2", "1, 2, 3"),
    ("7", "1/0"),
    ("7", "7" * 6000),
    ("(1,2)", "(2,1)"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_AV1_equal_answers_score_one(gold, answer):
    assert check_answer(gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_AV3_other_answers_score_nothing(gold, answer):
    assert check_answer(gold, answer) == 0.0


def test_answer_that_cannot_be_computed_ends_at_the_deadline():
    verifier = _Verifier(deadline_s=3.0)
    assert verifier.equal("{1,2}", "{2,1}")
    assert not verifier.equal("5", "9^{9^{9^9}}")
    assert verifier.equal("{1,2}", "{2,1}")  # with a new process
    verifier.close()


def test_answers_are_checked_in_threads():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(check_answer("{1,2}", "{2,1}")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0] * 4


def test_last_box_counts_and_braces_nest():
    assert extract_boxed(r"\boxed{1} \boxed{\frac{a}{b}} end") == r"\frac{a}{b}"
    assert extract_boxed("none") is None
    assert extract_boxed(r"\boxed{1} \boxed{2") is None


def _identity(task):
    return task.id, task.prompt, json.dumps(task.columns["entry"], default=str)


@pytest.fixture(scope="module")
def tasks():
    return reasoning_gym_tasks(list(DATASETS), 60, 3)


def test_tasks_cover_every_dataset_and_level(tasks):
    counts = Counter((t.columns["dataset"], t.columns["level"]) for t in tasks)
    assert set(counts) == {(name, level) for name in DATASETS for level in (1, 2, 3)}
    assert set(counts.values()) == {2}
    assert all(t.columns["category"] == t.columns["dataset"] for t in tasks)
    assert all(t.prompt[0]["role"] == "system" for t in tasks)


def test_splits_share_no_question():
    names = ["products", "gcd"]
    asked = {
        split: {
            t.prompt[-1]["content"] for t in reasoning_gym_tasks(names, 60, 0, split)
        }
        for split in ("train", "validation", "test")
    }
    assert not asked["train"] & asked["test"]
    assert not asked["train"] & asked["validation"]
    assert not asked["validation"] & asked["test"]
    assert len(asked["train"]) > 50


def test_same_seed_gives_the_same_tasks_in_a_new_process():
    code = (
        "import json; from tools_env.reasoning import reasoning_gym_tasks as tasks;"
        "print(json.dumps([t.prompt for t in tasks(['gcd', 'lcm'], 12, 5)]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    again = [t.prompt for t in reasoning_gym_tasks(["gcd", "lcm"], 12, 5)]
    assert json.loads(run.stdout) == again
    assert again != [t.prompt for t in reasoning_gym_tasks(["gcd", "lcm"], 12, 6)]


def test_a_small_dataset_repeats_its_questions(monkeypatch):
    digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    small = dataclasses.replace(DATASETS["products"], levels=(digit,))
    monkeypatch.setitem(DATASETS, "products", small)
    tasks = reasoning_gym_tasks(["products"], 300, 0)
    assert len(tasks) == 300
    assert 20 < len({task.prompt[-1]["content"] for task in tasks}) < 200


def test_bad_requests_are_named():
    with pytest.raises(ValueError, match="'no_such_set'"):
        reasoning_gym_tasks(["no_such_set"], 1, 0)
    with pytest.raises(ValueError, match="split 'dev'"):
        reasoning_gym_tasks(["gcd"], 1, 0, "dev")
    with pytest.raises(ValueError, match="data.datasets"):
        reasoning_gym_tasks([], 1, 0)


def test_a_dataset_without_program_has_tasks_but_no_demonstration():
    (task,) = reasoning_gym_tasks(["spell_backward"], 1, 0)
    assert task.columns["level"] == 0
    assert PythonEnvironment().demonstration(task) is None


def test_every_program_prints_the_answer(tasks, capsys):
    environment = PythonEnvironment()
    for task in tasks:
        exec(solving_program(task.columns["dataset"], task.columns["entry"]), {})
        printed = capsys.readouterr().out.strip()
        assert _reward(environment, task, rf"\boxed{{{printed}}}").total == 1.0, task
        assert _reward(environment, task, printed).total == 0.0
        assert _reward(environment, task, "").total == 0.0
        assert _reward(environment, task, rf"\boxed{{{printed}1}}").total == 0.0


def _reward(environment, task, text):
    trajectory = SimpleNamespace(turns=[Turn(text)], answer=text, stop="stop")
    return environment.reward(task, trajectory)


def test_demonstrations_run_the_code(tasks):
    environment = PythonEnvironment(timeout_s=20)
    first = {task.columns["dataset"]: task for task in tasks}
    for name in ("chain_sum", "gcd", "prime_factorization", "base_conversion"):
        task = first[name]
        asked, told, final = environment.demonstration(task)
        (call,) = parse_tool_calls(asked["content"])
        assert (call.name, list(call.arguments)) == ("python", ["code"])
        assert told["role"] == "tool" and told["content"].strip()
        assert _reward(environment, task, final["content"]).total == 1.0


def test_session_keeps_state_and_reports_failures():
    environment = PythonEnvironment(timeout_s=20)
    task = Task("t", [], {"answer": "6"})
    session = environment.start(task)
    calls = ["x = 2 * 3", "print(x)", "1 / 0"]
    results = [session.call(ToolCall("python", {"code": code})) for code in calls]
    assert [r.status for r in results] == ["ok", "ok", "error"]
    assert results[1].output.strip() == "6"
    assert "ZeroDivisionError" in results[2].output
    assert session.call(ToolCall("python", {"source": "1"})).status == "invalid"
    assert session.call(ToolCall("bash", {})).status == "unknown"
    session.close()
    session.close()
    other = environment.start(task)
    missing = other.call(ToolCall("python", {"code": "print(x)"}))
    other.close()
    assert "NameError" in missing.output


def test_user_problems_are_judged_by_their_answer_column():
    environment = PythonEnvironment(max_reward=2.0)
    task = Task("t", [], {"answer": "3/4"})
    assert _reward(environment, task, r"so \boxed{0.75}").total == 2.0
    wrong = _reward(environment, task, r"\boxed{0.7}")
    assert (wrong.total, wrong.parts) == (0.0, {"right": 0.0, "boxed": 1.0})
    assert _reward(environment, task, "0.75").total == 0.0
    number = Task("t", [], {"answer": 12})
    assert _reward(environment, number, r"\boxed{12}").total == 2.0
    assert environment.demonstration(task) is None


def test_prediction_gives_tool_and_vote():
    environment = PythonEnvironment()
    record = CallRecord("python", {"code": "1"}, "ok", "1")
    turns = [Turn("", [record]), Turn(r"\boxed{ 1.5. }")]
    trajectory = SimpleNamespace(turns=turns, answer=turns[-1].text)
    assert environment.prediction(Task("t", [], {"answer": "3/2"}), trajectory) == {
        "expected": "python",
        "called": "python",
        "correct": True,
        "answer": "1.5",
    }
    silent = SimpleNamespace(turns=[Turn("?")], answer="?")
    row = environment.prediction(Task("t", [], {"answer": "1"}), silent)
    assert (row["called"], row["correct"], row["answer"]) == (None, False, None)


def test_without_a_gold_answer_the_users_rewards_say_what_is_correct():
    environment = PythonEnvironment(needed_columns=())
    for total, correct in ((1.0, True), (0.5, False), (None, False)):
        trajectory = SimpleNamespace(turns=[], answer="7", reward=Reward(total))
        row = environment.prediction(Task("t", [], {"dataset": "mine"}), trajectory)
        assert (row["correct"], row["answer"]) == (correct, None)


def test_python_tool_schema():
    (schema,) = PythonEnvironment().tools()
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
