"""The banks that multi-turn tasks begin with: a day, money, shares and a past.

A world is plain JSON data, `{"now", "accounts", "holdings", "past"}`, drawn to suit a
request: what it speaks of (a deposit, a sale) has happened there, on the day it says.
`open_bank` plays the past through the bank's own movements, so money is exact and what
has come due is settled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

from tools_env.fund.amounts import as_number
from tools_env.fund.bank import QUOTES, Bank, is_business_day
from tools_env.fund.requests import LANGUAGES, Request, Step

_FIRST, _DAYS = date(2025, 2, 10), 290  # days that "now" is drawn from
_FEASIBLE = 0.85  # share of instructions that the bank can carry out
_OPEN = 0.85  # share of orders that meet an open market
_MORNING = time(9, 45)
_LONGEST_PAST = 40  # days
_Event = tuple[datetime, str, dict[str, Any]]


def open_bank(world: Mapping[str, Any]) -> Bank:
    """The bank of a world, at its `now`."""
    now = datetime.fromisoformat(world["now"])
    past = [
        (datetime.fromisoformat(at), kind, what) for at, kind, what in world["past"]
    ]
    first = past[0][0] if past else now
    bank = Bank(first, world["accounts"], world["holdings"])
    for at, kind, what in past:
        bank.advance(at - bank.now)
        getattr(bank, kind)(**what)
    bank.advance(now - bank.now)
    return bank


def draw_world(rng: random.Random, request: Request) -> dict[str, Any]:
    """A world in which the request makes sense; some of its steps may be refused."""
    asked = _asked_event(request)
    now, day = _draw_days(rng, request, asked)
    past = _draw_past(rng, now, asked)
    if asked == "deposit":
        past.append((datetime.combine(day, _MORNING), *_deposit(rng, request.steps[0])))
    if asked == "sell":
        past.append((datetime.combine(day, _MORNING), *_sale(rng, request.steps[0])))
    past.sort(key=lambda event: event[0])
    accounts, holdings = _draw_means(rng, request.steps, past)
    return {
        "now": now.isoformat(),
        "accounts": accounts,
        "holdings": holdings,
        "past": [[at.isoformat(), kind, what] for at, kind, what in past],
    }


def trade(symbol: str, quantity: int | None, amount: Any) -> tuple[int, int]:
    """(thousandths of a share, cents) of an order for a quantity or an amount."""
    price = QUOTES[symbol]
    if quantity is not None:
        return 1000 * quantity, quantity * price
    cents = int(as_number(amount) * 100)
    return cents * 1000 // price, cents


def _asked_event(request: Request) -> str | None:
    return {"deposit": "deposit", "settlement": "sell"}.get(request.category)


def _draw_days(
    rng: random.Random, request: Request, asked: str | None
) -> tuple[datetime, date]:
    """Now, and the day of what the request speaks of."""
    orders = any(step.action == "order" for step in request.steps)
    trading = orders and rng.random() < _OPEN
    when = request.steps[0].slots.get("when")
    words = LANGUAGES[request.language].TIMES
    number = rng.choice((0, 2, 3, 4)) if when is None else words.index(when)
    while True:
        today = _FIRST + timedelta(days=rng.randrange(_DAYS))
        low, high = (10, 15) if trading else (10, 20)
        now = datetime.combine(today, time(rng.randint(low, high), rng.randrange(60)))
        day = _event_day(today, number)
        if trading and not is_business_day(today):
            continue
        if asked != "sell" or is_business_day(day):
            return now, day


def _event_day(today: date, number: int) -> date:
    """The day of the language's word number: this morning, today, yesterday, Friday,
    Monday; the last such day before today."""
    if number < 3:
        return today - timedelta(days=int(number == 2))
    weekday = 4 if number == 3 else 0
    return today - timedelta(days=(today.weekday() - weekday - 1) % 7 + 1)


def _draw_past(rng: random.Random, now: datetime, asked: str | None) -> list[_Event]:
    """Up to six earlier movements, on business days.

    None of the kind that is asked for, and no other money in flight beside it.
    """
    events: list[_Event] = []
    kinds = ["transfer", "withdraw", "buy"] + ([] if asked else ["sell", "deposit"])
    for _ in range(rng.randint(0, 6)):
        day = now.date() - timedelta(days=rng.randint(1, _LONGEST_PAST))
        if not is_business_day(day):
            continue
        at = datetime.combine(day, time(rng.randint(10, 15), rng.randrange(60)))
        events.append((at, *_draw_movement(rng, rng.choice(kinds))))
    return events


def _draw_movement(rng: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    cents = 100 * rng.randint(50, 5_000)
    match kind:
        case "transfer":
            pair = rng.sample(("brokerage", "checking", "savings"), 2)
            return kind, {"source": pair[0], "target": pair[1], "cents": cents}
        case "withdraw":
            return kind, {"source": "brokerage", "cents": cents}
        case "deposit":
            return kind, {"target": "checking", "cents": cents}
    symbol = rng.choice(sorted(QUOTES))
    mills, cents = trade(symbol, rng.randint(1, 20), None)
    return kind, {"symbol": symbol, "mills": mills, "cents": cents}


def _deposit(rng: random.Random, step: Step) -> tuple[str, dict[str, Any]]:
    amount = step.slots.get("amount") or rng.randint(100, 9_000)
    target = step.slots.get("account", "checking")
    return "deposit", {"target": target, "cents": int(as_number(amount) * 100)}


def _sale(rng: random.Random, step: Step) -> tuple[str, dict[str, Any]]:
    slots = step.slots
    quantity = slots.get("quantity")
    if quantity is None and "amount" not in slots:
        quantity = rng.randint(5, 50)
    mills, cents = trade(slots["symbol"], quantity, slots.get("amount"))
    return "sell", {"symbol": slots["symbol"], "mills": mills, "cents": cents}


def _draw_means(
    rng: random.Random, steps: Sequence[Step], past: Sequence[_Event]
) -> tuple[dict[str, int], dict[str, int]]:
    """Opening money and shares: enough for the past, mostly enough for the steps."""
    spent = dict.fromkeys(("brokerage", "checking", "savings"), 0)
    held: dict[str, int] = {}
    for _, kind, what in past:
        source = "brokerage" if kind == "buy" else what.get("source")
        if source in spent:
            spent[source] += what["cents"]
        if kind == "sell":
            held[what["symbol"]] = held.get(what["symbol"], 0) + what["mills"]
    accounts = {
        name: cents + 100 * rng.randint(20, 30_000) + rng.randint(0, 99)
        for name, cents in spent.items()
    }
    for step in steps:
        _provide(rng, step, accounts, held)
    for symbol in rng.sample(sorted(QUOTES), 3):
        held[symbol] = held.get(symbol, 0) + 1000 * rng.randint(1, 80)
    return accounts, held


def _provide(
    rng: random.Random, step: Step, accounts: dict[str, int], held: dict[str, int]
) -> None:
    """Put what a step needs into the world, except for a share that shall fail."""
    if step.action not in ("transfer", "withdraw", "order"):
        return
    if rng.random() >= _FEASIBLE:
        return
    params = step.params
    if step.action == "order":
        quantity, amount = params.get("quantity"), params.get("amount")
        mills, cents = trade(params["symbol"], quantity, amount)
        if params["side"] == "sell":
            held[params["symbol"]] = held.get(params["symbol"], 0) + mills
            return
    else:
        cents = int(as_number(params["amount"]) * 100)
    source = "checking" if params.get("to") == "brokerage" else "brokerage"
    accounts[source] += cents
