"""Shared by the tests of weight syncs: a trainer of one rank with an entire model, and a server with its session."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import SyncReport, WeightSession, WeightSource
from megarl.reshard.sync.server_control import ServerControl
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.sglang_server import SGLangServers

TOLERANCE = 1e-5
DEADLINES = {"control_deadline_s": 300, "connect_deadline_s": 300, "transfer_deadline_s": 300}
PROMPT = list(range(7, 40))


@dataclass(frozen=True)
class FullTensor:
    """A checkpoint tensor held in full by one trainer rank."""

    name: str
    view: Tensor

    @property
    def start(self) -> tuple[int, ...]:
        return (0,) * self.view.dim()

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


class SingleRankWeights:
    """The weights of a trainer of one rank."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = dict(tensors)

    def shards(self) -> list[FullTensor]:
        return [FullTensor(name, tensor) for name, tensor in self.tensors.items()]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def weights_of(model: nn.Module) -> SingleRankWeights:
    """The checkpoint of a model. A tied head appears once."""
    return SingleRankWeights({name: parameter.detach() for name, parameter in model.named_parameters()})


def logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    """Log-prob of every token but the first, by transformers, `[len(tokens) - 1]`."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


class Served:
    """A server under test and the session that pushes to it."""

    def __init__(self, servers: SGLangServers, count: int = 1, **knobs: Any):
        """`count` servers of `servers` take part, from the first on."""
        self.servers = servers
        self.addresses = servers.addresses[:count]
        self.config = ReshardConfig(**(DEADLINES | knobs))
        self.session = WeightSession(self.config, self.addresses, servers.api_key)
        self.version = self.session.served_version()
        self.adapter: str | None = None  # the servers' adapter that answers

    def push(self, weights: WeightSource) -> SyncReport:
        self.version += 1
        return self.session.push(weights, self.version)

    def restart_session(self, **knobs: Any) -> WeightSession:
        """Connects another trainer to the same servers."""
        self.session.close()
        self.session = WeightSession(replace(self.config, **knobs), self.addresses, self.servers.api_key)
        return self.session

    def control(self, server: int = 0) -> ServerControl:
        return ServerControl(self.servers.addresses[server], self.servers.api_key)

    def generate(self, new_tokens: int, prompt: list[int] = PROMPT, server: int = 0) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        body["lora_path"] = self.adapter
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.servers.api_key}"}
        request = urllib.request.Request(
            f"http://{self.servers.addresses[server]}/generate", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def stream(self, new_tokens: int, prompt: list[int], told: Callable[[int], None]) -> dict[str, Any]:
        """Generates like `generate`; calls `told(version)` at each part, with the version it was sent under."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        body["lora_path"] = self.adapter
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.servers.api_key}"}
        request = urllib.request.Request(
            f"http://{self.servers.addresses[0]}/generate", json.dumps(body | {"stream": True}).encode(), headers
        )
        last: dict[str, Any] = {}
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    told(int(last["meta_info"]["weight_version"]))
        return last

    def difference(self, model: nn.Module, server: int = 0) -> float:
        """Largest log-prob difference to `model`, over a prompt and its sampled completion, in nats."""
        answer = self.generate(16, server=server)
        tokens = PROMPT + answer["output_ids"]
        meta = answer["meta_info"]
        served = [v for v, _, _ in meta["input_token_logprobs"][1:]] + [v for v, _, _ in meta["output_token_logprobs"]]
        return float((torch.tensor(served) - logprobs(model, tokens)).abs().max())

    def served_version(self) -> str:
        return str(self.control().model_info(Deadline(120))["weight_version"])

    def scheduler(self) -> psutil.Process:
        process = self.servers.servers[0].process
        assert process is not None
        return next(p for p in psutil.Process(process.pid).children() if "scheduler" in p.name())


def checksums(control: ServerControl, deadline: Deadline) -> list[dict[str, str]]:
    """SGLang's own checksum of each live parameter, one mapping a rank: on CPU the first 8 bytes of SHA-256."""
    return [r["checksums"] for r in control.call("/weights_checker", {"action": "checksum"}, deadline)["ranks"]]
