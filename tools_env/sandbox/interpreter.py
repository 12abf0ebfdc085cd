"""The loop that runs the model's code; the innermost process of a sandbox.

It reads a call from its channel (4-byte length, then UTF-8 code), runs it in one
namespace that stays between calls, and answers with one status letter and the call's
number. What the code prints goes straight to descriptors 1 and 2. The code shares this
process and can break it: its keeper takes every odd answer as a crash.
"""

from __future__ import annotations

import ast
import gc
import io
import linecache
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable

OK, ERROR, MEMORY = b"o", b"e", b"m"
_MAX_LINES, _MAX_CHARS = 12, 2000  # of a traceback


def receive(channel: socket.socket, size: int) -> bytes | None:
    """Read exactly `size` bytes; None at the end of the stream."""
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive_frame(channel: socket.socket) -> bytes | None:
    """Read one length-prefixed frame; None at the end of the stream."""
    header = receive(channel, 4)
    return None if header is None else receive(channel, int.from_bytes(header, "big"))


def serve(channel: socket.socket, output: int) -> None:
    """Run calls until the channel closes."""
    home = os.getpid()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [""]
    null = os.open(os.devnull, os.O_RDONLY)
    if "numpy.random" in sys.modules:  # else all forks would draw the same numbers
        sys.modules["numpy.random"].seed()
    number = 0
    while (frame := receive_frame(channel)) is not None:
        number += 1
        _restore_streams(output, null)
        status = _run(frame.decode("utf-8", "surrogatepass"), main.__dict__, number)
        if os.getpid() != home:  # a child that the code forked and let run on
            os._exit(0)
        if status == MEMORY:
            gc.collect()
        channel.sendall(status + number.to_bytes(4, "big"))


def _restore_streams(output: int, null: int) -> None:
    """Give the code fresh streams, whatever an earlier call did to them.

    Unbuffered, so that what was printed before a time-out is not lost.
    """
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(null, 0)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        for descriptor in (1, 2)
    )


def _run(code: str, namespace: dict, number: int) -> bytes:
    name = f"<call {number}>"
    try:
        body, last = _compile(code, name)
    except BaseException as error:  # MemoryError too: the source is too complex
        _report(error, None)
        return ERROR
    try:
        exec(body, namespace)
        if last is not None:
            value = eval(last, namespace)
            if value is not None:
                print(repr(value))
        return OK
    except SystemExit as error:
        return _exit_status(error.code)
    except MemoryError as error:
        _report(error, error.__traceback__)
        return MEMORY
    except BaseException as error:
        _report(error, error.__traceback__)
        return ERROR


def _compile(code: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Compile all statements but a last expression, and that expression."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = ast.Expression(tree.body.pop().value)
        last = compile(expression, name, "eval")
    return compile(tree, name, "exec"), last


def _exit_status(code: object) -> bytes:
    if code is None or code == 0:
        return OK
    _write(f"SystemExit: {code}\n" if isinstance(code, int) else f"{code}\n")
    return ERROR


def _report(error: BaseException, frame: types.TracebackType | None) -> None:
    """Write the last lines of the traceback, without this file's frames."""
    try:
        while frame and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        text = "".join(traceback.format_exception(type(error), error, frame))
        lines = text.splitlines()
        if len(lines) > _MAX_LINES:
            lines = ["[... earlier lines cut ...]", *lines[-_MAX_LINES:]]
        _write("\n".join(line[:_MAX_CHARS] for line in lines) + "\n")
    except BaseException:  # the code's own classes may fail here, or memory
        _write(type.__repr__(type(error)) + "\n")


def _write(text: str, write: Callable[[int, bytes], int] = os.write) -> None:
    data = text.encode("utf-8", "backslashreplace")
    try:
        while data:
            data = data[write(2, data) :]
    except OSError:  # the code closed its own stream
        pass
