"""The documents against the code: the README's example is run as it is printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax import alarms, config, health, objective, rows, tool_alarms
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.calls import parse_tool_calls
from tools_env.functions import FunctionEnvironment
from tools_env.protocol import CallRecord, Reward, Task, ToolCall, Turn

DOCUMENTS = ("README.md", "docs/guide.md", "docs/metrics.md", "docs/objectives.md")
DOCUMENTS += ("docs/sandbox.md", "docs/tools.md")
# What makes the example small enough for a test; the rest is the README's own command.
SMALL = {
    "rollout.max_prompt_length": 576,
    "rollout.max_completion_length": 32,
    "rollout.max_turn_length": 16,
    "rollout.num_generations": 2,
    "rollout.slots": 2,
    "train.prompts_per_step": 1,
    "train.num_minibatches": 1,
    "train.num_iterations": 2,  # with one update the penalty on likelihoods is 0
    "train.micro_batch_size": 1,
    "train.num_steps": 1,
    "objective.ratio": "token",
    "objective.clip": "fixed",
    "objective.lld": 0.1,
    "eval.temperature": 1.0,  # the sampling program of training serves for both
}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


@pytest.fixture(scope="module")
def documents():
    root = Path(__file__).resolve().parent.parent
    return {name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS}


@pytest.fixture(scope="module")
def example(documents, tmp_path_factory):
    """The run folder of the README's worked example, run beside a copy of run.py."""
    root = Path(__file__).resolve().parent.parent
    folder = tmp_path_factory.mktemp("example")
    for name in ("grpo_jax", "configs", "tools_env"):
        (folder / name).symlink_to(root / name)
    (folder / "run.py").write_text((root / "run.py").read_text())
    readme = documents["README.md"]
    for name, block in re.findall(
        r"`(warehouse\.\w+)`.*?\n```\w+\n(.*?)^```$", readme, re.M | re.S
    ):
        (folder / name).write_text(block, encoding="utf-8")
    (command,) = [b for b in blocks(readme, "bash") if "warehouse" in b]
    command = command.replace("configs/edge.py", "configs/edge.py:tiny")
    small = "".join(f" --config.{key}={value}" for key, value in SMALL.items())
    _run(command.rstrip() + small, folder)
    return folder / "runs/warehouse"


def _run(command, folder):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAX_COMPILATION_CACHE_DIR": _cache(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of the time
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _cache():
    import jax

    return jax.config.jax_compilation_cache_dir


def metrics_of(example):
    (row,) = map(json.loads, (example / "metrics.jsonl").read_text().splitlines())
    return row


def test_worked_example_runs_with_its_tools_data_and_rewards(example):
    row = metrics_of(example)
    assert {"rewards/right_total/mean", "rewards/looked_up/mean"} <= row.keys()
    assert {"tools/call_rate", "eval/score/all"} <= row.keys()
    lines = (example / "rollouts/step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 and rows[0]["task_id"].startswith("warehouse.jsonl:")
    assert '"name": "price"' in rows[0]["segments"][0]["text"]
    saved = json.loads((example / "config.json").read_text())
    assert saved["reward"]["weights"] == [1.0, 0.1]


def test_worked_example_rewards_what_it_says(documents):
    space = {}
    exec(blocks(documents["README.md"], "python")[0], space)
    said = [{"role": "assistant", "content": " 2.0\n"}]
    tool = [{"role": "tool", "name": "price", "content": "2"}]
    words = [{"role": "assistant", "content": "two"}]
    assert space["right_total"]([said, tool, words], [2, 2, 2]) == [1.0, 0.0, 0.0]
    trajectories = [trajectory("ok"), trajectory("malformed"), trajectory()]
    assert space["looked_up"](trajectories) == [1.0, 0.0, 0.0]


def test_config_file_and_gold_conversation_of_the_guide(
    documents, repository, tmp_path, monkeypatch
):
    monkeypatch.chdir(repository)
    guide = documents["docs/guide.md"]
    (block,) = [b for b in blocks(guide, "python") if "get_config" in b]
    path = tmp_path / "warehouse_config.py"
    path.write_text(block)
    made = config.load(f"{path}:tiny")
    config.check(made)
    assert made.tools.functions == ("warehouse.price",) and made.model.source == "tiny"

    for block in blocks(guide, "json"):  # a conversation, a column `demonstration`
        task = rows.task(json.loads(block), "row", ["demonstration"])
        assert [message["role"] for message in task.prompt] == ["user"]
        call, result, answer = FunctionEnvironment([], rewards=None).demonstration(task)
        calls = parse_tool_calls(call["content"])
        assert calls == [ToolCall("price", {"item": "bolt"})]
        assert (result["role"], answer["content"]) == ("tool", "2")


def trajectory(*statuses):
    calls = [CallRecord("price", {}, status, "2") for status in statuses]
    segments = [Segment.given(Source.PROMPT, [1]), Segment.given(Source.MODEL, [2, 3])]
    task = Task("t", [], {"category": "parts"})
    made = Trajectory(task, 0, 0, segments, [Turn("2", calls)], "stop")
    parts = {"right_total": 0.5, "right_total/failed": None}
    made.reward = Reward(0.5, parts, maximum=0.5, passed=True)
    return made


def documented(text):
    """Patterns of the names in the first column of the tables of metrics.md."""
    cells = re.findall(r"^\| (`.*?`) \|", text, re.M)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {
        name: re.compile(re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(name)))
        for name in names
    }


def emitted(example):
    """Every metric name of the run, and those that need calls that its model lacks."""
    called = [trajectory("ok", "timeout", "malformed"), trajectory("ok"), trajectory()]
    called[0].reward.parts["right_total/failed"] = 1.0
    return set(metrics_of(example)) | set(
        health.rollout_metrics(called, executes_tools=True)
    )


def test_every_metric_is_documented(example, documents):
    patterns = documented(documents["docs/metrics.md"])
    undocumented = {
        name
        for name in emitted(example) - {"step"}
        if not any(pattern.fullmatch(name) for pattern in patterns.values())
    }
    assert not undocumented, "describe them in docs/metrics.md"


def test_no_documented_metric_is_gone(example, documents):
    names = emitted(example)
    patterns = documented(documents["docs/metrics.md"])
    gone = {k for k, p in patterns.items() if not any(map(p.fullmatch, names))}
    # The environment's own reward, the Python tool, a critic, a teacher,
    # answer masking, the columns
    # `level` and `label` and a cold start are not part of the example.
    assert gone == {
        "tools/sandbox_level",
        "lld/answer_weight",
        "rewards/failed",
        "rewards/terms_failed",
        "interaction/weight",
        "interaction/below_floor",
        "interaction/rejected",
        "entropy/reasoning",
        "entropy/tool",
        "roles/tool_share",
        "roles/gradient_cosine/across",
        "roles/gradient_cosine/reasoning",
        "roles/gradient_cosine/tool",
        "filter/flat_groups",
        "filter/saturated_groups",
        "filter/draws",
        "filter/drawn_groups",
        "filter/dropped_groups",
        "filter/void_rows",
        *(name for name in patterns if name.startswith(("critic/", "gear/"))),
        "eval/accuracy/{level}",
        "eval/tool_accuracy/{category}",
        "eval/confusion",
        "epoch",
    }


def test_first_bash_blocks_are_the_main_job_and_the_tests(documents):
    first, second = blocks(documents["README.md"], "bash")[:2]
    assert "configs/quickstart.py" in first and "pytest" not in first
    assert "pip install -e '.[test]'" in second and 'pytest -m "not slow"' in second


@pytest.mark.parametrize("name", DOCUMENTS)
def test_keys_configs_and_links_exist(documents, repository, monkeypatch, name):
    monkeypatch.chdir(repository)
    text = documents[name]
    base = config.load("configs/base.py")
    known = config.leaves(base)
    sections = "|".join(base)
    for key in re.findall(rf"(?:`|config\.)((?:{sections})(?:\.[a-z_0-9]+)+)\b", text):
        other = key == "eval.json" or hasattr(objective, key.partition(".")[2])
        assert key in known or other, key
    for source in set(re.findall(r"configs/\w+\.py(?::[a-z0-9,]+)?", text)):
        config.check(config.load(source))
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[\w-]+)?\)", text):
        assert (repository / name).parent.joinpath(target).exists(), target


def test_readme_lists_every_variant(documents, repository, monkeypatch):
    monkeypatch.chdir(repository)
    rows = re.findall(
        r"^\| `(configs/\w+\.py)` \|[^|]*\| (.*) \|$", documents["README.md"], re.M
    )
    assert len(rows) == len(list(Path("configs").glob("*.py"))) - 1  # base.py
    for source, cell in rows:
        with pytest.raises(config.BadInput, match="known: ") as refused:
            config.load(f"{source}:no_such_variant")
        known = str(refused.value).partition("known: ")[2].split(", ")
        assert sorted(re.findall(r"`(\w+)`", cell)) == sorted(known)


def test_guide_has_a_chapter_on_every_alarm(documents):
    chapters = documents["docs/guide.md"].partition("## What an alarm means")[2]
    files = [Path(module.__file__) for module in (alarms, tool_alarms)]
    names = re.findall(r'Alarm\(\s*"(\w+)"', "".join(f.read_text() for f in files))
    names += ["flat_groups", "some_flat_groups"]
    assert len(names) > len(alarms.RULES) + len(tool_alarms.RULES)
    assert [name for name in names if name not in chapters] == []
