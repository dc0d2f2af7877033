"""Pushes of new weights into real, unmodified SGLang servers by a trainer of one rank: exact, verified, versioned."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_support import TOLERANCE, Served, SingleRankWeights, checksums, logprobs, weights_of

from megarl.reshard.session import WeightSession
from megarl.reshard.sync import coordinator, server_link
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports.shm import SharedStaging
from megarl.rollout.client.sglang_client import RemoteSGLangEngine, RolloutConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.types import WeightUpdateMeta
from tests.sglang.tiny_models import make_model

PHASES = ["check", "pause", "begin", "connect", "plan", "transfer", "apply", "end", "verify", "version"]


@pytest.fixture
def qwen3(fleet: SGLangServers) -> Iterator[Served]:
    served = Served(fleet, bucket_bytes=65536)
    yield served
    served.session.close()


@pytest.fixture
def mended(qwen3: Served) -> Iterator[Served]:
    """The shared server: at known weights before a test, and proven to work after it."""
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
        assert report.bytes == sum(t.numel() * 4 for t in weights_of(model).tensors.values())
        assert report.verified >= len(weights_of(model).tensors)
        assert report.servers == tuple(qwen3.addresses)
        assert qwen3.served_version() == str(report.version)
    assert list(report.seconds) == [*PHASES, "continue"]


def test_a_paused_server_takes_no_processor_time(qwen3: Served) -> None:
    qwen3.push(weights_of(make_model("qwen3", True, seed=3)))
    deadline = Deadline(300)
    qwen3.control().call("/pause_generation", {"mode": "retract"}, deadline)
    before = sum(qwen3.scheduler().cpu_times()[:2])
    time.sleep(1.0)
    assert sum(qwen3.scheduler().cpu_times()[:2]) - before < 0.3  # a busy-polling scheduler takes 1.0
    qwen3.control().call("/continue_generation", {}, deadline)


@pytest.mark.parametrize(
    ("family", "tp_size", "kv_heads"),
    [pytest.param("qwen2", 1, 2, marks=pytest.mark.long), ("llama", 2, 1)],
    ids=["qwen2", "llama-tp2-padded-heads"],
)
def test_pushed_weights_are_what_an_untied_model_serves(
    family: str, tp_size: int, kv_heads: int, serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = tiny_checkpoint(family, tied=False, kv_heads=kv_heads)
    served = Served(serve(checkpoint, tp_size=tp_size), bucket_bytes=50_000)
    for seed, path in ((1, "exact"), (2, "exact"), (3, "full")):
        if path == "full":
            served.restart_session(path="full")
        model = make_model(family, False, seed, kv_heads)
        report = served.push(weights_of(model))
        assert served.difference(model) < TOLERANCE
        assert report.verified >= len(weights_of(model).tensors)
    served.session.close()
    served.servers.stop()


@pytest.mark.parametrize("knobs", [{"path": "full"}, {"transport": "shm"}, {"transport": "disk"}], ids=str)
def test_every_way_of_transport_brings_the_same_weights_to_servers_of_one_and_two_ranks(
    knobs: dict[str, Any], fleet: SGLangServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[Path] = []
    close = SharedStaging.close
    monkeypatch.setattr(SharedStaging, "close", lambda staging: (staged.append(staging.path), close(staging)))
    if "disk" in knobs.values():
        knobs = knobs | {"folder": str(tmp_path)}
    served = Served(fleet, 3, bucket_bytes=65536, **knobs)
    for seed in (11, 12):
        model = make_model("qwen3", True, seed)
        report = served.push(weights_of(model))
        assert report.verified >= 4 * len(weights_of(model).tensors)
        assert [served.difference(model, server) < TOLERANCE for server in range(3)] == [True] * 3
    served.session.close()
    assert list(tmp_path.iterdir()) == []
    assert bool(staged) == ("shm" in knobs.values())
    assert not any(path.exists() for path in staged)


def test_a_delta_sends_what_changed_and_the_anchor_sends_everything(fleet: SGLangServers) -> None:
    served = Served(fleet, 3, bucket_bytes=65536, delta=True, anchor_every=4)
    model = make_model("qwen3", True, seed=20)
    whole = served.push(weights_of(model)).bytes
    sizes, dense = [], []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    few = torch.rand(parameter.shape, generator=generator) < 0.02
                    parameter[few] = torch.randn(int(few.sum()), generator=generator)
        report = served.push(weights_of(model))
        sizes.append(report.bytes)
        dense.append(report.dense_bytes)
        assert [served.difference(model, server) < TOLERANCE for server in range(3)] == [True] * 3
    assert dense == [whole] * 5
    assert [size == whole for size in sizes] == [False, False, False, True, False]
    assert all(size < 0.1 * whole for size in sizes if size != whole)
    unchanged = served.push(weights_of(model))
    assert unchanged.bytes == 0
    served.session.close()


def test_a_server_gets_from_another_server_what_the_trainer_sent_that_one(fleet: SGLangServers) -> None:
    """The third server has another cut of the weights: its ranks share norms alone."""
    served = Served(fleet, 3, bucket_bytes=65536, relay="1", delta=True)
    model = make_model("qwen3", True, seed=6)
    dense = sum(tensor.nbytes for tensor in weights_of(model).tensors.values())
    for change in range(2):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[change::16] += 0.01 * change
        report = served.push(weights_of(model))
        assert report.bytes + report.forwarded == sum(report.received)
        assert report.received[0] == report.received[1] <= report.forwarded
        assert (report.received[0] == dense) == (change == 0)
        assert [served.difference(model, server) < TOLERANCE for server in range(3)] == [True] * 3
        expected = expected_checksums(weights_of(model).tensors, rank=0, size=1)
        assert [checksums(served.control(server), Deadline(120)) for server in range(2)] == [[expected]] * 2
    served.session.close()


def test_sglangs_own_checksums_agree_with_what_was_pushed(mended: Served) -> None:
    model = make_model("qwen3", True, seed=3)
    mended.push(weights_of(model))
    (held,) = checksums(mended.control(), Deadline(120))
    assert held == expected_checksums(weights_of(model).tensors, rank=0, size=1)


def expected_checksums(weights: dict[str, Tensor], rank: int, size: int) -> dict[str, str]:
    """SGLang's checksum of each parameter of a Qwen3, from the checkpoint alone. Experts come stacked."""
    merged = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    checksums = {}
    for name, tensor in weights.items():
        module = name.split(".")[-2]
        if module in ("k_proj", "v_proj", "up_proj"):
            continue
        if module in merged:
            names = [name.replace(module, part) for part in parts[merged[module]]]
            held = torch.cat([weights[n].chunk(size)[rank] for n in names])
        elif module in ("o_proj", "down_proj"):
            held = tensor.chunk(size, dim=1)[rank]
        elif module in ("embed_tokens", "lm_head"):  # SGLang pads them to a multiple of 64 rows
            held = nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % 64)).chunk(size)[rank]
        else:
            held = tensor
        digest = hashlib.sha256(held.contiguous().numpy().tobytes()).hexdigest()[:16]
        checksums[name.replace(module, merged.get(module, module))] = digest
    return checksums


def test_requests_in_flight_carry_the_version_of_each_token_and_its_exact_logprob(mended: Served) -> None:
    """Pushes as soon as tokens of the newest version arrive, until each of four streams has had three versions."""
    pool = [make_model("qwen3", True, seed=200 + i) for i in range(4)]
    models = {mended.version: make_model("qwen3", True, seed=100)}
    answers: list[dict[str, Any]] = []
    arrived, enough = threading.Condition(), threading.Event()
    newest = [0] * 4  # version under which each stream last sent tokens

    def ask(number: int) -> None:
        def told(version: int) -> None:
            with arrived:
                newest[number] = version
                arrived.notify()

        while not enough.is_set():
            answers.append(mended.stream(450, list(range(10 + number, 30 + number)), told))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        mixed = 0
        while mixed < 4:
            with arrived:
                assert arrived.wait_for(lambda: max(newest) == mended.version, timeout=300)
            mended.push(weights_of(model := pool[len(models) % 4]))
            models[mended.version] = model
            mixed = sum(len(answer["meta_info"]["weight_versions"]) >= 3 for answer in list(answers))
    finally:
        enough.set()
        for thread in threads:
            thread.join(300)
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


def without(weights: SingleRankWeights, name: str) -> SingleRankWeights:
    return SingleRankWeights({key: tensor for key, tensor in weights.tensors.items() if key != name})


def test_a_weight_that_nothing_was_sent_for_is_named(mended: Served) -> None:
    left_out = "model.layers.0.mlp.up_proj.weight"
    mended.restart_session()
    with pytest.raises(
        WeightSyncError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is held by the servers"
    ) as error:
        mended.push(without(weights_of(make_model("qwen3", True, seed=4)), left_out))
    assert error.value.tensor == left_out
    mended.restart_session()


def test_a_weight_that_the_server_does_not_hold_is_named(mended: Served) -> None:
    extra = "model.layers.7.mlp.up_proj.weight"
    weights = weights_of(make_model("qwen3", True, seed=4))
    mended.restart_session()
    with pytest.raises(WeightSyncError, match="takes 0 of the trainer's 12288 elements") as error:
        mended.push(SingleRankWeights(weights.tensors | {extra: torch.zeros(192, 64)}))
    assert error.value.tensor == extra
    mended.restart_session()


def test_a_weight_of_another_shape_is_refused(mended: Served) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weights = weights_of(make_model("qwen3", True, seed=4))
    mended.restart_session()
    with pytest.raises(WeightSyncError, match="of which the trainer ranks hold 12224") as error:
        mended.push(SingleRankWeights(weights.tensors | {name: weights.tensors[name][:-1]}))
    assert error.value.tensor == name
    mended.restart_session()


def test_versions_only_grow(mended: Served) -> None:
    weights = weights_of(make_model("qwen3", True, seed=4))
    with pytest.raises(WeightSyncError, match=f"version {mended.version} after {mended.version}: versions only grow"):
        mended.session.push(weights, mended.version)
    other = WeightSession(mended.config, mended.addresses, mended.servers.api_key)
    with pytest.raises(WeightSyncError, match=f"serves version {mended.version} already"):
        other.push(weights, mended.version)
    assert other.served_version() == mended.version
    other.close()


def test_a_server_that_left_the_group_says_so_and_joins_again(mended: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordinator, server_link):
        monkeypatch.setattr(module, "EXPLAIN_S", 300.0)  # a busy server says it late
    mended.session.push(weights_of(make_model("qwen3", True, seed=4)), mended.version + 1)
    other = WeightSession(mended.config, mended.addresses, mended.servers.api_key)
    other.push(weights_of(make_model("qwen3", True, seed=5)), mended.version + 2)
    other.close()
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="not in the trainer's group"):
        mended.session.push(weights_of(make_model("qwen3", True, seed=6)), mended.version + 3)
    assert time.monotonic() - start < 300
    mended.version += 3  # the fixture's next push, by the same session, must succeed


@pytest.mark.parametrize(("verify", "share"), [("off", 0.0), ("sampled", 0.125)])
def test_less_is_read_back_where_less_is_asked_for(verify: str, share: float, mended: Served) -> None:
    whole = mended.push(weights_of(make_model("qwen3", True, seed=3))).verified
    mended.restart_session(verify=verify)
    read_back = []
    for seed in range(8):
        model = make_model("qwen3", True, seed)
        read_back.append(mended.push(weights_of(model)).verified)
    assert sum(read_back) == whole * 8 * share
    assert mended.difference(model) < TOLERANCE
    mended.restart_session()


@pytest.mark.parametrize("kind", ["disk", "gloo", "shm"])
def test_weights_are_updated_by_the_public_order_of_calls(kind: Any, mended: Served, tmp_path: Path) -> None:
    rollout = RemoteSGLangEngine(RolloutConfig())
    rollout.connect(mended.session)
    model = make_model("qwen3", True, seed=30)
    mended.version += 1
    meta = WeightUpdateMeta(type=kind, path=str(tmp_path) if kind == "disk" else None, model_version=mended.version)
    future = rollout.update_weights(meta)
    assert not future.done()
    mended.session.upload(weights_of(model), meta)
    assert future.result(timeout=0).version == mended.version
    assert mended.difference(model) < TOLERANCE
    assert mended.served_version() == str(mended.version)


def test_a_failed_update_is_raised_by_the_future_as_well(mended: Served) -> None:
    rollout = RemoteSGLangEngine(RolloutConfig())
    rollout.connect(mended.session)
    mended.restart_session()
    rollout.connect(mended.session)
    meta = WeightUpdateMeta(type="gloo", model_version=mended.version)
    future = rollout.update_weights(meta)
    with pytest.raises(WeightSyncError, match="versions only grow"):
        mended.session.upload(weights_of(make_model("qwen3", True, seed=4)), meta)
    with pytest.raises(WeightSyncError, match="versions only grow"):
        future.result(timeout=0)
