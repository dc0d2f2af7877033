"""Servers without SGLang for weight syncs: real processes as ranks, which carry orders out as a server's ranks do.

`Fleet` answers the trainer's HTTP requests from the test's process and hands orders to the ranks over pipes. A rank can
be told to flip a byte, stop or die before a message that it sends on.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
from base64 import b64decode
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.sync import server_rank, world
from megarl.reshard.sync.relay_groups import RelayGroups
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.transfer.transports.gloo import GlooTransport
from tests import warm

POLL_S = 0.02
ANSWER_S = 120.0


def plant(fault: str, message: int) -> None:
    """Makes this rank fail before its `message`-th send to another server, or before it connects with one."""
    sent: list[int] = []
    signals = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "unconnected": signal.SIGKILL}

    def send(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        sent.append(tag)
        assert self.staging is not None
        if len(sent) == message and fault == "flip":
            self.staging.slots[slot][nbytes // 2] ^= 1
        elif len(sent) == message:
            os.kill(os.getpid(), signals[fault])
        return self.send_tensor(self.staging.slots[slot][:nbytes], peer, tag)

    if fault == "unconnected":
        RelayGroups.join = lambda *_: os.kill(os.getpid(), signals[fault])  # type: ignore[method-assign]
    else:
        GlooTransport.send = send  # type: ignore[method-assign]


def run_rank(environment: dict[str, str], log: str, pipe: Connection, rank: int, size: int, boxes: list[Box]) -> None:
    """One rank: carries out orders, plants faults and tells what it holds, as the pipe says."""
    warm.become(environment, log)
    node = environment.get("NODE") or socket.gethostname()
    world.socket.gethostname = lambda: node  # type: ignore[attr-defined]
    fragments = [Fragment(rank, box.name, box, torch.full(box.shape, torch.nan)) for box in boxes]
    while True:
        what, *arguments = pipe.recv()
        if what == "order":
            order = ServerOrder.parse(arguments[0])
            server_rank.carry_out(order, lambda: fragments, rank, size, lambda tensors: None)
            pipe.send("done")
        elif what == "plant":
            plant(*arguments)
        else:
            pipe.send([f.view.clone() for f in fragments])


class Server:
    """One server: its ranks, and the address that answers for them."""

    def __init__(self, folder: Path, boxes: Sequence[Sequence[Box]], node: str):
        self.boxes = boxes
        self.version = 0
        self.paused = False
        self.pipes: list[Connection] = []
        self.ranks: list[Any] = []
        for rank, held in enumerate(boxes):
            own, other = warm.CONTEXT.Pipe()
            log = folder / f"rank-{id(self)}-{rank}.log"
            arguments = ({**os.environ, "NODE": node}, str(log), other, rank, len(boxes), list(held))
            self.ranks.append(warm.CONTEXT.Process(target=run_rank, args=arguments))
            self.ranks[-1].start()
            self.pipes.append(own)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = server.answer(self.path, json.loads(body) if body else {})
                if answer is None:
                    self.close_connection = True
                    return
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: the ranks have logs of their own."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request; None once a rank has died, so that the connection ends."""
        if any(process.exitcode is not None for process in self.ranks):
            return None
        if path == "/server_info":
            return {"tp_size": len(self.ranks), "pp_size": 1, "dp_size": 1}
        if path == "/model_info":
            return {"weight_version": str(self.version)}
        if path == "/update_weight_version":
            self.version = int(body["new_version"])
        if path == "/update_weights_from_tensor":
            for pipe, pickled in zip(self.pipes, body["serialized_named_tensors"], strict=True):
                pipe.send(["order", pickle.loads(b64decode(pickled))])  # made by this test's own trainer
            for process, pipe in zip(self.ranks, self.pipes, strict=True):
                while process.exitcode is None and not pipe.poll(POLL_S):
                    pass
                if process.exitcode is not None:
                    return None
                pipe.recv()
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        return {"success": True}

    def plant(self, rank: int, fault: str, message: int) -> None:
        self.pipes[rank].send(["plant", fault, message])

    def held(self) -> list[tuple[Box, Tensor]]:
        """Each fragment of each rank."""
        found: list[tuple[Box, Tensor]] = []
        for pipe, boxes in zip(self.pipes, self.boxes, strict=True):
            pipe.send(["read"])
            assert pipe.poll(ANSWER_S), "the rank does not answer"
            found += zip(boxes, pipe.recv(), strict=True)
        return found

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for process in self.ranks:
            process.kill()
            process.join(ANSWER_S)
