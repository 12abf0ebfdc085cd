"""Output of a sandboxed call, held under a cap while it is being read."""

from __future__ import annotations

from collections import deque


class CappedOutput:
    """Keeps the first and the last bytes fed to it; at most `limit` bytes of each."""

    def __init__(self, limit: int):
        self._limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        room = self._limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            data = data[-self._limit :]
            self._tail.append(data)
            self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._limit:
            self._tail_size -= len(self._tail.popleft())

    def text(self, note: str) -> str:
        """Give valid UTF-8 of at most `limit` bytes, `note` on a line at its end.

        Invalid bytes become U+FFFD; a cut leaves a mark and no broken character.
        """
        tail = b"".join(self._tail)[-self._limit :]
        skipped = self._size - len(self._head) - len(tail)
        budget = self._limit - len(note.encode()) - 1
        if skipped == 0:
            whole = bytes(self._head + tail).decode("utf-8", "replace")
            data = whole.encode()
        else:
            data = self._head.decode("utf-8", "replace").encode()
        if skipped == 0 and len(data) <= budget:
            body = whole
        else:
            if skipped:
                end = tail.decode("utf-8", "replace").encode()
            else:
                end = data
            mark = f"\n[... output cut: {self._size} bytes in all ...]\n"
            half = (budget - len(mark)) // 2
            body = (
                data[:half].decode("utf-8", "ignore")
                + mark
                + end[len(end) - half :].decode("utf-8", "ignore")
            )
        if not note:
            return body
        separator = "" if not body or body.endswith("\n") else "\n"
        return f"{body}{separator}{note}"
