"""Schemas from typed functions, and exact argument validation."""

import enum
from typing import Any, Literal, Optional

import pytest

from tools_env import tool_schema, validate_arguments
from tools_env.schema import example_arguments


class Side(enum.Enum):
    BUY = "buy"
    SELL = "sell"


def place_order(
    symbol: str,
    shares: int,
    side: Side,
    kind: Literal["market", "limit"] = "market",
    limit: float | None = None,
    tags: list[str] | None = None,
    notes: dict[str, int] = {},  # noqa: B006
    urgent: bool = False,
) -> dict:
    """Place an order on the exchange,
    to be settled next day.

    Money is reserved at once.

    Args:
        symbol: The ticker, e.g. "NAV: 1".
        shares (int): How many shares,
            never less than one.
        side: Which way.
        kind (str, optional): Order kind.
        limit: Price limit.
        tags: Free tags.
        notes: Numbers by name.
        urgent: 加急处理。

    Returns:
        The order.
    """
    return {}


def test_schema_of_a_typed_function():
    schema = tool_schema(place_order)
    assert schema["type"] == "function"
    function = schema["function"]
    assert list(function) == ["name", "description", "parameters"]
    assert function["name"] == "place_order"
    assert function["description"] == (
        "Place an order on the exchange, to be settled next day.\n\n"
        "Money is reserved at once."
    )
    assert function["parameters"]["required"] == ["symbol", "shares", "side"]
    assert function["parameters"]["properties"] == {
        "symbol": {"type": "string", "description": 'The ticker, e.g. "NAV: 1".'},
        "shares": {
            "type": "integer",
            "description": "How many shares, never less than one.",
        },
        "side": {
            "type": "string",
            "enum": ["buy", "sell"],
            "description": "Which way.",
        },
        "kind": {
            "type": "string",
            "enum": ["market", "limit"],
            "description": "Order kind.",
            "default": "market",
        },
        "limit": {"type": ["number", "null"], "description": "Price limit."},
        "tags": {
            "type": ["array", "null"],
            "items": {"type": "string"},
            "description": "Free tags.",
        },
        "notes": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Numbers by name.",
            "default": {},
        },
        "urgent": {"type": "boolean", "description": "加急处理。", "default": False},
    }


def test_no_parameters():
    def now() -> str:
        """Tell the time."""
        return ""

    parameters = tool_schema(now)["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}, "required": []}


def test_unions():
    def f(a: int | str, b: list[int] | dict[str, Any] | None, c: Optional[Any]):  # noqa: UP045
        """Do it.

        Args:
            a: A.
            b: B.
            c: C.
        """

    properties = tool_schema(f)["function"]["parameters"]["properties"]
    assert properties["a"]["type"] == ["integer", "string"]
    assert len(properties["b"]["anyOf"]) == 3
    good = {"a": "x", "b": [1], "c": {"any": 1}}
    assert validate_arguments(tool_schema(f), good) == (good, None)
    assert validate_arguments(tool_schema(f), {**good, "b": ["x"]})[0] is None


def _undocumented(a: int):
    """Do it."""


def _unannotated(a):
    """Do it.

    Args:
        a: A.
    """


def _bare(a: int): ...


def _starred(*a: int):
    """Do it.

    Args:
        a: A.
    """


def _strange(a: set[int]):
    """Do it.

    Args:
        a: A.
    """


def _misnamed(a: int):
    """Do it.

    Args:
        a: A.
        b: B.
    """


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_undocumented, ["_undocumented", "'a'", "not described"]),
        (_unannotated, ["_unannotated", "'a'", "no type annotation"]),
        (_bare, ["_bare", "no docstring"]),
        (_starred, ["_starred", "'a'", "variadic"]),
        (_strange, ["_strange", "'a'", "set[int]"]),
        (_misnamed, ["_misnamed", "'b'"]),
    ],
)
def test_unusable_functions_are_named(function, words):
    with pytest.raises(ValueError) as error:
        tool_schema(function)
    for word in words:
        assert word in str(error.value)


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["on"],
}


@pytest.mark.parametrize("value", ["false", "False", "0", "maybe", 0, 1, None, []])
def test_TD3_only_booleans_are_booleans(value):
    arguments, error = validate_arguments(SCHEMA, {"on": value})
    assert arguments is None
    assert "argument 'on' must be boolean, not" in error


@pytest.mark.parametrize("value", ["3", "3.7", "x", 3.7, 3.0, True, None])
def test_TD3_only_integers_are_integers(value):
    arguments, error = validate_arguments(SCHEMA, {"on": True, "n": value})
    assert arguments is None
    assert "argument 'n' must be integer, not" in error


def test_right_arguments_pass_unchanged():
    given = {"on": False, "n": 2**70}
    arguments, error = validate_arguments(SCHEMA, given)
    assert arguments is given and error is None
    assert validate_arguments({"properties": {"x": {"type": "number"}}}, {"x": 3})[0]


def test_every_problem_is_named():
    _, error = validate_arguments(SCHEMA, {"m": 1, "n": "3"})
    assert "missing argument 'on' (boolean)" in error
    assert "unknown argument 'm'; known: on, n" in error
    assert "argument 'n' must be integer, not string \"3\"" in error
    assert "must be an object" in validate_arguments(SCHEMA, [1])[1]


def test_nested_values_are_checked():
    schema = tool_schema(place_order)
    good = {"symbol": "A", "shares": 1, "side": "buy", "tags": ["x"], "notes": {"a": 1}}
    assert validate_arguments(schema, good) == (good, None)
    for change, words in [
        ({"side": "hold"}, 'must be one of "buy", "sell"'),
        ({"tags": ["x", 1]}, "'tags[1]' must be string"),
        ({"notes": {"a": "1"}}, "'notes.a' must be integer"),
        ({"limit": "3"}, "must be number or null"),
    ]:
        arguments, error = validate_arguments(schema, {**good, **change})
        assert arguments is None and words in error


def test_errors_are_short():
    _, error = validate_arguments(SCHEMA, {"on": "x" * 10_000, "y" * 10_000: 1})
    assert len(error) < 500


def test_example_arguments_are_the_required_ones_and_fit():
    schema = tool_schema(place_order)
    arguments = example_arguments(schema)
    assert arguments == {"symbol": "0", "shares": 0, "side": "buy"}
    assert validate_arguments(schema, arguments) == (arguments, None)
    nested = {
        "flag": {"type": "boolean"},
        "few": {"type": "integer", "minimum": 3},
        "low": {"type": "number", "maximum": -1.5},
        "rows": {"type": ["array", "null"], "items": {"type": "string"}},
        "where": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        "any": {},
        "inner": {
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
        },
    }
    schema = {"type": "object", "properties": nested, "required": list(nested)}
    assert validate_arguments(schema, example_arguments(schema))[1] is None
