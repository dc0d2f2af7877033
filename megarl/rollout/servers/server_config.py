"""Knobs of the SGLang servers, their checks, and the device platform that decides how a server is launched."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.families.weight_formats import FORMATS, QUANTIZATIONS, ServedFormat
from megarl.knobs import MAX_COUNT, MAX_SECONDS, MAX_SEED, Range, UserError, check_ranges, knob, shown
from megarl.parallel import nccl_memory
from megarl.parallel.determinism import Determinism
from megarl.rollout.servers import batch_invariance, gpu_backends

# Linux gives outgoing connections ports above these, and SGLang takes its own from 22000 to 29999.
FREE_PORTS = range(10000, 22000)
MOVED_EXPERTS = "it moves experts, and weights are sent by the checkpoint's numbers of experts; leave it out"
# ServerArgs owned by a knob or by megarl, each with the way to change it.
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
    "quantization": "use the knob quantization",
    "kv_cache_dtype": "use the knob kv_cache_dtype",
    "admin_api_key": "a random api_key is made for each run",
    "custom_weight_loader": "megarl's weight receiver is loaded there",
    "config": "the arguments here are written to such a file",
    "enable_eplb": MOVED_EXPERTS,
    "init_expert_location": MOVED_EXPERTS,
    "ep_num_redundant_experts": MOVED_EXPERTS,
}
# ServerArgs that must stay at 1, with the reason.
MUST_BE_ONE = {
    "pp_size": "SGLang's live weight updates do not support pipeline parallelism",
    "dp_size": "SGLang's live weight updates do not support data-parallel replicas; use the knob n_servers",
    "nnodes": "a server is a child process of the trainer on this machine",
    "tokenizer_worker_num": "SGLang checks no API key with several tokenizer workers",
}

MAX_RANKS = 4096  # of all servers; a plan for more would take gigabytes
# ServerArgs that a plan reads, with the numbers that they take.
NUMBERS = {
    "mem_fraction_static": Range(above=0, below=1),
    "ep_size": Range(least=1, most=1024),
    "context_length": Range(least=1, most=MAX_COUNT),
}
COUNTS = ("ep_size", "context_length")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16", "auto")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")


@dataclass(frozen=True)
class SGLangServerConfig:
    """Start and supervision of the SGLang servers of a run."""

    n_servers: int = knob(1, "SGLang servers started on this machine", least=1, most=MAX_RANKS)
    tp_size: int = knob(1, "tensor-parallel ranks of one server", least=1, most=1024)
    host: str = knob("127.0.0.1", "address a server listens on")
    port: int = knob(0, "port of the first server, the others follow it; 0 picks free ports", least=0, most=65535)
    device: str = knob("auto", "auto | cpu | cuda; auto is cuda where torch finds a GPU", choices=DEVICES)
    dtype: str = knob(
        "float32", "dtype of the served weights: float32, bfloat16, float16 or auto (the checkpoint's)", choices=DTYPES
    )
    quantization: str = knob(
        "none",
        "weights of linear layers: none | fp8, a scale per 128 x 128 block | fp8_channel, a scale per output row | "
        "int4, a scale per 128 columns of a row; the trainer quantises before it sends",
        choices=QUANTIZATIONS,
    )
    quantization_aware: bool = knob(
        False,
        "the trainer computes with weights rounded as quantization says, and steps the full ones (straight-through)",
    )
    kv_cache_dtype: str = knob(
        "auto",
        "keys and values in the cache: auto is dtype; fp8_e4m3 holds twice as many tokens as 16 bits",
        choices=KV_CACHE_DTYPES,
    )
    max_total_tokens: int = knob(
        65536, "tokens the key/value cache holds; 0 lets SGLang size it from free memory", least=0, most=10**12
    )
    random_seed: int = knob(
        0, "seed of a server's sampling stream; server i gets random_seed + i", least=0, most=MAX_SEED
    )
    cpu_threads: int = knob(
        1, "OpenMP threads of a rank on CPU; more than one collapses beside busy processes", least=1, most=4096
    )
    ready_timeout_s: float = knob(600.0, "seconds a server may take until it answers", above=0, most=MAX_SECONDS)
    heartbeat_s: float = knob(
        10.0, "seconds between looks at a server, and until it must have answered one", above=0, most=MAX_SECONDS
    )
    max_restarts: int = knob(
        3, "times each server is started again after it died, hung or failed; 0: never", least=0, most=MAX_COUNT
    )
    colocate: bool = knob(False, "share the trainer's GPUs in turn: servers give up their memory while it trains")

    def __post_init__(self) -> None:
        check_ranges(self, "server")
        if (ranks := self.n_servers * self.tp_size) > MAX_RANKS:
            raise UserError(
                f"server.n_servers={self.n_servers} x server.tp_size={self.tp_size} makes {ranks} ranks, over the "
                f"{MAX_RANKS} that a run can have; lower one of them"
            )
        if self.port and self.port + self.n_servers > 2**16:
            raise UserError(
                f"server.port={self.port} with server.n_servers={self.n_servers} needs ports above 65535; lower it"
            )

    @property
    def format(self) -> ServedFormat | None:
        """Format of the linear layers' weights; None: they are as the others."""
        return FORMATS.get(self.quantization)


def check_numbers(sglang: Mapping[str, Any]) -> None:
    """Refuses numbers that no SGLang takes, and what is no number where a plan reads one. Needs no SGLang.

    Raises:
        UserError: naming the argument.
    """
    for key, value in sglang.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        declared = NUMBERS.get(key, Range(least=0 if isinstance(value, float) else -1))  # -1 turns many a limit off
        if (is_number and not declared.holds(value)) or (key in NUMBERS and value is not None and not is_number):
            raise UserError(f"sglang.{key}={shown(value)} must be {declared}; change it or leave it out")
        if key in COUNTS and isinstance(value, float):
            raise UserError(f"sglang.{key}={shown(value)} must be a whole number; change it or leave it out")


@functools.cache
def server_arg_options() -> dict[str, str]:
    """SGLang's ServerArgs fields with the command-line option of each (`{"tp_size": "tp-size", ...}`).

    They are parsed from SGLang's source, because importing it takes seconds.

    Raises:
        UserError: SGLang is not installed, or has another version.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UserError(
            "SGLang is not installed, and rollouts need it: run `make setup` on a machine without a GPU, "
            'or `pip install "sglang[all]==0.5.23"` on one with a GPU'
        )
    options: dict[str, str] = {}
    for source in (Path(spec.origin).parent / "srt" / "arg_groups" / "fields").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                cli_names = [
                    k.value for k in ast.walk(node.annotation) if isinstance(k, ast.keyword) and k.arg == "cli_name"
                ]
                options[name] = ast.literal_eval(cli_names[0]).lstrip("-") if cli_names else name.replace("_", "-")
    if "model_path" not in options:
        raise UserError(f"{spec.origin} is not SGLang 0.5.23: its ServerArgs fields were not found; run `make setup`")
    return options


def check_server_config(config: SGLangServerConfig, model_path: str | Path, sglang: Mapping[str, Any]) -> None:
    """Refuses every mistake that can be known before a server starts.

    Raises:
        UserError: the first mistake, in one line.
    """
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
    if uses_gpu(config):
        gpu_backends.check_backends(config.dtype, sglang, config.colocate)
    if config.colocate and uses_gpu(config) and not has_memory_saver():
        raise UserError(
            "server.colocate=true needs the package torch_memory_saver, with which servers give up their memory; "
            "pip install -r requirements/gpu.txt, or set it to false"
        )
    if not (Path(model_path) / "config.json").is_file():
        raise UserError(f"{model_path} is not a model folder: it has no config.json; give a local HF checkpoint folder")
    if config.port:
        for port in range(config.port, config.port + config.n_servers):
            if not port_is_free(config.host, port):
                raise UserError(f"port {port} on {config.host} is in use; free it, or set server.port=0 for a free one")


def quantisation_arguments(config: SGLangServerConfig, sglang: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's ServerArgs of a quantised server, which begins without weights: the first sync brings them.

    Raises:
        UserError: an argument of the user's own is needed here.
    """
    if config.format is None:
        return {}
    entry = json.dumps({"quantization_config": config.format.config})
    chosen = {"json_model_override_args": entry, "load_format": "dummy"}
    for name in chosen:
        if name in sglang:
            raise UserError(
                f"sglang.{name}={sglang[name]!r} cannot be set with server.quantization={config.quantization}, which "
                "needs it; leave it out, or set server.quantization=none"
            )
    return chosen


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def hold_ports(host: str, count: int) -> list[socket.socket]:
    """Binds sockets to `count` ports of `host` that nobody has, and returns them.

    They do not listen, so a server that sets SO_REUSEADDR, as SGLang's does, may have the port. Nobody else is given it
    here while they are open: a server needs a minute from the choice of its port until it listens.

    Raises:
        UserError: fewer ports are free.
    """
    held: list[socket.socket] = []
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        if len(held) == count:
            break
        probe = socket.socket()
        try:
            probe.bind((host, port))
        except OSError:
            probe.close()
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on: a held port is not free
        held.append(probe)
    if len(held) < count:
        for probe in held:
            probe.close()
        raise UserError(
            f"{host} has no {count} free ports in {FREE_PORTS.start}-{FREE_PORTS.stop - 1}; set server.port"
        )
    return held


def uses_gpu(config: SGLangServerConfig) -> bool:
    """True if the servers run on CUDA."""
    if config.device != "auto":
        return config.device == "cuda"
    return gpu_count() > 0


def has_memory_saver() -> bool:
    """True if servers can give up GPU memory: SGLang does it by this package."""
    return importlib.util.find_spec("torch_memory_saver") is not None


def gpu_count() -> int:
    """Number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class ServerPlatform:
    """Everything about a server that depends on its device: SGLang's arguments and environment."""

    device: str
    prepare_module: str  # its `prepare` runs before SGLang is imported; "": none
    arguments: Mapping[str, Any]
    environment: Callable[[str], dict[str, str]]  # by the server's scratch folder
    gpus: int = 0  # of this machine


def choose_platform(
    config: SGLangServerConfig, sglang: Mapping[str, Any], deterministic: Determinism
) -> ServerPlatform:
    """The platform of a run's servers, chosen once. `sglang` holds the user's own ServerArgs.

    Raises:
        UserError: there is no GPU, and this megarl has no `megarl/cpu`; or a deterministic run's mode does not take
            the servers' arguments.
    """
    if uses_gpu(config):
        arguments = gpu_backends.arguments(config.dtype, config.quantization)
        environment = gpu_backends.environment(config.dtype)
        if config.colocate:
            arguments |= gpu_backends.COLOCATED
            environment |= gpu_backends.COLOCATED_ENVIRONMENT
        environment[nccl_memory.VARIABLE] = nccl_memory.setting(sglang)
        if deterministic.is_on:
            batch_invariance.check(config.dtype, config.kv_cache_dtype, sglang)
            arguments |= batch_invariance.ARGUMENTS
            environment |= batch_invariance.ENVIRONMENT

        def variables(scratch: str) -> dict[str, str]:
            # Ranks meet by a file: torch's TCP store listens on every address, and its port may be another server's.
            return {**environment, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"}

        return ServerPlatform("cuda", "", arguments, variables, gpu_count())
    if importlib.util.find_spec("megarl.cpu") is None:
        raise UserError("SGLang runs on CPU by the folder megarl/cpu, which is missing; restore it, or use a GPU")
    from megarl.cpu import sglang_platform

    return ServerPlatform(
        "cpu",
        sglang_platform.PREPARE_MODULE,
        sglang_platform.arguments(config.tp_size, deterministic.is_on, given=sglang),
        lambda scratch: sglang_platform.environment(
            scratch, config.tp_size, config.cpu_threads, deterministic.summands
        ),
    )
