r"""Mathematical answers: taking them from a text, and comparing them by value.

Policies. The last \boxed{...} of a text is its answer; a last one that is not closed is
none. Full-width digits and letters count as the ordinary ones, case and white space at
the ends do not matter, nor do a final full stop, dollar signs around the answer and a
leading "x =". Numbers (with thousands commas, as decimals or fractions) are compared
exactly, so 0.3333 is not 1/3. A gold answer of plain words or a single letter wants the
same words. Everything else, such as roots, tuples and sets, is compared by math-verify,
in a process of its own and with a deadline; what it cannot read is wrong.
"""

from __future__ import annotations

import atexit
import re
import unicodedata
from fractions import Fraction
from pathlib import Path

from tools_env.lines import LineProcess

MAX_ANSWER_CHARS = 1000
_WORKER = Path(__file__).with_name("math_worker.py")
_MEMORY_BYTES = 2 << 30
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_RATIO = re.compile(
    rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?|([-+]?)\\[dt]?frac\{{(\d+)\}}\{{(\d+)\}}"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*")
_ASSIGNMENT = re.compile(r"[a-z]\s*=\s*(?=[^=])")


def check_answer(gold: str, text: str) -> float:
    r"""Score a text against the gold answer: 1.0 if equal, else 0.0.

    The text's last \boxed{...} is compared, or the whole text when it has none.
    """
    answer = extract_boxed(text) if r"\boxed" in text else text
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    gold, answer = normal_form(extract_boxed(gold) or gold), normal_form(answer)
    if not answer or not gold:
        return 0.0
    if gold == answer:
        return 1.0
    if "=" not in gold:
        answer = _ASSIGNMENT.sub("", answer, count=1)
    expected, given = _number(gold), _number(answer)
    if expected is not None and given is not None:
        return float(expected == given)
    if _WORDS.fullmatch(gold):
        return float(gold == answer)
    return float(_verifier.equal(gold, answer))


def extract_boxed(text: str) -> str | None:
    r"""Give the content of the last \boxed{...}, braces nested; None if not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def normal_form(answer: str) -> str:
    """Write an answer so that differences of mere form are gone."""
    answer = unicodedata.normalize("NFKC", answer).replace("\N{MINUS SIGN}", "-")
    return answer.strip().strip("$").rstrip(".").strip().casefold()


def _number(text: str) -> Fraction | None:
    match = _RATIO.fullmatch(text)
    if match is None or not any(character.isdigit() for character in text):
        return None
    whole, divisor, sign, over, under = match.groups()
    try:
        if over:
            return Fraction(int(sign + over), int(under))
        value = Fraction(whole.replace(",", ""))
        return value / Fraction(divisor.replace(",", "")) if divisor else value
    except (ValueError, ZeroDivisionError):
        return None


class _Verifier:
    """One math-verify process for all threads, started at need, killed when late."""

    def __init__(self, deadline_s: float = 3.0):
        arguments = [str(_MEMORY_BYTES)]
        self._process = LineProcess(_WORKER, arguments, deadline_s=deadline_s)
        self.close = self._process.close

    def equal(self, gold: str, answer: str) -> bool:
        return self._process.ask([gold, answer]) == 1


_verifier = _Verifier()
atexit.register(_verifier.close)
