"""reasoning-gym's scorers judge answers outside the trainer's process."""

import sys
import time

import pytest

from tools_env import reasoning_scorer
from tools_env.reasoning import reasoning_gym_tasks, score_reasoning_gym
from tools_env.reasoning_scorer import DEADLINE_S, EVALUATING, is_plain, score
from tools_env.sandbox import PythonSandbox


def entries(name, count=5):
    return [task.columns["entry"] for task in reasoning_gym_tasks([name], count, 0)]


def right_answer(name, entry):
    if name == "countdown":
        return entry["metadata"]["expression"]
    return entry["answer"]


@pytest.mark.parametrize("name", [n for n in EVALUATING if n != "puzzle24"])
def test_right_answers_score_1_and_wrong_ones_0(name):
    for entry in entries(name):
        answer = right_answer(name, entry)
        assert is_plain(answer)
        assert score_reasoning_gym(name, entry, answer) == 1.0
        assert score_reasoning_gym(name, entry, answer + "1") == 0.0


def test_a_right_puzzle24_scores_1():
    entry = {"answer": None, "question": "", "metadata": {"numbers": [1, 2, 3, 4]}}
    assert score_reasoning_gym("puzzle24", entry, "1*2*3*4") == 1.0
    assert score_reasoning_gym("puzzle24", entry, "1*2*3+4") == 0.0


HOSTILE = [
    "__import__('pathlib').Path({marker!r}).touch()",
    "[__import__('pathlib').Path({marker!r}).touch()]",
    "print('score 1.0') or __import__('os')._exit(0)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
]


@pytest.mark.parametrize("name", EVALUATING)
def test_code_in_an_answer_scores_0_and_leaves_nothing(name, tmp_path):
    marker = tmp_path / "marker"
    (entry,) = entries(name, 1)
    for answer in HOSTILE:
        code = answer.format(marker=str(marker))
        assert score_reasoning_gym(name, entry, code) == 0.0
    assert not marker.exists()


@pytest.mark.parametrize("name", ["countdown", "simple_integration", "n_queens"])
def test_code_that_does_run_stays_in_the_sandbox(name, tmp_path, monkeypatch):
    """Without the look at the answer's words, the process is still another one."""
    monkeypatch.setattr(reasoning_scorer, "is_plain", lambda answer: True)
    monkeypatch.setenv("API_SECRET", "s3cret")
    marker = tmp_path / "marker"
    tmp_path.chmod(0o777)
    (entry,) = entries(name, 1)
    for answer in HOSTILE[:2] + HOSTILE[3:]:
        code = answer.format(marker=str(marker))
        assert score_reasoning_gym(name, entry, code) == 0.0
    with reasoning_scorer.start() as sandbox:
        sealed = sandbox.level != "process"  # there the code may write where all may
    assert not (sealed and marker.exists())
    secret = "__import__('os').environ['API_SECRET'] and 1"
    assert score_reasoning_gym(name, entry, secret) == 0.0


@pytest.mark.slow
def test_an_endless_answer_scores_0_within_its_deadline():
    (entry,) = entries("countdown", 1)
    reasoning_scorer.start().close()
    start = time.monotonic()
    assert score_reasoning_gym("countdown", entry, "9**9**9**9") == 0.0
    assert time.monotonic() - start < DEADLINE_S + 60
    answer = right_answer("countdown", entry)
    assert score_reasoning_gym("countdown", entry, answer) == 1.0


def test_an_overlong_answer_is_not_judged(monkeypatch):
    monkeypatch.setattr(reasoning_scorer, "start", None)
    (entry,) = entries("gcd", 1)
    assert score("gcd", entry, "1" * 10_001) == 0.0


def test_one_answer_cannot_change_the_judge_of_the_next(monkeypatch):
    monkeypatch.setattr(reasoning_scorer, "is_plain", lambda answer: True)
    (entry,) = entries("countdown", 1)
    code = "__import__('reasoning_gym').games.countdown.CountdownDataset"
    code = f"setattr({code}, 'score_answer', lambda *a: 1.0)"
    score("countdown", entry, code)
    assert score_reasoning_gym("countdown", entry, "1") == 0.0


def test_a_scorer_that_does_not_start_is_no_answers_fault(monkeypatch):
    reasoning_scorer._judged.cache_clear()
    monkeypatch.setattr(reasoning_scorer, "_LOAD", "import no_such_module")
    (entry,) = entries("countdown", 1)
    with pytest.raises(RuntimeError, match="no_such_module"):
        score("countdown", entry, "1")


def test_only_scorers_that_compare_text_run_here(monkeypatch):
    monkeypatch.setattr(reasoning_scorer, "start", None)
    (entry,) = entries("gcd", 1)
    assert score("gcd", entry, entry["answer"]) == 1.0
    (entry,) = entries("chain_sum", 1)
    with pytest.raises(TypeError):
        score("chain_sum", entry, "1")


@pytest.mark.parametrize(
    "answer", ["x'y", 'S("e" "v")', "a\\b", "eval(x)", "x.__class__", "ｅｖａｌ(1)"]
)
def test_words_and_quotes_are_not_plain(answer):
    assert not is_plain(answer)


@pytest.mark.parametrize(
    "answer", ["-2*x**3/3 + C", "exp(x)*sin(2*x)", "_ Q _ _", "AABCD", "1e5*asinh(x)"]
)
def test_mathematics_and_single_letters_are_plain(answer):
    assert is_plain(answer)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is preloaded elsewhere")
def test_preloaded_modules_are_there_at_once():
    with PythonSandbox(60.0, preload=("reasoning_gym",), level="process") as sandbox:
        code = "import sys; 'reasoning_gym' in sys.modules"
        assert sandbox.run(code).output == "True\n"
