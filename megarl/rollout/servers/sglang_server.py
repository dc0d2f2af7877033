"""SGLang servers as child processes of the trainer: launch, wait until ready, stop, leave nothing behind.

A server process begins with this file, as `python -m megarl.rollout.servers.sglang_server PARENT_PID MODULE`. It ties
the server's life to the trainer's, then has MODULE, if any, prepare SGLang's import for the device, and runs SGLang by
`guarded_launch.py`. So it imports neither torch nor SGLang.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from megarl.observe.log_tail import log_tail
from megarl.parallel.determinism import OFF, Determinism
from megarl.processes import die_with_parent
from megarl.rollout.closing import close_after
from megarl.rollout.servers import guarded_launch, served_adapters
from megarl.rollout.servers.gpu_placement import VISIBLE, offered_gpus, visible_gpus
from megarl.rollout.servers.inherited_environment import inherited
from megarl.rollout.servers.server_config import (
    ServerPlatform,
    SGLangServerConfig,
    check_server_config,
    choose_platform,
    hold_ports,
    quantisation_arguments,
    server_arg_options,
)

log = logging.getLogger(__name__)

STOP_DEADLINE_S = 120.0  # for a hang alone
ON_COMMAND_LINE = ("lora_paths",)  # SGLang does not take it from a file
LOG_TAIL_LINES = 25
GONE = "gone"  # beside psutil's names of a process's state
SHARED_MEMORY = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_mq_")


class ServerError(RuntimeError):
    """A server did not start, or died. Names the server, its log file and the log's last lines."""


class SGLangServer:
    """One SGLang server process. `SGLangServers` makes and owns these."""

    owned = True

    def __init__(
        self,
        index: int,
        config: SGLangServerConfig,
        platform: ServerPlatform,
        port: int,
        args: dict[str, Any],
        logs: Path,
        gpus: str | None = None,
    ):
        self.platform = platform
        self.gpus = gpus  # CUDA_VISIBLE_DEVICES; None: this process's
        self.index = index
        self.config = config
        self.port = port
        self.args = args
        self.args_path = logs / f"sglang-{index}.yaml"
        self.log_path = logs / f"sglang-{index}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.scratch: str | None = None
        self.started_at = 0.0
        self._family: list[psutil.Process] = []  # SGLang's worker processes, known once the server answers
        self._shared_memory: set[str] = set()  # their files, which outlive them

    @property
    def address(self) -> str:
        return f"{self.config.host}:{self.port}"

    def start(self) -> None:
        """Starts the process and returns at once.

        The thread that calls this must outlive the server: Linux ties the server to that thread.
        """
        # The arguments go by a file that only this user can read: the API key shows in no process list.
        private = functools.partial(os.open, mode=0o600)
        options = server_arg_options()
        beside = self.args_path.with_suffix(".new")  # replaced whole: readers may come during a restart
        with open(beside, "w", opener=private) as file:
            in_file = {options[name]: value for name, value in self.args.items() if name not in ON_COMMAND_LINE}
            json.dump(in_file, file, indent=1)  # JSON is YAML
        beside.replace(self.args_path)
        self.scratch = tempfile.mkdtemp(prefix="megarl-sglang-")  # SGLang leaves its sockets behind
        launcher = [sys.executable, "-m", __name__]
        others = [
            word for name in ON_COMMAND_LINE if name in self.args for word in (f"--{options[name]}", *self.args[name])
        ]
        with open(self.log_path, "ab", opener=private) as log_file:
            self.process = subprocess.Popen(
                [*launcher, str(os.getpid()), self.platform.prepare_module, "--config", str(self.args_path), *others],
                env=self._environment(self.scratch),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the server
            )
        self.started_at = time.monotonic()

    def _environment(self, scratch: str) -> dict[str, str]:
        placed = {} if self.gpus is None else {VISIBLE: self.gpus}
        return {
            **inherited(os.environ, self.config.colocate),
            "TMPDIR": scratch,
            **self.platform.environment(scratch),
            **placed,
        }

    def answers(self, timeout_s: float = 5.0) -> bool:
        """True if the server answers to our key within `timeout_s`."""
        answered = answers_at(self.address, self.args["api_key"], timeout_s)
        if answered and not self._family and self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                everyone = psutil.Process(self.process.pid).children(recursive=True)
                self._family = [p for p in everyone if any("sglang::" in part for part in p.cmdline())]
            self._shared_memory = {path for member in self._family for path in shared_memory_of(member)}
        return answered

    def fault(self) -> ServerError | None:
        """An error if one of the server's processes has ended or is stopped, else None."""
        try:
            self.check_alive()
            broken = self._broken_process()
            self.check_alive()  # a server that ends takes its processes along, and its exit code says more
        except ServerError as error:
            return error
        return self.error(broken) if broken else None

    def _broken_process(self) -> str:
        """Names a process that has ended or is stopped; empty if there is none, or if the server itself has ended."""
        process = self.process  # another thread may be ending the server
        if process is None:
            return ""
        broken = [
            f"has a process {member.pid} that is {status}"
            for member in self._family
            if (status := status_of(member.pid)) in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, GONE)
        ]
        own = status_of(process.pid)  # read last: it becomes a zombie before the others do
        if own in (psutil.STATUS_ZOMBIE, GONE):
            return ""  # once its last thread has ended, the next check reports its exit code
        if own == psutil.STATUS_STOPPED:
            return f"has a process {process.pid} that is {own}"
        return broken[0] if broken else ""

    def restart(self) -> None:
        """Ends the server's remaining processes and starts it again. The calling thread must outlive the server."""
        self.stop()
        self.start()

    @property
    def late(self) -> bool:
        """True if the server must answer by now: it has answered before, or its start took too long."""
        return self.age_s > self.config.ready_timeout_s or bool(self._family)

    def check_alive(self) -> None:
        """Raises ServerError if the process has ended."""
        process = self.process  # another thread may be ending the server
        if process is None:
            raise ServerError(f"SGLang server {self.index} was not started")
        if (code := process.poll()) is not None:
            raise self.error(f"ended with exit code {code}")

    def wait_ready(self) -> None:
        """Returns once the server answers. Raises ServerError if it dies or its deadline passes."""
        while not self.answers():
            self.check_alive()
            if time.monotonic() - self.started_at > self.config.ready_timeout_s:
                raise self.error(f"did not answer within ready_timeout_s={self.config.ready_timeout_s:g} s")
            time.sleep(0.1)
        log.info("SGLang server %d ready at %s after %.1f s", self.index, self.address, self.age_s)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    def error(self, what: str) -> ServerError:
        """An error that names the server and its log, with the log's last lines."""
        tail = "\n".join("  " + line[:300] for line in log_tail(self.log_path, LOG_TAIL_LINES))
        return ServerError(
            f"SGLang server {self.index} at {self.address} {what}; its log {self.log_path} ends:\n{tail}"
        )

    def stop(self) -> None:
        """Kills the server and its children, and returns when they are gone.

        SIGKILL, because a server holds nothing worth saving and its own exit polls for open requests every 5 s.
        """
        if self.process is not None:
            try:
                root = psutil.Process(self.process.pid)
                family = [*root.children(recursive=True), root, *self._family]
            except psutil.NoSuchProcess:
                family = self._family
            self._shared_memory |= {path for member in family for path in shared_memory_of(member)}
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            if alive := still_running(family, STOP_DEADLINE_S):
                raise ServerError(f"SGLang server {self.index} left processes that a SIGKILL did not end: {alive}")
            for path in self._shared_memory:
                Path(path).unlink(missing_ok=True)
            self._shared_memory = set()
            self.process.wait(STOP_DEADLINE_S)
            self.process = None
            self._family = []
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch = None


def answers_at(address: str, api_key: str, timeout_s: float) -> bool:
    """True if an SGLang server at `host:port` answers to the key. `/model_info` is quick; `/health` takes a second."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/model_info", headers={"Authorization": f"Bearer {api_key}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def status_of(pid: int) -> str:
    """A process's state, as psutil names it, or `GONE`."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return GONE


def still_running(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Waits for the end of processes; returns those that run after `within_s` seconds.

    A zombie has ended. Who has to reap it may be late, or may be a container's first process, which reaps none.
    """
    deadline = time.monotonic() + within_s
    while True:
        running = [p for p in processes if p.is_running() and status_of(p.pid) not in (psutil.STATUS_ZOMBIE, GONE)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.01)


def shared_memory_of(process: psutil.Process) -> list[str]:
    """Shared-memory files of SGLang that `process` has mapped: load statistics, and queues between ranks.

    SGLang does not remove them when it is killed.
    """
    try:
        return [m.path for m in process.memory_maps() if m.path.startswith(SHARED_MEMORY)]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


class SGLangServers:
    """The servers of a run, as a context manager that stops them at its end.

    Args:
        config: number, size and device of the servers.
        model_path: local folder of a HF checkpoint.
        log_dir: existing folder for logs and argument files.
        custom_weight_loader: import path of the function that receives weights inside a server.
        sglang: more of SGLang's ServerArgs, by field name.
        deterministic: the run's `Config.determinism`.
        api_key: key of all servers; a random one by default.
        first: number of the first server.
        first_gpu: first of the servers' GPUs, among those that this process sees; None gives each server all of them.
        adapters: the adapters that syncs bring alone; None where they bring all weights.

    Raises:
        UserError: any mistake that can be known before a server starts.
    """

    def __init__(
        self,
        config: SGLangServerConfig,
        model_path: str | Path,
        log_dir: str | Path,
        custom_weight_loader: str | None = None,
        sglang: Mapping[str, Any] | None = None,
        deterministic: Determinism = OFF,
        api_key: str = "",
        first: int = 0,
        first_gpu: int | None = None,
        adapters: served_adapters.ServedAdapters | None = None,
    ):
        sglang = dict(sglang or {})
        check_server_config(config, model_path, sglang)
        if adapters is not None:
            served_adapters.check_options(sglang)
            sglang |= adapters.arguments(Path(log_dir))
        platform = choose_platform(config, sglang, deterministic)
        self.config = config
        self.api_key = api_key or secrets.token_hex(24)  # hex: SGLang reads a leading "-" as an option
        self._held = [] if config.port else hold_ports(config.host, config.n_servers)
        drawn = [held.getsockname()[1] for held in self._held]
        ports = drawn or range(config.port, config.port + config.n_servers)
        args: dict[str, Any] = {
            "model_path": str(Path(model_path).resolve()),
            "host": config.host,
            "tp_size": config.tp_size,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "device": platform.device,
            "api_key": self.api_key,
            "skip_server_warmup": True,
            "weight_version": "0",
        }
        if config.max_total_tokens:
            args["max_total_tokens"] = config.max_total_tokens
        if custom_weight_loader:
            args["custom_weight_loader"] = [custom_weight_loader]
        args |= dict(platform.arguments) | quantisation_arguments(config, sglang) | sglang
        offered = offered_gpus(platform.gpus)
        self.servers = []
        for i, port in enumerate(ports, first):
            own = args | {"port": port, "random_seed": config.random_seed + i}
            gpus = None
            if first_gpu is not None and platform.device == "cuda":
                gpus = visible_gpus(config.tp_size, i - first, first_gpu, offered)
            self.servers.append(SGLangServer(i, config, platform, port, own, Path(log_dir), gpus))

    @property
    def addresses(self) -> list[str]:
        """`host:port` of each server."""
        return [server.address for server in self.servers]

    def start(self) -> None:
        """Starts every server and returns at once, so that the caller can build the actor meanwhile."""
        for server in self.servers:
            server.start()

    def wait_ready(self) -> None:
        """Returns once every server answers; otherwise stops all and raises ServerError."""
        try:
            for server in self.servers:
                server.wait_ready()
        except BaseException as error:
            close_after(error, self.stop)
            raise

    def check_alive(self) -> None:
        """Raises ServerError if a server has ended. Cheap: call it once a step."""
        for server in self.servers:
            server.check_alive()

    def stop(self) -> None:
        """Stops every server and gives their ports up. Raises the first failure after that."""
        errors = []
        for server in self.servers:
            try:
                server.stop()
            except Exception as error:
                errors.append(error)
        for held in self._held:
            held.close()
        if errors:
            raise errors[0]

    def __enter__(self) -> SGLangServers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(error, self.stop)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Slurm signals all processes of a job at its end; the trainer may still need this server for its last step.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if sys.argv[2]:
        importlib.import_module(sys.argv[2]).prepare()
    guarded_launch.launch(sys.argv[3:])
