"""Measures a checkpoint on held-out problems, without training.

python -m megarl.evaluate +experiment=gsm8k_grpo actor.path=DIR [evaluator.n_samples=8] [data=gsm8k]

Starts the rollout servers on the checkpoint, samples every problem of `valid_dataset` and prints the accuracy. The
samples are kept in a run folder of its own, which `python -m megarl.samples` reads, and the accuracy in its
`summary.json`.
"""

from __future__ import annotations

import sys

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from megarl.cli import run_command
from megarl.config import Config, server_arguments
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.observe.progress import print_wrapped
from megarl.observe.report import write_summary
from megarl.observe.run_folder import new_run
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.evaluate import Evaluation
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts.rank0_rollouts import build_evaluator, max_sequence_tokens, open_environments, open_rewards

USAGE = (
    "usage: python -m megarl.evaluate +experiment=NAME actor.path=DIR [evaluator.n_samples=8] [GROUP=NAME ...] "
    "[KNOB=VALUE ...]"
)


def main(config: Config) -> int:
    if config.method != "rl":
        raise UserError(f"method={config.method}: evaluation samples completions; use a recipe of method=rl")
    if config.server.quantization != "none":
        raise UserError(
            f"server.quantization={config.server.quantization} needs a trainer, which brings the weights; set it to "
            "none, or evaluate during training (evaluator.every_steps)"
        )
    unread = {
        "resume": config.resume,
        "actor.lora.path": config.actor.lora.path,
        "actor.lora.quantization": config.actor.lora.quantization,
        "adapters": config.adapters,
    }
    for knob, value in unread.items():
        if value and value != "none":
            raise UserError(
                f"{knob}={value}: an evaluation measures the checkpoint at actor.path alone; make one with python -m "
                "megarl.export checkpoint=RUN output=DIR merge=true, and set actor.path=DIR"
            )
    inputs = read_inputs(config, rank=0)
    folder = new_run(config.run_root, f"{config.experiment_name}_evaluate")
    OmegaConf.save(OmegaConf.structured(config), folder.config)
    with open_rewards(config) as rewards, open_environments(config) as environments:
        evaluator = build_evaluator(config, inputs, rewards, folder, environments)
        servers = SGLangServers(
            config.server,
            local_folder(config.actor.path),
            folder.logs,
            sglang=server_arguments(config),
            deterministic=config.determinism,
            first_gpu=0,
        )
        with servers:
            servers.start()
            servers.wait_ready()
            engine = RemoteSGLangEngine(config.rollout)
            engine.max_sequence_tokens = max_sequence_tokens(config, inputs.model)
            engine.initialize(servers.addresses, api_key=servers.api_key)
            try:
                evaluation = evaluator.evaluate(engine, 0)
            finally:
                engine.destroy()
    summary = {
        "experiment": folder.path.parent.name,
        "steps": 0,
        "accuracy_after": evaluation.accuracy,
        "accuracy_problems": evaluation.num_problems,
        "accuracy_samples": evaluation.num_samples,
    }
    write_summary(folder.path, summary)
    Console(width=None if sys.stdout.isatty() else 120).print(evaluation_table(config, evaluation))
    if environments is not None and (lost := environments.report()):
        print_wrapped(lost)
    print_wrapped(f"samples   {evaluation.path}")
    print_wrapped(f"read them python -m megarl.samples {folder.path}")
    return 0


def evaluation_table(config: Config, evaluation: Evaluation) -> Table:
    """The evaluation's figures."""
    k = config.evaluator.n_samples
    table = Table(title=f"{config.actor.path} on {evaluation.num_problems} problems x {k} samples")
    for column in ("measure", "value", "meaning"):
        table.add_column(column)
    accuracy = f"{evaluation.accuracy:.1%} ± {evaluation.stderr:.1%}"
    table.add_row("pass@1", accuracy, f"mean@{k}: part of all samples that solve; ± its standard error")
    table.add_row(f"pass@{k}", f"{evaluation.pass_at_k:.1%}", "part of problems that a sample solves")
    if f"maj@{k}" not in evaluation.estimates.get("", {}):  # below, with its interval
        table.add_row(f"maj@{k}", f"{evaluation.maj_at_k:.1%}", "part of problems whose most frequent answer is right")
    table.add_row("mean reward", f"{evaluation.mean_reward:.4f}", "over all samples")
    table.add_row("left out", str(evaluation.num_rejected), "problems without a sample that could be scored")
    for label, measures in evaluation.estimates.items():
        for measure, estimate in measures.items():
            value = f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
            over = f"on {label}" if label else "over all problems"
            table.add_row(
                f"{label} {measure}".strip(),
                value,
                f"{over}; {config.evaluator.confidence:.0%} interval: {estimate.method}",
            )
    return table


if __name__ == "__main__":
    run_command(main, USAGE)
