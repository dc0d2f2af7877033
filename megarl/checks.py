"""Validates a run before anything is started: the one place for rules that span stages.

Every rule is a function that raises UserError, with the value, the rule and the remedy in one line. The lists below
hold them as callables. A run stops at the first that raises; `megarl.preflight` reports all.

    config_checks     knobs against each other                         cli.load, of every command
    size_checks       counts and layout, without which no byte can be planned
    model_checks      knobs against the model's config                 trainer/inputs.py, on every rank
    length_checks     prompt and completion lengths                    where the run's data is read
    server_checks     the servers' arguments                           where servers are started
    machine_checks    devices of this machine; preflight plans for other machines and leaves them out
    kernel_checks     the model's config against these devices; likewise
    gpu_count_checks  GPUs for the ranks and servers that a command starts here; by that command alone
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from megarl import gpu_checks
from megarl.actor import checks as actor_checks
from megarl.algorithms import RLConfig, algorithm_of, name_of
from megarl.algorithms.gdpo import GDPOConfig
from megarl.config import Config, is_paired, longest_sequence
from megarl.data.checks import data_checks
from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.rollout.client.sglang_client import ADDRESSES_VARIABLE, addresses_in_environment
from megarl.rollout.servers import batch_invariance
from megarl.rollout.servers.gpu_backends import check_backends
from megarl.rollout.servers.gpu_placement import check_gpu_count
from megarl.rollout.servers.server_config import check_numbers, check_server_config, gpu_count, uses_gpu
from megarl.rollout.workflows.choose import check_workflow
from megarl.served_checks import check_cache_on_gpus, served_checks, servers_on_gpu
from megarl.teacher_checks import check_teacher, teacher_servers

Check = Callable[[], object]


# -- lists ------------------------------------------------------------------------------------------------------------


def config_checks(config: Config) -> Sequence[Check]:
    """Checks of knobs, alone and against each other. They need no model and no data."""
    by_method = {
        "rl": (
            _check_algorithm,
            _check_sampling,
            _check_minibatches,
            _check_deadlines,
            _check_server_backends,
            _check_transport,
            _check_colocation,
            _check_overlap_scoring,
        ),
        "preference": (_check_preferences,),
    }
    rules = (
        _check_backend,
        _check_tp_comm_overlap,
        _check_steps,
        _check_deterministic,
        check_teacher,
        _check_adapters,
        *by_method.get(config.method, ()),
        _check_tokens,
    )
    data = data_checks(config.method, config.train_dataset, config.valid_dataset, config.curriculum)
    numbers = partial(check_numbers, config.sglang)
    return [numbers, *(partial(rule, config) for rule in rules), *data, *_engine_checks(config)]


def size_checks(config: Config, model: PretrainedConfig) -> Sequence[Check]:
    """Checks of counts and layout. Ranks, batches and bytes can be worked out once all of them pass."""
    return [
        partial(check_numbers, config.sglang),
        *_engine_checks(config),
        config.parallel.world_size,
        *actor_checks.model_checks(config.actor, config.parallel, model, config.determinism),
    ]


def model_checks(config: Config, model: PretrainedConfig) -> Sequence[Check]:
    """Checks of knobs against the model's config."""
    return [*size_checks(config, model), *served_checks(config, model)]


def length_checks(config: Config, model: PretrainedConfig) -> Sequence[Check]:
    """Checks of the lengths of prompts, completions and examples. A run that brings its own data has none."""
    names = ("train_dataset", "valid_dataset") if config.method == "rl" else ("train_dataset",)
    return [partial(_check_length, config, model, name) for name in names]


def server_checks(config: Config, folder: Path) -> Sequence[Check]:
    """Checks of the rollout servers' arguments; `folder` holds the model's config.json. They need SGLang installed."""
    return [partial(check_server_config, config.server, folder, config.sglang)] if config.method == "rl" else []


def machine_checks(config: Config) -> Sequence[Check]:
    """Checks of this machine's driver, kernels and devices. With Ray, ranks on other machines make them."""
    if _runs_elsewhere(config):
        return []
    return [
        gpu_checks.check_driver,
        partial(gpu_checks.check_gpus_seen, config.cluster.gpus_per_node),
        gpu_checks.check_kernels,
        *actor_checks.device_checks(config.actor, config.parallel, config.determinism),
    ]


def kernel_checks(config: Config, model: PretrainedConfig) -> Sequence[Check]:
    """Checks of the model against this machine's devices. With Ray, ranks on other machines make them."""
    if _runs_elsewhere(config):
        return []
    of_model = config.actor, config.parallel, model, config.determinism
    checks = actor_checks.kernel_checks(*of_model, longest_sequence(config))
    return [*checks, partial(check_cache_on_gpus, config, model, platform.compute_capability())]


def _runs_elsewhere(config: Config) -> bool:
    return config.launcher == "ray" and "RANK" not in os.environ


def gpu_count_checks(config: Config) -> Sequence[Check]:
    """Checks that this machine has a GPU for each rank and server that the command starts on it."""
    if config.launcher != "local" or not platform.has_gpu() or "RANK" in os.environ:
        return []
    server, on_gpu = config.server, uses_gpu(config.server)
    own_servers = config.method == "rl" and on_gpu and not addresses_in_environment()
    counts = config.parallel.world_size(), server.n_servers if own_servers else 0, server.tp_size
    teacher = teacher_servers(config) if on_gpu else None
    teacher_gpus = teacher.n_servers * teacher.tp_size if teacher is not None else 0
    return [partial(check_gpu_count, gpu_count(), *counts, server.colocate, teacher_gpus)]


def _engine_checks(config: Config) -> Sequence[Check]:
    return actor_checks.knob_checks(config.actor, config.parallel, config.determinism)


def failures(checks: Iterable[Check]) -> list[str]:
    """Messages of all checks that fail, each once."""
    messages = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages.append(str(error))
    return list(dict.fromkeys(messages))


# -- rules between knobs ----------------------------------------------------------------------------------------------


def _check_backend(config: Config) -> None:
    if config.actor.backend == "cpu" and config.cluster.gpus_per_node > 0:
        raise UserError(
            "actor.backend=cpu is for machines without a GPU, and "
            f"cluster.gpus_per_node={config.cluster.gpus_per_node}; set actor.backend=auto"
        )


def _check_steps(config: Config) -> None:
    steps = config.total_train_steps
    config.logger.check_length(steps)
    optimizers = {"actor.optimizer": config.actor.optimizer, "critic_optimizer": config.critic_optimizer}
    for path, optimizer in optimizers.items():
        optimizer.check(path)
        if optimizer.warmup_steps >= steps:
            raise UserError(
                f"{path}.warmup_steps={optimizer.warmup_steps} must be below total_train_steps={steps}; lower one or "
                "raise the other"
            )
        optimizer.check_length(steps, path)


def _check_deterministic(config: Config) -> None:
    """Refuses deterministic runs without rollouts, and servers that would compute otherwise than the form asks."""
    if not config.determinism.is_on:
        return
    if config.method != "rl":
        raise UserError(f"deterministic=true is about rollouts, which method={config.method} has none of; leave it out")
    on_gpu = config.determinism.by_library
    if config.server.device == ("cpu" if on_gpu else "cuda"):
        trainer = "runs on GPUs" if on_gpu else "has no GPU"
        raise UserError(
            f"server.device={config.server.device} does not go with deterministic=true, whose servers are on "
            f"devices like the trainer's, which {trainer}; set it to auto, or deterministic=false"
        )
    if on_gpu:
        batch_invariance.check(config.server.dtype, config.server.kv_cache_dtype, config.sglang)
        return
    for name, only in (("dtype", "float32"), ("kv_cache_dtype", "auto"), ("cpu_threads", 1)):
        if (value := getattr(config.server, name)) != only:
            raise UserError(f"server.{name}={value} must be {only} with deterministic=true; change one of them")
    if config.server.tp_size.bit_count() != 1:
        raise UserError(
            f"server.tp_size={config.server.tp_size} must be a power of two with deterministic=true, which adds the "
            "ranks' products in pairs; change one of them"
        )


def _check_algorithm(config: Config) -> None:
    if not isinstance(config.algorithm, RLConfig):
        raise UserError(
            f"method=rl: algorithm={name_of(config.algorithm)} learns from preferences; choose one of rollouts, such "
            "as grpo, or method=preference"
        )
    config.algorithm.check()
    algorithm = algorithm_of(config.algorithm)
    check_workflow(config.rollout, algorithm.workflow, type(algorithm).__name__)
    if algorithm.workflow == "remax" and config.curriculum.skip != "off":
        raise UserError(
            f"curriculum.skip={config.curriculum.skip} goes by rewards, and ReMax's samples carry their difference to "
            "the greedy completion's; set it to off"
        )
    if isinstance(config.algorithm, GDPOConfig) and config.rewards.weights:
        raise UserError(
            f"rewards.weights={list(config.rewards.weights)}: GDPO weights each reward's advantages and not their sum; "
            "set algorithm.reward_weights"
        )
    if config.gconfig.n_samples < algorithm.min_group:
        raise UserError(
            f"gconfig.n_samples={config.gconfig.n_samples}: {type(algorithm).__name__} compares the completions of a "
            f"prompt and needs at least {algorithm.min_group}"
        )


def _check_sampling(config: Config) -> None:
    if config.actor.init != "checkpoint":
        raise UserError(f"actor.init={config.actor.init} is for method=sft: the rollout servers load actor.path")
    if config.gconfig.greedy:
        raise UserError("gconfig.greedy=true: completions of a prompt would all be alike, and nothing learned; sample")
    if config.actor.temperature != config.gconfig.temperature:
        raise UserError(
            f"actor.temperature={config.actor.temperature} must equal gconfig.temperature="
            f"{config.gconfig.temperature}: the trainer's log-probs are compared with the rollout's"
        )


def _check_minibatches(config: Config) -> None:
    if not isinstance(config.algorithm, RLConfig) or config.algorithm.n_minibatches < 1:
        return  # refused by `_check_algorithm`
    prompts, samples, parts = config.train_dataset.batch_size, config.gconfig.n_samples, config.algorithm.n_minibatches
    if (prompts * samples) % parts:
        raise UserError(
            f"train_dataset.batch_size={prompts} x gconfig.n_samples={samples} = {prompts * samples} sequences do not "
            f"divide into algorithm.n_minibatches={parts}; make {parts} divide {prompts * samples}"
        )
    replicas = config.parallel.sizes()["dp_size"]
    if (prompts * samples // parts) % replicas:
        raise UserError(
            f"a minibatch has {prompts} x {samples} / {parts} = {prompts * samples // parts} sequences, which "
            f"parallel.dp_size={replicas} does not divide; change batch_size, n_samples or dp_size"
        )


def _check_colocation(config: Config) -> None:
    """Refuses co-located servers where trainer and servers cannot hand the GPUs to each other."""
    if not config.server.colocate:
        return
    if config.launcher != "local":
        raise UserError(
            f"server.colocate=true shares the GPUs of one machine, and launcher={config.launcher} places servers by "
            "itself; use launcher=local"
        )
    if addresses_in_environment():
        raise UserError(
            f"server.colocate=true is for servers that the run starts; unset {ADDRESSES_VARIABLE}, or set it to false"
        )
    if (staleness := config.rollout.max_head_offpolicyness) > 0:
        raise UserError(
            f"rollout.max_head_offpolicyness={staleness} samples while the trainer updates, and server.colocate=true "
            "gives the GPUs to one of them; set it to 0"
        )
    if config.reshard.delta:
        raise UserError(
            "reshard.delta=true sends what changed, and with server.colocate=true the servers keep no weights; "
            "set it to false"
        )
    if config.reshard.transport == "nccl":
        raise UserError(
            "reshard.transport=nccl refuses two processes on one GPU, which server.colocate=true brings; use cuda_ipc"
        )


def _check_overlap_scoring(config: Config) -> None:
    """Refuses to score beside a sync where there is no batch to score, or the weights cannot be read by both."""
    if not config.reshard.overlap_scoring:
        return
    if config.rollout.max_head_offpolicyness == 0:
        raise UserError(
            "reshard.overlap_scoring=true scores a batch of older weights while the servers receive new ones, and "
            "rollout.max_head_offpolicyness=0 has none; raise it, or set overlap_scoring to false"
        )
    if config.server.format is not None:
        raise UserError(
            f"reshard.overlap_scoring=true reads weights beside the trainer's passes, and server.quantization="
            f"{config.server.quantization} rounds them on all ranks together; set one of them to its default"
        )
    if config.adapters:
        raise UserError(
            f"reshard.overlap_scoring=true is for one policy, and adapters={list(config.adapters)} take turns; set it "
            "to false"
        )


def _check_deadlines(config: Config) -> None:
    if config.parallel.world_size() > 1 and config.parallel.timeout_s <= config.rollout.batch_timeout_s:
        raise UserError(
            f"parallel.timeout_s={config.parallel.timeout_s:g} must exceed rollout.batch_timeout_s="
            f"{config.rollout.batch_timeout_s:g}: the other ranks wait in a collective while rank 0 samples"
        )


def _check_server_backends(config: Config) -> None:
    """Refuses SGLang's backends that servers on GPUs cannot use with this dtype and live weight updates."""
    if servers_on_gpu(config):
        check_backends(config.server.dtype, config.sglang, config.server.colocate)


def _check_transport(config: Config) -> None:
    """Refuses transports that the planned machines rule out. The first sync looks at the real ones."""
    transport, per_node = config.reshard.transport, config.cluster.gpus_per_node
    ranks, servers = config.parallel.world_size(), config.server.n_servers * config.server.tp_size
    if transport in ("nccl", "cuda_ipc") and not servers_on_gpu(config):
        raise UserError(
            f"reshard.transport={transport} moves weights between GPUs, and the servers run on the CPU (server.device="
            f"{config.server.device}, cluster.gpus_per_node={per_node}); use gloo or shm"
        )
    package = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}.get(transport)  # by the name of its module
    if package is not None and importlib.util.find_spec(transport) is None:
        raise UserError(
            f"reshard.transport={transport} needs the package {package} on trainer and servers: pip install {package}, "
            "or use auto"
        )
    gpus = max(ranks, servers) if config.server.colocate else ranks + servers
    if transport in ("shm", "cuda_ipc") and 0 < per_node < gpus:
        raise UserError(
            f"reshard.transport={transport} stays on one machine, and {ranks} trainer ranks with {servers} server "
            f"ranks exceed cluster.gpus_per_node={per_node}; use nccl or gloo"
        )


def _check_tp_comm_overlap(config: Config) -> None:
    per_node, tp = config.cluster.gpus_per_node, config.parallel.tp_size
    if config.parallel.tp_comm_overlap and 0 < per_node < tp:
        raise UserError(
            f"parallel.tp_comm_overlap=true stays on one machine, and parallel.tp_size={tp} exceeds cluster."
            f"gpus_per_node={per_node}; set it to false or lower tp_size"
        )


def _check_adapters(config: Config) -> None:
    if config.actor.lora.sync == "adapters" and not config.actor.lora.rank:
        raise UserError("actor.lora.sync=adapters without adapters (actor.lora.rank=0) has nothing to send; set a rank")
    if config.adapters and (config.method != "rl" or config.actor.lora.sync != "adapters"):
        raise UserError(
            f"adapters={list(config.adapters)} needs method=rl and actor.lora.sync=adapters, and the run has method="
            f"{config.method} and sync={config.actor.lora.sync}: servers keep its adapters apart; set them, or leave "
            "adapters out"
        )
    if config.actor.lora.rank and config.actor.init == "random":
        raise UserError(
            f"actor.lora.rank={config.actor.lora.rank} with actor.init=random would train adapters of a base that no "
            "file holds; set init=checkpoint"
        )


def _check_preferences(config: Config) -> None:
    if isinstance(config.algorithm, RLConfig):
        raise UserError(
            f"method=preference: algorithm={name_of(config.algorithm)} learns from rollouts; choose one of "
            "preferences, such as dpo, or method=rl"
        )
    config.algorithm.check()
    if config.actor.mtp == "train":
        raise UserError("actor.mtp=train with method=preference would also learn rejected completions; set it to carry")
    rows, replicas = config.train_dataset.batch_size, config.parallel.sizes()["dp_size"]
    if rows % replicas:
        raise UserError(
            f"train_dataset.batch_size={rows} rows are not divided by parallel.dp_size={replicas}; a row's two "
            "sequences stay together, so change one of them"
        )


def _check_tokens(config: Config) -> None:
    """Refuses sequences, or pairs of them, that no microbatch can hold."""
    longest, limit, paired = longest_sequence(config), config.actor.max_tokens_per_mb, is_paired(config)
    held_out = config.valid_dataset.max_length
    if config.method == "rl" and held_out is not None and (total := held_out + config.gconfig.max_new_tokens) > limit:
        raise UserError(
            f"valid_dataset.max_length={held_out} + gconfig.max_new_tokens={config.gconfig.max_new_tokens} = {total} "
            f"tokens do not fit into actor.max_tokens_per_mb={limit}, the limit of every sample; raise it to at least "
            f"{total}"
        )
    if longest is None:
        return
    needed = longest * (2 if paired else 1)
    if needed <= limit:
        return
    equation = f"train_dataset.max_length={config.train_dataset.max_length}"
    if config.method == "rl":
        equation += f" + gconfig.max_new_tokens={config.gconfig.max_new_tokens} = {needed}"
    elif paired:
        equation += f" x 2 of a pair = {needed}"
    raise UserError(f"{equation} tokens do not fit into actor.max_tokens_per_mb={limit}; raise it to at least {needed}")


# -- rules against the model ------------------------------------------------------------------------------------------


def _check_length(config: Config, model: PretrainedConfig, name: str) -> None:
    """Refuses a data set without a length limit, and sequences beyond the model's positions."""
    max_length, positions = getattr(config, name).max_length, model.max_position_embeddings
    if max_length is None:
        rows = "prompt" if config.method == "rl" else "row"
        raise UserError(f"{name}.max_length is not set; give the longest {rows} in tokens, longer ones are skipped")
    if config.method != "rl":
        if max_length > positions:
            raise UserError(
                f"{name}.max_length={max_length} exceeds the model's max_position_embeddings={positions}; shorten it"
            )
        return
    new_tokens = config.gconfig.max_new_tokens
    if max_length + new_tokens > positions:
        raise UserError(
            f"{name}.max_length={max_length} + gconfig.max_new_tokens={new_tokens} = {max_length + new_tokens} exceeds "
            f"the model's max_position_embeddings={positions}; shorten one of them"
        )
