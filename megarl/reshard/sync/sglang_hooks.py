"""The code that runs inside SGLang.

It is the weight loader, a sleep while the server is paused, the labels of tokens, and the keys of caches. `receive`
runs in every tensor-parallel rank of a server, which was started with `--custom-weight-loader` naming it.
The trainer's HTTP request carries a few integers; tensors and the report on them travel over a group of their own.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megarl.families.weight_formats import format_of
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync import server_rank
from megarl.reshard.sync.live_adapters import live_adapters
from megarl.reshard.sync.live_parameters import check_plain, complete, live_fragments, unsent_parameters
from megarl.reshard.sync.marlin_weights import MarlinWeights
from megarl.reshard.sync.server_order import ORDER, ServerOrder
from megarl.reshard.sync.server_rank import LiveWeights

log = logging.getLogger(__name__)

WEIGHT_LOADER = "megarl.reshard.sync.sglang_hooks.receive"  # for SGLang's --custom-weight-loader

# Of an update's requests: the served model. SGLang calls the loader for the draft model of speculative decoding too
# by default, and each order is for one call.
UPDATED_MODEL = {"selector": "target"}
# Attribute of a step's result in SGLang: the version that sampled it, where the server has another by now.
SAMPLED_BY = "megarl_sampled_by"
# Attribute of a request in SGLang: its key of the prefix cache without the version.
OWN_CACHE_KEY = "megarl_own_cache_key"


class _TensorPickler(pickle.Pickler):
    """Pickles int64 tensors as `torch.LongTensor(values)`.

    Megatron-core 0.19 puts a function of its own into the pickles of torch's storages (`megatron/core/__init__.py:58`).
    SGLang's allow-list refuses it.
    """

    def reducer_override(self, value: Any) -> Any:
        return (torch.LongTensor, (value.tolist(),)) if isinstance(value, Tensor) else NotImplemented


def order_body(order: ServerOrder, tp_size: int, flush: bool) -> dict[str, Any]:
    """The body of the HTTP request that makes every rank of a server call `receive` with an order.

    With `flush` the server drops its caches afterwards. SGLang wants a pickle in base64 for each rank, and unpickles it
    against an allow-list.
    """
    payload = io.BytesIO()
    _TensorPickler(payload).dump([(ORDER, order.tensor())])
    pickled = b64encode(payload.getvalue()).decode()
    tensors = [pickled] * tp_size
    return {"serialized_named_tensors": tensors, "load_format": WEIGHT_LOADER, "flush_cache": flush, **UPDATED_MODEL}


@functools.cache
def sleep_while_paused() -> None:
    """Patches this process's scheduler to sleep instead of busy-polling while paused, if `sleep_on_idle` is set.

    SGLang's own loop polls without a break. Two paused servers then take both cores of a two-core machine, and a sync
    waits for its turn at every step.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    @functools.wraps(record)
    def record_and_sleep(scheduler: Scheduler) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


@functools.cache
def label_pending_steps() -> None:
    """Labels tokens by the weights that sampled them, over an in-place pause too.

    Patches this process's scheduler. SGLang's overlapped loop appends the tokens of a step while the next one runs. An
    in-place pause finds a step whose tokens are not appended yet: the old weights sampled them, and SGLang would label
    them with the new version.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import record_weight_version_events

    change, process = Scheduler.record_weight_version_change, Scheduler.process_batch_result

    @functools.wraps(change)
    def change_after_pending(scheduler: Any, new_version: str | None) -> None:
        for _, result in getattr(scheduler, "result_queue", ()):  # the overlapped loop has one
            if not hasattr(result, SAMPLED_BY):  # else it is older still
                setattr(result, SAMPLED_BY, get_serving().weight_version)
        change(scheduler, new_version)

    @functools.wraps(process)
    def process_as_sampled(scheduler: Any, batch: Any, result: Any) -> None:
        version = getattr(result, SAMPLED_BY, None)
        if version is None:
            process(scheduler, batch, result)
            return
        with get_serving().override(weight_version=version):  # requests that end here are answered inside
            process(scheduler, batch, result)
        record_weight_version_events(batch.reqs, old_version=version)

    Scheduler.record_weight_version_change = change_after_pending
    Scheduler.process_batch_result = process_as_sampled


@functools.cache
def share_caches_by_version() -> None:
    """Separates SGLang's prefix caches by the version of the weights.

    Patches this process's scheduler: a request begins only on caches of the weights that it begins at. Running requests
    keep their caches at an in-place pause, so SGLang drops none. A later request with the same first tokens would find
    them, and attend to keys and values of older weights.

    Ranks must find the same caches, or they wait for each other in vain. So the first key is given after a sync that
    all of them have carried out: their version changes then, between the same two steps.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    add, begin = Scheduler._add_request_to_queue, Req.init_next_round_input
    change, synced = Scheduler.record_weight_version_change, ""

    @functools.wraps(change)
    def change_after_sync(scheduler: Any, new_version: str | None) -> None:
        nonlocal synced
        synced = new_version or synced
        change(scheduler, new_version)

    def name_version(request: Any) -> None:
        if request.kv.holds_kv or not synced:
            return  # it has begun, or there was no sync
        own = request.__dict__.setdefault(OWN_CACHE_KEY, request.extra_key)
        request.extra_key = f"weights {synced}|{own or ''}"

    @functools.wraps(add)
    def add_named(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        name_version(request)  # SGLang may begin to read its prompt's caches from a disk
        add(scheduler, request, *args, **kwargs)

    @functools.wraps(begin)
    def begin_named(request: Any, *args: Any, **kwargs: Any) -> None:
        name_version(request)  # a sync may have come while it waited
        begin(request, *args, **kwargs)

    Scheduler.record_weight_version_change = change_after_sync
    Scheduler._add_request_to_queue = add_named
    Req.init_next_round_input = begin_named


def receive(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Carries out the trainer's order in one rank. SGLang calls this and ignores the result.

    A request without a valid order is logged and changes nothing: an exception would end the server. The trainer learns
    that the server answered early.
    """
    from sglang.srt.runtime_context import get_parallel

    try:
        order = ServerOrder.parse(named_tensors)
    except (ValueError, TypeError, AttributeError) as error:
        log.error("a weight update was refused: %s", error)
        return
    parallel = get_parallel()
    sleep_while_paused()
    label_pending_steps()
    share_caches_by_version()

    def live() -> LiveWeights:
        check_plain(model)
        ranks = parallel.tp_rank, parallel.tp_size, parallel.moe_ep_size
        geometry = Geometry.of(model.config, *ranks, format_of(model.config))
        arrangement = MarlinWeights(model)
        parameters = arrangement.plain(model.named_parameters())
        fragments = [*live_fragments(parameters, geometry), *live_adapters(model, geometry)]
        arrangement.close()
        return LiveWeights(fragments, arrangement, functools.partial(complete, model, unsent_parameters(geometry)))

    server_rank.carry_out(order, live, parallel.tp_rank, parallel.tp_size, model.load_weights)  # type: ignore[arg-type]
