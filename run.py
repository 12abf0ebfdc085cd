"""Train, evaluate or export a tool-using policy.

    python run.py --config=configs/NAME.py[:variant,variant] [--workdir=DIR]
                  [--mode=train|sft|eval|plan|export|report] [--config.a.b=value ...]

DIR defaults to runs/NAME. In mode train the run resumes by itself from a checkpoint in
DIR. Exit codes: 0 done; 2 bad configuration, data or model (the reason is the last line
on stderr); 75 stopped by SIGTERM or SIGINT with the state saved; 1 anything else.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from grpo_jax.config import (
    BadInput,
    Stopped,
    check,
    did_you_mean,
    leaves,
    load,
)

MODES = ("train", "sft", "eval", "plan", "export", "report")
FLAGS = ("config", "workdir", "mode", "help")


class OptionalFloat(flags.FloatParser):
    """A number, or None in any case: an optional key that is off.

    `config.check` refuses None where a key is not optional.
    """

    def parse(self, argument: str | float) -> float | None:
        off = isinstance(argument, str) and argument.lower() == "none"
        return None if off else super().parse(argument)


config_flags.register_flag_parser_for_type(float, OptionalFloat())


def parse(argv: list[str]) -> tuple[ConfigDict, Path, str]:
    """Read the command line; BadInput says what is wrong with it."""
    source, rest = _take_config(argv)
    config = load(source)
    _check_names(rest, config)
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "the run's folder", flag_values=values)
    flags.DEFINE_string("mode", "train", " | ".join(MODES), flag_values=values)
    arguments = ["run.py", *rest]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=arguments
        )
        extra = values(arguments)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise BadInput(_one_line(error)) from error
    if extra:
        raise BadInput(f"unexpected argument '{extra[0]}'")
    if values.mode not in MODES:
        known, hint = ", ".join(MODES), did_you_mean(values.mode, MODES)
        raise BadInput(f"--mode must be one of {known}; got '{values.mode}'{hint}")
    name = Path(source.partition(":")[0]).stem
    return values.config, Path(values.workdir or f"runs/{name}"), values.mode


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    if any(argument in ("-h", "--help", "-help") for argument in argv):
        print(__doc__.strip())
        return 0
    logging.basicConfig(format="%(message)s")  # warnings of other packages
    logging.getLogger("grpo_jax").setLevel(logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        _hand_over(*parse(argv))
    except BadInput as error:
        print(f"error: {_one_line(error)}", file=sys.stderr, flush=True)
        return 2
    except Stopped as reason:
        print(f"stopped: {reason}", file=sys.stderr, flush=True)
        return 75
    return 0


def _hand_over(config: ConfigDict, workdir: Path, mode: str) -> None:
    check(config)
    if mode == "report":
        from grpo_jax import report

        print(report.write_html(workdir))
        return
    # JAX is imported only now: a typing error above is answered at once.
    if mode == "plan":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it looks for no device
        from grpo_jax import plan

        plan.main(config, workdir)
        return
    from grpo_jax import devices, trainer

    devices.initialize_distributed(config)
    trainer.main(config, workdir, mode)


def _take_config(argv: list[str]) -> tuple[str, list[str]]:
    """The value of --config, in either of its spellings, and the other arguments."""
    rest, source = [], None
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--config", "-config"):
            source = next(arguments, "")
        elif argument.startswith(("--config=", "-config=")):
            source = argument.partition("=")[2]
        else:
            rest.append(argument)
    if not source:
        raise BadInput("--config is missing: name a file such as configs/quickstart.py")
    return source, rest


def _check_names(arguments: list[str], config: ConfigDict) -> None:
    """Refuse a flag or key that does not exist, with the closest one that does."""
    known = leaves(config)
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        name = argument.lstrip("-").partition("=")[0]
        key = name.removeprefix("no").removeprefix("config.")
        if name.startswith(("config.", "noconfig.")):
            section = any(path.startswith(f"{key}.") for path in known)
            if key not in known and not section:
                raise BadInput(f"no configuration key '{key}'" + _closest(key, known))
        elif name not in FLAGS:
            raise BadInput(f"no flag '--{name}'" + did_you_mean(name, FLAGS))


def _closest(key: str, known: dict) -> str:
    """A suggestion for a whole path, or else for the last word of one."""
    hint = did_you_mean(key, known)
    if hint:
        return hint
    last = {path.rpartition(".")[2]: path for path in known}
    return did_you_mean(last.get(key.rpartition(".")[2], key), known)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stop(number: int, _frame: object) -> None:
    """Leave at once: nothing is to be saved before the trainer has its own handler.

    An exception could come up in the middle of an import, which swallows it or breaks.
    """
    os.write(2, f"stopped: {signal.Signals(number).name}\n".encode())
    os._exit(75)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
