"""SGLang servers as child processes of the trainer: launch, wait until ready, stop, leave nothing behind.

Run as a program (`python -m megarl.rollout.servers.sglang_server PARENT_PID MODULE ...`) this file is the first thing a
server process executes: it ties the server's life to the trainer's, then runs MODULE (SGLang's own launcher, or
`sglang_cpu` where there is no GPU). It imports no torch and no SGLang for that reason.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import http.client
import importlib.util
import json
import logging
import os
import random
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.cpu.sglang_launch import DETERMINISTIC, args_for
from megarl.knobs import UserError, knob
from megarl.processes import die_with_parent

log = logging.getLogger(__name__)

FREE_PORTS = range(20000, 32000)  # below Linux's ephemeral range, so that no outgoing connection takes one meanwhile
STOP_DEADLINE_S = 10.0
LOG_TAIL_LINES = 25

# ServerArgs that a knob or megarl itself sets, with the way to change each.
OWNED = {
    "model_path": "it is the actor's checkpoint",
    "host": "use the knob host",
    "port": "use the knob port",
    "tp_size": "use the knob tp_size",
    "dtype": "use the knob dtype",
    "device": "use the knob device",
    "max_total_tokens": "use the knob max_total_tokens",
    "random_seed": "use the knob random_seed",
    "api_key": "a random one is made for each run",
    "admin_api_key": "a random api_key is made for each run",
    "custom_weight_loader": "megarl's weight receiver is loaded there",
    "config": "the arguments here are written to such a file",
}
# ServerArgs that must stay at 1, with the reason.
MUST_BE_ONE = {
    "pp_size": "SGLang's live weight updates do not support pipeline parallelism",
    "dp_size": "SGLang's live weight updates do not support data-parallel replicas; use the knob n_servers",
    "nnodes": "a server is a child process of the trainer on this machine",
    "tokenizer_worker_num": "SGLang checks no API key with several tokenizer workers",
}


class ServerError(RuntimeError):
    """A server did not start, or died. Names the server, its log file and the log's last lines."""


@dataclass(frozen=True)
class SGLangServerConfig:
    """How the SGLang servers of a run are started and watched."""

    n_servers: int = knob(1, "SGLang servers started on this machine")
    tp_size: int = knob(1, "tensor-parallel ranks of one server")
    host: str = knob("127.0.0.1", "address a server listens on")
    port: int = knob(0, "port of the first server, the others follow it; 0 picks free ports")
    device: str = knob("auto", "auto | cpu | cuda; auto is cuda where torch finds a GPU")
    dtype: str = knob("float32", "dtype of the served weights: float32, bfloat16, float16 or auto (the checkpoint's)")
    max_total_tokens: int = knob(65536, "tokens the key/value cache holds; 0 lets SGLang size it from free memory")
    random_seed: int = knob(0, "seed of a server's sampling stream; server i gets random_seed + i")
    cpu_threads: int = knob(1, "OpenMP threads of a rank on CPU; more than one collapses beside busy processes")
    ready_timeout_s: float = knob(600.0, "seconds a server may take until it answers")
    heartbeat_s: float = knob(10.0, "seconds between looks at a server, and until it must have answered one")
    max_restarts: int = knob(3, "times each server is started again after it died, hung or failed; 0: never")


@functools.cache
def server_arg_options() -> dict[str, str]:
    """SGLang's ServerArgs fields and the option of each (`{"tp_size": "tp-size", ...}`).

    Read from SGLang's source: importing it would take seconds. Raises UserError if SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UserError(
            "SGLang is not installed, and rollouts need it: run `make setup` on a machine without a GPU, "
            'or `pip install "sglang[all]==0.5.23"` on one with a GPU'
        )
    options = {}
    for source in (Path(spec.origin).parent / "srt" / "arg_groups" / "fields").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                given = [
                    k.value for k in ast.walk(node.annotation) if isinstance(k, ast.keyword) and k.arg == "cli_name"
                ]
                options[name] = ast.literal_eval(given[0]).lstrip("-") if given else name.replace("_", "-")
    if "model_path" not in options:
        raise UserError(f"{spec.origin} is not SGLang 0.5.23: its ServerArgs fields were not found; run `make setup`")
    return options


def check_config(config: SGLangServerConfig, model_path: str | Path, sglang: Mapping[str, Any]) -> None:
    """Raises UserError for every mistake that can be known before a server starts."""
    known = server_arg_options()
    for key, value in sglang.items():
        if key in OWNED:
            raise UserError(f"sglang.{key}={value!r} cannot be set: {OWNED[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(
                f"sglang.{key} is not a ServerArgs field of SGLang" + (f"; did you mean {near[0]}?" if near else "")
            )
        if key in MUST_BE_ONE and value != 1:
            raise UserError(f"sglang.{key}={value!r} must be 1: {MUST_BE_ONE[key]}")
    for name in ("n_servers", "tp_size", "cpu_threads"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)} must be at least 1")
    if config.heartbeat_s <= 0 or config.max_restarts < 0:
        raise UserError(
            f"server.heartbeat_s={config.heartbeat_s} must be above 0, server.max_restarts={config.max_restarts} "
            "at least 0"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={config.device!r} is not one of auto, cpu, cuda")
    if not (Path(model_path) / "config.json").is_file():
        raise UserError(f"{model_path} is not a model folder: it has no config.json; give a local HF checkpoint folder")
    if config.port:
        for port in range(config.port, config.port + config.n_servers):
            if not port_is_free(config.host, port):
                raise UserError(f"port {port} on {config.host} is in use; free it, or set port=0 for a free one")


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(host: str, count: int) -> list[int]:
    """`count` ports that nothing listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        if len(found) == count:
            break
        if port_is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise UserError(f"{host} has no {count} free ports in {FREE_PORTS.start}-{FREE_PORTS.stop - 1}; set port")
    return found


def uses_gpu(config: SGLangServerConfig) -> bool:
    """Whether the servers run on CUDA. The one place that decides between SGLang's launcher and `sglang_cpu`."""
    if config.device != "auto":
        return config.device == "cuda"
    import torch

    return torch.cuda.is_available()


class SGLangServer:
    """One SGLang server process. `SGLangServers` makes and owns these."""

    owned = True

    def __init__(
        self, index: int, config: SGLangServerConfig, port: int, args: dict[str, Any], logs: Path, deterministic: bool
    ):
        self.deterministic = deterministic
        self.index = index
        self.config = config
        self.port = port
        self.args = args
        self.args_path = logs / f"sglang-{index}.yaml"
        self.log_path = logs / f"sglang-{index}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.scratch: str | None = None
        self.started_at = 0.0
        self._family: list[psutil.Process] = []  # its own name for its processes, known once it answers

    @property
    def address(self) -> str:
        return f"{self.config.host}:{self.port}"

    def start(self) -> None:
        """Starts the process and returns at once.

        The thread that calls this must outlive the server: Linux ties the server to that thread.
        """
        on_gpu = uses_gpu(self.config)
        module = "sglang.launch_server" if on_gpu else "megarl.cpu.sglang_launch"
        # The arguments go by a file that only this user can read: the API key shows in no process list.
        private = functools.partial(os.open, mode=0o600)
        options = server_arg_options()
        beside = self.args_path.with_suffix(".new")  # who reads the file while the server starts again finds it whole
        with open(beside, "w", opener=private) as file:
            json.dump({options[name]: value for name, value in self.args.items()}, file, indent=1)  # JSON is YAML
        beside.replace(self.args_path)
        self.scratch = tempfile.mkdtemp(prefix="megarl-sglang-")  # SGLang leaves its sockets behind
        with open(self.log_path, "ab", opener=private) as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), module, "--config", str(self.args_path)],
                env=os.environ | {"TMPDIR": self.scratch} | ({} if on_gpu else self._cpu_environment(self.scratch)),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the server
            )
        self.started_at = time.monotonic()

    def _cpu_environment(self, scratch: str) -> dict[str, str]:
        environment = {
            "OMP_NUM_THREADS": str(self.config.cpu_threads),
            # Ranks find each other by a file and talk over the loopback device: torch's TCP store listens everywhere.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
            "GLOO_SOCKET_IFNAME": "lo",
            DETERMINISTIC: "1" if self.deterministic else "",
        }
        if self.config.tp_size > 1:  # SGLang binds each rank to cores, and refuses more ranks than NUMA nodes otherwise
            cores = sorted(os.sched_getaffinity(0))
            ranks = range(self.config.tp_size)
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in ranks)
        return environment

    def answers(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers to our key right now."""
        answered = answers_at(self.address, self.args["api_key"], timeout_s)
        if answered and not self._family and self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                everyone = psutil.Process(self.process.pid).children(recursive=True)
                self._family = [p for p in everyone if any("sglang::" in part for part in p.cmdline())]
        return answered

    def fault(self) -> ServerError | None:
        """What is wrong with the server's processes: one has ended, or is stopped."""
        try:
            self.check_alive()
            assert self.process is not None, "alive"
            for member in [psutil.Process(self.process.pid), *self._family]:
                status = member.status()  # a zombie of our own is told, with its exit code, by the next look
                ended = status == psutil.STATUS_ZOMBIE and member.pid != self.process.pid
                if ended or status == psutil.STATUS_STOPPED:
                    return self.error(f"has a process {member.pid} that is {status}")
        except psutil.NoSuchProcess as gone:
            return self.error(f"lost its process {gone.pid}")
        except ServerError as error:
            return error
        return None

    def restart(self) -> None:
        """Ends what is left of the server and starts it again. The thread that calls this must outlive it."""
        self.stop()
        self.start()

    @property
    def late(self) -> bool:
        """Whether the server must answer by now."""
        return self.age_s > self.config.ready_timeout_s or bool(self._family)

    def check_alive(self) -> None:
        """Raises ServerError if the process has ended."""
        if self.process is None:
            raise ServerError(f"SGLang server {self.index} was not started")
        if self.process.poll() is not None:
            raise self.error(f"ended with exit code {self.process.returncode}")

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
        """An error that names the server, and its log with the last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join("  " + line[:300] for line in lines)
        return ServerError(
            f"SGLang server {self.index} at {self.address} {what}; its log {self.log_path} ends:\n{tail}"
        )

    def stop(self) -> None:
        """Ends the server and all of its children. Returns when they are gone.

        By SIGKILL: a server holds nothing worth saving, and its own way out polls every 5 s for open requests.
        """
        if self.process is not None:
            try:
                root = psutil.Process(self.process.pid)
                family = [*root.children(recursive=True), root, *self._family]
            except psutil.NoSuchProcess:
                family = self._family
            shared = {path for member in family for path in shared_memory_of(member)}
            for member in family:
                if member.is_running():
                    member.kill()
            _, alive = psutil.wait_procs(family, timeout=STOP_DEADLINE_S)
            if alive:
                raise ServerError(f"SGLang server {self.index} left processes that a SIGKILL did not end: {alive}")
            for path in shared:
                Path(path).unlink(missing_ok=True)
            self.process.wait(STOP_DEADLINE_S)
            self.process = None
            self._family = []
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch = None


def answers_at(address: str, api_key: str, timeout_s: float) -> bool:
    """Whether an SGLang server at `host:port` answers to the key. `/model_info` is quick; `/health` takes a second."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/model_info", headers={"Authorization": f"Bearer {api_key}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def shared_memory_of(process: psutil.Process) -> list[str]:
    """Files of SGLang's load statistics that `process` has mapped; SGLang leaves them in shared memory."""
    try:
        return [m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/sglang_loads_")]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


class SGLangServers:
    """The servers of a run. A context manager: leaving it stops them.

    `model_path` is a local HF checkpoint folder, `log_dir` an existing folder for logs and argument files,
    `custom_weight_loader` the import path of the function that receives weights inside the server, `sglang` more of
    SGLang's ServerArgs by field name, `deterministic` the run's knob. `api_key` is made up if not given, `first` the
    number of the first server of all. The constructor raises UserError for whatever is wrong before anything starts.
    """

    def __init__(
        self,
        config: SGLangServerConfig,
        model_path: str | Path,
        log_dir: str | Path,
        custom_weight_loader: str | None = None,
        sglang: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        api_key: str = "",
        first: int = 0,
    ):
        check_config(config, model_path, sglang or {})
        self.config = config
        self.api_key = api_key or secrets.token_hex(24)  # hex: SGLang would read one that starts with "-" as an option
        if config.port:
            ports = list(range(config.port, config.port + config.n_servers))
        else:
            ports = free_ports(config.host, config.n_servers)
        args: dict[str, Any] = {
            "model_path": str(Path(model_path).resolve()),
            "host": config.host,
            "tp_size": config.tp_size,
            "dtype": config.dtype,
            "device": "cuda" if uses_gpu(config) else "cpu",
            "api_key": self.api_key,
            "skip_server_warmup": True,
            "weight_version": "0",
        }
        if config.max_total_tokens:
            args["max_total_tokens"] = config.max_total_tokens
        if custom_weight_loader:
            args["custom_weight_loader"] = [custom_weight_loader]
        if not uses_gpu(config):
            args |= args_for(config.tp_size, deterministic, given=sglang or ())
        args |= dict(sglang or {})
        self.servers = []
        for i, port in enumerate(ports, first):
            own = args | {"port": port, "random_seed": config.random_seed + i}
            self.servers.append(SGLangServer(i, config, port, own, Path(log_dir), deterministic))

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
        except BaseException:
            self.stop()
            raise

    def check_alive(self) -> None:
        """Raises ServerError if a server has ended. Cheap: call it once a step."""
        for server in self.servers:
            server.check_alive()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> SGLangServers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Slurm tells every process of a job that it ends, and the trainer may need this one for its last step.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    entry = sys.argv[2]
    sys.argv = [entry, *sys.argv[3:]]
    runpy.run_module(entry, run_name="__main__", alter_sys=True)
