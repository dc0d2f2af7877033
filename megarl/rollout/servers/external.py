"""SGLang servers that this process did not start: used and watched, never started.

They are named by MEGARL_LLM_SERVER_ADDRS, or a launcher started them on machines of this job.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.parallel.rendezvous import PublishedFailure, awaited, failure_name, server_name
from megarl.rollout.servers.served_adapters import ServedAdapters, check_held
from megarl.rollout.servers.sglang_server import ServerError, answers_at

TIMEOUT_S = 120.0  # for a hang alone: a busy server answers late
PROBE_S = 2.0


class ExternalServer:
    """One server, at `host:port`."""

    owned = False
    late = True

    def __init__(self, address: str, api_key: str) -> None:
        self.address = address
        self.api_key = api_key

    def answers(self, timeout_s: float) -> bool:
        """True if it answers to the key within `timeout_s`."""
        return answers_at(self.address, self.api_key, timeout_s)

    def fault(self) -> None:
        """None: its processes are not this run's."""

    def error(self, what: str) -> ServerError:
        """An error that names the server."""
        return ServerError(f"the SGLang server at {self.address} {what}; it is not ours to start again")

    def restart(self) -> None:
        raise self.error("was lost")

    def stop(self) -> None:
        raise self.error("is not stopped by this run")


class ExternalServers:
    """The servers of a run that launches none. With `adapters`, syncs bring them these alone."""

    def __init__(
        self, addresses: Sequence[str], api_key: str, custom_weight_loader: str, adapters: ServedAdapters | None = None
    ) -> None:
        self.adapters = adapters
        self.addresses = list(addresses)
        self.api_key = api_key
        self.custom_weight_loader = custom_weight_loader
        self.servers: list[ExternalServer] = [ExternalServer(address, api_key) for address in addresses]

    def start(self) -> None:
        """No-op: they run already."""

    def wait_ready(self) -> None:
        """Raises UserError if a server does not answer, or was started without the weight loader or the adapters."""
        for address in self.addresses:
            facts = self._ask(address)
            check_held(facts, self.adapters, address)
            loaders = facts.get("custom_weight_loader") or []
            if self.custom_weight_loader not in loaders:
                raise UserError(
                    f"the SGLang server at {address} cannot be brought weights: start it with --custom-weight-loader "
                    f"{self.custom_weight_loader} --weight-version 0 --api-key KEY, megarl importable there and KEY in "
                    "MEGARL_LLM_SERVER_API_KEY here"
                )

    def _ask(self, address: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/server_info", headers={"Authorization": f"Bearer {self.api_key}"})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise UserError(
                    f"the SGLang server at {address} answers /server_info with {answer.status}; check its key"
                )
            return dict(json.loads(body))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"no SGLang server answers at {address} ({error}); correct MEGARL_LLM_SERVER_ADDRS"
            ) from error
        finally:
            connection.close()

    def stop(self) -> None:
        """No-op: they outlive the run."""


class JobServer(ExternalServer):
    """One server of this job on another machine, where `megarl.launcher.server_task` restarts it when it dies."""

    owned = True  # its task restarts it, so it is awaited

    def __init__(self, index: int, address: str, api_key: str, ready_timeout_s: float) -> None:
        super().__init__(address, api_key)
        self.index = index
        self._ready_timeout_s = ready_timeout_s
        self._back_by: float | None = None  # deadline of a restart under way

    @property
    def late(self) -> bool:  # type: ignore[override]
        """True if it must answer by now: at once, unless it is being restarted."""
        return self._back_by is None or time.monotonic() > self._back_by

    def answers(self, timeout_s: float) -> bool:
        answered = super().answers(timeout_s)
        if answered:
            self._back_by = None
        return answered

    def fault(self) -> ServerError | None:  # type: ignore[override]
        """Reports within a tick that its process has ended, before a restarted process could answer in its place."""
        if self._back_by is not None:
            return None
        host, port = self.address.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), PROBE_S).close()
        except ConnectionRefusedError:
            return self.error("has ended")
        except OSError:  # `answers` judges silence
            pass
        return None

    def error(self, what: str) -> ServerError:
        return ServerError(f"SGLang server {self.index} of this job at {self.address} {what}; see its log")

    def restart(self) -> None:
        """Waits for its own supervisor, which restarts it on the same port."""
        self._back_by = time.monotonic() + self._ready_timeout_s


class JobServers(ExternalServers):
    """The servers that a launcher started in this job, found in the job's folder."""

    def __init__(
        self,
        folder: Path,
        count: int,
        api_key: str,
        custom_weight_loader: str,
        ready_timeout_s: float,
        adapters: ServedAdapters | None = None,
    ):
        super().__init__([], api_key, custom_weight_loader, adapters)
        self._folder, self._count, self._ready_timeout_s = folder, count, ready_timeout_s

    def wait_ready(self) -> None:
        """Waits for all servers.

        Raises:
            ServerError: a server failed, or is not ready in time.
            UserError: as of `ExternalServers.wait_ready`.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        failures = [failure_name(index) for index in range(self._count)]
        for index in range(self._count):
            try:
                address = awaited(self._folder, server_name(index), deadline - time.monotonic(), failures)
            except PublishedFailure as error:
                raise ServerError(str(error)) from error
            except TimeoutError as error:
                raise ServerError(f"SGLang server {index} of this job did not become ready: {error}") from error
            self.servers.append(JobServer(index, address, self.api_key, self._ready_timeout_s))
        self.addresses = [server.address for server in self.servers]
        super().wait_ready()
