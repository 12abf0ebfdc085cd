"""The bank behind the fund assistant: SQLite in memory, double entry, exact money.

Amounts are integers of the smallest unit (cents), holdings thousandths of a share.
Every movement takes from one account what it gives to another, so the sum over all
accounts, the outside world (`world`) and the exchange (`market`) included, never
changes. Proceeds of a sale wait in `pending` until they settle on the next business
day (T+1), and so does a deposit until it clears. Quotes are fixed; all exchanges keep
the bank's clock, which moves only through `advance`, and each its own holidays. The
bank's business days are those of the US exchange.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from typing import Any

ACCOUNTS = ("brokerage", "checking", "savings")
QUOTES = {  # cents a share
    "AAPL": 22_150,
    "AMZN": 19_875,
    "GOOG": 17_420,
    "META": 61_230,
    "MSFT": 41_505,
    "NVDA": 11_840,
    "SPY": 58_390,
    "TSLA": 26_215,
    "VOO": 53_660,
    "VTI": 28_745,
}
SESSIONS = {  # opening and closing time of each market
    "US": (time(9, 30), time(16)),
    "HK": (time(9, 30), time(16)),
    "CN": (time(9, 30), time(15)),
}
_HOLIDAYS = {  # of 2025, as (month, day), those on a weekend left out
    "US": "1-1 1-20 2-17 4-18 5-26 6-19 7-4 9-1 11-27 12-25",
    "HK": "1-1 1-29 1-30 1-31 4-4 4-18 4-21 5-1 5-5 7-1 10-1 10-7 10-29 12-25 12-26",
    "CN": "1-1 1-28 1-29 1-30 1-31 2-3 2-4 4-4 5-1 5-2 5-5 6-2 10-1 10-2 10-3 10-6 "
    "10-7 10-8",
}
HOLIDAYS = {
    market: frozenset(date(2025, *map(int, day.split("-"))) for day in days.split())
    for market, days in _HOLIDAYS.items()
}
DAILY_WITHDRAWAL_LIMIT = 100_000_000  # cents

_START = datetime(2025, 3, 5, 10, 30)  # a Wednesday, every market open
_OPENING = {"brokerage": 250_000_000, "checking": 80_000_000, "savings": 120_000_000}
_HOLDINGS = {
    "AAPL": 40_000,
    "AMZN": 25_000,
    "SPY": 100_000,
    "TSLA": 60_000,
    "VTI": 300_000,
}
_SCHEMA = """
CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL);
CREATE TABLE holdings (symbol TEXT PRIMARY KEY, mills INTEGER NOT NULL);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, day TEXT NOT NULL, kind TEXT NOT NULL,
    source TEXT NOT NULL, target TEXT NOT NULL, cents INTEGER NOT NULL,
    symbol TEXT, mills INTEGER, settles TEXT, settled INTEGER NOT NULL);
"""


class Bank:
    """One customer's accounts, holdings and movements; safe to use from threads.

    Every refused movement raises ValueError with a reason written for the customer.
    """

    def __init__(
        self,
        now: datetime = _START,
        accounts: Mapping[str, int] = _OPENING,
        holdings: Mapping[str, int] | None = None,
    ):
        """Open with cents by account and thousandths of a share by symbol."""
        self.now = now
        self._lock = threading.RLock()
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.executescript(_SCHEMA)
        names = (*ACCOUNTS, "pending", "market", "world")
        rows = [(name, accounts.get(name, 0)) for name in names]
        self._db.executemany("INSERT INTO accounts VALUES (?, ?)", rows)
        rows = list((_HOLDINGS if holdings is None else holdings).items())
        self._db.executemany("INSERT INTO holdings VALUES (?, ?)", rows)
        self._db.commit()

    def close(self) -> None:
        self._db.close()

    def balances(self) -> dict[str, int]:
        """Cents in every account, `pending`, `market` and `world` included."""
        with self._lock:
            return dict(self._db.execute("SELECT name, cents FROM accounts"))

    def holdings(self) -> dict[str, int]:
        """Thousandths of a share held, by symbol."""
        with self._lock:
            return dict(self._db.execute("SELECT symbol, mills FROM holdings"))

    def snapshot(self) -> dict[str, Any]:
        """All that a customer owns and did, as JSON values: equal banks, equal ones."""
        query = (
            "SELECT day, kind, source, target, cents, symbol, mills, settled "
            "FROM entries ORDER BY 1, 2, 3, 4, 5, 6, 7"
        )
        with self._lock:
            held = {symbol: mills for symbol, mills in self.holdings().items() if mills}
            entries = [list(row) for row in self._db.execute(query)]
            return {
                "accounts": self.balances(),
                "holdings": held,
                "entries": entries,
            }

    def transfer(self, source: str, target: str, cents: int) -> None:
        """Move money between two of the customer's accounts, at once."""
        if source == target:
            raise ValueError(f"{source} is both source and target of the transfer")
        self._move("transfer", source, target, cents)

    def withdraw(self, source: str, cents: int) -> None:
        """Pay out to the customer's outside bank, up to the daily limit."""
        with self._lock:
            (today,) = self._db.execute(
                "SELECT coalesce(sum(cents), 0) FROM entries "
                "WHERE kind = 'withdrawal' AND day = ?",
                (self._today(),),
            ).fetchone()
            if today + cents > DAILY_WITHDRAWAL_LIMIT:
                left = (DAILY_WITHDRAWAL_LIMIT - today) / 100
                raise ValueError(f"over the daily limit; {left:.2f} left today")
            self._move("withdrawal", source, "world", cents)

    def deposit(self, target: str, cents: int) -> None:
        """Take money from outside; it clears into `target` on the next business day."""
        self._move("deposit", "world", target, cents, settles=self._next_business_day())

    def buy(self, symbol: str, mills: int, cents: int) -> None:
        """Buy thousandths of a share; the cash leaves `brokerage` now."""
        with self._lock:
            self._move("buy", "brokerage", "market", cents, symbol=symbol, mills=mills)
            self._hold(symbol, mills)

    def sell(self, symbol: str, mills: int, cents: int) -> None:
        """Sell thousandths of a share; the proceeds settle on the next business day."""
        with self._lock:
            held = self.holdings().get(symbol, 0)
            if mills > held:
                raise ValueError(f"only {held / 1000:g} shares of {symbol} are held")
            self._move(
                "sell",
                "market",
                "brokerage",
                cents,
                symbol=symbol,
                mills=mills,
                settles=self._next_business_day(),
            )
            self._hold(symbol, -mills)

    def history(self, since: date, symbol: str | None = None) -> list[dict]:
        """Movements from `since` on, newest first."""
        query = (
            "SELECT day, kind, source, target, cents, symbol, mills, settles, settled "
            "FROM entries WHERE day >= ? AND (? IS NULL OR symbol = ?) ORDER BY id DESC"
        )
        with self._lock:
            cursor = self._db.execute(query, (since.isoformat(), symbol, symbol))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def market_is_open(self, market: str) -> bool:
        opens, closes = SESSIONS[market]
        today = is_business_day(self.now.date(), market)
        return today and opens <= self.now.time() < closes

    def advance(self, by: timedelta) -> None:
        """Let time pass and settle what has become due."""
        with self._lock, self._db:
            self.now += by
            due = self._db.execute(
                "SELECT id, target, cents FROM entries "
                "WHERE NOT settled AND settles <= ?",
                (self._today(),),
            ).fetchall()
            for entry, target, cents in due:
                self._add("pending", -cents)
                self._add(target, cents)
                query = "UPDATE entries SET settled = 1 WHERE id = ?"
                self._db.execute(query, (entry,))

    def _move(
        self,
        kind: str,
        source: str,
        target: str,
        cents: int,
        *,
        symbol: str | None = None,
        mills: int | None = None,
        settles: date | None = None,
    ) -> None:
        if cents <= 0:
            raise ValueError("the amount must be positive")
        with self._lock, self._db:
            left = self.balances()[source]
            if source in ACCOUNTS and cents > left:
                raise ValueError(f"{source} holds only {left / 100:.2f}")
            self._add(source, -cents)
            self._add("pending" if settles else target, cents)
            due = settles and settles.isoformat()
            row = (self._today(), kind, source, target, cents, symbol, mills, due)
            self._db.execute(
                "INSERT INTO entries VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, settles is None),
            )

    def _add(self, account: str, cents: int) -> None:
        self._db.execute(
            "UPDATE accounts SET cents = cents + ? WHERE name = ?", (cents, account)
        )

    def _hold(self, symbol: str, mills: int) -> None:
        with self._db:
            self._db.execute(
                "INSERT INTO holdings VALUES (?, ?) ON CONFLICT (symbol) "
                "DO UPDATE SET mills = mills + excluded.mills",
                (symbol, mills),
            )

    def _today(self) -> str:
        return self.now.date().isoformat()

    def _next_business_day(self) -> date:
        day = self.now.date() + timedelta(days=1)
        while not is_business_day(day):
            day += timedelta(days=1)
        return day


def is_business_day(day: date, market: str = "US") -> bool:
    return day.weekday() < 5 and day not in HOLIDAYS[market]
