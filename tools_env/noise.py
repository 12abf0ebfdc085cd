"""Tools that sometimes time out, to study a policy's robustness.

A share of the calls is not run and answered as timed out. Which ones depends on the
seed, the task, the call and how often the trajectory has made it before: the same
rollout meets the same noise, also after a resume, and trying again can help.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from typing import Any

from tools_env.protocol import (
    Environment,
    Reward,
    Session,
    Task,
    ToolCall,
    ToolResult,
)


class NoisyEnvironment:
    """An environment with a `share` of time-outs among the calls of its sessions."""

    def __init__(self, environment: Environment, share: float, seed: int):
        self.max_reward = environment.max_reward
        self._environment, self._share, self._seed = environment, share, seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._environment, name)  # what an environment may have

    def tools(self) -> list[dict[str, Any]]:
        return self._environment.tools()

    def start(self, task: Task) -> NoisySession:
        session = self._environment.start(task)
        return NoisySession(session, self._share, f"{self._seed}/{task.id}")

    def reward(self, task: Task, trajectory) -> Reward:
        return self._environment.reward(task, trajectory)

    def demonstration(self, task: Task) -> list[dict[str, Any]] | None:
        return self._environment.demonstration(task)

    def prediction(self, task: Task, trajectory) -> dict[str, Any]:
        return self._environment.prediction(task, trajectory)


class NoisySession:
    """One trajectory's session, of which some calls time out."""

    def __init__(self, session: Session, share: float, stream: str):
        self._session, self._share, self._stream = session, share, stream
        self._made: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._session, name)  # state, parallel, deadline_s

    def call(self, call: ToolCall) -> ToolResult:
        text = json.dumps([call.name, call.arguments], sort_keys=True)
        with self._lock:
            self._made[text] += 1
            key = f"{self._stream}/{text}/{self._made[text]}"
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
        if drawn < self._share:
            return ToolResult("timeout", "Timeout: the call did not return in time.")
        return self._session.call(call)

    def close(self) -> None:
        self._session.close()
