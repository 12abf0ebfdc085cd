"""Runs as processes of their own, forked from one that has imported everything once.

Importing takes longer than the whole run of a test, and a kill must hit a real process.
The parent never touches a device, so that it may be forked; it is a program that reads
a line of JSON (arguments, file of stderr, where to die) and answers with the child's
pid, then reads an empty line and answers with its exit code.
"""

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys


class Nursery:
    """Starts runs of run.py, one at a time."""

    def __init__(self, repository, environment):
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=repository,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments, errors, die_in=""):
        """Begin a run; its pid. `die_in`: "module:owner.function#n", a call in which
        it is killed."""
        request = {"arguments": arguments, "errors": str(errors), "die_in": die_in}
        return int(self._ask(json.dumps(request)))

    def wait(self):
        """The exit code of the run, minus a signal's number if that ended it."""
        return int(self._ask(""))

    def run(self, arguments, errors, die_in=""):
        self.start(arguments, errors, die_in)
        return self.wait()

    def close(self):
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def _ask(self, line):
        print(line, file=self.server.stdin, flush=True)
        return self.server.stdout.readline()


def dying(die_in):
    """Let a function kill this process in one of its calls."""
    place, _, number = die_in.partition("#")
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), itertools.count(1)

    def deadly(*arguments, **keywords):
        if next(calls) == int(number or 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, deadly)


def child(request):
    """One run; never returns."""
    import run

    files = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    silent = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, silent), (1, silent), (2, files)):
        os.dup2(source, target)
    code = 1
    try:
        if request["die_in"]:
            dying(request["die_in"])
        code = run.main(request["arguments"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve():
    import grpo_jax.trainer  # noqa: F401 - what a run needs, and what takes time

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        print(pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
