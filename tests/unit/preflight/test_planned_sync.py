"""The memory that preflight counts for weight syncs: on trainer and server ranks, by transport and relays."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from transformers import PretrainedConfig

from megarl import cli
from megarl.actor.sizes.memory import GPU_RUNTIME
from megarl.actor.sizes.parameter_counts import count_parameters, rank_parameters
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.parallel.placement import places
from megarl.preflight import planned_sync as planning
from megarl.preflight import report
from megarl.preflight.findings import FULL, findings
from megarl.preflight.planned_sync import planned_sync, sends_on, server_sync, trainer_sync
from megarl.preflight.sizing import GIB, beside_actor, memory_of, peaks_of, phases_of, synced_server_of
from megarl.versions import GPUs

BIG = "+experiment=grpo_70b"
MIB = 2**20


def planned(*knobs: str) -> tuple[Config, PretrainedConfig]:
    config = cli.composed([*knobs])
    return config, read_config(str(report.folder_of(config.actor.path)))


def stops(*knobs: str) -> list[str]:
    """Findings of a configuration that would stop it."""
    config, model = planned(*knobs)
    return [f.text for f in findings(config, model, report.folder_of(config.actor.path)) if f.stops]


ON_HOST, IN_TWO, IN_FOUR = 0, 512 * MIB, 1024 * MIB


@pytest.mark.parametrize(
    ("knobs", "trainer", "server"),
    [
        ((BIG,), IN_TWO, IN_TWO),
        ((BIG, "reshard.transport=nccl", "reshard.relay=2"), IN_TWO, IN_FOUR),
        ((BIG, "reshard.transport=nccl", "reshard.relay=4"), IN_TWO, IN_TWO),
        ((BIG, "reshard.transport=nccl", "reshard.bucket_bytes=1048576", "reshard.relay=1"), 2 * MIB, 4 * MIB),
        ((BIG, "reshard.transport=mooncake"), 128 * MIB, 128 * MIB),
        ((BIG, "reshard.transport=nixl", "reshard.relay=1"), IN_TWO, IN_FOUR),
        ((BIG, "reshard.transport=gloo", "reshard.relay=1"), ON_HOST, ON_HOST),
        ((BIG, "reshard.path=full"), ON_HOST, ON_HOST),
        (("+experiment=grpo_7b",), 128 * MIB, 128 * MIB),
    ],
)
def test_buffers_are_counted_where_the_transport_has_them(knobs: tuple[str, ...], trainer: int, server: int) -> None:
    config, model = planned(*knobs)
    stages = memory_of(config, model)
    others = [{k: v for k, v in beside.items() if "staging" in k} for beside in beside_actor(config, model, stages)]
    assert [sum(beside.values()) for beside in others] == [trainer] * len(stages)
    assert synced_server_of(config, model).staging == server


def test_a_trainer_gpu_that_lacks_room_for_the_buffers_alone_is_refused() -> None:
    config, model = planned(BIG)
    between = (max(peaks_of(config, model)) - 256 * MIB) / FULL / GIB
    small = (BIG, f"cluster.gpu_memory_gib={between}", "server.max_total_tokens=100000")
    (text,) = stops(*small)
    assert re.match(r"pipeline rank 0 with its nccl staging needs 67\.\d GiB a GPU, over 95% of", text)
    assert stops(*small, "reshard.transport=gloo") == []
    assert stops(*small, "reshard.bucket_bytes=67108864") == []


def test_a_server_gpu_that_lacks_room_for_the_buffers_alone_is_refused() -> None:
    full = (BIG, "+sglang.mem_fraction_static=0.945")  # and 95% may be used: 0.4 GiB are left
    (text,) = stops(*full)
    assert re.match(r"a server rank with its nccl staging needs 76\.1 GiB, over 95% of cluster", text)
    assert stops(*full, "reshard.transport=gloo") == []
    assert stops(*full, "reshard.bucket_bytes=134217728") == []
    (text,) = stops(*full, "reshard.bucket_bytes=134217728", "reshard.transport=nccl", "reshard.relay=1")
    assert text.startswith("a server rank with its nccl staging needs 76.1 GiB")


def test_copies_of_a_quantised_servers_layers_share_the_free_memory_with_the_buffers() -> None:
    tight = (BIG, "server.quantization=int4", "server.tp_size=8", "+sglang.mem_fraction_static=0.908")
    assert any("copies a server rank's layers during a sync" in text for text in stops(*tight))
    assert stops(*tight, "reshard.transport=gloo") == []


@pytest.mark.parametrize("nodes", ["64", "8", "4"])
@pytest.mark.parametrize("relay", ["auto", "off", "1", "3", "17"])
@pytest.mark.parametrize("servers", [1, 3, 16, 40])
def test_servers_send_on_where_the_plan_says_so(servers: int, relay: str, nodes: str) -> None:
    knobs = ["+experiment=gsm8k_grpo", f"server.n_servers={servers}", "server.tp_size=2", "parallel.dp_size=8"]
    knobs += [f"cluster.gpus_per_node={nodes}", f"reshard.relay={relay}", "reshard.bucket_bytes=65536"]
    config, model = planned(*knobs, "reshard.transport=nccl" if relay.isdigit() else "reshard.transport=auto")
    plan = planned_sync(config, model)
    assert sends_on(config) == plan.is_relayed
    buckets = server_sync(config, model).staging // 65536
    assert buckets == (4 if plan.bytes_forwarded.any() else 2)


def test_copies_for_deltas_are_of_the_buckets_that_a_stage_sends() -> None:
    small = ("+experiment=gsm8k_grpo", "reshard.bucket_bytes=65536", "server.n_servers=3")
    config, model = planned(*small, "parallel.pp_size=2", "parallel.dp_size=4", "reshard.delta=true")
    plan, pipeline = planned_sync(config, model), np.array([place.pp for place in places(config.parallel)])
    copies = [sync.copies for sync in trainer_sync(config, model)]
    assert copies == [int(plan.bytes_packed[pipeline == rank].max()) for rank in range(2)]
    assert copies[0] > plan.bytes_packed[3], "replicas send unequally"
    for rank in (0, 3, 7):
        sizes = {int(plan.messages.bucket[message.index]): message.nbytes for message in plan.sends(rank)}
        assert plan.bytes_packed[rank] == sum(sizes.values()) > 0
    assert [beside["copies for deltas"] for beside in beside_actor(config, model, memory_of(config, model))] == copies
    assert not any(sync.copies for sync in trainer_sync(*planned(*small)))


def test_a_shared_gpu_keeps_the_buffers_in_all_phases() -> None:
    knobs = ("+experiment=grpo_1_7b", "reshard.bucket_bytes=1073741824", "+sglang.mem_fraction_static=0.5")
    on_gpu, on_host = (
        phases_of(*planned(*knobs, f"reshard.transport={transport}"))[0] for transport in ("nixl", "gloo")
    )
    weights = 2 * count_parameters(planned(*knobs)[1])
    digests = -(-weights // 65536) * 48
    for more, less in zip(on_gpu, on_host, strict=True):
        syncs = digests if more.name == "syncing" else 0
        assert (more.trainer - less.trainer, more.server - less.server) == (2 * GIB + syncs,) * 2
    assert on_host[1].server == GPU_RUNTIME


def test_the_report_names_the_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.command([BIG, "reshard.transport=nccl", "reshard.relay=1", "show=memory"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"nccl staging . 512\.0 MiB . 512\.0 MiB . 512\.0 MiB . 512\.0 MiB", text)
    assert re.search(r"nccl staging  . 1\.0 GiB: 4 x 256\.0 MiB, as servers send on \(reshard\.relay=1\)", text)
    assert report.command([BIG, "reshard.transport=gloo", "show=memory"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"on the host . 128\.0 MiB", text)
    assert re.search(r"gloo staging  . 128\.0 MiB: 2 x 64\.0 MiB on the host", text)


def test_a_transport_that_is_ruled_out_is_one_problem_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    mapped = ("+experiment=grpo_7b", "reshard.relay=1")
    (text,) = stops(*mapped)
    assert text.startswith("reshard.relay=1: the weights travel by cuda_ipc")
    for arguments in (mapped, (*mapped, "show=batch")):
        assert report.command([*arguments]) == 1
        assert "\n1 problem that would stop the run" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"reshard\.relay=1"):
        report.command([*mapped, "show=memory"])


def test_a_report_with_deltas_plans_the_sync_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = planned("+experiment=grpo_0_5b", "reshard.delta=true")
    made, plan_of = [], planning.plan
    monkeypatch.setattr(planning, "_last", deque(maxlen=2))
    monkeypatch.setattr(planning, "plan", lambda *args, **named: made.append(1) or plan_of(*args, **named))
    tables = list(report.tables(config, model, [], None, GPUs()))
    assert len(tables) > 5
    assert len(made) == 1
    other = replace(config, server=replace(config.server, dtype="float32"))
    assert planning.planned_sync(other, model) is not planning.planned_sync(config, model)
    assert len(made) == 2


def test_digests_of_a_sync_take_48_bytes_a_leaf_of_a_ranks_weights() -> None:
    config, model = planned(BIG)
    (trainer, *_), server = trainer_sync(config, model), server_sync(config, model)
    held = rank_parameters(model, config.parallel, 0)
    assert trainer.digests == -(-2 * held.dense // 65536) * 48
    assert server.digests == pytest.approx(2 * 70.55e9 / 8 / 65536 * 48, rel=0.01)
