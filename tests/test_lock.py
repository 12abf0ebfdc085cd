"""Two processes in one workdir: the second is told who holds it."""

import os
import signal
import subprocess
import sys

import pytest
from toy import command

import run
from grpo_jax import lock
from grpo_jax.config import BadInput

# Holds the lock, and so does a child that outlives it: the lock does not.
HOLDER = """
import subprocess, sys, time
from grpo_jax import lock
with lock.hold(sys.argv[1]):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path, repository):
    """A process that holds the lock of tmp_path / "run", and its child's pid."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    process = subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    yield process
    os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_the_second_process_is_refused_and_killing_the_first_frees_it(tmp_path, holder):
    refused = rf"run' is in use by process {holder.pid} on .*--workdir"
    for _ in range(2):  # being refused does not free it
        with pytest.raises(BadInput, match=refused):
            with lock.hold(tmp_path / "run"):
                raise AssertionError("two at a time")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / "lock").read_text()  # stale, and taken over all the same
    with lock.hold(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()
    assert (tmp_path / "run" / "lock").read_text() == ""


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("mode", ["train", "sft"])
def test_a_command_in_a_folder_in_use_exits_2(tmp_path, holder, mode, capsys):
    arguments = command(tmp_path, tmp_path / "run", f"--mode={mode}")
    assert run.main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"is in use by process {holder.pid} on" in error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        with lock.hold(tmp_path / "file" / "run"):
            raise AssertionError


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    with lock.hold(tmp_path):
        assert "cannot be locked" in caplog.text
