"""Hostile programs at the strongest and at the weakest level: nothing gets out.

Each program has a sandbox of its own, several run at a time. After it the same sandbox
must answer again; after all of them nothing may be left on the machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import attack
import pytest

from tools_env.sandbox import LEVELS, strongest_level

STRONGEST = strongest_level()
NOBODY = 65534


def test_the_suite_is_large():
    assert len(attack.programs_for("process")) >= 60


def test_hostile_programs_at_the_strongest_level():
    assert attack.problems(STRONGEST) == []


@pytest.mark.slow
@pytest.mark.skipif(STRONGEST == "process", reason="it is the strongest level here")
def test_hostile_programs_at_the_weakest_level():
    assert attack.problems("process") == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("level", [x for x in LEVELS[:-1] if x != STRONGEST])
def test_hostile_programs_at_levels_between(level):
    if not attack.works(level):
        pytest.skip(f"the level {level} does not work here")
    assert attack.problems(level) == []


def python_for_everyone():
    """A Python that a user without rights may run, or None."""
    script = str(Path(attack.__file__).resolve())
    check = f"import sys; assert sys.version_info >= (3, 11); open({script!r})"
    for program in (sys.executable, "/usr/bin/python3"):
        try:
            if _as_nobody([program, "-c", check]).returncode == 0:
                return program
        except OSError:  # it does not exist, or may not be run
            pass
    return None


def _as_nobody(command):
    return subprocess.run(
        command,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("level", LEVELS[:-1])
def test_hostile_programs_of_a_trainer_without_rights(level):
    python = python_for_everyone()
    if python is None:
        pytest.skip("no Python here that everyone may run")
    done = _as_nobody([python, str(Path(attack.__file__).resolve()), level])
    if "SandboxUnavailable" in done.stderr:
        pytest.skip(f"the level {level} does not work here")
    assert (done.stdout.split(), done.stderr) == (["done"], "")
