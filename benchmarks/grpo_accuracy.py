"""GRPO of megarl and of TRL from the same start with the same settings: held-out accuracy over training, over seeds.

    python -m venv TRL && TRL/bin/pip install torch==2.13.0 trl==1.16.0
    OMP_NUM_THREADS=1 python benchmarks/grpo_accuracy.py --trl-python TRL/bin/python [--seeds 1 2 3] [--steps 80]

Both sides train the bundled checkpoint by the recipe gsm8k_grpo: the same prompts in the same order, the same reward
function, sampling, group size and samples; Adam, clipping and learning rate of every optimizer step; the loss a mean
over the tokens of a minibatch. TRL samples with transformers, on the weights it trains; megarl with SGLang. Checkpoints
of both are measured by one evaluator on one server. About 20 minutes on two cores. Draws docs/grpo_accuracy.png.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVALUATIONS = 4  # checkpoints measured after the start
SIDES = {"megarl": "#1769aa", "TRL": "#c05621"}
Curve = dict[int, float]  # by training step


def trained_by_megarl(seed: int, steps: int, root: Path) -> tuple[dict[int, Path], Curve]:
    """Checkpoints by step, and the mean reward of each step's samples."""
    from megarl.export import ExportConfig, export
    from megarl.observe.logger import read_metrics
    from megarl.observe.metrics import REWARD

    command = [sys.executable, "-m", "megarl.train", *overrides(seed, steps), f"run_root={root}"]
    with (root / f"megarl_{seed}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    run = (root / f"grpo_accuracy_{seed}" / "latest").resolve()
    folders = {}
    for step in measured(steps):
        kept = run / "checkpoints" / f"step_{step:06d}"
        folders[step] = export(ExportConfig(str(kept), str(run / f"hf_{step}")))
    return folders, {
        int(row["step"]): row[REWARD] for row in read_metrics(run.joinpath("metrics.jsonl")) if REWARD in row
    }


def trained_by_trl(seed: int, steps: int, root: Path, python: str) -> tuple[dict[int, Path], Curve]:
    """The same of TRL: its interpreter runs this script with the settings in a file."""
    from megarl import cli
    from megarl.data.templates import prompt_ids
    from megarl.trainer.inputs import read_inputs

    config = cli.load(overrides(seed, steps))
    inputs = read_inputs(config, 0)
    adam, prompts = config.actor.optimizer, config.train_dataset.batch_size
    assert inputs.train is not None
    rows = [row for _ in range(steps) for row in next(inputs.train)]
    minibatches = config.algorithm.n_minibatches  # type: ignore[attr-defined]
    folder = root / f"trl_{seed}"
    settings = {
        "folder": str(folder),
        "start": config.actor.path,
        "rows": [{"prompt": row["messages"], "answer": row["answer"]} for row in rows],
        "prompt_ids": [list(prompt_ids(inputs.tokenizer, row["messages"])) for row in rows],
        "learning_rates": learning_rates(adam.lr, adam.warmup_steps, steps),
        "betas": [adam.adam_beta1, adam.adam_beta2],
        "adam_eps": adam.adam_eps,
        "minibatches": minibatches,
        "save_every": minibatches * steps // EVALUATIONS,
        "arguments": {
            "per_device_train_batch_size": prompts * config.gconfig.n_samples // minibatches,
            "steps_per_generation": minibatches,
            "num_generations": config.gconfig.n_samples,
            "max_completion_length": config.gconfig.max_new_tokens,
            "temperature": config.gconfig.temperature,
            "epsilon": config.algorithm.eps_clip,  # type: ignore[attr-defined]
            "max_grad_norm": adam.clip_grad,
            "max_steps": minibatches * steps,
            "seed": seed,
        },
    }
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [python, __file__, "--trl-settings", str(folder / "settings.json")]
    with (root / f"trl_{seed}.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    rewards = json.loads((folder / "rewards.json").read_text())
    folders = {step: folder / f"checkpoint-{step * minibatches}" for step in measured(steps)}
    return folders, dict(enumerate(rewards, start=1))


def train_with_trl(path: str) -> None:
    """In TRL's interpreter: trains by the settings of the file, keeps checkpoints and the rewards of the steps."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from megarl.rewards.gsm8k import gsm8k_reward_fn

    settings = json.loads(Path(path).read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["start"])
    for row, ids in zip(settings["rows"], settings["prompt_ids"], strict=True):
        assert tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) == ids
    rewards: list[float] = []

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [gsm8k_reward_fn("", c[0]["content"], [], [], a) for c, a in zip(completions, answer, strict=True)]
        rewards.append(statistics.mean(found))
        return found

    model = AutoModelForCausalLM.from_pretrained(settings["start"], dtype=torch.float32)
    adam = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=tuple(settings["betas"]), eps=settings["adam_eps"], weight_decay=0.0
    )
    rates, minibatches = settings["learning_rates"], settings["minibatches"]
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda n: rates[min(n // minibatches, len(rates) - 1)])
    arguments = GRPOConfig(
        output_dir=settings["folder"], **settings["arguments"], gradient_accumulation_steps=1, loss_type="bnpo",
        scale_rewards="group", beta=0.0, top_p=1.0, top_k=0, num_iterations=1, shuffle_dataset=False,
        save_strategy="steps", save_steps=settings["save_every"], save_only_model=True, logging_steps=minibatches,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward, args=arguments, train_dataset=Dataset.from_list(settings["rows"]), processing_class=tokenizer,
        optimizers=(adam, schedule),
    )  # fmt: skip
    trainer.train()
    Path(settings["folder"], "rewards.json").write_text(json.dumps(rewards))


def overrides(seed: int, steps: int) -> list[str]:
    """megarl's run: the recipe, with TRL's epsilon in the advantages."""
    return [
        "+experiment=gsm8k_grpo", f"experiment_name=grpo_accuracy_{seed}", f"seed={seed}", f"total_train_steps={steps}",
        "algorithm.advantage_eps=1e-4", f"saver.every_steps={steps // EVALUATIONS}", f"saver.keep={EVALUATIONS}",
        "evaluator.every_steps=0", "evaluator.at_start=false", "evaluator.at_end=false",
    ]  # fmt: skip


def measured(steps: int) -> list[int]:
    return [steps * k // EVALUATIONS for k in range(1, EVALUATIONS + 1)]


def learning_rates(peak: float, warmup: int, steps: int) -> list[float]:
    """Of every training step: the recipe's warm-up and linear decay, as Megatron's scheduler has them."""
    return [
        peak * (n / warmup if n <= warmup else 1 - (n - warmup) / (steps + 1 - warmup)) for n in range(1, steps + 1)
    ]


def measure(folders: Sequence[Path], samples: int, root: Path) -> list[float]:
    """Held-out accuracy of each checkpoint, all of one shape, on one server."""
    import requests

    from megarl import cli
    from megarl.rewards import reward_fn_of
    from megarl.rewards.answers import answer_of
    from megarl.rewards.pool import RewardPool
    from megarl.rollout.client.sglang_client import RemoteSGLangEngine
    from megarl.rollout.evaluate import Evaluator
    from megarl.rollout.servers.sglang_server import SGLangServers
    from megarl.rollout.workflows.rlvr import RLVRWorkflow
    from megarl.trainer.inputs import read_inputs

    config = cli.load(["+experiment=gsm8k_grpo", f"actor.path={folders[0]}", f"evaluator.n_samples={samples}"])
    inputs = read_inputs(config, 0)
    functions = [reward_fn_of(name) for name in config.rewards.functions]
    servers = SGLangServers(config.server, Path(config.actor.path), root)
    engine, found = RemoteSGLangEngine(config.rollout), []
    with RewardPool(functions, config.rewards) as rewards, servers:
        servers.start()
        servers.wait_ready()
        engine.initialize(servers.addresses, api_key=servers.api_key)
        workflow = RLVRWorkflow(rewards, config.evaluator.sampling(config.gconfig), inputs.tokenizer)
        for number, folder in enumerate(folders):
            answer = requests.post(
                f"http://{servers.addresses[0]}/update_weights_from_disk", json={"model_path": str(folder)},
                headers={"Authorization": f"Bearer {servers.api_key}"}, timeout=120,
            )  # fmt: skip
            assert answer.ok, answer.text
            evaluator = Evaluator(
                config.evaluator, workflow, inputs.valid, inputs.tokenizer, root / "evaluations", answer_of
            )
            found.append(evaluator.evaluate(engine, number).accuracy)
            print(f"{folder}: {found[-1]:.1%}", flush=True)
        engine.destroy()
    return found


def draw(results: Mapping[str, Mapping[int, Mapping[str, Curve]]], samples: int, path: Path) -> None:
    """Held-out accuracy and training reward against samples: each seed thin, their mean bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.1), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    titles = {"accuracy": ("Held-out accuracy", "solved (%)"), "reward": ("Training reward", "mean of 8 steps (%)")}
    for axes, (key, (title, label)) in zip(panels, titles.items(), strict=True):
        for side, color in SIDES.items():
            curves = [smoothed(run[key], 1 if key == "accuracy" else 8) for run in results[side].values()]
            steps = sorted(curves[0])
            at = [step * samples for step in steps]
            for curve in curves:
                axes.plot(at, [100 * curve[step] for step in steps], color=color, alpha=0.35, linewidth=1)
            mean = [100 * statistics.mean(curve[step] for curve in curves) for step in steps]
            marker = "o" if key == "accuracy" else None
            axes.plot(at, mean, color=color, linewidth=2.4, marker=marker, markersize=5, label=f"{side}, mean of seeds")
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel(label)
        axes.set_xlabel("completions sampled for training")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def smoothed(curve: Curve, window: int) -> Curve:
    """Trailing means, from the first whole window on."""
    steps = sorted(curve)
    return {
        step: statistics.mean(curve[s] for s in steps[i + 1 - window : i + 1])
        for i, step in enumerate(steps)
        if i + 1 >= window
    }


def show(results: Mapping[str, Mapping[int, Mapping[str, Curve]]]) -> None:
    """The table: every measured checkpoint, means with their standard error over seeds, and the ratios."""
    print(f"{'side':<8} {'seed':>4}  accuracy after steps")
    for side, runs in results.items():
        for seed, run in runs.items():
            steps = "  ".join(f"{step}: {value:.1%}" for step, value in sorted(run["accuracy"].items()))
            print(f"{side:<8} {seed:>4}  {steps}")
    last = max(next(iter(results["TRL"].values()))["accuracy"])
    measures: dict[str, Callable[[Mapping[str, Curve]], float]] = {
        "accuracy at the end": lambda run: run["accuracy"][last],
        "accuracy, mean of checkpoints": lambda run: statistics.mean(v for k, v in run["accuracy"].items() if k),
        "training reward, last quarter": lambda run: statistics.mean([*run["reward"].values()][-last // 4 :]),
    }
    for name, of in measures.items():
        found = {side: [of(run) for run in runs.values()] for side, runs in results.items()}
        texts = [f"{side} {statistics.mean(values):.1%} ± {error(values):.1%}" for side, values in found.items()]
        ratio = statistics.mean(found["megarl"]) / statistics.mean(found["TRL"])
        print(f"{name}: {', '.join(texts)}; ratio {ratio:.3f}")


def error(values: Sequence[float]) -> float:
    """Standard error of the mean over seeds."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter that has TRL 1.16 (see above)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80, help="a multiple of 4")
    parser.add_argument("--eval-samples", type=int, default=8, help="completions a held-out problem")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--run-root", default="runs", help="where a folder for runs, logs and results.json is made")
    parser.add_argument("--trl-settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_settings:
        train_with_trl(args.trl_settings)
        return
    if not args.trl_python:
        print("needs TRL in an environment of its own, given as --trl-python:\n" + __doc__.split("\n\n")[1])
        return
    from megarl.observe.run_folder import new_run

    root = new_run(args.run_root, "grpo_accuracy").path.resolve()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            (side, seed): pool.submit(trained_by_megarl, seed, args.steps, root)
            if side == "megarl"
            else pool.submit(trained_by_trl, seed, args.steps, root, args.trl_python)
            for seed in args.seeds
            for side in SIDES
        }
        trained = {key: run.result() for key, run in runs.items()}
    start = ROOT / "assets" / "tiny"
    folders = [start, *(folder for found, _ in trained.values() for folder in found.values())]
    accuracies = dict(zip(folders, measure(folders, args.eval_samples, root), strict=True))
    results: dict[str, dict[int, dict[str, Curve]]] = {side: {} for side in SIDES}
    for (side, seed), (found, rewards) in trained.items():
        by_step = {0: accuracies[start], **{step: accuracies[folder] for step, folder in found.items()}}
        results[side][seed] = {"accuracy": by_step, "reward": rewards}
    (root / "results.json").write_text(json.dumps(results))
    show(results)
    draw(results, 256, ROOT / "docs" / "grpo_accuracy.png")


if __name__ == "__main__":
    main()
