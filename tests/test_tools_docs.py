"""docs/tools.md: every snippet is run, every command builds what it says."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from endpoint import serving

from grpo_jax import config, setup
from grpo_jax.data import load_tasks
from grpo_jax.types import Trajectory
from tools_env.protocol import CallRecord, ToolCall, Turn

TEXT = (Path(__file__).resolve().parent.parent / "docs/tools.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch, repository):
    """The files of the document, importable, and the configs."""
    server = [b for b in blocks("python") if "MCPServer" in b]
    shop = [b for b in blocks("python") if "MCPServer" not in b]
    (tmp_path / "shop_server.py").write_text("".join(server))
    (tmp_path / "shop.py").write_text("\n\n".join(shop))
    (tmp_path / "shop.jsonl").write_text("".join(blocks("json")))
    (tmp_path / "configs").symlink_to(repository / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("shop", None)


def command(word):
    """The config of the one command whose workdir has this name."""
    (text,) = [b for b in blocks("bash") if f"runs/{word}" in b]
    made = config.load(re.search(r"--config=(\S+)", text)[1])
    found = re.findall(r'--config\.([\w.]+)=("[^"]*"|\S+)', text)
    for key, value in found:
        section, _, name = key.partition(".")
        try:
            value = ast.literal_eval(value.strip('"'))
        except (SyntaxError, ValueError):
            pass
        made[section][name] = value
    config.check(made)
    return made


def play(environment, task, *calls, answer=""):
    """A trajectory that makes these calls in one turn each."""
    session = environment.start(task)
    turns = []
    for name, arguments in calls:
        result = session.call(ToolCall(name, arguments))
        record = CallRecord(name, arguments, result.status, result.output)
        turns.append(Turn("", [record], result.output if result.final else None))
    if answer:
        turns.append(Turn(answer))
    trajectory = Trajectory(task, 0, 0, [], turns, "stop", state=session.state)
    session.close()
    trajectory.reward = environment.reward(task, trajectory)
    return trajectory


def results(trajectory):
    return [(call.status, call.result) for call in trajectory.calls]


def rows():
    made = command("stock")
    made.data.num_tasks = made.data.num_eval_tasks = 0
    return load_tasks(made, "train")


def test_a_function(folder):
    environment = setup.make_environment(command("stock"))
    first = rows()[0]
    played = play(environment, first, ("stock", {"item": "tea"}), answer="3")
    assert results(played) == [("ok", "3")] and played.reward.total == 1.0
    assert play(environment, first, answer="4").reward.total == 0.0


def test_an_object_and_options(folder):
    environment = setup.make_environment(command("cart"))
    first, second, third = rows()
    played = play(
        environment,
        second,
        ("add", {"item": "tea", "pieces": 9}),
        ("add", {"item": "tea", "pieces": 2}),
        ("price", {"item": "tea"}),
        ("price", {"item": "moon"}),
        ("answer", {"text": "done"}),
    )
    status = [call.status for call in played.calls]
    assert status == ["error", "ok", "ok", "unavailable", "ok"]
    assert played.calls[1].result == "5 euros left" and played.answer == "done"
    assert played.reward.total == 1.0
    assert play(environment, second).reward.total == 0.0
    refused = play(
        environment, third, ("price", {"item": "tea"}), ("stock", {"item": ""})
    )
    assert [call.status for call in refused.calls] == ["unknown", "ok"]


def test_a_server(folder):
    made = command("served")
    made.tools.mcp = tuple(s.replace("python", sys.executable) for s in made.tools.mcp)
    environment = setup.make_environment(made)
    try:
        played = play(environment, rows()[0], ("shelf", {"item": "tea"}))
        assert results(played) == [("ok", "shelf 1")]
    finally:
        environment.close()


def test_an_environment_of_verifiers(folder):
    pytest.importorskip("verifiers")
    made = command("borrowed")
    made.data.num_tasks, made.data.num_eval_tasks = 5, 2
    environment = setup.make_environment(made)
    try:
        task, *_ = load_tasks(made, "train", environment)
        assert play(environment, task, answer="no idea").reward.total == 0.0
        assert len(load_tasks(made, "eval", environment)) == 2
    finally:
        environment.close()


def politeness(number, body):
    """Finds politeness in the word please."""
    shown = json.loads(body["messages"][1]["content"])
    return 200, f"SCORE: {10 if 'please' in shown[-1]['content'] else 0}"


@pytest.fixture
def endpoint():
    """A stand-in for the document's language model."""
    with serving(politeness) as server:
        yield server


def test_a_judge(folder, endpoint):
    shop = folder / "shop.py"
    written, port = shop.read_text(), endpoint.server_port
    assert written.count("localhost:8000") == 1
    shop.write_text(written.replace("localhost:8000", f"127.0.0.1:{port}"))
    made = command("stock")
    made.reward.functions = ("shop.right", "shop.polite")
    environment = setup.make_environment(made)
    first = rows()[0]
    rude = play(environment, first, answer="3").reward
    polite = play(environment, first, answer="Three, please.").reward
    assert (rude.parts["right"], rude.parts["polite"]) == (1.0, 0.0)
    assert (polite.parts["right"], polite.parts["polite"]) == (0.0, 1.0)
    asked = ("/v1/chat/completions", "Qwen/Qwen2.5-72B-Instruct")
    found = [(path, body["model"]) for path, body in endpoint.requests]
    assert found == [asked, asked]


def test_the_bank(folder):
    made = command("bank")
    made.data.num_tasks = 3
    environment = setup.make_environment(made)
    for task in load_tasks(made, "train"):
        gold = environment.demonstration(task)
        assert gold[-1]["content"].startswith("ANSWER: ")
        assert play(environment, task).reward.total == 0.0


def test_noise_times_some_calls_out(folder):
    made = command("stock")
    made.tools.noise = 0.5
    environment = setup.make_environment(made)
    task = rows()[0]
    calls = [("stock", {"item": "tea"})] * 40
    first, again = play(environment, task, *calls), play(environment, task, *calls)
    assert results(first) == results(again)
    status = [call.status for call in first.calls]
    assert 8 < status.count("timeout") < 32 and set(status) == {"ok", "timeout"}
    assert environment.max_reward == 1 and len(environment.tools()) == 1
    assert environment.prediction(task, first)["called"] == "stock"
    assert environment.demonstration(task) is None
