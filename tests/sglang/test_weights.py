"""Pushes of new weights into real, unmodified SGLang servers: exact, verified, and loud when something fails."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import make_model
from safetensors.torch import save_file
from torch import Tensor, nn

from megarl.reshard.reference import FullSender, aligned, dtype_of
from megarl.reshard.session import ReshardConfig, WeightSession, WeightSyncError
from megarl.reshard.sglang import ServerControl
from megarl.reshard.transports.gloo import Deadline
from megarl.rollout.sglang_server import SGLangServers

TOLERANCE = 1e-5
PROMPT = list(range(7, 40))


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint of a model: names and whole tensors. A tied head appears once."""
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    """Log-prob of every token but the first, by transformers, `[len(tokens) - 1]`."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


class Served:
    """A server under test and the session that pushes to it."""

    def __init__(self, servers: SGLangServers, tp_size: int, **knobs: Any):
        self.servers = servers
        self.config = ReshardConfig(**({"control_deadline_s": 10, "transfer_deadline_s": 20} | knobs))
        self.session = WeightSession(self.config, servers.addresses, servers.api_key, tp_size=tp_size)
        self.version = 0

    def push(self, weights: Iterator[tuple[str, Tensor]]) -> Any:
        self.version += 1
        return self.session.push(weights, self.version)

    def generate(self, new_tokens: int, prompt: list[int] = PROMPT) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.servers.api_key}"}
        request = urllib.request.Request(
            f"http://{self.servers.addresses[0]}/generate", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def difference(self, model: nn.Module) -> float:
        """Largest log-prob difference to `model`, over a prompt and what is sampled after it."""
        answer = self.generate(16)
        tokens = PROMPT + answer["output_ids"]
        meta = answer["meta_info"]
        served = [v for v, _, _ in meta["input_token_logprobs"][1:]] + [v for v, _, _ in meta["output_token_logprobs"]]
        return float((torch.tensor(served) - logprobs(model, tokens)).abs().max())

    def served_version(self) -> str:
        return ServerControl(self.servers.addresses[0], self.servers.api_key).model_info(Deadline(10))["weight_version"]

    def scheduler(self) -> psutil.Process:
        process = self.servers.servers[0].process
        assert process is not None
        return next(p for p in psutil.Process(process.pid).children() if "scheduler" in p.name())


@pytest.fixture(scope="module")
def qwen3(serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]) -> Iterator[Served]:
    served = Served(serve(tiny_checkpoint("qwen3")), tp_size=1)
    yield served
    served.session.close()


@pytest.fixture
def mended(qwen3: Served) -> Iterator[Served]:
    """The shared server, at known weights before a test, and proven to work after whatever the test did to it."""
    qwen3.push(weights_of(make_model("qwen3", True, seed=100)))
    yield qwen3
    model = make_model("qwen3", True, seed=101)
    qwen3.push(weights_of(model))
    assert qwen3.difference(model) < TOLERANCE


def test_pushed_weights_are_what_a_tied_qwen3_serves(qwen3: Served) -> None:
    for seed in (1, 2):
        model = make_model("qwen3", True, seed)
        assert qwen3.difference(model) > 0.1
        report = qwen3.push(weights_of(model))
        assert qwen3.difference(model) < TOLERANCE
        assert report.tensors == report.verified == len(list(weights_of(model)))
        assert report.bytes >= sum(t.numel() * 4 for _, t in weights_of(model))
        assert qwen3.served_version() == str(report.version)


@pytest.mark.parametrize(
    ("family", "tp_size", "kv_heads"), [("qwen2", 1, 2), ("llama", 2, 1)], ids=["qwen2", "llama-tp2-padded-heads"]
)
def test_pushed_weights_are_what_an_untied_model_serves(
    family: str, tp_size: int, kv_heads: int, serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = tiny_checkpoint(family, tied=False, kv_heads=kv_heads)
    served = Served(serve(checkpoint, tp_size=tp_size), tp_size, bucket_bytes=50_000)
    for seed in (1, 2):
        model = make_model(family, False, seed, kv_heads)
        report = served.push(weights_of(model))
        assert served.difference(model) < TOLERANCE
        assert report.verified >= report.tensors
    served.session.close()
    served.servers.stop()


def test_sglangs_own_checksums_agree_with_what_was_pushed(mended: Served) -> None:
    model = make_model("qwen3", True, seed=3)
    mended.push(weights_of(model))
    weights = dict(weights_of(model))
    control = ServerControl(mended.servers.addresses[0], mended.servers.api_key)
    (checksums,) = control.checksums(Deadline(10))
    for name, checksum in checksums.items():
        prefix = name.rpartition(".")[0].rpartition(".")[0]
        parts = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }.get(name.split(".")[-2])
        whole = torch.cat([weights[f"{prefix}.{p}.weight"] for p in parts]) if parts else weights[name]
        if name == "model.embed_tokens.weight":  # SGLang pads it to a multiple of 64 rows
            whole = nn.functional.pad(whole, (0, 0, 0, -whole.shape[0] % 64))
        assert checksum == hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16], name


def test_requests_in_flight_carry_the_version_of_each_token_and_its_exact_logprob(mended: Served) -> None:
    models = {mended.version: make_model("qwen3", True, seed=100)}
    answers: list[dict[str, Any]] = []
    prompts = [list(range(10 + i, 30 + i)) for i in range(4)]
    threads = [threading.Thread(target=lambda p=p: answers.append(mended.generate(450, p))) for p in prompts]
    for thread in threads:
        thread.start()
    for seed in range(5):
        time.sleep(0.15)
        model = make_model("qwen3", True, seed=200 + seed)
        mended.push(weights_of(model))
        models[mended.version] = model
    for thread in threads:
        thread.join(60)
    assert len(answers) == len(prompts)
    seen = set()
    for answer in answers:
        meta = answer["meta_info"]
        prompt = [token for _, token, _ in meta["input_token_logprobs"]]
        output = torch.tensor([value for value, _, _ in meta["output_token_logprobs"]])
        spans = meta["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(output)
        for span in spans:
            seen.add(int(span["version"]))
            expected = logprobs(models[int(span["version"])], prompt + answer["output_ids"])[len(prompt) - 1 :]
            part = slice(span["start"], span["end"])
            torch.testing.assert_close(output[part], expected[part], atol=TOLERANCE, rtol=0)
    assert len(seen) >= 3


def test_a_tensor_corrupted_on_its_way_is_noticed_and_named(mended: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = "model.layers.1.self_attn.k_proj.weight"
    send = FullSender._send

    def corrupt(self: FullSender, payload: Tensor) -> None:
        at = 0
        for name, dtype, shape in self._header:
            if name == victim:
                payload[at + 5] ^= 1
            at += aligned(torch.Size(shape).numel() * dtype_of(dtype).itemsize)
        send(self, payload)

    before = mended.served_version()
    with monkeypatch.context() as patch:
        patch.setattr(FullSender, "_send", corrupt)
        with pytest.raises(
            WeightSyncError, match=r"does not hold what was sent of model\.layers\.1\.self_attn"
        ) as error:
            mended.push(weights_of(make_model("qwen3", True, seed=4)))
    assert (error.value.tensor, error.value.phase) == (victim, "verify")
    assert error.value.server == mended.servers.addresses[0]
    assert mended.served_version() == before
    # The server holds a mix now: it must not answer until it is mended.
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(mended.generate(4)))
    thread.start()
    thread.join(1)
    assert answers == []
    mended.push(weights_of(make_model("qwen3", True, seed=5)))
    thread.join(10)
    assert [span["version"] for span in answers[0]["meta_info"]["weight_versions"]] == [str(mended.version)]


def test_a_weight_that_nothing_was_sent_for_is_named(mended: Served) -> None:
    left_out = "model.layers.0.mlp.up_proj.weight"
    weights = ((name, tensor) for name, tensor in weights_of(make_model("qwen3", True, seed=4)) if name != left_out)
    with pytest.raises(WeightSyncError, match=r"nothing was sent for model\.layers\.0\.mlp\.up_proj\.weight") as error:
        mended.push(weights)
    assert error.value.tensor == left_out


def test_a_weight_that_the_server_does_not_hold_is_named(mended: Served) -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from weights_of(make_model("qwen3", True, seed=4))
        yield "model.layers.7.mlp.up_proj.weight", torch.zeros(192, 64)

    with pytest.raises(WeightSyncError, match="the server holds no such weight") as error:
        mended.push(weights())
    assert error.value.tensor == "model.layers.7.mlp.up_proj.weight"


def test_a_weight_of_another_shape_is_refused(mended: Served) -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights_of(make_model("qwen3", True, seed=4)):
            yield name, tensor[:-1] if name == "model.layers.0.mlp.up_proj.weight" else tensor

    with pytest.raises(WeightSyncError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has shape \(191, 64\)"):
        mended.push(weights())


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_server_that_stops_answering_ends_the_push_by_its_deadline(moment: str, mended: Served) -> None:
    scheduler = mended.scheduler()
    config = ReshardConfig(control_deadline_s=1.5, transfer_deadline_s=1.5, connect_deadline_s=5, bucket_bytes=50_000)
    session = WeightSession(config, mended.servers.addresses, mended.servers.api_key)
    mended.version += 1
    session.push(weights_of(make_model("qwen3", True, seed=4)), mended.version)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i, named in enumerate(weights_of(make_model("qwen3", True, seed=5))):
            if i == 10 and moment == "while":
                scheduler.suspend()
            yield named

    if moment == "before":
        scheduler.suspend()
    start = time.monotonic()
    try:
        mended.version += 1
        with pytest.raises(WeightSyncError, match=r"deadline (of )?1\.5 s") as error:
            session.push(weights(), mended.version)
    finally:
        scheduler.resume()
    assert time.monotonic() - start < 6
    assert error.value.phase in (("begin",) if moment == "before" else ("transfer", "apply"))
    mended.version += 1
    model = make_model("qwen3", True, seed=6)
    session.push(weights_of(model), mended.version)
    assert mended.difference(model) < TOLERANCE
    session.close()
    mended.session = WeightSession(mended.config, mended.servers.addresses, mended.servers.api_key)


def test_versions_only_grow(mended: Served) -> None:
    weights = list(weights_of(make_model("qwen3", True, seed=4)))
    with pytest.raises(ValueError, match="versions only grow"):
        mended.session.push(iter(weights), mended.version)
    other = WeightSession(mended.config, mended.servers.addresses, mended.servers.api_key)
    with pytest.raises(WeightSyncError, match=f"serves version {mended.version} already"):
        other.push(iter(weights), mended.version)
    other.close()


def test_a_server_that_left_the_group_says_so_and_joins_again(mended: Served) -> None:
    mended.session.push(weights_of(make_model("qwen3", True, seed=4)), mended.version + 1)
    other = WeightSession(mended.config, mended.servers.addresses, mended.servers.api_key)
    other.push(weights_of(make_model("qwen3", True, seed=5)), mended.version + 2)
    other.close()
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="not in the trainer's group"):
        mended.session.push(weights_of(make_model("qwen3", True, seed=6)), mended.version + 3)
    assert time.monotonic() - start < 10
    mended.version += 3  # the fixture's next push, by the same session, must succeed


def test_verify_off_reads_nothing_back_and_reports_every_phase(mended: Served) -> None:
    session = WeightSession(ReshardConfig(verify="off"), mended.servers.addresses, mended.servers.api_key)
    model = make_model("qwen3", True, seed=4)
    mended.version += 1
    report = session.push(weights_of(model), mended.version)
    session.close()
    assert report.verified == 0
    assert mended.difference(model) < TOLERANCE
    phases = [
        "check",
        "pause",
        "begin",
        "connect",
        "transfer",
        "apply",
        "end",
        "verify",
        "flush",
        "version",
        "continue",
    ]
    assert list(report.seconds) == phases
    mended.session = WeightSession(mended.config, mended.servers.addresses, mended.servers.api_key)


def test_a_server_killed_in_the_middle_of_a_push_ends_it_and_keeps_the_other_from_serving_it(
    serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]
) -> None:
    both = serve(tiny_checkpoint("qwen3"), n_servers=2)
    config = ReshardConfig(control_deadline_s=10, transfer_deadline_s=20, bucket_bytes=50_000)
    session = WeightSession(config, both.addresses, both.api_key)
    model = make_model("qwen3", True, seed=1)
    report = session.push(weights_of(model), 1)
    assert report.verified == 2 * report.tensors
    process = both.servers[1].process
    assert process is not None

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i, named in enumerate(weights_of(make_model("qwen3", True, seed=2))):
            if i == 10:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
            yield named

    start = time.monotonic()
    with pytest.raises(WeightSyncError) as error:
        session.push(weights(), 2)
    assert error.value.phase == "transfer"
    assert error.value.server == both.addresses[1]
    with pytest.raises(WeightSyncError) as error:
        session.push(weights_of(make_model("qwen3", True, seed=3)), 3)
    assert (error.value.phase, error.value.server) == ("pause", both.addresses[1])
    assert time.monotonic() - start < 10
    session.close()

    survivor = Served(both, tp_size=1)
    assert survivor.served_version() == "1"
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(survivor.generate(4)))
    thread.start()
    thread.join(1)
    assert answers == []
    survivor.session = WeightSession(config, both.addresses[:1], both.api_key)
    model = make_model("qwen3", True, seed=4)
    survivor.session.push(weights_of(model), 4)
    thread.join(10)
    assert [span["version"] for span in answers[0]["meta_info"]["weight_versions"]] == ["4"]
    assert survivor.difference(model) < TOLERANCE
    survivor.session.close()
    both.stop()


# Two trainer ranks that gather together, as Megatron's ranks do: every tensor costs a collective.
RANK = """
import sys, torch, torch.distributed as dist
from safetensors.torch import load_file
from megarl.reshard.session import ReshardConfig, WeightSession, WeightSyncError
checkpoint = load_file(sys.argv[1])
address, key, port, rank, version = sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

def weights(leave_out=None):
    for name, value in checkpoint.items():
        tensor = value if rank == 1 else torch.zeros_like(value)
        dist.broadcast(tensor, 1)
        if name != leave_out:
            yield name, tensor

session = WeightSession(ReshardConfig(control_deadline_s=10), [address], key)
print(session.push(weights(), version).bytes, flush=True)
try:
    session.push(weights("model.norm.weight"), version + 1)
except WeightSyncError as error:
    print("failed", "model.norm.weight" in str(error), flush=True)
print(session.push(weights(), version + 2).version, flush=True)
session.close()
dist.destroy_process_group()
"""


def test_all_trainer_ranks_push_together_and_hear_of_a_failure(mended: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    version = mended.version + 1
    model = make_model("qwen3", True, 7)
    save_file(dict(weights_of(model)), tmp_path / "weights.safetensors")
    arguments = [str(tmp_path / "weights.safetensors"), mended.servers.addresses[0], mended.servers.api_key, port]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *arguments, str(rank), str(version)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0].split("\n") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    mended.version = version + 2
    assert int(outputs[0][0]) > 400_000
    assert outputs[1][0] == "0"
    assert [output[1:3] for output in outputs] == [["failed True", str(version + 2)]] * 2
    assert mended.difference(model) < TOLERANCE
    mended.session = WeightSession(mended.config, mended.servers.addresses, mended.servers.api_key)
