"""Environments and tools for training tool-using models: pure Python, no JAX."""

from tools_env.calls import format_tool_call, parse_tool_calls
from tools_env.functions import options
from tools_env.pool import ToolPool
from tools_env.protocol import (
    CallRecord,
    MalformedCall,
    Reward,
    Task,
    ToolCall,
    ToolResult,
    ToolUnavailable,
    Turn,
)
from tools_env.sandbox import PythonSandbox
from tools_env.schema import tool_schema, validate_arguments

__all__ = [
    "CallRecord",
    "MalformedCall",
    "PythonSandbox",
    "Reward",
    "Task",
    "ToolCall",
    "ToolPool",
    "ToolResult",
    "ToolUnavailable",
    "Turn",
    "format_tool_call",
    "options",
    "parse_tool_calls",
    "tool_schema",
    "validate_arguments",
]
