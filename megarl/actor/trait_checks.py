"""Checks of an engine's knobs against the traits of its model's layers: windows, sinks, biases of experts, and MTP."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig, backend_of
from megarl.actor.weights.source_format import stored_names
from megarl.families import decoder, is_scalar, with_mtp
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import Determinism


def trained_model(config: EngineConfig, model: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the model as the actor trains it: marked with actor.mtp=train (`families/mtp.py`)."""
    return with_mtp(model) if config.mtp == "train" else model


def check_mtp(config: EngineConfig, model: PretrainedConfig) -> None:
    """Refuses actor.mtp=train for a model without layers of multi-token prediction that can be trained.

    Raises:
        UserError: the family or the config has none, they have a trait that is missing here, or the checkpoint lacks
            their tensors.
    """
    if config.mtp != "train" or is_scalar(model):
        return
    layers = decoder(with_mtp(model)).mtp
    if not layers:
        raise UserError(
            f"actor.mtp=train needs layers of multi-token prediction, and actor.path={config.path}, a "
            f"{model.model_type} model, has none that megarl knows by its config.json; set it to carry"
        )
    for name, supported in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
        if (value := getattr(model, name, supported)) != supported:
            raise UserError(
                f"actor.mtp=train takes {name}={supported}, and actor.path={config.path} has {value}; set it to carry"
            )
    folder, first = Path(config.path).expanduser(), f"{layers[0].projection}.weight"
    names = stored_names(folder) if config.init == "checkpoint" and folder.is_dir() else set()
    if names and first not in names:
        raise UserError(
            f"actor.mtp=train, and actor.path={config.path} lacks the tensor {first} of its layers of multi-token "
            "prediction; give a checkpoint that has them, or set it to carry"
        )


def check_mtp_knobs(config: EngineConfig, parallel: ParallelConfig) -> None:
    """Refuses options that layers of multi-token prediction do not support.

    Raises:
        UserError: naming the option.
    """
    for option, is_set, reason in (
        (
            "actor.shared_prefix=true",
            config.shared_prefix,
            "completions go on from a shared prompt differently",
        ),
        ("parallel.tp_comm_overlap=true", parallel.tp_comm_overlap, "their projection has no buffer for it"),
    ):
        if config.mtp == "train" and is_set:
            raise UserError(f"{option} does not go with actor.mtp=train: {reason}; set one of them to its default")


def check_windows(
    config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig, deterministic: Determinism
) -> None:
    """Refuses windows and sinks where layers or layout would ignore them; judges by the backend of a GPU.

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
    if deterministic.same_bits:
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
