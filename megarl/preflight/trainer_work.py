"""Work of a training step, independent of the layout: FLOPs, models, and the traits of its configuration."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.batch.balance import SequenceCost
from megarl.actor.config import backend_of
from megarl.actor.sizes.memory import ITEM_BYTES
from megarl.actor.weights.adapter_shards import shape_of
from megarl.algorithms import OPDConfig
from megarl.config import ClusterConfig, Config
from megarl.families import Adapters, decoder
from megarl.families.blocks import Attention, Decoder, DeltaNet, Layer, Mlp
from megarl.preflight.shapes import teacher_of
from megarl.preflight.sizing import needs_critic, needs_reference
from megarl.trainer.batch_algebra import batch_of


@dataclass(frozen=True)
class Pair:
    """A column-parallel product and the row-parallel one behind it, by the elements of their weights."""

    column: int
    row: int
    again: bool  # recompute=selective repeats it


@dataclass(frozen=True)
class TrainerWork:
    """Work of a step, independent of the layout."""

    model: PretrainedConfig
    shape: Decoder
    cluster: ClusterConfig
    sequences: int
    together: int  # sequences that are never parted
    minibatches: int
    mean: float  # tokens of a sequence
    forward: float  # FLOPs of one pass over all sequences
    core: float  # part of them in attention cores
    head: float  # part of them in the LM head
    scorers: tuple[str, ...]  # models with a pass that only computes log-probs or values
    trained: int  # models that are updated: policy, critic
    again: dict[str, float]  # part of forward that backward repeats, by recompute mode
    item: int  # bytes of an activation
    pairs: tuple[tuple[Pair, float], ...]  # and how many a layer has of them, on average
    te: bool  # Transformer Engine's layers
    adapters: Adapters | None  # alone have gradients; None: all weights
    shared_beside: bool  # shared experts may run beside exchanges of tokens
    dispatcher: str  # of tokens to their experts
    sends: bool  # complete parameters are sent to servers after a step
    teacher: float = 0.0  # FLOPs of a frozen teacher's pass, and of the divergence from it

    @property
    def scored(self) -> int:
        return len(self.scorers)

    @property
    def frozen(self) -> bool:
        """True if linear layers have no gradients of their weights."""
        return self.adapters is not None

    @property
    def flops(self) -> float:
        """FLOPs that a GPU computes in a second."""
        return self.cluster.gpu_tflops * 1e12 * self.cluster.train_utilisation

    @staticmethod
    def of(config: Config, model: PretrainedConfig) -> TrainerWork:
        batch, cost, shape, actor = batch_of(config), SequenceCost.of(model), decoder(model), config.actor
        mean = config.cluster.mean_length * batch.longest
        each = cost(math.ceil(mean))
        critic = needs_critic(config)
        scores = {"policy": config.method == "rl", "reference": needs_reference(config), "critic": critic}
        te, adapters = is_te(config), shape_of(actor.lora)
        pairs = Counter(pair for layer in shape.layers for pair in pairs_of(layer, shape.hidden, te))
        return TrainerWork(
            model=model,
            shape=shape,
            cluster=config.cluster,
            sequences=batch.sequences,
            together=batch.together,
            minibatches=batch.minibatches,
            mean=mean,
            forward=batch.sequences * each,
            core=cost.quadratic * mean * mean / each,
            head=2.0 * model.hidden_size * model.vocab_size * mean / each,
            scorers=tuple(name for name, is_there in scores.items() if is_there),
            trained=1 + critic,
            again={"none": 0.0, "selective": computed_again(config, model, cost, mean), "full": 1.0},
            item=ITEM_BYTES[actor.dtype],
            pairs=tuple((pair, count / len(shape.layers)) for pair, count in pairs.items()),
            te=te,
            adapters=adapters,
            shared_beside=te and adapters is None and not actor.offload_activations,
            dispatcher=actor.moe_dispatcher,
            sends=config.method == "rl",
            teacher=teacher_work(config, model, batch.sequences, mean),
        )


def is_te(config: Config) -> bool:
    """True if a plan for GPUs runs Transformer Engine's layers there."""
    on_gpu = config.cluster.gpus_per_node > 0
    return backend_of(config.actor, has_gpu=on_gpu, has_te=on_gpu) == "te"


def pairs_of(layer: Layer, hidden: int, te: bool) -> list[Pair]:
    """Pairs of a layer's products that tp cuts: of attention, and of the MLP or the shared expert.

    Experts are cut by ep and etp. recompute=selective repeats whole MLPs and blocks of experts, but with Transformer
    Engine no MLP.
    """
    block, mlp = layer.attention, layer.mlp
    if isinstance(block, DeltaNet):
        out, inside = hidden * block.value_size, hidden * sum(block.sections(1))
    else:
        out = hidden * (block.q_size if isinstance(block, Attention) else block.heads * block.value_dim)
        inside = block.active_elements(hidden) - out
    pairs = [Pair(inside, out, again=False)]
    width = mlp.width if isinstance(mlp, Mlp) else mlp.shared_width
    if width:
        pairs.append(Pair(2 * hidden * width, hidden * width, again=not (te and isinstance(mlp, Mlp))))
    return pairs


def teacher_work(config: Config, model: PretrainedConfig, sequences: int, mean: float) -> float:
    """FLOPs of a teacher's forward pass over all sequences of `mean` tokens; 0 without one.

    divergence=full adds two computations of the teacher's logits, in forward and in backward, and one of the student's:
    its own loss counts the other.
    """
    teacher = teacher_of(config)
    if teacher is None or not isinstance(config.algorithm, OPDConfig):
        return 0.0
    heads = 2.0 * mean * (2 * teacher.hidden_size * teacher.vocab_size + model.hidden_size * model.vocab_size)
    full = config.algorithm.divergence == "full"
    return sequences * (SequenceCost.of(teacher)(math.ceil(mean)) + full * heads)


def computed_again(config: Config, model: PretrainedConfig, cost: SequenceCost, mean: float) -> float:
    """Part of forward that recompute=selective repeats.

    Transformer Engine's layers repeat experts, and no product of a dense model. The others repeat MLPs or experts, and
    the attention core.
    """
    shape = decoder(model)
    mlp = 2.0 * sum(layer.mlp.active_elements(shape.hidden) for layer in shape.layers)
    attention = cost.quadratic * mean * mean
    if is_te(config):
        mlp, attention = (mlp if shape.experts else 0.0), 0.0
    return (mlp * mean + attention) / cost(math.ceil(mean))
