"""The background loop outlives whatever an async tool or reward raises."""

import asyncio
import time

import pytest

from tools_env import background
from tools_env.dispatch import dispatch
from tools_env.functions import make_tools
from tools_env.protocol import Task, ToolCall, Turn
from tools_env.rewards import RewardSet

ENDS = [SystemExit(3), KeyboardInterrupt("^C"), BaseExceptionGroup("g", [SystemExit()])]


async def _raising(error):
    raise error


async def _task_raising(error):
    await asyncio.create_task(_raising(error))


class _Trajectory:
    task, turns, answer = Task("t", []), [Turn("done")], "done"


def _still_answers():
    async def echo(x: int) -> int:
        """Give back.

        Args:
            x: A number.
        """
        await asyncio.sleep(0)
        return x

    call = ToolCall("echo", {"x": 4})
    assert dispatch(make_tools([echo]), call, 99).output == "4"


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("raising", [_raising, _task_raising])
def test_an_async_tool_that_exits_is_an_error_and_the_next_answers(error, raising):
    async def leave() -> str:
        """Leave."""
        await raising(error)

    result = dispatch(make_tools([leave]), ToolCall("leave", {}), 99)
    assert result.status == "error" and type(error).__name__ in result.output
    _still_answers()


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("raising", [_raising, _task_raising])
def test_an_async_reward_that_exits_abstains_and_the_next_answers(error, raising):
    async def leave(completions):
        await raising(error)

    (reward,) = RewardSet([leave])([_Trajectory.task], [_Trajectory])
    assert reward.total is None and reward.parts["leave/failed"] == 1.0
    _still_answers()


def test_a_late_async_reward_abstains_and_is_counted():
    started, cancelled = [], []

    async def never(completions):
        started.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    def half(completions):
        return [0.5]

    begin = time.monotonic()
    rewards = RewardSet([never, half], timeout_s=2.0)
    (reward,) = rewards([_Trajectory.task], [_Trajectory])
    assert reward.total == 0.5
    assert (reward.parts["never"], reward.parts["never/failed"]) == (None, 1.0)
    assert started and time.monotonic() - begin < 60.0
    _still_answers()
    assert cancelled
    with pytest.raises(ValueError, match="never failed its start-up call.*2 s"):
        rewards.check_at_start([_Trajectory])


def test_errors_of_its_own_are_raised_as_they_are():
    with pytest.raises(KeyError, match="x"):
        background.run(_raising(KeyError("x")))
    with pytest.raises(background.Late):
        background.run(asyncio.Event().wait(), 0.05)
    with pytest.raises(TimeoutError, match="its own"):
        background.run(_raising(TimeoutError("its own")), 60.0)
