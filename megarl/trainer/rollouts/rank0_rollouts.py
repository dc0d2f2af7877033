"""Rank 0's side of rollouts: the client of the servers, workflows, rewards and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from megarl.algorithms import Algorithm, OPDConfig
from megarl.config import Config, replays_rollout
from megarl.data.mixture import source_labels
from megarl.environments.pool import EnvironmentPool
from megarl.families import decoder
from megarl.observe.run_folder import RunFolder
from megarl.rewards import reward_fn_of
from megarl.rewards.answers import answer_of
from megarl.rewards.pool import RewardPool
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.client.routes import RouteShape
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.evaluate import Evaluator
from megarl.rollout.workflows.choose import DEFAULT, build_workflow
from megarl.rollout.workflows.distil import HintedWorkflow, TeacherAnswers
from megarl.served_checks import sampling_adapter
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.rank0_servers import Rank0Servers
from megarl.trainer.rollouts.teacher_servers import TeacherServers


class Rank0Rollouts:
    """Samples prompts and held-out problems.

    The constructor refuses every wrong knob. `connect` takes servers that are ready. `close` ends everything that was
    started, and leaves the servers.
    """

    def __init__(self, config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm) -> None:
        self.config = config
        self.inputs = inputs
        seed = config.server.random_seed if config.deterministic else None
        self.engine = RemoteSGLangEngine(config.rollout, seed)
        self.engine.vocab_size = inputs.vocab_size
        self.engine.adapter = sampling_adapter(config)
        self.engine.routes = RouteShape.of(decoder(inputs.model)) if replays_rollout(config) else None
        self.engine.max_sequence_tokens = max_sequence_tokens(config, inputs.model)
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
            self._open = opened.pop_all()

    def connect(self, servers: Rank0Servers, state: Mapping[str, Any]) -> None:
        """Connects the client to the servers, and the teacher's. The client continues from `state`."""
        if self._teacher is not None:
            self._teacher.connect()
        self.workflow = self._for_teacher(self.workflow)
        self.engine.initialize(servers.addresses, api_key=servers.api_key)
        self._open.callback(self.engine.destroy)
        servers.lead(self.engine)
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
        """Ends the client with its workflows, then the reward processes."""
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


def max_sequence_tokens(config: Config, model: PretrainedConfig) -> int:
    """Longest sequence, in tokens, that both the servers and the trainer can process."""
    limits = [config.actor.max_tokens_per_mb, model.max_position_embeddings]
    if config.server.max_total_tokens:
        limits.append(config.server.max_total_tokens)
    if context_length := config.sglang.get("context_length"):
        limits.append(int(context_length))
    return min(limits)
