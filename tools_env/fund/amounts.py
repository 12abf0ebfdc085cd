"""Amounts as people write them: $1,200, 1.5k, 10 lakh, 10万, 五千.

`draw_amount` serves the task generator, `read_amount` the reward's comparison; values
are exact. 万 is ten thousand and lakh a hundred thousand, so 10万 = 1 lakh =
100000; a currency sign is decoration, since every account holds one currency.
"""

from __future__ import annotations

import random
import re
import unicodedata
from decimal import Decimal, InvalidOperation

_UNITS = {
    "": 1,
    "k": 1_000,
    "thousand": 1_000,
    "grand": 1_000,
    "lakh": 100_000,
    "lakhs": 100_000,
    "m": 1_000_000,
    "mn": 1_000_000,
    "million": 1_000_000,
    "crore": 10_000_000,
    "crores": 10_000_000,
    "百": 100,
    "千": 1_000,
    "万": 10_000,
    "萬": 10_000,
    "十万": 100_000,
    "百万": 1_000_000,
    "千万": 10_000_000,
    "亿": 100_000_000,
}
_AMOUNT = re.compile(
    r"""(?P<sign>-?)\s*(?:us\$|rs\.?|rmb|[$€£¥₹])?\s*
        (?P<number>(?:\d{1,3}(?:,\d{2,3})+|\d+)(?:\.\d+)?|[零一二两三四五六七八九]+)
        \s*(?P<unit>[a-z]+?|[百千万萬十亿]+)??
        \s*(?:dollars?|usd|bucks|yuan|rmb|rupees?|元|块|块钱|人民币)?""",
    re.VERBOSE | re.IGNORECASE,
)
_DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {
    "两": 2
}


def read_amount(text: str) -> Decimal | None:
    """Read one written amount; None for anything that is not exactly one.

    Numbers over 40 characters are refused: no amount is that long, and a model's
    answer must not cost unbounded time.
    """
    text = unicodedata.normalize("NFKC", text).strip().lower()
    match = _AMOUNT.fullmatch(text) if len(text) <= 40 else None
    if match is None or (match["unit"] or "") not in _UNITS:
        return None
    number = match["number"].replace(",", "")
    if number[0] in _DIGITS:
        if len(number) > 1:
            return None
        number = str(_DIGITS[number])
    value = Decimal(number) * _UNITS[match["unit"] or ""]
    return -value if match["sign"] else value


def as_number(value: object) -> Decimal | None:
    """Give the exact number that a JSON value or a written amount stands for."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            number = Decimal(str(value))
        except (InvalidOperation, ValueError):  # an integer too long to print
            return None
        return number if number.is_finite() else None
    return read_amount(value) if isinstance(value, str) else None


def draw_amount(rng: random.Random, language: str) -> tuple[int | float, str]:
    """Draw an amount and one way to write it, as (value, text)."""
    forms = _CHINESE_FORMS if language == "zh" else _ENGLISH_FORMS
    return rng.choice(forms)(rng)


def _grouped(rng: random.Random) -> tuple[int, str]:
    value = rng.choice((10, 50, 100, 500, 1000)) * rng.randint(2, 99)
    return value, f"${value:,}"


def _dollars(rng: random.Random) -> tuple[int, str]:
    value = rng.choice((10, 25, 100)) * rng.randint(2, 60)
    return value, rng.choice((f"{value} dollars", f"${value}"))


def _cents(rng: random.Random) -> tuple[float, str]:
    value = rng.randint(20, 2_000) + rng.choice((25, 50, 75)) / 100
    return value, f"${value:,.2f}"


def _thousands(rng: random.Random) -> tuple[int, str]:
    half = rng.randint(2, 60)
    number = f"{half // 2}.5" if half % 2 else str(half // 2)
    return half * 500, rng.choice((f"{number}k", f"${number}k"))


def _lakhs(rng: random.Random) -> tuple[int, str]:
    count = rng.randint(2, 20)
    return count * 100_000, f"{count} lakh"


def _wan(rng: random.Random) -> tuple[int, str]:
    half = rng.randint(1, 40)
    number = f"{half // 2}.5" if half % 2 else str(half // 2)
    return half * 5_000, f"{number}万" + rng.choice(("", "元"))


def _yuan(rng: random.Random) -> tuple[int, str]:
    value = rng.choice((100, 500)) * rng.randint(2, 60)
    return value, rng.choice((f"{value}元", f"{value}块", f"¥{value:,}"))


def _numerals(rng: random.Random) -> tuple[int, str]:
    digit = rng.choice("两三四五六七八九")
    unit = rng.choice("千万")
    return _DIGITS[digit] * _UNITS[unit], digit + unit


_ENGLISH_FORMS = (_grouped, _grouped, _dollars, _dollars, _cents, _thousands, _lakhs)
_CHINESE_FORMS = (_wan, _wan, _yuan, _numerals)
