"""The command line: what it accepts, and the exit code and last line otherwise."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import run
from configs import base
from grpo_jax.config import BadInput, Stopped, leaves
from grpo_jax.metrics import Metrics

TINY = "--config=configs/tir.py:tiny"


@pytest.fixture(autouse=True)
def in_repository(repository, monkeypatch):
    """Paths such as configs/tir.py work; signal handlers come back afterwards."""
    monkeypatch.chdir(repository)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def trainer(monkeypatch):
    """Stands for grpo_jax.trainer: notes what it is handed, does what a test says."""
    fake = SimpleNamespace(calls=[], act=lambda: None)

    def main(config, workdir, mode):
        fake.calls.append((config, workdir, mode))
        fake.act()

    fake.main = main
    monkeypatch.setitem(sys.modules, "grpo_jax.trainer", fake)
    monkeypatch.setattr("grpo_jax.trainer", fake, raising=False)
    return fake


def last_line(capsys):
    return capsys.readouterr().err.splitlines()[-1]


def test_overrides_modes_and_default_folder(trainer):
    arguments = [
        "--config=configs/tir.py:tiny,grpo",
        "--config.train.num_steps=3",
        "--config.objective.epsilon_high=0.3",
        "--config.tools.functions=('a.b', 'c.d')",
        "--config.data.languages=en",
        "--config.data.languages=zh",
        "--noconfig.data.shuffle",
    ]
    assert run.main(arguments) == 0
    ((config, workdir, mode),) = trainer.calls
    assert (str(workdir), mode) == ("runs/tir", "train")
    assert (config.model.source, config.objective.ratio) == ("tiny", "token")
    assert (config.train.num_steps, config.objective.epsilon_high) == (3, 0.3)
    assert config.tools.functions == ("a.b", "c.d")
    assert config.data.languages == ("en", "zh") and not config.data.shuffle
    assert config.is_locked


@pytest.mark.parametrize("mode", ["train", "sft", "eval", "export"])
def test_modes_are_handed_over(trainer, tmp_path, mode):
    # Both spellings, with and without the equals sign.
    arguments = ["--config", "configs/fund.py", "--mode", mode, f"--workdir={tmp_path}"]
    assert run.main(arguments) == 0
    assert trainer.calls[0][1:] == (tmp_path, mode)


@pytest.mark.parametrize("none", ["None", "none"])
@pytest.mark.parametrize(
    "key",
    [key for key, value in leaves(base.get_config()).items() if value is None],
)
def test_optional_keys_are_switched_off_by_None(trainer, key, none):
    set_and_off = [f"--config.{key}=0.25", f"--config.{key}={none}"]
    assert run.main([TINY, *set_and_off, "--config.objective.estimator=ngrpo"]) == 0
    assert run.main([TINY, *set_and_off[::-1], f"--config.{key}=2.5"]) == 0
    (off, _, _), (on, _, _) = trainer.calls
    assert leaves(off)[key] is None and leaves(on)[key] == 2.5


def test_a_config_file_s_value_can_be_switched_off(trainer):
    arguments = ["--config=configs/tir.py:tiny,dapo"]
    assert run.main(arguments) == 0
    assert run.main([*arguments, "--config.objective.epsilon_high=None"]) == 0
    assert [c.objective.epsilon_high for c, _, _ in trainer.calls] == [0.28, None]


REFUSED = {
    "": "--config is missing",
    "--config=configs/nope.py": "no file 'configs/nope.py'",
    "--config=configs/tir.py:tinny": "no variant 'tinny'; known: aster, ",
    f"{TINY} --config.objective.epsilonn=3": (
        "no configuration key 'objective.epsilonn'; did you mean 'objective.epsilon'?"
    ),
    f"{TINY} --config.num_steps=3": "did you mean 'train.num_steps'?",
    f"{TINY} --config.nowhere.at_all=3": "no configuration key 'nowhere.at_all'",
    f"{TINY} --wrkdir=x": "no flag '--wrkdir'; did you mean 'workdir'?",
    f"{TINY} --mode=trian": "did you mean 'train'?",
    f"{TINY} --mode=plan": "--mode=plan needs plan.topology",
    f"{TINY} extra": "unexpected argument 'extra'",
    f"{TINY} --config.train.num_steps=1.5": "train.num_steps=1.5",
    f"{TINY} --config.train.num_steps=many": "train.num_steps=many",
    f"{TINY} --config.objective.epsilon": "Missing value",
    f"{TINY} --config.objective.epsilon=None": "objective.epsilon cannot be None",
    f"{TINY} --config.train.num_steps=None": "train.num_steps=None",
    f"{TINY} --config.objective.epsilon_high=nil": "objective.epsilon_high=nil",
    f"{TINY} --config.data.category_weights=(1,'2')": "at least 0; got '2'",
    f"{TINY} --config.data.category_weights=(1,-1)": "at least 0; got -1",
    f"{TINY} --config.checkpoint.load=last": "newest, best or a step's number",
    f"{TINY} --config.checkpoint.load=best": "needs checkpoint.best",
    f"{TINY} --config.objective=3": "objective=3",
    f"{TINY} --config.objective.clip=fix": "did you mean 'fixed'?",
    f"{TINY} --mode=report --workdir=/nowhere": "no metrics in '/nowhere",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_with_exit_2_and_the_reason_last(line, trainer, capsys):
    assert run.main(line.split()) == 2
    assert REFUSED[line] in last_line(capsys)
    assert trainer.calls == []


def test_bad_input_of_any_room_is_exit_2_on_one_line(trainer, capsys):
    def act():
        raise BadInput("data.source 'x.jsonl':\n  row 3 has no 'prompt'")

    trainer.act = act
    assert run.main([TINY]) == 2
    assert last_line(capsys) == "error: data.source 'x.jsonl': row 3 has no 'prompt'"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_before_the_trainer_has_its_own_handler(
    trainer, capfd, monkeypatch, number
):
    monkeypatch.setattr(os, "_exit", sys.exit)
    trainer.act = lambda: os.kill(os.getpid(), number)
    with pytest.raises(SystemExit, match="75"):
        run.main([TINY])
    assert capfd.readouterr().err.splitlines()[-1] == f"stopped: {number.name}"


def test_stopped_passes_handlers_of_ordinary_errors(trainer, capsys):
    def act():
        try:
            raise Stopped("SIGTERM")
        except Exception as error:
            raise AssertionError("swallowed") from error

    trainer.act = act
    assert run.main([TINY]) == 75
    assert last_line(capsys) == "stopped: SIGTERM"


def test_anything_else_keeps_its_traceback(trainer):
    def act():
        raise RuntimeError("a bug")

    trainer.act = act
    with pytest.raises(RuntimeError, match="a bug"):
        run.main([TINY])


def test_report_is_written(tmp_path, capsys):
    writer = Metrics(tmp_path)
    writer.write(1, {"reward": 1.0})
    writer.close()
    assert run.main([TINY, "--mode=report", f"--workdir={tmp_path}"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_help(capsys):
    assert run.main(["--help"]) == 0
    assert "--mode=train|sft|eval|plan|export|report" in capsys.readouterr().out


def test_process_exit_code_and_stderr(repository):
    command = [sys.executable, "run.py", TINY, "--config.train.num_step=3"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: no configuration key 'train.num_step'; did you mean 'train.num_steps'?"
    ]
