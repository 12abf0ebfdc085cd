"""An environment of the package `verifiers` (extra `verifiers`), used unchanged.

Its data set gives the tasks, its tools answer the calls, its rubric is the reward. What
can be used are single-turn environments and tool environments, plain or stateful, whose
rubric judges one rollout at a time. A call runs through the environment's own
`env_response`, so error texts, hidden arguments and state are its own; the messages
that it sees hold the prompt, the calls and their results, without the model's words
between. An error that the environment lets out (its `stop_errors`) is an infrastructure
fault: the trajectory has no reward. A `final_env_response` ends the trajectory. Turns
are bounded by `rollout.max_tool_calling_iterations`, not by its own `max_turns`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tools_env import background, reasoning_scorer
from tools_env.calls import prose
from tools_env.dispatch import dispatch
from tools_env.fund.environment import NoTools
from tools_env.protocol import (
    Reward,
    Task,
    Tool,
    ToolCall,
    ToolResult,
    ToolUnavailable,
)

_errors: contextvars.ContextVar[list] = contextvars.ContextVar("errors")
_failures: contextvars.ContextVar[list] = contextvars.ContextVar("failures")


class VerifiersEnvironment:
    """Wraps an environment that `make` returns.

    `timeout_s` bounds a call and, apart, a reward. `max_reward` is the sum of the
    rubric's positive weights: its functions are taken to give at most 1. Raises
    ValueError for an environment of another kind.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        timeout_s: float = 10.0,
        max_result_chars: int = 4096,
        protocol: str = "hermes",
    ):
        try:
            import verifiers
        except ImportError as error:
            reason = "tools.environment='verifiers' needs 'grpo_jax[verifiers]'"
            raise ValueError(f"{reason}: {error}") from error
        self._vf = verifiers
        with _kept_signals():  # an environment takes SIGINT and SIGTERM over
            self._env = make()
        self._check()
        _watch(self._env.rubric)
        if type(self._env).__name__ == "ReasoningGymEnv":
            _score_in_sandbox(self._env)
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        self._protocol = protocol
        config = verifiers.types.ClientConfig(api_base_url="http://localhost:1/v1")
        self._client = verifiers.clients.resolve_client(config)  # never asked
        if isinstance(self._env, verifiers.ToolEnv):
            self._env.error_formatter = _recording(self._env.error_formatter)
        self._schemas = [_schema(tool) for tool in self._env.tool_defs or ()]
        weights = self._env.rubric._get_reward_weights()
        self.max_reward = sum(weight for weight in weights if weight > 0) or 1.0

    def tasks(self, split: str) -> list[Task]:
        """Rows of the data set for "train" or "eval"; [] where it has none."""
        env = self._env
        rows = env.build_dataset() if split == "train" else env.build_eval_dataset()
        return [_task(row, split, number) for number, row in enumerate(rows or ())]

    def tools(self) -> list[dict[str, Any]]:
        return self._schemas

    def close(self) -> None:
        background.run(self._env._teardown(), self._timeout_s)

    def start(self, task: Task) -> VerifiersSession:
        return VerifiersSession(self, task)

    def reward(self, task: Task, trajectory) -> Reward:
        """The rubric's reward; its metrics are the parts.

        Raises what a function with a weight raised, which the rubric counts as 0: the
        trajectory has no reward then.
        """
        state = trajectory.state
        steps = list(self._steps(state["prompt"], trajectory.turns))
        state["trajectory"] = steps
        state["completion"] = steps[-1]["prompt"] + steps[-1]["completion"]
        state["completion"] = state["completion"][len(state["prompt"]) :]
        state["is_truncated"] = trajectory.truncated
        # An endless answer scores 0 before this is over.
        deadline = self._timeout_s + reasoning_scorer.SCORER_S
        failures = background.run(self._score(state), deadline)
        if failures:
            raise failures[0]
        return Reward(float(state["reward"]), dict(state["metrics"] or {}))

    def demonstration(self, task: Task) -> None:
        return None

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        reward = getattr(trajectory, "reward", None) or self.reward(task, trajectory)
        calls = [call.name for turn in trajectory.turns for call in turn.calls]
        total, threshold = reward.total, self._env.pass_threshold
        return {
            "expected": None,
            "called": calls[0] if calls else None,
            "correct": total is not None and total >= threshold,
            "answer": trajectory.answer.strip() or None,
        }

    def _check(self) -> None:
        vf, env = self._vf, self._env
        kind = type(env).__name__
        if not isinstance(env, vf.Environment):
            raise ValueError(f"{kind} is no environment of verifiers")
        if not isinstance(env, vf.SingleTurnEnv | vf.ToolEnv):
            raise ValueError(
                f"{kind} speaks to the model in its own way; single-turn and tool "
                "environments can be used"
            )
        if env.requires_group_rollouts or env.provides_advantages:
            raise ValueError(f"{kind}: its rubric judges groups, not single rollouts")

    async def _score(self, state: Any) -> list[Exception]:
        """Have the rubric judge; what its functions raised."""
        failures: list[Exception] = []
        token = _failures.set(failures)
        try:
            await self._env.rubric.score_rollout(state)
        finally:
            _failures.reset(token)
        await self._env.rubric.cleanup(state)
        return failures

    async def _new_state(self, task: Task) -> Any:
        row = {"prompt": task.prompt, **task.columns}
        state = await self._env.init_state(row, self._client, "policy")
        await self._env.setup_state(state)
        return state

    def _steps(self, prompt: list, turns: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """One step a model turn: what it saw, and its message."""
        seen = list(prompt)
        for number, turn in enumerate(turns):
            made = [call for call in turn.calls if call.arguments is not None]
            message = self._said(
                prose(turn.text, self._protocol),
                [
                    (f"call_{number}_{index}", call.name, call.arguments)
                    for index, call in enumerate(made)
                ],
            )
            yield {
                "prompt": list(seen),
                "completion": [message],
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": "",
                "extras": {},
            }
            seen += [message, *self._heard(message, [call.result for call in made])]

    def _said(self, text: str, calls: Sequence[tuple[str, str, Mapping]]) -> Any:
        types = self._vf.types
        made = [
            types.ToolCall(id=key, name=name, arguments=json.dumps(arguments))
            for key, name, arguments in calls
        ]
        return types.AssistantMessage(content=text, tool_calls=made or None)

    def _heard(self, message: Any, results: Sequence[str]) -> list[Any]:
        pairs = zip(message.tool_calls or (), results, strict=True)
        make = self._vf.types.ToolMessage
        return [make(tool_call_id=call.id, content=text) for call, text in pairs]


class VerifiersSession:
    """A trajectory's state, made when first needed; its calls run one by one."""

    parallel = False

    def __init__(self, owner: VerifiersEnvironment, task: Task):
        self._owner = owner
        self._task = task
        self._state: Any = None
        self._history: list[Any] = []
        self._closed = False
        faults = (ToolUnavailable, ConnectionError, owner._vf.Error)
        self._tools = {
            schema["function"]["name"]: Tool(
                schema,
                self._answering(schema["function"]["name"]),
                timeout_s=owner._timeout_s,
                faults=faults,
            )
            for schema in owner.tools()
        }

    @property
    def state(self) -> Any:
        """The environment's own state of the rollout."""
        if self._state is None:
            owner = self._owner
            making = owner._new_state(self._task)
            self._state = background.run(making, owner._timeout_s)
        return self._state

    def call(self, call: ToolCall) -> ToolResult:
        if not self._tools:
            return NoTools().call(call)
        if self._state is None and call.name in self._tools:
            try:
                _ = self.state
            except Exception as error:
                return ToolResult("unavailable", f"{type(error).__name__}: {error}")
        return dispatch(self._tools, call, self._owner._max_result_chars)

    def close(self) -> None:
        """Run the environment's own clean-up, once; never raises."""
        if self._state is not None and not self._closed:
            self._closed = True
            owner = self._owner
            with contextlib.suppress(Exception):
                background.run(owner._env.cleanup(self._state), owner._timeout_s)

    def _answering(self, name: str) -> Callable[..., Any]:
        async def answer(**arguments: Any) -> ToolResult:
            return await self._respond(name, arguments)

        return answer

    async def _respond(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """The environment's own response to a message with this one call."""
        owner, state = self._owner, self._state
        key = f"call_{len(self._history)}"
        self._history.append(owner._said("", [(key, name, arguments)]))
        caught: list[Exception] = []
        token = _errors.set(caught)
        try:
            messages = [*state["prompt"], *self._history]
            replies = await owner._env.env_response(messages, state)
        finally:
            _errors.reset(token)
        final = state.get("final_env_response")
        text = "\n".join(_text(reply) for reply in final or replies)
        self._history += owner._heard(self._history[-1], [text])
        status = "error" if caught else "ok"
        return ToolResult(status, text, final=final is not None)


def _watch(rubric: Any) -> None:
    """Note what a rubric's weighted functions raise: it makes a 0 of that."""
    for inner in getattr(rubric, "rubrics", ()):
        _watch(inner)
    rubric.funcs = [
        _noting(function) if weight else function
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def noting(*args: Any, **keywords: Any) -> float:
        try:
            value = function(*args, **keywords)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _failures.get([]).append(error)
            raise

    return noting


def _score_in_sandbox(env: Any) -> None:
    """Judge answers outside this process: some of reasoning-gym's scorers run them."""
    specs = [env.gym] if isinstance(env.gym, str) else env.gym
    options = {s["name"]: s.get("config", {}) for s in specs if isinstance(s, Mapping)}

    def score_answer(answer: str, entry: Mapping[str, Any]) -> float:
        name = entry["metadata"]["source_dataset"]
        return reasoning_scorer.score(name, entry, answer, options.get(name))

    reasoning_scorer.start().close()  # not within the deadline of the first reward
    env.rg_dataset.score_answer = score_answer


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _recording(formatter: Callable[[Exception], str]) -> Callable[[Exception], str]:
    """The formatter, noting the error: its text does not say that it is one."""

    def recording(error: Exception) -> str:
        _errors.get([]).append(error)
        return formatter(error)

    return recording


def _schema(tool: Any) -> dict[str, Any]:
    body = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": body}


def _task(row: Mapping[str, Any], split: str, number: int) -> Task:
    """A row as a task; its other columns come to the rubric again as they are."""
    info = row.get("info")
    if isinstance(info, Mapping) and info.get("tool_defs"):
        raise ValueError(f"row {number} has tools of its own, which cannot be used")
    prompt = [_plain(message, number) for message in row["prompt"]]
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Task(f"{split}-{number}", prompt, columns)


def _plain(message: Any, number: int) -> dict[str, Any]:
    content = _text(message)
    role = message["role"] if isinstance(message, Mapping) else message.role
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"row {number}: a prompt with a message of role {role!r}")
    return {"role": role, "content": content}


def _text(message: Any) -> str:
    """The text of a message, mapping or object; what is no text is named."""
    content = message["content"] if isinstance(message, Mapping) else message.content
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [p if isinstance(p, Mapping) else p.model_dump() for p in content]
    texts = [p["text"] if p["type"] == "text" else f"[{p['type']}]" for p in parts]
    return "\n".join(texts)
