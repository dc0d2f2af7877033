"""Every RL method on one real server: some steps of its recipe, from the bundled weights each time.

The server is started once. Each method begins by pushing the start weights, and goes through the trainer's own pieces.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.actor.rollout_mismatch import rollout_mismatch
from megarl.algorithms import ALGORITHMS, RLConfig, algorithm_of
from megarl.knobs import UserError
from megarl.observe.run_folder import new_run
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts import rank0_servers
from megarl.trainer.rollouts.logprob_check import LogprobMismatchError
from megarl.trainer.run import Run
from megarl.types import PackedBatch

NAMES = [name for name, (kind, _) in ALGORITHMS.items() if issubclass(kind, RLConfig)]
OFTEN = ("ppo", "opd", "remax")  # unlike the others in more than the loss
EXPERIMENTS = {"ppo": "gsm8k_ppo", "gdpo": "gsm8k_gdpo", "opd": "opd"}
BY_ADVANTAGES = {"opd": ["algorithm.divergence=sampled"]}  # divergences: test_teacher_layouts.py
STEPS = 3
LONGER = 40  # the last third is above the first by 0.10 to 0.12 (three runs); in 16 steps it was a matter of luck


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    """A ready server of the bundled model."""
    config = cli.load(["+experiment=gsm8k_grpo"])
    folder = tmp_path_factory.mktemp("server")
    with SGLangServers(config.server, Path(config.actor.path), folder, WEIGHT_LOADER, config.sglang) as servers:
        servers.start()
        servers.wait_ready()
        yield servers


@pytest.fixture
def lent(one_server: SGLangServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run finds the server started, and leaves it so."""
    monkeypatch.setattr(rank0_servers, "SGLangServers", lambda *_, **__: one_server)
    monkeypatch.setattr(one_server, "start", lambda: None)
    monkeypatch.setattr(one_server, "stop", lambda: None)


def steps_of(
    name: str, steps: int, root: Path, *overrides: str, evaluate: bool = False
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The figures of every step, and the change of the weights."""
    experiment = EXPERIMENTS.get(name, "gsm8k_grpo")
    config = cli.load([f"+experiment={experiment}", f"algorithm={name}", f"run_root={root}", *overrides])
    algorithm = algorithm_of(config.algorithm)
    folder, inputs = new_run(config.run_root, name), read_inputs(config, 0)
    found = []
    with rl.rollouts_of(config, folder, inputs, algorithm) as sampled:
        models = rl.Models.build(config, algorithm)
        before = {key: value.clone() for key, value in models.actor.named_weights()}
        sampled.weights.connect(models.actor, 0, models.saved.values(), as_served=True)
        sampled.connect(models.actor, 0)
        sampled.push(version=1)
        for step in range(2, steps + 2):
            batch = sampled.next_batch()
            models.score(batch)
            models.actor.compute_advantages(batch)
            stats = models.update(batch)
            sampled.check_logprobs(batch)
            mismatch = rollout_mismatch(batch, sampled.version)
            sampled.push(version=step)
            reward = float(batch["rewards"].mean())
            found.append({**stats, **mismatch, **gain(models, batch), "reward": reward, "answers": answers(batch)})
        held_out = sampled.evaluate(config.total_train_steps) if evaluate else {}
        assert evaluate == bool(held_out.get("samples"))
        moved = {key: float((value - before[key]).abs().max()) for key, value in models.actor.named_weights()}
        models.destroy()
    return found, moved


def answers(batch: PackedBatch) -> float:
    """Mean number of answers in a sequence, by the runs of trained tokens."""
    mask = batch["loss_mask"].int()
    return float((mask.diff(prepend=mask.new_zeros(1)) == 1).sum()) / batch.num_seqs


def gain(models: rl.Models, batch: PackedBatch) -> dict[str, float]:
    """What the update was for: by how much it made the batch's better completions likelier than its worse ones,
    mean over tokens of advantage x change of the log-prob. Of a critic, how much nearer its values came to the batch's
    returns: by how much the mean squared error fell. Over a few steps, neither is a matter of luck, unlike what the
    next prompts earn."""
    mask = batch["loss_mask"].bool()
    change = models.actor.compute_logp(batch) - batch["prox_logp"]
    gains = {"gain": float((batch["advantages"] * change)[mask].mean())}
    if models.critic is not None:
        values = (batch["values"], models.critic.compute_values(batch))
        before, after = (float(((v - batch["returns"]) ** 2)[mask].mean()) for v in values)
        gains["critic_gain"] = before - after
    return gains


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in NAMES]
)
@pytest.mark.usefixtures("lent")
def test_a_method_trains_on_its_own_completions(name: str, tmp_path: Path) -> None:
    found, moved = steps_of(name, STEPS, tmp_path, "train_dataset.batch_size=16", *BY_ADVANTAGES.get(name, []))
    check(found, moved)
    if name == "ppo":
        assert sum(figures["critic_gain"] for figures in found) > 0


@pytest.mark.long
@pytest.mark.usefixtures("lent")
def test_the_reward_of_another_method_than_grpo_rises_too(tmp_path: Path) -> None:
    """As GRPO's does in test_main_job.py."""
    found, moved = steps_of("rloo", LONGER, tmp_path, "actor.optimizer.lr=2e-4")
    check(found, moved)
    rewards = [figures["reward"] for figures in found]
    third = len(rewards) // 3
    assert sum(rewards[-third:]) > sum(rewards[:third]), rewards


def check(found: list[dict[str, float]], moved: dict[str, float]) -> None:
    """The steps learned from what they sampled, and rollout and trainer agreed."""
    for figures in found:
        assert all(math.isfinite(value) for value in figures.values())
        assert figures["skipped_steps"] == 0
        assert figures["logprob_diff_max"] < 1e-3
    assert any(figures["grad_norm"] > 0 for figures in found)
    assert sum(figures["gain"] for figures in found) > 0
    assert max(moved.values()) > 1e-5


@pytest.mark.usefixtures("lent")
def test_a_reference_in_the_loss_reports_its_kl(tmp_path: Path) -> None:
    """The policy starts where the reference is, and leaves it."""
    found, _ = steps_of(
        "grpo", 2, tmp_path, "train_dataset.batch_size=8", "algorithm.kl_coef=0.1",
        "algorithm.n_minibatches=1",
    )  # fmt: skip
    assert found[0]["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert found[1]["ref_kl"] > 1e-7


@pytest.mark.usefixtures("lent")
def test_adapters_are_merged_for_the_server_and_their_base_is_the_reference(tmp_path: Path) -> None:
    """Each push proves the server's weights by digests; layers without adapters keep theirs."""
    found, moved = steps_of(
        "grpo", 3, tmp_path, "train_dataset.batch_size=8", "algorithm.kl_coef=0.1", "algorithm.n_minibatches=1",
        "actor.lora.rank=4", "actor.lora.targets=[q_proj,v_proj,down_proj]", "actor.optimizer.lr=1e-3",
    )  # fmt: skip
    assert all(figures["logprob_diff_max"] < 1e-3 for figures in found)
    assert sum(figures["gain"] for figures in found) > 0
    assert found[0]["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert found[2]["ref_kl"] > 1e-7
    adapted = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
    assert {name for name, change in moved.items() if change} == {name for name in moved if name.endswith(adapted)}


@pytest.mark.usefixtures("lent")
def test_a_server_with_other_weights_stops_the_run_before_the_update_is_synced_or_saved(tmp_path: Path) -> None:
    config = cli.load(
        [
            "+experiment=gsm8k_grpo", "algorithm.n_minibatches=1", "train_dataset.batch_size=8", "saver.every_steps=1",
            f"run_root={tmp_path}", "evaluator.at_start=false",
        ]
    )  # fmt: skip
    algorithm = algorithm_of(config.algorithm)
    folder, inputs = new_run(config.run_root, "other"), read_inputs(config, 0)
    with rl.rollouts_of(config, folder, inputs, algorithm) as sampled:
        models = rl.Models.build(config, algorithm)
        with Run(config, folder, models.saved, {"rollouts": sampled}, time.monotonic()) as run:
            sampled.weights.connect(models.actor, 0, models.saved.values(), as_served=True)
            sampled.connect(models.actor, 0)
            sampled.push(version=1)
            served = sampled.version
            with torch.no_grad():
                for module in models.actor.modules:
                    module.decoder.final_layernorm.weight.mul_(3.0)
            with pytest.raises(LogprobMismatchError, match="log-probs that differ from the trainer's"):
                rl.loop(run, sampled, models)
        assert sampled.version == served
        models.destroy()
    assert not list(folder.checkpoints.glob("*"))


ASKS_TWICE = """
import json
import urllib.request


def solve(base_url, api_key, data):
    messages = list(data["messages"])
    for turn in ("Are you sure?", None):
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
        if turn:
            messages.append({"role": "user", "content": turn})
    return float(data["answer"].rpartition("####")[2].strip() in answer)
"""


@pytest.mark.parametrize(
    "workflow", [*(pytest.param(name, marks=pytest.mark.long) for name in ("multi_turn", "tool_use")), "agent"]
)
@pytest.mark.usefixtures("lent")
def test_a_workflow_chosen_by_its_knob_trains_on_a_real_server(
    workflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_agent.py").write_text(ASKS_TWICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, moved = steps_of(
        "grpo", 2, tmp_path, "train_dataset.batch_size=8", "algorithm.n_minibatches=1", "evaluator.n_samples=1",
        f"rollout.workflow={workflow}", "rollout.agent.function=own_agent.solve", evaluate=True,
    )  # fmt: skip
    for figures in found:
        assert figures["logprob_diff_max"] < 1e-3
        assert figures["answers"] == {"tool_use": 1.0, "agent": 2.0}.get(workflow, figures["answers"])
    if workflow == "multi_turn":
        assert all(1.0 < figures["answers"] < 3.0 for figures in found)
    assert max(moved.values()) > 1e-5
    assert not [thread for thread in threading.enumerate() if thread.name in ("agent", "rollout")]


SHORT_ANSWERS = """
def half(model, processing_class, prompts, generation_config):
    texts = []
    for prompt in prompts:
        ids = processing_class.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_tensors="pt")
        output = model.generate(input_ids=ids["input_ids"], max_new_tokens=14)[0][ids["input_ids"].shape[1]:]
        texts.append(processing_class.decode(output, skip_special_tokens=True))
    return texts
"""


@pytest.mark.usefixtures("lent")
def test_completions_of_a_function_of_ones_own_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rollouts.py").write_text(SHORT_ANSWERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, moved = steps_of(
        "grpo", 2, tmp_path, "train_dataset.batch_size=8", "algorithm.n_minibatches=1",
        "rollout.rollout_func=own_rollouts.half", "rewards.functions=[gsm8k_flexible]",
    )  # fmt: skip
    assert all(figures["logprob_diff_max"] == 0.0 for figures in found)  # the trainer's own stand in
    assert max(moved.values()) > 1e-5


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.rollout_func=no_such_module.half"], "rollout_func=no_such_module.half cannot be imported"),
        (["rollout.rollout_func=half"], "rollout_func=half must be MODULE.FUNCTION"),
        (["rollout.rollout_func=a.b", "algorithm=remax"], "rollout_func=a.b: ReMax samples in a way of its own"),
    ],
)
def test_a_rollout_function_that_cannot_be_used_is_told_before_a_server_starts(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    def start() -> None:
        config = cli.load(["+experiment=gsm8k_grpo", f"run_root={tmp_path}", *overrides])
        folder, inputs = new_run(config.run_root, "told"), read_inputs(config, 0)
        with rl.rollouts_of(config, folder, inputs, algorithm_of(config.algorithm)):
            raise AssertionError("the servers are started")

    with pytest.raises(UserError, match=says):
        start()
