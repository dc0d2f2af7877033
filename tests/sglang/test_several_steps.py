"""Several generation steps between two looks of the scheduler give what steps of one give."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.tiny_models import VOCAB_SIZE

CONTEXT = 512  # positions that the tiny models know
POOL = 1024  # tokens that the server's cache holds
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    config = SGLangServerConfig(device="cpu", max_total_tokens=POOL)
    with SGLangServers(config, checkpoint, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        servers.wait_ready()
        yield servers


def ask(servers: SGLangServers, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {servers.api_key}"}
    request = urllib.request.Request(f"http://{servers.addresses[0]}{path}", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=600)


def post(servers: SGLangServers, path: str, body: dict[str, Any]) -> bytes:
    with ask(servers, path, body) as answer:
        return answer.read()


@pytest.fixture(scope="module")
def generate(small: SGLangServers) -> Callable[..., list[Answer]]:
    def generate(prompts: list[list[int]], sampling: list[dict[str, Any]], **more: Any) -> list[Answer]:
        sampling = [{"temperature": 1.0, "ignore_eos": True, **each} for each in sampling]
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **more}
        return json.loads(post(small, "/generate", body))

    return generate


@pytest.fixture(scope="module")
def check(checkpoint: Path) -> Callable[[list[list[int]], list[Answer]], None]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.no_grad()
    def check(prompts: list[list[int]], answers: list[Answer]) -> None:
        """Every token of every answer has the log-prob that the model gives it after all before."""
        for prompt, answer in zip(prompts, answers, strict=True):
            ids, served = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            assert [token for _, token, _ in served] == ids
            assert answer["meta_info"]["completion_tokens"] == len(ids)
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(ids)), ids]
            torch.testing.assert_close(torch.tensor([v for v, _, _ in served]), expected, atol=2e-5, rtol=0)

    return check


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[5 + (7 * i + 3 * j) % (VOCAB_SIZE - 5) for j in range(n)] for i, n in enumerate(lengths)]


def looks(answer: Answer) -> int:
    """How often the scheduler looked at the request after its first token."""
    return int(answer["meta_info"].get("spec_verify_ct", 0))


def test_requests_of_all_lengths_get_all_their_tokens_in_few_looks(
    generate: Callable[..., list[Answer]], check: Callable[..., None]
) -> None:
    prompts = prompts_of(*range(1, 25))
    for _ in range(30):
        answers = generate(prompts, [{"max_new_tokens": n} for n in range(1, 25)])
        assert [len(a["output_ids"]) for a in answers] == list(range(1, 25))
        assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"length"}
        check(prompts, answers)
        if (most := max(looks(a) for a in answers)) < 20:  # a scheduler that waits for a processor has short passes
            break
    assert most < 20  # of 23; 3 where the machine is quick


def test_a_token_that_stops_a_request_is_its_last(
    generate: Callable[..., list[Answer]], check: Callable[..., None]
) -> None:
    stops = list(range(0, VOCAB_SIZE, 20))
    prompts = prompts_of(*[6] * 30)
    answers = generate(prompts, [{"max_new_tokens": 40, "stop_token_ids": stops, "ignore_eos": False}] * 30)
    stopped = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(stopped) > 10
    assert all(a["output_ids"][-1] in stops for a in stopped)
    assert not any(set(a["output_ids"][:-1]) & set(stops) for a in answers)
    assert len({len(a["output_ids"]) % 8 for a in stopped}) > 3  # at all places within a look
    check(prompts, answers)


def aborted_under_way(servers: SGLangServers, prompts: list[list[int]], sampling: dict[str, Any]) -> list[Answer]:
    """Answers to a stream of requests that are aborted as soon as one has tokens."""
    body = {
        "input_ids": prompts, "sampling_params": [{"temperature": 1.0, **sampling}] * len(prompts),
        "return_logprob": True, "stream": True,
    }  # fmt: skip
    last: dict[int, Answer] = {}
    with ask(servers, "/generate", body) as parts:
        for part in (json.loads(line[6:]) for line in parts if line.startswith(b"data: {")):
            if not last:
                post(servers, "/abort_request", {"abort_all": True})
            last[part["index"]] = part
    return [last[index] for index in range(len(prompts))]


def test_an_aborted_request_has_nothing_after_its_end(check: Callable[..., None], small: SGLangServers) -> None:
    stops = list(range(0, VOCAB_SIZE, 60))
    prompts = prompts_of(*[6] * 30)
    aborted: list[list[int]] = []
    for _ in range(60):
        answers = aborted_under_way(small, prompts, {"max_new_tokens": 100, "stop_token_ids": stops})
        check(prompts, answers)
        assert all(len(a["output_ids"]) <= 100 for a in answers)
        ended = [a["output_ids"] for a in answers if a["meta_info"]["finish_reason"]["type"] == "abort"]
        aborted += [ids for ids in ended if ids]
        if len(aborted) > 40:
            break
    assert len(aborted) > 40
    assert not any(set(ids[:-1]) & set(stops) for ids in aborted)  # SGLang does not look at the last one


def test_what_depends_on_the_tokens_before_is_done_at_every_step(generate: Callable[..., list[Answer]]) -> None:
    prompts = prompts_of(3, 4, 5)
    for special in (
        {"presence_penalty": 0.5}, {"min_new_tokens": 20}, {"stop": ["qqqq"]}, {"temperature": 0.0}, {"top_p": 0.9},
    ):  # fmt: skip
        answers = generate(prompts, [{"max_new_tokens": 30}, {"max_new_tokens": 30} | special, {"max_new_tokens": 20}])
        assert [looks(a) for a in answers] == [len(a["output_ids"]) - 1 for a in answers], special  # they share steps
    (answer,) = generate(prompts[:1], [{"max_new_tokens": 12}], top_logprobs_num=3)
    assert [len(top) for top in answer["meta_info"]["output_top_logprobs"]] == [3] * 12


def test_a_request_at_the_end_of_the_context_leaves_the_others_alone(
    generate: Callable[..., list[Answer]], check: Callable[..., None]
) -> None:
    prompts = prompts_of(CONTEXT - 10, 5, CONTEXT - 20)
    answers = generate(prompts, [{"max_new_tokens": n} for n in (9, 60, 19)])
    assert [len(a["output_ids"]) for a in answers] == [8, 60, 18]  # SGLang leaves the last two positions free
    check(prompts, answers)


def test_more_requests_than_the_cache_holds_all_end(
    generate: Callable[..., list[Answer]], check: Callable[..., None], small: SGLangServers
) -> None:
    prompts = prompts_of(*[10] * 40)
    answers = generate(prompts, [{"max_new_tokens": 100}] * 40)  # 4400 tokens
    assert [len(a["output_ids"]) for a in answers] == [100] * 40
    check(prompts, answers)
    assert "retract" in small.servers[0].log_path.read_text()
    check(prompts[:2], generate(prompts[:2], [{"max_new_tokens": 5}] * 2))  # an idle server looks for lost slots
    small.check_alive()
