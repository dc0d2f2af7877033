"""Checks of an engine's knobs against the traits of its model's layers: windows, sinks, and biases of experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig, backend_of
from megarl.families import decoder
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig


def check_windows(config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig, deterministic: bool) -> None:
    """Refuses windows and sinks on layers and layouts that would leave them out, as a GPU would take them.

    Raises:
        UserError: naming the trait and the knob.
    """
    attentions = decoder(model).attentions
    window = next((block.window for block in attentions if block.window), 0)
    if any(block.sinks for block in attentions):
        trait = "attention sinks"
    elif window:
        trait = f"a sliding window of {window} tokens"
    else:
        return
    if deterministic:
        raise UserError(
            f"deterministic=true has no row-invariant attention with {trait}, as this {model.model_type} model has; "
            "set it to false"
        )
    if backend_of(config, has_gpu=True, has_te=True) != "te":
        return
    for knob, is_set, off in (
        (f"parallel.cp_size={parallel.cp_size}", parallel.cp_size > 1, "1"),
        ("actor.shared_prefix=true", config.shared_prefix, "false"),
    ):
        if is_set:
            raise UserError(
                f"{knob} on Transformer Engine's layers has no attention with {trait}, as this {model.model_type} "
                f"model has; set it to {off}, or actor.backend=torch"
            )


def check_expert_biases(model: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuses biased experts cut over ranks: each would add the bias to its part of a sum (mlp.py:354).

    Raises:
        UserError: naming the layout.
    """
    experts, etp = decoder(model).experts, parallel.expert_tp_size
    if experts is not None and experts.biased and etp > 1:
        raise UserError(
            f"parallel.etp_size={etp} cuts experts, and those of this {model.model_type} model have biases, which each "
            "rank would add; set it to 1"
        )
