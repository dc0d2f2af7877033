"""Syncs of two adapters of one base into real SGLang servers, asked in mixed batches, with PEFT as the oracle."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_adapter_sync import NARROW, TOLERANCE, WIDE, adapted, held_bytes, nbytes, serving
from test_adapter_sync import weights_of as alone
from test_weights_faults import corrupt, restart
from torch import nn
from weights_support import PROMPT, Served, SingleRankWeights, logprobs

from megarl.families.adapters import is_adapter, wire_name
from megarl.knobs import UserError
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.servers.external import ExternalServers
from megarl.rollout.servers.served_adapters import ServedAdapters
from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.tiny_models import make_model

MATH, CODE = PAIR = ("math", "code-2")
MIXED = (MATH, None, CODE, CODE, MATH, None)  # adapters of the requests of a batch
PROMPTS = [PROMPT] * 3 + [PROMPT[::-1]] * 3
NEW_TOKENS = 16


class Run:
    """A trainer of two adapters of one base, and a server that holds them."""

    def __init__(self, servers: SGLangServers, family: str, shape: Any, **knobs: Any):
        self.served = Served(servers, **({"bucket_bytes": 50_000} | knobs))
        self.family, self.shape = family, shape
        self.base = 7
        self.models: dict[str | None, PeftModel | nn.Module] = {}
        self.draw(PAIR, 0)

    def draw(self, names: Sequence[str], seed: int) -> None:
        """Gives these adapters other values."""
        self.models[None] = make_model(self.family, True, self.base)
        for name in names:
            self.models[name] = adapted(self.family, self.shape, 2 * seed + PAIR.index(name), self.base)

    def weights(self) -> SingleRankWeights:
        """The base, then each adapter under its names in a sync."""
        tensors = {name: t for name, t in alone(self.models[MATH]).tensors.items() if not is_adapter(name)}
        for adapter in PAIR:
            own = alone(self.models[adapter]).tensors.items()
            tensors |= {wire_name(adapter, name): tensor for name, tensor in own if is_adapter(name)}
        return SingleRankWeights(tensors)

    def push(self) -> int:
        """Syncs, and returns the bytes sent."""
        return self.served.push(self.weights()).bytes

    def ask(self, adapters: Sequence[str | None], prompts: Sequence[list[int]], start: int = 0) -> list[dict[str, Any]]:
        """Answers to requests that reach the server together. Their prompts have log-probs from token `start` on."""
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompts, "lora_path": adapters, "sampling_params": sampling}
        body |= {"return_logprob": True, "logprob_start_len": start}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.served.servers.api_key}"}
        address = self.served.addresses[0]
        request = urllib.request.Request(f"http://{address}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answers: list[dict[str, Any]] = json.load(response)
        return answers

    def differences(self, start: int = 0, exchanged: bool = False) -> dict[str | None, float]:
        """Largest log-prob difference to PEFT of each adapter, and of the base, over a mixed batch, in nats.

        If `exchanged`, the difference of each adapter to PEFT with the other.
        """
        largest: dict[str | None, float] = dict.fromkeys(MIXED, 0.0)
        oracles = self.models | ({MATH: self.models[CODE], CODE: self.models[MATH]} if exchanged else {})
        for adapter, prompt, answer in zip(MIXED, PROMPTS, self.ask(MIXED, PROMPTS, start), strict=True):
            meta = answer["meta_info"]
            served = [value for value, _, _ in meta["output_token_logprobs"]]
            if start == 0:
                served = [value for value, _, _ in meta["input_token_logprobs"][1:]] + served
            expected = logprobs(oracles[adapter], prompt + answer["output_ids"])[-len(served) :]
            assert len(served) == (len(prompt) - 1) * (start == 0) + NEW_TOKENS
            largest[adapter] = max(largest[adapter], float((torch.tensor(served) - expected).abs().max()))
        return largest

    def right(self) -> bool:
        return max(self.differences().values()) < TOLERANCE

    def log(self) -> str:
        return self.served.servers.servers[0].log_path.read_text()


@pytest.fixture(scope="module")
def servers(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangServers]]:
    with serving(PAIR, tiny_checkpoint, tmp_path_factory) as started:
        yield started


@pytest.fixture
def qwen3(servers: dict[str, SGLangServers]) -> Iterator[Run]:
    run = Run(servers["qwen3"], "qwen3", WIDE)
    yield run
    run.served.session.close()


@pytest.mark.parametrize(
    ("family", "shape", "ranks"), [("qwen3", WIDE, 1), pytest.param("qwen2", NARROW, 2, marks=pytest.mark.long)]
)
def test_a_mixed_batch_has_the_logprobs_of_each_adapter_and_of_the_base_after_every_sync(
    servers: dict[str, SGLangServers], family: str, shape: Any, ranks: int
) -> None:
    run, sizes = Run(servers[family], family, shape), []
    for seed, changed in enumerate([PAIR, (CODE,), (MATH,), PAIR], 1):
        run.draw(changed, seed)
        wrong = run.differences()
        assert min(wrong[name] for name in changed) > 0.01, "it is another adapter than the server's"
        if seed > 1:
            assert all(wrong[name] < TOLERANCE for name in {*PAIR, None} - set(changed))
        sizes.append(run.push())
        assert run.right()
        others = run.differences(exchanged=True)
        assert min(others[MATH], others[CODE]) > 0.01, "the oracle tells the adapters apart"
    own = sum(held_bytes(alone(run.models[name]), rank, ranks) for name in PAIR for rank in range(ranks))
    assert sizes[0] > 2 * own
    assert sizes[1:] == [own] * 3
    assert re.search(r"Prefill batch.* #new-seq: [456],", run.log()), "no prefill had requests of all of them"
    run.served.session.close()


def test_a_cached_prefix_is_of_one_adapter_and_of_one_version(qwen3: Run) -> None:
    qwen3.push()
    prompt = list(range(60, 110))
    for repeat in range(2):
        for adapter in (MATH, CODE, None):
            (answer,) = qwen3.ask([adapter], [prompt], start=-1)
            assert answer["meta_info"]["cached_tokens"] == (len(prompt) - 1) * repeat, adapter
            served = torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
            expected = logprobs(qwen3.models[adapter], prompt + answer["output_ids"])[-NEW_TOKENS:]
            torch.testing.assert_close(served, expected, atol=TOLERANCE, rtol=0)
    qwen3.differences()
    cached = [answer["meta_info"]["cached_tokens"] for answer in qwen3.ask(MIXED, PROMPTS, start=-1)]
    assert cached == [len(PROMPT) - 1] * len(MIXED)
    assert max(qwen3.differences(start=-1).values()) < TOLERANCE, "prefixes of all of them are read in one batch"
    qwen3.draw([CODE], 5)
    qwen3.push()
    assert max(qwen3.differences(start=-1).values()) < TOLERANCE, "no prefix of an older version is read"


def test_a_delta_sends_the_adapters_that_changed(qwen3: Run) -> None:
    qwen3.served.restart_session(delta=True, bucket_bytes=4096)
    for _ in range(2):
        dense = qwen3.push()
    own = nbytes(alone(qwen3.models[MATH]))
    assert dense == 2 * own
    with torch.no_grad():  # in place, as an optimizer does
        for name, tensor in alone(qwen3.models[CODE]).tensors.items():
            tensor.add_(0.1 * torch.randn_like(tensor) if is_adapter(name) else 0)
    report = qwen3.served.push(qwen3.weights())
    assert report.dense_bytes == 2 * own
    assert 0.9 * own < report.bytes <= own + 4096
    assert qwen3.right()
    with torch.no_grad():
        alone(qwen3.models[MATH]).tensors["model.layers.0.mlp.up_proj.lora_B.weight"][3] += 0.5
    assert 0 < qwen3.push() < 0.05 * own
    assert qwen3.right()


def test_a_corrupted_adapter_is_named_with_its_matrix_and_the_next_sync_mends_it(
    qwen3: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, adapter in enumerate(PAIR):
        qwen3.push()
        qwen3.push()
        plan = qwen3.served.session.plan
        assert plan is not None
        last = len(plan.messages.bucket)
        assert last > 1, "the second adapter begins no bucket"
        qwen3.draw(PAIR, 10 + seed)
        with monkeypatch.context() as patch:
            corrupt(patch, 1 if adapter == MATH else last)
            message = rf"rank 0 does not hold what was sent of {adapter}/model\.layers\..*\.lora_[AB]\.weight"
            with pytest.raises(WeightSyncError, match=message) as error:
                qwen3.push()
        assert error.value.tensor.startswith(f"{adapter}/model.layers.")
        assert (error.value.phase, qwen3.served.session.healthy) == ("verify", [])
        assert qwen3.push() > 3 * nbytes(alone(qwen3.models[MATH])), "a failed server gets everything"
        assert qwen3.right()


def test_a_restarted_server_gets_all_adapters_again(qwen3: Run) -> None:
    qwen3.push()
    restart(qwen3.served.servers.servers[0], elsewhere=False)
    assert min(qwen3.differences().values()) > 0.01
    qwen3.served.session.admit(qwen3.served.addresses[0])
    report = qwen3.served.session.resync(qwen3.weights())
    assert (report.version, qwen3.served.session.dirty) == (qwen3.served.version, [])
    assert qwen3.right()


def test_a_run_of_other_adapters_is_refused_before_it_samples_and_before_it_sends(qwen3: Run) -> None:
    for shape, names, message in (
        (WIDE, PAIR[::-1], None),
        (WIDE, (*PAIR, "law"), "lacks the run's adapters law; start it by megarl.serve with the run's knobs"),
        (WIDE, (MATH,), f"holds adapters that are not the run's: {CODE}; start it by"),
        (NARROW, PAIR, r"rank 4, scale [\d.]+, on .*, and the run's are of rank 3, scale [\d.]+, on down_proj, q_proj"),
    ):
        addresses, key = qwen3.served.addresses, qwen3.served.servers.api_key
        found = ExternalServers(addresses, key, WEIGHT_LOADER, ServedAdapters(shape, names))
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            found.wait_ready()
    renamed = {name.replace(f"{CODE}/", "law/"): tensor for name, tensor in qwen3.weights().tensors.items()}
    with pytest.raises(WeightSyncError, match=r"server at .* lacks adapters that the trainer sends: law; start it by"):
        qwen3.served.push(SingleRankWeights(renamed))
    qwen3.served.restart_session()
    fewer = {name: tensor for name, tensor in renamed.items() if "law/" not in name}
    with pytest.raises(WeightSyncError, match=rf"holds adapters that the trainer does not send: {CODE}; start it by"):
        qwen3.served.push(SingleRankWeights(fewer))
    qwen3.served.restart_session()
