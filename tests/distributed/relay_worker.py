"""Servers without SGLang for weight syncs: real processes as ranks, which carry orders out as a server's ranks do.

A `Server` answers the trainer's HTTP requests from the test's process and hands orders to its ranks over pipes. A rank
can be told to flip a byte, stop or die before a message that it sends on.
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

import pytest
import torch
from torch import Tensor

from megarl.reshard.config import ReshardConfig
from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.session import SyncReport, WeightSession
from megarl.reshard.sync import server_rank, world
from megarl.reshard.sync.coordinator import Coordinator
from megarl.reshard.sync.relay_groups import RelayGroups
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.server_rank import LiveWeights
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.reshard.transfer.transports.nccl import NcclTransport
from tests import warm
from tests.nccl_semantics import process_group_nccl
from tests.nccl_semantics.sync_worker import emulate
from tests.sglang.weights_support import SingleRankWeights

SERVERS, TP = 4, 2
SHAPES = {f"layer.{i}": (24, 64 * TP) for i in range(12)}
BUCKET_BYTES = 4096
POLL_S = 0.02
ANSWER_S = 300.0


def plant(fault: str, message: int) -> None:
    """Makes this rank fail before its `message`-th send to another server, or before it connects with one."""
    sent: list[int] = []
    transport: Any = NcclTransport if os.environ["EMULATES_NCCL"] == "1" else GlooTransport
    original = transport.send
    signals = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "unconnected": signal.SIGKILL}

    def send(self: Any, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        sent.append(tag)
        if len(sent) == message and fault == "flip":
            self.staging.slots[slot][nbytes // 2] ^= 1
        elif len(sent) == message:
            os.kill(os.getpid(), signals[fault])
        return original(self, slot, nbytes, peer, tag)

    if fault == "unconnected":
        RelayGroups.join = lambda *_: os.kill(os.getpid(), signals[fault])  # type: ignore[method-assign]
    else:
        transport.send = send


def run_rank(environment: dict[str, str], log: str, pipe: Connection, rank: int, size: int, boxes: list[Box]) -> None:
    """One rank: carries out orders, plants faults and tells what it holds, as the pipe says."""
    warm.become(environment, log)
    if environment["EMULATES_NCCL"] == "1":
        emulate(noticed=False)
        gpus = json.loads(environment["GPUS"])
        process_group_nccl.GPU = gpus[rank] if gpus else ""
        world.platform.gpu_uuids = lambda: gpus[rank : rank + 1]  # type: ignore[attr-defined]
        torch.cuda.current_device = lambda: 0
    node = environment["NODE"] or socket.gethostname()
    world.socket.gethostname = lambda: node  # type: ignore[attr-defined]
    fragments = [Fragment(rank, box.name, box, torch.full(box.shape, torch.nan)) for box in boxes]
    while True:
        what, *arguments = pipe.recv()
        if what == "order":
            order = ServerOrder.parse(arguments[0])
            server_rank.carry_out(order, lambda: LiveWeights(fragments), rank, size, lambda tensors: None)
            pipe.send("done")
        elif what == "plant":
            plant(*arguments)
        else:
            pipe.send([f.view.clone() for f in fragments])


class Server:
    """One server: its ranks, and the address that answers for them."""

    def __init__(
        self, folder: Path, boxes: Sequence[Sequence[Box]], node: str, emulates_nccl: bool, gpus: Sequence[str]
    ):
        self.boxes = boxes
        self.version = 0
        self.paused = False
        self._ordering = threading.Lock()
        self.pipes: list[Connection] = []
        self.ranks: list[Any] = []
        for rank, held in enumerate(boxes):
            own, other = warm.CONTEXT.Pipe()
            log = folder / f"rank-{id(self)}-{rank}.log"
            arguments = (
                {**os.environ, "NODE": node, "EMULATES_NCCL": str(int(emulates_nccl)), "GPUS": json.dumps(gpus)},
                str(log),
                other,
                rank,
                len(boxes),
                list(held),
            )
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
        if path == "/update_weights_from_tensor" and not self._carried_out(body["serialized_named_tensors"]):
            return None
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        return {"success": True}

    def _carried_out(self, orders: Sequence[str]) -> bool:
        """Hands each rank its order and awaits the ends; False if a rank died.

        One set of orders at a time, as in SGLang: the trainer may have given up one that is still under way.
        """
        with self._ordering:
            for pipe, pickled in zip(self.pipes, orders, strict=True):
                pipe.send(["order", pickle.loads(b64decode(pickled))])  # made by this test's own trainer
            for process, pipe in zip(self.ranks, self.pipes, strict=True):
                while process.exitcode is None and not pipe.poll(POLL_S):
                    pass
                if process.exitcode is not None:
                    return False
                pipe.recv()
        return True

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


def tell_of_death(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Has syncs look for the cause of a failure only when the server at `address` has ended its connection.

    A thread of the test's process does that once the server's rank has died, on a busy machine late.
    """
    attribute = Coordinator.attribute_failure

    def once_it_is_known(self: Coordinator, *arguments: Any) -> None:
        for link in self.active:
            if link.address == address and link._order_call is not None:
                assert link._order_call.answered(300.0)
        attribute(self, *arguments)

    monkeypatch.setattr(Coordinator, "attribute_failure", once_it_is_known)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Fleet:
    """Servers that cut each tensor by column, and a trainer's session with them.

    With `gpus`, the ranks of a server have these under emulated NCCL, and are on another node than the trainer.
    """

    def __init__(self, folder: Path, emulates_nccl: bool = False, gpus: Sequence[Sequence[str]] = ((),) * SERVERS):
        self.folder = folder
        self.emulates_nccl = emulates_nccl
        self.servers = [self.server("other" if of_server else "", of_server) for of_server in gpus]
        self.session: WeightSession | None = None
        self.version = 0

    def server(self, node: str = "", gpus: Sequence[str] = ()) -> Server:
        columns = [((0, 64 * rank), (24, 64 * rank + 64)) for rank in range(TP)]
        boxes = [[Box(name, *corner) for name in SHAPES] for corner in columns]
        return Server(self.folder, boxes, node, self.emulates_nccl, gpus)

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def connect(self, **knobs: Any) -> WeightSession:
        """A new trainer's session; faults planted before are gone with their servers."""
        if self.session is not None:
            self.session.close()
        deadlines = {"connect_deadline_s": 300, "control_deadline_s": 300, "transfer_deadline_s": 300}
        config = ReshardConfig(**({"bucket_bytes": BUCKET_BYTES} | deadlines | knobs))
        self.session = WeightSession(config, self.addresses, "key")
        return self.session

    def push(self, tensors: dict[str, Tensor]) -> SyncReport:
        assert self.session is not None
        self.version += 1
        return self.session.push(SingleRankWeights(tensors), self.version)

    def assert_served(self, tensors: dict[str, Tensor], servers: list[int]) -> None:
        for number in servers:
            server = self.servers[number]
            assert (server.version, server.paused) == (self.version, False)
            assert all(box.of(tensors[box.name]).equal(held) for box, held in server.held()), f"server {number}"

    def stop(self) -> None:
        if self.session is not None:
            self.session.close()
        for server in self.servers:
            server.stop()

    def replace(self, number: int, node: str = "") -> None:
        self.servers[number].stop()
        self.servers[number] = self.server(node)


def relay_of(fleet: Fleet) -> int:
    """A server that sends on in the session's last plan, and receives some weights from another relay."""
    assert fleet.session is not None
    assert fleet.session.plan is not None
    messages = fleet.session.plan.messages
    relays = set((messages.relay[messages.relay >= 0] // TP).tolist())
    relayed = set((messages.destination[messages.relay >= 0] // TP).tolist())
    return min(relays & relayed)
