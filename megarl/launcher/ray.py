"""Starts the ranks and servers of a run on a Ray cluster. Each is the child of its own actor.

python -m megarl.launcher.ray [SCRIPT.py] [--config FILE] [+experiment=NAME] [group=name ...] [knob=value ...]

RAY_ADDRESS names the cluster. Without it a cluster is started on this machine, on the loopback device and behind a
token, and ends with this process. Ray places the processes, assigns their GPUs and reports lost ones. The processes
are the same under every launcher: they meet in the run's folder, which all nodes must see.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.launcher.job import Job, become_train
from megarl.launcher.local import PARENT
from megarl.launcher.watch import watch
from megarl.parallel import hardware_queues
from megarl.parallel.rendezvous import INTERFACE
from megarl.parallel.watchdog import FROZEN_SHARED_S, Monitor

PACKAGE = "ray==2.60.0"  # as pyproject.toml pins it
ADDRESS = "RAY_ADDRESS"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum; nothing goes through it
PLACE_DEADLINE_S = 300.0  # to find room in the cluster, and to start the processes
ANSWER_S = 10.0  # for a cluster to accept a connection
STARTS = 3  # of an own cluster: Ray gives its agents 15 s and a node 30 s, which a busy machine passes by chance
POLL_S = 0.2
LOST = 70  # exit code of a process whose actor died: EX_SOFTWARE
# Prefixes of variables.
PASSED_ON = ("MEGARL_", "NCCL_", "GLOO_", "HF_", "OMP_", "SGLANG_", "PYTHONPATH", hardware_queues.VARIABLE)

# Environment of a cluster that this process starts, set before ray is imported.
OWN_CLUSTER = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all of it listens on 127.0.0.1 (ray/_private/services.py, 815)
    "RAY_AUTH_MODE": "token",  # only this user gets answers
    "RAY_memory_monitor_refresh_ms": "0",  # the monitor kills ranks when memory is short
    "RAY_worker_niceness": "0",  # 15 by default: ranks would yield to every other process of the machine
}


def launch(job: Job) -> int:
    """Runs the job. Returns 0, or the exit code of a process that failed.

    Prints rank 0's log. No process outlives this one.

    Raises:
        UserError: ray is not installed, the cluster does not answer or has no room, or a node does not see the folder.
    """
    with _cluster(job) as ray:
        ranks, servers = _place(ray, job)
        log = _Follower(job.log(ranks[0].name))
        ranks[0].log = None
        monitor = Monitor(job.watch, job.world_size, job.timeout_s, frozen_s=FROZEN_SHARED_S)
        return watch(ranks, servers, monitor, job.folder, log.show, POLL_S)


@contextlib.contextmanager
def _cluster(job: Job) -> Iterator[Any]:
    """Connects to the cluster, or starts one. Yields the module `ray`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(ADDRESS) or None
    if address is None:
        os.environ.update(OWN_CLUSTER, RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ[INTERFACE] = "lo"
    try:
        import ray
    except ImportError as error:
        raise UserError(f'launcher=ray needs Ray: pip install "{PACKAGE}", or choose launcher=local') from error
    if address is not None:
        _check_answers(address)
    scratch = None if address else tempfile.mkdtemp(prefix="megarl-ray-")
    try:
        _start(ray, _options(job, address, scratch), address)
        yield ray
    finally:
        ray.shutdown()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _start(ray: Any, options: dict[str, Any], address: str | None) -> None:
    """Connects to the cluster at `address`, or starts one, up to `STARTS` times. Prints each start that failed."""
    starts = 1 if address else STARTS
    for number in range(1, starts + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # the class that Ray raises itself if a node is not up in time
            cause = " ".join(str(error).split())[:300]
            if number == starts:
                where = f"{ADDRESS}={address}" if address else f"a cluster on this machine ({starts} starts)"
                remedy = (
                    "see `ray status`" if address else "choose launcher=local, or set RAY_ADDRESS to a running cluster"
                )
                raise UserError(f"launcher=ray: {where} does not come up; {remedy}: {cause}") from error
            print(f"ray       its cluster is not up, start {number + 1} of {starts} follows: {cause}", flush=True)
            ray.shutdown()  # what the start left over ends with this process


def _options(job: Job, address: str | None, scratch: str | None) -> dict[str, Any]:
    """Options of `ray.init`: for the cluster at `address`, or for one on this machine with its files in `scratch`."""
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if scratch is None:
        return {"address": address, **quiet}
    return {
        "address": "local",
        "num_cpus": job.world_size + job.servers,
        "num_gpus": None if job.gpus_per_node else 0,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": os.path.join(scratch, "ray"),  # Ray makes it 0777; its parent is 0700
        **quiet,
    }


def _check_answers(address: str) -> None:
    """Refuses a `host:port` without a listener. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # "auto": Ray finds this machine's cluster
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"launcher=ray: {ADDRESS}={address} does not answer ({error}); start it, or unset it"
        ) from error


def bundles(job: Job) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Placement bundles of the ranks and of the servers. Ray puts a bundle on one node.

    A rank bundle fills a node, in the order of ranks; each server has one bundle.
    """
    per_node = job.gpus_per_node or job.world_size
    counts = [min(per_node, job.world_size - first) for first in range(0, job.world_size, per_node)]
    gpus = bool(job.gpus_per_node)
    ranks = [{"CPU": count} | ({"GPU": count} if gpus else {}) for count in counts]
    return ranks, [{"CPU": 1} | ({"GPU": job.server_gpus} if gpus else {})] * job.servers


def _place(ray: Any, job: Job) -> tuple[list[_Task], list[_Task]]:
    """Reserves room for all processes, then starts them, servers first."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    groups = [placement_group(wanted, strategy="PACK") if wanted else None for wanted in bundles(job)]
    ready = [group.ready() for group in groups if group is not None]
    if len(ray.wait(ready, num_returns=len(ready), timeout=PLACE_DEADLINE_S)[0]) < len(ready):
        total = {name: number for name, number in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise UserError(
            f"the Ray cluster has no room for bundles of {bundles(job)} within {PLACE_DEADLINE_S:g} s; it has {total}: "
            "add nodes, end other jobs, or lower parallel.* and server.*"
        )
    kind = ray.remote(num_cpus=1, max_restarts=0)(Child)
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}

    def start(
        name: str, group: Any, bundle: int, gpus: int, command: tuple[list[str], dict[str, str]], sharing: int
    ) -> _Task:
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        actor = kind.options(num_gpus=gpus, scheduling_strategy=strategy, name=f"{name} of {job.folder}").remote()
        arguments, variables = command
        log, environment = job.log(name), {**passed_on, **variables}
        started = actor.start.remote(arguments, environment, str(log), os.getcwd(), sharing)
        return _Task(ray, name, actor, log, started)

    per_node, gpu = job.gpus_per_node or job.world_size, int(bool(job.gpus_per_node))
    servers = [
        start(f"server {i}", groups[1], i, gpu * job.server_gpus, job.server(i, first_gpu=0), 0)
        for i in range(job.servers)
    ]
    ranks = [  # each sees only its own GPU, as number 0
        start(f"rank {i}", groups[0], i // per_node, gpu, job.rank(i, 0 if gpu else i), min(per_node, job.world_size))
        for i in range(job.world_size)
    ]
    _print_nodes(ray, [*ranks, *servers])
    return ranks, servers


def _print_nodes(ray: Any, tasks: Sequence[_Task]) -> None:
    """Waits until all processes run, and prints the processes of each node."""
    nodes: dict[str, list[str]] = {}
    for task in tasks:
        try:
            node, problem = ray.get(task.started, timeout=PLACE_DEADLINE_S)
        except ray.exceptions.RayActorError:
            continue  # lost already; `watch` names it
        except ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"{task.name} was not started within {PLACE_DEADLINE_S:g} s by Ray; see its logs"
            ) from error
        if problem:
            raise UserError(f"{task.name} cannot run on node {node}: {problem}")
        nodes.setdefault(node, []).append(task.name)
    for node, names in nodes.items():
        print(f"ray       {node}: {', '.join(names)}", flush=True)


class Child:
    """An actor: the parent of one process, which dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, arguments: list[str], environment: dict[str, str], log: str, folder: str, sharing: int
    ) -> tuple[str, str]:
        """Starts the process. Returns the node's name, and the problem if it cannot be started.

        Its threads are the user's `OMP_NUM_THREADS`, else the cores of the node for each of `sharing` ranks, or with 0
        what libraries choose. Ray would give each actor one.
        """
        node = socket.gethostname()
        for needed in (folder, str(Path(log).parent)):
            if not os.path.isdir(needed):
                return node, f"{needed} is not there; put code and run_root where all nodes see them"
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if sharing:
            inherited["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's processes block it
        try:
            with open(log, "ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments],
                    env={**inherited, **environment, PARENT: str(os.getpid())},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return node, ""

    def poll(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class _Task:
    """A `watch.Task` behind an actor. Its exit code arrives at most two polls late."""

    def __init__(self, ray: Any, name: str, actor: Any, log: Path, started: Any) -> None:
        self.name, self.started = name, started
        self.log: Path | None = log
        self._ray, self._actor = ray, actor
        self._reply: Any = None  # to `poll`, in flight
        self._signals: list[int] = []  # sent at the next poll: a handler may run inside a call of Ray's
        self._code: int | None = None
        self._lost = ""

    def poll(self) -> int | None:
        while self._signals:
            self._actor.send_signal.remote(self._signals.pop(0))
        if self._code is None:
            self._reply = self._reply or self._actor.poll.remote()
            if self._ray.wait([self._reply], timeout=0)[0]:
                try:
                    self._code = self._ray.get(self._reply)
                except self._ray.exceptions.RayActorError as error:
                    self._code, self._lost = LOST, f"was lost with its Ray actor ({' '.join(str(error).split())[:200]})"
                self._reply = None
        return self._code

    def lost(self) -> str:
        return self._lost

    def send_signal(self, number: int) -> None:
        self._signals.append(number)

    def kill(self) -> None:
        self._ray.kill(self._actor)
        self._code = -signal.SIGKILL


class _Follower:
    """Prints the new text of a log."""

    def __init__(self, log: Path) -> None:
        self._log, self._printed = log, 0  # bytes

    def show(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._log, "rb") as file:
            file.seek(self._printed)
            text = file.read()
            self._printed += len(text)
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()


if __name__ == "__main__":
    become_train("ray")
