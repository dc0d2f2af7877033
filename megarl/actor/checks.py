"""Checks of an engine: its knobs, its layout against the model, and the devices of this machine.

This is the one place for these rules. Engines run them in their constructor, a run before anything starts, and
preflight to list every problem. Imports no Megatron.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig, backend_of
from megarl.actor.gpu import attention_kernels, fp8, userbuffers
from megarl.actor.gpu import determinism as gpu_determinism
from megarl.actor.trait_checks import check_expert_biases, check_mtp, check_mtp_knobs, check_windows
from megarl.actor.weights import quantised
from megarl.actor.weights.peft_files import check_adapters
from megarl.families import decoder
from megarl.families.blocks import Attention, DeltaNet, Experts, LatentAttention, Mlp
from megarl.knobs import UserError, check_ranges
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF, Determinism

# Numbers of ranks that DeepEP 2.1 has settings for (`Buffer.get_dispatch_config`)
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
FLASH_HEAD_DIM = 256  # the largest of torch's flash attention (flash_api.cpp)
FLASH_CAPABILITY = (8, 0)  # compute capability that it needs


def knob_checks(
    config: EngineConfig, parallel: ParallelConfig, deterministic: Determinism = OFF
) -> tuple[Callable[[], None], ...]:
    """Lists the checks of an engine's knobs, to be called one by one. `deterministic` is the run's form.

    They need no model, so that a mistyped knob is refused before a checkpoint is downloaded. Each raises UserError,
    naming the knob, the rule and the remedy.
    """
    return (
        functools.partial(check_ranges, config, "actor"),
        functools.partial(config.optimizer.check, "actor.optimizer"),
        functools.partial(_check_backend, config, deterministic.same_bits),
        parallel.check,
        functools.partial(_check_shared_prefix, config, parallel),
        functools.partial(_check_float32, config, parallel),
        functools.partial(_check_dispatcher, config, parallel),
        functools.partial(check_mtp_knobs, config, parallel),
        functools.partial(fp8.check_knobs, config, deterministic.is_on),
        functools.partial(userbuffers.check_knobs, config, parallel, deterministic.is_on),
        functools.partial(_check_offloaded_activations, config, parallel, deterministic.same_bits),
        functools.partial(gpu_determinism.check_knobs, config, deterministic),
    )


def model_checks(
    config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig, deterministic: Determinism = OFF
) -> tuple[Callable[[], None], ...]:
    """Lists the checks of an engine's knobs against its model; like `knob_checks`."""
    return (
        functools.partial(_check_expert_knobs, config, model),
        functools.partial(check_layout, model, parallel),
        functools.partial(check_expert_biases, model, parallel),
        functools.partial(check_mtp, config, model),
        functools.partial(check_adapters, config, parallel, model, deterministic.is_on),
        functools.partial(quantised.check_cuts, config.lora, parallel, model),
        functools.partial(check_windows, config, parallel, model, deterministic),
        functools.partial(_check_same_bits, config, parallel, model, deterministic.same_bits),
        functools.partial(gpu_determinism.check_model, model, deterministic),
        functools.partial(fp8.check_layout, config, parallel, model),
        functools.partial(_check_shared_heads, config, model, deterministic.same_bits),
        functools.partial(_check_offloaded_layers, config, model),
        functools.partial(_check_offloaded_optimizer, config, model),
    )


def device_checks(
    config: EngineConfig, parallel: ParallelConfig, deterministic: Determinism
) -> tuple[Callable[[], None], ...]:
    """Lists the checks of an engine's knobs against this machine's devices; like `knob_checks`."""
    has_gpu, has_te = platform.takes_gpu_options(), platform.has_transformer_engine()
    has_deep_ep, capability = platform.has_deep_ep(), platform.compute_capability()
    return (
        functools.partial(check_device, config, has_gpu, has_te, deterministic.same_bits, has_deep_ep, capability),
        functools.partial(
            gpu_determinism.check_gpu,
            *(config, deterministic, has_gpu, has_te, capability),
            platform.has_flash_attention(),
            os.environ,
        ),
        functools.partial(attention_kernels.check_variables, os.environ),
        functools.partial(userbuffers.check_device, parallel, has_te, capability, os.environ),
        functools.partial(fp8.check_gpu, config, capability, platform.cuda_version()),
        functools.partial(quantised.check_library, config.lora),
    )


def kernel_checks(
    config: EngineConfig,
    parallel: ParallelConfig,
    model: PretrainedConfig,
    deterministic: Determinism = OFF,
    longest: int | None = None,
    trains: bool = True,
) -> tuple[Callable[[], None], ...]:
    """Lists the checks of an engine's model against this machine's devices; like `knob_checks`.

    `longest` is the tokens of the longest sequence, None where it is not known.
    """
    has_gpu, has_te = platform.takes_gpu_options(), platform.has_transformer_engine()
    on_te = backend_of(config, has_gpu=has_gpu, has_te=has_te, same_bits=deterministic.same_bits) == "te"
    machine = on_te, platform.compute_capability(), platform.has_flash_attention()
    return (functools.partial(attention_kernels.check_kernels, parallel, model, *machine, longest, trains),)


def check_device(
    config: EngineConfig,
    has_gpu: bool,
    has_te: bool = False,
    same_bits: bool = False,
    has_deep_ep: bool = False,
    capability: tuple[int, int] | None = None,
) -> None:
    """Refuses backends and options that this machine's devices cannot run. `capability` is the GPU's, None without.

    Raises:
        UserError: naming the knob.
    """
    missing = "the package" if has_gpu else "a GPU"
    backend = backend_of(config, has_gpu=has_gpu, has_te=has_te, same_bits=same_bits)
    if config.backend == "te" and not has_te:
        raise UserError(
            f"actor.backend=te needs the package transformer_engine and a GPU, and {missing} was not found; set it to "
            "auto or torch"
        )
    if config.moe_dispatcher == "flex" and not has_deep_ep:
        raise UserError(
            f"actor.moe_dispatcher=flex needs the package deep_ep and a GPU, and {missing} was not found; set it to "
            "alltoall"
        )
    if config.backend == "cpu" and has_gpu:
        raise UserError("actor.backend=cpu is for machines without a GPU, and this one has one; set it to auto or te")
    if same_bits and has_gpu:
        raise UserError("deterministic=true gives rollout and trainer the same bits on CPU only; set it to false")
    if config.fp8 != "off" and not has_te:
        raise UserError(
            f"actor.fp8={config.fp8} needs the package transformer_engine and a GPU, and {missing} was not found; set "
            "it to off"
        )
    if backend == "te" and config.shared_prefix and capability is not None and capability < FLASH_CAPABILITY:
        needed, present = (".".join(map(str, version)) for version in (FLASH_CAPABILITY, capability))
        raise UserError(
            f"actor.shared_prefix=true on Transformer Engine's layers needs a GPU of compute capability {needed} or "
            f"newer, and this one has {present}; set it to false, or actor.backend=torch"
        )
    if config.offload_optimizer and not has_gpu:
        raise UserError(
            "actor.offload_optimizer=true moves optimizer state from a GPU to the host, and no GPU was found; "
            "set it to false"
        )
    if config.offload_optimizer and config.dtype == "float32":
        raise UserError(
            "actor.offload_optimizer=true needs main parameters beside the model's, and actor.dtype=float32 has none; "
            "set actor.dtype=bfloat16, or actor.offload_optimizer=false"
        )
    if config.offload_activations and backend != "te":
        _refuse_offloaded_activations(config, backend)


def _refuse_offloaded_activations(config: EngineConfig, backend: str) -> None:
    raise UserError(
        f"actor.offload_activations={config.offload_activations} needs Transformer Engine's layers, and this engine "
        f"has those of '{backend}' (actor.backend={config.backend}, actor.dtype={config.dtype}); set it to 0"
    )


def check_layout(model: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuses parallel sizes that do not cut the model into equal parts.

    Raises:
        UserError: tp does not divide heads or the MLP, or neither of KV heads and tp divides the other. Layers are
            uneven over pipeline stages. ep or etp does not divide the experts, or is given for a dense model. Experts
            run under tp without sequence parallelism.
    """
    parallel.check()
    tp, shape = parallel.tp_size, decoder(model)
    for layer in set(shape.layers):
        if isinstance(layer.attention, DeltaNet):
            _check_delta_net(layer.attention, tp, parallel.cp_size)
        else:
            _check_attention(layer.attention, tp)
        if isinstance(layer.mlp, Mlp):
            _check_divides("intermediate_size", layer.mlp.width, tp)
    if shape.mtp:
        _check_divides("hidden_size", shape.hidden, tp)
    if shape.experts is None:
        _check_no_experts(model, parallel)
    else:
        _check_expert_layout(shape.experts, parallel)
    parallel.stage_layers(model.num_hidden_layers)


def _check_attention(block: Attention | LatentAttention, tp: int) -> None:
    _check_divides("num_attention_heads", block.heads, tp)
    if block.kv_heads % tp and tp % block.kv_heads:
        raise UserError(
            f"parallel.tp_size={tp} and the model's num_key_value_heads={block.kv_heads}: one must divide the other; "
            f"choose a tp_size that divides {block.kv_heads} or is a multiple of it"
        )
    if 2 * block.kv_size % tp:
        raise UserError(
            f"parallel.tp_size={tp} does not divide the model's {block.kv_heads} key and value heads of "
            f"{block.head_dim}; choose a smaller tp_size"
        )


def _check_delta_net(block: DeltaNet, tp: int, cp: int) -> None:
    """Refuses ranks that do not divide the heads: tp cuts them, and cp again while it computes."""
    if block.key_heads % (tp * cp):
        raise UserError(
            f"parallel.tp_size={tp} x cp_size={cp} does not divide the model's linear_num_key_heads={block.key_heads}; "
            "choose sizes whose product divides it"
        )


def _check_divides(name: str, value: int, tp: int) -> None:
    if value % tp:
        raise UserError(
            f"parallel.tp_size={tp} does not divide the model's {name}={value}; choose a tp_size that divides it"
        )


def _check_backend(config: EngineConfig, same_bits: bool) -> None:
    if config.backend == "cpu" and config.dtype != "float32":
        raise UserError(f"actor.backend=cpu is float32 only, and actor.dtype={config.dtype}; change one of them")
    if same_bits and config.backend not in ("auto", "torch"):
        raise UserError(
            f"actor.backend={config.backend} does not give the rollout servers' bits, as deterministic=true requires; "
            "set it to auto"
        )
    if same_bits and config.skipped_gradient:
        raise UserError(
            f"actor.skipped_gradient={config.skipped_gradient} needs a head in chunks, and deterministic=true holds "
            "all logits; set it to 0"
        )


def _check_float32(config: EngineConfig, parallel: ParallelConfig) -> None:
    """Refuses float32 on `te`: its products are in TF32 (`cublaslt_gemm.cu` of TE 2.12.0, line 447).

    With cp or shared prompts no kernel takes it (`get_attention_backend`).
    """
    options = {f"parallel.cp_size={parallel.cp_size}": parallel.cp_size > 1}
    options["actor.shared_prefix=true"] = config.shared_prefix
    for option, is_set in options.items():
        if config.backend == "te" and config.dtype == "float32" and is_set:
            raise UserError(
                f"actor.backend=te with {option} computes 16 bits only, and actor.dtype=float32; set "
                "actor.dtype=bfloat16 or actor.backend=torch"
            )
    if config.backend == "te" and config.dtype == "float32":
        raise UserError(
            "actor.backend=te multiplies float32 in TF32, with 10 bits of 23, and servers do not; set "
            "actor.dtype=bfloat16 or actor.backend=torch"
        )


def _check_offloaded_activations(config: EngineConfig, parallel: ParallelConfig, same_bits: bool) -> None:
    """Refuses what Megatron's `cpu_offloading` does not cover (transformer_config.py:1707-1721)."""
    if not config.offload_activations:
        return
    backend = backend_of(config, has_gpu=True, has_te=True, same_bits=same_bits)
    if backend != "te":
        _refuse_offloaded_activations(config, backend)
    if parallel.pp_size > 1:
        raise UserError(
            f"actor.offload_activations={config.offload_activations} takes one pipeline stage, and parallel.pp_size="
            f"{parallel.pp_size}; set offload_activations to 0, or pp_size to 1"
        )
    if config.lora.quantization != "none":
        raise UserError(
            f"actor.offload_activations={config.offload_activations} does not see what layers of a quantised base keep "
            f"(actor.lora.quantization={config.lora.quantization}); set it to 0, or quantization to none"
        )
    if config.recompute != "none":
        raise UserError(
            f"actor.offload_activations={config.offload_activations} offloads what actor.recompute={config.recompute} "
            "does not keep; set it to 0, or recompute to none"
        )


def _check_offloaded_layers(config: EngineConfig, model: PretrainedConfig) -> None:
    if config.offload_activations >= model.num_hidden_layers:
        raise UserError(
            f"actor.offload_activations={config.offload_activations} must be below the model's "
            f"{model.num_hidden_layers} layers: backward reads the last layer's at once; lower it"
        )


def _check_offloaded_optimizer(config: EngineConfig, model: PretrainedConfig) -> None:
    """Refuses trained parameters in float32: Megatron's main parameters are views of them, and torch takes no view."""
    if config.offload_optimizer and not config.lora.rank and decoder(model).delta_net is not None:
        raise UserError(
            f"actor.offload_optimizer=true takes no parameters in float32, and decays of a '{model.model_type}' "
            "model's gated delta nets are kept so; set it to false, or train adapters (actor.lora.rank)"
        )


def _check_same_bits(config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig, same_bits: bool) -> None:
    """Refuses models and layouts without row-invariant operations (`ops/row_invariant.py`)."""
    if not same_bits:
        return
    if decoder(model).delta_net is not None:
        raise UserError(
            f"deterministic=true does not cover the gated delta nets of a '{model.model_type}' model: set it to false, "
            "or train a model without them"
        )
    if (experts := decoder(model).experts) is not None:
        if experts.score != "softmax" or experts.shared_width or experts.biased:
            raise UserError(
                "deterministic=true covers experts that a softmax chooses, without shared experts and biases, and a "
                f"'{model.model_type}' model has others: set it to false"
            )
        if config.experts == "grouped" or parallel.expert_tp_size > 2:
            raise UserError(
                f"deterministic=true takes actor.experts=auto and parallel.etp_size of 1 or 2, and they are "
                f"{config.experts} and {parallel.expert_tp_size}; change them"
            )
    if config.dtype != "float32":
        raise UserError(f"actor.dtype={config.dtype} must be float32 with deterministic=true; change one of them")
    if parallel.tp_size.bit_count() != 1:
        raise UserError(
            f"parallel.tp_size={parallel.tp_size} must be a power of two with deterministic=true, which adds "
            "the ranks' products in pairs; change one of them"
        )


def _check_shared_prefix(config: EngineConfig, parallel: ParallelConfig) -> None:
    if config.shared_prefix and parallel.cp_size > 1:
        raise UserError(
            f"actor.shared_prefix=true takes whole sequences on every rank: set it to false, or parallel.cp_size="
            f"{parallel.cp_size} to 1"
        )


def _check_shared_heads(config: EngineConfig, model: PretrainedConfig, same_bits: bool) -> None:
    """Refuses heads too large for flash attention over shared prompts, where a GPU would run the backend `te`."""
    on_te = backend_of(config, has_gpu=True, has_te=True, same_bits=same_bits) == "te"
    if config.shared_prefix and on_te and (head_dim := decoder(model).attention.head_dim) > FLASH_HEAD_DIM:
        raise UserError(
            f"actor.shared_prefix=true on Transformer Engine's layers takes heads of at most {FLASH_HEAD_DIM}, and the "
            f"model's have {head_dim}; set it to false, or actor.backend=torch"
        )


def _check_dispatcher(config: EngineConfig, parallel: ParallelConfig) -> None:
    """Refuses what DeepEP's kernels do not compute."""
    if config.moe_dispatcher != "flex":
        return
    ranks = parallel.ep_size * parallel.expert_tp_size
    if ranks not in DEEP_EP_RANKS:
        raise UserError(
            f"actor.moe_dispatcher=flex over parallel.ep_size={parallel.ep_size} x etp_size={parallel.expert_tp_size} "
            f"= {ranks} ranks: DeepEP takes {', '.join(map(str, DEEP_EP_RANKS))}; change the sizes, or use alltoall"
        )
    if config.dtype != "bfloat16":
        raise UserError(
            f"actor.moe_dispatcher=flex sends bfloat16 only, and actor.dtype={config.dtype}; set actor.dtype=bfloat16 "
            "or actor.moe_dispatcher=alltoall"
        )


def _check_expert_knobs(config: EngineConfig, model: PretrainedConfig) -> None:
    """Refuses settings of experts for a model without any."""
    for name, default in (("experts", "auto"), ("moe_dispatcher", "alltoall")):
        value = getattr(config, name)
        if decoder(model).experts is None and value != default:
            raise UserError(
                f"actor.{name}={value} is about experts, and this {model.model_type} model has none; leave it out"
            )


def _check_no_experts(model: PretrainedConfig, parallel: ParallelConfig) -> None:
    for name, value, default in (("ep_size", parallel.ep_size, 1), ("etp_size", parallel.etp_size, parallel.tp_size)):
        if value not in (None, default):
            raise UserError(
                f"parallel.{name}={value} lays out experts, and this {model.model_type} model has none; leave it out"
            )


def _check_expert_layout(experts: Experts, parallel: ParallelConfig) -> None:
    ep, etp = parallel.ep_size, parallel.expert_tp_size
    if experts.count % ep:
        raise UserError(f"parallel.ep_size={ep} does not divide the model's {experts.count} experts; choose a divisor")
    if experts.width % etp:
        raise UserError(
            f"parallel.etp_size={etp} does not divide the {experts.width} rows of an expert; choose a divisor (when "
            "none is given it is tp_size)"
        )
    if parallel.tp_size > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"parallel.tp_size={parallel.tp_size} with a mixture of experts needs parallel.sequence_parallel=true: "
            "each tp rank routes its own tokens"
        )
