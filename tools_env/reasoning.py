"""Problems from reasoning-gym, graded by how much a Python tool helps with them.

Every data set of `DATASETS` has three levels: 1 can be done in the head, 3 hardly
without the tool; and a short program that solves a problem from its metadata, for the
cold start. Any other data set of the package can be named too: level 0, its default
configuration, no program. reasoning-gym takes seconds to import (it draws plots), hence
the imports inside the functions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools_env import reasoning_scorer
from tools_env.protocol import Task

SYSTEM_PROMPT = r"Solve with the python tool. Then answer in \boxed{}."
_SHARES = {"train": range(0, 8), "validation": range(8, 9), "test": range(9, 10)}
_MAX_TRIES = 200  # draws for one problem that is new and of the right split


@dataclass(frozen=True)
class Dataset:
    """`levels`: three sets of options; `program`: metadata -> code that prints."""

    levels: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    program: Callable[[Mapping[str, Any]], str]


def _sized(name: str, *bounds: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple({f"min_{name}": low, f"max_{name}": high} for low, high in bounds)


def _terms(*sizes: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "min_terms": terms,
            "max_terms": terms,
            "min_digits": digits,
            "max_digits": digits,
        }
        for terms, digits in sizes
    )


def _numbers(*sizes: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"min_numbers": 2, "max_numbers": count, "min_value": 10, "max_value": value}
        for count, value in sizes
    )


def _expression(metadata: Mapping[str, Any]) -> str:
    return f"print({metadata['expression']})"


def _math(function: str) -> Callable[[Mapping[str, Any]], str]:
    def program(metadata: Mapping[str, Any]) -> str:
        numbers = ", ".join(map(str, metadata["numbers"]))
        return f"import math\nprint(math.{function}({numbers}))"

    return program


def _factors(metadata: Mapping[str, Any]) -> str:
    return (
        f"n, p, f = {metadata['number']}, 2, []\n"
        "while n > 1:\n"
        "    if n % p == 0:\n"
        "        f.append(str(p))\n"
        "        n //= p\n"
        "    else:\n"
        "        p += 1\n"
        "print(' × '.join(f))"
    )


def _fraction(metadata: Mapping[str, Any]) -> str:
    ratio = f"{metadata['numerator']}, {metadata['denominator']}"
    return f"from fractions import Fraction\nprint(Fraction({ratio}))"


def _base(metadata: Mapping[str, Any]) -> str:
    source, base = metadata["source_repr"], metadata["target_base"]
    return (
        f"n, s = int('{source}', {metadata['source_base']}), ''\n"
        "while n:\n"
        f"    s = '0123456789abcdef'[n % {base}] + s\n"
        f"    n //= {base}\n"
        "print(s)"
    )


def _primes(metadata: Mapping[str, Any]) -> str:
    first, last = max(2, metadata["start"]), metadata["end"]
    return (
        "def prime(n):\n"
        "    return all(n % d for d in range(2, int(n**0.5) + 1))\n"
        f"print(sum(map(prime, range({first}, {last} + 1))))"
    )


def _bits(metadata: Mapping[str, Any]) -> str:
    return f"print(bin({metadata['number']}).count('1'))"


def _letters(metadata: Mapping[str, Any]) -> str:
    text, letter = " ".join(metadata["span"]).lower(), metadata["target_letter"]
    return f"print({text!r}.count({letter!r}))"


DATASETS = {
    "chain_sum": Dataset(_terms((2, 2), (4, 4), (6, 7)), _expression),
    "products": Dataset(_terms((2, 2), (2, 3), (2, 6)), _expression),
    "gcd": Dataset(_numbers((2, 60), (2, 999), (3, 99_999)), _math("gcd")),
    "lcm": Dataset(_numbers((2, 40), (2, 999), (3, 999)), _math("lcm")),
    "prime_factorization": Dataset(
        _sized("value", (10, 400), (400, 9_999), (10_000, 99_999)), _factors
    ),
    "fraction_simplification": Dataset(
        tuple(
            {"styles": ("plain",)} | size
            for size in _sized("value", (1, 40), (40, 300), (300, 9_999))
        ),
        _fraction,
    ),
    "base_conversion": Dataset(
        _sized("value", (8, 200), (200, 9_999), (10_000, 999_999)), _base
    ),
    "count_primes": Dataset(_sized("n", (1, 60), (60, 999), (1_000, 9_999)), _primes),
    "count_bits": Dataset(
        _sized("n", (1, 999), (1_000, 99_999), (10**6, 2**31 - 1)), _bits
    ),
    "letter_counting": Dataset(_sized("words", (5, 7), (8, 14), (15, 25)), _letters),
}


def reasoning_gym_tasks(
    names: Sequence[str], count: int, seed: int, split: str = "train"
) -> list[Task]:
    """Generate tasks, the data sets and levels in turn; no question is in two splits.

    Columns: dataset, category (the same), level, entry (question, answer and metadata,
    for the data set's scorer) and answer. Raises ValueError for an unknown data set
    or split.
    """
    if split not in _SHARES:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(_SHARES)}")
    if not names:
        raise ValueError("data.datasets names no reasoning-gym data set")
    streams = [
        (name, level, _entries(name, options, level, seed, split))
        for name in names
        for level, options in _levels(name)
    ]
    random.Random(f"{split}/{seed}").shuffle(streams)
    return [
        _task(f"{name}-{level}-{split}-{seed}-{index}", name, level, next(entries))
        for index in range(count)
        for name, level, entries in [streams[index % len(streams)]]
    ]


def score_reasoning_gym(name: str, entry: Mapping[str, Any], answer: str) -> float:
    """1.0 if the data set's own scorer gives full marks, else 0.0.

    Partial credit is no credit, and an answer that the scorer fails on is wrong. It
    runs in a sandbox: `tools_env.reasoning_scorer` has the rules.
    """
    return float(reasoning_scorer.score(name, entry, answer) >= 1.0)


def solving_program(name: str, entry: Mapping[str, Any]) -> str | None:
    """Python code that prints the answer; None for a data set without a program."""
    dataset = DATASETS.get(name)
    return dataset and dataset.program(entry["metadata"])


def _levels(name: str) -> list[tuple[int, dict[str, Any]]]:
    if name in DATASETS:
        return list(enumerate(DATASETS[name].levels, start=1))
    return [(0, {})]


def _entries(
    name: str, options: Mapping[str, Any], level: int, seed: int, split: str
) -> Iterator[dict[str, Any]]:
    """Questions of one level without end; a question's hash decides its split.

    They differ as long as the data set has new ones.
    """
    from reasoning_gym import create_dataset

    stream = random.Random(f"{name}/{level}/{split}/{seed}").getrandbits(31)
    try:
        dataset = create_dataset(name, seed=stream, size=2**31, **options)
    except ValueError as error:
        raise ValueError(f"reasoning-gym data set {name!r}: {error}") from error
    seen: set[str] = set()
    tries = 0
    for index in range(2**31):
        entry = dataset[index]
        question = entry["question"]
        tries += 1
        if question not in seen and _share(question) in _SHARES[split]:
            seen.add(question)
            tries = 0
            yield entry
        if tries > _MAX_TRIES:
            if not seen:
                raise ValueError(
                    f"reasoning-gym data set {name!r} at level {level} has no question "
                    f"for the split {split!r}"
                )
            seen.clear()
            tries = 0


def _share(question: str) -> int:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:4]) % 10


def _task(task_id: str, name: str, level: int, entry: dict[str, Any]) -> Task:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": entry["question"].strip()},
    ]
    columns = {
        "dataset": name,
        "category": name,
        "level": level,
        "entry": entry,
        "answer": entry["answer"],
    }
    return Task(task_id, messages, columns)
