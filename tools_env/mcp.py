"""Tools served over the Model Context Protocol, by the official SDK (extra `mcp`).

A server is named by its command line (stdio: it is started here, as a child process
with a bare environment) or by its URL (streamable HTTP). All trajectories share the one
connection, so a server's state is shared too. A result that the server marks as an
error is the tool's error, which the model reads. When a connection breaks, or a server
dies or answers what is no MCP, the call is made once more over a new connection, so
that the server may get it twice; when that fails too it is "unavailable", and the next
call connects anew.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import logging
import shlex
import tempfile
from typing import Any

from tools_env import background
from tools_env.protocol import Tool, ToolResult, ToolUnavailable

_CLOSE_S = 10.0
_RETRIES = 1  # of a call whose server was gone; it has been started again by then


class McpServer:
    """The connection to one server; `tools` are its tools.

    `source` is a URL or a command line, `timeout_s` the deadline of a call, `start_s`
    that of the start, imports of the server included. Raises ValueError that names the
    server when it cannot be reached, answers nonsense, has no tools, or one whose name
    holds more than letters, digits, "_" and "-".
    """

    def __init__(self, source: str, timeout_s: float = 10.0, start_s: float = 120.0):
        try:
            import mcp
        except ImportError as error:
            raise ValueError("tools.mcp needs 'grpo_jax[mcp]'") from error
        # One traceback for each line of rubbish would bury the message that counts.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        self._sdk = mcp
        self._source = source
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        background.loop()
        atexit.register(self.close)  # before the loop ends: handlers run in reverse
        self._log = tempfile.TemporaryFile()  # what the server writes to its stderr
        try:
            found = background.run(self._list(), start_s)
        except Exception as error:
            last = self._last_words()
            self.close()
            reason = f"{_reason(error)}{last}"
            raise ValueError(f"MCP server {source!r}: {reason}") from error
        if not found:
            self.close()
            raise ValueError(f"MCP server {source!r} serves no tools")
        self.tools = [self._tool(tool) for tool in found]

    def close(self) -> None:
        """End the connection, and the process of a stdio server; safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(background.Late):  # it ends with this process
                background.run(connection.close(), _CLOSE_S)
        self._log.close()
        atexit.unregister(self.close)

    def _last_words(self) -> str:
        """The last line that the server wrote to its stderr, to append to an error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its log ends: {last[:200]}" if last else ""

    def _tool(self, found: Any) -> Tool:
        if not found.name.replace("_", "").replace("-", "").isalnum():
            self.close()
            raise ValueError(f"MCP server {self._source!r}: tool name {found.name!r}")

        async def function(**arguments: Any) -> ToolResult:
            return await self._call(found.name, arguments)

        body = {
            "name": found.name,
            "description": inspect.cleandoc(found.description or ""),
            "parameters": _plain(found.input_schema),
        }
        schema = {"type": "function", "function": body}
        return Tool(schema, function, timeout_s=self._timeout_s, retries=_RETRIES)

    async def _list(self) -> list[Any]:
        client = await self._connected()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp_types import CONNECTION_CLOSED

        client = await self._connected()
        try:
            result = await client.call_tool(name, arguments)
        except self._sdk.MCPError as error:
            if error.code != CONNECTION_CLOSED:  # the server lives, and declines
                return ToolResult("error", error.message)
            await self._drop(client)
            raise ToolUnavailable(f"MCP server {self._source!r} is gone") from error
        except Exception as error:
            await self._drop(client)
            reason = f"MCP server {self._source!r}: {_reason(error)}"
            raise ToolUnavailable(reason) from error
        return ToolResult("error" if result.is_error else "ok", _text(result))

    async def _connected(self) -> Any:
        """The client, connected anew where there is none; one task connects at a time.

        Runs on the one background loop: nothing happens between the look and the set.
        """
        if self._connection is None:
            self._connection = _Connection(self._client())
        try:
            return await self._connection.client()
        except Exception as error:
            self._connection = None
            raise ToolUnavailable(_reason(error)) from error

    def _client(self) -> Any:
        if self._source.startswith(("http://", "https://")):
            return self._sdk.Client(self._source)
        command, *arguments = shlex.split(self._source)
        server = self._sdk.StdioServerParameters(command=command, args=arguments)
        return self._sdk.Client(self._sdk.stdio_client(server, errlog=self._log))

    async def _drop(self, client: Any) -> None:
        """Forget a broken connection, unless another call already has."""
        connection = self._connection
        if connection is not None and connection.holds(client):
            self._connection = None
            await connection.close()


class _Connection:
    """A client inside the task that opened it, as the SDK's scopes demand."""

    def __init__(self, client: Any):
        self._entered = client
        self._over = asyncio.Event()
        self._client: asyncio.Future = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    async def client(self) -> Any:
        return await asyncio.shield(self._client)

    def holds(self, client: Any) -> bool:
        done = self._client.done() and not self._client.exception()
        return done and self._client.result() is client

    async def close(self) -> None:
        self._over.set()
        if not self._client.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            async with self._entered as client:
                self._client.set_result(client)
                await self._over.wait()
        except BaseException as error:
            if not self._client.done():
                self._client.set_exception(error)
                self._client.exception()  # seen, also when nobody waits
            if not isinstance(error, Exception):
                raise


def _reason(error: BaseException) -> str:
    """The first cause inside groups of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text(result: Any) -> str:
    """The text of a result; what is no text is named, not shown."""
    parts = [
        block.text if block.type == "text" else f"[{block.type}]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _plain(schema: Any) -> Any:
    """A JSON schema without the titles that generators add; the prompt is dear."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    return {
        key: {name: _plain(one) for name, one in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _plain(value)
        for key, value in kept.items()
    }
