"""From the config's `reward` keys to what a run rewards with.

The user's functions, the terms that join the outcome, the reward of a virtual best
sample, and the controller of the interaction weight. All of it is checked here, before
any weight is read; BadInput says what cannot work.
"""

from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from grpo_jax.config import BadInput
from grpo_jax.interaction import Controller
from tools_env.protocol import Environment, Task
from tools_env.rewards import RewardSet, load_function
from tools_env.terms import TURN_TERMS, Overuse, Shaping, needs_tool

NEEDING_TOOLS = ("parsed", "schema_valid", "executed", "similarity")
NEEDING_TOOLS += ("failure_bonus", "interaction", "floor")


def make_rewards(config: ConfigDict) -> RewardSet | None:
    """The user's reward functions with their weights and maxima, or None."""
    keys = config.reward
    if not keys.functions:
        return None
    functions = [load("reward.functions", path) for path in keys.functions]
    return translated(
        RewardSet,
        functions,
        list(keys.weights) or None,
        maxima=list(keys.maxima) or None,
        timeout_s=float(keys.timeout_s),
    )


def make_shaping(
    config: ConfigDict, environment: Environment, rewards: RewardSet | None
) -> Shaping:
    """The terms that join the outcome, and the most that a trajectory can earn."""
    keys = config.reward
    has_tools = bool(environment.tools())
    for key in NEEDING_TOOLS:
        if keys[key] and not has_tools:
            raise BadInput(
                f"reward.{key}={keys[key]} needs an environment that executes tools; "
                f"tools.environment='{config.tools.environment}' has none"
            )
    if config.objective.lld_answer != "none" and not has_tools:
        raise BadInput(
            f"objective.lld_answer='{config.objective.lld_answer}' goes by executed "
            f"calls; tools.environment='{config.tools.environment}' executes none"
        )
    outcome = environment.max_reward if rewards is None else rewards.maximum
    for key in ("stages", "similarity", "failure_bonus"):
        if keys[key] and not outcome:
            raise BadInput(
                f"reward.{key}={keys[key]} needs to know the most that the outcome can "
                "be: declare it in reward.maxima"
            )
    weights = {name: keys[name] for name in TURN_TERMS if keys[name]}
    declared = None if outcome is None else outcome + sum(weights.values())
    return Shaping(
        environment,
        outcome=outcome,
        maximum=_virtual_best(config, declared),
        weights=weights,
        overuse=tuple(_overuse(rule) for rule in keys.overuse),
        stages=keys.stages,
        failure_bonus=keys.failure_bonus,
        similarity=keys.similarity,
        embed=load("reward.embedding", keys.embedding) if keys.embedding else None,
        interaction=make_controller(config).active,
    )


def _virtual_best(config: ConfigDict, declared: float | None) -> float | None:
    """What a virtual best sample earns: as the config says, else the declared most."""
    wanted = config.objective.virtual_reward
    if config.objective.estimator != "ngrpo":
        return declared
    if wanted is None:
        if declared is None:
            raise BadInput(
                "objective.estimator='ngrpo' needs to know the most that the reward "
                "can be: declare it in reward.maxima, one number a function, or set "
                "objective.virtual_reward"
            )
        return declared
    reachable = declared is None or wanted <= declared + 1e-9
    if not (config.reward.allow_unreachable or reachable):
        raise BadInput(
            f"objective.virtual_reward={wanted} is out of reach: the reward gives at "
            f"most {declared:g}, so that even perfect groups would be pushed down; use "
            f"{declared:g}, or set reward.allow_unreachable"
        )
    return float(wanted)


def make_controller(config: ConfigDict) -> Controller:
    """The controller of the interaction weight, as at the start of a run."""
    keys = config.reward
    return Controller(
        interaction=float(keys.interaction),
        floor=float(keys.floor),
        rate=float(keys.floor_rate),
        limit=float(keys.interaction_max),
        mode=keys.floor_mode,
    )


def check_tasks(config: ConfigDict, shaping: Shaping, tasks: Sequence[Task]) -> None:
    """Refuse a column `needs_tool` that is no truth value, or says no for every task.

    Also calls the conditions and the embedding once.
    """
    for task in tasks:
        stated = task.columns.get("needs_tool")
        if stated is not None and not isinstance(stated, bool):
            raise BadInput(
                f"task {task.id}: needs_tool must be true or false; got {stated!r}"
            )
    keys = config.reward
    wanted = [key for key in ("interaction", "floor") if keys[key]]
    if wanted and not any(map(needs_tool, tasks)):
        raise BadInput(
            f"reward.{wanted[0]}={keys[wanted[0]]}, but no training task has needs_tool"
        )
    for rule, given in zip(shaping.overuse, keys.overuse, strict=True):
        _try(f"reward.overuse '{given[1]}'", rule.uncalled_for, tasks[0])
    if shaping.embed is not None:
        where = f"reward.embedding '{keys.embedding}'"
        vectors = _try(where, lambda: [list(v) for v in shaping.embed(["a", "b c"])])
        if len(vectors) != 2 or len(vectors[0]) != len(vectors[1]):
            raise BadInput(f"{where}: two texts must give two vectors of one length")


def load(key: str, path: str) -> Callable:
    """Import what a dotted path of the config names."""
    try:
        return load_function(path)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise BadInput(f"{key} '{path}': {error}") from error


def translated(function: Callable, *args, **kwargs):
    """Call; a ValueError or TypeError about what the user gave becomes BadInput."""
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error


def _overuse(rule: Sequence) -> Overuse:
    tool, condition, penalty = rule
    return Overuse(tool, load("reward.overuse", condition), float(penalty))


def _try(where: str, function: Callable, *args):
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{where}: {type(error).__name__}: {error}") from error
