"""PEFT's files of an adapter, and the checks of `actor.lora` against a model and an adapter. Imports no Megatron.

megarl                                 PEFT
actor.lora.rank, alpha, rslora         r, lora_alpha, use_rslora
actor.lora.targets                     target_modules
adapter_model.safetensors              base_model.model.NAME.lora_A.weight and .lora_B.weight
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.actor.weights import saved_file
from megarl.actor.weights.adapter_shards import SCORE
from megarl.actor.weights.shards import tensor_shapes
from megarl.families import Adapters, decoder
from megarl.families.adapters import ALL_LINEAR, EVERY_LINEAR, LORA_A
from megarl.knobs import UserError, does_not_exist
from megarl.parallel.config import ParallelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names


def write(folder: Path, tensors: dict[str, Tensor], adapters: Adapters, dropout: float, base: str) -> None:
    """Writes PEFT's two files of adapters of the model `base`. `tensors` have the names of `tensor_shapes`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    saved_file.save(named, folder / WEIGHTS)
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    if adapters.targets == (ALL_LINEAR,):  # PEFT's has the routers too
        names = {module.rpartition(".")[2] for module in modules}
    else:
        names = {name for name in adapters.targets if any(module.endswith(f".{name}") for module in modules)}
    scores = SCORE in tensors
    document = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": dropout,
        "use_rslora": adapters.rslora,
        "target_modules": sorted(names),
        "modules_to_save": ["score"] if scores else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads PEFT's adapter_config.json.

    Raises:
        UserError: there is none, or it is no LoRA adapter that can be trained here.
    """
    try:
        document: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"actor.lora.path={folder} has no readable {CONFIG} ({error}); give a PEFT adapter") from error
    wanted: dict[str, Any] = {
        "peft_type": "LORA",
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "lora_bias": False,
    }
    for name, value in wanted.items():
        if (given := document.get(name) or value) != value:
            raise UserError(f"actor.lora.path={folder} has {name}={given}; adapters here have {name}={value}")
    return document


def check_peft(folder: Path, config: LoraConfig) -> None:
    """Compares an adapter's config with the knobs.

    Raises:
        UserError: naming the first difference, with both values.
    """
    document = read_config(folder)
    for name, knob, value in (
        ("r", "rank", config.rank),
        ("lora_alpha", "alpha", config.alpha),
        ("use_rslora", "rslora", config.rslora),
    ):
        if document.get(name, False) != value:
            raise UserError(
                f"actor.lora.path={folder} has {name}={document.get(name)}, and actor.lora.{knob}={value}; set the "
                "knob to the adapter's value"
            )


def check_targets(config: LoraConfig, model: PretrainedConfig) -> None:
    """Refuses targets that name no linear layer of the model.

    Raises:
        UserError: naming the target, the nearest names and all of them.
    """
    if not config.rank:
        return
    if not config.targets:
        raise UserError("actor.lora.targets=[] leaves nothing to train; give all-linear or names such as q_proj")
    shapes = tensor_shapes(model)
    names = sorted({name.split(".")[-2] for name, shape in shapes.items() if EVERY_LINEAR.adapt(name, shape)})
    for target in config.targets:
        single = Adapters(1, (target,))
        adapted = [name for name, shape in shapes.items() if single.adapt(name, shape)]
        if not adapted or not all(EVERY_LINEAR.adapt(name, shapes[name]) for name in adapted):
            raise UserError(does_not_exist(f"actor.lora.targets={target}", target, [ALL_LINEAR, *names]))


def check_adapters(
    config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig, deterministic: bool
) -> None:
    """Refuses adapters of an unknown target, of another shape, or under an option that they do not take.

    Raises:
        UserError: naming the knob.
    """
    lora = config.lora
    if not lora.rank:
        if lora.quantization != "none":
            raise UserError(
                f"actor.lora.quantization={lora.quantization} is of a frozen model, and without adapters "
                "(actor.lora.rank=0) all weights are trained; set a rank"
            )
        return
    check_targets(lora, model)
    if lora.path:
        check_peft(Path(lora.path).expanduser(), lora)
    shape = decoder(model)
    for option, is_set, reason, remedy in (
        ("deterministic=true", deterministic, "their products depend on the batch", "false"),
        ("actor.mtp=train", config.mtp == "train", "the layers of multi-token prediction have none", "carry"),
        (f"actor.fp8={config.fp8}", config.fp8 != "off", "their base is not quantised", "off"),
        ("parallel.tp_comm_overlap=true", parallel.tp_comm_overlap, "they read the inputs of layers", "false"),
    ):
        if is_set:
            raise UserError(f"{option} does not go with adapters (actor.lora.rank): {reason}; set it to {remedy}")
    if config.experts == "grouped" and lora.quantization != "none":
        raise UserError(
            f"actor.experts=grouped does not go with actor.lora.quantization={lora.quantization}: each "
            "expert's weights are made when it runs; set it to auto"
        )
    tp, etp = parallel.tp_size, parallel.expert_tp_size
    if shape.experts is not None and etp not in (1, tp):
        raise UserError(
            f"parallel.etp_size={etp} with adapters must be 1 or parallel.tp_size={tp}: Megatron's gradient norm would "
            "count those of experts more than once; set it to 1"
        )
