"""Tasksets of verifiers: a task's prompt begins an episode, its rubric scores the answer.

A row's column `task` is the task's position in the taskset. Tasks that need a container, tools or a simulated user are
refused; verifiers' own agents play them, over `rollout.workflow=agent`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from megarl.environments.base import Environment, Message, Step, package

PIN = "verifiers==0.4.0"


def require() -> None:
    """Refuses an interpreter without verifiers."""
    package("verifiers.v1", PIN)


def build(taskset: str, arguments: dict[str, Any]) -> Environment:
    """The taskset `taskset`, a module or its file, with `arguments` for its config."""
    if taskset.endswith(".py"):
        file = Path(taskset).expanduser().absolute()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        sys.path.insert(0, str(file.parent))
        taskset = file.stem
    return _Verifiers(taskset, arguments)


class _Verifiers(Environment):
    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        loaders = package("verifiers.v1.utils.loaders", PIN)
        self.vf = package("verifiers.v1", PIN)
        taskset_class = loaders.taskset_class(name)
        config = package("verifiers.v1.utils.generic", PIN).concrete_type(taskset_class, self.vf.TasksetConfig)
        taskset = taskset_class((config or self.vf.TasksetConfig)(id=name, **arguments))
        task_class = taskset_class.task_type()
        if task_class.NEEDS_CONTAINER or task_class.toolsets(taskset.config.task) or taskset.toolsets(taskset.config):
            raise ValueError(f"tasks of {name} need a container or tools; play them with rollout.workflow=agent")
        if not taskset.bounded:
            raise ValueError(f"the taskset {name} is infinite; bound it by its own arguments")
        self.tasks = list(taskset)
        self.prompt: list[Message] = []
        self.task: Any = None

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Begins the task at the row's `task`.

        Raises:
            IndexError: there is no such task.
            ValueError: it has no prompt of text.
        """
        if not 0 <= int(row["task"]) < len(self.tasks):
            raise IndexError(f"task={row['task']}: the taskset has {len(self.tasks)} tasks")
        self.task = self.tasks[int(row["task"])]
        data = self.task.data
        self.prompt = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            self.prompt.append({"role": "user", "content": data.prompt})
        for message in [] if isinstance(data.prompt, str) else data.prompt or []:
            if not isinstance(message.content, str):
                raise ValueError(f"task={row['task']} has content other than text in its prompt")
            self.prompt.append({"role": message.role, "content": message.content})
        if not any(message["role"] == "user" for message in self.prompt):
            raise ValueError(f"task={row['task']} has no prompt")
        return self.prompt

    def step(self, answer: str) -> Step:
        return Step(None, asyncio.run(self._score(answer)), True)

    async def _score(self, answer: str) -> float:
        """The weighted sum of the task's rewards, all of them.

        Raises:
            ValueError: a reward needs a container, which this episode does not have.
        """
        trace = self._trace(answer)
        await self.task.score(trace)
        rewards = self.task.hooks("reward")
        if not trace.rewards or len(trace.rewards) < len(rewards) or None in trace.rewards.values():
            raise ValueError(f"not all of {[reward.__name__ for reward in rewards]} scored; some need a container")
        return float(trace.reward)

    def _trace(self, answer: str) -> Any:
        """verifiers' record of the episode: the prompt, and the answer as a sampled message."""
        trace_module = package("verifiers.v1.trace", PIN)
        node = package("verifiers.v1.graph", PIN).MessageNode
        data = self.task.data
        task = trace_module.TraceTask(type=type(self.task).__name__, data=data, key=self.task.key, hash=self.task.hash)
        agent = trace_module.AgentInfo.model_construct(name="policy")
        messages = [*self.prompt, {"role": "assistant", "content": answer}]
        nodes = [
            node(parent=i - 1 if i else None, message=message, sampled=i == len(self.prompt))
            for i, message in enumerate(messages)
        ]
        return trace_module.Trace.model_construct(task=task, agent=agent, nodes=nodes, is_completed=True, ok=True)
