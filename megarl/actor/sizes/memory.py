"""Estimates the memory of a rank from the configuration alone, without a model or process groups.

Weights, gradients and optimizer state are counted exactly, from `shards.shard_specs`. Activations are the tensors that
autograd keeps for backward in a layer of `model/build.py`. On the CPU they were measured with
`torch.autograd.graph.saved_tensors_hooks`; on a GPU they are derived from Transformer Engine's fused layers.
`tests/unit/actor/test_memory.py` compares the total with real training steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from transformers import PretrainedConfig

from megarl.actor.config import (
    KEPT_LOGITS_ON_CPU_MB,
    QUANTISED_BITS,
    QUANTISED_BLOCK,
    EngineConfig,
    LoraConfig,
    backend_of,
    groups_experts,
)
from megarl.actor.gpu import fp8
from megarl.actor.sizes.adapter_memory import AdapterBytes, adapter_bytes
from megarl.actor.sizes.parameter_counts import RankParameters, rank_parameters
from megarl.actor.weights.adapter_shards import shape_of
from megarl.families import decoder, padded_vocab_size
from megarl.families.blocks import Attention, DeltaNet, Experts, LatentAttention, Layer, Mlp
from megarl.ops.head_chunks import cpu_chunk_rows, most_gpu_chunk_rows
from megarl.parallel.config import ParallelConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# bytes per parameter
GRADIENT = 4  # float32 main gradient (DDP's grad_reduce_in_fp32)
MOMENTS = 8  # Adam's two moments, float32
SINK_COLUMNS = 8  # of `model/attention/windows_and_sinks.py`
SCALE = 4  # of a block of quantised weights
MAIN = 4  # float32 main parameter, if parameters are bfloat16
BATCH_BYTES = 120  # per token: packed batch, its position-aligned copy, labels, and rows of its attention block
CHUNK = 64  # tokens of a gated delta net's chunk (`model/attention/delta_rule.py`)
USERBUFFERS = 12  # collectives of Transformer Engine's `initialize_ub`, each with a buffer of a microbatch
GPU_RUNTIME = 3 << 30  # bytes of CUDA context, NCCL buffers and cuBLAS workspaces: assumed, not measured


@dataclass(frozen=True)
class StepLoad:
    """Tokens of one data parallel rank between two optimizer steps."""

    tokens: int  # of the largest microbatch
    microbatches: int = 1

    @property
    def all_tokens(self) -> int:
        return self.tokens * self.microbatches

    def in_flight(self, parallel: ParallelConfig, pp_rank: int) -> int:
        """Counts the most passes of a virtual stage forward whose backward is to come (schedules.py:937)."""
        first = parallel.pp_size - pp_rank
        if parallel.vpp_size > 1:
            first = 2 * (first - 1) + (parallel.vpp_size - 1) * parallel.pp_size + 1
        return min(self.microbatches * parallel.vpp_size, first)


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank, by part.

    Activations and head are in memory during forward and backward, `update` during the optimizer step. These two phases
    do not overlap.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    update: int
    batch: int
    runtime: int = 0
    userbuffers: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        update = parts.pop("update")
        return sum(parts.values()) + max(0, update - self.activations - self.head)


def trainer_memory(
    model: PretrainedConfig,
    parallel: ParallelConfig,
    engine: EngineConfig,
    load: StepLoad,
    pp_rank: int,
    on_gpu: bool,
    parameters: RankParameters | None = None,
) -> TrainerMemory:
    """Estimates the memory of a rank with pipeline rank `pp_rank`. All ranks of one stage need the same.

    `parameters` are the rank's, if they were counted before.
    """
    parameters = parameters or rank_parameters(model, parallel, pp_rank, shape_of(engine.lora))
    adapters = parameters.trained_dense + parameters.trained_experts if engine.lora.rank else 0
    trained = parameters.trained_dense + parameters.trained_experts
    item = ITEM_BYTES[engine.dtype]
    if parallel.tp_comm_overlap:  # pads every microbatch
        load = replace(load, tokens=engine.max_tokens_per_mb)
    per_stage = parallel.world_size() // parallel.pp_size
    replicas = per_stage // parallel.tp_size  # dp x cp: number of shards of the distributed optimizer
    expert_replicas = per_stage // (parallel.expert_tp_size * parallel.ep_size)
    state = (MAIN if item < MAIN else 0) + (0 if engine.offload_optimizer else MOMENTS)
    layer = LayerBytes.of(model, parallel, engine, on_gpu)
    tokens = math.ceil(load.tokens / parallel.cp_size)
    head, mtp_layers, embedding, in_flight = 0, 0, 0, load.in_flight(parallel, pp_rank)
    if pp_rank == parallel.pp_size - 1:
        shape = decoder(model)
        head = _head(model, parallel, engine, layer, tokens, item, on_gpu) * (1 + len(shape.mtp))
        if engine.lora.rank:  # a frozen head's weight has no gradient: this memory is free in the layers' backward
            head = max(0, head - math.floor(tokens * layer.working))
        mtp_layers = len(shape.mtp) * _mtp_activations(model, parallel, engine, layer, tokens)
        if shape.mtp and parallel.pp_size > 1 and not shape.tied:  # the last stage's copy (`mtp.py`)
            embedding = padded_vocab_size(model, parallel.tp_size) // parallel.tp_size * model.hidden_size * item
    return TrainerMemory(
        weights=(parameters.dense + parameters.experts + adapters) * item
        + fp8.copied_bytes(parameters.matrices + parameters.experts, engine.fp8)
        - _saved_by_codes(parameters, engine.lora, item)
        + embedding,
        gradients=trained * GRADIENT,
        optimizer=state
        * (math.ceil(parameters.trained_dense / replicas) + math.ceil(parameters.trained_experts / expert_replicas)),
        activations=mtp_layers + _activations(model, engine, parallel, layer, tokens, in_flight, pp_rank),
        head=head,
        update=0 if on_gpu else trained * item,  # gloo all-gathers the parameters into a copy
        batch=BATCH_BYTES * (load.tokens * min(in_flight + 1, load.microbatches) if on_gpu else load.all_tokens),
        runtime=GPU_RUNTIME if on_gpu else 0,
        userbuffers=USERBUFFERS * load.tokens * model.hidden_size * item if parallel.tp_comm_overlap else 0,
    )


def _saved_by_codes(parameters: RankParameters, lora: LoraConfig, item: int) -> int:
    """Bytes that a quantised base saves: its matrices, less their codes and scales."""
    if lora.quantization == "none":
        return 0
    bytes_each = QUANTISED_BITS[lora.quantization] / 8 + SCALE / QUANTISED_BLOCK
    return math.floor((parameters.matrices + parameters.experts) * (item - bytes_each))


def host_memory(
    model: PretrainedConfig, parallel: ParallelConfig, engine: EngineConfig, pp_rank: int, load: StepLoad
) -> int:
    """Bytes on the host: of an offloaded optimizer, and of offloaded activations.

    The optimizer has a copy of the parameter shard, its gradient and the moments there.
    """
    tokens = math.ceil(load.tokens / parallel.cp_size)
    layer = LayerBytes.of(model, parallel, engine, on_gpu=True)
    activations = math.ceil(engine.offload_activations * tokens * layer.kept)
    if not engine.offload_optimizer:
        return activations
    memory = trainer_memory(model, parallel, engine, load, pp_rank, on_gpu=True)
    sharded = memory.gradients // GRADIENT * parallel.tp_size * parallel.pp_size // parallel.world_size()
    return activations + sharded * (4 + 4 + MOMENTS)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of one layer on one rank."""

    norm: float  # one norm over the hidden size
    kept: float  # kept from forward to backward, by the recompute mode
    inside: float  # all activations of one layer, while it is recomputed
    working: float  # gradients of activations in backward
    matrix: int  # gradients of weights before they are added to the main gradient; in total, not per token

    @staticmethod
    def of(model: PretrainedConfig, parallel: ParallelConfig, engine: EngineConfig, on_gpu: bool) -> LayerBytes:
        """Computes the bytes over the model's layers: the mean of `kept`, the largest of the others.

        In Transformer Engine's layers, recompute=selective spares the outputs of SwiGLU and of norms before
        projections, or all that experts keep (`backends.py`). Elsewhere it spares the inside of attention and MLPs.
        """
        shape = decoder(model)
        rank = _Rank.of(parallel, engine, on_gpu)
        each = {layer: rank.layer_bytes(layer, shape.hidden) for layer in set(shape.layers)}
        if engine.lora.rank:
            added = adapter_bytes(model, engine.lora, rank.item)
            each = {layer: rank.with_adapters(layer, each[layer], added) for layer in each}
        largest = max(each.values(), key=lambda layer: layer.inside)
        kept = sum(each[layer].kept for layer in shape.layers) / len(shape.layers)
        return replace(largest, kept=kept if len(each) > 1 else largest.kept)


@dataclass(frozen=True)
class _AttentionBytes:
    """Bytes per token that an attention layer keeps for backward."""

    around: float  # outside its core: norms of queries and keys, the input of the last projection
    core: float  # inside its core
    inputs: float  # of its core, and the outputs of the projections


@dataclass(frozen=True)
class _Rank:
    """Properties of a rank that decide the bytes of its layers."""

    parallel: ParallelConfig
    engine: EngineConfig
    on_gpu: bool
    backend: str
    item: int  # bytes of an activation
    saved: float  # bytes of an element that a linear layer keeps of its input

    @staticmethod
    def of(parallel: ParallelConfig, engine: EngineConfig, on_gpu: bool) -> _Rank:
        item = ITEM_BYTES[engine.dtype]
        saved = 1 + fp8.SCALES[engine.fp8] if engine.fp8 != "off" else item
        return _Rank(parallel, engine, on_gpu, backend_of(engine, has_gpu=on_gpu, has_te=on_gpu), item, saved)

    @property
    def keeps_inputs(self) -> bool:
        """True in the layers of the backend cpu, which keep only the inputs of their operations."""
        return self.backend == "cpu"

    @property
    def frozen(self) -> bool:
        """True if norms have no gradient: plain torch then keeps no normalised values, float32, for it."""
        return self.engine.lora.rank > 0

    @property
    def te(self) -> bool:
        return self.backend == "te"

    def layer_bytes(self, layer: Layer, hidden_size: int) -> LayerBytes:
        """Computes the bytes of one layer."""
        item, saved, parallel, engine = self.item, self.saved, self.parallel, self.engine
        spread = parallel.tp_size if parallel.sequence_parallel else 1  # cuts the tokens of parts that tp does not cut
        hidden = hidden_size * item / spread
        lean_norms = self.on_gpu or self.keeps_inputs
        norm = 2 * hidden if lean_norms else ((2 - self.frozen) * 4 * hidden_size / spread + hidden)
        block = layer.attention
        attention = self._delta_net(block) if isinstance(block, DeltaNet) else self._attention(block)
        around = (4 if layer.sandwich else 2) * norm + attention.around
        around -= 2 * (item - saved) * hidden_size / spread  # the norms' outputs; attention's output stays
        fused, outputs = self._fuses(layer.mlp), hidden  # outputs: of norms and SwiGLU
        if isinstance(layer.mlp, Experts):
            at_once = self.te and groups_experts(engine, self.backend)
            mlp, matrix, working = _experts(layer.mlp, hidden_size, parallel, item, fused, at_once)
            mlp -= (item - saved) * layer.mlp.topk * layer.mlp.width / parallel.expert_tp_size
            if layer.mlp.shared_width:
                shared_width = layer.mlp.shared_width / parallel.tp_size
                shared, _, shared_working = _mlp(shared_width, hidden_size, item, fused)
                mlp, working = mlp + shared - (item - saved) * shared_width, working + shared_working
        else:
            width = layer.mlp.width / parallel.tp_size
            mlp, matrix, working = _mlp(width, hidden_size, item, fused)
            mlp -= (item - saved) * width  # the second product's input
            outputs = 2 * hidden + (width * item if fused else 0)
        inside = around + attention.core + mlp
        selective = around + attention.inputs
        if self.te:  # FP8 layers keep other tensors than the outputs of norms and SwiGLU
            outputs = 0.0 if engine.fp8 != "off" else outputs
            selective = inside - outputs - (mlp if isinstance(layer.mlp, Experts) else 0.0)
        kept = {"none": inside, "selective": selective, "full": hidden}[engine.recompute]
        return LayerBytes(norm, kept, inside, working + 3 * hidden * spread, matrix)

    def with_adapters(self, layer: Layer, plain: LayerBytes, added: AdapterBytes) -> LayerBytes:
        """Adds what a layer's adapters keep. No weight has a gradient; of a quantised base, one is made at a time."""
        repeats_mlp = isinstance(layer.mlp, Experts) or not self.te
        selective = added.attention + (0.0 if repeats_mlp else added.mlp)
        kept = {"none": added.total, "selective": selective, "full": 0.0}[self.engine.recompute]
        made = plain.matrix if self.engine.lora.quantization != "none" else 0
        return replace(plain, kept=plain.kept + kept, inside=plain.inside + added.total, matrix=made)

    def _fuses(self, block: Mlp | Experts) -> bool:
        """True if one operation computes the activation: SwiGLU, and with clamps in Transformer Engine's layers."""
        if isinstance(block, Mlp):
            return (self.keeps_inputs or self.te) and block.activation == "silu"
        return self.te or (self.keeps_inputs and not block.clamp)

    def _latent(self, block: LatentAttention) -> _AttentionBytes:
        """Computes the bytes of latent attention, whose values are padded to the size of keys."""
        item, parallel = self.item, self.parallel
        spread = parallel.tp_size if parallel.sequence_parallel else 1
        per_element = 2 * item if self.on_gpu or self.keeps_inputs else (2 - self.frozen) * 4 + item  # of a norm
        latents = (block.query_rank + block.kv_rank) * per_element / spread
        q = block.q_size / parallel.tp_size
        core = (2 * q + 2 * q * parallel.cp_size) * item + 4 * q / block.head_dim
        output = block.heads * block.value_dim / parallel.tp_size * item
        angles = 0 if self.te else 4 * block.rotary_dim * item
        return _AttentionBytes(latents + output + angles, core, 3 * q * item)

    def _attention(self, block: Attention | LatentAttention) -> _AttentionBytes:
        if isinstance(block, LatentAttention):
            return self._latent(block)
        item, parallel = self.item, self.parallel
        dim = block.head_dim
        q = block.q_size / parallel.tp_size
        kv = max(1.0, block.kv_heads / parallel.tp_size) * dim
        keeps_inputs = self.keeps_inputs and not (block.window or block.sinks)  # else it is plain attention
        unpadded = keeps_inputs and parallel.cp_size == 1
        blocks = 0 if unpadded else q  # attention's output before padding is removed
        core = (q + blocks + 2 * kv * parallel.cp_size) * item + 4 * q / dim
        if block.sinks and not self.te:  # columns for sinks, in queries, keys, values and the output
            core += (2 * q + 2 * kv * parallel.cp_size) * SINK_COLUMNS / dim * item
        queries = _qk_norm(q, kv, item, self.on_gpu, self.frozen) if block.qk_norm else 0.0
        # Without norm and rotation, keys are a view of the QKV projection's output, as values are.
        keys = kv if queries or not keeps_inputs else 0
        inputs = (q + keys + q + 2 * kv) * item  # of the attention core: queries, keys, QKV output
        around = queries + q * item + (0 if keeps_inputs or self.te else 4 * dim * item)
        if block.output_gate:  # the gate's sigmoid in float32, and the product's factors
            around += (2 if self.keeps_inputs or self.te else 5) * q * 4
        return _AttentionBytes(around, core, inputs)

    def _delta_net(self, block: DeltaNet) -> _AttentionBytes:
        """Computes a gated delta net, which no recompute mode but full spares. Chunks are taken for full."""
        tp, heads = self.parallel.tp_size, block.value_heads / self.parallel.tp_size
        keys, values = 2 * block.key_size / tp, block.value_size / tp
        expanded = heads * block.key_dim  # queries, and keys, of all value heads
        projected = (keys + 2 * values + 2 * heads) * self.item
        norm = 4 * 4 * values
        if self.te:  # flash-linear-attention keeps its inputs and a matrix of each chunk
            core = (2 * (keys + values) + 2 * expanded + 2 * values + heads * CHUNK) * self.item + 2 * 4 * keys
        else:
            convolution = (block.conv_width + 1) * (keys + values)
            matrices, states = 5 * heads * CHUNK, 2 * heads * block.key_dim * block.value_dim / CHUNK
            core = 4 * (convolution + 3 * keys + 8 * expanded + 5 * values + matrices + states)
        return _AttentionBytes(values * self.item + norm, projected + core, projected + core)


def _qk_norm(q: float, kv: float, item: int, on_gpu: bool, frozen: bool) -> float:
    if on_gpu:
        return (2 * q + 3 * kv) * item
    return (q + kv) * 4 if item == 4 or frozen else (2 * q + 2 * kv) * 4


def _mlp(width: float, hidden: int, item: int, fused: bool) -> tuple[float, int, float]:
    """Bytes of an MLP of `width` rows: kept per token, its largest weight, and per token in backward."""
    # Kept tensors: gate, up and their product. Unfused also silu(gate) and a copy of up.
    tensors = 3 if fused else 5
    return tensors * width * item, int(2 * width * hidden * item), 4 * width * item


def _experts(
    moe: Experts, hidden: int, parallel: ParallelConfig, item: int, fused: bool, at_once: bool
) -> tuple[float, int, float]:
    """Bytes of a token's experts, as `_mlp` returns them, if ranks get equal shares of the tokens.

    With `at_once`, the gradients of all experts' weights are in memory together.
    """
    # Kept for each expert of a token: its input, the MLP's tensors, and their product times the router's weight.
    width, tensors = moe.width / parallel.expert_tp_size, 4 if fused else 6
    # Per token and expert of the model: the token's place among the expert's tokens (8 bytes), a float32 weight and a
    # mask. Per expert that the token takes: two places and two weights.
    routing = 13 * moe.count + 24 * moe.topk
    kept = moe.topk * (hidden + tensors * width) * item + routing
    together = moe.count // parallel.ep_size if at_once else 1
    # Gradients of tokens exist three times while they are sorted and exchanged.
    working = moe.topk * (4 * width + 3 * hidden) * item
    return kept, int(2 * width * hidden * item) * together, working


def _activations(
    model: PretrainedConfig, engine: EngineConfig, parallel: ParallelConfig, layer: LayerBytes, tokens: int,
    in_flight: int, pp_rank: int,
) -> int:  # fmt: skip
    """Computes activation bytes at the peak: layers of passes in flight that stay on the GPU, and one in backward."""
    layers = sum(len(stage) for stage in parallel.stage_layers(model.num_hidden_layers)[pp_rank])
    kept = in_flight / parallel.vpp_size * (layers - engine.offload_activations) * layer.kept
    recomputed = layer.inside - layer.kept  # 0 without recompute
    return math.ceil(tokens * (kept + recomputed + layer.working)) + layer.matrix


def _mtp_activations(
    model: PretrainedConfig, parallel: ParallelConfig, engine: EngineConfig, layer: LayerBytes, tokens: int
) -> int:
    """Computes activation bytes of one depth of multi-token prediction, of one microbatch: backward follows at once.

    It keeps the later tokens' embeddings, three norms, the projection's input of two hidden states, and its layer.
    """
    spread = parallel.tp_size if parallel.sequence_parallel else 1
    hidden = model.hidden_size * ITEM_BYTES[engine.dtype] / spread
    around = 2 * hidden if engine.recompute == "full" else 3 * layer.norm + 3 * hidden
    return math.ceil(tokens * (around + layer.kept))


def _head(
    model: PretrainedConfig,
    parallel: ParallelConfig,
    engine: EngineConfig,
    layer: LayerBytes,
    tokens: int,
    item: int,
    on_gpu: bool,
) -> int:
    """Computes bytes of the final norm, the gradient of its output, and all logits or one chunk (`heads.logprobs`).

    Logits that a GPU keeps in free memory are not counted: where memory is short, they are computed in chunks.
    """
    vocab = padded_vocab_size(model, parallel.tp_size) // parallel.tp_size
    logit = max(item, 4) if engine.float32_head else item
    kept_mb = engine.kept_logits_mb
    if kept_mb < 0:
        kept_mb = 0 if on_gpu else KEPT_LOGITS_ON_CPU_MB
    if tokens * vocab * logit <= kept_mb * 2**20:
        chunk = tokens
    else:
        chunk = min(tokens, most_gpu_chunk_rows(tokens) if on_gpu else cpu_chunk_rows(tokens))
    row = vocab * logit + 2 * model.hidden_size * item + (vocab * item if logit > item else 0)  # with its narrow copy
    return math.ceil(tokens * (layer.norm + model.hidden_size * item) + chunk * row)
