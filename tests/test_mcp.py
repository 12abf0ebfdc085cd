"""Tools of a real server process: over stdio, over HTTP, and in a training step."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripted_run

from tools_env import ToolCall
from tools_env.dispatch import dispatch
from tools_env.functions import FunctionEnvironment, by_name
from tools_env.mcp import McpServer

pytest.importorskip("mcp")
SERVER = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


@pytest.fixture
def stdio(monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "token")
    server = McpServer(SERVER, timeout_s=120.0)
    yield server
    server.close()
    server.close()


def ask(server, name, **arguments):
    return dispatch(by_name(server.tools), ToolCall(name, arguments), 300)


def test_tools_of_a_child_process(stdio):
    names = [tool.schema["function"]["name"] for tool in stdio.tools]
    assert names == ["stock", "secret", "die", "die_once", "spout"]
    schema = stdio.tools[0].schema["function"]
    assert schema["description"].startswith("Pieces in stock.")
    assert schema["parameters"]["properties"]["item"] == {"type": "string"}
    assert ask(stdio, "stock", item="bolt", shelf=2).output == "4 on shelf 2"
    assert ask(stdio, "stock", item=4).status == "invalid"
    assert ask(stdio, "stock", item="ghost").status == "error"
    assert ask(stdio, "secret").output == "nothing"


def test_a_server_that_dies_is_a_fault_and_started_again(stdio):
    gone = ask(stdio, "die")
    assert gone.status == "unavailable" and "is gone" in gone.output
    assert ask(stdio, "stock", item="nut").output == "3 on shelf 1"


def test_a_call_is_made_again_when_the_server_was_gone(stdio, tmp_path):
    """The server dies over the first call and serves the second."""
    marker = tmp_path / "died"
    assert ask(stdio, "die_once", marker=str(marker)).output == "alive"
    assert marker.exists()


@pytest.mark.parametrize("rubbish", ["garbage", "not json", "5"])
def test_rubbish_during_a_rollout_is_a_fault_and_costs_no_other_call(stdio, rubbish):
    """What is no MCP comes on the server's output, and then it is gone."""
    result = ask(stdio, "spout", rubbish=rubbish)
    assert result.status == "unavailable"
    assert ask(stdio, "stock", item="nut").output == "3 on shelf 1"


@pytest.mark.parametrize("rubbish", ["false", "no_such_command", "echo hello"])
def test_a_server_that_does_not_start_is_named(rubbish):
    with pytest.raises(ValueError, match=f"MCP server '{rubbish}'"):
        McpServer(rubbish)


def test_the_last_words_of_a_server_that_fails_are_shown():
    code = "raise SystemExit('no licence')"
    with pytest.raises(ValueError, match="its log ends: no licence"):
        McpServer(f'{sys.executable} -c "{code}"')


def test_endless_rubbish_ends_at_the_deadline():
    with pytest.raises(ValueError, match="MCP server 'yes'"):
        McpServer("yes", start_s=1.0)


def test_clash_with_a_function(stdio):
    def stock(item: str) -> int:
        """Count.

        Args:
            item: What.
        """
        return 0

    with pytest.raises(ValueError, match="two tools are named 'stock'"):
        FunctionEnvironment([stock], rewards=None, servers=[stdio])


def test_tools_over_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER.split(), str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        server = connect(url, process)
        assert ask(server, "stock", item="washer").output == "6 on shelf 1"
        server.close()
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ValueError, match="MCP server 'http://"):
        McpServer(url, start_s=5.0)


def connect(url, process):
    end = time.monotonic() + 120
    while True:
        try:
            return McpServer(url, timeout_s=120.0)
        except ValueError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.1)


# A training step ----------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "stock", "arguments": {"item": "bolt"}}\n</tool_call>'
ANSWERS = ("4 on shelf 1", "none at all.")


@pytest.mark.slow
def test_a_scripted_training_step_with_a_server(tmp_path):
    """Every trajectory calls the tool; half of them read the result rightly."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "Bolts?", "wanted": "4 on shelf 1"}\n' * 8)
    (tmp_path / "warehouse_reward.py").write_text(
        "def right(trajectories, wanted, **columns):\n"
        "    pairs = zip(trajectories, wanted)\n"
        "    return [float(t.answer == text) for t, text in pairs]\n"
    )
    settings = {
        "tools.environment": "functions",
        "tools.mcp": repr((SERVER,)),
        "tools.timeout_s": 120.0,
        "reward.functions": "('warehouse_reward.right',)",
        "data.source": str(tasks),
        "data.num_eval_tasks": 0,
        "rollout.max_prompt_length": 1536,
        "rollout.max_completion_length": 320,
        "rollout.max_turn_length": 128,
        "sft.num_epochs": 0,
        "train.num_steps": 1,
        "objective.lld": 0.0,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    flags += ["--config=configs/tir.py:tiny", f"--workdir={tmp_path / 'run'}"]
    answers = [[CALL, answer] for answer in ANSWERS]
    scripted_run.run(tmp_path, answers, flags)
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert row["tools/call_rate"] == 1.0 and row["tools/fault_rate"] == 0.0
    assert row["reward"] == 0.5 and row["grad_norm"] > 0.0
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        (call,) = line["calls"]
        assert (call["status"], call["result"]) == ("ok", "4 on shelf 1")
        right = line["segments"][-1]["text"].startswith(ANSWERS[0])
        assert line["reward"] == float(right)
