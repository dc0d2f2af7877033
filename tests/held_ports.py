"""Ports for servers that tests start: while this process lives, nobody else who draws one is given the same."""

from __future__ import annotations

import socket

from megarl.rollout.servers.server_config import hold_ports

HELD: list[socket.socket] = []


def held_port() -> int:
    """A port of this machine. What listens on it must set SO_REUSEADDR, as servers do."""
    HELD.extend(hold_ports("127.0.0.1", 1))
    return int(HELD[-1].getsockname()[1])
