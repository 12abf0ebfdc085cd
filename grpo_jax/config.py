"""Load and cross-check a configuration before anything costs time.

Pure Python on purpose: a typing error on the command line is answered without waiting
for JAX. `BadInput` and `Stopped` are the two ways in which any room ends a run early;
`run.py` turns them into exit codes.
"""

import difflib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.base import get_config, leaves
from grpo_jax.bounds import (
    BOUNDS,
    CHOICES,
    ENVIRONMENTS,
    GENERATORS,
    IDENTITY,
    LANGUAGES,
    PROJECTIONS,
)
from grpo_jax.clashes import clashes

Number = int | float


class BadInput(Exception):
    """Bad configuration, data or model: exit 2 with this one-line reason."""


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived and the state is saved: exit 75.

    Not an Exception, so that no handler around a tool or a reward swallows it.
    """


def load(source: str) -> ConfigDict:
    """Run a config file, `path.py` or `path.py:variant,variant`; return it locked."""
    path, _, variants = source.partition(":")
    if not Path(path).is_file():
        raise BadInput(f"--config: no file '{path}'" + suggest_file(path))
    spec = importlib.util.spec_from_file_location("_grpo_jax_config", path)
    if spec is None or spec.loader is None:
        raise BadInput(f"--config: '{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*([variants] if variants else []))
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"--config: '{source}' failed to load: {reason}") from error
    if not isinstance(config, ConfigDict):
        raise BadInput(f"--config: get_config() in '{path}' returned no ConfigDict")
    return config.lock()


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """A suggestion to append to a message, or nothing."""
    match = difflib.get_close_matches(word, [str(k) for k in known], n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def suggest_file(path: str) -> str:
    """The file beside `path` whose name comes closest."""
    folder = Path(path).parent
    names = [p.name for p in folder.glob("*.py")] if folder.is_dir() else []
    return did_you_mean(Path(path).name, names)


def check(config: ConfigDict) -> None:
    """Refuse values that cannot work, alone or together; BadInput names the key."""
    values, defaults = leaves(config), leaves(get_config())
    missing = sorted(defaults.keys() - values.keys())
    if missing:
        raise BadInput(
            f"the configuration lacks '{missing[0]}': start it from "
            "configs.base.get_config()"
        )
    for key, default in defaults.items():
        if values[key] is None and default is not None:
            raise BadInput(f"{key} cannot be None; its default is {default!r}")
    if values["objective.kl_estimator"] == "k1":
        raise BadInput(
            "objective.kl_estimator 'k1' cannot be a loss term: its expected gradient "
            "is zero; use 'k2' or 'k3'"
        )
    for key, known in CHOICES.items():
        _check_choice(key, values[key], known)
    for key, (low, high) in BOUNDS.items():
        _check_bounds(key, values[key], low, high)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{key} must be a finite number; got {value}")
    _check_rollout(config)
    for reason in clashes(config):
        raise BadInput(reason)
    _check_reward(config)
    _check_tools_and_data(config)
    _check_pass_rate(config)
    _check_train(config)
    _check_machine(config)
    _check_trackers(config)
    load = config.checkpoint.load
    if load not in ("newest", "best") and not load.isdecimal():
        raise BadInput(
            f"checkpoint.load must be newest, best or a step's number; got '{load}'"
        )
    if load == "best" and not config.checkpoint.best:
        raise BadInput("checkpoint.load='best' needs checkpoint.best: best by what?")


def _check_choice(key: str, value: Any, known: tuple) -> None:
    if value not in known:
        names = ", ".join(str(k) for k in known)
        hint = did_you_mean(str(value), known)
        raise BadInput(f"{key} must be one of {names}; got '{value}'{hint}")


def _check_bounds(key: str, value: Any, low: Number, high: Number | None) -> None:
    if value is None:  # an optional key that is off
        return
    # Written so that NaN fails too.
    if not (value >= low and (high is None or value <= high)):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadInput(f"{key} must be {bound}; got {value}")


def _check_rollout(config: ConfigDict) -> None:
    estimator = config.objective.estimator
    virtual = estimator == "ngrpo"
    samples = config.rollout.num_generations + virtual * config.objective.num_virtual
    if samples < 2 and estimator != "steppo":
        raise BadInput(
            f"rollout.num_generations={config.rollout.num_generations} leaves no group "
            "to compare within: use at least 2, or objective.estimator='ngrpo' or "
            "'steppo'"
        )
    for target in config.lora.targets:
        _check_choice("lora.targets", target, PROJECTIONS)
    if not config.lora.targets:
        raise BadInput("lora.targets is empty: nothing would be trained")


def _check_tools_and_data(config: ConfigDict) -> None:
    tools, reward = config.tools, config.reward
    if reward.fund == "article" and config.data.answer_format != "react":
        raise BadInput(
            "reward.fund='article' judges the react format, not "
            f"data.answer_format='{config.data.answer_format}'"
        )
    if reward.fund == "capped" and config.data.answer_format == "tool":
        raise BadInput(
            "reward.fund='capped' judges a thought and parameters, which answers of "
            "data.answer_format='tool' do not have"
        )
    if "." not in tools.environment and ":" not in tools.environment:
        _check_choice("tools.environment", tools.environment, ENVIRONMENTS)
    if tools.environment == "functions":
        for key, given in (
            ("tools.functions", [*tools.functions, *tools.mcp]),
            ("reward.functions", reward.functions),
        ):
            if not given:
                raise BadInput(
                    f"tools.environment='functions' needs {key}, the dotted paths of "
                    "your own"
                )
    if (tools.environment == "verifiers") != bool(tools.verifiers):
        raise BadInput(
            f"tools.environment='{tools.environment}' and tools.verifiers="
            f"'{tools.verifiers}': the one needs the other"
        )
    for key, paths in (
        ("tools.functions", tools.functions),
        ("tools.mcp", tools.mcp),
        ("reward.functions", reward.functions),
    ):
        for path in paths:
            if not isinstance(path, str) or not path.strip():
                raise BadInput(f"{key} must be text, one an entry; got {path!r}")
    for weight in config.data.category_weights:
        number = isinstance(weight, Number) and not isinstance(weight, bool)
        if not number or not 0 <= weight < math.inf:
            raise BadInput(
                f"data.category_weights must be numbers of at least 0; got {weight!r}"
            )
    _check_fund(config)
    for language in config.data.languages:
        _check_choice("data.languages", language, LANGUAGES)
    if not config.data.languages:
        raise BadInput("data.languages is empty")
    if not config.data.source:
        raise BadInput("data.source is empty: name a generator, a file or a hub id")
    if config.sft.source in GENERATORS:
        raise BadInput(
            f"sft.source='{config.sft.source}' is no file of gold conversations; '' "
            "takes the gold answers of data.source"
        )
    if config.data.source == "reasoning_gym" and not config.data.datasets:
        raise BadInput("data.source='reasoning_gym' needs data.datasets")


def _check_reward(config: ConfigDict) -> None:
    reward = config.reward
    for key in ("weights", "maxima"):
        numbers = reward[key]
        if numbers and len(numbers) != len(reward.functions):
            raise BadInput(
                f"reward.{key} has {len(numbers)} entries for "
                f"{len(reward.functions)} reward.functions"
            )
        for number in numbers:
            if not isinstance(number, Number) or not math.isfinite(number):
                raise BadInput(f"reward.{key} must be finite numbers; got {number!r}")
    for rule in reward.overuse:
        fits = isinstance(rule, list | tuple) and len(rule) == 3
        if not fits or not isinstance(rule[2], Number) or not 0 <= rule[2] < math.inf:
            raise BadInput(
                "reward.overuse must be (tool, condition, penalty) each, the penalty a "
                f"number of at least 0; got {rule!r}"
            )
    if reward.interaction > reward.interaction_max:
        raise BadInput(
            f"reward.interaction={reward.interaction} is above "
            f"reward.interaction_max={reward.interaction_max}"
        )
    if reward.embedding and not reward.similarity:
        raise BadInput("reward.embedding without reward.similarity would not be used")


def _check_pass_rate(config: ConfigDict) -> None:
    limits = config.data.pass_rate
    numbers = all(isinstance(x, Number) and not isinstance(x, bool) for x in limits)
    if limits and not (
        numbers and len(limits) == 2 and 0 <= limits[0] <= limits[1] <= 1
    ):
        raise BadInput(
            "data.pass_rate must be () or (low, high) with 0 <= low <= high <= 1; got "
            f"{limits!r}"
        )


def _check_fund(config: ConfigDict) -> None:
    """The two modes of the fund assistant need their own tasks."""
    environment, data = config.tools.environment, config.data
    sources = {data.source, data.eval_source} & {"fund", "fund_bank"}
    for source in sorted(sources):
        other = {"fund": "fund_bank", "fund_bank": "fund"}[source]
        if environment == other:
            raise BadInput(
                f"tools.environment='{environment}' cannot judge the tasks of "
                f"'{source}'; use the source '{environment}' or rows of your own"
            )
    if environment == "fund_bank" and config.reward.fund != "graded":
        raise BadInput(
            f"reward.fund='{config.reward.fund}' judges the environment 'fund' only"
        )
    if data.flawed_labels and data.source != "fund":
        raise BadInput("data.flawed_labels needs data.source='fund'")


def _check_train(config: ConfigDict) -> None:
    train = config.train
    if (train.num_steps > 0) == (train.num_epochs > 0):
        raise BadInput(
            f"train.num_steps={train.num_steps} and train.num_epochs="
            f"{train.num_epochs}: set one of them and leave the other at 0"
        )
    if train.prompts_per_step % train.num_minibatches:
        raise BadInput(
            f"train.num_minibatches={train.num_minibatches} does not divide "
            f"train.prompts_per_step={train.prompts_per_step}"
        )


def _check_machine(config: ConfigDict) -> None:
    if config.mesh.fsdp != -1:
        _check_bounds("mesh.fsdp (or -1)", config.mesh.fsdp, 1, None)
    distributed = config.distributed
    if distributed.coordinator in ("", "auto"):
        return
    host, _, port = distributed.coordinator.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(
            "distributed.coordinator must be 'host:port', 'auto' or ''; got "
            f"'{distributed.coordinator}'"
        )
    if not 0 <= distributed.process_id < distributed.num_processes:
        raise BadInput(
            f"distributed.process_id={distributed.process_id} is not below "
            f"distributed.num_processes={distributed.num_processes}"
        )


def _check_trackers(config: ConfigDict) -> None:
    for name in ("wandb", "trackio"):  # tensorboard's writer is always installed
        if config.trackers[name] and importlib.util.find_spec(name) is None:
            raise BadInput(
                f"trackers.{name} needs a package that is not installed: "
                f"pip install 'grpo_jax[{name}]'"
            )


def save(config: ConfigDict, workdir: str | Path) -> None:
    """Write `workdir/config.json`, every key with the value this run uses."""
    workdir = Path(workdir)
    text = json.dumps(config.to_dict(), indent=2, allow_nan=False) + "\n"
    partial = workdir / "config.json.partial"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        os.replace(partial, workdir / "config.json")
    except OSError as error:
        raise BadInput(f"--workdir '{workdir}' cannot be written: {error}") from error


def check_resume(config: ConfigDict, workdir: str | Path) -> None:
    """Compare with the `config.json` of the run that `workdir` holds, if any.

    Another model or adapter shape is refused; any other difference is only named, since
    changing, say, a learning rate in mid-run is the user's choice.
    """
    for folder in (Path(workdir), *Path(workdir).parents):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"--workdir '{workdir}': '{folder}' is not a folder")
    path = Path(workdir) / "config.json"
    if not path.is_file():
        return
    try:
        old = leaves(ConfigDict(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(
            f"'{path}' is damaged: {error}; give another --workdir"
        ) from error
    for key, new in json.loads(json.dumps(leaves(config))).items():
        if key not in old or _plain(old[key]) == new:
            continue
        text = f"{key} is {new!r}, but the run in '{workdir}' began with {old[key]!r}"
        if key in IDENTITY:
            raise BadInput(f"{text}; give another --workdir")
        logging.getLogger(__name__).info("%s", text)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
