"""Knobs of rollouts: how the trainer asks the servers, and how a prompt is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.knobs import UserError, knob
from megarl.rollout.workflows.agent import AgentConfig
from megarl.rollout.workflows.multi_turn import MultiTurnConfig
from megarl.rollout.workflows.tool_use import ToolUseConfig


@dataclass(frozen=True)
class RolloutConfig:
    """The client of the rollout servers, and the workflow that samples each prompt."""

    workflow: str = knob(
        "rlvr", "how a prompt is sampled: rlvr, multi_turn, tool_use, agent, or MODULE.CLASS of your own"
    )
    max_connections: int = knob(256, "HTTP requests under way at once over all servers; further ones wait")
    max_per_server: int = knob(1024, "completions asked of a server at once; further requests wait, or go to another")
    connect_timeout_s: float = knob(10.0, "seconds until a server must have accepted a connection")
    request_timeout_s: float = knob(300.0, "seconds until a server must have answered a request")
    batch_timeout_s: float = knob(1800.0, "seconds until all episodes of a batch must have ended")
    max_retries: int = knob(3, "times a request is sent again after a lost connection or a 5xx answer")
    retry_delay_s: float = knob(0.5, "seconds before the first retry; doubled for each further one")
    max_head_offpolicyness: int = knob(
        0, "largest age of a trained token in weight versions; 0: rollouts and training alternate"
    )
    episode_timeout_s: float = knob(600.0, "seconds until an episode must have ended; later it is rejected")
    max_requeues: int = knob(8, "times a prompt is started again after its servers failed")
    max_failures: int = knob(16, "episodes that may fail in a row, each rejected, before the run stops")
    rollout_func: str = knob("", "MODULE.FUNCTION of your own that makes the completions, as TRL's rollout_func does")
    multi_turn: MultiTurnConfig = knob(factory=MultiTurnConfig, meaning="knobs of workflow=multi_turn")
    tool_use: ToolUseConfig = knob(factory=ToolUseConfig, meaning="knobs of workflow=tool_use")
    agent: AgentConfig = knob(factory=AgentConfig, meaning="knobs of workflow=agent")

    def __post_init__(self) -> None:
        above_zero = (
            "max_connections",
            "max_per_server",
            "connect_timeout_s",
            "request_timeout_s",
            "batch_timeout_s",
            "episode_timeout_s",
        )
        for name in above_zero:
            if not getattr(self, name) > 0:
                raise UserError(f"rollout.{name}={getattr(self, name)} must be more than 0")
        for name in ("max_retries", "retry_delay_s", "max_head_offpolicyness", "max_requeues", "max_failures"):
            if getattr(self, name) < 0:
                raise UserError(f"rollout.{name}={getattr(self, name)} must not be negative")
