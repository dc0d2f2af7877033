"""Servers that a launcher started elsewhere: found in the job's folder, missed when they die, waited for."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.knobs import UserError
from megarl.parallel.rendezvous import publish
from megarl.rollout.servers.external import JobServer, JobServers
from megarl.rollout.servers.sglang_server import ServerError
from tests.held_ports import held_port

LOADER = "megarl.receive"


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as a ready server does."""

    def do_GET(self) -> None:
        body = json.dumps({"custom_weight_loader": [LOADER]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(port: int = 0) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture
def served() -> Iterator[http.server.ThreadingHTTPServer]:
    server = serve()
    yield server
    server.shutdown()
    server.server_close()


def test_servers_are_found_as_they_become_ready(tmp_path: Path, served: http.server.ThreadingHTTPServer) -> None:
    servers = JobServers(tmp_path, 2, "key", LOADER, ready_timeout_s=300)
    address = f"127.0.0.1:{served.server_port}"
    publish(tmp_path, "server_1", address)
    threading.Timer(0.2, publish, (tmp_path, "server_0", address)).start()
    servers.wait_ready()
    assert servers.addresses == [address, address]


def test_a_server_that_does_not_come_is_named(tmp_path: Path, served: http.server.ThreadingHTTPServer) -> None:
    publish(tmp_path, "server_0", f"127.0.0.1:{served.server_port}")
    with pytest.raises(ServerError, match="SGLang server 1 of this job did not become ready"):
        JobServers(tmp_path, 2, "key", LOADER, ready_timeout_s=0.3).wait_ready()
    with pytest.raises(UserError, match="cannot be brought weights"):
        JobServers(tmp_path, 1, "key", "another.loader", ready_timeout_s=300).wait_ready()


def test_a_server_that_failed_while_it_started_ends_the_wait_for_all(tmp_path: Path) -> None:
    publish(tmp_path, "server_1.failed", "SGLang server 1 exited with 1: out of memory")
    with pytest.raises(ServerError, match=r"^SGLang server 1 exited with 1: out of memory$"):
        JobServers(tmp_path, 2, "key", LOADER, ready_timeout_s=60).wait_ready()


def test_a_server_that_dies_is_told_at_once_and_waited_for_until_it_answers_again() -> None:
    port = held_port()
    served = serve(port)
    server = JobServer(3, f"127.0.0.1:{port}", "key", ready_timeout_s=300)
    assert server.answers(300)
    assert server.fault() is None
    served.shutdown()
    served.server_close()
    fault = server.fault()
    assert "SGLang server 3 of this job" in str(fault)
    assert "has ended" in str(fault)
    server.restart()  # somebody else does
    assert server.fault() is None
    assert not server.answers(5)
    assert not server.late
    again = serve(port)
    assert server.answers(300)
    assert server.late  # from now on silence counts
    again.shutdown()
    again.server_close()


def test_a_server_that_does_not_come_back_in_time_is_late() -> None:
    server = JobServer(0, "127.0.0.1:9", "key", ready_timeout_s=0)
    server.restart()
    assert server.late
