"""A GRPO step of megarl against one of TRL's GRPOTrainer: the same tiny model, prompts, completions and optimizer.

    python benchmarks/grpo_step.py --trl-python PATH

TRL needs other versions of torch and transformers than SGLang, so it lives in an environment of its own; PATH is its
Python: `python -m venv trl-env && trl-env/bin/pip install trl==1.16.0`. megarl does not depend on it; without PATH
megarl's steps alone are measured.

8 prompts x 8 completions x 32 tokens in float32, one optimizer step a batch, on two cores. The checkpoint's end token
is one that is hardly ever sampled, so that all completions of both sides have 32 tokens, but for one in some thousand;
the script refuses to report otherwise. Sides run in turn, round by round, each a whole training run of which the steps
after the first WARM count; wall and processor seconds (of every process of the side) are per step, medians over the
rounds. TRL runs as it is fastest here: `generate` with its cache, one microbatch, no checkpointing of activations, no
logging but its default; once with a thread for each core, as it comes, and once with a single one, which suits so small
a model. megarl's server and trainer have one thread each. Both have an allocator that keeps its memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS = 8, 8, 32
LEARNING_RATE, CLIP_GRAD, EPS_CLIP = 1e-5, 1.0, 0.2
END = "<|system|>"  # which the model was never taught to write
WARM, STEPS = 10, 60
AHEAD = 2  # versions that a token may be old in asynchronous runs: the servers are then never without work
TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"
POLL_S = 0.02


def write_model(folder: Path) -> None:
    """The bundled checkpoint, with END for its end token."""
    shutil.copytree(TINY, folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = next(token["id"] for token in added if token["content"] == END)
    for name, key, value in (
        ("config.json", "eos_token_id", number),
        ("generation_config.json", "eos_token_id", number),
        ("tokenizer_config.json", "eos_token", END),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}, indent=1))


def trl_run(root: Path, steps: int) -> None:
    """TRL's side, in its own environment: appends a line to `root/steps.jsonl` at the end of each step."""
    import re

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [re.findall(r"####\s*(-?\d+)", text) for text in completions]
        return [float(bool(f) and f[-1] == a.split()[-1]) for f, a in zip(found, answer, strict=True)]

    class Steps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            lengths = trainer._metrics["train"]["completions/mean_length"]
            with (root / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "tokens": lengths[-1] if lengths else 0}) + "\n")

    config = GRPOConfig(
        output_dir=str(root / "out"), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=PROMPTS * SAMPLES, gradient_accumulation_steps=1, num_generations=SAMPLES,
        max_completion_length=TOKENS, temperature=1.0, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=CLIP_GRAD, epsilon=EPS_CLIP, beta=0.0, gradient_checkpointing=False, max_steps=steps, seed=1,
        logging_steps=10,
    )  # fmt: skip
    rows = [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Steps()],
    )  # fmt: skip
    trainer.train()


def megarl_command(root: Path, ahead: int) -> list[str]:
    settings = [
        "+experiment=gsm8k_grpo", f"total_train_steps={STEPS}", f"run_root={root}", f"actor.path={root / 'model'}",
        f"rollout.max_head_offpolicyness={ahead}", f"train_dataset.batch_size={PROMPTS}",
        f"gconfig.n_samples={SAMPLES}", f"gconfig.max_new_tokens={TOKENS}", "algorithm.n_minibatches=1",
        f"algorithm.eps_clip={EPS_CLIP}", f"actor.optimizer.lr={LEARNING_RATE}", "actor.optimizer.warmup_steps=0",
        "actor.optimizer.lr_decay_style=constant", f"actor.optimizer.clip_grad={CLIP_GRAD}",
        "actor.optimizer.adam_beta2=0.999", "evaluator.every_steps=0", "evaluator.at_start=false",
        "evaluator.at_end=false", "saver.every_steps=0", "saver.export_hf=false", "logger.tensorboard=false",
        "actor.shared_prefix=true", "+sglang.disable_radix_cache=true",
        "+sglang.log_level=warning",
    ]  # fmt: skip
    return [sys.executable, "-m", "megarl.train", *settings]


def processor_seconds(process: Any) -> float:
    """Of a process and all that it has started."""
    import psutil

    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(command: list[str], steps_file: Path, threads: int, log: Path) -> dict[str, float]:
    """Wall and processor seconds of a step of the run that `command` starts, which writes a line a step."""
    import psutil
    from timing import WARM_ALLOCATOR

    environment = os.environ | WARM_ALLOCATOR | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    lines: list[str] = []
    used: dict[int, float] = {}
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            lines = steps_file.read_text().splitlines(keepends=True) if steps_file.exists() else []
            for mark in (WARM, STEPS - 1):
                if len(lines) >= mark and lines[mark - 1].endswith("\n") and mark not in used:
                    used[mark] = processor_seconds(tree)
            time.sleep(POLL_S)
    if process.returncode != 0 or len(used) < 2:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in lines[:STEPS]]
    lengths = {row.get("tokens", row.get("rollout/completion_len")) for row in rows[WARM:]}
    if not TOKENS - 0.5 < min(lengths) <= max(lengths) <= TOKENS:  # END may come after all, once in 100,000 tokens
        raise SystemExit(f"completions of {sorted(lengths)} tokens and not {TOKENS}: the sides did unequal work")
    counted = STEPS - 1 - WARM
    return {
        "wall": (rows[STEPS - 2]["time"] - rows[WARM - 1]["time"]) / counted,
        "processor": (used[STEPS - 1] - used[WARM]) / counted,
    }


def one_round(root: Path, number: int, trl_python: str) -> dict[str, dict[str, float]]:
    """Each side's seconds of a step, one run after the other."""
    found = {}
    for name, ahead in (("synchronous", 0), ("asynchronous", AHEAD)):
        experiment = f"{name}-{number}"
        command = [*megarl_command(root, ahead), f"experiment_name={experiment}"]
        found[f"megarl, {name}"] = measure(command, root / experiment / "latest" / "metrics.jsonl", 1, root / "log")
    for threads in (1, 2) if trl_python else ():
        steps = root / "steps.jsonl"
        steps.unlink(missing_ok=True)
        command = [trl_python, __file__, "--trl-side", str(root)]
        found[f"TRL, threads: {threads}"] = measure(command, steps, threads, root / "log")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default="", help="the Python of an environment that has TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_side:
        trl_run(Path(args.trl_side), STEPS)
        return

    from timing import machine

    from megarl.data.arithmetic import generate

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root / "model")
        rows = [
            {"prompt": f"<|user|>{row['question']}<|assistant|>", "answer": row["answer"]}
            for row in generate("train", 0)[: PROMPTS * STEPS]
        ]
        (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for number in range(args.rounds):
            rounds.append(one_round(root, number, args.trl_python))
            print(f"round {number + 1} of {args.rounds}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
    print(f"{machine('cpu')}; {PROMPTS} prompts x {SAMPLES} completions x {TOKENS} tokens, two cores")
    print(f"a step, medians of {args.rounds} runs of {STEPS} steps, the first {WARM} left out")
    sides = {
        side: {clock: statistics.median(one[side][clock] for one in rounds) for clock in ("wall", "processor")}
        for side in rounds[0]
    }
    for side, seconds in sides.items():
        print(f"  {side:22s} {seconds['wall']:.3f} s wall, {seconds['processor']:.3f} s processor")
    for side, other in itertools.product(sides, sides):
        if side.startswith("megarl") and other.startswith("TRL"):
            ratios = [sides[other][clock] / sides[side][clock] for clock in ("wall", "processor")]
            goal = 1.5 if side.endswith(", synchronous") else 2
            print(f"  {side}: {ratios[0]:.2f}x the speed of {other}, {ratios[1]:.2f}x by processor time (goal {goal}x)")
    if not args.trl_python:
        print("TRL was not measured: see --help for how to get it")


if __name__ == "__main__":
    main()
