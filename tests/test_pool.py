"""The tool pool: order, deadlines, stuck threads, width."""

import subprocess
import sys
import threading
import time

import pytest

from tools_env import ToolPool, ToolResult


def ok(text):
    return ToolResult("ok", str(text))


def sleep_and(text, seconds):
    time.sleep(seconds)
    return ok(text)


def tool_threads(others=()):
    return [t for t in threading.enumerate() if t.name == "tool" and t not in others]


def collect(pool, count, limit_s=5.0):
    tickets = []
    end = time.monotonic() + limit_s
    while len(tickets) < count and time.monotonic() < end:
        tickets += pool.wait(0.5)
    return tickets


def test_results_are_in_call_order():
    with ToolPool(4, 2.0) as pool:
        delays = [0.15, 0.0, 0.05]
        ticket = pool.submit_turn(lambda s: sleep_and(s, s), delays, parallel=True)
        assert collect(pool, 1) == [ticket]
        assert [r.output for r in ticket.results] == ["0.15", "0.0", "0.05"]


def test_a_turn_is_sequential_unless_parallel():
    running, most, lock = 0, 0, threading.Lock()

    def watch(_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return ok("")

    with ToolPool(4, 2.0) as pool:
        pool.submit_turn(watch, range(4))
        collect(pool, 1)
        assert most == 1


def test_parallel_calls_run_at_once():
    with ToolPool(16, 5.0) as pool:
        start = time.monotonic()
        tickets = [pool.submit(sleep_and, i, 0.5) for i in range(16)]
        assert len(collect(pool, 16)) == 16
        assert time.monotonic() - start < 1.2
        assert [t.results[0].output for t in tickets] == [str(i) for i in range(16)]


def test_ready_does_not_block():
    with ToolPool(1, 2.0) as pool:
        pool.submit(sleep_and, "x", 0.2)
        start = time.monotonic()
        assert pool.ready() == []
        assert time.monotonic() - start < 0.1
        assert len(collect(pool, 1)) == 1
        assert pool.ready() == [] and pool.wait(None) == []


def test_TD1_exceptions_become_results():
    def fail(error):
        raise error

    with ToolPool(1, 2.0) as pool:
        first = pool.submit(fail, ValueError("no"))
        second = pool.submit(fail, SystemExit(1))
        third = pool.submit(ok, "alive")
        collect(pool, 3)
        assert first.results[0].output == "ValueError: no"
        assert second.results[0].status == "error"
        assert third.results[0].output == "alive"


def test_stuck_call_times_out_and_its_thread_is_replaced():
    release, others = threading.Event(), tool_threads()
    with ToolPool(2, 0.1) as pool:
        stuck = [pool.submit(release.wait) for _ in range(4)]
        turn = pool.submit_turn(lambda x: x or release.wait(), [ok(1), None, ok(3)])
        start = time.monotonic()
        collect(pool, 5)
        assert time.monotonic() - start < 1.5
        assert [t.results[0].status for t in stuck] == ["timeout"] * 4
        assert [r.status for r in turn.results] == ["ok", "timeout", "not_run"]
        after = pool.submit_turn(lambda x: x, [ok(5)])
        collect(pool, 1)
        assert after.results == [ok(5)]
        release.set()
        end = time.monotonic() + 60
        while len(tool_threads(others)) > 2:  # a thread that comes back late ends
            assert time.monotonic() < end, "stuck threads did not end"
            time.sleep(0.01)
        assert pool.ready() == []  # and its value changes nothing


def test_stuck_threads_are_bounded():
    release, others = threading.Event(), tool_threads()
    with ToolPool(2, 0.05, max_stuck=3) as pool:
        tickets = [pool.submit(release.wait) for _ in range(20)]
        assert len(collect(pool, 20)) == 20
        statuses = [t.results[0].status for t in tickets]
        assert set(statuses) == {"timeout", "not_run"}
        assert statuses.count("timeout") <= 6  # only these were taken up
        assert len(tool_threads(others)) <= 6
        release.set()
        time.sleep(0.1)
        again = pool.submit(ok, "again")
        collect(pool, 1)
        assert again.results[0].output == "again"


def test_deadline_runs_from_the_start_of_the_call():
    with ToolPool(1, 0.3) as pool:
        tickets = [pool.submit(sleep_and, i, 0.15) for i in range(4)]
        collect(pool, 4)
        assert [t.results[0].status for t in tickets] == ["ok"] * 4


def test_own_deadline():
    with ToolPool(1, 10.0) as pool:
        ticket = pool.submit(sleep_and, "x", 0.5, deadline_s=0.05)
        collect(pool, 1)
        assert ticket.results[0].status == "timeout"


def test_empty_turn_is_done():
    with ToolPool(1, 1.0) as pool:
        ticket = pool.submit_turn(ok, [])
        assert pool.ready() == [ticket] and ticket.done


def test_closed_pool_and_bad_width_are_refused():
    pool = ToolPool(1, 1.0)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ok, 1)
    with pytest.raises(ValueError, match="workers"):
        ToolPool(0, 1.0)


def test_process_ends_with_a_stuck_tool():
    code = (
        "import time, tools_env\n"
        "pool = tools_env.ToolPool(1, 0.05)\n"
        "pool.submit(time.sleep, 1000)\n"
        "print(pool.wait(5)[0].results[0].status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (0, "timeout\n"), done.stderr
