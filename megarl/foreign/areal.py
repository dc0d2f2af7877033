"""Converts an AReaL YAML to megarl's knobs.

    python -m megarl.launcher.local SCRIPT.py --from-areal gsm8k_grpo.yaml [KNOB=VALUE ...]

Every key sets knobs, is listed as needing no change, or is refused by name. Keys and the grammar of `allocation_mode`
come from AReaL's modules cli_args and alloc_mode (https://github.com/inclusionAI/AReaL).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.foreign.adapters import set_adapters
from megarl.foreign.areal_keys import LORA, TABLES
from megarl.foreign.reading import Converted, Reading, flat, plain, reading_of
from megarl.foreign.yaml_file import Lines, load_yaml
from megarl.knobs import MAX_COUNT, UserError

_PART = re.compile(
    r"(?P<backend>sglang|vllm|fsdp|megatron|archon)?(?:[\[(](?P<name>\w+)[\])])?[:.]?(?P<sizes>(?:[dptce]\d+)+)"
)
LAYOUT = {"d": "dp_size", "p": "pp_size", "t": "tp_size", "c": "cp_size", "e": "ep_size"}


def read_areal(path: str) -> Converted:
    """Converts an AReaL YAML to overrides of knobs, and a table with each key's outcome.

    Raises:
        UserError: the file cannot be read, or some keys are not supported (all of them, one line each).
    """
    values, lines = load_yaml(path, "--from-areal")
    if "model" in values and "actor" not in values:
        raise UserError(
            f"{lines.at('model')}: model is the section of AReaL's SFT and reward files, and --from-areal reads those "
            "of RL, with actor; write its knobs for --config, such as method: sft and actor: {path: ...}"
        )
    reading = reading_of(flat(_resolved(values, lines)), lines)
    reading.overrides["experiment_name"] = Path(path).stem
    reading.set("actor", None, "method", "rl")
    if reading.flag("actor.use_decoupled_loss"):
        reading.overrides = {"algorithm": "decoupled_ppo", **reading.overrides}
        reading.note("actor.use_decoupled_loss", True, "algorithm=decoupled_ppo")
        cap = reading.optional_number("actor.behav_imp_weight_cap")
        if cap is not None:
            reading.set("actor.behav_imp_weight_cap", cap, "algorithm.correction_high", cap)
            reading.set(
                "actor.behav_imp_weight_cap", cap, "algorithm.correction", "mask", "heavier tokens are left out"
            )
    else:
        reading.overrides = {"algorithm": "grpo", **reading.overrides}
        if (cap := reading.take("actor.behav_imp_weight_cap")) is not None:
            reading.note("actor.behav_imp_weight_cap", cap, "no change: actor.use_decoupled_loss is off")
    coef = reading.optional_number("actor.kl_ctl")
    if coef is not None:
        for knob, value in (("kl_coef", coef), ("kl_in", "reward"), ("kl_estimator", "k1")):
            reading.set("actor.kl_ctl", coef, f"algorithm.{knob}", value)
    if not reading.flag("async_training", True):
        if (lag := reading.take("rollout.max_head_offpolicyness")) is not None:
            reading.note("rollout.max_head_offpolicyness", lag, "no change: async_training is false")
        reading.set("async_training", False, "rollout.max_head_offpolicyness", 0)
    if reading.unread.get("actor.use_lora") is True:
        reading.note("actor.use_lora", reading.take("actor.use_lora"), "see actor.lora_rank")
        if not reading.unread.get("actor.target_modules"):  # AReaL reads no target as all linear layers
            reading.unread["actor.target_modules"] = "all-linear"
        set_adapters(reading, LORA, {"rank": 32, "alpha": 16})
    mode = reading.text("allocation_mode")
    if mode:
        _allocation(reading, mode)
    nodes = reading.whole("cluster.n_nodes", 1, 1)
    reading.note("cluster.n_nodes", nodes, "the launcher's: slurm or ray place the ranks of the layout")
    epochs = reading.take("total_train_epochs")
    if epochs is not None:
        reading.note("total_train_epochs", epochs, "the script's own loop; total_train_steps is the schedule's length")
    share = reading.number("actor.optimizer.warmup_steps_proportion", 0.0)
    steps = reading.unread.get("total_train_steps", 100)
    if isinstance(steps, int) and not isinstance(steps, bool) and steps <= MAX_COUNT and 0 <= share < 1:
        key = "actor.optimizer.warmup_steps_proportion"
        reading.set(key, share, "actor.optimizer.warmup_steps", int(share * steps))
    if (wandb := reading.text("stats_logger.wandb.mode", "disabled")) != "disabled":
        reading.set("stats_logger.wandb.mode", wandb, "logger.wandb", True)
    else:
        reading.note("stats_logger.wandb.mode", wandb, "no change: it is off")
    return reading.finish(path, TABLES)


def _resolved(values: dict[str, Any], lines: Lines) -> dict[str, Any]:
    """The file's mapping, with references such as `${actor.path}` replaced.

    Raises:
        UserError: the file refers to a key that it lacks, or has a key that is no text.
    """
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        key = str(getattr(error, "full_key", None) or "")
        raise UserError(f"{lines.at(key) or lines.path}: {plain(key)}{': ' if key else ''}{first}") from error
    return dict(resolved)


def _allocation(reading: Reading, mode: str) -> None:
    """Sets the layouts in `allocation_mode`, such as `sglang:d4t2+fsdp:d4` or the older `sglang.d4p1t1+d4p1t1`."""
    parts = [_PART.fullmatch(part.strip()) for part in mode.split("+")]
    if "|" in mode:
        return reading.refuse("allocation_mode", mode, "shares GPUs; use server.colocate=true")
    if len(parts) > 2 or not all(parts):
        return reading.refuse("allocation_mode", mode, "is not SERVERS+TRAINER, such as sglang:d4t2+megatron:d2t2p1c1")
    for part in parts:
        assert part is not None, "checked above"
        sizes = {letter: int(number) for letter, number in re.findall(r"([dptce])(\d+)", part["sizes"])}
        if any(size < 1 for size in sizes.values()):
            reading.refuse("allocation_mode", mode, "has a size of 0")
        elif part["backend"] in ("sglang", "vllm"):
            _servers(reading, mode, sizes)
        else:
            for letter, size in sizes.items():
                reading.set("allocation_mode", mode, f"parallel.{LAYOUT[letter]}", size)


def _servers(reading: Reading, mode: str, sizes: dict[str, int]) -> None:
    """Sets the number and size of the servers."""
    if any(sizes.get(letter, 1) > 1 for letter in "pc"):
        return reading.refuse("allocation_mode", mode, "has servers with p or c above 1; weights reach t and e alone")
    reading.set("allocation_mode", mode, "server.n_servers", sizes.get("d", 1))
    reading.set("allocation_mode", mode, "server.tp_size", sizes.get("t", 1))
    if sizes.get("e", 1) > 1:
        reading.set("allocation_mode", mode, "sglang.ep_size", sizes["e"])
