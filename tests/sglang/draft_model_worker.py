"""An order of weights given to SGLang's own manager of updates, whose workers are stubs; prints the calls as JSON.

Usage: -m tests.sglang.draft_model_worker PARENT_PID. Speculative decoding has a draft model beside the served one.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from megarl.cpu import sglang_launch

sglang_launch.install()

import torch  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager  # noqa: E402

from megarl.reshard.sync.server_order import ServerOrder  # noqa: E402
from megarl.reshard.sync.sglang_hooks import UPDATED_MODEL, order_body  # noqa: E402


class Worker:
    """A worker of SGLang with one model, and the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("", SimpleNamespace(weight_updater=self))]

    def deserialize_own_rank(self, pickles: list[str]) -> list[str]:
        return pickles

    def begin_weight_update(self) -> None:
        self.calls.append("begin")

    def update_weights_from_tensor(self, **_: Any) -> tuple[bool, str]:
        self.calls.append("update")
        return True, ""

    def end_weight_update(self, **_: Any) -> None:
        self.calls.append("end")


class Manager(SchedulerWeightUpdaterManager):
    """Without the facts of a scheduler that runs."""

    def __init__(self, target: Worker, draft: Worker) -> None:
        self.tp_worker, self.draft_worker = target, draft
        self._session = self.tp_cpu_group = self.metrics_collector = self.scheduler = None
        self.flush_cache = lambda **_: True

    def record_weight_version_after_update(self, version: Any) -> None:
        """No-op: a scheduler's version."""


torch.distributed.barrier = lambda **_: None
target, draft = Worker(), Worker()
manager = Manager(target, draft)
order = ServerOrder.of("127.0.0.1", port=29500, server=0, session=1, epoch=0, join=1, attempt_number=1, deadline_ms=9)
manager.begin_weight_update(BeginWeightUpdateReqInput(**UPDATED_MODEL))
answer = manager.update_weights_from_tensor(UpdateWeightsFromTensorReqInput(**order_body(order, 1, True)))
manager.end_weight_update(EndWeightUpdateReqInput())
print(json.dumps({"success": answer.success, "target": target.calls, "draft": draft.calls}))
