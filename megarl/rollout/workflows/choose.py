"""Chooses and builds the workflow of a run, by `rollout.workflow` and by the algorithm.

A workflow of your own needs no entry here: `rollout.workflow=MODULE.CLASS` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.environments.pool import EnvironmentPool
from megarl.knobs import UserError, class_of, does_not_exist, function_of, shown
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.config import RolloutConfig
from megarl.rollout.reward_call import RewardFn
from megarl.rollout.workflows.agent import AgentWorkflow, agent_of
from megarl.rollout.workflows.environment import EnvironmentWorkflow
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.rollout_func import RolloutFuncWorkflow
from megarl.rollout.workflows.tool_use import ToolWorkflow, tools_of
from megarl.types import GenerationHyperparameters

DEFAULT = "rlvr"

WORKFLOWS = (
    DEFAULT,
    "multi_turn",
    "tool_use",
    "agent",
    "environment",
)  # what `rollout.workflow` names; "remax" is ReMax's own


def check_workflow(config: RolloutConfig, algorithm_workflow: str, algorithm: str) -> None:
    """Refuses a workflow that does not exist, lacks what it needs, or contradicts the algorithm or `rollout_func`.

    Imports nothing of the user's; `check_imports` does.

    Raises:
        UserError: naming the knob; `algorithm` is the algorithm's name in it.
    """
    workflow, function = config.workflow, config.rollout_func
    if workflow not in WORKFLOWS and "." not in workflow:
        known = does_not_exist(f"rollout.workflow={shown(workflow)}", workflow, WORKFLOWS)
        raise UserError(f"{known}, and MODULE.CLASS of your own")
    if function and workflow != DEFAULT:
        raise UserError(
            f"rollout.rollout_func={shown(function)} and rollout.workflow={shown(workflow)} both make the completions; "
            "leave one out"
        )
    if algorithm_workflow != DEFAULT:
        if function:
            raise UserError(
                f"rollout.rollout_func={shown(function)}: {algorithm} samples in a way of its own; choose another "
                "algorithm, or no function"
            )
        if workflow not in (DEFAULT, algorithm_workflow):
            raise UserError(
                f"rollout.workflow={shown(workflow)}: {algorithm} samples in a way of its own ({algorithm_workflow}); "
                "choose another algorithm, or leave rollout.workflow out"
            )
    if workflow == "tool_use":
        config.tool_use.check()
    if workflow == "agent":
        config.agent.check()
    if workflow == "environment":
        config.environment.check()


def check_imports(config: RolloutConfig) -> None:
    """Imports the functions and classes of the user's own that the workflow names; starts an environment once.

    Raises:
        UserError: one of them does not exist, or the environment cannot start.
    """
    if config.rollout_func:
        _rollout_func(config)
    elif config.workflow == "agent":
        agent_of(config.agent)
    elif config.workflow == "tool_use":
        tools_of(config.tool_use)
    elif config.workflow == "environment":
        EnvironmentPool(config.environment).close()
    elif config.workflow not in WORKFLOWS:
        _user_class(config.workflow)


def build_workflow(
    config: RolloutConfig,
    algorithm_workflow: str,
    reward_fn: RewardFn,
    gconfig: GenerationHyperparameters,
    tokenizer: Any,
    environments: EnvironmentPool | None = None,
) -> RolloutWorkflow:
    """The workflow of a run: the algorithm's own if it has one, else that of `rollout.workflow`.

    Evaluation passes `DEFAULT` for `algorithm_workflow`: an algorithm's own sampling is for training alone (ReMax's
    rewards are differences to a baseline). `environments` is the pool of `rollout.workflow=environment`.

    Raises:
        UserError: a function or class of the user's own does not exist, or cannot be constructed.
    """
    if config.rollout_func:
        return RolloutFuncWorkflow(_rollout_func(config), reward_fn, gconfig, tokenizer)
    name = config.workflow if algorithm_workflow == DEFAULT else algorithm_workflow
    if name == "rlvr":
        return RLVRWorkflow(reward_fn, gconfig, tokenizer)
    if name == "remax":
        return ReMaxRLVRWorkflow(reward_fn, gconfig, tokenizer)
    if name == "multi_turn":
        return MultiTurnWorkflow(reward_fn, gconfig, tokenizer, config.multi_turn)
    if name == "tool_use":
        return ToolWorkflow(reward_fn, gconfig, tokenizer, config.tool_use)
    if name == "agent":
        return AgentWorkflow(agent_of(config.agent), gconfig, tokenizer, config.agent)
    if name == "environment":
        assert environments is not None, "who runs a workflow opens its environments"
        return EnvironmentWorkflow(environments, reward_fn, gconfig, tokenizer)
    try:
        workflow: RolloutWorkflow = _user_class(name)(reward_fn, gconfig, tokenizer)
    except TypeError as error:
        raise UserError(f"rollout.workflow={name}(reward_fn, gconfig, tokenizer) cannot be made: {error}") from error
    return workflow


def _user_class(name: str) -> Any:
    return class_of(name, f"rollout.workflow={name}", RolloutWorkflow)


def _rollout_func(config: RolloutConfig) -> Callable[..., Any]:
    return function_of(config.rollout_func, f"rollout.rollout_func={shown(config.rollout_func)}")
