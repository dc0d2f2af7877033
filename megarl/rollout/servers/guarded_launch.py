"""Launches SGLang so that no request can end the server, and none is answered without the key.

An exception in SGLang's scheduler process ends the whole server, and its HTTP process accepts requests that raise one.
`launch` adds the missing checks to the HTTP process. Schedulers answer requests that fail when they arrive, such as
weight updates. SGLang is imported inside functions: without a GPU, `megarl/cpu` prepares its import first.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from http import HTTPStatus
from typing import Any

from megarl.rollout.servers.gpu_placement import number_gpus

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready", "/metrics")  # SGLang answers these without a key; /health_generate runs the model
MAX_INT32 = 2**31 - 1
BARRIERS = (  # requests at whose end SGLang's ranks wait for each other
    "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromIPCReqInput", "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
)  # fmt: skip


def launch(arguments: list[str]) -> None:
    """Runs a server with the command-line arguments of `sglang.launch_server`; returns when it has ended."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import auth, kill_process_tree

    load_plugins()
    auth.decide_request_auth = key_everywhere(auth.decide_request_auth)
    auth.add_api_key_middleware = with_http_alone(auth.add_api_key_middleware)
    TokenizerManager._validate_one_request = checked(TokenizerManager._validate_one_request)
    OpenAIServingDetokenize._validate_request = with_token_check(OpenAIServingDetokenize._validate_request)
    for request in (GenerateReqInput, EmbeddingReqInput):
        request.normalize_batch_and_arguments = refused_as_value(request.normalize_batch_and_arguments)
        request.__getitem__ = refused_as_value(request.__getitem__)
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    try:
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def key_everywhere(decide: Any) -> Any:
    """Wraps SGLang's decision on a request: every path needs the key, and a key that is no ASCII is a wrong one."""

    @functools.wraps(decide)
    def decide_with_key(*, path: str, authorization_header: str | None, **others: Any) -> Any:
        if path.startswith(OPEN_PATHS):
            path = f"/closed{path}"
        if authorization_header and not authorization_header.isascii():
            authorization_header = None
        return decide(path=path, authorization_header=authorization_header, **others)

    return decide_with_key


class HTTPAlone:
    """ASGI middleware that closes WebSockets before they are accepted."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self.app(scope, receive, send)


def with_http_alone(add_middleware: Any) -> Any:
    """Wraps SGLang's set-up of its key check, which lets WebSockets pass: megarl uses none, so all are closed."""

    @functools.wraps(add_middleware)
    def add_both(app: Any, **keys: Any) -> None:
        add_middleware(app, **keys)
        app.add_middleware(HTTPAlone)

    return add_both


def checked(validate: Any) -> Any:
    """Wraps SGLang's validation of a request, whose ValueErrors are answered with 400."""

    @functools.wraps(validate)
    def validate_all(manager: Any, request: Any, input_ids: list[int] | None) -> None:
        validate(manager, request, input_ids)
        check_request(request, input_ids, manager.model_config.vocab_size, manager.model_config.is_multimodal)

    return validate_all


def refused_as_value(split: Any) -> Any:
    """Wraps a method that splits a request into its parts: fields that do not fit together raise ValueError."""

    @functools.wraps(split)
    def split_or_refuse(*arguments: Any) -> Any:
        try:
            return split(*arguments)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"the request's fields do not fit together: {error}") from error

    return split_or_refuse


def with_token_check(validate: Any) -> Any:
    """Wraps SGLang's validation of tokens to decode, whose words are answered with 400: ids fit 31 bits."""

    @functools.wraps(validate)
    def validate_all(serving: Any, request: Any) -> str | None:
        parts = [part if isinstance(part, list) else [part] for part in request.tokens]
        bad = [token for part in parts for token in part if not 0 <= token <= MAX_INT32]
        refusal: str | None = validate(serving, request)
        return f"tokens has {bad[0]}; token ids are in [0, {MAX_INT32}]" if bad else refusal

    return validate_all


def check_request(request: Any, input_ids: list[int] | None, vocab_size: int, multimodal: bool = False) -> None:
    """Refuses values that SGLang's scheduler cannot compute.

    Raises:
        ValueError: naming the field, its value and the rule.
    """
    if not input_ids and getattr(request, "input_embeds", None) is None:
        raise ValueError("the prompt has no tokens; give at least one")
    if input_ids and not multimodal:  # elsewhere ids past the vocabulary stand for images
        low, high = min(input_ids), max(input_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"input_ids lie in [{low}, {high}]; the vocabulary is [0, {vocab_size})")
    start, top = getattr(request, "logprob_start_len", None), getattr(request, "top_logprobs_num", None)
    if start is not None and start < -1:
        raise ValueError(f"logprob_start_len={start} must be at least -1, which means output tokens only")
    if top is not None and top > vocab_size:
        raise ValueError(f"top_logprobs_num={top} must be at most the vocabulary's {vocab_size} tokens")
    overrides = getattr(request, "positional_embed_overrides", None)
    if overrides is not None and not hasattr(overrides, "embeds"):
        raise ValueError("positional_embed_overrides are tensors, which HTTP does not carry; leave them out")
    params = request.sampling_params or {}
    _check_integers(params, vocab_size)
    patterns = params.get("stop_regex") or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex={pattern!r} is no regular expression: {error}") from error


def _check_integers(params: dict[str, Any], vocab_size: int) -> None:
    """Refuses integers of a request's sampling parameters that do not fit the tensors into which SGLang puts them.

    Raises:
        ValueError: see `check_request`.
    """
    for name in ("top_k", "min_new_tokens"):
        value = params.get(name)
        if isinstance(value, int) and value > MAX_INT32:
            raise ValueError(f"{name}={value} must be at most {MAX_INT32}")
    stops = params.get("stop_token_ids")
    if params.get("min_new_tokens") and isinstance(stops, list):  # they index the logits until then
        bad = [token for token in stops if isinstance(token, int) and not 0 <= token < vocab_size]
        if bad:
            raise ValueError(f"stop_token_ids has {bad[0]}; with min_new_tokens they must be in [0, {vocab_size})")


def resident(make_pool: Any) -> Any:
    """Wraps the set-up of SGLang's pool of adapters, so that it is filled at once and not by the first request.

    Weight syncs find the pool's manager at the model.
    """
    from megarl import families

    @functools.wraps(make_pool)
    def make_filled_pool(manager: Any) -> None:
        make_pool(manager)
        manager.fetch_new_loras({None, *manager.lora_refs})
        setattr(manager.base_model, families.adapters.MANAGER, manager)

    return make_filled_pool


def keep_arrangement(updater: Any) -> None:
    """Patches SGLang's `WeightUpdater`: quantised weights stay as they were arranged when the server started.

    SGLang undoes the arrangement when an update begins, and makes it again at its end. megarl's syncs write arranged
    weights. A second time would transpose FP8 weights with a scale a row, and fail on 4-bit ones.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import post_load_weights

    from megarl.families.weight_formats import format_of

    begin, end = updater.begin_weight_update, updater.end_weight_update

    @functools.wraps(begin)
    def begin_as_arranged(self: Any) -> None:
        if format_of(self.get_model().config) is None:
            begin(self)

    @functools.wraps(end)
    def end_as_arranged(self: Any, *, run_post_load: bool) -> None:
        if format_of(self.get_model().config) is None:
            end(self, run_post_load=run_post_load)
        elif run_post_load:
            post_load_weights(self.get_model())

    updater.begin_weight_update, updater.end_weight_update = begin_as_arranged, end_as_arranged


def idle_while_paused(pause: Any) -> Any:
    """Wraps a scheduler's pause: its watchdog sees no batch until the scheduler goes on.

    The watchdog ends a server whose batch makes no progress for `watchdog_timeout` seconds. SGLang itself takes the
    batch out of its sight in other pauses than those in place, which may last as long as a sync or a step.
    """

    @functools.wraps(pause)
    def pause_unseen(scheduler: Any, request: Any) -> None:
        pause(scheduler, request)
        scheduler.cur_batch_for_debug = None

    return pause_unseen


def run_scheduler(*arguments: Any) -> None:
    """Runs a scheduler process, whose failed requests are answered."""
    number_gpus()
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    LoRAManager.init_memory_pool = resident(LoRAManager.init_memory_pool)
    keep_arrangement(WeightUpdater)
    Scheduler.pause_generation = idle_while_paused(Scheduler.pause_generation)

    make_dispatcher = Scheduler.init_request_dispatcher

    @functools.wraps(make_dispatcher)
    def make_guarded_dispatcher(scheduler: Any) -> None:
        make_dispatcher(scheduler)
        dispatch = scheduler._request_dispatcher

        def guarded(request: Any) -> Any:
            try:
                return dispatch(request)
            except Exception as error:
                answer = refusal(request, error)
                if answer is None:
                    raise
                log.exception("%s failed", type(request).__name__)
                if type(request).__name__ in BARRIERS:
                    scheduler.weight_updater.tp_cpu_group.barrier().wait()
                return answer

        scheduler._request_dispatcher = guarded

    Scheduler.init_request_dispatcher = make_guarded_dispatcher
    run_scheduler_process(*arguments)


def refusal(request: Any, error: Exception) -> Any:
    """SGLang's answer to a request that failed in its scheduler; None if no answer can tell so.

    A request for tokens is answered with 400, a control request with `success=False`. The recorder of experts has an
    answer without content, so the failure stands in the log alone.
    """
    from sglang.srt.managers import io_struct

    name, message = type(request).__name__, f"{type(error).__name__}: {error}"
    if name == "TokenizedGenerateReqInput":
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
        return io_struct.AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
    if name == "ExpertDistributionReq":
        return io_struct.ExpertDistributionReqOutput()
    answer = getattr(io_struct, name.removesuffix("Input") + "Output", None) if name.endswith("ReqInput") else None
    if answer is None or not {"success", "message"} <= set(answer.__struct_fields__):
        return None
    return answer(success=False, message=message)
