"""Knobs of rollouts: how the trainer asks the servers, and how a prompt is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.environments.config import EnvironmentConfig
from megarl.knobs import MAX_COUNT, MAX_SECONDS, check_ranges, knob
from megarl.rollout.workflows.agent import AgentConfig
from megarl.rollout.workflows.multi_turn import MultiTurnConfig
from megarl.rollout.workflows.tool_use import ToolUseConfig


@dataclass(frozen=True)
class RolloutConfig:
    """The client of the rollout servers, and the workflow that samples each prompt."""

    workflow: str = knob(
        "rlvr", "how a prompt is sampled: rlvr, multi_turn, tool_use, agent, environment, or MODULE.CLASS of your own"
    )
    max_connections: int = knob(
        256, "HTTP requests under way at once over all servers; further ones wait", least=1, most=MAX_COUNT
    )
    max_per_server: int = knob(
        1024, "completions asked of a server at once; further requests wait, or go to another", least=1, most=MAX_COUNT
    )
    connect_timeout_s: float = knob(
        10.0, "seconds until a server must have accepted a connection", above=0, most=MAX_SECONDS
    )
    request_timeout_s: float = knob(
        300.0, "seconds until a server must have answered a request", above=0, most=MAX_SECONDS
    )
    batch_timeout_s: float = knob(
        1800.0, "seconds until all episodes of a batch must have ended", above=0, most=MAX_SECONDS
    )
    max_retries: int = knob(
        3, "times a request is sent again after a lost connection or a 5xx answer", least=0, most=32
    )
    retry_delay_s: float = knob(
        0.5, "seconds before the first retry; doubled for each further one", least=0, most=MAX_SECONDS
    )
    max_head_offpolicyness: int = knob(
        0,
        "largest age of a trained token in weight versions; 0: rollouts and training alternate",
        least=0,
        most=MAX_COUNT,
    )
    episode_timeout_s: float = knob(
        600.0, "seconds until an episode must have ended; later it is rejected", above=0, most=MAX_SECONDS
    )
    max_requeues: int = knob(8, "times a prompt is started again after its servers failed", least=0, most=MAX_COUNT)
    max_failures: int = knob(
        16, "episodes that may fail in a row, each rejected, before the run stops", least=0, most=MAX_COUNT
    )
    rollout_func: str = knob("", "MODULE.FUNCTION of your own that makes the completions, as TRL's rollout_func does")
    multi_turn: MultiTurnConfig = knob(factory=MultiTurnConfig, meaning="knobs of workflow=multi_turn")
    tool_use: ToolUseConfig = knob(factory=ToolUseConfig, meaning="knobs of workflow=tool_use")
    agent: AgentConfig = knob(factory=AgentConfig, meaning="knobs of workflow=agent")
    environment: EnvironmentConfig = knob(factory=EnvironmentConfig, meaning="knobs of workflow=environment")

    def __post_init__(self) -> None:
        check_ranges(self, "rollout")
