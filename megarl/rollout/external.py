"""SGLang servers that somebody else started, named by MEGARL_LLM_SERVER_ADDRS: used and watched, never started."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from typing import Any

from megarl.knobs import UserError
from megarl.rollout.sglang_server import ServerError, answers_at

TIMEOUT_S = 30.0


class ExternalServer:
    """One server, at `host:port`."""

    owned = False
    late = True

    def __init__(self, address: str, api_key: str) -> None:
        self.address = address
        self.api_key = api_key

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers to the key within `timeout_s`."""
        return answers_at(self.address, self.api_key, timeout_s)

    def fault(self) -> None:
        """Its processes are not ours to look at."""

    def error(self, what: str) -> ServerError:
        """An error that names the server."""
        return ServerError(f"the SGLang server at {self.address} {what}; it is not ours to start again")

    def restart(self) -> None:
        raise self.error("was lost")


class ExternalServers:
    """The servers of a run that launches none."""

    def __init__(self, addresses: Sequence[str], api_key: str, custom_weight_loader: str) -> None:
        self.addresses = list(addresses)
        self.api_key = api_key
        self.custom_weight_loader = custom_weight_loader
        self.servers = [ExternalServer(address, api_key) for address in addresses]

    def start(self) -> None:
        """They run already."""

    def wait_ready(self) -> None:
        """Raises UserError where a server does not answer, or was started without what a run needs."""
        for address in self.addresses:
            loaders = self._ask(address).get("custom_weight_loader") or []
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
            raise UserError(f"no SGLang server answers at {address} ({error}); mend MEGARL_LLM_SERVER_ADDRS") from error
        finally:
            connection.close()

    def stop(self) -> None:
        """They go on without the run."""
