"""A short GRPO run on this machine's GPUs, and whether it did what a run must do.

    python benchmarks/acceptance/grpo_run.py --gpus 8 --layout apart|colocated [--model FOLDER] [--steps 20]

The model is a random Qwen3 unless --model names a checkpoint. The reward is the share of even tokens, which any model
learns in a few steps. Exit code 1 unless every sync was proven equal, log-probs of servers and trainer agree, and the
reward rose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # timing.py and this package

import torch
from timing import parse, record
from transformers import AutoModelForCausalLM, Qwen3Config

from acceptance.plan import benchmarks_on_path, overrides
from megarl.data.tokenizer import write_tokenizer
from megarl.observe import metrics
from megarl.observe.logger import read_metrics

WARM = 3  # steps in which CUDA graphs, allocators and compilers warm up
LOGPROB_BOUND = {"float32": 1e-3, "bfloat16": 0.05}  # nats, mean over a step's tokens
TRAIN_DEADLINE_S = 220


def write_model(folder: Path, on_gpu: bool) -> None:
    """A random Qwen3 with the bundled tokenizer: 0.2 B parameters on a GPU, a tiny one on a CPU."""
    hidden, layers, head = (1024, 8, 128) if on_gpu else (64, 2, 16)
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 2,
        head_dim=head,
        intermediate_size=3 * hidden,
        vocab_size=384,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    write_tokenizer(folder)


def command(args: argparse.Namespace, model: Path, root: Path) -> list[str]:
    random_rate = 3e-4 if args.gpus else 3e-3
    rate = f"actor.optimizer.lr={args.lr or (3e-5 if args.model else random_rate)}"
    places = [f"actor.path={model}", f"run_root={root}", "experiment_name=acceptance", rate]
    return [sys.executable, "-m", "megarl.train", *overrides(args.gpus, args.layout, args.steps), *places]


def check(args: argparse.Namespace, folder: Path) -> list[str]:
    """Records the run's figures. Returns what is wrong with it."""
    rows = read_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    labels = {"layout": args.layout, "gpus": args.gpus}
    stages = ("rollout", "logprobs", "update", "weights")
    for stage in stages:
        values = [row[f"{metrics.TIME}{stage}"] for row in rows[WARM:] if f"{metrics.TIME}{stage}" in row]
        if values:
            record(f"time of {stage}", statistics.median(values), "s", **labels)
    for name, figure in (("tokens_per_s_rollout", "rollout speed"), ("tokens_per_s_train", "training speed")):
        record(figure, summary[name], "tokens/s", **labels)
    gap = statistics.mean(row["train/logprob_diff_mean"] for row in rows)
    rewards = [row[metrics.REWARD] for row in rows]
    quarter = max(1, len(rewards) // 4)
    first, last = statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])
    record("log-prob difference of servers and trainer", gap, "nats", **labels)
    record("syncs proven equal", summary["weights_verified"], "syncs", **labels)
    record("reward, first quarter", first, "share", **labels)
    record("reward, last quarter", last, "share", **labels)
    bound = LOGPROB_BOUND["bfloat16" if args.gpus else "float32"]
    wrong = []
    if summary["weights_verified"] != args.steps:
        wrong.append(f"{summary['weights_verified']} of {args.steps} syncs were proven equal")
    if not gap <= bound:
        wrong.append(f"log-probs of servers and trainer differ by {gap:.2e} nats on average, above {bound:g}")
    if not last > first:
        wrong.append(f"the reward did not rise: {first:.3f}, then {last:.3f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="0: on the CPU")
    parser.add_argument("--layout", choices=("apart", "colocated"), required=True)
    parser.add_argument("--model", type=Path, help="folder of a HF checkpoint; default: a random model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, help="learning rate; default: one that suits the random model")
    args = parse(parser)
    with tempfile.TemporaryDirectory(prefix="megarl-acceptance-") as scratch:
        root = Path(scratch)
        if not args.model:
            write_model(root / "model", on_gpu=args.gpus > 0)
        train = command(args, args.model or root / "model", root)
        done = subprocess.run(train, env=benchmarks_on_path(), timeout=TRAIN_DEADLINE_S)
        if done.returncode:
            print(f"megarl.train ended with {done.returncode}")
            return 1
        wrong = check(args, root / "acceptance" / "latest")
    print("\n".join(wrong) or "every sync proven equal, log-probs agree, the reward rose")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
