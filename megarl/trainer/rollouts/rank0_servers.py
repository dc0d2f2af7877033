"""Rank 0's side of the rollout servers: starts or finds them, and watches over them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megarl.config import Config, server_arguments
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel.rendezvous import job_folder
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.connections import KEY_VARIABLE, addresses_in_environment
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.servers.external import ExternalServers, JobServers
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from megarl.served_checks import adapters_on_servers


class Rank0Servers:
    """Servers of a run under supervision. `start` returns at once; they load until `connect`, which waits for them.

    Co-located ones start in `connect`, when the trainer has given up the memory that they need.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self._config = config.server
        self._supervisor: Supervisor | None = None
        self._clients: tuple[RemoteSGLangEngine, ...] = ()
        self._open = contextlib.ExitStack()
        self._servers = choose_servers(config, logs)
        self._open.callback(self._servers.stop)

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "connect() makes it"
        return self._supervisor

    @property
    def addresses(self) -> list[str]:
        return self._servers.addresses

    @property
    def api_key(self) -> str:
        return self._servers.api_key

    def start(self) -> None:
        if not self._config.colocate:
            self._servers.start()

    def connect(self) -> None:
        """Waits for the servers and begins to watch over them."""
        if self._config.colocate:
            self._servers.start()
        self._servers.wait_ready()
        self._supervisor = Supervisor(self._servers.servers, self._config.heartbeat_s, self._config.max_restarts)
        self._supervisor.on_change = self._refresh
        self._supervisor.start()
        self._open.callback(self._supervisor.close)

    def lead(self, client: RemoteSGLangEngine) -> None:
        """Has a client ask the servers in service, and no other ones, from now on."""
        client.follow(self.supervisor)
        self._clients = (*self._clients, client)

    def _refresh(self) -> None:
        for client in self._clients:
            client.refresh()

    def close(self) -> None:
        """Ends the supervision, then the servers that were started."""
        self._open.close()


def choose_servers(config: Config, logs: Path) -> SGLangServers | ExternalServers:
    """The servers of the run: external ones from the environment, else this job's, else ones that it starts itself.

    Raises:
        UserError: a deterministic run with servers that it does not start.
    """
    key, addresses, job = os.environ.get(KEY_VARIABLE, ""), addresses_in_environment(), job_folder()
    if config.deterministic and (addresses or job is not None):
        raise UserError(
            "deterministic=true needs servers that this run starts on this machine: set it to false, or leave out "
            "servers that run elsewhere"
        )
    adapters = adapters_on_servers(config)
    if addresses:
        return ExternalServers(addresses, key, WEIGHT_LOADER, adapters)
    server = config.server
    if job is not None:
        return JobServers(job, server.n_servers, key, WEIGHT_LOADER, server.ready_timeout_s, adapters)
    model = local_folder(config.actor.path)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size()))  # torchrun: of this machine
    first_gpu = 0 if server.colocate else ranks
    return SGLangServers(
        server,
        model,
        logs,
        WEIGHT_LOADER,
        server_arguments(config),
        config.determinism,
        first_gpu=first_gpu,
        adapters=adapters,
    )
