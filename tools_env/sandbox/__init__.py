"""Python for a model to run, each session in operating-system processes of its own."""

from tools_env.sandbox.host import SandboxUnavailable
from tools_env.sandbox.python import (
    LEVELS,
    RANKS,
    PythonSandbox,
    SandboxResult,
    strongest_level,
)

__all__ = [
    "LEVELS",
    "RANKS",
    "PythonSandbox",
    "SandboxResult",
    "SandboxUnavailable",
    "strongest_level",
]
