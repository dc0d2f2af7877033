"""Measures a checkpoint on held-out problems, without training.

python -m megarl.evaluate +experiment=gsm8k_grpo actor.path=DIR [evaluator.n_samples=8] [data=gsm8k]

Starts the rollout servers on the checkpoint, samples every problem of `valid_dataset`, prints what was found, and keeps
the samples in a run folder of its own (`python -m megarl.samples` reads them).
"""

from __future__ import annotations

import sys

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from megarl.cli import run_command
from megarl.config import Config
from megarl.families import local_folder
from megarl.knobs import UserError, function_of
from megarl.observe.run_folder import new_run
from megarl.rewards import reward_fn_of
from megarl.rewards.answers import answer_of
from megarl.rewards.pool import RewardPool
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.evaluate import Evaluation, Evaluator
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollout_driver import workflow_of


def main(config: Config) -> int:
    if config.method != "rl":
        raise UserError(f"method={config.method}: evaluation samples completions; use a recipe of method=rl")
    inputs = read_inputs(config, rank=0)
    folder = new_run(config.run_root, f"{config.experiment_name}_evaluate")
    OmegaConf.save(OmegaConf.structured(config), folder.config)
    functions = [reward_fn_of(name) for name in config.rewards.functions]
    name = config.rollout.rollout_func
    function = function_of(name, f"rollout.rollout_func={name}") if name else None
    with RewardPool(functions, config.rewards) as rewards:
        servers = SGLangServers(config.server, local_folder(config.actor.path), folder.logs, sglang=config.sglang)
        servers.start()
        try:
            servers.wait_ready()
            engine = RemoteSGLangEngine(config.rollout)
            engine.initialize(servers.addresses, api_key=servers.api_key)
            try:
                sampling = config.evaluator.sampling(config.gconfig)
                workflow = workflow_of("rlvr", function, rewards, sampling, inputs.tokenizer)
                evaluator = Evaluator(
                    config.evaluator, workflow, inputs.valid, inputs.tokenizer, folder.path / "evaluations", answer_of
                )
                found = evaluator.evaluate(engine, 0)
            finally:
                engine.destroy()
        finally:
            servers.stop()
    Console(width=None if sys.stdout.isatty() else 120).print(table(config, found))
    print(f"samples   {found.path}\nread them python -m megarl.samples {folder.path}")
    return 0


def table(config: Config, found: Evaluation) -> Table:
    """The evaluation's figures."""
    shown = Table(title=f"{config.actor.path} on {found.num_problems} problems x {config.evaluator.n_samples} samples")
    for column in ("measure", "value", "meaning"):
        shown.add_column(column)
    k = config.evaluator.n_samples
    shown.add_row("pass@1", f"{found.accuracy:.1%} ± {found.stderr:.1%}", f"mean@{k}: part of all samples that solve")
    shown.add_row(f"pass@{k}", f"{found.pass_at_k:.1%}", "part of problems that a sample solves")
    shown.add_row(f"maj@{k}", f"{found.maj_at_k:.1%}", "part of problems whose most frequent answer is right")
    shown.add_row("mean reward", f"{found.mean_reward:.4f}", "over all samples")
    shown.add_row("left out", str(found.num_rejected), "problems without a sample that could be scored")
    return shown


if __name__ == "__main__":
    run_command(main)
