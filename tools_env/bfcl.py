"""The Berkeley Function Calling Leaderboard: its tasks, judged by its own checker.

Data and checker come in the wheel bfcl-eval, which is fetched alone and unpacked: it
pins an old numpy and imports every vendor's client. Its code runs in a process of its
own (`bfcl_checker`). A task is one turn: the model sees the task's functions, as the
leaderboard shows them to a model that calls functions, and nothing is executed. The
calls of the turn are what is judged. A call that cannot be read makes the answer wrong;
where no call is wanted the leaderboard takes it for none, so it is right there, and the
part `malformed` says so.
"""

from __future__ import annotations

import copy
import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools_env import wheels
from tools_env.calls import format_tool_call, parse_tool_calls
from tools_env.fund.environment import NoTools
from tools_env.lines import LineProcess
from tools_env.protocol import MalformedCall, Reward, Session, Task, ToolCall

VERSION = "2026.3.23"
WHEEL = f"bfcl_eval-{VERSION}-py3-none-any.whl"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
SETS = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel")
SETS += ("parallel_multiple", "irrelevance")
_CHECKER = Path(__file__).with_name("bfcl_checker.py")


class Leaderboard:
    """An environment over the leaderboard's sets; `close` ends its process.

    `protocol` is how the model writes calls. Raises ValueError when the wheel cannot be
    had, RuntimeError when its code does not start.
    """

    max_reward = 1.0
    own_tools = True

    def __init__(self, protocol: str = "hermes"):
        self.protocol = protocol
        wheel = wheels.fetch(f"bfcl-eval=={VERSION}", WHEEL, SHA256)
        self._folder = tempfile.TemporaryDirectory(prefix="bfcl-")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._folder.name)
        arguments = [self._folder.name]
        self._checker = LineProcess(_CHECKER, arguments, deadline_s=60.0)

    def close(self) -> None:
        self._checker.close()
        self._folder.cleanup()

    def tasks(self, category: str, limit: int = 0) -> list[Task]:
        """A set's tasks, or `limit` of them, evenly spread.

        Columns: category, tools (OpenAI schemas), functions and gold (the
        leaderboard's own, for the checker).
        """
        if category not in SETS:
            raise ValueError(f"unknown set {category!r}; known: {', '.join(SETS)}")
        loaded = self._checker.ask(["load", [category]])
        if loaded is None:
            raise RuntimeError(f"the leaderboard's set {category!r} cannot be loaded")
        shown, functions, gold = loaded["shown"], loaded["functions"], loaded["answers"]
        gold = gold or [[] for _ in shown]
        types = loaded["types"]
        return [
            Task(
                shown[i]["id"],
                shown[i]["question"][0],
                {
                    "category": category,
                    "tools": [_schema(one, types) for one in shown[i]["function"]],
                    "functions": functions[i],
                    "gold": gold[i],
                },
            )
            for i in _spread(len(shown), limit)
        ]

    def tools(self) -> list[dict[str, Any]]:
        """None of its own: every task brings the functions that it shows."""
        return []

    def start(self, task: Task) -> Session:
        return NoTools()

    def reward(self, task: Task, trajectory) -> Reward:
        """1 if the leaderboard's checker finds the calls right, else 0."""
        calls = parse_tool_calls(trajectory.answer, self.protocol)
        verdict = self.check(task, calls)
        malformed = any(isinstance(call, MalformedCall) for call in calls)
        valid = float(verdict["valid"])
        return Reward(valid, {"valid": valid, "malformed": float(malformed)})

    def check(
        self, task: Task, calls: Sequence[ToolCall | MalformedCall]
    ) -> dict[str, Any]:
        """The checker's verdict: `valid`, and with a wrong answer `error_type`."""
        columns = task.columns
        wrong = [call.reason for call in calls if isinstance(call, MalformedCall)]
        if wrong and columns["gold"]:
            return {"valid": False, "error_type": "ast_decoder", "error": wrong}
        made = [{c.name: c.arguments} for c in calls if isinstance(c, ToolCall)]
        question = [columns["category"], made, columns["functions"], columns["gold"]]
        verdict = self._checker.ask(["check", question])
        late = {"valid": False, "error_type": "checker", "error": ["no verdict"]}
        return late if verdict is None else verdict

    def demonstration(self, task: Task) -> list[dict[str, Any]]:
        """The gold calls, the first of what is accepted; without any, plain words."""
        calls = gold_calls(task)
        texts = [format_tool_call(call, self.protocol) for call in calls]
        content = "\n".join(texts) or "None of the functions can do this."
        return [{"role": "assistant", "content": content}]

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        calls = parse_tool_calls(trajectory.answer, self.protocol)
        made = [call for call in calls if isinstance(call, ToolCall)]
        reward = getattr(trajectory, "reward", None) or self.reward(task, trajectory)
        return {
            "expected": None,  # a thousand tools: no table of confusions
            "called": made[0].name if made else None,
            "correct": reward.total == 1.0,
            "answer": json.dumps([[c.name, c.arguments] for c in made], sort_keys=True),
        }


def leaderboard_numbers(scores: Mapping[str, float]) -> dict[str, float]:
    """The non-live columns that the shares of right answers, by set, suffice for.

    As the leaderboard sums up: the simple sets count as one, and the four kinds of
    calls alike; irrelevance stands beside them.
    """
    values = dict(scores)
    simple = [scores[name] for name in SETS[:3] if name in scores]
    if len(simple) == 3:
        values["simple_ast"] = sum(simple) / 3
        rest = [scores[name] for name in SETS[3:6] if name in scores]
        if len(rest) == 3:
            values["non_live_ast"] = (values["simple_ast"] + sum(rest)) / 4
    return values


def score_lines(
    environment: Leaderboard, category: str, trajectories: Sequence[Any]
) -> list[dict[str, Any]]:
    """A set's score file as the leaderboard writes it: the counts, what was wrong."""
    of_set = [t for t in trajectories if t.task.columns["category"] == category]
    right = sum(t.reward.total == 1.0 for t in of_set)
    counts = {"correct_count": right, "total_count": len(of_set)}
    lines = [{"accuracy": right / len(of_set), **counts}]
    for one in of_set:
        if one.reward.total != 1.0:
            calls = parse_tool_calls(one.answer, environment.protocol)
            lines.append(
                {
                    "id": one.task.id,
                    "test_category": category,
                    **environment.check(one.task, calls),
                    "model_result_raw": one.answer,
                    "possible_answer": one.task.columns["gold"],
                }
            )
    return lines


def gold_calls(task: Task) -> list[ToolCall]:
    """What the set accepts, the first choice of every argument."""
    functions = {one["name"]: one["parameters"] for one in task.columns["functions"]}
    write = {"simple_java": _java, "simple_javascript": _javascript}
    literal = write.get(task.columns["category"], lambda value, kind: value)
    return [
        ToolCall(name, _chosen(options, functions[name], literal))
        for call in task.columns["gold"]
        for name, options in call.items()
    ]


def _chosen(options: Mapping, parameters: Mapping, literal) -> dict[str, Any]:
    """The first value accepted for every parameter; "" stands for leaving it out.

    Some answers have parameters that the function does not: the checker refuses those.
    """
    chosen = {}
    for name, kind in parameters["properties"].items():
        values = [value for value in options.get(name, []) if value != ""]
        if values:
            chosen[name] = literal(_settled(values[0], kind), kind)
        elif name in parameters.get("required", []):
            chosen[name] = ""
    return chosen


def _settled(value: Any, kind: Mapping) -> Any:
    """A value without the choices that objects have for each of their keys."""
    if isinstance(value, dict):
        pairs = {k: [v for v in choices if v != ""] for k, choices in value.items()}
        return {k: _settled(v[0], {}) for k, v in pairs.items() if v}
    if isinstance(value, list):
        return [_settled(item, {}) for item in value]
    return value


def _java(value: Any, kind: Mapping) -> str:
    """A value as the text of a Java literal of a parameter's type."""
    name = kind.get("type")
    if isinstance(value, str):
        return value  # the name of a variable, mostly
    if name in ("Array", "ArrayList"):
        item = kind.get("items", {}).get("type", "String")
        items = ", ".join(_java_item(one, item) for one in value)
        if name == "Array":  # whose strings the checker reads without quotes
            items = ", ".join(_java_item(one, item, text=str) for one in value)
            return f"new {item}[]{{{items}}}"
        return f"new ArrayList<{item}>(Arrays.asList({items}))"
    if name == "HashMap":
        puts = " ".join(f'put("{k}", {_java_item(v, "")});' for k, v in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    return _java_item(value, name, text=str)


def _java_item(value: Any, name: str, text=json.dumps) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return text(value)
    return str(value) + {"long": "L", "float": "f"}.get(name, "")


def _javascript(value: Any, kind: Mapping) -> str:
    """A value as the text of a JavaScript literal of a parameter's type."""
    if isinstance(value, str):
        return value
    return json.dumps(value) + ("n" if kind.get("type") == "Bigint" else "")


def _spread(count: int, limit: int) -> list[int]:
    if not limit or limit >= count:
        return list(range(count))
    return [number * count // limit for number in range(limit)]


def _schema(function: Mapping, types: Mapping[str, str]) -> dict[str, Any]:
    """A leaderboard function as an OpenAI schema."""
    body = copy.deepcopy(dict(function))
    body["parameters"] = _translated(body["parameters"], types)
    return {"type": "function", "function": body}


def _translated(schema: Any, types: Mapping[str, str]) -> Any:
    """A JSON schema with the leaderboard's names of types put into JSON's."""
    if not isinstance(schema, dict):
        return schema
    done = dict(schema)
    if isinstance(done.get("type"), str):
        done["type"] = types.get(done["type"], "string")
    if isinstance(done.get("properties"), dict):
        inner = done["properties"].items()
        done["properties"] = {name: _translated(one, types) for name, one in inner}
    if "items" in done:
        done["items"] = _translated(done["items"], types)
    return done
