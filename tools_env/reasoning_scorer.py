"""reasoning-gym's scorers, run on a model's answer inside the Python sandbox.

Some of them `eval` the answer or hand it to sympy's parser, which does the same, so
that an answer is code. Rules:

* Every answer is judged in a session of its own, forked from a worker that has
  reasoning-gym imported: what an answer does reaches neither the trainer nor the next
  answer. The level is the strongest that works here (docs/sandbox.md). Only data sets
  whose scorer is the package's default one, which compares two texts, need none.
* An answer over which the scorer raises, dies, or runs out of time or memory scores 0;
  so does one of more than `MAX_CHARS` characters (and more than the gold one has).
* Code could also print a score of its own. So answers to the data sets of `EVALUATING`
  are not judged, but score 0, when they hold a quote, a backslash, or a word that is
  neither a number, nor one letter, nor the name of a mathematical function.
* A scorer that cannot be started is no answer's fault: RuntimeError.
"""

from __future__ import annotations

import base64
import functools
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from tools_env.sandbox import PythonSandbox

MAX_CHARS = 10_000
DEADLINE_S = 10.0
EVALUATING = (
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "countdown",
    "puzzle24",
    "n_queens",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
)
SCORER_S = 2 * DEADLINE_S + 5  # most that an answer takes, its session's start included
_MEMORY_MB = 1024
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|a?(?:sin|cos|tan|cot)h?|exp|log|ln|sqrt|cbrt|root"
_FUNCTIONS += "|abs|Abs|pi|Rational|Integer|Integral"
_PLAIN = re.compile(
    rf"\d+(?:[eE]\d+)?|[A-Za-z_]|[A-E]+|{_FUNCTIONS}"
)  # A-E: letters to sort
_LOAD = "from reasoning_gym import create_dataset\nimport base64, pickle"
_SCORE = """
name, options, entry, answer = pickle.loads(base64.b64decode({packed!r}))
scorer = create_dataset(name, **options).score_answer
try:
    score = float(scorer(answer, entry))
except Exception:
    score = 0.0
print("\\nscore", score)
"""


def score(
    name: str,
    entry: Mapping[str, Any],
    answer: str,
    options: Mapping[str, Any] | None = None,
) -> float:
    """What the scorer of a data set, made with `options`, gives an answer."""
    if len(answer) > max(MAX_CHARS, len(str(entry.get("answer")))):
        return 0.0
    if name in EVALUATING and not is_plain(answer):
        return 0.0
    compare = _text_comparison(name)
    if compare is not None:
        return float(compare(answer, entry))
    request = name, dict(options or {}), dict(entry), answer
    return _judged(base64.b64encode(pickle.dumps(request)).decode())


@functools.lru_cache(maxsize=8192)  # a group repeats its answers
def _judged(packed: str) -> float:
    with start() as sandbox:
        result = sandbox.run(_SCORE.format(packed=packed))
    lines = result.output.splitlines()
    if result.status != "ok" or not lines or not lines[-1].startswith("score "):
        return 0.0
    return float(lines[-1].removeprefix("score "))


@functools.cache
def _text_comparison(name: str) -> Callable[[str, Mapping[str, Any]], float] | None:
    """The scorer, if it is the package's default one: it runs no answer."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.dataset import ProceduralDataset

    scorer = get_score_answer_fn(name)
    default = scorer.__func__ is ProceduralDataset.score_answer
    return scorer if default else None


def start() -> PythonSandbox:
    """A session with reasoning-gym imported; RuntimeError where there can be none."""
    sandbox = PythonSandbox(DEADLINE_S, _MEMORY_MB, preload=("reasoning_gym",))
    loaded = sandbox.run(_LOAD)
    if loaded.status != "ok":
        sandbox.close()
        raise RuntimeError(f"reasoning-gym in the sandbox: {loaded.output[-500:]}")
    return sandbox


def is_plain(answer: str) -> bool:
    """Whether an answer holds mathematics or single letters only, and no other word."""
    if any(mark in answer for mark in "\"'\\"):
        return False
    return all(_PLAIN.fullmatch(word) for word in re.findall(r"\w+", answer))
