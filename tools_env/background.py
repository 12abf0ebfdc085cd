"""One event loop in a thread of its own, on which everything async runs.

Async tools, MCP servers, async rewards and judges are started from worker threads or
the main one and awaited there with a deadline; past it the coroutine is cancelled.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


class Late(Exception):
    """The deadline passed first."""


def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
    """Run a coroutine on the background loop; its value, or its exception.

    What is no Exception, such as SystemExit, becomes a RuntimeError: it is the error of
    this call and ends neither the loop nor the caller. Raises Late when it takes longer
    than `timeout_s` seconds; it is cancelled then. Not to be called on the loop itself.
    """
    future = asyncio.run_coroutine_threadsafe(_contained(coroutine), loop())
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done() and not future.cancelled():
            raise  # its own
        future.cancel()
        raise Late(f"no result within {timeout_s:g} s") from None


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def loop() -> asyncio.AbstractEventLoop:
    """The running loop, started at need."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_serve, args=(_loop,), daemon=True)
            thread.start()
            atexit.register(_stop, _loop, thread)
        return _loop


def _serve(served: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(served)
    while True:
        try:
            served.run_forever()
            break
        except (SystemExit, KeyboardInterrupt) as error:
            # From a task that a coroutine started; who awaits it gets it too.
            _log.warning("a background task raised %r", error)
    for task in asyncio.all_tasks(served):
        task.cancel()
    served.run_until_complete(asyncio.sleep(0))
    served.close()


def _stop(served: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    served.call_soon_threadsafe(served.stop)
    thread.join(2.0)
