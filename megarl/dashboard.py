"""Serves a live page of all runs under a folder: python -m megarl.dashboard [RUNS] [port=N].

The server binds to 127.0.0.1 alone. Every request needs the key that the command prints, in the address or in the
header X-Megarl-Key. It answers only requests that name this machine as Host, and as Origin if there is one. A page of
another site therefore cannot reach it through a name that points here.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from megarl.cli import exit_with
from megarl.knobs import UserError
from megarl.launcher.status import states
from megarl.observe.board.curves import CHARTS
from megarl.observe.board.document import content_policy, document
from megarl.observe.board.run_data import RunData, listed
from megarl.observe.board.samples import SampleQuery
from megarl.observe.page import trace_text
from megarl.observe.run_folder import ADAPTERS, RunFolder

USAGE = "usage: python -m megarl.dashboard [RUNS] [port=N], such as runs or runs/gsm8k_grpo/latest"
HOST, PORT = "127.0.0.1", 6007
LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
KEY_HEADER = "X-Megarl-Key"
MAX_DEPTH = 4  # folders between RUNS and a run
MAX_RUNS = 2000  # listed, the newest first
MAX_OPEN = 16  # runs whose curves stay in memory
LIST_S = 2.0  # a list of runs is this old at most
SOCKET_S = 30.0  # a client that sends or takes nothing for this long is cut off


class RunCatalog:
    """Runs under a folder, by their path relative to it. A request can name only these."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._found: dict[str, RunFolder] = {}
        self._age = -math.inf
        self._open: OrderedDict[str, RunData] = OrderedDict()

    def folders(self) -> dict[str, RunFolder]:
        """The runs, the one that wrote last first."""
        with self._lock:
            if time.monotonic() > self._age + LIST_S:
                runs = sorted(_runs_in(self.root, MAX_DEPTH), key=_modified, reverse=True)[:MAX_RUNS]
                self._found = {run.relative_to(self.root).as_posix(): RunFolder(run) for run in runs}
                self._age = time.monotonic()
            return dict(self._found)

    def open(self, name: str) -> RunData:
        """The data of a run, kept while it is asked for.

        Raises:
            KeyError: there is no such run.
        """
        folder = self.folders()[name]
        with self._lock:
            if name not in self._open:
                self._open[name] = RunData(folder)
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return self._open[name]


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yields run folders in `folder`, itself included. Follows no links and looks into no run.

    In place of a job of several adapters, its adapters' runs.
    """
    if (folder / "metrics.jsonl").is_file() or ((folder / "config.yaml").is_file() and (folder / "logs").is_dir()):
        adapters = [adapter for path in sorted(folder.glob(f"{ADAPTERS}/*/")) for adapter in _runs_in(path, 0)]
        yield from adapters or [folder]
    elif depth:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
        for path in below:
            if os.access(path, os.R_OK | os.X_OK):
                yield from _runs_in(Path(path), depth - 1)


def _modified(run: Path) -> float:
    return max(path.stat().st_mtime for path in (run / "metrics.jsonl", run / "config.yaml") if path.is_file())


class Board(ThreadingHTTPServer):
    """HTTP server of the page. `address` is what a browser opens; it holds the key."""

    daemon_threads = True

    def __init__(self, root: Path, port: int) -> None:
        self.catalog = RunCatalog(root.resolve())
        self.key = secrets.token_urlsafe(24)
        self.page = document("megarl runs", {"live": True, "charts": CHARTS, "place": str(root), "runs": []}).encode()
        super().__init__((HOST, port), BoardHandler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/?key={self.key}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints a traceback, unless the client has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    # -- answers by name; `query` holds the address's parameters ------------------------------------------------

    def answer_runs(self, query: dict[str, str]) -> dict[str, Any]:
        return {"runs": [{"id": name, "name": self.catalog.root.name, **listed(folder)} for name, folder in
                         self.catalog.folders().items()]}  # fmt: skip

    def answer_curves(self, query: dict[str, str]) -> dict[str, Any]:
        return self.catalog.open(query["run"]).curves(query.get("have", ""))

    def answer_run(self, query: dict[str, str]) -> dict[str, Any]:
        return self.catalog.open(query["run"]).overview()

    def answer_state(self, query: dict[str, str]) -> dict[str, Any]:
        folder = self.catalog.folders()[query["run"]]
        is_live = listed(folder)["state"] in ("running", "starting")
        return {"states": states(folder, ask="loopback" if is_live else "none")}

    def answer_timeline(self, query: dict[str, str]) -> dict[str, Any]:
        first, last = (int(_number(query, name, 0)) for name in ("first", "last"))
        return self.catalog.open(query["run"]).timeline(first, last)

    def answer_samples(self, query: dict[str, str]) -> dict[str, Any]:
        wanted = SampleQuery(
            start=int(_number(query, "start", 0)),
            count=int(_number(query, "count", 20)),
            least_reward=_number(query, "least", -math.inf),
            most_reward=_number(query, "most", math.inf),
            first_step=_number(query, "first", 0),
            last_step=_number(query, "last", math.inf),
            text=query.get("text", ""),
        )
        return self.catalog.open(query["run"]).find_samples(query["source"], wanted)


ANSWERS: dict[str, Callable[[Board, dict[str, str]], dict[str, Any]]] = {
    "runs": Board.answer_runs,
    "curves": Board.answer_curves,
    "run": Board.answer_run,
    "state": Board.answer_state,
    "timeline": Board.answer_timeline,
    "samples": Board.answer_samples,
}


def _number(query: dict[str, str], name: str, default: float) -> float:
    """A parameter as a finite number; the default if it is missing or empty. Raises ValueError for anything else."""
    if not query.get(name):
        return default
    value = float(query[name])
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite")
    return value


class BoardHandler(BaseHTTPRequestHandler):
    """Answers GET requests of a browser on this machine that has the key. Addresses are names, never paths of files."""

    server: Board
    server_version, sys_version = "megarl", ""
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_S
    head_sent = False  # of the answer to the request at hand

    def do_GET(self) -> None:
        """Checks host, origin and key, then answers."""
        self.head_sent = False
        parts = urlsplit(self.path)
        try:
            query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=20))
        except ValueError:
            return self._refuse(400, "too many parameters")
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return self._refuse(403, "the Host of the request is not this machine; open 127.0.0.1 or localhost")
        if origin is not None and origin != f"http://{host}":
            return self._refuse(403, "the request comes from a page of another site")
        key = self.headers.get(KEY_HEADER) or query.get("key", "")
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return self._refuse(401, "the key is missing or wrong; open the address that the command printed")
        return self._answer(parts.path, query)

    def _answer(self, path: str, query: dict[str, str]) -> None:
        name = path.removeprefix("/api/")
        try:
            if path == "/":
                self._send(200, "text/html; charset=utf-8", self.server.page)
            elif path == "/api/trace":
                self._send_trace(self.server.catalog.open(query["run"]))
            elif path.startswith("/api/") and name in ANSWERS:
                body = json.dumps(ANSWERS[name](self.server, query)).encode()
                self._send(200, "application/json", body)
            else:
                self._refuse(404, "there is no such page")
        except KeyError as error:
            self._refuse(404, f"there is no run or parameter {error.args[0]!r}")
        except ValueError as error:
            self._refuse(400, f"a parameter is no number: {error}")
        except ConnectionError:
            self.close_connection = True  # the page was closed
        except OSError as error:
            self._refuse(500, f"a file of the run cannot be read: {error.strerror}")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_trace(self, run: RunData) -> None:
        """Sends the trace while it is made, and closes the connection after it."""
        self.close_connection = True
        attached = {"Content-Disposition": 'attachment; filename="trace.json"', "Connection": "close"}
        self._head(200, "application/json", attached)
        for text in trace_text(run):
            self.wfile.write(text.encode())

    def _head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.head_sent = True
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": f"{content_policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in (headers | more).items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: int, why: str) -> None:
        """Answers with one line of text. An answer that has begun is cut off instead."""
        self.close_connection = True
        if self.head_sent:
            return
        self._send(status, "text/plain; charset=utf-8", (why + "\n").encode(errors="replace"))

    def log_message(self, form: str, *arguments: Any) -> None:
        """Logs nothing: request lines hold the key."""


def main(arguments: list[str]) -> int:
    """Serves until Ctrl-C. Returns the exit code."""
    places = [argument for argument in arguments if "=" not in argument]
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if len(places) > 1 or options.keys() - {"port"}:
        raise UserError(USAGE)
    port = options.get("port", str(PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"port={port} must be a number from 0, any free one, to 65535")
    root = Path(places[0] if places else "runs")
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give one that holds runs, such as runs")
    try:
        board = Board(root, int(port))
    except OSError as error:
        raise UserError(f"port={port} cannot be bound ({error.strerror}); give another one, or port=0") from error
    with board:
        print(f"dashboard {board.address}", flush=True)
        print(f"runs      {len(board.catalog.folders())} in {root}; Ctrl-C ends the dashboard", flush=True)
        try:
            board.serve_forever()
        except KeyboardInterrupt:
            print("dashboard ended", file=sys.stderr)
    return 0


if __name__ == "__main__":
    exit_with(main, USAGE)
