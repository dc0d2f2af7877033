"""Two real servers, one of which computes with other weights than the digests proved: the canary finds it.

The fault is real: once a server's weights are proven and before it serves them, SGLang reloads the checkpoint that it
was started with from disk. The label of its version is then the new one, and its weights are the old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import new_run
from megarl.reshard.sync.coordinator import Coordinator
from megarl.reshard.sync.server_control import ServerControl
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts import rank0_servers
from megarl.trainer.rollouts.canary import Canary
from megarl.trainer.rollouts.logprob_check import LogprobMismatchError
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from megarl.types import PackedBatch

OVERRIDES = [
    "+experiment=gsm8k_grpo", "server.n_servers=2", "server.max_restarts=0", "train_dataset.batch_size=8",
    "gconfig.max_new_tokens=48", "rollout.max_head_offpolicyness=1", "server.heartbeat_s=300",
]  # fmt: skip
TOLERANCE = 1e-4  # nats, float32


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    config = cli.load(OVERRIDES)
    model, logs = Path(config.actor.path), tmp_path_factory.mktemp("servers")
    with SGLangServers(config.server, model, logs, WEIGHT_LOADER, config.sglang) as servers:
        servers.start()
        servers.wait_ready()
        yield servers


class Sampler:
    """A run's policy and rollouts, without its updates: `move` changes the weights, as an update would."""

    def __init__(self, config: Config, driver: RolloutDriver, models: rl.Models) -> None:
        self.config, self.driver, self.models = config, driver, models
        self.version = 0
        self.prompts: list[str] = []  # of all batches

    def move(self, factor: float) -> None:
        with torch.no_grad():
            for module in self.models.actor.modules:
                module.decoder.final_layernorm.weight.mul_(factor)

    def push(self) -> dict[str, float]:
        """The figures of the sync."""
        stats_tracker.export()
        self.version += 1
        self.driver.push(self.version)
        return stats_tracker.export()

    def batch(self) -> PackedBatch:
        batch = self.driver.next_batch()
        self.prompts += [episode.prompt_id for episode in self.driver.rank0.engine.episodes]
        return batch

    def difference(self, batch: PackedBatch) -> float:
        """Largest |trainer - rollout log-prob| of tokens of the trainer's version; it must have some."""
        chosen = batch["loss_mask"] & (batch["versions"] == self.driver.version)
        assert chosen.any()
        return float((self.models.actor.compute_logp(batch) - batch["rollout_logprobs"])[chosen].abs().max())


@pytest.fixture
def sampling(
    two_servers: SGLangServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Sampler]]:
    """`sampling(override, ...)`: a run whose servers have the policy's weights and whose rollouts are under way."""
    monkeypatch.setattr(rank0_servers, "SGLangServers", lambda *_, **__: two_servers)
    monkeypatch.setattr(two_servers, "start", lambda: None)
    monkeypatch.setattr(two_servers, "stop", lambda: None)
    with ExitStack() as opened:

        def begin(*overrides: str) -> Sampler:
            config = cli.load([*OVERRIDES, f"run_root={tmp_path}", *overrides])
            algorithm, folder = algorithm_of(config.algorithm), new_run(config.run_root, "canary")
            driver = opened.enter_context(rl.rollouts_of(config, folder, read_inputs(config, 0), algorithm))
            models = rl.Models.build(config, algorithm)
            opened.callback(models.destroy)
            sampler = Sampler(config, driver, models)
            driver.weights.connect(models.actor, 0, models.saved.values(), as_served=True)
            driver.connect(models.actor, 0)
            sampler.push()
            sampler.batch()
            return sampler

        yield begin
    stats_tracker.export()  # not figures of the next test's run


@pytest.fixture
def goes_back(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`goes_back(address, ...)`: these servers load the checkpoint again in each sync, after they were proven."""

    def patch(*addresses: str) -> None:
        commit = Coordinator.commit

        def go_back(coordinator: Coordinator, version: int) -> None:
            for link in coordinator.active:
                if link.address in addresses:
                    control = ServerControl(link.address, coordinator.api_key)
                    deadline = Deadline(300)
                    path = control.model_info(deadline)["model_path"]
                    body: dict[str, Any] = {"model_path": path, "abort_all_requests": False, "flush_cache": False}
                    control.call("/update_weights_from_disk", body, deadline)
            commit(coordinator, version)

        monkeypatch.setattr(Coordinator, "commit", go_back)

    return patch


def test_healthy_servers_pass_while_weights_move_and_rollouts_go_on(sampling: Callable[..., Sampler]) -> None:
    sampler = sampling("reshard.on_failure=drop_server")
    for factor in (1.2, 0.7, 1.3):
        sampler.move(factor)
        figures = sampler.push()
        assert 0 < figures["sync/canary_logprob_diff_max"] < TOLERANCE
        assert (figures["sync/canary_left_out"], figures["sync/servers"]) == (0, 2)
        sampler.batch()


def test_a_server_with_old_weights_is_left_out_and_no_token_of_it_is_trained_on(
    sampling: Callable[..., Sampler],
    goes_back: Callable[..., None],
    two_servers: SGLangServers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = Canary.compare

    def compare_late(*arguments: Any) -> dict[str, str]:
        time.sleep(1.0)  # meanwhile both servers complete what they were asked
        return compare(*arguments)

    monkeypatch.setattr(Canary, "compare", compare_late)
    sampler = sampling("reshard.on_failure=drop_server")
    right, wrong = two_servers.addresses
    sampler.move(0.3)
    goes_back(wrong)
    figures = sampler.push()
    assert (figures["sync/verified"], figures["sync/servers"]) == (1, 2)  # the digests saw nothing
    assert figures["sync/canary_left_out"] == 1
    assert sampler.driver.weights.session.healthy == [right] == sampler.driver.weights.rank0.supervisor.serving()
    assert f"server {wrong} does not compute what the trainer does" in caplog.text
    assert f"going on without {wrong}" in caplog.text

    batches = [sampler.batch(), sampler.batch()]  # with the episodes that began at both servers before the verdict
    assert sampler.difference(PackedBatch.concat(batches)) < TOLERANCE
    assert [batch.num_seqs for batch in batches] == [8 * sampler.config.gconfig.n_samples] * 2
    sampler.move(0.9)
    assert sampler.push()["sync/servers"] == 1
    sampler.batch()
    numbers = [int(prompt) for prompt in sampler.prompts]
    assert sorted(numbers) == sorted(set(numbers))
    assert max(numbers) < 2 * 8 + len(numbers)


def test_the_run_stops_and_names_the_server(
    sampling: Callable[..., Sampler], goes_back: Callable[..., None], two_servers: SGLangServers
) -> None:
    sampler = sampling("reshard.on_failure=stop")
    sampler.move(0.3)
    goes_back(two_servers.addresses[1])
    with pytest.raises(LogprobMismatchError, match=f"server {two_servers.addresses[1]} does not compute"):
        sampler.push()


@pytest.mark.long
def test_the_run_stops_if_no_server_would_be_left(
    sampling: Callable[..., Sampler], goes_back: Callable[..., None], two_servers: SGLangServers
) -> None:
    sampler = sampling("reshard.on_failure=drop_server")
    sampler.move(0.3)
    goes_back(*two_servers.addresses)
    with pytest.raises(LogprobMismatchError, match=rf"\(the same holds for {two_servers.addresses[1]}\)"):
        sampler.push()
