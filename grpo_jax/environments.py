"""The environment that the config asks for, and the suites of `eval.suite`."""

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from grpo_jax.config import BadInput, did_you_mean
from grpo_jax.incentives import load, make_rewards, translated
from tools_env import bfcl
from tools_env.functions import FunctionEnvironment
from tools_env.fund import FundBankEnvironment, FundEnvironment
from tools_env.mcp import McpServer
from tools_env.noise import NoisyEnvironment
from tools_env.protocol import Environment, Task
from tools_env.python_tasks import PythonEnvironment, reasoning_gym_tasks
from tools_env.rewards import load_function
from tools_env.verifiers_env import VerifiersEnvironment

LOG = logging.getLogger(__name__)
PER_SET = 100  # tasks of a reasoning_gym set without eval.limit


def make_environment(config: ConfigDict) -> Environment:
    """The environment that `tools.environment` names, with `tools.noise`.

    A dotted path names a class or function that takes the config.
    """
    environment = _quiet_environment(config)
    if not config.tools.noise:
        return environment
    return NoisyEnvironment(environment, config.tools.noise, config.data.seed)


def _quiet_environment(config: ConfigDict) -> Environment:
    tools = config.tools
    match tools.environment:
        case "fund":
            reward = config.reward
            return FundEnvironment(
                reward.fund, reward.overuse_penalty, config.data.answer_format
            )
        case "fund_bank":
            return FundBankEnvironment(tools.max_result_chars)
        case "python":
            return python_environment(config)
        case "functions":
            functions = [load("tools.functions", path) for path in tools.functions]
            rewards, keys = make_rewards(config), config.reward
            most = rewards.maximum or sum(keys.weights) or len(keys.functions)
            return translated(
                FunctionEnvironment,
                functions,
                rewards=rewards,
                max_reward=most,
                max_result_chars=tools.max_result_chars,
                servers=[
                    translated(McpServer, source, tools.timeout_s)
                    for source in tools.mcp
                ],
            )
        case "verifiers":
            return translated(
                VerifiersEnvironment,
                _verifiers_maker(config),
                timeout_s=tools.timeout_s,
                max_result_chars=tools.max_result_chars,
                protocol=tools.protocol,
            )
        case path:
            return _own_environment(path, config)


def _verifiers_maker(config: ConfigDict) -> Callable[[], Any]:
    """What makes the environment of `tools.verifiers`; errors name the key."""
    name = config.tools.verifiers
    try:
        arguments = json.loads(config.tools.verifiers_args)
    except ValueError as error:
        raise BadInput(f"tools.verifiers_args is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise BadInput("tools.verifiers_args must be a JSON object")

    def make() -> Any:
        import verifiers

        try:
            if "." in name or ":" in name:
                return load_function(name)(**arguments)
            return verifiers.load_environment(name, **arguments)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"tools.verifiers '{name}': {reason}") from error

    return make


def python_environment(config: ConfigDict) -> PythonEnvironment:
    """Mathematics with the Python tool, as the `tools` keys say."""
    tools = config.tools
    environment = translated(
        PythonEnvironment,
        needed_columns=() if config.reward.functions else ("answer",),
        timeout_s=tools.timeout_s,
        memory_mb=tools.memory_mb,
        output_bytes=tools.output_bytes,
        stateful=tools.stateful,
        max_result_chars=tools.max_result_chars,
        require=tools.sandbox.require,
    )
    LOG.info("python sandbox: level '%s'", environment.level)
    return environment


def suite_parts(name: str) -> tuple[str, list[str]]:
    """A suite's kind and its sets, from "bfcl", "bfcl:SET,SET", "reasoning_gym:SET".

    Raises BadInput for any other name.
    """
    kind, _, sets = name.partition(":")
    names = [part.strip() for part in sets.split(",") if part.strip()]
    known = {"bfcl": bfcl.SETS, "reasoning_gym": ()}
    if kind not in known:
        raise BadInput(
            f"eval.suite must be bfcl, bfcl:SET or reasoning_gym:SET; got '{name}'"
            + did_you_mean(kind, known)
        )
    if kind == "reasoning_gym" and not names:
        raise BadInput("eval.suite='reasoning_gym' needs a data set: reasoning_gym:gcd")
    for one in names:
        if kind == "bfcl" and one not in bfcl.SETS:
            raise BadInput(
                f"eval.suite: bfcl has no set '{one}'; it has: {', '.join(bfcl.SETS)}"
                + did_you_mean(one, bfcl.SETS)
            )
    return kind, names or list(known[kind])


def make_suite(config: ConfigDict) -> tuple[Environment, list[Task]]:
    """The environment and the tasks of `eval.suite`."""
    kind, names = suite_parts(config.eval.suite)
    if kind == "reasoning_gym":
        count = (config.eval.limit or PER_SET) * len(names)
        keys = (names, count, config.data.seed, "test")
        return python_environment(config), translated(reasoning_gym_tasks, *keys)
    try:
        leaderboard = bfcl.Leaderboard(config.tools.protocol)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"eval.suite='{config.eval.suite}': {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(leaderboard.close)
        each = [leaderboard.tasks(name, config.eval.limit) for name in names]
        undo.pop_all()
    return leaderboard, [task for tasks in each for task in tasks]


def _own_environment(path: str, config: ConfigDict) -> Environment:
    make = load("tools.environment", path)
    try:
        environment = make(config)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"tools.environment '{path}': {reason}") from error
    wanted = [name for name in dir(Environment) if not name.startswith("_")]
    missing = [n for n in (*wanted, "max_reward") if not hasattr(environment, n)]
    if missing:
        raise BadInput(f"tools.environment '{path}' has no '{missing[0]}'")
    return environment
