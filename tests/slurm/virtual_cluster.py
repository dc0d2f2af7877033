"""A real Slurm on this machine: slurmctld, munged, and a slurmd for each of four virtual nodes of eight fake GPUs.

Everything listens on the loopback device only. All state is in one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from megarl.parallel import hardware_queues
from tests.held_ports import held_port

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
NODES, GPUS = 4, 8
COMMAND_S = 300.0  # for a hang alone
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
START_S = 300.0  # for a hang alone
CONF = """\
ClusterName=virtual
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=60
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=100
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=main Nodes=node[0-{last}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Reason why Slurm cannot run here, else ""."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
    if hardware_queues.lowest_major() is not None:
        return "the jobs plan GPUs and run by the CPU, which a machine with GPUs refuses"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root alone"


class Cluster:
    """A running cluster; see `running`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MEGARL_HOME": str(ROOT),
            "PYTHONPATH": str(ROOT),
            "MEGARL_PYTHON": sys.executable,
            "MEGARL_INTERFACE": "lo",
            "MEGARL_PROBE_S": "15",
            "SLURM_EXPORT_ENV": "NONE",  # as in jobs of sites with SBATCH_EXPORT=NONE: steps must get the job's anyway
            "MEGARL_GRACE_S": "30",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    # -- daemons --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the daemons and waits until all nodes are idle."""
        folder = self.folder
        folder.chmod(0o711)  # munged requires a socket that other users can reach
        for name in ("munge", "spool", "state", "gpus"):
            (folder / name).mkdir(mode=0o711)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for gpu in range(GPUS):
            (folder / "gpus" / f"gpu{gpu}").symlink_to("/dev/null")  # Slurm requires a device
        ctld, *ports = (held_port() for _ in range(NODES + 1))
        nodes = "".join(
            f"NodeName=node{i} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=1000000 "
            f"Gres=gpu:{GPUS} State=UNKNOWN\n"
            for i, port in enumerate(ports)
        )
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, ctld=ctld, last=NODES - 1) + nodes)
        (folder / "gres.conf").write_text(
            f"NodeName=node[0-{NODES - 1}] Name=gpu File={folder}/gpus/gpu[0-{GPUS - 1}]\n"
        )
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._run("munged", "--foreground", *(f"--{name}={folder}/munge/{file}" for name, file in munge.items()))
        self.until(lambda: (folder / "munge" / "socket").exists(), START_S, "munged")
        self._run("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for i in range(NODES):
            self.start_node(f"node{i}")
        self.until(
            lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(NODES), START_S, "nodes"
        )

    def start_node(self, name: str) -> None:
        self._run(name, "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), program="slurmd")

    def give_up_node(self, name: str) -> None:
        """Marks a node as down, as slurmctld does after SlurmdTimeout."""
        self("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=silent")

    def kill_node(self, name: str) -> None:
        """Kills the node's daemon and all its processes, like a power cut."""
        daemon = self._processes.pop(name)
        daemon.kill()
        daemon.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()
                ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and environment.get("SLURMD_NODENAME") == name and "SLURM_STEP_ID" in environment:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        for parent in process.parents():
                            if parent.name().startswith("slurmstepd"):
                                parent.kill()
                    process.kill()

    def stop(self) -> None:
        """Cancels all jobs and ends the daemons."""
        if "slurmctld" in self._processes:
            self("scancel", "--user=root", check=False)
            with contextlib.suppress(TimeoutError):
                self.until(lambda: not self("squeue", "-h", check=False).strip(), COMMAND_S, "an empty queue")
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(COMMAND_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, name: str, *arguments: str, program: str = "") -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self._processes[name] = subprocess.Popen(
                [program or name, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment
            )

    def kill_sglang(self, job: str) -> None:
        """Kills the process of a job's only SGLang server."""
        servers = [process for process, line, _ in self._of(job) if "megarl.rollout.servers.sglang_server" in line]
        min(servers, key=lambda process: process.create_time()).kill()  # the others are its children

    # -- jobs -----------------------------------------------------------------------------------------------------

    def __call__(self, *command: str, check: bool = True) -> str:
        """Runs a Slurm command. Returns its output."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=COMMAND_S
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def sbatch(self, script: str, options: list[str], arguments: list[str]) -> str:
        """Submits a template of slurm/ and returns the job's number."""
        return self("sbatch", "--parsable", *options, str(ROOT / "slurm" / script), *arguments).strip()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        fields = dict(part.partition("=")[::2] for part in self("scontrol", "show", "job", job).split() if "=" in part)
        return fields[name]

    def output(self, job: str) -> str:
        """Output of the job's script so far."""
        files = list(self.folder.glob(f"*_{job}.out"))
        return files[0].read_text() if files else ""

    def ended(self, job: str, timeout_s: float) -> str:
        """Waits until the job has ended. Returns its state."""
        self.until(lambda: self.field(job, "JobState") in ENDED, timeout_s, lambda: f"the end of {self.output(job)}")
        return self.field(job, "JobState")

    def reaches(self, job: str, true: Callable[[], object], timeout_s: float, what: str) -> None:
        """Waits for a condition while the job runs."""
        self.until(lambda: true() or self.field(job, "JobState") in ENDED, timeout_s, lambda: what + self.output(job))
        assert true(), f"the job ended before {what}: {self.output(job)}"

    def until(self, true: Callable[[], object], timeout_s: float, what: str | Callable[[], str]) -> None:
        """Waits for a condition. Raises TimeoutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what if isinstance(what, str) else what()} did not come within {timeout_s:g} s")
            time.sleep(0.2)

    def left(self, job: str) -> list[str]:
        """Processes of a job that are still running."""
        return [f"{process.pid} {line}" for process, line, _ in self._of(job)]

    def tasks(self, job: str, node: str, module: str) -> int:
        """Number of a job's tasks on a node that run `python -m module`."""
        return sum(on == node and line.startswith(f"{sys.executable} -m {module} ") for _, line, on in self._of(job))

    def listening(self, job: str) -> set[str]:
        """Addresses that processes of a job listen on."""
        addresses = set()
        for process, _, _ in self._of(job):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = process.net_connections("inet")
                addresses |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        return addresses

    def listening_ports(self, job: str) -> set[int]:
        """Ports that processes of a job listen on."""
        ports = set()
        for process, _, _ in self._of(job):
            with contextlib.suppress(psutil.NoSuchProcess):
                ports |= {c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        return ports

    def gpus(self, job: str) -> set[str]:
        """GPUs that CUDA_VISIBLE_DEVICES offers to a job's trainers and servers."""
        offered: set[str] = set()
        for process, line, _ in self._of(job):
            if " -m megarl." in line:
                with contextlib.suppress(psutil.NoSuchProcess):
                    offered |= set(process.environ().get("CUDA_VISIBLE_DEVICES", "").split(","))
        return offered - {""}

    def _of(self, job: str) -> Iterator[tuple[psutil.Process, str, str]]:
        """Processes that a job started, each with its command line and its node."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()
                ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and environment.get("SLURM_JOB_ID") == job and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, " ".join(process.cmdline()), environment.get("SLURMD_NODENAME", "")


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Metrics of a run's steps; step 0, an evaluation, is left out."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row for row in rows if row["step"]]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster in an empty folder, ended with the block."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


if __name__ == "__main__":  # a cluster for experiments, until Ctrl-C
    with running(Path(sys.argv[1])) as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.pause()
