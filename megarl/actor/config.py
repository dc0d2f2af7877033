"""Knobs of a model and its optimizer. Imports no torch, so commands can read it before anything heavy is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from megarl.knobs import MAX_COUNT, MAX_SEED, UserError, check_ranges, knob

INITS = ("checkpoint", "random")
DTYPES = ("float32", "bfloat16")
LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
OFFLOAD_WHILE_SAMPLING = ("all", "optimizer", "none")
BACKENDS = ("auto", "torch", "te", "cpu")
KEPT_LOGITS_ON_CPU_MB = 256
RECOMPUTE = ("none", "selective", "full")
EXPERTS = ("auto", "grouped", "sequential")
DISPATCHERS = ("alltoall", "flex")
MTP = ("carry", "train")
FP8 = ("off", "blockwise", "mxfp8")
LORA_SYNCS = ("merged", "adapters")
QUANTISED_BITS = {"nf4": 4, "blockwise8": 8}  # by actor.lora.quantization
QUANTISED_BLOCK = 64  # columns of a row with one scale


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning-rate schedule."""

    lr: float = knob(1e-6, "peak learning rate", above=0, most=1000)
    min_lr_ratio: float = knob(0.0, "learning rate at the end of decay, as a part of lr", least=0, most=1)
    lr_decay_style: str = knob(
        "constant", "constant, linear, cosine, inverse-square-root or WSD (constant, decay last)", choices=LR_STYLES
    )
    wsd_decay_steps: int = knob(0, "lr_decay_style=WSD: steps of the decay at the end", least=0, most=MAX_COUNT)
    lr_wsd_decay_style: str = knob(
        "linear", "lr_decay_style=WSD: linear, cosine, exponential or minus_sqrt", choices=WSD_STYLES
    )
    warmup_steps: int = knob(0, "steps over which the learning rate rises from 0", least=0, most=MAX_COUNT)
    weight_decay: float = knob(0.0, "decoupled weight decay; not applied to norms and biases", least=0, most=1000)
    adam_beta1: float = knob(0.9, "decay of Adam's first moment", least=0, below=1)
    adam_beta2: float = knob(0.999, "decay of Adam's second moment", least=0, below=1)
    adam_eps: float = knob(1e-8, "Adam's denominator floor", above=0, most=1)
    clip_grad: float = knob(1.0, "largest norm of the gradient; 0 turns clipping off", least=0, most=1e9)

    def check(self, path: str) -> None:
        """Refuses knobs outside their range, and a decay that the style lacks; `path` is the dotted path of the knobs.

        Raises:
            UserError: naming the knob.
        """
        check_ranges(self, path)
        if (self.lr_decay_style == "WSD") != (self.wsd_decay_steps > 0):
            raise UserError(
                f"{path}.wsd_decay_steps={self.wsd_decay_steps} with lr_decay_style={self.lr_decay_style}: WSD needs "
                "at least 1, the other styles take 0"
            )

    def check_length(self, steps: int, path: str = "actor.optimizer") -> None:
        """Refuses a decay longer than a run of `steps` steps.

        Raises:
            UserError: naming both numbers.
        """
        if self.warmup_steps + self.wsd_decay_steps > steps and self.lr_decay_style == "WSD":
            raise UserError(
                f"{path}.warmup_steps={self.warmup_steps} + wsd_decay_steps={self.wsd_decay_steps} exceed the "
                f"run's {steps} steps; lower one of them, or train for longer"
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): the only weights that are trained, in PEFT's terms."""

    rank: int = knob(0, "rank of the adapters; 0: none, and all weights are trained", least=0, most=4096)
    alpha: float = knob(16.0, "adapters are multiplied by alpha / rank", above=0, most=1e6)
    rslora: bool = knob(False, "multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)")
    dropout: float = knob(0.0, "share of an adapter's inputs that are dropped in training", least=0, below=1)
    targets: list[str] = knob(
        factory=lambda: ["all-linear"],
        meaning="layers with adapters: ends of their names, such as q_proj; all-linear: each but head and routers",
    )
    path: str = knob("", "folder of a PEFT adapter to go on from; empty: A is drawn, B is zero", path=True)
    init_seed: int = knob(1, "seed of new adapters", least=0, most=MAX_SEED)
    quantization: str = knob(
        "none",
        "frozen linear layers in few bits (QLoRA), by bitsandbytes: nf4 (4 bits) or blockwise8 (8 bits)",
        choices=("none", *QUANTISED_BITS),
    )
    sync: str = knob(
        "merged", "a sync sends all weights with the adapters merged, or the adapters alone", choices=LORA_SYNCS
    )

    @property
    def starts_as_checkpoint(self) -> bool:
        """True if the first policy has the checkpoint's weights, bit for bit."""
        return not self.path and self.quantization == "none"


@dataclass(frozen=True)
class EngineConfig:
    """One model: its checkpoint and how it is trained."""

    path: str = knob("", "local folder of a HF checkpoint, or a hub name", path=True)
    init: str = knob(
        "checkpoint", "checkpoint: load the weights of path; random: only its config and tokenizer", choices=INITS
    )
    init_seed: int = knob(1, "seed of init=random", least=0, most=MAX_SEED)
    dtype: str = knob(
        "float32", "float32 or bfloat16 parameters; main parameters and gradients are float32", choices=DTYPES
    )
    max_tokens_per_mb: int = knob(
        16384, "most tokens in one packed microbatch; bounds activation memory", least=1, most=MAX_COUNT
    )
    kept_logits_mb: int = knob(
        -1,
        "MiB of logits kept for backward; where there are more, they are computed in chunks; -1: 256 on the CPU, a "
        "quarter of the free memory on a GPU, 1/32 of its memory where tp_size is above 1",
        least=-1,
        most=2**20,
    )
    skipped_gradient: float = knob(
        0.0,
        "share of a token's gradient (2-norm over the vocabulary) that the products of a head in chunks may leave out; "
        "0 is exact; bfloat16 alone rounds by up to 2^-9",
        least=0,
        most=0.02,
    )
    shared_prefix: bool = knob(False, "compute prompts and turns that a group shares once a microbatch; cp_size=1 only")
    value_head_std: float = knob(
        0.0, "standard deviation of a new critic's or reward model's head; 0 starts at zero", least=0, most=1000
    )
    temperature: float = knob(
        1.0, "logits are divided by this before log-probs; must be the sampling temperature", above=0, most=100
    )
    backend: str = knob(
        "auto",
        "layers: torch, te (Transformer Engine), cpu (float32, no GPU); auto: te, else cpu, where they can run",
        choices=BACKENDS,
    )
    experts: str = knob(
        "auto",
        "experts of a rank: grouped in one module, or sequential, one after another; auto: grouped with te",
        choices=EXPERTS,
    )
    moe_dispatcher: str = knob(
        "alltoall",
        "sends tokens to the ranks of their experts: alltoall, or flex (kernels of DeepEP; GPUs, bfloat16)",
        choices=DISPATCHERS,
    )
    float32_head: bool = knob(
        False, "logits of bfloat16 models in float32, here and on the servers: a log-prob rounds at 2^-24, not 2^-8"
    )
    recompute: str = knob(
        "none",
        "activations computed again in backward: none, selective (te: norms, SwiGLU, experts; others: attention, MLP), "
        "full",
        choices=RECOMPUTE,
    )
    offload_activations: int = knob(
        0,
        "layers, from the first, whose activations wait on the host for backward; Transformer Engine, pp_size=1, "
        "recompute=none",
        least=0,
        most=MAX_COUNT,
    )
    fp8: str = knob(
        "off",
        "8-bit products of te layers: off, blockwise (from Hopper on), mxfp8 (Blackwell); parameters stay bfloat16",
        choices=FP8,
    )
    mtp: str = knob(
        "carry",
        "layers of multi-token prediction: carry them unchanged, or train them, without gradients to the model",
        choices=MTP,
    )
    mtp_loss_scaling_factor: float = knob(
        0.1, "mtp=train: factor on the loss of these layers, a mean over their depths", above=0, most=1000
    )
    lora: LoraConfig = knob(factory=LoraConfig, meaning="low-rank adapters in place of trained weights")
    offload_while_sampling: str = knob(
        "all",
        "with server.colocate: all, optimizer (with gradients; parameters stay on the GPU), or none",
        choices=OFFLOAD_WHILE_SAMPLING,
    )
    offload_optimizer: bool = knob(False, "run Adam on the host, where its moments are kept; needs a GPU")
    max_skipped_steps: int = knob(
        3, "steps in a row that may be skipped for a loss or gradient that is not finite", least=0, most=MAX_COUNT
    )
    debug_kernels: bool = knob(
        False, "on GPUs, check labels, temperatures and cu_seqlens before a kernel reads them; each check waits"
    )
    optimizer: OptimizerConfig = knob(factory=OptimizerConfig, meaning="Adam and its schedule")


def backend_of(config: EngineConfig, *, has_gpu: bool, has_te: bool, same_bits: bool = False) -> str:
    """Name of an engine's layer backend: torch, te, cpu or deterministic.

    `auto` takes Transformer Engine if it can run, except in float32: flash-attn and cuDNN compute 16 bits only, and
    what is left stores all scores. Without a GPU, float32 models take the kernels of `megarl/cpu`. All other cases
    take plain torch. With `same_bits`, layers are row-invariant.
    """
    if same_bits:
        return "deterministic"
    if config.backend != "auto":
        return config.backend
    if has_te and config.dtype != "float32":
        return "te"
    on_cpu = not has_gpu and config.dtype == "float32" and importlib.util.find_spec("megarl.cpu") is not None
    return "cpu" if on_cpu else "torch"


def groups_experts(config: EngineConfig, backend: str) -> bool:
    """True if a rank's experts are one module under the layer backend of this name (see `backend_of`).

    Experts of a quantised base are modules of their own, which make their weights one after another.
    """
    grouped_by_te = backend == "te" and config.lora.quantization == "none"
    return config.experts == "grouped" or (config.experts == "auto" and grouped_by_te)
