"""A proxy in front of a real server that fails on demand: it refuses, never answers, or hangs up."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultProxy:
    """Forwards to `target`, except for paths in `faults`.

    "refuse" answers 200 with success false, "silence" does not answer, and "end" ends the connection, like a server
    that dies.
    """

    def __init__(self, target: str):
        self.target = target
        self.faults: dict[str, str] = {}
        self._ended = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # a connection takes several requests, like the server's

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.faults.get(self.path)
                if fault == "silence":
                    proxy._ended.wait(60)
                    return
                if fault == "end":
                    self.close_connection = True
                    return
                if fault == "refuse":
                    status, answer = 200, json.dumps({"success": False, "message": "not today"}).encode()
                else:
                    connection = http.client.HTTPConnection(proxy.target, timeout=300)
                    forwarded = {k: v for k, v in self.headers.items() if k in ("Authorization", "Content-Type")}
                    connection.request(self.command, self.path, body or None, forwarded)
                    response = connection.getresponse()
                    status, answer = response.status, response.read()
                    connection.close()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = _forward

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: the server has a log of its own."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
