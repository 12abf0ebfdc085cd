"""Runs the hostile programs and looks for what they have reached or left behind.

`python tests/attack.py LEVEL` prints what is wrong, one line each; no pytest needed, so
that the programs can also be run by a user without rights.
"""

import json
import os
import re
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hostile  # noqa: E402

from tools_env import PythonSandbox  # noqa: E402
from tools_env.sandbox import SandboxUnavailable  # noqa: E402


def works(level):
    try:
        with PythonSandbox(level=level) as sandbox:
            return sandbox.run("1").status == "ok"
    except SandboxUnavailable:
        return False


class Surroundings:
    """What a program would reach for, and how to tell whether it did."""

    def __init__(self, folder):
        self.outside = Path(folder) / "outside"
        self.outside.mkdir(mode=0o777)
        self.outside.chmod(0o777)
        self.secret = f"secret-{os.getpid()}-value"
        self.secret_file = self.outside / "key"
        self.secret_file.write_text(self.secret)
        self.server = socket.create_server(("127.0.0.1", 0))
        os.environ["HOSTILE_TEST"] = self.secret

    def fill(self, code):
        for name, value in (
            ("SECRET_FILE", self.secret_file),
            ("SECRET", self.secret),
            ("OUTSIDE", self.outside),
            ("TRAINER", os.getpid()),
            ("PORT", self.server.getsockname()[1]),
        ):
            code = code.replace(name, str(value))
        return code

    def damage(self):
        names = [path.name for path in self.outside.iterdir()]
        safe = names == ["key"] and self.secret_file.read_text() == self.secret
        return [] if safe else [f"the trainer's folder now holds {names}"]

    def close(self):
        self.server.close()
        del os.environ["HOSTILE_TEST"]


def descendants():
    """Process id to state of all below this process; a zombie's is Z."""
    parents, states = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        parents[int(name)], states[int(name)] = int(parent), state
    found, level = {}, [os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found |= {pid: states[pid] for pid in level}
    return found


def attack(level, name, code, ends, surroundings):
    """Run one program; returns what is wrong with how that went."""
    limits = {"memory_mb": 256, "max_processes": 16, "file_mb": 8}
    # Long where nothing waits for it: a loaded machine must not make a time-out.
    seconds = 30.0 if ends and "timeout" not in ends else 1.0
    with PythonSandbox(seconds, output_bytes=4096, level=level, **limits) as sandbox:
        result = sandbox.run(surroundings.fill(code))
        if ends and result.status not in ends:
            return f"{name}: {result}"
        if re.search(
            "^ESCAPE", result.output, re.M
        ):  # a traceback's lines are indented
            return f"{name}: {result.output[:300]}"
        if len(result.output.encode()) > 4096 or result.seconds > seconds + 8:
            return f"{name}: {len(result.output)} characters, {result.seconds} s"
        json.dumps(result.output, ensure_ascii=False).encode()
        # A program that broke its interpreter may cost the next call, no more.
        outputs = [sandbox.run("6 * 7").output for _ in range(3)]
        again = any(output.endswith("42\n") for output in outputs[1:])
        return "" if again else f"{name}: then {outputs}"


def programs_for(level):
    programs = hostile.ALL
    if level != "process":
        programs = programs | hostile.SEALED
    if level in ("namespace", "bubblewrap"):
        programs = programs | hostile.BOXED
    if level == "namespace":
        programs = programs | hostile.COUNTED
    return programs


def problems(level):
    """Run every program that `level` must survive, several at a time."""
    works(level)  # the worker stays when its sessions go
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    before = set(descendants())
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        found = _run_all(level, folder)
    left = {p: s for p, s in descendants().items() if p not in before or s == "Z"}
    if left:
        found.append(f"processes left: {left}")
    if threading.active_count() != threads:
        found.append(f"threads left: {threading.enumerate()}")
    if len(os.listdir("/proc/self/fd")) != files:
        found.append("descriptors left")
    return found


def _run_all(level, folder):
    surroundings = Surroundings(folder)
    work = Path(folder) / "work"  # of the sandboxes that have none of their own
    work.mkdir(mode=0o711)
    work.chmod(0o711)
    tempfile.tempdir = str(work)
    try:
        # Without namespaces the process limit is the user's, so of all together.
        alone = os.getuid() != 0 and level in ("landlock", "process")
        with ThreadPoolExecutor(1 if alone else 6) as pool:
            jobs = [
                pool.submit(attack, level, name, code, ends, surroundings)
                for name, (code, ends) in programs_for(level).items()
            ]
        found = [problem for job in jobs if (problem := job.result())]
        return found + surroundings.damage() + [f"{p} left" for p in work.iterdir()]
    finally:
        tempfile.tempdir = None
        surroundings.close()


if __name__ == "__main__":
    print(*problems(sys.argv[1]), "done", sep="\n")
