"""No request ends a server: each field of a request, sent to the fused and to SGLang's plain code, is answered."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pickle
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.launcher import status
from megarl.launcher.status import states
from megarl.observe.run_folder import RunFolder
from megarl.reshard.sync.server_order import ORDER, PROTOCOL
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER, _TensorPickler
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import rows
from tests.sglang.tiny_models import VOCAB_SIZE

pytestmark = rows.marks()

PROMPT = list(range(5, 25))
LOGPROBS = {"return_logprob": True}
NO_PROMPT: dict[str, Any] = {"input_ids": None}

# Fields of SGLang's GenerateReqInput, over a request for 12 sampled tokens.
FIELDS: list[dict[str, Any]] = [
    {}, {"return_logprob": False}, {"return_logprob": None}, LOGPROBS,
    {**NO_PROMPT, "text": "Leo has"}, {"text": "Leo has"}, {**NO_PROMPT, "text": ""}, NO_PROMPT,
    *({"input_ids": ids} for ids in (
        [], [[]], [[5], []], [-1], [5, -3], [VOCAB_SIZE - 1], [5, 99999], [2**40], [2**63], [7] * 600, "abc", [1.5],
        [None], [PROMPT, PROMPT], [[5], [99999]],
    )),
    *(LOGPROBS | {"logprob_start_len": start} for start in (0, -1, 19, -2, -5, 500)),
    *({**given, "top_logprobs_num": count} for given in ({}, LOGPROBS) for count in (3, 0, -1, VOCAB_SIZE, 10**5)),
    *({**given, "token_ids_logprob": ids} for given in ({}, LOGPROBS) for ids in ([1, 2], [], [99999], [-1], [[1, 2]])),
    LOGPROBS | {"return_text_in_logprobs": True},
    LOGPROBS | {"return_flat_raw_top_logprobs": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    {"return_sampling_mask": True}, {"return_hidden_states": True}, {"return_hidden_states": "last"},
    {"return_routed_experts": True}, {"return_indexer_topk": True}, {"return_entropy": True},
    {"return_prompt_token_ids": True}, {"rid": "one"}, {"priority": 1}, {"extra_key": "x"}, {"session_id": "x"},
    {"session_params": {"id": "absent"}}, {"lora_path": "absent"}, {"custom_logit_processor": "x"},
    {"routed_dp_rank": 0}, {"routed_dp_rank": 5}, {"image_data": "x"},
    {**NO_PROMPT, "input_embeds": [[0.1] * 64] * 5}, {**NO_PROMPT, "input_embeds": [[0.1] * 3]},
    {"positional_embed_overrides": {"a": 1}}, {"watermark": {"key": 1}}, {"max_thinking_tokens": 3},
    {"require_reasoning": True}, {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1},
    {"stream": True}, {"sampling_params": None}, {"sampling_params": []},
    {"return_logprob": [True], "input_ids": [[5]] * 2}, {"no_such_field": 1},
    *({"input_ids": [[5]] * 2, name: [value]} for name, value in (
        ("sampling_params", {"max_new_tokens": 2}), ("logprob_start_len", 0), ("top_logprobs_num", 2),
        ("token_ids_logprob", [1]), ("rid", "one"), ("lora_path", None), ("extra_key", "x"), ("priority", 1),
        ("custom_logit_processor", "x"), ("return_hidden_states", True), ("session_params", {"id": "x"}),
    )),
    *({"sampling_params": {"max_new_tokens": 12, "min_new_tokens": 3, "stop_token_ids": ids}}
      for ids in ([-5], [3, VOCAB_SIZE], [2**40], [VOCAB_SIZE - 1])),
    {"sampling_params": {"max_new_tokens": 2**40, "min_new_tokens": 2**40}},
]  # fmt: skip
# Fields of SGLang's SamplingParams, likewise.
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1e-6, 1e-30, 1e300, -1, "a", None, float("nan"), float("inf")],
    "top_p": [0.9, 1e-9, 0, None], "top_k": [5, 1, -1, 0, 10**9, 2**31 - 1, 2**31, 2**63, 1.5], "min_p": [0.1, 1, 2],
    "frequency_penalty": [0.5, 9], "presence_penalty": [0.5], "repetition_penalty": [1.2, 0],
    "min_new_tokens": [5, 100], "max_new_tokens": [0, 1, None, -1, 10**9, 2.5, "x"], "n": [2, 0, -1, None, "x", 1.5],
    "json_schema": ['{"type": "object"}', "{"], "regex": ["[0-9]+", "("], "ebnf": ['root ::= "a"'],
    "structural_tag": ["x"], "ignore_eos": [True], "skip_special_tokens": [False], "no_stop_trim": [True],
    "stream_interval": [2], "logit_bias": [{"5": 1.0}, {"99999": 1.0}, {"-1": 1.0}, {"x": 1.0}],
    "sampling_seed": [3, 2**63], "custom_params": [{"a": 1}], "stop": ["qq", ["a", "b"], [""], "", [], [1]],
    "stop_token_ids": [[3], [99999], [-1], ["a"]], "stop_regex": ["[ab]", "(", ["a", "(?P<"]], "no_such_field": [1],
}  # fmt: skip
REQUESTS = [
    *FIELDS,
    *(
        {"sampling_params": {"max_new_tokens": 12, name: value}}
        for name, values in SAMPLING.items()
        for value in values
    ),
]


def ask(servers: SGLangServers, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer; status 0 if there is none."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {servers.api_key}"} | headers
    connection = http.client.HTTPConnection(servers.addresses[0], timeout=900)
    try:
        connection.request("POST" if body is not None else "GET", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (ConnectionError, http.client.HTTPException) as error:
        return 0, str(error).encode()
    finally:
        connection.close()


def answers_still(servers: SGLangServers) -> bool:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}
    return ask(servers, "/generate", body)[0] == 200 and servers.servers[0].fault() is None


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    """A server of two ranks on SGLang's own models and sampler; it takes weight updates."""
    before = os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = ""  # none of megarl's models
    config = SGLangServerConfig(device="cpu", max_total_tokens=4096, tp_size=2)
    try:
        with SGLangServers(
            config, tiny_checkpoint("qwen3"), tmp_path_factory.mktemp("plain"), WEIGHT_LOADER
        ) as servers:
            servers.start()
            servers.wait_ready()
            yield servers
    finally:
        os.environ.pop("SGLANG_EXTERNAL_MODEL_PACKAGE")
        if before is not None:
            os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = before


@pytest.mark.parametrize("fields", rows.every(5, REQUESTS), ids=lambda fields: json.dumps(fields)[:60])
def test_a_request_is_answered_alike_by_both(
    fields: dict[str, Any], server: SGLangServers, plain: SGLangServers
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12}, **fields}
    body = {name: value for name, value in body.items() if value is not None or name != "input_ids"}
    answers = [ask(servers, "/generate", body) for servers in (server, plain)]
    assert all(status == 200 or 400 <= status < 500 for status, _ in answers), answers
    assert all(answers_still(servers) for servers in (server, plain))
    assert answers[0][0] == answers[1][0], answers
    if answers[0][0] == 200 and not body.get("stream"):
        assert len({frozenset(shape(json.loads(text))) for _, text in answers}) == 1, answers


def shape(answer: Any) -> set[str]:
    """Names of an answer's fields, and of its meta_info but for the counts of speculation."""
    parts = answer if isinstance(answer, list) else [answer]
    names = {name for part in parts for name in (*part, *part["meta_info"]) if not name.startswith("spec_")}
    return {f"{len(parts)} answers", *names}


@pytest.mark.parametrize("more", [{}, LOGPROBS, LOGPROBS | {"top_logprobs_num": 2}], ids=json.dumps)
def test_greedy_tokens_are_the_same_in_both(more: dict[str, Any], server: SGLangServers, plain: SGLangServers) -> None:
    for sampling in ({}, {"presence_penalty": 0.5}, {"logit_bias": {"9": 3.0}}, {"min_new_tokens": 9}):
        params = {"max_new_tokens": 12, "temperature": 0.0, **sampling}
        bodies = [
            ask(s, "/generate", {"input_ids": PROMPT, "sampling_params": params, **more}) for s in (server, plain)
        ]
        assert json.loads(bodies[0][1])["output_ids"] == json.loads(bodies[1][1])["output_ids"], sampling


def test_a_batch_with_and_without_logprobs_is_answered(server: SGLangServers) -> None:
    sampling = [{"max_new_tokens": n, "temperature": t} for n, t in ((9, 1.0), (4, 0.0), (12, 1.0))]
    body = {"input_ids": [PROMPT] * 3, "return_logprob": [True, False, False], "sampling_params": sampling}
    status, text = ask(server, "/generate", body)
    assert status == 200
    assert ["output_token_logprobs" in part["meta_info"] for part in json.loads(text)] == [True, False, False]
    assert len(json.loads(text)[0]["meta_info"]["output_token_logprobs"]) == len(json.loads(text)[0]["output_ids"])


@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/metrics", "/ready", "/model_info", "/healthy/../health"]
)
@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Bearer \u00fc", "Bearer \u00ff" + "0" * 40, "Basic x"])
def test_every_path_refuses_a_wrong_key(path: str, key: str, server: SGLangServers) -> None:
    assert ask(server, path, None, Authorization=key)[0] == 401


def test_health_is_told_with_the_key(server: SGLangServers) -> None:
    assert [ask(server, path, None)[0] for path in ("/health", "/health_generate", "/ready")] == [200] * 3


def test_the_status_of_a_run_tells_that_a_server_answers(
    server: SGLangServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "HEALTH_S", 120.0)
    (address,) = server.addresses
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server_0").write_text(address)
    (tmp_path / "logs" / "server_0.log").write_text("ready\n")
    assert states(RunFolder(tmp_path))[-1] == ("server 0", f"{address} answers", "ready")


CLOSED = """
import asyncio, importlib, sys
importlib.import_module("megarl.cpu.sglang_launch").prepare()
from sglang.srt.entrypoints import http_server
from megarl.rollout.servers import guarded_launch

def launch_server(*_, **__):  # as far as the key check
    from sglang.srt.utils.auth import add_api_key_middleware
    add_api_key_middleware(http_server.app, api_key="key", admin_api_key=None)

async def receive():
    return {"type": "websocket.connect"}

async def send(message):
    print("sent", message["type"])

http_server.launch_server = launch_server
guarded_launch.launch(sys.argv[1:])
scope = {"type": "websocket", "path": "/v1/realtime", "query_string": b"", "headers": [], "scheme": "ws"}
asyncio.run(http_server.app(scope, receive, send))
"""


@pytest.mark.long
def test_the_websockets_of_sglangs_application_are_closed(tiny_checkpoint: Callable[..., Path]) -> None:
    """By its application alone: uvicorn takes WebSockets only where a package for them is installed."""
    command = [sys.executable, "-c", CLOSED, "--model-path", str(tiny_checkpoint("qwen3")), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["sent websocket.close"], done.stderr


def payload(value: Any) -> str:
    buffer = io.BytesIO()
    _TensorPickler(buffer).dump(value)
    return b64encode(buffer.getvalue()).decode()


def order(*values: int) -> str:
    return payload([(ORDER, torch.tensor(values, dtype=torch.int64))])


GOOD = (PROTOCOL, 0x7F000001, 29500, 0, 1, 0, 1, 1, 1000)
ZERO = torch.zeros(1, dtype=torch.int64)
PAYLOADS: dict[str, list[str]] = {  # one for each of two ranks
    "no payload": [],
    "a payload too few": [order(*GOOD)],
    "no base64": ["%"] * 2,
    "no pickle": [b64encode(b"garbage").decode()] * 2,
    "a forbidden pickle": [b64encode(pickle.dumps(os.system)).decode()] * 2,
    "one rank's payload broken": [order(*GOOD), "%"],
    "no list": [payload(3)] * 2,
    "no order": [payload([("x", ZERO)])] * 2,
    "another protocol": [order(PROTOCOL + 1, *GOOD[1:])] * 2,
    "a short order": [order(*GOOD[:4])] * 2,
    "an empty order": [order()] * 2,
    "an address out of range": [order(PROTOCOL, 2**40, *GOOD[2:])] * 2,
    "a port out of range": [order(*GOOD[:2], 10**6, *GOOD[3:])] * 2,
    "a store that is not there": [order(*GOOD)] * 2,
}
WEIGHTS: dict[str, dict[str, Any]] = {
    **{name: {"serialized_named_tensors": each, "load_format": WEIGHT_LOADER} for name, each in PAYLOADS.items()},
    "an unknown load_format": {"serialized_named_tensors": [order(*GOOD)] * 2, "load_format": "no_such.loader"},
    "a load_format that is no loader": {"serialized_named_tensors": [order(*GOOD)] * 2, "load_format": "os.system"},
    "weights of no model": {"serialized_named_tensors": [payload([("x", ZERO)])] * 2},
}


@pytest.mark.parametrize("bad", WEIGHTS)
def test_a_bad_weight_update_leaves_the_server_running(bad: str, plain: SGLangServers) -> None:
    assert ask(plain, "/begin_weight_update", {})[0] == 200
    status, text = ask(plain, "/update_weights_from_tensor", {"flush_cache": False, **WEIGHTS[bad]})
    assert status, text
    assert ask(plain, "/end_weight_update", {})[0] == 200
    assert answers_still(plain)
    if "load_format" in bad or "pickle" in bad:
        assert status == 400
        assert json.loads(text)["success"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/begin_weight_update", {"selector": "no such runner"}),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "no_such_format"}),
        ("/update_weight_version", {"new_version": "x" * 1000, "abort_all_requests": False}),
        ("/get_weights_by_name", {"name": "no.such.weight"}),
        ("/weights_checker", {"action": "no such action"}),
        ("/abort_request", {"rid": "absent"}),
        ("/start_expert_distribution_record", {}),
        ("/stop_expert_distribution_record", {}),
        ("/close_session", {"session_id": "absent"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [[5], [2**70]]}),
        ("/flush_cache", {}),
    ],
)
def test_a_bad_control_request_leaves_the_server_running(path: str, body: dict[str, Any], plain: SGLangServers) -> None:
    status, text = ask(plain, path, body)
    assert status, text
    assert answers_still(plain)


def test_a_request_that_fails_in_the_scheduler_is_answered_with_400(server: SGLangServers) -> None:
    """SGLang 0.5 changes a session's requests while it walks through them, where one replaces all of them."""
    assert ask(server, "/open_session", {"capacity_of_str_len": 100, "session_id": "s"})[0] == 200
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    assert ask(server, "/generate", {**body, "session_params": {"id": "s"}})[0] == 200
    status, text = ask(server, "/generate", {**body, "session_params": {"id": "s", "replace": True}})
    assert (status, b"RuntimeError" in text) == (400, True)
    assert answers_still(server)
    assert ask(server, "/close_session", {"session_id": "s"})[0] == 200


@pytest.mark.parametrize("end", ["stopped", "died"])
def test_a_server_of_two_ranks_leaves_no_shared_memory(end: str, plain: SGLangServers) -> None:
    """Ends the server of the tests above, whose ranks have queues between them in shared memory."""
    (server,) = plain.servers
    if server.process is None:
        server.start()
        server.wait_ready()
    process = server.process
    assert process is not None
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    mapped = {m.path for p in family for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
    mapped = {path for path in mapped if Path(path).exists()}
    assert any("sgl_shm_mq" in path for path in mapped), mapped
    if end == "died":
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its parent
                member.kill()
        process.wait(300)
    server.stop()
    assert [path for path in mapped if Path(path).exists()] == []
