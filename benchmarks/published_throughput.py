"""Compares simulated steps with published ones, from the published setups. No GPU is used.

    python benchmarks/published_throughput.py

Published: NeMo-RL's GRPO on H100s (docs/about/performance-summary.md of v0.6.0 and, for Llama, v0.5.0, with the recipes
under examples/configs/recipes/llm/performance). Taken from there: model, GPUs, layouts, batch, minibatches, longest and
mean length, staleness, memory share of the servers. In-flight weight updates keep caches there, as
reshard.pause_mode=in_place.

The rate of training is published elsewhere, for pretraining the same model on H100s (Megatron-Bridge 25.11,
docs/performance-summary.md): 121 TFLOP/s for Qwen3-30B-A3B and 233 for Qwen3-235B-A22B. Both include communication and
are of FP8, where NeMo-RL trained in BF16. None is published for Llama-3.1-8B in BF16: preflight's 35% is
used. Preflight's half of the memory's bandwidth for decoding, prompts of 128 tokens, the spread of lengths of
`pipeline.py`, and vLLM's 256 sequences at once are assumed. Nothing is fitted to the published steps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from pipeline import HOST_LINK, in_mode, log_normal, setup_of
from pipeline_simulator import Result, Simulation
from timing import parse, record

from megarl import cli
from megarl.families import read_config
from megarl.preflight import report
from megarl.preflight.roofline import under_way_of
from megarl.preflight.sizing import memory_of, server_memory_of

PROMPT = 128
SEQUENCES = 256  # vLLM's max_num_seqs
SIGMA = 0.99
GOAL = 0.25


@dataclass(frozen=True)
class Published:
    """A published step and its setup."""

    name: str
    step_s: float
    tokens_per_s: float  # a GPU
    model: str
    mean: int  # tokens of a sequence
    longest: int
    prompts: int
    minibatches: int
    trainer: str  # overrides
    servers: int
    server_tp: int
    memory: float  # the servers' share
    staleness: int = 0
    tflops: float = 0.35 * 989  # of training, with communication
    recompute: str = "none"

    def simulated(self, seed: int = 1) -> Result:
        """Simulates the setup."""
        overrides = f"""
            model={self.model} data=gsm8k cluster.gpus_per_node=8 train_dataset.batch_size={self.prompts}
            gconfig.n_samples=32 gconfig.max_new_tokens={self.longest - PROMPT} train_dataset.max_length={PROMPT}
            algorithm.n_minibatches={self.minibatches} algorithm.kl_coef=0.01 actor.max_tokens_per_mb={self.longest}
            actor.recompute={self.recompute} server.n_servers={self.servers} server.tp_size={self.server_tp}
            rollout.max_connections=100000 rollout.max_per_server={SEQUENCES} {self.trainer}
            +sglang.mem_fraction_static={self.memory} cluster.mean_length={self.mean / self.longest}
            cluster.train_utilisation={self.tflops / 989} cluster.node_gb_s=1000000 cluster.network_gb_s=1000000
        """
        config = cli.composed(overrides.split())
        model = read_config(str(report.folder_of(config.actor.path)))
        lengths = log_normal(self.mean - PROMPT, self.longest - PROMPT, SIGMA)
        setup = replace(setup_of(config, model, lengths), prompt_tokens=PROMPT)
        slots = under_way_of(config, model, self.staleness + 1)
        setup = replace(setup, sync_s=server_memory_of(config, model).weights / 50e9, slots=slots)
        if not self.staleness:
            swap_s = max(stage.weights + stage.optimizer for stage in memory_of(config, model)) / HOST_LINK
            shared = replace(setup, trainer_gpus=0, train_s=0.0)
            chosen = replace(in_mode(shared, "shared", swap_s), train_s=setup.train_s)
        else:
            chosen = replace(in_mode(setup, "partial", 0.0), staleness=self.staleness, keeps_cache=True)
            chosen = replace(chosen, slots=slots)
        return Simulation(chosen, seed).run()


MOE, LARGE, DENSE = "qwen3_30b_a3b", "qwen3_235b_a22b", "llama3_1_8b_instruct"
EP8 = "parallel.ep_size=8 parallel.etp_size=1"
OF_235B = "parallel.pp_size=8 parallel.ep_size=16 parallel.etp_size=1 parallel.sequence_parallel=true"
ENDS = "parallel.first_stage_layers=11 parallel.last_stage_layers=11"
CASES = (
    Published(
        "Qwen3-30B-A3B, in turn, 32 GPUs", 192, 1102, MOE, 3203, 4096, 64, 4,
        f"parallel.dp_size=32 {EP8}", 16, 2, 0.6, tflops=121,
    ),
    Published(
        "Qwen3-30B-A3B, 1 step off, 32 GPUs", 152, 1414, MOE, 3201, 4096, 64, 4,
        f"parallel.dp_size=8 parallel.pp_size=2 {EP8}", 8, 2, 0.8, 1, tflops=121,
    ),
    Published(
        "Qwen3-30B-A3B, 8 steps off, 192 GPUs", 34.5, 1025, MOE, 3206, 4096, 64, 4,
        f"parallel.dp_size=128 {EP8}", 32, 2, 0.8, 8, tflops=121,
    ),
    Published(
        "Qwen3-235B-A22B, 1 step off, 256 GPUs", 231, 58.7, LARGE, 5721, 8192, 16, 1,
        f"parallel.tp_size=4 parallel.dp_size=4 {OF_235B} {ENDS}", 16, 8, 0.88, 1, tflops=233, recompute="full",
    ),
    Published(
        "Llama-3.1-8B, in turn, 16 GPUs", 92.8, 1581, DENSE, 1019, 4096, 64, 4,
        "parallel.pp_size=2 parallel.dp_size=8", 16, 1, 0.6, recompute="full",
    ),
    Published(
        "Llama-3.1-8B, 1 step off, 16 GPUs", 64.8, 2478, DENSE, 1123, 4096, 64, 4,
        "parallel.dp_size=8", 8, 1, 0.8, 1, recompute="full",
    ),
)  # fmt: skip


def main() -> None:
    parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    print("| run | a step: published, simulated | ratio | tokens/s a GPU: published, simulated |")
    print("| --- | --- | --- | --- |")
    for case in CASES:
        found = case.simulated()
        ratio = found.step_s / case.step_s
        print(
            f"| {case.name} | {case.step_s:g} s, {found.step_s:.1f} s | {ratio:.2f} | {case.tokens_per_s:,g}, "
            f"{found.tokens_per_s:,.0f} |",
            flush=True,
        )
        record("simulated step over published", ratio, "", run=case.name)
    print(f"goal: within {GOAL:.0%}")


if __name__ == "__main__":
    main()
