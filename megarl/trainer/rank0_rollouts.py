"""Rank 0's side of rollouts: servers, the client that asks them, workflows, rewards and evaluation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from megarl.algorithms import Algorithm, OPDConfig
from megarl.config import Config, server_arguments
from megarl.data.mixture import source_labels
from megarl.environments.pool import EnvironmentPool
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.parallel.rendezvous import job_folder
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rewards import reward_fn_of
from megarl.rewards.answers import answer_of
from megarl.rewards.pool import RewardPool
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.client.connections import KEY_VARIABLE, addresses_in_environment
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.evaluate import Evaluator
from megarl.rollout.servers.external import ExternalServers, JobServers
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from megarl.rollout.workflows.choose import DEFAULT, build_workflow
from megarl.rollout.workflows.distil import HintedWorkflow, TeacherAnswers
from megarl.served_checks import adapters_on_servers, sampling_adapter
from megarl.trainer.inputs import Inputs
from megarl.trainer.teacher_servers import TeacherServers


class Rank0Rollouts:
    """Samples prompts and held-out problems, on servers that it starts or finds.

    The constructor refuses every wrong knob, then starts the servers and returns; they load meanwhile. Co-located ones
    start in `connect`, which waits for all of them. `close` ends everything that was started.
    """

    def __init__(self, config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm) -> None:
        self.config = config
        self.inputs = inputs
        self.engine = RemoteSGLangEngine(config.rollout)
        self.engine.vocab_size = inputs.vocab_size
        self.engine.adapter = sampling_adapter(config)
        self.engine.max_sequence_tokens = max_sequence_tokens(config, inputs.model)
        self._supervisor: Supervisor | None = None
        with contextlib.ExitStack() as opened:
            rewards = opened.enter_context(open_rewards(config))
            self.environments = opened.enter_context(open_environments(config))
            self.workflow = build_workflow(
                config.rollout, algorithm.workflow, rewards, config.gconfig, inputs.tokenizer, self.environments
            )
            self.evaluator = build_evaluator(config, inputs, rewards, folder, self.environments)
            self._teacher = TeacherServers(config, folder.logs) if config.teacher.source == "server" else None
            if self._teacher is not None:
                opened.callback(self._teacher.close)
            self.scorer = self._teacher.scorer() if self._teacher is not None else None
            self.servers = choose_servers(config, folder.logs)
            opened.callback(self.servers.stop)
            if not config.server.colocate:
                self.servers.start()
            self._open = opened.pop_all()

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "connect() makes it"
        return self._supervisor

    def connect(self, state: Mapping[str, Any]) -> None:
        """Waits for the servers, supervises them and connects the client, which continues from `state`."""
        server = self.config.server
        if server.colocate:  # the trainer has given up the memory that they need
            self.servers.start()
        self.servers.wait_ready()
        if self._teacher is not None:
            self._teacher.connect()
        self.workflow = self._for_teacher(self.workflow)
        self._supervisor = Supervisor(self.servers.servers, server.heartbeat_s, server.max_restarts)
        self.engine.initialize(self.servers.addresses, api_key=self.servers.api_key)
        self._open.callback(self.engine.destroy)
        self.engine.follow(self._supervisor)
        self._supervisor.on_change = self.engine.refresh
        self._supervisor.start()
        self._open.callback(self._supervisor.close)
        self.engine.load_state_dict(state)

    def _for_teacher(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """Wraps the workflow so that samples have what the teacher needs."""
        config, teacher = self.config, self.config.teacher
        if teacher.hint:
            workflow = HintedWorkflow(workflow, teacher.hint, teacher.max_prompt_tokens, self.inputs.tokenizer)
        if isinstance(config.algorithm, OPDConfig) and config.algorithm.lmbda < 1:
            assert self._teacher is not None, "teacher_checks.py"
            sampler = self._teacher.sampler(self.inputs.vocab_size)
            workflow = TeacherAnswers(workflow, sampler, config.algorithm.lmbda, config.seed)
        return workflow

    def close(self) -> None:
        """Ends the supervision, the client with its workflows, the servers and the reward processes, in this order."""
        self._open.close()


def open_rewards(config: Config) -> RewardPool:
    """Processes that score completions by `rewards.functions`; a context manager."""
    return RewardPool([reward_fn_of(name) for name in config.rewards.functions], config.rewards)


def open_environments(config: Config) -> contextlib.AbstractContextManager[EnvironmentPool | None]:
    """Processes of `rollout.workflow=environment`, a context manager; None for another workflow."""
    if config.rollout.workflow != "environment":
        return contextlib.nullcontext()
    return EnvironmentPool(config.rollout.environment)


def build_evaluator(
    config: Config, inputs: Inputs, rewards: RewardPool, folder: RunFolder, environments: EnvironmentPool | None
) -> Evaluator:
    """The evaluator of held-out problems, by the training's workflow with the evaluator's sampling.

    An algorithm's own workflow does not count here: ReMax is evaluated by `rlvr`.
    """
    sampling = config.evaluator.sampling(config.gconfig)
    workflow = build_workflow(config.rollout, DEFAULT, rewards, sampling, inputs.tokenizer, environments)
    samples = folder.path / "evaluations"
    sets = source_labels(inputs.valid)
    return Evaluator(config.evaluator, workflow, inputs.valid, inputs.tokenizer, samples, answer_of, sets)


def choose_servers(config: Config, logs: Path) -> SGLangServers | ExternalServers:
    """The servers of the run: external ones from the environment, else this job's, else ones that it starts itself.

    Raises:
        UserError: a deterministic run with servers that it does not start.
    """
    key, addresses, job = os.environ.get(KEY_VARIABLE, ""), addresses_in_environment(), job_folder()
    if config.deterministic and (addresses or job is not None):
        raise UserError(
            "deterministic=true needs servers that this run starts on this machine: set it to false, or leave out "
            "servers that run elsewhere"
        )
    adapters = adapters_on_servers(config)
    if addresses:
        return ExternalServers(addresses, key, WEIGHT_LOADER, adapters)
    server = config.server
    if job is not None:
        return JobServers(job, server.n_servers, key, WEIGHT_LOADER, server.ready_timeout_s, adapters)
    model = local_folder(config.actor.path)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size()))  # torchrun: of this machine
    first_gpu = 0 if server.colocate else ranks
    return SGLangServers(
        server,
        model,
        logs,
        WEIGHT_LOADER,
        server_arguments(config),
        config.deterministic,
        first_gpu=first_gpu,
        adapters=adapters,
    )


def max_sequence_tokens(config: Config, model: PretrainedConfig) -> int:
    """Longest sequence, in tokens, that both the servers and the trainer can process."""
    limits = [config.actor.max_tokens_per_mb, model.max_position_embeddings]
    if config.server.max_total_tokens:
        limits.append(config.server.max_total_tokens)
    if context_length := config.sglang.get("context_length"):
        limits.append(int(context_length))
    return min(limits)
