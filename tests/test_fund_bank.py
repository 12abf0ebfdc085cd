"""The bank and the six tools: exact money, T+1, market hours, refusals."""

import random
from datetime import datetime, timedelta

import pytest

from tools_env.functions import dispatch, make_tools
from tools_env.fund.bank import Bank
from tools_env.fund.tools import SCHEMAS, TOOL_NAMES, FundTools
from tools_env.protocol import ToolCall


def test_every_tool_has_a_schema_that_names_its_parameters():
    assert tuple(SCHEMAS) == TOOL_NAMES
    order = SCHEMAS["place_order"]["function"]["parameters"]
    assert order["required"] == ["side", "symbol"]
    assert list(order["properties"]) == ["side", "symbol", "quantity", "amount"]


def test_tools_move_exact_money():
    tools = FundTools()
    before = tools.check_balance()["available"]
    tools.transfer_funds(0.1, "savings")
    tools.transfer_funds(0.2)
    tools.withdraw_funds(1_000)
    after = tools.check_balance()["available"]
    assert after["savings"] == pytest.approx(before["savings"] + 0.3, abs=1e-9)
    assert tools.bank.balances()["savings"] == 120_000_030
    assert tools.check_balance("brokerage")["available"] == {
        "brokerage": before["brokerage"] - 1_000.3
    }
    tools.reset()
    assert tools.check_balance()["available"] == before


def test_a_sale_settles_on_the_next_business_day():
    friday = datetime(2025, 4, 17, 11)  # Thursday before a holiday and a weekend
    bank = Bank(friday)
    before = bank.balances()
    bank.sell("AMZN", 2_000, 39_750)
    assert bank.balances()["pending"] == 39_750
    assert bank.balances()["brokerage"] == before["brokerage"]
    (entry,) = bank.history(friday.date(), "AMZN")
    assert (entry["settles"], entry["settled"]) == ("2025-04-21", 0)
    bank.advance(timedelta(days=3))
    assert bank.balances()["pending"] == 39_750
    bank.advance(timedelta(days=1))
    assert bank.balances()["brokerage"] == before["brokerage"] + 39_750
    assert bank.history(friday.date(), "AMZN")[0]["settled"] == 1


def test_a_deposit_is_pending_until_it_clears():
    bank = Bank()
    bank.deposit("checking", 500)
    assert bank.balances()["pending"] == 500
    bank.advance(timedelta(days=1))
    assert (bank.balances()["pending"], bank.balances()["checking"]) == (0, 80_000_500)


@pytest.mark.parametrize(
    ("now", "is_open"),
    [
        (datetime(2025, 3, 5, 9, 29), False),
        (datetime(2025, 3, 5, 9, 30), True),
        (datetime(2025, 3, 5, 16, 0), False),
        (datetime(2025, 3, 8, 12, 0), False),  # Saturday
        (datetime(2025, 4, 18, 12, 0), False),  # holiday
    ],
)
def test_market_hours_weekends_and_holidays(now, is_open):
    tools = FundTools()
    tools.bank.now = now
    assert tools.check_market_status()["open"] is is_open


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("transfer_funds", {"amount": 1e9}, "holds only"),
        ("transfer_funds", {"amount": -5}, "cannot|not an amount"),
        ("transfer_funds", {"amount": 0.001}, "whole number of cents"),
        ("withdraw_funds", {"amount": 2_000_000}, "daily limit"),
        ("place_order", {"side": "buy", "symbol": "XXX", "quantity": 1}, "unknown"),
        ("place_order", {"side": "buy", "symbol": "VTI"}, "either quantity or"),
        ("place_order", {"side": "sell", "symbol": "VTI", "quantity": 999}, "held"),
        ("place_order", {"side": "buy", "symbol": "VTI", "quantity": 10**30}, "moved"),
        ("get_transaction_history", {"days": -1}, "days"),
    ],
)
def test_refusals_are_errors_that_change_nothing(name, arguments, reason):
    tools = FundTools()
    before = tools.bank.balances(), tools.bank.holdings()
    with pytest.raises(ValueError, match=reason):
        getattr(tools, name)(**arguments)
    assert (tools.bank.balances(), tools.bank.holdings()) == before


def test_money_is_conserved_in_random_call_sequences():
    rng = random.Random(0)
    values = {
        "account": ["savings", "brokerage", "checking", "moon"],
        "to": ["savings", "brokerage", "checking"],
        "amount": [0, 1, 12.34, 99_999, 1e7, -3, 0.005, "10"],
        "side": ["buy", "sell"],
        "symbol": ["AMZN", "vti", "SPY", "XXX"],
        "quantity": [1, 7, 10_000, -2],
        "days": [0, 30],
        "market": ["US", "HK"],
    }
    statuses = set()
    for _ in range(20):
        tools = FundTools()
        table = make_tools([getattr(tools, name) for name in TOOL_NAMES])
        total = sum(tools.bank.balances().values())
        for _ in range(40):
            name = rng.choice(TOOL_NAMES)
            properties = SCHEMAS[name]["function"]["parameters"]["properties"]
            arguments = {
                k: rng.choice(values[k]) for k in properties if rng.random() < 0.7
            }
            statuses.add(dispatch(table, ToolCall(name, arguments), 1000).status)
            if rng.random() < 0.2:
                tools.bank.advance(timedelta(hours=rng.randint(1, 40)))
            balances = tools.bank.balances()
            assert sum(balances.values()) == total
            assert min(balances[k] for k in ("savings", "brokerage", "checking")) >= 0
            assert min(tools.bank.holdings().values()) >= 0
        tools.bank.close()
    assert statuses == {"ok", "error", "invalid"}
