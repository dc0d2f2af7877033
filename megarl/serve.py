"""Serves alone: `python -m megarl.serve [--from-axolotl FILE] [+experiment=NAME] [group=name ...] [knob=value ...]`.

Starts the SGLang servers of a run without a trainer, as `axolotl vllm-serve` and `trl vllm-serve` do. Prints their
addresses once they answer. A run in another terminal uses them after `source servers.env`, a file that only this user
can read, as it holds the servers' key. Ctrl-C or SIGTERM ends the servers.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from megarl.checks import server_checks
from megarl.cli import run_command
from megarl.config import Config, server_arguments
from megarl.hub import local_folder
from megarl.knobs import UserError, run_all
from megarl.observe.run_folder import new_run
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.connections import ADDRESSES_VARIABLE, KEY_VARIABLE
from megarl.rollout.servers.sglang_server import ServerError, SGLangServers
from megarl.served_checks import adapters_on_servers

USAGE = "usage: python -m megarl.serve +experiment=NAME [GROUP=NAME ...] [KNOB=VALUE ...], as for megarl.train"
POLL_S = 0.5
VARIABLES = "servers.env"


def serve(config: Config) -> int:
    """Serves until a signal. Returns 0, or 1 if a server ended by itself."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model = local_folder(config.actor.path)
    run_all([partial(check_alone, config), *server_checks(config, model)])
    folder = new_run(config.run_root, f"{config.experiment_name}_serve")
    key = os.environ.get(KEY_VARIABLE, "")
    arguments = server_arguments(config)
    adapters = adapters_on_servers(config)
    with SGLangServers(
        config.server, model, folder.logs, WEIGHT_LOADER, arguments, api_key=key, first_gpu=0, adapters=adapters
    ) as servers:
        servers.start()
        try:
            for server in servers.servers:
                while not server.answers():
                    server.check_alive()
                    if server.age_s > config.server.ready_timeout_s:
                        limit = f"server.ready_timeout_s={config.server.ready_timeout_s:g} s"
                        raise server.error(f"did not answer within {limit}")
                    if stop.wait(POLL_S):
                        return 0
            announce(servers, write_variables(folder.path, servers))
            while not stop.wait(POLL_S):
                servers.check_alive()
        except ServerError as error:
            print(f"megarl: {error}", flush=True)
            return 1
    return 0


def check_alone(config: Config) -> None:
    """Refuses runs whose servers belong to their trainer, and addresses that others can reach.

    Raises:
        UserError: naming the knob.
    """
    if config.method != "rl":
        raise UserError(f"method={config.method} has no servers; use a recipe of method=rl")
    for name in ("deterministic", "server.colocate"):
        if config.deterministic if name == "deterministic" else config.server.colocate:
            raise UserError(f"{name}=true needs servers that its run starts; leave it out, or train without serve")
    host = config.server.host
    if host != "localhost" and not _is_loopback(host):
        raise UserError(f"server.host={host} can be reached from other machines; megarl.serve takes 127.0.0.1 alone")
    if addresses := os.environ.get(ADDRESSES_VARIABLE):
        raise UserError(f"{ADDRESSES_VARIABLE}={addresses} names servers already; unset it to start others")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def write_variables(folder: Path, servers: SGLangServers) -> Path:
    """Writes the shell commands that lead a run to the servers, and returns the file. Only this user can read it."""
    file = folder / VARIABLES
    values = {ADDRESSES_VARIABLE: ",".join(servers.addresses), KEY_VARIABLE: servers.api_key}
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    return file


def announce(servers: SGLangServers, file: Path) -> None:
    """Prints the addresses, and the way to use them."""
    for server in servers.servers:
        print(f"server {server.index} answers at {server.address}")
    print(f"a run uses them after: source {shlex.quote(str(file.resolve()))}\nCtrl-C ends them", flush=True)


if __name__ == "__main__":
    run_command(serve, USAGE)
