"""What tools cost: sandbox calls, sessions' memory, parsing, the pool, the fund's bank.

Every figure stands beside its bound. Times are wall clock (parsing: CPU seconds of this
process), so run it on a quiet machine.

Command: python -m bench.tools [--sessions=64] [--calls=300]
         python -m bench.tools --tokenizer smollm2-135m

--tokenizer names models (folders, hub ids or smollm2-135m) with whose tokenizers to
count the tokens of a call in both protocols, and nothing else.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

from configs import base
from tools_env import PythonSandbox, ToolPool, ToolResult
from tools_env.calls import PROTOCOLS, format_tool_call, parse_tool_calls
from tools_env.fund import FundBankEnvironment, generate_bank_tasks
from tools_env.protocol import ToolCall
from tools_env.sandbox import strongest_level

GIB = 1 << 30
CALLS = [
    ToolCall("python", {"code": "from math import gcd\nprint(gcd(1071, 462))"}),
    ToolCall("python", {"code": "print(17 * 23)"}),
    ToolCall("check_balance", {}),
    ToolCall(
        "transfer_funds", {"source": "checking", "target": "savings", "amount": 250}
    ),
    ToolCall("place_order", {"symbol": "ACME", "side": "buy", "quantity": 10}),
    ToolCall("check_market_status", {"market": "US"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--tokenizer", nargs="*", default=[])
    options = parser.parse_args()
    for source in options.tokenizer:
        show_tokens(source)
    if options.tokenizer:
        return
    print(f"sandbox level: {strongest_level()}")
    warm, session = sandbox_times(options.calls)
    show("warm sandbox call, median", warm * 1e3, "ms", 5)
    show("new session with its first call, median", session * 1e3, "ms", None)
    memory = sessions_memory(options.sessions)
    show(f"{options.sessions} sessions, numpy and sympy, PSS", memory / GIB, "GiB", 2.5)
    for protocol in PROTOCOLS:
        small, large = parse_time(protocol, 100_000), parse_time(protocol, 2_000_000)
        show(f"parse of 100 kB, {protocol}", small * 1e3, "ms", 20)
        show(f"parse of 2 MB over 20 of 100 kB, {protocol}", large / small / 20, "", 2)
    workers = base.get_config().tools.workers
    name = f"16 calls of 0.5 s in one batch, {workers} workers"
    show(name, batch_time(workers), "s", 1.2)
    show("fund: new bank and one call, median", fund_time() * 1e3, "ms", 2)


def show(name: str, value: float, unit: str, bound: float | None) -> None:
    limit = "" if bound is None else f"   at most {bound:g} {unit}"
    print(f"{name:<48}{value:9.3f} {unit}{limit}", flush=True)


def sandbox_times(calls: int) -> tuple[float, float]:
    """Median seconds of a call in a running session and of one in a new session."""
    with PythonSandbox() as sandbox:
        sandbox.run("1")
        warm = [_seconds(sandbox.run, "print(1+1)") for _ in range(calls)]
    return statistics.median(warm), statistics.median(
        _seconds(_first_call) for _ in range(max(calls // 10, 1))
    )


def _first_call() -> None:
    with PythonSandbox() as sandbox:
        sandbox.run("print(1+1)")


def sessions_memory(count: int) -> int:
    """Bytes (PSS) of all processes below this one while `count` sessions are open."""
    sandboxes = [PythonSandbox(60.0) for _ in range(count)]
    try:
        for sandbox in sandboxes:
            result = sandbox.run("import numpy, sympy; sympy.factorint(360)")
            assert result.status == "ok", result
        return sum(map(_pss, _below(os.getpid())))
    finally:
        for sandbox in sandboxes:
            sandbox.close()


def _below(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        text = (folder / "stat").read_text()
        parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    found, level = [], [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("Pss:"))


def parse_time(protocol: str, size: int) -> float:
    """CPU seconds to parse a turn of prose and calls, the least of five."""
    unit = "".join(f"I call it.\n{format_tool_call(c, protocol)}\n" for c in CALLS)
    text = unit * (size // len(unit))
    times = []
    for _ in range(5):
        start = time.process_time()
        parse_tool_calls(text, protocol)
        times.append(time.process_time() - start)
    return min(times)


def batch_time(workers: int) -> float:
    """Seconds of 16 calls of a turn in a pool of the default size."""

    def wait(_: int) -> ToolResult:
        time.sleep(0.5)
        return ToolResult("ok", "")

    with ToolPool(workers, 10.0) as pool:
        start = time.perf_counter()
        ticket = pool.submit_turn(wait, range(16), parallel=True)
        while not ticket.done:
            pool.wait()
        return time.perf_counter() - start


def fund_time() -> float:
    environment = FundBankEnvironment()
    tasks = generate_bank_tasks("train", 100, 0)

    def run(task) -> None:
        session = environment.start(task)
        session.call(ToolCall("check_balance", {}))
        session.close()

    return statistics.median(_seconds(run, task) for task in tasks)


def show_tokens(source: str) -> None:
    from grpo_jax.models import load_tokenizer  # slow to import

    tokenizer = load_tokenizer(source)
    for protocol in PROTOCOLS:
        counts = [
            len(
                tokenizer.encode(
                    format_tool_call(c, protocol), add_special_tokens=False
                )
            )
            for c in CALLS
        ]
        show(f"tokens a call, {protocol}, {source}", statistics.mean(counts), "", None)


def _seconds(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
