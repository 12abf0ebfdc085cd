"""Async tools, objects with `reset`, and what `options` gives a tool."""

import asyncio
import threading
from enum import Enum

import pytest

from tools_env import Task, ToolCall, options
from tools_env.dispatch import dispatch
from tools_env.functions import FunctionEnvironment, make_methods, make_tool, make_tools
from tools_env.pool import ToolPool
from tools_env.protocol import ToolUnavailable


def one(function, **arguments):
    tool = make_tool(function)
    return dispatch({"f": tool}, ToolCall("f", arguments), 200)


def test_an_async_function_is_a_tool():
    async def f(n: int) -> int:
        """Double.

        Args:
            n: Number.
        """
        await asyncio.sleep(0)
        return 2 * n

    result = one(f, n=21)
    assert (result.status, result.output, result.final) == ("ok", "42", False)


def test_an_async_tool_is_cancelled_at_its_own_deadline():
    cancelled = threading.Event()

    @options(timeout_s=0.05)
    async def f():
        """Wait for ever."""
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert one(f).status == "timeout"
    assert cancelled.wait(10)


def test_a_timeout_of_the_tool_s_own_is_its_error():
    @options(timeout_s=60)
    async def f():
        """Fail."""
        raise TimeoutError("the shop did not answer")

    assert one(f).output == "TimeoutError: the shop did not answer"


def test_infrastructure_faults_are_tried_again_then_unavailable():
    class Odd(Exception):
        pass

    tried = []

    @options(retries=1, faults=[Odd])
    def f(times: int) -> int:
        """Fail so often.

        Args:
            times: How often.
        """
        tried.append(times)
        if len(tried) <= times:
            raise (Odd, ToolUnavailable, ConnectionResetError)[len(tried) % 3]("gone")
        return len(tried)

    assert one(f, times=1).output == "2"
    tried.clear()
    result = one(f, times=2)
    assert (result.status, len(tried)) == ("unavailable", 2)
    assert result.output.startswith("The tool is unavailable: ")


def test_a_wrong_answer_is_not_a_fault():
    @options(retries=5)
    def f():
        """Fail."""
        raise ValueError("no")

    assert one(f).output == "ValueError: no"


def test_max_concurrency_bounds_calls_over_all_trajectories():
    running, most, lock, both = 0, 0, threading.Lock(), threading.Event()

    @options(max_concurrency=2)
    def f():
        """Count."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
        both.wait(10)
        with lock:
            running -= 1
        return "done"

    tools = make_tools([f])
    with ToolPool(8, 30.0) as pool:
        run = [ToolCall("f", {})] * 8
        ticket = pool.submit_turn(lambda c: dispatch(tools, c, 9), run, parallel=True)
        while not ticket.done:
            pool.wait(10)
    assert [r.output for r in ticket.results] == ["done"] * 8
    assert most == 2


def test_no_free_slot_in_half_the_time_is_a_fault():
    inside, release = threading.Event(), threading.Event()

    @options(max_concurrency=1, timeout_s=0.1)
    def f():
        """Block."""
        inside.set()
        release.wait(10)

    thread = threading.Thread(target=one, args=(f,))
    thread.start()
    assert inside.wait(10)
    result = one(f)
    assert result.status == "unavailable" and "too many" in result.output
    release.set()
    thread.join()


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": 0}, {"retries": -1}, {"max_concurrency": 0}]
)
def test_options_that_cannot_be_meant(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        options(**wrong)


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Cart:
    """A shopping cart."""

    made = 0

    def __init__(self):
        Cart.made += 1
        self.items, self.closed = [], 0

    def reset(self, budget=0):
        self.budget = budget
        if budget < 0:
            raise OSError("no shop")

    def add(self, item: str, size: Size = Size.SMALL) -> str:
        """Put an item into the cart.

        Args:
            item: What.
            size: How large.
        """
        self.items.append((item, size))
        return f"{len(self.items)} of {self.budget}"

    async def count(self) -> int:
        """Count the items."""
        return len(self.items)

    @options(final=True)
    def pay(self) -> str:
        """Pay."""
        return "paid"

    def close(self):
        self.closed += 1

    def _secret(self):
        """Not a tool."""


def act(session, name, **arguments):
    return session.call(ToolCall(name, arguments))


def test_every_trajectory_has_an_object_of_its_own():
    environment = FunctionEnvironment([Cart, plain], rewards=None)
    names = [schema["function"]["name"] for schema in environment.tools()]
    assert names == ["plain", "add", "count", "pay"]
    task = Task("t", [], {"budget": 9, "other": 1})
    before = Cart.made
    first, second = environment.start(task), environment.start(task)
    assert not first.parallel and Cart.made == before
    assert act(first, "add", item="tea", size="l").output == "1 of 9"
    assert act(first, "add", item="tea").output == "2 of 9"
    assert act(second, "count").output == "0"
    assert act(first, "count").output == "2"
    assert act(first, "plain").output == "1"
    assert act(first, "add", item=3).status == "invalid"
    assert act(first, "_secret").status == act(first, "reset").status == "unknown"
    paid = act(first, "pay")
    assert paid.final and paid.output == "paid"
    cart = first.state["Cart"]
    assert cart.items[0] == ("tea", Size.LARGE)
    first.close()
    first.close()
    assert cart.closed == 1


def plain() -> int:
    """One."""
    return 1


def test_an_object_that_cannot_be_made_is_a_fault():
    environment = FunctionEnvironment([Cart], rewards=None)
    session = environment.start(Task("t", [], {"budget": -1}))
    result = act(session, "count")
    assert result.status == "unavailable" and "no shop" in result.output
    with pytest.raises(ToolUnavailable):
        session.state  # noqa: B018


def test_functions_alone_may_run_at_once():
    session = FunctionEnvironment([plain], rewards=None).start(Task("t", []))
    assert session.parallel and session.state == {}


@pytest.mark.parametrize(
    "wrong", [type("NoReset", (), {"f": plain}), type("X", (), {})]
)
def test_a_class_without_reset_or_methods_is_refused(wrong):
    with pytest.raises(ValueError, match="needs `reset` and methods"):
        make_methods(wrong)


def test_names_clash_between_functions_and_methods():
    def add(a: int) -> int:
        """Add.

        Args:
            a: One.
        """
        return a

    with pytest.raises(ValueError, match="two tools are named 'add'"):
        FunctionEnvironment([Cart, add], rewards=None)


def test_a_row_chooses_its_tools():
    environment = FunctionEnvironment([Cart, plain], rewards=None)
    chosen = [{"type": "function", "function": {"name": "plain"}}]
    session = environment.start(Task("t", [], {"tools": chosen}))
    assert act(session, "plain").status == "ok"
    assert act(session, "add", item="x").status == "unknown"
    assert session.parallel
