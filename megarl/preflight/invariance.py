"""Checks that the actor's numbers do not depend on its layout: log-probs, advantages, loss and gradient norm.

`python -m megarl.preflight check=invariance` runs one batch on tiny random models, in worlds of one, two and four local
ranks. Each world runs all its layouts in turn. A table shows each layout's difference from the single process.
`keep=FOLDER` keeps the figures, to be compared with another version.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.distillation import TOP_IDS, TOP_LOGPROBS, Distillation, MegatronTeacher, top_k_of
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.weights import peft_files
from megarl.actor.weights.shards import tensor_shapes
from megarl.algorithms import GRPO, GRPOConfig
from megarl.algorithms.opd import OPD, OPDConfig
from megarl.families import Adapters, read_config, with_adapters
from megarl.launcher.local import run_ranks
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

TOLERANCE = 1e-5  # relative, in float32
WIDTH = 110  # characters of the table, where the output is no terminal
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 353,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
MODELS = {
    "dense": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "teacher": Qwen3Config(**{**SHAPE, "hidden_size": 96, "vocab_size": 357}, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        mlp_only_layers=[0], tie_word_embeddings=False,
    ),
    "latent": DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4, "head_dim": 6}, q_lora_rank=40, kv_lora_rank=28, qk_nope_head_dim=14,
        qk_rope_head_dim=6, v_head_dim=10, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=48,
        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=1.8, first_k_dense_replace=1,
        norm_topk_prob=True, tie_word_embeddings=False,
    ),
    "delta": Qwen3_5TextConfig(
        **SHAPE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10,
        layer_types=["linear_attention", "full_attention"] * 2, tie_word_embeddings=False,
    ),
    "mtp": Glm4MoeConfig(
        **{**SHAPE, "num_nextn_predict_layers": 2}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "sinks": GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=False,
    ),
}  # fmt: skip
COMPLETIONS = 4  # per prompt, of three prompts
LENGTHS = (19, 33, 11, 26, 48, 17, 21, 9, 40, 14, 28, 23)
TEACHER_BETA, TEACHER_TOP = 0.5, 8
PROMPT = 4  # tokens that are not trained
LORA, ADAPTERS = LoraConfig(rank=4, alpha=8.0), "adapters"
FIGURES = ("logprobs", "advantages", "loss", "grad_norm")


@dataclass(frozen=True)
class Case:
    """One layout to run the batch under."""

    model: str = "dense"
    knobs: dict[str, Any] = field(default_factory=dict)
    max_tokens_per_mb: int = 120
    experts: str = "auto"  # actor.experts
    prompts: bool = False  # completions of a group begin with a common prompt
    shared: bool = False  # actor.shared_prefix
    lora: bool = False  # trains adapters
    divergence: str = ""  # algorithm.divergence from the model `teacher`; "" trains by GRPO

    @property
    def reference(self) -> str:
        """Name of the case of the single process, on the same model and batch."""
        if self.divergence:
            return f"{self.divergence} teacher tp1"
        if self.lora:
            return f"lora {self.model} tp1"
        return "prompts tp1" if self.prompts else "tp1" if self.model == "dense" else f"{self.model} tp1"

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**{"dp_size": 1, **self.knobs})

    @property
    def ranks(self) -> int:
        parallel = self.parallel
        return parallel.tp_size * parallel.pp_size * parallel.cp_size * (parallel.dp_size or 1)


SP = {"tp_size": 2, "sequence_parallel": True}
CASES = {
    "tp1": Case(),
    "one by one": Case(max_tokens_per_mb=max(LENGTHS)),
    "tp2": Case(knobs={"tp_size": 2}),
    "tp2 sp": Case(knobs=SP),
    "pp2": Case(knobs={"pp_size": 2}),
    "pp2, 3 + 1 layers": Case(knobs={"pp_size": 2, "first_stage_layers": 3}),
    "pp2 vpp2": Case(knobs={"pp_size": 2, "vpp_size": 2}),
    "cp2": Case(knobs={"cp_size": 2}),
    "dp2": Case(knobs={"dp_size": 2}),
    "dp2 overlap": Case(knobs={"dp_size": 2, "overlap": True}),
    "tp4, 2 KV heads": Case(knobs={"tp_size": 4}),
    "tp2 pp2": Case(knobs={"tp_size": 2, "pp_size": 2}),
    "cp2 tp2": Case(knobs={"cp_size": 2, "tp_size": 2}),
    "cp2 tp2 sp": Case(knobs={"cp_size": 2, **SP}),
    "cp2 pp2 vpp2": Case(knobs={"cp_size": 2, "pp_size": 2, "vpp_size": 2}),
    "dp2 pp2": Case(knobs={"dp_size": 2, "pp_size": 2}),
    "cp2 dp2": Case(knobs={"cp_size": 2, "dp_size": 2}),
    "dp2 pp2 vpp2 overlap": Case(knobs={"dp_size": 2, "pp_size": 2, "vpp_size": 2, "overlap": True}),
    "prompts tp1": Case(prompts=True),
    "prompts shared": Case(prompts=True, shared=True),
    "prompts shared tp2 sp": Case(knobs=SP, prompts=True, shared=True),
    "prompts shared pp2": Case(knobs={"pp_size": 2}, prompts=True, shared=True),
    "full teacher tp1": Case(divergence="full"),
    "full teacher tp2 sp": Case(knobs=SP, divergence="full"),
    "full teacher pp2": Case(knobs={"pp_size": 2}, divergence="full"),
    "full teacher cp2": Case(knobs={"cp_size": 2}, divergence="full"),
    "full teacher dp2": Case(knobs={"dp_size": 2}, divergence="full"),
    "top_k teacher tp1": Case(divergence="top_k"),
    "top_k teacher tp2": Case(knobs={"tp_size": 2}, divergence="top_k"),
    "top_k teacher cp2": Case(knobs={"cp_size": 2}, divergence="top_k"),
    "moe tp1": Case("moe"),
    "moe ep2": Case("moe", {"dp_size": 2, "ep_size": 2}),
    "moe etp2": Case("moe", {"dp_size": 2, "etp_size": 2}),
    "moe cp2 ep2": Case("moe", {"cp_size": 2, "ep_size": 2}),
    "moe tp2 sp ep2": Case("moe", {**SP, "ep_size": 2, "etp_size": 1}),
    "moe tp2 sp ep2, grouped": Case("moe", {**SP, "ep_size": 2, "etp_size": 1}, experts="grouped"),
    "moe ep2 etp2": Case("moe", {"dp_size": 4, "ep_size": 2, "etp_size": 2}),
    "moe tp2 sp ep2 etp2, grouped": Case("moe", {**SP, "dp_size": 2, "ep_size": 2}, experts="grouped"),
    "moe ep2 etp2 overlap": Case("moe", {"dp_size": 4, "ep_size": 2, "etp_size": 2, "overlap": True}),
    "moe pp2 vpp2 ep2": Case("moe", {"pp_size": 2, "vpp_size": 2, "dp_size": 2, "ep_size": 2}),
    "lora dense tp1": Case(lora=True),
    "lora tp2 sp": Case(knobs=SP, lora=True),
    "lora pp2": Case(knobs={"pp_size": 2}, lora=True),
    "lora cp2": Case(knobs={"cp_size": 2}, lora=True),
    "lora dp2 overlap": Case(knobs={"dp_size": 2, "overlap": True}, lora=True),
    "lora moe tp1": Case("moe", lora=True),
    "lora moe tp2 sp ep2": Case("moe", {**SP, "ep_size": 2, "etp_size": 1}, lora=True),
    "lora moe pp2 etp2": Case("moe", {**SP, "pp_size": 2}, lora=True),
    "latent tp1": Case("latent"),
    "latent tp2 sp ep2": Case("latent", {**SP, "ep_size": 2, "etp_size": 1}),
    "latent tp2 sp": Case("latent", SP),
    "latent pp2": Case("latent", {"pp_size": 2}),
    "latent cp2 ep2": Case("latent", {"cp_size": 2, "ep_size": 2}),
    "delta tp1": Case("delta"),
    "delta tp2": Case("delta", {"tp_size": 2}),
    "delta tp2 sp": Case("delta", SP),
    "delta pp2": Case("delta", {"pp_size": 2}),
    "delta cp2": Case("delta", {"cp_size": 2}),
    "mtp tp1": Case("mtp"),
    "mtp tp2 sp ep2": Case("mtp", {**SP, "ep_size": 2, "etp_size": 1}),
    "mtp pp2": Case("mtp", {"pp_size": 2}),
    "mtp cp2 ep2": Case("mtp", {"cp_size": 2, "ep_size": 2}),
    "mtp dp2 pp2 overlap": Case("mtp", {"dp_size": 2, "pp_size": 2, "overlap": True}),
    "sinks tp1": Case("sinks"),
    "sinks tp2 sp ep2": Case("sinks", {**SP, "ep_size": 2, "etp_size": 1}),
    "sinks pp2": Case("sinks", {"pp_size": 2}),
    "sinks cp2 ep2": Case("sinks", {"cp_size": 2, "ep_size": 2}),
}
REFERENCES = {case.reference for case in CASES.values()}


def batch(prompts: bool = False) -> PackedBatch:
    """Three groups of `COMPLETIONS` sequences of mixed lengths, with random tokens and rewards.

    With `prompts`, the first `PROMPT` tokens are equal in a group.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    ids = torch.randint(0, SHAPE["vocab_size"], (total,), generator=generator)
    if prompts:
        group = (torch.arange(len(LENGTHS)) // COMPLETIONS).repeat_interleave(lengths)
        ids = torch.where(position < PROMPT, position + PROMPT * group, ids)
    return PackedBatch(
        cu_seqlens_of(lengths),
        {
            "input_ids": ids,
            "loss_mask": position >= PROMPT,
            "noise": 0.3 * torch.randn(total, generator=generator),
        },
        {
            "rewards": torch.rand(len(LENGTHS), generator=generator),
            "group_ids": torch.arange(len(LENGTHS)) // COMPLETIONS,
        },
    )


def build_actor(case: Case, folder: Path) -> MegatronPPOActor:
    """The actor of a case, with random weights."""
    config = EngineConfig(
        path=str(folder),
        init="random",
        max_tokens_per_mb=case.max_tokens_per_mb,
        experts=case.experts,
        shared_prefix=case.shared,
        lora=LORA if case.lora else LoraConfig(),
        mtp="train" if case.model == "mtp" else "carry",
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.0),
    )
    actor = MegatronPPOActor(config, algorithm_of(case), case.parallel)
    actor.initialize()
    if case.lora:
        actor.load(folder / ADAPTERS)
    return actor


def write_models(work: Path, models: Mapping[str, PretrainedConfig]) -> None:
    """Writes the models' configs below `work`, and adapters of those that a case trains by them."""
    adapted = {case.model for case in CASES.values() if case.lora}
    for name, config in models.items():
        with contextlib.redirect_stdout(io.StringIO()):
            config.save_pretrained(work / name)
        if name in adapted:
            _write_adapters(work / name)


def _write_adapters(folder: Path) -> None:
    """Writes random adapters of the model in `folder`. New ones have B = 0, and A then has no gradient."""
    adapters = Adapters(LORA.rank, tuple(LORA.targets), LORA.alpha)
    shapes = tensor_shapes(with_adapters(read_config(str(folder)), adapters))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    peft_files.write(folder / ADAPTERS, tensors, adapters, 0.0, str(folder))


def algorithm_of(case: Case) -> GRPO | OPD:
    """GRPO with a KL and an entropy bonus, or both of them beside a teacher."""
    terms: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "entropy_coef": 0.01}
    if case.divergence:
        return OPD(OPDConfig(**terms, divergence=case.divergence, beta=TEACHER_BETA, reward_coef=1.0))
    return GRPO(GRPOConfig(**terms))


def batch_of(actor: MegatronPPOActor, case: Case, work: Path) -> PackedBatch:
    """Makes the case's batch. A frozen model from `work` judges it first where the case has a teacher."""
    data = batch(case.prompts)
    if case.divergence:
        _ask_teacher(actor, case, data, work / "teacher")
    return data


def _ask_teacher(actor: MegatronPPOActor, case: Case, data: PackedBatch, folder: Path) -> None:
    """Has a frozen model judge the batch as `trainer/teacher.py` does."""
    teacher = MegatronTeacher(EngineConfig(path=str(folder), init="random", init_seed=2), case.parallel)
    teacher.initialize()
    actor.loss_input = Distillation(actor, TEACHER_BETA, teacher if case.divergence == "full" else None)
    ids, logprobs = top_k_of(teacher, data, TEACHER_TOP, SHAPE["vocab_size"])
    data.set_tokens(TOP_IDS, ids)
    data.set_tokens(TOP_LOGPROBS, logprobs)


def measure(actor: MegatronPPOActor, data: PackedBatch) -> dict[str, Tensor]:
    """Figures of one GRPO update under the actor's layout, equal on every rank.

    Where layers of multi-token prediction are trained, loss and gradient norm are theirs.
    """
    logprobs = actor.compute_logp(data)
    # Policies for the ratio and the KL, close to the present one: the ratio clips some tokens, not all.
    data["prox_logp"] = logprobs + data["noise"]
    data["ref_logp"] = logprobs - data["noise"] * data["loss_mask"]
    actor.compute_advantages(data)
    stats = actor.ppo_update(data)
    figures = {
        name: torch.tensor(stats.get(f"mtp_{name}", stats[name]), dtype=torch.float64) for name in ("loss", "grad_norm")
    }
    return {"logprobs": logprobs, "advantages": data["advantages"], **figures}


def worker(work: Path, names: Sequence[str]) -> None:
    """Runs cases of this rank's world, with new process groups for each."""
    torch.set_num_threads(1)
    for name in names:
        case = CASES[name]
        actor = build_actor(case, work / case.model)
        figures = measure(actor, batch_of(actor, case, work))
        if torch.distributed.get_rank() == 0:
            save_file(figures, work / f"{name}.safetensors")
        groups.leave_layout()
    groups.destroy()


def differences(work: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By case and figure: largest difference from the single process, relative to the largest magnitude."""
    figures = {name: load_file(work / f"{name}.safetensors") for name in names}
    result = {}
    for name in names:
        expected = figures[CASES[name].reference]
        result[name] = {
            figure: float((figures[name][figure] - expected[figure]).abs().max() / expected[figure].abs().max())
            for figure in FIGURES
        }
    return result


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row a case."""
    rows = Table(title=f"Difference from the single process, relative; at most {TOLERANCE:g} is allowed")
    rows.add_column("layout", no_wrap=True)
    for name in ("ranks", *FIGURES, ""):
        rows.add_column(name.replace("_", " "), justify="right")
    for name in results:
        is_reference = name in REFERENCES
        cells = ["-" if is_reference else f"{results[name][figure]:.1e}" for figure in FIGURES]
        verdict = "reference" if is_reference else "ok" if holds(results[name]) else "[bold red]differs[/]"
        rows.add_row(name, str(CASES[name].ranks), *cells, verdict, end_section=_ends_world(name))
    return rows


def holds(figures: dict[str, float]) -> bool:
    """True if every figure is within the tolerance. NaN is not."""
    return all(value <= TOLERANCE for value in figures.values())


def _ends_world(name: str) -> bool:
    """True if the next case runs on another number of ranks, or another model."""
    following = dict(itertools.pairwise(CASES)).get(name)
    if following is None:
        return False
    return (CASES[name].model, CASES[name].ranks) != (CASES[following].model, CASES[following].ranks)


def run_invariance(keep: Path | None = None, names: Sequence[str] = tuple(CASES)) -> int:
    """Runs cases and prints the table. Returns 1 if a figure differs by more than `TOLERANCE` or a world failed.

    Writes each case's figures to the folder `keep`. They are equal bit for bit from run to run on one machine.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for ranks without Apex and Transformer Engine
    with tempfile.TemporaryDirectory(prefix="megarl-invariance-") as folder:
        work = Path(folder)
        write_models(work, MODELS)
        for world in sorted({CASES[name].ranks for name in names}):
            cases = [name for name in names if CASES[name].ranks == world]
            with console.status(f"{len(cases)} layouts on {world} ranks"):
                code = run_ranks("megarl.preflight.invariance", [str(work), *cases], world, work)
            if code:
                print(f"megarl: the world of {world} ranks ended with code {code}", file=sys.stderr)
                return 1
        results = differences(work, names)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for name in names:
                shutil.copyfile(work / f"{name}.safetensors", keep / f"{name}.safetensors")
    console.print(table(results))
    return 0 if all(map(holds, results.values())) else 1


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2:])
