"""Experts that a real SGLang server chose come back with its tokens, and the actor replays them (R3)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.families import decoder, read_config
from megarl.knobs import UserError
from megarl.launcher import local
from megarl.parallel import groups
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.routes import RouteShape
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.rollout.executor import pack
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.transcript import pad_responses
from megarl.types import ROUTED_EXPERTS, GenerationHyperparameters, ModelRequest, PackedBatch
from tests import warm
from tests.sglang.replay_worker import actor_of, chosen, copy_of, drift, error, trained_on

PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42, 43, 44, 45, 46, 47], [100, 3, 100, 3])
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=24)


@pytest.fixture(scope="module")
def moe(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3_moe", tied=False)  # SGLang ties no embeddings of this family


@contextlib.contextmanager
def serving(folder: Path, logs: Path) -> Iterator[tuple[RemoteSGLangEngine, SGLangServers]]:
    """A client of a server that returns routes, and the server."""
    config = SGLangServerConfig(device="cpu", max_total_tokens=16384)
    servers = SGLangServers(config, folder, logs, WEIGHT_LOADER, {"enable_return_routed_experts": True})
    engine = RemoteSGLangEngine(RolloutConfig())
    engine.routes = RouteShape.of(decoder(read_config(str(folder))))
    try:
        servers.start()
        servers.wait_ready()
        engine.initialize(servers.addresses, api_key=servers.api_key)
        yield engine, servers
    finally:
        engine.destroy()
        servers.stop()


@pytest.fixture(scope="module")
def served(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteSGLangEngine, SGLangServers]]:
    with serving(moe, tmp_path_factory.mktemp("logs")) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(served: tuple[RemoteSGLangEngine, SGLangServers]) -> RemoteSGLangEngine:
    return served[0]


def post(servers: SGLangServers, route: str, **body: Any) -> Any:
    """The server's answer to a request of its own."""
    headers = {"Authorization": f"Bearer {servers.api_key}", "Content-Type": "application/json"}
    call = urllib.request.Request(f"http://{servers.addresses[0]}/{route}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=300) as response:
        return json.loads(response.read())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Destroys the process group of one rank that an engine joins."""
    yield
    groups.destroy()


def sampled(client: RemoteSGLangEngine) -> PackedBatch:
    """A batch of a group of completions for each prompt."""

    async def ask() -> list[Any]:
        return list(await asyncio.gather(*(client.agenerate_group(ModelRequest(ids, GCONFIG)) for ids in PROMPTS)))

    groups = client.submit(ask()).result(900)
    packed = [pack(pad_responses(group, [float(i) for i in range(len(group))]), "test") for group in groups]
    for index, group in enumerate(packed):
        group.set_sequences("group_ids", torch.full((group.num_seqs,), index))
    return PackedBatch.concat(packed)


@pytest.fixture(scope="module")
def batch(client: RemoteSGLangEngine) -> PackedBatch:
    return sampled(client)


def test_every_token_but_the_last_of_a_sequence_has_its_route(batch: PackedBatch) -> None:
    routes = batch[ROUTED_EXPERTS]
    last = torch.zeros(batch.total_tokens, dtype=torch.bool)
    last[batch.cu_seqlens[1:].long() - 1] = True
    assert bool((routes[last] == -1).all())
    assert bool((routes[~last] >= 0).all())
    assert routes.shape[1:] == (2, 2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_drifted_actor_replays_the_servers_experts(moe: Path, batch: PackedBatch, recompute: str) -> None:
    actor = actor_of(moe, recompute=recompute)
    given = batch[ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    drift(actor)
    own = chosen(actor, copy_of(batch, without=ROUTED_EXPERTS))
    assert 0.02 < float((own != given).any(-1)[routed].float().mean()) < 0.5
    assert torch.equal(chosen(actor, batch)[routed], given[routed])
    assert float(error(actor, batch).max()) < 3e-5  # as of a dense model
    assert actor._replay is not None
    actor._replay.check = lambda batch: None  # type: ignore[method-assign]
    assert float(error(actor, copy_of(batch, without=ROUTED_EXPERTS)).max()) > 0.1

    update = actor.ppo_update(trained_on(actor, batch))
    assert 0.02 < update["routes_changed"] < 0.5
    assert all(not router.waiting for router in actor._replay.routers.values())
    plain = actor_of(moe, replay="off")
    expected = plain.ppo_update(trained_on(plain, batch))
    for name in ("loss", "grad_norm", "approx_kl"):  # a recomputation by other experts would have other gradients
        assert update[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.usefixtures("one_rank")
def test_proximal_replays_the_choice_of_the_pass_before_the_update(moe: Path, batch: PackedBatch) -> None:
    actor = actor_of(moe, replay="proximal")
    drift(actor)
    own = copy_of(batch, without=ROUTED_EXPERTS)
    own["prox_logp"] = actor.compute_logp(own)
    first = own[ROUTED_EXPERTS].clone()
    assert torch.equal(chosen(actor, own), first.sort(-1).values)
    assert not torch.equal(chosen(actor, copy_of(own, without=ROUTED_EXPERTS)), first.sort(-1).values)
    replayed = actor.logprobs(own, trained_only=True)
    torch.testing.assert_close(replayed, own["prox_logp"], atol=1e-6, rtol=0)


@pytest.mark.usefixtures("one_rank")
def test_a_shared_prompt_is_read_once_where_its_routes_agree(moe: Path, batch: PackedBatch) -> None:
    actor = actor_of(moe, shared_prefix=True, max_tokens_per_mb=200)
    drift(actor)
    assert float(error(actor, batch).max()) < 3e-5
    read = [mb.input_ids.numel() for mb in actor._microbatches(batch)]
    assert sum(read) < batch.total_tokens
    other = copy_of(batch)
    other[ROUTED_EXPERTS][1] = 3 - other[ROUTED_EXPERTS][1]  # the other two experts, in one sequence alone
    assert sum(mb.input_ids.numel() for mb in actor._microbatches(other)) > sum(read)
    routed = other[ROUTED_EXPERTS][..., 0] >= 0
    assert torch.equal(chosen(actor, other)[routed], other[ROUTED_EXPERTS].sort(-1).values[routed])


def test_a_cached_prompt_has_the_routes_of_the_pass_that_read_it(
    moe: Path, served: tuple[RemoteSGLangEngine, SGLangServers]
) -> None:
    client, servers = served
    prompt, gconfig = [9, 33, 120, 7, 7, 250], GenerationHyperparameters(max_new_tokens=20)
    first = client.submit(client.agenerate(ModelRequest(prompt, gconfig))).result(900)
    read = [*prompt, *first.output_tokens]  # a later turn continues them; no pass has read the last one
    asked = {"input_ids": [*read, 61, 62, 63], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    answer = post(servers, "generate", return_routed_experts=True, **asked)
    assert answer["meta_info"]["cached_tokens"] == len(read) - 1
    encoded, tokens = answer["meta_info"]["routed_experts"], len(asked["input_ids"]) + 2
    routes = RouteShape.of(decoder(read_config(str(moe)))).parse(encoded, tokens)
    assert first.routed_experts is not None
    assert torch.equal(routes[: len(read) - 1], first.routed_experts)


@pytest.mark.usefixtures("one_rank")
def test_routes_of_interrupted_completions_of_several_versions_are_replayed(
    moe: Path, served: tuple[RemoteSGLangEngine, SGLangServers]
) -> None:
    """The new version is a label here, with the same weights, so log-probs can be compared."""
    client, servers = served
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=200)

    async def ask(version: int) -> list[Any]:
        asking = asyncio.gather(*(client.agenerate_group(ModelRequest(ids, gconfig)) for ids in PROMPTS))
        await asyncio.sleep(0.3)
        label = {"new_version": str(version), "abort_all_requests": True}
        await asyncio.to_thread(post, servers, "update_weight_version", **label)
        return list(await asking)

    for version in range(1, 31):  # on a machine that stalls, completions may end before the label comes
        answers = client.submit(ask(version)).result(300)
        packed = [pad_responses(group, [0.0] * len(group)) for group in answers]
        batch = PackedBatch.concat([pack(group, "test") for group in packed])
        versions = batch["versions"][batch["loss_mask"].bool()]
        mixed = [len(part[part >= 0].unique()) > 1 for part in batch.split(batch["versions"])]
        if any(mixed):
            break
    assert any(mixed)
    assert {version - 1, version} <= set(versions.tolist())
    actor = actor_of(moe, max_tokens_per_mb=1000)
    drift(actor)
    given = batch[ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    assert int(routed.all(1).sum()) == batch.total_tokens - batch.num_seqs
    assert torch.equal(chosen(actor, batch)[routed], given[routed])
    assert float(error(actor, batch).max()) < 3e-5


@pytest.mark.usefixtures("one_rank")
def test_a_sequence_without_a_route_is_refused_by_name(moe: Path, batch: PackedBatch) -> None:
    actor, holed = actor_of(moe), copy_of(batch)
    holed[ROUTED_EXPERTS][int(batch.cu_seqlens[3]) + 2] = -1
    with pytest.raises(UserError, match=r"sequence 3 of the batch has no route for token 2 of .* 1 of 12 sequences"):
        actor.compute_logp(holed)
    with pytest.raises(UserError, match="the workflow lost them"):
        actor.compute_logp(copy_of(batch, without=ROUTED_EXPERTS))
    cut = copy_of(batch)
    cut.set_tokens(ROUTED_EXPERTS, batch[ROUTED_EXPERTS][:, :1])
    with pytest.raises(UserError, match="routes in 2 layers to 2 experts"):
        actor.ppo_update(cut)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2sp": {"tp_size": 2, "sequence_parallel": True},
    "ep2": {"dp_size": 2, "ep_size": 2},
    "tp2sp_ep2": {"tp_size": 2, "sequence_parallel": True, "ep_size": 2, "etp_size": 1},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
}


@pytest.fixture(scope="module")
def layouts(moe: Path, batch: PackedBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the results of all layouts, in one start of two ranks."""
    work, logs = tmp_path_factory.mktemp("layouts"), tmp_path_factory.mktemp("logs")
    save_file({"cu_seqlens": batch.cu_seqlens, **batch.tokens, **batch.sequences}, work / "batch.safetensors")
    arguments = [str(moe), str(work), json.dumps(LAYOUTS)]
    with warm.used():
        code = local.run_ranks("tests.sglang.replay_worker", arguments, 2, logs)
    assert not code, "\n".join(path.read_text()[-3000:] for path in logs.iterdir())
    return work


@pytest.fixture(scope="module")
def expected_update(moe: Path, batch: PackedBatch) -> dict[str, float]:
    """Figures of an update by an actor of one rank whose own choice is the server's."""
    actor = actor_of(moe, replay="off")
    update = actor.ppo_update(trained_on(actor, batch))
    groups.destroy()
    return update


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_replays_all_choices(
    layouts: Path, batch: PackedBatch, expected_update: dict[str, float], layout: str
) -> None:
    results, update = load_file(layouts / f"{layout}.safetensors"), json.loads((layouts / f"{layout}.json").read_text())
    given = batch[ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    assert torch.equal(results["proximal"][routed], given[routed])  # without drift the actor chooses as the server
    assert 0.02 < float((results["own"] != given).any(-1)[routed].float().mean()) < 0.5
    assert torch.equal(results["replayed"][routed], given[routed])
    assert float(results["error"].max()) < 3e-5
    assert 0.02 < update["routes_changed"] < 0.5
    for name in ("loss", "grad_norm", "approx_kl"):
        assert update[name] == pytest.approx(expected_update[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "deepseek_v3"])
def test_other_families_return_and_replay_routes(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tied=False)
    with serving(folder, tmp_path) as (engine, _):
        batch = sampled(engine)
    actor = actor_of(folder)
    given = batch[ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    assert torch.equal(chosen(actor, copy_of(batch, without=ROUTED_EXPERTS))[routed], given[routed])
    drift(actor)
    assert not torch.equal(chosen(actor, copy_of(batch, without=ROUTED_EXPERTS))[routed], given[routed])
    assert torch.equal(chosen(actor, batch)[routed], given[routed])
    assert float(error(actor, batch).max()) < 3e-5


def test_a_server_that_records_no_experts_is_refused(server: SGLangServers, moe: Path) -> None:
    engine = RemoteSGLangEngine(RolloutConfig())
    engine.routes = RouteShape.of(decoder(read_config(str(moe))))
    with pytest.raises(UserError, match="does not return it; start it with --enable-return-routed-experts"):
        engine.initialize(server.addresses, api_key=server.api_key)
