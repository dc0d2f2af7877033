"""Worker of the layout audit: reruns each finding in Megatron's own code on 4 ranks, tp2 x dp2, over gloo.

Where a finding needs a module whose tensor-parallel group is not Megatron's global one, the dp group takes that place.
Each function returns this rank's figures. Rank 0 writes those of all ranks.

Argument: the JSON file of the results.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.actor.model.norms import RMSNorm
from megarl.ops.logprob import vocab_parallel_logprobs
from megarl.parallel import groups as process_groups
from megarl.parallel import megatron_patches
from megarl.parallel.broadcast import gather_json
from megarl.parallel.config import ParallelConfig
from megarl.parallel.groups import Groups
from megarl.preflight import invariance

Figures = dict[str, Any]
SHAPE: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16,
    "tensor_model_parallel_size": 2, "use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "normalization": "RMSNorm", "add_bias_linear": False,
}  # fmt: skip
VOCABULARY, TOKENS = 8, 6
SMOOTHING = 0.1
STEP = 1e-2  # of difference quotients


def _ids() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and labels `[1, TOKENS]`, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, VOCABULARY, (2, 1, TOKENS), generator=generator)
    return ids, torch.arange(TOKENS)[None], labels


def _other_group(groups: Groups) -> Any:
    """Megatron's groups with the dp group as the module's tensor-parallel group."""
    other = copy.copy(groups.collection)
    other.tp = groups.dp
    return other


def _layers() -> Any:
    """Megatron's local spec with megarl's norm, which sequence parallelism needs."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    norms = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
    layer = ModuleSpec(module=spec.module, submodules=dataclasses.replace(spec.submodules, **norms))
    return TransformerBlockSubmodules(layer_specs=[layer], layer_norm=RMSNorm)


def _model(groups: Groups, collection: Any = None, **fields: Any) -> GPTModel:
    """A tiny GPT of Megatron's local spec, with weights that do not depend on the layout."""
    sequence_parallel = fields.pop("sequence_parallel", False)
    torch.manual_seed(0)
    return GPTModel(
        config=TransformerConfig(**SHAPE, sequence_parallel=sequence_parallel),
        transformer_layer_spec=_layers(),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        pg_collection=collection or groups.collection,
        **fields,
    )


def label_smoothing(groups: Groups) -> Figures:
    """1: the loss of smoothed labels, its dense value, and megarl's log-probs on the same shards."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, 1, VOCABULARY, generator=generator)
    labels = _ids()[2].T
    share = VOCABULARY // groups.tp_size
    local = logits[..., groups.tp_rank * share :][..., :share].contiguous()
    logprobs = logits.log_softmax(-1)
    target = logprobs.gather(-1, labels[..., None]).squeeze(-1)
    others = (logprobs.sum(-1) - target) / (VOCABULARY - 1)
    ours, _ = vocab_parallel_logprobs(
        local.squeeze(1), labels.squeeze(1), vocab_valid=VOCABULARY, vocab_start=groups.tp_rank * share, group=groups.tp
    )
    return {
        "megatron": vocab_parallel_cross_entropy(local.clone(), labels, SMOOTHING, groups.tp).squeeze(1).tolist(),
        "dense": (-(1 - SMOOTHING) * target - SMOOTHING * others).squeeze(1).tolist(),
        "unsmoothed": vocab_parallel_cross_entropy(local.clone(), labels, 0.0, groups.tp).squeeze(1).tolist(),
        "megarl": (-ours).tolist(),
        "dense_unsmoothed": (-target).squeeze(1).tolist(),
    }


def gathered_logits(groups: Groups) -> Figures:
    """2: the loss of a model that gathers its logits, and of the same model that does not."""
    ids, positions, labels = _ids()
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    losses = {}
    for name, parallel in (("sharded", True), ("gathered", False)):
        model = _model(groups, parallel_output=parallel)
        losses[name] = model(ids, positions, mask, labels=labels).flatten().tolist()
    return losses


def mtp_token_counts(groups: Groups) -> Figures:
    """3: the gradient of the MTP loss per token over dp ranks with 2 and 4 tokens, 1 and 3 of which have a target."""
    valid = 2 + 2 * groups.dp_rank
    token_loss = 1.0 + 6.0 * groups.dp_rank
    weight = torch.ones((), requires_grad=True)
    config = SimpleNamespace(
        mtp_num_layers=1, mtp_detach_heads=False, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True
    )
    hidden = weight * torch.ones(2 * TOKENS, 1, 1)
    output = process_mtp_loss(
        hidden_states=hidden,
        labels=torch.zeros(1, TOKENS, dtype=torch.long),
        loss_mask=(torch.arange(TOKENS) < valid).float()[None],
        output_layer=lambda states, **_: (states, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda _, logits: token_loss * logits[..., 0].T,
        config=config,
    )
    (output * 0.0).sum().backward()
    gradient = torch.tensor([float(weight.grad), float(valid)])
    torch.distributed.all_reduce(gradient, group=groups.dp)  # as finalize_model_grads: a sum, then by all tokens
    return {"megatron": float(gradient[0] / gradient[1]), "per_token": (1 * 1.0 + 3 * 7.0) / 4}


def saved_activations(groups: Groups) -> Figures:
    """4: a recomputed gradient where activations are kept in parts over Megatron's global tp group."""
    x = torch.arange(4.0) + 10 * groups.tp_rank
    x.requires_grad_()
    tensor_parallel.checkpoint(torch.square, True, x * 1.0).sum().backward()
    return {"megatron": x.grad.tolist(), "right": (2 * x).tolist()}


def padding_mask(groups: Groups) -> Figures:
    """5: the part of the padding mask that a rank gets, and the part of the sequence that it holds."""
    model = _model(groups, _other_group(groups), sequence_parallel=True)
    ids, positions, _ = _ids()
    mask = torch.arange(TOKENS)[None] >= TOKENS // 2  # the second half
    scattered = model._preprocess(ids, positions, padding_mask=mask)[5]
    return {"megatron": scattered[0].tolist(), "right": mask[0].chunk(2)[groups.dp_rank].tolist()}


def latent_projection(groups: Groups) -> Figures:
    """Multi-latent attention: the compressed query, gathered over the tensor-parallel group."""
    full = torch.arange(4.0) + 10 * groups.tp_rank  # equal on the ranks of the module's group
    part = full.chunk(2)[groups.dp_rank][None, None]
    module = SimpleNamespace(
        config=SimpleNamespace(q_lora_rank=4, sequence_parallel=False),
        linear_q_down_proj=lambda _: (part, None),
        linear_kv_down_proj=lambda _: (part, None),
    )
    query, _ = MLASelfAttention._qkv_down_projection(module, torch.zeros(1, 1, 16))
    return {"megatron": query.flatten().tolist(), "right": full.tolist()}


def image_embeddings(groups: Groups) -> Figures:
    """7: the part of the combined embeddings that a rank of LLaVA gets."""
    module = SimpleNamespace(
        pre_process=True, post_process=True, context_parallel_lm=1, sequence_parallel_lm=True,
        tensor_model_parallel_size_lm=2, tp_comm_overlap_lm=False, pg_collection=_other_group(groups),
    )  # fmt: skip
    sequence = torch.arange(4.0)
    result = LLaVAModel._process_embedding_token_parallel(module, sequence[:, None, None], None, None, None)
    return {"megatron": result[0].flatten().tolist(), "right": sequence.chunk(2)[groups.dp_rank].tolist()}


class _Softmax(torch.nn.Module):
    """Causal attention `[tokens, 1, heads, dim]`. Megatron's own takes no MLA without Transformer Engine."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*heads, ~mask).permute(2, 0, 1, 3).flatten(2)


def _finished(parameters: dict[str, torch.nn.Parameter]) -> Any:
    """A model after backward, as far as Megatron's finalizing of gradients over tp reads it."""
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=False), named_parameters=lambda: parameters.items()
    )


def _norm(parameter: torch.nn.Parameter, groups: Groups, expert_tp: Any) -> float:
    """The norm of a parameter's gradients by which Megatron clips, over the ranks of a tp group."""
    options = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, use_precision_aware_optimizer=False)
    optimizer: Any = SimpleNamespace(config=options, tp_group=groups.tp, expert_tp_group=expert_tp)
    counted = MegatronOptimizer._filter_grads_for_norm(optimizer, [parameter])
    return float(get_grad_norm_fp32(counted, grad_stats_parallel_group=groups.tp))


def attention_sinks(groups: Groups) -> Figures:
    """8: the norm of the gradients 1, 2 on tp rank 0 and 3, 4 on tp rank 1, of sinks without and with the mark."""
    config = TransformerConfig(**SHAPE, softmax_type="learnable")
    module = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups.collection)
    sinks = module.softmax_offset
    sinks.grad = torch.tensor([1.0, 2.0]) + 2 * groups.tp_rank
    unmarked = _norm(sinks, groups, groups.etp)
    sinks.tensor_model_parallel = True
    return {"megatron": unmarked, "marked": _norm(sinks, groups, groups.etp), "right": math.sqrt(1 + 4 + 9 + 16)}


def latent_gradients(groups: Groups) -> Figures:
    """Multi-latent attention under tp2: gradients beside difference quotients of the loss.

    `norm` is the query's norm, before and after Megatron sums it over tp. `rotary_key` is the projection to the part
    of the key that all heads share, on tp rank 1; `latent` the other rows of its weight, on tp rank 0.
    """
    torch.manual_seed(0)
    config = MLATransformerConfig(
        **SHAPE, q_lora_rank=4, kv_lora_rank=4, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=4, qk_layernorm=True,
        multi_latent_attention=True, rope_type="rope", init_method_std=0.5,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    submodules = dataclasses.replace(spec.submodules.self_attention.submodules, core_attention=_Softmax)
    module = MLASelfAttention(config, submodules, 1, AttnMaskType.causal, pg_collection=groups.collection)
    hidden, direction = torch.randn(2, TOKENS, 1, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()

    def loss() -> Tensor:
        return (module(hidden, mask)[0] * direction).sum()

    def quotient(weight: Tensor, step: float) -> float:
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                weight.view(-1)[0] += sign * step
                values.append(float(loss()))
            weight.view(-1)[0] += step
        return (values[0] - values[1]) / (2 * STEP)

    loss().backward()
    norm, down = module.q_layernorm.weight, module.linear_kv_down_proj.weight
    norm.main_grad = norm.grad.clone()
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    _allreduce_non_tensor_model_parallel_grads([_finished({name: norm})], config, groups.tp)
    return {
        "norm": {"right": quotient(norm, STEP), "before": float(norm.grad[0]), "megatron": float(norm.main_grad[0])},
        "latent": {"right": quotient(down, STEP * (1 - groups.tp_rank)), "megatron": float(down.grad[0, 0])},
        "rotary_key": {"right": quotient(down, STEP * groups.tp_rank), "megatron": float(down.grad[0, 0])},
    }


def router_counts(groups: Groups) -> Figures:
    """10: the tokens of this rank by its routing map, and by Megatron, where tp rank 0 has 3 and tp rank 1 has 1."""
    routing = torch.zeros(4, 2, dtype=torch.int64)
    routing[: 3 - 2 * groups.tp_rank, 0] = 1  # of 4 rows the others are padding
    tokens = float(routing.sum())
    _, local, total = get_tokens_per_expert_and_token_count(routing, groups.tp, topk=1, with_padding_mask=True)
    return {"megatron": float(local), "right": tokens, "total": float(total)}


def delta_norm(groups: Groups) -> Figures:
    """11: gradients of two norms over each head, replicated over tp, after Megatron finalized them.

    Their names are those of gated delta net's output norm and of attention's query norm.
    """
    heads = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))  # one of the two on each tp rank
    norms = {name: torch.nn.RMSNorm(4) for name in ("out_norm", "q_layernorm")}
    named = {}
    for name, norm in norms.items():
        norm(heads[groups.tp_rank]).pow(2).sum().backward()
        norm.weight.main_grad = norm.weight.grad.clone()
        named[f"decoder.layers.0.self_attention.{name}.weight"] = norm.weight
    complete = torch.nn.RMSNorm(4)
    complete(heads).pow(2).sum().backward()
    config = SimpleNamespace(sequence_parallel=False, qk_layernorm=True)
    _allreduce_non_tensor_model_parallel_grads([_finished(named)], config, groups.tp)
    figures = {name: norm.weight.main_grad.tolist() for name, norm in norms.items()}
    return {**figures, "complete": complete.weight.grad.tolist()}


def expert_norm(groups: Groups) -> Figures:
    """The norm of experts that only this tp rank holds, as under tp2 ep2 etp1: 1, 2 on one rank and 3, 4 on the other.

    Megatron before 0.19.0 asked the tp group which rank counts them. cp is a group of this rank alone.
    """
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.allreduce = False  # type: ignore[attr-defined]
    weight.grad = torch.tensor([1.0, 2.0]) + 2 * groups.tp_rank
    return {
        "megatron": _norm(weight, groups, expert_tp=groups.cp),
        "before": _norm(weight, groups, expert_tp=groups.tp),
        "right": math.sqrt(1 + 4 + 9 + 16),
    }


def strided_sum(groups: Groups) -> Figures:
    """The sum over tp of a tensor whose rows are not contiguous."""
    rows = (torch.arange(6.0).view(2, 3) * (1 + groups.tp_rank)).T
    total = tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=groups.tp)
    return {"megatron": total.flatten().tolist(), "right": (torch.arange(6.0).view(2, 3).T * 3).flatten().tolist()}


# Megatron's code that a finding is about -> where it is looked up
PATHS: dict[str, tuple[str, str]] = {
    "vocab_parallel_cross_entropy": ("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
    "process_mtp_loss": ("megatron.core.models.gpt.gpt_model", "process_mtp_loss"),
    "distributed activations": ("megatron.core.tensor_parallel.random", "split_tensor_into_1d_equal_chunks"),
    "padding mask counts": ("megatron.core.transformer.moe.router", "get_tokens_per_expert_and_token_count"),
    "scatter without group": ("megatron.core.tensor_parallel", "scatter_to_sequence_parallel_region"),
}


def megarl_paths(work: Path) -> Figures:
    """Which of `PATHS` a GRPO step of megarl calls, and whether its groups are Megatron's global ones.

    `control` has those that two of the findings above call under the same patches.
    """
    called: set[str] = set()

    def note(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            if name != "scatter without group" or options.get("group") is None:
                called.add(name)
            return original(*args, **options)

        return noting

    case = invariance.CASES["moe tp2 sp ep2 etp2, grouped"]
    invariance.MODELS[case.model].save_pretrained(work / f"rank{dist.get_rank()}")
    with contextlib.ExitStack() as patches:
        for name, (module, attribute) in PATHS.items():
            place = importlib.import_module(module)
            patches.enter_context(patch.object(place, attribute, note(name, getattr(place, attribute))))
        actor = invariance.build_actor(case, work / f"rank{dist.get_rank()}")
        figures = invariance.measure(actor, invariance.batch())
        by_megarl = sorted(called)
        with megatron_patches.scope():
            gathered_logits(actor.groups)
            padding_mask(actor.groups)
    config, collection = actor.modules[0].config, actor.groups.collection
    pairs = (
        (collection.tp, parallel_state.get_tensor_model_parallel_group()),
        (collection.cp, parallel_state.get_context_parallel_group()),
        (collection.pp, parallel_state.get_pipeline_model_parallel_group()),
        (collection.expt_tp, parallel_state.get_expert_tensor_parallel_group()),
    )
    return {
        "called": by_megarl,
        "control": sorted(called),
        "is_finite": bool(figures["grad_norm"].isfinite()),
        "is_global": all(own is theirs for own, theirs in pairs),
        "mtp_layers": config.mtp_num_layers,
        "splits_saved_activations": config.distribute_saved_activations,
        "router_losses": [config.moe_router_load_balancing_type, config.moe_z_loss_coeff],
    }


def layer_names(work: Path) -> Figures:
    """12: names of the second stage's layers in Megatron's modules, and in megarl's table of shards."""
    case = invariance.CASES["dp2 pp2"]
    invariance.MODELS[case.model].save_pretrained(work / f"rank{dist.get_rank()}")
    actor = invariance.build_actor(case, work / f"rank{dist.get_rank()}")
    return {
        "stage": actor.groups.pp_rank,
        "megatron": sorted({int(name.split(".")[2]) for name in actor.modules[0].state_dict() if ".layers." in name}),
        "megarl": sorted({int(s.name.split(".")[2]) for s in actor.shards() if s.name.startswith("model.layers.")}),
    }


FINDINGS: tuple[Callable[[Groups], Figures], ...] = (
    label_smoothing, gathered_logits, mtp_token_counts, saved_activations, padding_mask, latent_projection,
    image_embeddings, attention_sinks, latent_gradients, router_counts, delta_norm, expert_norm, strided_sum,
)  # fmt: skip


def main(results: Path) -> None:
    torch.set_num_threads(1)
    groups = process_groups.initialize(ParallelConfig(tp_size=2, dp_size=2))
    figures = {}
    with megatron_patches.scope():
        for finding in FINDINGS:
            figures[finding.__name__] = gather_json(finding(groups))
    for part in (megarl_paths, layer_names):
        process_groups.leave_layout()
        figures[part.__name__] = gather_json(part(results.parent))
    if dist.get_rank() == 0:
        results.write_text(json.dumps(figures))
    process_groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
