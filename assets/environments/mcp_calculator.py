"""An MCP server with a calculator: over stdio without an argument, else over HTTP on that port of this machine."""

import operator
import sys

from mcp.server import MCPServer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
server = MCPServer("calculator")


@server.tool()
def calculate(a: int, operation: str, b: int) -> int:
    """Adds, subtracts or multiplies two whole numbers; the operation is +, - or *."""
    if operation not in OPERATIONS:
        raise ValueError(f"the operation {operation} is none of {', '.join(OPERATIONS)}")
    return int(OPERATIONS[operation](a, b))


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
