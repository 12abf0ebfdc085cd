"""A server of the official SDK for tests: python mcp_server.py [port]."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("warehouse")


@server.tool()
def stock(item: str, shelf: int = 1) -> str:
    """Pieces in stock.

    Args:
        item: What to count.
        shelf: On which shelf.
    """
    if item == "ghost":
        raise ValueError("no such item")
    return f"{len(item)} on shelf {shelf}"


@server.tool()
async def secret() -> str:
    """Show what the server sees of the trainer's environment."""
    return os.environ.get("TRAINER_SECRET", "nothing")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def die_once(marker: str) -> str:
    """End the server, unless a file says that it has been ended before.

    Args:
        marker: Path of the file.
    """
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)
    return "alive"


@server.tool()
def spout(rubbish: str) -> str:
    """Answer what is no MCP, and end.

    Args:
        rubbish: What to write.
    """
    os.write(1, f"{rubbish}\n".encode() * 50)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
