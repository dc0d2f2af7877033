"""One rollout server of a job on several machines: `python -m megarl.launcher.server_task KNOB=VALUE ...`

MEGARL_SERVER_INDEX, else SLURM_PROCID, is the server's number. The task runs one SGLang server on the job's interface
and publishes its address in the job's folder once it answers. It restarts a server that died, hung or fell silent on
the same port, `server.max_restarts` times. The trainer sends a restarted server the weights before any request.

After SIGTERM it serves until the trainers have ended (`rendezvous.ENDED` in the job's folder, or a second SIGTERM).
Cancelling or preempting a job signals all its tasks at once, and a trainer may need a server to finish its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from megarl import cli
from megarl.config import Config, server_arguments
from megarl.gpu_checks import check_gpus_seen
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.launcher.job import FIRST_GPU, INDEX, LOGS
from megarl.launcher.local import PARENT
from megarl.parallel import rendezvous
from megarl.processes import die_with_parent
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.connections import KEY_VARIABLE
from megarl.rollout.servers.gpu_placement import VISIBLE, offered_gpus, visible_gpus
from megarl.rollout.servers.server_config import gpu_count, uses_gpu
from megarl.rollout.servers.sglang_server import ServerError, SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from megarl.served_checks import adapters_on_servers

LOCAL_TASK = "SLURM_LOCALID"
POLL_S = 0.5
EXIT_GAVE_UP = 1

log = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serves until the trainers have ended. Returns 0, or EXIT_GAVE_UP after too many restarts."""
    stop = Stop()
    folder, key = rendezvous.job_folder(), os.environ.get(KEY_VARIABLE)
    number = os.environ.get(INDEX, os.environ.get("SLURM_PROCID"))
    if folder is None or key is None or number is None:
        raise UserError(
            f"a server task needs {rendezvous.JOB_FOLDER}, {KEY_VARIABLE} and {INDEX} (or SLURM_PROCID) in its "
            "environment; megarl's launchers set them"
        )
    index = int(number)
    with contextlib.ExitStack() as stack:
        try:
            servers = stack.enter_context(_server_of(config, index, key, folder))
            servers.start()
            (server,) = servers.servers
            while not server.answers():
                if stop.signals or stop.now(folder):
                    return 0
                server.check_alive()
                if server.age_s > config.server.ready_timeout_s:
                    limit = f"server.ready_timeout_s={config.server.ready_timeout_s:g}"
                    raise server.error(f"did not answer within {limit} s")
        except (ServerError, UserError, OSError) as error:  # the trainers, on other nodes, wait for this server
            rendezvous.publish(folder, rendezvous.failure_name(index), str(error))
            raise
        rendezvous.publish(folder, rendezvous.server_name(index), servers.addresses[0])
        print(f"server {index} answers at {servers.addresses[0]}", flush=True)
        supervisor = Supervisor(servers.servers, config.server.heartbeat_s, config.server.max_restarts)
        supervisor.start()
        try:
            while not stop.now(folder):
                if supervisor.outlook() == "none":
                    supervisor.raise_cause()
                    return EXIT_GAVE_UP
        finally:
            supervisor.close()
    return 0


def _server_of(config: Config, index: int, key: str, folder: Path) -> SGLangServers:
    """This task's server, on this machine's address and GPUs, to be started.

    Raises:
        UserError: this machine cannot run it.
    """
    check_gpus_seen(config.cluster.gpus_per_node)
    rendezvous.use_interface()
    logs = Path(os.environ.get(LOGS, folder))
    if config.cluster.gpus_per_node or uses_gpu(config.server):
        local, first = int(os.environ.get(LOCAL_TASK, "0")), int(os.environ.get(FIRST_GPU, "0"))
        offered = offered_gpus(config.cluster.gpus_per_node or gpu_count())
        os.environ[VISIBLE] = visible_gpus(config.server.tp_size, local, first, offered)
    knobs = dataclasses.replace(config.server, n_servers=1, host=rendezvous.own_address(), port=0)
    model = local_folder(config.actor.path)
    arguments, adapters = server_arguments(config), adapters_on_servers(config)
    return SGLangServers(knobs, model, logs, WEIGHT_LOADER, arguments, api_key=key, first=index, adapters=adapters)


class Stop:
    """Counts SIGTERMs. Made in the main thread."""

    def __init__(self) -> None:
        self.signals = 0
        self._again = threading.Event()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the trainers

    def _on_signal(self, *_: Any) -> None:
        self.signals += 1
        if self.signals > 1:
            self._again.set()

    def now(self, folder: Path) -> bool:
        """True if it is time to end. Waits POLL_S before it returns False."""
        if self._again.is_set() or rendezvous.ENDED in os.listdir(folder):  # NFS remembers a missing name for a minute
            return True
        return self._again.wait(POLL_S)


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    cli.run_command(serve)
