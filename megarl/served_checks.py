"""Rules of the models and layouts that SGLang's servers run, of method=rl."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from megarl.actor.weights.adapter_shards import shape_of
from megarl.actor.weights.shards import world_table
from megarl.algorithms import OPDConfig
from megarl.config import Config, longest_sequence, server_arguments, server_ep_size
from megarl.families import CONTAINERS, FAMILIES, decoder, quantisation, without_mtp
from megarl.families.adapters import SERVED
from megarl.families.blocks import Attention, LatentAttention
from megarl.families.weight_formats import ServedFormat
from megarl.knobs import UserError, shown
from megarl.parallel import platform
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.quantised import quantised_sources
from megarl.reshard.plan.sglang_adapters import adapter_holdings
from megarl.reshard.plan.sglang_layout import NEURONS, Geometry, padded_for_cpu
from megarl.rollout.servers import batch_invariance, gpu_backends
from megarl.rollout.servers.served_adapters import ServedAdapters, check_options
from megarl.rollout.servers.server_config import quantisation_arguments

MOST_ADAPTERS = 64
# ServerArgs without which SGLang records no experts. Of its backends for experts, megarl takes two that record them.
# Caches outside the GPU bring tokens back without their routes, and overlapped batches write theirs over each other.
REPLAY_OPTIONS: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_two_batch_overlap": False,
}
PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a valid folder name


def served_checks(config: Config, model: PretrainedConfig) -> Sequence[Callable[[], object]]:
    """Checks that servers can run the model in their layout; none without rollouts."""
    rules = (
        _check_layout,
        _check_windows,
        _check_sinks,
        _check_class,
        _check_sparse,
        _check_weights,
        _check_adapters,
        _check_replay,
        _check_quantisation,
        _check_cache,
        _check_deterministic,
    )
    return [partial(rule, config, model) for rule in rules] if config.method == "rl" else []


def adapters_on_servers(config: Config) -> ServedAdapters | None:
    """The adapters that syncs bring to servers alone; None where they bring all weights."""
    shape = shape_of(config.actor.lora) if config.actor.lora.sync == "adapters" else None
    return None if shape is None else ServedAdapters(shape, adapter_names(config))


def adapter_names(config: Config) -> tuple[str, ...]:
    """Names of the adapters that servers hold: the keys of `adapters`, else the one of an ordinary run."""
    return tuple(config.adapters) or (SERVED,)


def sampling_adapter(config: Config) -> str:
    """Name of the servers' adapter that samples; "" where the merged model does."""
    return SERVED if adapters_on_servers(config) is not None else ""


def servers_on_gpu(config: Config) -> bool:
    """True if the servers will hold their weights on GPUs."""
    if config.server.device != "auto":
        return config.server.device == "cuda"
    return config.cluster.gpus_per_node > 0 or platform.takes_gpu_options()


def _check_windows(config: Config, model: PretrainedConfig) -> None:
    """Refuses rollouts of a model whose window SGLang ignores: its samples would be of another model."""
    window = max(block.window for block in decoder(model).attentions)
    longest = longest_sequence(config) or model.max_position_embeddings
    if 0 < window < longest and not FAMILIES[model.model_type].sglang_windows:
        raise UserError(
            f"SGLang has no sliding windows for {model.model_type}, and this model's of {window} tokens is below "
            f"sequences of {longest}; lower train_dataset.max_length and gconfig.max_new_tokens, or train without "
            "rollouts (method=sft)"
        )


def _check_sinks(config: Config, model: PretrainedConfig) -> None:
    """Refuses servers whose attention takes no sinks (model_hook.py:538 of SGLang 0.5.23)."""
    sinks = any(block.sinks for block in decoder(model).attentions)
    if sinks and (not servers_on_gpu(config) or config.server.dtype == "float32"):
        raise UserError(
            f"SGLang's attention on CPUs and in float32 has no sinks, as this {model.model_type} model has; serve it "
            "on GPUs in bfloat16 (server.device=cuda server.dtype=bfloat16), or train without rollouts (method=sft)"
        )


def _check_class(config: Config, model: PretrainedConfig) -> None:
    """Refuses rollouts of gated delta nets that SGLang 0.5.23 does not run: qwen3_5.py:284 and its cache on CPUs."""
    container = next((name for name, text in CONTAINERS.items() if text == model.model_type), None)
    if decoder(model).delta_net is None:
        return
    if container is not None and model.architectures:  # not the text part of a multimodal checkpoint
        raise UserError(
            f"SGLang has no class for a checkpoint of type {model.model_type} alone; give the multimodal one of type "
            f"{container} that holds it, or train without rollouts (method=sft)"
        )
    if not servers_on_gpu(config):
        raise UserError(
            f"SGLang does not serve {container or model.model_type} on CPUs; serve it on GPUs (server.device=cuda), or "
            "train without rollouts (method=sft)"
        )


def _check_sparse(config: Config, model: PretrainedConfig) -> None:
    """Refuses models whose list of layers with experts differs from SGLang's rule: SGLang reads no list."""
    family, sparse = FAMILIES[model.model_type], decoder(model).sparse
    served = tuple(family.experts and index >= family.sglang_dense(model) for index in range(len(sparse)))
    for index, (here, there) in enumerate(zip(sparse, served, strict=True)):
        if here != there:
            has, lacks = ("an MLP", "experts") if there else ("experts", "an MLP")
            raise UserError(
                f"layer {index} of this {model.model_type} model has {has}, and SGLang gives it {lacks}: it reads no "
                "mlp_only_layers, decoder_sparse_step or mlp_layer_types; train without rollouts (method=sft)"
            )


def _check_weights(config: Config, model: PretrainedConfig) -> None:
    """Refuses servers that would start from quantised weights: they could not take the trainer's."""
    if method := quantisation(model):
        raise UserError(
            f"actor.path={config.actor.path} has weights quantised by '{method}', and servers with live updates need "
            "plain ones; write them in bfloat16 first (python -m megarl.export "
            f"checkpoint={config.actor.path} output=DIR dtype=bfloat16)"
        )


def _check_layout(config: Config, model: PretrainedConfig) -> None:
    """Refuses servers on GPUs with uneven heads. SGLang on CPU pads them."""
    tp, heads = config.server.tp_size, model.num_attention_heads
    if servers_on_gpu(config) and tp >= 1 and heads % tp:
        raise UserError(
            f"server.tp_size={tp} does not divide the model's num_attention_heads={heads}; choose a divisor"
        )


def _check_replay(config: Config, model: PretrainedConfig) -> None:
    """Refuses `algorithm.routing_replay` where experts cannot be replayed, or servers do not return their choice."""
    if (mode := getattr(config.algorithm, "routing_replay", "off")) == "off":
        return
    knob = f"algorithm.routing_replay={mode}"
    if decoder(model).experts is None:
        raise UserError(f"{knob} replays the choice of experts, and {model.model_type} is dense; set it to off")
    if isinstance(config.algorithm, OPDConfig):
        raise UserError(
            f"{knob} is about a policy and its own samples, and algorithm=opd has a teacher's; set it to off"
        )
    if mode != "rollout":
        return
    if config.rollout.rollout_func:
        raise UserError(
            f"{knob} needs the servers' choice of experts, and "
            f"rollout.rollout_func={shown(config.rollout.rollout_func)} returns tokens alone; use a workflow, "
            "or set it to off"
        )
    for option, needed in REPLAY_OPTIONS.items():
        if (value := config.sglang.get(option, needed)) != needed:
            raise UserError(f"{knob}: with sglang.{option}={value} SGLang does not record experts; leave {option} out")


def _check_adapters(config: Config, model: PretrainedConfig) -> None:
    """Refuses syncs of adapters alone that servers cannot take."""
    if (adapters := adapters_on_servers(config)) is None:
        return
    _check_names(tuple(config.adapters))
    adapter_holdings(model, adapters.shape, tp_size=1)  # refuses the family
    check_options(config.sglang)
    for option, is_set, reason, remedy in (
        ("reshard.path=full", config.reshard.path == "full", "whole tensors are of the base", "exact"),
        ("reshard.transport=disk", config.reshard.transport == "disk", "files hold tensors of the base", "auto"),
        ("server.colocate=true", config.server.colocate, "servers lose the base with their memory", "false"),
    ):
        if is_set:
            raise UserError(
                f"{option} does not go with actor.lora.sync=adapters: {reason}; set it to {remedy}, or "
                "actor.lora.sync=merged"
            )


def _check_quantisation(config: Config, model: PretrainedConfig) -> None:
    """Refuses quantised servers that cannot take the trainer's weights, and layouts that cut a block."""
    server, adapters = config.server, adapters_on_servers(config)
    if config.server.quantization_aware:
        _check_quantization_aware(config)
    if server.format is None:
        return
    quantisation_arguments(server, server_arguments(config))
    for option, is_set, reason, remedy in (
        ("reshard.path=full", config.reshard.path == "full", "whole tensors travel unquantised", "exact"),
        ("reshard.transport=disk", config.reshard.transport == "disk", "files hold unquantised tensors", "auto"),
        ("server.colocate=true", server.colocate, "trainer and servers on one GPU have not been tried", "false"),
        ("deterministic=true", config.deterministic, "products with them depend on the batch", "false"),
        ("actor.lora.sync=adapters", adapters is not None, "the base would never be quantised", "merged"),
        (
            f"server.dtype={server.dtype}",
            servers_on_gpu(config) and server.dtype not in ("bfloat16", "float16"),
            "SGLang's quantised layers on GPUs take 16-bit activations",
            "bfloat16",
        ),
        (
            "server.dtype=float16",
            server.dtype == "float16" and server.format.scales.dtype == "bfloat16",
            "scales in bfloat16 lose bits there",
            "bfloat16",
        ),
    ):
        if is_set:
            raise UserError(
                f"{option} does not go with server.quantization={server.quantization}: {reason}; set it to {remedy}, "
                "or server.quantization=none"
            )
    padded = model if servers_on_gpu(config) else padded_for_cpu(model, server.tp_size)
    for rank in range(server.tp_size):
        geometry = Geometry.of(padded, rank, server.tp_size, server_ep_size(config), server.format)
        if servers_on_gpu(config):
            _check_tiles(geometry, server.format)
    sources = source_holdings(world_table(without_mtp(model), config.parallel))
    quantised_sources(sources, server.format, config.parallel)


def _check_tiles(geometry: Geometry, format: ServedFormat) -> None:
    """Refuses layers whose rows on a rank are no whole tiles of SGLang's kernel for the format."""
    for layer, padded in set(geometry.layers):
        for parameter in geometry.layer_parameters(layer, padded):
            rows = parameter.shape[0]
            is_layer = len(parameter.shape) == 2 and format.piece_of(parameter.parts[0].box.name) is format.values
            if is_layer and rows % format.tile_rows:  # experts have other kernels
                raise UserError(
                    f"server.quantization={format.name}: a server rank at server.tp_size={geometry.rank.tp_size} holds "
                    f"{rows} rows of {parameter.name}, and SGLang's kernel takes multiples of {format.tile_rows}; take "
                    "a tp_size that leaves such, or set server.quantization=none"
                )


def _check_cache(config: Config, model: PretrainedConfig) -> None:
    """Refuses an 8-bit cache on CPUs for models whose cache is not keys and values of heads."""
    if config.server.kv_cache_dtype == "auto" or servers_on_gpu(config):
        return
    for layer in decoder(model).layers:
        if not isinstance(layer.attention, Attention):
            raise UserError(
                f"server.kv_cache_dtype={config.server.kv_cache_dtype}: SGLang on CPUs has no such cache for "
                f"{model.model_type}, which keeps other state than keys and values; set it to auto"
            )


def check_cache_on_gpus(config: Config, model: PretrainedConfig, capability: tuple[int, int] | None) -> None:
    """Refuses an 8-bit cache on GPUs of this compute capability whose attention cannot read it.

    Raises:
        UserError: naming the GPUs and what serves.
    """
    if config.method == "rl" and servers_on_gpu(config):
        own = [isinstance(block, LatentAttention) or block.sinks for block in decoder(model).attentions]
        default = "triton" if any(own) and config.server.dtype != "float32" else ""
        gpu_backends.check_cache(capability, config.server.kv_cache_dtype, config.sglang, default)


def _check_quantization_aware(config: Config) -> None:
    """Refuses training on rounded weights where servers do not round, or the weights are not stepped."""
    actor = config.actor
    for is_set, reason, remedy in (
        (config.server.format is None, "rounds as server.quantization=none says: not at all", "set that to a format"),
        (actor.lora.rank > 0, f"steps weights that actor.lora.rank={actor.lora.rank} freezes", "set rank=0"),
        (actor.fp8 != "off", f"changes weights of which actor.fp8={actor.fp8} keeps copies", "set fp8=off"),
    ):
        if is_set:
            raise UserError(f"server.quantization_aware=true {reason}; {remedy}, or set quantization_aware=false")


def _check_deterministic(config: Config, model: PretrainedConfig) -> None:
    """Refuses models that the run's summands do not divide, biases added before the sum, and kernels by the batch."""
    summands, tp = config.determinism.summands, config.server.tp_size
    latent = any(isinstance(block, LatentAttention) for block in decoder(model).attentions)
    if config.determinism.by_library and latent:
        batch_invariance.check_latent(config.sglang)
    if summands > 1:
        padded = padded_for_cpu(model, summands)
        for name in ("num_attention_heads", "num_key_value_heads", *NEURONS):
            if (size := getattr(model, name, None)) != (there := getattr(padded, name, None)):
                raise UserError(
                    f"deterministic=true cuts sums into {summands}, by the larger of parallel.tp_size and "
                    f"server.tp_size, and servers on CPU would pad this model's {name}={size} to {there}; lower the "
                    "sizes, or set it to false"
                )
    if (ep := server_ep_size(config)) != 1 and summands:
        raise UserError(f"deterministic=true takes sglang.ep_size=1, and it is {ep}: leave it out, ranks cut experts")
    if summands and (mode := getattr(config.algorithm, "routing_replay", "off")) != "off":
        raise UserError(
            f"algorithm.routing_replay={mode} has nothing to replay with deterministic=true, whose trainer chooses the "
            "servers' experts; set it to off"
        )
    if summands and tp > 1 and any(block.output_bias for block in decoder(model).attentions):
        raise UserError(
            f"deterministic=true with server.tp_size={tp} does not cover the bias of attention's output, which servers "
            "add before the ranks' sum; set server.tp_size=1"
        )


def _check_names(names: Sequence[str]) -> None:
    """Refuses names that servers and folders cannot have, and more adapters than servers have slots for."""
    if len(names) > MOST_ADAPTERS:
        raise UserError(
            f"adapters names {len(names)}, and at most {MOST_ADAPTERS} are trained at once: each has a slot in the "
            "memory of every server; name fewer, or train the others in a second run"
        )
    for name in names:
        if not PLAIN.fullmatch(name):
            raise UserError(
                f"adapters has the name {name!r}, which also names a folder; take 1 to 64 letters, digits, - and _"
            )
        if name == SERVED:
            raise UserError(
                f"adapters has the name {name!r}, the servers' own for the adapter of a run that trains one; take "
                "another"
            )
