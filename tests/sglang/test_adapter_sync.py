"""Syncs of adapters alone into real SGLang servers, with PEFT on transformers as the oracle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_weights_faults import corrupt, restart
from weights_support import PROMPT, Served, SingleRankWeights, logprobs

from megarl.families.adapters import SERVED, Adapters, is_adapter
from megarl.knobs import UserError
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.servers.external import ExternalServers
from megarl.rollout.servers.served_adapters import ServedAdapters
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.tiny_models import make_model

TOLERANCE = 1e-4
WIDE = Adapters(4, ("all-linear",), alpha=6.0)
NARROW = Adapters(3, ("q_proj", "v_proj", "layers.1.mlp.down_proj"), alpha=5.0, rslora=True)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(family: str, adapters: Adapters, seed: int, base: int = 0) -> PeftModel:
    """A tiny model of `family` with random adapters; `base` is the seed of its weights."""
    model = make_model(family, True, base)
    torch.manual_seed(seed)
    targets = LINEAR if adapters is WIDE else [f".*{target.replace('.', '[.]')}" for target in adapters.targets]
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        use_rslora=adapters.rslora,
        target_modules=targets if adapters is WIDE else "|".join(targets),
        init_lora_weights=False,
    )
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()


def weights_of(model: PeftModel) -> SingleRankWeights:
    """Base and adapters, as the actor lists them."""
    named = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".default.", ".").replace(".base_layer.", ".")
        named[plain] = parameter.detach()
    return SingleRankWeights(named)


def nbytes(weights: SingleRankWeights) -> int:
    return sum(tensor.numel() * 4 for name, tensor in weights.tensors.items() if is_adapter(name))


@contextlib.contextmanager
def serving(
    names: tuple[str, ...], tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangServers]]:
    """Starts a server of a Qwen3 with adapters `names` of every layer, and one of two ranks of a Qwen2 with few."""
    started: dict[str, SGLangServers] = {}
    for family, tp_size, shape in (("qwen3", 1, WIDE), ("qwen2", 2, NARROW)):
        config = SGLangServerConfig(device="cpu", max_total_tokens=16384, tp_size=tp_size)
        logs, held = tmp_path_factory.mktemp("logs"), ServedAdapters(shape, names)
        started[family] = SGLangServers(config, tiny_checkpoint(family), logs, WEIGHT_LOADER, adapters=held)
    try:
        for each in started.values():
            each.start()
        for each in started.values():
            each.wait_ready()
        yield started
    finally:
        for each in started.values():
            each.stop()


@pytest.fixture(scope="module")
def servers(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangServers]]:
    with serving((SERVED,), tiny_checkpoint, tmp_path_factory) as started:
        yield started


@pytest.fixture
def qwen3(servers: dict[str, SGLangServers]) -> Iterator[Served]:
    served = Served(servers["qwen3"], bucket_bytes=65536)
    served.adapter = SERVED
    yield served
    served.session.close()


def test_the_base_is_sent_once_and_then_the_adapters_bytes_alone(servers: dict[str, SGLangServers]) -> None:
    for family, adapters, copies in (("qwen3", WIDE, 1), ("qwen2", NARROW, 2)):
        served = Served(servers[family], bucket_bytes=50_000)
        served.adapter = None
        start = make_model(family, True, 0)
        assert served.difference(start) < TOLERANCE
        served.adapter = SERVED
        assert served.difference(start) < TOLERANCE, "it starts with zeros"
        sizes = []
        for seed in range(4):
            model = adapted(family, adapters, seed, base=7)
            assert served.difference(model) > 0.01
            report = served.push(weights_of(model))
            assert served.difference(model) < TOLERANCE
            sizes.append(report.bytes)
            assert report.verified > 0
            assert served.served_version() == str(report.version)
            if seed and copies == 1:
                assert report.bytes == nbytes(weights_of(model))
                assert report.verified >= sum(map(is_adapter, weights_of(model).tensors))
        assert sizes[0] > 3 * sizes[1]
        assert sizes[1:] == [sizes[1]] * 3
        assert sizes[1] == sum(held_bytes(weights_of(model), rank, copies) for rank in range(copies))
        served.adapter = None
        assert served.difference(make_model(family, True, 7)) < TOLERANCE, "no adapter has touched the base"
        served.session.close()


def held_bytes(weights: SingleRankWeights, rank: int, size: int) -> int:
    """Bytes of adapters on a rank: column-parallel B by rows, row-parallel A by columns, all else in full."""
    total = 0
    for name, tensor in weights.tensors.items():
        if is_adapter(name):
            row_parallel = "o_proj" in name or "down_proj" in name
            total += tensor.numel() * 4 // (size if row_parallel == ("lora_A" in name) else 1)
    return total


def test_each_token_has_the_version_and_the_logprob_of_the_adapter_that_gave_it(qwen3: Served) -> None:
    pool = {qwen3.version + 1 + i: adapted("qwen3", WIDE, 30 + i) for i in range(4)}
    qwen3.push(weights_of(pool[qwen3.version + 1]))
    arrived, newest, enough = threading.Condition(), [0], threading.Event()
    answers: list[dict[str, Any]] = []

    def told(version: int) -> None:
        with arrived:
            newest[0] = version
            arrived.notify()

    def ask() -> None:
        while not enough.is_set():
            answers.append(qwen3.stream(450, PROMPT, told))

    thread = threading.Thread(target=ask)
    thread.start()
    models = {qwen3.version: pool[qwen3.version]}
    try:
        while all(len(answer["meta_info"]["weight_versions"]) < 3 for answer in list(answers)):
            with arrived:
                assert arrived.wait_for(lambda: newest[0] == qwen3.version, timeout=300)
            model = pool[min(pool) + len(models) % 4]
            qwen3.push(weights_of(model))
            models[qwen3.version] = model
    finally:
        enough.set()
        thread.join(300)
    answer = next(answer for answer in answers if len(answer["meta_info"]["weight_versions"]) >= 3)
    output = torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
    spans = answer["meta_info"]["weight_versions"]
    for span in spans:
        expected = logprobs(models[int(span["version"])], PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
        part = slice(span["start"], span["end"])
        torch.testing.assert_close(output[part], expected[part], atol=TOLERANCE, rtol=0)


def test_a_delta_of_adapters_sends_what_changed(qwen3: Served) -> None:
    qwen3.restart_session(delta=True)
    model = adapted("qwen3", WIDE, 40)
    for _ in range(2):
        dense = qwen3.push(weights_of(model)).bytes
    assert dense == nbytes(weights_of(model))
    with torch.no_grad():
        weights_of(model).tensors["model.layers.0.mlp.up_proj.lora_B.weight"][3] += 0.5
    report = qwen3.push(weights_of(model))
    assert (0 < report.bytes < 0.05 * dense, report.dense_bytes) == (True, dense)
    assert qwen3.difference(model) < TOLERANCE


def test_a_corrupted_adapter_stops_the_sync_with_its_name_and_the_next_one_mends_it(
    qwen3: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3.push(weights_of(adapted("qwen3", WIDE, 50)))
    with monkeypatch.context() as patch:
        corrupt(patch, 1)
        with pytest.raises(WeightSyncError, match=r"rank 0 does not hold what was sent of .*\.lora_[AB]") as error:
            qwen3.push(weights_of(adapted("qwen3", WIDE, 51)))
    assert is_adapter(error.value.tensor)
    assert (error.value.phase, qwen3.session.healthy) == ("verify", [])
    model = adapted("qwen3", WIDE, 52)
    assert qwen3.push(weights_of(model)).bytes > 3 * nbytes(weights_of(model)), "a failed server gets everything"
    assert qwen3.difference(model) < TOLERANCE


def test_a_server_is_asked_for_the_adapters_that_it_holds(qwen3: Served) -> None:
    other = weights_of(adapted("qwen3", NARROW, 60))
    with pytest.raises(WeightSyncError, match=r"k_proj\.lora_A\.weight is held by the servers and by no trainer rank"):
        qwen3.push(other)
    higher = weights_of(adapted("qwen3", Adapters(8, tuple(LINEAR), 6.0), 61))
    qwen3.restart_session()
    with pytest.raises(WeightSyncError, match=r"lora_A\.weight: server 0 takes 256 of the trainer's 512 elements"):
        qwen3.push(higher)
    qwen3.restart_session()


def test_a_run_is_refused_servers_that_hold_another_adapter(qwen3: Served) -> None:
    """As they are found by a run that did not start them."""
    for adapters, message in (
        (ServedAdapters(WIDE, (SERVED,)), None),
        (None, "holds adapters that are not the run's: trained; start it by"),
        (
            ServedAdapters(NARROW, (SERVED,)),
            r"the run's are of rank 3, scale [\d.]+, on down_proj, q_proj, v_proj; start it by",
        ),
        (ServedAdapters(WIDE, (SERVED, "math")), "lacks the run's adapters math; start it by"),
    ):
        found = ExternalServers(qwen3.addresses, qwen3.servers.api_key, WEIGHT_LOADER, adapters)
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            found.wait_ready()


def test_a_restarted_server_gets_base_and_adapters_again(qwen3: Served) -> None:
    model = adapted("qwen3", WIDE, 70, base=8)
    qwen3.push(weights_of(model))
    restart(qwen3.servers.servers[0], elsewhere=False)
    assert qwen3.difference(make_model("qwen3", True, 0)) < TOLERANCE, "the checkpoint's weights, and zeros"
    qwen3.session.admit(qwen3.addresses[0])
    report = qwen3.session.resync(weights_of(model))
    assert (report.version, qwen3.session.dirty) == (qwen3.version, [])
    assert qwen3.difference(model) < TOLERANCE
