"""Requests to the fund assistant: their words, and the steps that they ask for.

`draw` fills the templates of a split; `tasks` makes single-turn tasks of the requests,
`bank_tasks` multi-turn ones. Which tool a category calls is a rule:

===========  =======================  =========================================
category     tool                     why
===========  =======================  =========================================
balance      check_balance            money held now
history      get_transaction_history  past movements
market       check_market_status      a question about the market itself
transfer     transfer_funds           between the customer's own accounts
withdraw     withdraw_funds           out to the customer's bank
order        place_order              a clear instruction to trade
deposit      check_balance            money paid in shows there, pending or cleared
settlement   get_transaction_history  a sale's record carries its T+1 settlement day
intraday     check_market_status      a same-day trade depends on the session's hours
combo        that of its first step   the plan lists all steps in order of execution
===========  =======================  =========================================

Whatever the words are, a request is judged by what is asked: an order that mentions the
closing bell is an order, a question about a sale's cash that mentions the balance is
settlement. A step's parameters hold what the request states for its tool and nothing
else; an amount in a deposit question is no parameter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools_env.fund import templates_en, templates_zh
from tools_env.fund.amounts import draw_amount
from tools_env.fund.bank import QUOTES
from tools_env.fund.templates import Template

LANGUAGES = {"en": templates_en, "zh": templates_zh}
# category: tool, {slot: parameter}, plan step, thought
RULES = {
    "balance": (
        "check_balance",
        {"account": "account"},
        "check balance",
        "Asks for money held; check the balance.",
    ),
    "history": (
        "get_transaction_history",
        {"symbol": "symbol", "period": "days"},
        "read history",
        "Asks about past activity; read the history.",
    ),
    "market": (
        "check_market_status",
        {"market": "market"},
        "check market",
        "Asks about the market itself; check its status.",
    ),
    "transfer": (
        "transfer_funds",
        {"amount": "amount", "account": "to"},
        "transfer {amount} to {account}",
        "Money moves between own accounts; transfer it.",
    ),
    "withdraw": (
        "withdraw_funds",
        {"amount": "amount"},
        "withdraw {amount}",
        "Money leaves for the bank; withdraw it.",
    ),
    "order": (
        "place_order",
        {"symbol": "symbol", "quantity": "quantity", "amount": "amount"},
        "{side} {symbol}",
        "Clear instruction to {side}; place the order.",
    ),
    "deposit": (
        "check_balance",
        {"account": "account"},
        "check deposit in balance",
        "A deposit shows in the balance, pending or cleared.",
    ),
    "settlement": (
        "get_transaction_history",
        {"symbol": "symbol"},
        "find settlement day",
        "A sale settles T+1; look up the trade.",
    ),
    "intraday": (
        "check_market_status",
        {},
        "check session",
        "A same-day trade depends on the session; check hours.",
    ),
}
CATEGORIES = (*RULES, "combo")
_COMPLEX = ("deposit", "settlement", "intraday")


@dataclass(frozen=True)
class Step:
    """One thing that a request asks for; `slots` are the values of all its words."""

    action: str
    params: dict[str, Any]
    slots: dict[str, Any]

    @property
    def tool(self) -> str:
        return RULES[self.action][0]

    @property
    def plan(self) -> str:
        return RULES[self.action][2].format(**self.slots)


@dataclass(frozen=True)
class Request:
    """A request's text, and its steps in order of execution."""

    text: str
    category: str
    difficulty: str
    language: str
    template: str
    steps: tuple[Step, ...]

    @property
    def thought(self) -> str:
        if self.category != "combo":
            return RULES[self.category][3].format(**self.steps[0].slots)
        actions = [step.action for step in self.steps]
        return f"Steps: {', '.join(actions)}. Start with {actions[0]}."


def draw(
    rng: random.Random, split: str, language: str, category: str
) -> Iterator[Request]:
    """Yield requests of one category without end, through all its templates in turn."""
    if category == "combo":
        return _draw_combos(rng, split, language)
    return _draw_plain(rng, split, language, category)


def _draw_plain(
    rng: random.Random, split: str, language: str, category: str
) -> Iterator[Request]:
    words = LANGUAGES[language]
    for template in _shuffled_forever(rng, words.REQUESTS[split][category]):
        slots, written = _fill(rng, words, language, template)
        is_complex = template.hard or category in _COMPLEX
        yield Request(
            text=_dress(rng, words, template.text.format(**written)),
            category=category,
            difficulty="complex" if is_complex else "simple",
            language=language,
            template=template.text,
            steps=(_step(category, template, slots),),
        )


def _draw_combos(rng: random.Random, split: str, language: str) -> Iterator[Request]:
    """Requests with two or three steps."""
    words = LANGUAGES[language]
    phrases = words.PHRASES[split]
    for connector in _shuffled_forever(rng, words.CONNECTORS[split]):
        names = ("first", "second", "third")[: 3 if "{third}" in connector else 2]
        actions = rng.sample(sorted(phrases), len(names))
        chosen = [rng.choice(phrases[action]) for action in actions]
        filled = [_fill(rng, words, language, template) for template in chosen]
        texts = [
            template.text.format(**written)
            for template, (_, written) in zip(chosen, filled, strict=True)
        ]
        text = connector.format(**dict(zip(names, texts, strict=True)))
        shape = {n: t.text for n, t in zip(names, chosen, strict=True)}
        yield Request(
            text=_dress(rng, words, text),
            category="combo",
            difficulty="combo",
            language=language,
            template=connector.format(**shape),
            steps=tuple(
                _step(action, template, slots)
                for action, template, (slots, _) in zip(
                    actions, chosen, filled, strict=True
                )
            ),
        )


def _step(action: str, template: Template, slots: Mapping[str, Any]) -> Step:
    side = {"side": template.side} if template.side else {}
    named = RULES[action][1].items()
    params = side | {name: slots[slot] for slot, name in named if slot in slots}
    return Step(action, params, dict(slots))


def category_weights(
    categories: Sequence[str] | Mapping[str, float] | None,
) -> dict[str, float]:
    if isinstance(categories, Mapping):
        weights = dict(categories)
    else:
        weights = dict.fromkeys(categories or CATEGORIES, 1.0)
    require("category", weights, CATEGORIES)
    if min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"category weights must be >= 0 with a sum > 0: {weights}")
    return weights


def require(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        found = ", ".join(map(repr, unknown)) or "none given"
        raise ValueError(f"unknown fund {what} {found}; known: {', '.join(known)}")


def apportion(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split a count by weight; what rounding leaves goes to the largest remainders."""
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in order[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def _shuffled_forever(rng: random.Random, items: Sequence):
    while True:
        yield from rng.sample(items, len(items))


def _fill(rng: random.Random, words, language: str, template: Template):
    """Draw a template's slots: their values, and the words that stand for them."""
    amount, amount_text = draw_amount(rng, language)
    quantity = rng.choice((rng.randint(2, 99), 100, 150, 200, 500))
    drawn = {
        "amount": (amount, amount_text),
        "quantity": (quantity, str(quantity)),
        "symbol": (symbol := rng.choice(sorted(QUOTES)), symbol),
        "when": (when := rng.choice(words.TIMES), when),
    }
    choices = {
        "account": words.ACCOUNTS,
        "market": words.MARKETS,
        "period": words.PERIODS,
    }
    for slot, texts in choices.items():
        text = rng.choice(list(texts))
        drawn[slot] = (texts[text], text)
    used = {
        slot: pair for slot, pair in drawn.items() if f"{{{slot}}}" in template.text
    }
    slots = {slot: value for slot, (value, _) in used.items()}
    if template.side:
        slots["side"] = template.side
    return slots, {slot: text for slot, (_, text) in used.items()}


def _dress(rng: random.Random, words, text: str) -> str:
    """Add a greeting or a thank-you now and then, and set the first letter's case."""
    opener, closer = rng.choice(words.OPENERS), rng.choice(words.CLOSERS)
    if opener and text[1:2].islower():
        text = text[0].lower() + text[1:]
    elif not opener:
        text = text[0].upper() + text[1:]
    return opener + text + closer
