"""The knobs of a model and its optimizer. Imports no torch: the commands read it before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.knobs import UserError, knob

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
BACKENDS = ("auto", "local", "te")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning-rate schedule."""

    lr: float = knob(1e-6, "peak learning rate")
    min_lr_ratio: float = knob(0.0, "learning rate at the end of decay, as a part of lr")
    lr_decay_style: str = knob(
        "constant", "constant, linear, cosine, inverse-square-root or WSD (constant, decay last)"
    )
    wsd_decay_steps: int = knob(0, "lr_decay_style=WSD: steps of the decay at the end")
    lr_wsd_decay_style: str = knob("linear", "lr_decay_style=WSD: linear, cosine, exponential or minus_sqrt")
    warmup_steps: int = knob(0, "steps over which the learning rate rises from 0")
    weight_decay: float = knob(0.0, "decoupled weight decay; not applied to norms and biases")
    adam_beta1: float = knob(0.9, "decay of Adam's first moment")
    adam_beta2: float = knob(0.999, "decay of Adam's second moment")
    adam_eps: float = knob(1e-8, "Adam's denominator floor")
    clip_grad: float = knob(1.0, "largest norm of the gradient; 0 turns clipping off")

    def check_length(self, steps: int) -> None:
        """Refuses a decay that a run of `steps` steps has no room for.

        Raises:
            UserError: with both sides.
        """
        if self.warmup_steps + self.wsd_decay_steps > steps and self.lr_decay_style == "WSD":
            raise UserError(
                f"actor.optimizer.warmup_steps={self.warmup_steps} + wsd_decay_steps={self.wsd_decay_steps} exceed the "
                f"run's {steps} steps; lower one of them, or train for longer"
            )


@dataclass(frozen=True)
class EngineConfig:
    """One model: where it comes from and how it is trained."""

    path: str = knob("", "local folder of a HF checkpoint, or a hub name")
    init: str = knob("checkpoint", "checkpoint: load the weights of path; random: only its config and tokenizer")
    init_seed: int = knob(1, "seed of init=random")
    dtype: str = knob("float32", "float32 or bfloat16 parameters; main parameters and gradients are float32")
    max_tokens_per_mb: int = knob(16384, "most tokens in one packed microbatch; bounds activation memory")
    kept_logits_mb: int = knob(256, "MiB of logits kept for backward; where there are more, they are computed twice")
    shared_prefix: bool = knob(False, "compute the prompt that a group shares once a microbatch; cp_size=1 only")
    value_head_std: float = knob(0.0, "standard deviation of a new critic's or reward model's head; 0 starts at zero")
    temperature: float = knob(1.0, "logits are divided by this before log-probs; must be the sampling temperature")
    backend: str = knob("auto", "layers: local (Megatron's own), te (Transformer Engine's), auto: te where it is found")
    recompute: str = knob("none", "activations computed again in backward: none, selective (attention, MLP), full")
    offload_optimizer: bool = knob(False, "run Adam on the host, where its moments are kept; needs a GPU")
    max_skipped_steps: int = knob(3, "steps in a row that may be skipped for a loss or gradient that is not finite")
    optimizer: OptimizerConfig = knob(factory=OptimizerConfig, meaning="Adam and its schedule")


def check_config(config: EngineConfig) -> None:
    """Refuses values that no run could use.

    Raises:
        UserError: naming the knob.
    """
    choices = {
        "dtype": (config.dtype, ("float32", "bfloat16")),
        "init": (config.init, ("checkpoint", "random")),
        "backend": (config.backend, BACKENDS),
        "recompute": (config.recompute, RECOMPUTE),
        "optimizer.lr_decay_style": (config.optimizer.lr_decay_style, LR_STYLES),
        "optimizer.lr_wsd_decay_style": (config.optimizer.lr_wsd_decay_style, WSD_STYLES),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise UserError(f"actor.{name}={value} must be one of {', '.join(allowed)}")
    adam = config.optimizer
    ranges = {
        "lr": (adam.lr > 0, "above 0"),
        "min_lr_ratio": (0 <= adam.min_lr_ratio <= 1, "from 0 to 1"),
        "warmup_steps": (adam.warmup_steps >= 0, "at least 0"),
        "wsd_decay_steps": (adam.wsd_decay_steps >= 0, "at least 0"),
        "weight_decay": (adam.weight_decay >= 0, "at least 0"),
        "adam_beta1": (0 <= adam.adam_beta1 < 1, "from 0 to below 1"),
        "adam_beta2": (0 <= adam.adam_beta2 < 1, "from 0 to below 1"),
        "adam_eps": (adam.adam_eps > 0, "above 0"),
        "clip_grad": (adam.clip_grad >= 0, "at least 0"),
    }
    for name, (holds, rule) in ranges.items():
        if not holds:
            raise UserError(f"actor.optimizer.{name}={getattr(adam, name)} must be {rule}")
    if (adam.lr_decay_style == "WSD") != (adam.wsd_decay_steps > 0):
        raise UserError(
            f"actor.optimizer.wsd_decay_steps={adam.wsd_decay_steps} with lr_decay_style={adam.lr_decay_style}: WSD "
            "needs at least 1, the other styles take 0"
        )
    if config.max_skipped_steps < 0:
        raise UserError(f"actor.max_skipped_steps={config.max_skipped_steps} must be at least 0; 0 skips none")
    for name in ("value_head_std", "kept_logits_mb"):
        if getattr(config, name) < 0:
            raise UserError(f"actor.{name}={getattr(config, name)} must be at least 0")
    if config.backend == "te" and config.shared_prefix:
        raise UserError("actor.shared_prefix=true runs on the local layers; set actor.backend to auto or local")
    for name in ("max_tokens_per_mb", "temperature"):
        if getattr(config, name) <= 0:
            raise UserError(f"actor.{name}={getattr(config, name)} must be above 0")


def check_device(config: EngineConfig, has_gpu: bool, has_te: bool = False, deterministic: bool = False) -> None:
    """Refuses what this machine's devices cannot do; `deterministic` is the run's knob.

    Raises:
        UserError: naming the knob.
    """
    if config.backend == "te" and not has_te:
        missing = "the package" if has_gpu else "a GPU"
        raise UserError(
            f"actor.backend=te needs the package transformer_engine and a GPU, and {missing} was not found; set it to "
            "auto or local"
        )
    if deterministic and has_gpu:
        raise UserError("deterministic=true holds on CPU only, and this machine has a GPU; set it to false")
    if config.offload_optimizer and not has_gpu:
        raise UserError(
            "actor.offload_optimizer=true moves optimizer state from a GPU to the host, and no GPU was found; "
            "set it to false"
        )
