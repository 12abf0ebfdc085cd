"""Dispatch of calls to typed functions: every fault is an observation."""

import enum
import json
import types

import pytest

from tools_env import Reward, Task, ToolCall, ToolResult, Turn
from tools_env.functions import FunctionEnvironment, dispatch, make_tools
from tools_env.protocol import CallRecord


class Side(enum.Enum):
    BUY = "buy"
    SELL = "sell"


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def div(a: int, b: int) -> float:
    """Divide.

    Args:
        a: One.
        b: Other.
    """
    return a / b


def order(side: Side, flag: bool = False) -> str:
    """Order.

    Args:
        side: Way.
        flag: Flag.
    """
    return f"{side.name} {flag}"


TOOLS = make_tools([add, div, order])


def run(name, max_result_chars=1000, /, **arguments):
    return dispatch(TOOLS, ToolCall(name, arguments), max_result_chars)


def returning(value):
    def give():
        """Give."""
        if isinstance(value, BaseException):
            raise value
        return value

    return dispatch(make_tools([give]), ToolCall("give", {}), 1000)


def test_TD1_faults_name_themselves():
    assert run("add", a=1, b=2).output == "3"
    unknown = run("ad", a=1, b=2)
    assert unknown.status == "unknown"
    assert "'ad'" in unknown.output and "add, div, order" in unknown.output
    missing = run("add", a=1)
    assert missing.status == "invalid" and "'b'" in missing.output
    failed = run("div", a=1, b=0)
    assert failed.status == "error"
    assert failed.output == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (7, "7"),
        (9007199254740993, "9007199254740993"),
        (True, "true"),
        (0.5, "0.5"),
        ("plain", "plain"),
        ("", ""),
        ({"city": "北京", "n": [1, None]}, '{"city": "北京", "n": [1, null]}'),
        ({1}, '"{1}"'),
    ],
)
def test_TD1_any_value_becomes_text(value, text):
    result = returning(value)
    assert (result.status, result.output) == ("ok", text)


def test_TC4_big_integers_and_scripts_pass_through():
    seen = []

    def record(value: dict[str, int], city: str) -> str:
        """Record.

        Args:
            value: 数值。
            city: 城市。
        """
        seen.append((value, city))
        return city

    tools = make_tools([record])
    call = ToolCall("record", {"value": {"id": 9007199254740993}, "city": "北京 ☀️"})
    assert dispatch(tools, call, 100).output == "北京 ☀️"
    assert seen == [({"id": 9007199254740993}, "北京 ☀️")]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (RecursionError("deep"), "RecursionError: deep"),
        (KeyError("k"), "KeyError: 'k'"),
        (ValueError(), "ValueError"),
    ],
)
def test_exceptions_become_observations(error, text):
    result = returning(error)
    assert (result.status, result.output) == ("error", text)


def test_exception_without_readable_text():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    assert returning(Odd()).output.startswith("Odd: ")


def test_circular_value_is_an_error():
    circular = []
    circular.append(circular)
    assert returning(circular).status == "error"


def test_output_is_valid_text():
    assert returning("\ud800!").output == "\\ud800!"
    json.dumps(returning("\x00\x1b[0m").output).encode()


def test_long_output_is_cut_with_a_mark():
    result = returning("a" * 5000 + "z" * 5000)
    assert len(result.output) <= 1000
    assert "characters cut" in result.output
    assert result.output[0] == "a" and result.output[-1] == "z"
    assert len(run("ad", 10).output) <= 10


def test_tool_results_keep_their_status():
    assert returning(ToolResult("timeout", "late")).status == "timeout"


def test_enum_members_reach_the_function():
    assert run("order", side="buy").output == "BUY False"
    assert run("order", side="BUY").status == "invalid"


def test_enum_members_inside_unions_and_lists():
    def trade(sides: list[Side], way: Side | None = None) -> str:
        """Trade.

        Args:
            sides: Ways.
            way: Way.
        """
        return f"{[side.name for side in sides]} {way}"

    tools = make_tools([trade])
    for arguments, text in [
        ({"sides": ["buy", "sell"], "way": None}, "['BUY', 'SELL'] None"),
        ({"sides": [], "way": "sell"}, "[] Side.SELL"),
    ]:
        assert dispatch(tools, ToolCall("trade", arguments), 100).output == text


def test_TD3_declined_flag_stays_declined():
    assert run("order", side="buy", flag="false").status == "invalid"


def test_name_clash_is_refused():
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        make_tools([add, add])


class CountCalls:
    """Stands in for a RewardSet: one point for a successful call."""

    def score(self, task, trajectories):
        return [
            Reward(float(any(c.status == "ok" for t in x.turns for c in t.calls)))
            for x in trajectories
        ]


def test_environment():
    environment = FunctionEnvironment([add, div], rewards=CountCalls())
    names = [tool["function"]["name"] for tool in environment.tools()]
    assert names == ["add", "div"]
    gold = [{"role": "assistant", "content": "3"}]
    task = Task("t", [], {"label": "add", "demonstration": gold})
    session = environment.start(task)
    assert session.call(ToolCall("add", {"a": 1, "b": 2})).output == "3"
    session.close()
    session.close()
    record = CallRecord("add", {"a": 1, "b": 2}, "ok", "3")
    trajectory = types.SimpleNamespace(turns=[Turn("x", [record])], answer=" 3 ")
    assert environment.reward(task, trajectory).total == 1.0
    assert environment.demonstration(task) == gold
    assert environment.prediction(task, trajectory) == {
        "expected": "add",
        "called": "add",
        "correct": True,
        "answer": "3",
    }
    trajectory.reward = Reward(0.0)  # scored before: the functions stay uncalled
    assert not environment.prediction(task, trajectory)["correct"]
