"""An MCP server with two tools; arguments: transport, and for HTTP the port."""

import sys

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no")


options = {"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}
server.run(sys.argv[1], **options)
