"""One process a workdir, held by a lock that the kernel releases with the process.

A record lock (fcntl), not a pid file: `kill -9` leaves nothing behind that a later run
would have to judge, and child processes do not inherit it. The file's text only says
who to look for.
"""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from grpo_jax.config import BadInput

NAME = "lock"
LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(workdir: str | Path) -> Iterator[None]:
    """Keep other processes from writing to `workdir`, which is made if need be.

    Raises BadInput that names the process which holds it, or says why the folder
    cannot be written.
    """
    path = Path(workdir) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--workdir '{workdir}' cannot be written: {error}") from error
    with stream:
        _take(stream, path)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        try:
            yield
        finally:
            stream.truncate(0)


def _take(stream, path: Path) -> None:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = path.read_text(encoding="utf-8") or "another process"
        raise BadInput(
            f"--workdir '{path.parent}' is in use by {holder}; wait for it or give "
            "another --workdir"
        ) from error
    except OSError as error:  # some network file systems have no locks
        LOG.warning("'%s' cannot be locked (%s): start one run only", path, error)
