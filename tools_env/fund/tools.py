"""The six tools of the fund assistant, as typed methods that act on a bank."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Literal

from tools_env.fund.bank import ACCOUNTS, QUOTES, SESSIONS, Bank
from tools_env.schema import tool_schema

Account = Literal["brokerage", "checking", "savings"]
Market = Literal["US", "HK", "CN"]


class FundTools:
    """A customer's session with the bank: six tools, and `reset` to a fresh bank.

    A refusal (not enough money, unknown symbol) raises ValueError, which the dispatcher
    turns into an observation.
    """

    def __init__(self, bank: Bank | None = None) -> None:
        self.bank = bank or Bank()

    def reset(self) -> None:
        """Start over with a fresh bank."""
        self.bank.close()
        self.bank = Bank()

    def check_balance(self, account: Account | None = None) -> dict:
        """Show the money held: available now, and still pending.

        Args:
            account: The account to show; all accounts by default.
        """
        balances = self.bank.balances()
        names = (account,) if account else ACCOUNTS
        shown = {name: balances[name] / 100 for name in names}
        return {"available": shown, "pending": balances["pending"] / 100}

    def transfer_funds(self, amount: float, to: Account = "savings") -> dict:
        """Move money between the customer's own accounts.

        Args:
            amount: Money to move.
            to: The account that receives it; it comes from brokerage, or from checking
                when brokerage is the receiver.
        """
        source = "checking" if to == "brokerage" else "brokerage"
        self.bank.transfer(source, to, _cents(amount))
        return {"transferred": amount, "from": source, "to": to}

    def withdraw_funds(self, amount: float) -> dict:
        """Pay settled cash out to the customer's own outside bank.

        Args:
            amount: Money to pay out.
        """
        self.bank.withdraw("brokerage", _cents(amount))
        return {"withdrawn": amount}

    def place_order(
        self,
        side: Literal["buy", "sell"],
        symbol: str,
        quantity: int | None = None,
        amount: float | None = None,
    ) -> dict:
        """Buy or sell a stock or fund; give either quantity or amount.

        Args:
            side: What to do.
            symbol: Ticker, such as AMZN.
            quantity: Number of shares.
            amount: Money to invest or to raise.
        """
        symbol = symbol.upper()
        if symbol not in QUOTES:
            raise ValueError(f"unknown symbol {symbol}")
        if (quantity is None) == (amount is None):
            raise ValueError("give either quantity or amount")
        if not self.bank.market_is_open("US"):
            raise ValueError("the market is closed")
        price = QUOTES[symbol]
        if amount is None:
            mills, cents = 1000 * quantity, quantity * price
            _check_movable(quantity, cents)
        else:
            cents = _cents(amount)
            mills = cents * 1000 // price
        trade = self.bank.buy if side == "buy" else self.bank.sell
        trade(symbol, mills, cents)
        return {"side": side, "symbol": symbol, "shares": mills / 1000}

    def get_transaction_history(
        self, symbol: str | None = None, days: int = 30
    ) -> list[dict]:
        """List past movements: trades with their settlement day, transfers, deposits.

        Args:
            symbol: Only trades of this ticker.
            days: How many days back.
        """
        if not 0 <= days <= 36_500:
            raise ValueError("days must lie between 0 and 36500")
        since = self.bank.now.date() - timedelta(days=days)
        rows = self.bank.history(since, symbol and symbol.upper())
        shown = ("day", "kind", "source", "target", "symbol", "settles")
        return [
            {name: row[name] for name in shown if row[name] is not None}
            | {"amount": row["cents"] / 100, "settled": bool(row["settled"])}
            for row in rows
        ]

    def check_market_status(self, market: Market = "US") -> dict:
        """Tell whether a market's session is open now, and its hours.

        Args:
            market: Which market.
        """
        opens, closes = SESSIONS[market]
        hours = f"{opens:%H:%M}-{closes:%H:%M}"
        return {"open": self.bank.market_is_open(market), "hours": hours}


TOOL_NAMES = (
    "check_balance",
    "transfer_funds",
    "withdraw_funds",
    "place_order",
    "get_transaction_history",
    "check_market_status",
)
_TOOLS = FundTools()
SCHEMAS = {name: tool_schema(getattr(_TOOLS, name)) for name in TOOL_NAMES}


def _cents(amount: float) -> int:
    """Convert to the smallest unit, exactly; a fraction of a cent is refused."""
    cents = Decimal(str(amount)) * 100
    if not cents.is_finite() or cents != cents.to_integral_value():
        raise ValueError(f"{amount} is not a whole number of cents")
    _check_movable(amount, cents)
    return int(cents)


def _check_movable(given: float, cents: Decimal | int) -> None:
    if not 0 < cents < 10**15:
        raise ValueError(f"{given} is not an amount that can be moved")
