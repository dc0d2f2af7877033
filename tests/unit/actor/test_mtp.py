"""Layers of multi-token prediction: their tokens, files, checkpoints, memory and refusals, and steps of RL.

`tests/distributed/test_mtp_layouts.py` has their numbers under every layout.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl import cli, export
from megarl.actor.batch.context_parallel import Cut
from megarl.actor.batch.microbatch import FutureTokens, build_microbatch, future_targets
from megarl.actor.checkpoint.stored_state import check_facts
from megarl.actor.checks import knob_checks, model_checks
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import heads
from megarl.actor.model.attention.packed import pack_in_blocks
from megarl.actor.mtp import MtpTraining
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.sizes.memory import StepLoad, trainer_memory
from megarl.actor.sizes.parameter_counts import count_parameters, rank_parameters
from megarl.actor.sizes.server_memory import server_memory
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import GRPO, GRPOConfig
from megarl.checks import config_checks
from megarl.config import SaverConfig
from megarl.families import read_config, with_mtp, without_mtp
from megarl.knobs import run_all
from megarl.ops.known_gradients import logprobs_of_token_loss
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from megarl.types import PackedBatch, cu_seqlens_of
from tests.distributed.mtp_worker import bits_of, logits_twice, products
from tests.mtp_oracle import Oracle, add_layers, names_of
from tests.unit.actor.refusal import refusal

FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": {"num_key_value_heads": 4},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}
OVERLAP = {"tp_size": 2, "sequence_parallel": True, "etp_size": 1, "tp_comm_overlap": True}
LENGTHS = (5, 33, 2, 20, 17, 1, 3)


@pytest.fixture(autouse=True)
def no_groups_stay() -> Iterator[None]:
    yield
    groups.destroy()


@pytest.fixture
def source(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`source(family, dtype)`: a checkpoint with a layer of multi-token prediction."""

    def made(family: str, dtype: torch.dtype = torch.float32) -> Path:
        folder = add_layers(checkpoints(family, tied=False, **FAMILIES[family]), tmp_path / "source")
        file = folder / "model.safetensors"
        keeps = ("correction_bias", "A_log", "linear_attn.norm.weight")
        tensors = {n: t if n.endswith(keeps) else t.to(dtype) for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        set_field(folder, "dtype", str(dtype).removeprefix("torch."))
        return folder

    return made


def set_field(folder: Path, name: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))


def started(folder: Path, kind: type[MegatronEngine] = MegatronLMEngine, **knobs: Any) -> Any:
    config = EngineConfig(path=str(folder), **{"mtp": "train", **knobs})
    engine = kind(config, **({"algorithm": GRPO(GRPOConfig())} if kind is MegatronPPOActor else {}))
    engine.initialize()
    return engine


def make_batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator, total = torch.Generator().manual_seed(1), sum(lengths)
    ids = torch.randint(1, 343, (total,), generator=generator)
    position = torch.cat([torch.arange(n) for n in lengths])
    return PackedBatch(cu_seqlens_of(torch.tensor(lengths)), {"input_ids": ids, "loss_mask": position >= 2})


# -- tokens -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (3, 1)]),
    st.randoms(use_true_random=False),
)
def test_tokens_of_the_future_stop_at_a_sequences_end_on_every_cut(
    lengths: list[int], depths: int, cut: tuple[int, int], random: Any
) -> None:
    total, (cp, multiple) = sum(lengths), cut
    ids = torch.arange(1, total + 1)  # every token is another one
    mask = torch.tensor([random.random() < 0.6 for _ in range(total)])
    batch = PackedBatch(cu_seqlens_of(torch.tensor(lengths)), {"input_ids": ids, "loss_mask": mask})
    targets = [future_targets(batch, depth) for depth in range(1, depths + 1)]
    seen = []
    for rank in range(cp):
        parts = (torch.device("cpu"), Cut(rank, cp, multiple), None, pack_in_blocks, targets)
        mb = build_microbatch(batch, list(range(len(lengths))), 1.0, *parts)
        for depth, future in enumerate(mb.future, start=1):
            seen += [(depth, *found) for found in read_with(mb.input_ids, future)]
            assert future.targets == targets[depth - 1]
    expected = [
        (depth, start + i + 1, start + i + depth + 1, start + i + depth + 2)
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist())
        for depth in range(1, depths + 1)
        for i in range(stop - start - depth - 1)
        if mask[start + i + depth + 1]
    ]
    assert sorted(seen) == sorted(expected)
    assert [sum(depth == d + 1 for depth, *_ in expected) for d in range(depths)] == targets


def read_with(ids: Tensor, future: FutureTokens) -> list[tuple[int, int, int]]:
    """Token, the later one that is read with it, and the label, of each label."""
    rows = future.labels.rows
    assert (future.labels.ids >= 0).sum() == len(rows)
    return list(zip(*(x[rows].tolist() for x in (ids, future.ids, future.labels.ids)), strict=True))


def test_megatrons_roll_of_packed_sequences_gives_the_same_tokens() -> None:
    batch = make_batch()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch.cu_seqlens, cu_seqlens_kv=batch.cu_seqlens)
    targets = [future_targets(batch, depth) for depth in (1, 2)]
    parts = (torch.device("cpu"), Cut(), None, pack_in_blocks, targets)
    mb = build_microbatch(batch, list(range(len(LENGTHS))), 1.0, *parts)
    ids, mask = batch["input_ids"][None], batch["loss_mask"][None]
    labels, mask = (roll_tensor(x, packed_seq_params=packed)[0] for x in (ids, mask))
    for future in mb.future:
        ids, labels, mask = (roll_tensor(x, packed_seq_params=packed)[0] for x in (ids, labels, mask))
        assert torch.equal(future.ids, ids[0])
        assert torch.equal(future.labels.ids, labels[0].masked_fill(~mask[0].bool(), -1))


# -- files ------------------------------------------------------------------------------------------------------------


def assert_same(written: Path, expected: Path) -> None:
    new, old = load_file(written / "model.safetensors"), load_file(expected / "model.safetensors")
    assert new.keys() == old.keys()
    for name, tensor in old.items():
        assert new[name].dtype is tensor.dtype, name
        assert torch.equal(new[name], tensor), name
    assert "trained_mtp" not in (written / "config.json").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untouched_checkpoint_comes_out_bit_equal_and_servers_get_the_model_alone(
    family: str, source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source(family, torch.bfloat16)
    engine = started(folder, dtype="bfloat16")
    engine.save(tmp_path / "out")
    assert_same(tmp_path / "out", folder)
    engine.load(tmp_path / "out")
    own = {*(name for name, _ in engine.named_weights()), *(shard.name for shard in engine.shards())}
    prefix = names_of(folder)[0]["prefix"]
    assert not [name for name in own if name.startswith(("mtp.", prefix))]
    assert "model.norm.weight" in own


def test_a_run_that_trained_them_is_exported_whole_and_goes_on_as_it_was(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source("glm4_moe")
    engine = started(folder, optimizer=OptimizerConfig(lr=0.01))
    engine.train_lm(make_batch())
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    Saver(SaverConfig(asynchronous=False), tmp_path / "run" / "checkpoints", print).save({ACTOR: engine}, 1, {})
    engine.save(tmp_path / "saved")
    assert export.main([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'exported'}"]) == 0
    assert_same(tmp_path / "exported", tmp_path / "saved")
    start, trained = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "saved"))
    gates = [name for name in start if ".experts." in name or name.endswith("correction_bias")]
    assert all(not torch.equal(trained[name], start[name]) for name in start if name not in gates)
    state = tmp_path / "run" / "checkpoints" / "step_000001" / ACTOR
    check_facts(state, with_mtp(read_config(str(folder))), "float32")
    line = refusal(lambda: check_facts(state, read_config(str(folder)), "float32"))
    assert "actor.mtp=train, this run's has actor.mtp=None" in line


@pytest.mark.parametrize(("decoder", "layer"), [(True, False), (False, True)])
def test_stacked_experts_stay_stacked_where_the_source_has_them_so(
    decoder: bool, layer: bool, source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source("qwen3_5_moe_text")
    tensors = load_file(folder / "model.safetensors")
    for prefix, stacked in (("model.", decoder), ("mtp.", layer)):
        for name in [n for n in tensors if n.startswith(prefix) and n.endswith("experts.0.up_proj.weight")]:
            experts = name.removesuffix(".0.up_proj.weight")
            parts = {p: [f"{experts}.{e}.{p}.weight" for e in range(8)] for p in ("gate_proj", "up_proj", "down_proj")}
            values = {p: torch.stack([tensors.pop(n) for n in names]) for p, names in parts.items()}
            tensors[f"{experts}.gate_up_proj"] = torch.cat([values["gate_proj"], values["up_proj"]], dim=1)
            tensors[f"{experts}.down_proj"] = values["down_proj"]
            if not stacked:
                both = tensors.pop(f"{experts}.gate_up_proj").chunk(2, dim=1)
                split = dict(zip(("gate_proj", "up_proj"), both, strict=True))
                split["down_proj"] = tensors.pop(f"{experts}.down_proj")
                for part, whole in split.items():
                    tensors |= {f"{experts}.{e}.{part}.weight": x.clone() for e, x in enumerate(whole)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    started(folder).save(tmp_path / "out")
    assert_same(tmp_path / "out", folder)


def test_a_random_model_has_random_layers_and_the_same_model(source: Callable[..., Path]) -> None:
    folder = source("qwen3_5_text")
    with_layers, plain = started(folder, init="random"), None
    weights = {name: tensor.clone() for name, tensor in with_layers.named_weights()}
    first = with_layers.modules[1].layers[0]
    assert bool((first.hnorm.weight == 0).all())  # gains of 1 + weight
    assert bool((first.eh_proj.weight != 0).all())
    plain = started(folder, init="random", mtp="carry")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.named_weights())


# -- steps ------------------------------------------------------------------------------------------------------------


def test_an_rl_step_trains_them_and_changes_no_bit_of_the_policy(source: Callable[..., Path]) -> None:
    folder, batch = source("glm4_moe"), make_batch()
    expected = float(Oracle(folder).loss(batch).detach())
    results = {}
    for mtp in ("carry", "train"):
        adam = OptimizerConfig(lr=0.01, clip_grad=0.1)
        actor = started(folder, MegatronPPOActor, mtp=mtp, max_tokens_per_mb=40, optimizer=adam)
        data = PackedBatch(batch.cu_seqlens, dict(batch.tokens))
        generator = torch.Generator().manual_seed(2)
        data.set_tokens("advantages", torch.randn(len(batch["input_ids"]), generator=generator))
        data.set_tokens("prox_logp", actor.compute_logp(data))
        data.set_tokens("rollout_logprobs", data["prox_logp"] + 0.1)
        steps = [actor.ppo_update(data) for _ in range(2)]
        weights = {name: tensor.clone() for name, tensor in actor.named_weights()}
        results[mtp] = data["prox_logp"], steps, weights, actor.compute_logp(data)
        groups.destroy()
    (logp, plain, weights, after), (same, trained, same_weights, same_after) = results.values()
    assert trained[0]["mtp_loss"] == pytest.approx(expected, rel=1e-6)
    assert trained[1]["mtp_loss"] < trained[0]["mtp_loss"]
    assert min(trained[0]["grad_norm"], trained[0]["mtp_grad_norm"]) > 0.1, "both are clipped"
    assert [{k: v for k, v in step.items() if "mtp" not in k} for step in trained] == plain
    assert torch.equal(logp, same)
    assert torch.equal(after, same_after)
    assert all(torch.equal(tensor, same_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("depths", [1, 2])
def test_a_head_in_chunks_computes_logits_of_later_tokens_once(
    depths: int, checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of frozen weights fall from 3 to 2, and no bit changes."""
    folder = add_layers(checkpoints("glm4_moe", tied=False), tmp_path / "source", depths=depths)
    batch, counted, results = make_batch(), products(monkeypatch), []
    rows = sum(future_targets(batch, depth + 1) for depth in range(depths))
    own = int(batch["loss_mask"].sum())
    for once in (False, True):
        if not once:
            monkeypatch.setattr(heads, "logprobs_of_token_loss", logits_twice)
        engine = started(folder, kept_logits_mb=0, max_tokens_per_mb=40, mtp_loss_scaling_factor=0.3)
        counted.clear()
        stats = engine.train_lm(batch)
        assert sum(counted) == own + rows * (1 if once else 2)
        results.append((stats, bits_of(engine)))
        monkeypatch.setattr(heads, "logprobs_of_token_loss", logprobs_of_token_loss)
        groups.destroy()
    (twice, before), (once, after) = results
    assert twice == once
    assert once["mtp_grad_norm"] > 0.01
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))


def test_a_factor_that_the_head_was_not_told_is_noticed(
    source: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(source("qwen3_5_text"), kept_logits_mb=0)
    whole = MtpTraining.loss
    monkeypatch.setattr(MtpTraining, "loss", lambda *arguments: 2 * whole(*arguments))
    with pytest.raises(RuntimeError, match="the head took gradients that the loss does not have"):
        engine.train_lm(make_batch())


@pytest.mark.parametrize("kept_mb", [-1, 0], ids=["logits kept", "logits in chunks"])
def test_a_batch_without_a_label_has_no_loss_and_moves_nothing(
    kept_mb: int, source: Callable[..., Path], tmp_path: Path
) -> None:
    engine = started(source("qwen3_5_text"), optimizer=OptimizerConfig(lr=0.01), kept_logits_mb=kept_mb)
    batch = make_batch((3, 2, 3))
    batch.set_tokens("loss_mask", torch.tensor([0, 1, 0, 0, 1, 0, 1, 0], dtype=torch.bool))
    stats = engine.train_lm(batch)
    assert (stats["mtp_loss"], stats["mtp_grad_norm"]) == (0.0, 0.0)
    assert stats["loss"] > 0
    engine.save(tmp_path / "out")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("source", "out"))
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("mtp."))


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_memory_and_parameter_counts_have_them_on_the_last_stage_and_not_on_servers(
    family: str, source: Callable[..., Path]
) -> None:
    folder = source(family)
    model = read_config(str(folder))
    trained = with_mtp(model)
    stored = load_file(folder / "model.safetensors")
    repeated = ("embed_tokens.weight", "shared_head.head.weight")
    prefixes = ("mtp.", names_of(folder)[0]["prefix"])
    own = [n for n in stored if n.startswith(prefixes) and not n.endswith(repeated)]
    trainable = sum(stored[n].numel() for n in own)
    assert count_parameters(trained) - count_parameters(model) == trainable
    assert server_memory(trained, 2, "bfloat16", 10) == server_memory(model, 2, "bfloat16", 10)
    parallel, knobs = ParallelConfig(pp_size=2, dp_size=1), EngineConfig(path=str(folder), mtp="train")
    first, last = (rank_parameters(trained, parallel, pp) for pp in (0, 1))
    assert first == rank_parameters(model, parallel, 0)
    plain = rank_parameters(model, parallel, 1)
    assert last.dense + last.experts - plain.dense - plain.experts == trainable
    load = StepLoad(100)
    need, without = (trainer_memory(config, parallel, knobs, load, 1, on_gpu=False) for config in (trained, model))
    copy = 0 if model.tie_word_embeddings else 344 * 64 * 4  # padded to rows of 8
    assert need.weights - without.weights == 4 * trainable + copy
    assert need.gradients - without.gradients == 4 * trainable
    assert need.head == 2 * without.head
    assert need.activations > without.activations
    assert trainer_memory(trained, parallel, knobs, load, 0, on_gpu=False) == trainer_memory(
        model, parallel, knobs, load, 0, on_gpu=False
    )
    assert without_mtp(trained).to_dict() == model.to_dict()


def test_the_estimated_weights_are_those_of_the_engine(source: Callable[..., Path]) -> None:
    engine = started(source("deepseek_v3"))
    need = trainer_memory(engine.hf_config, ParallelConfig(dp_size=1), engine.config, StepLoad(100), 0, on_gpu=False)
    parameters = sum(p.numel() for module in engine.modules for p in module.parameters())
    padding, biases = 2 * 64, 2 * 8  # rows of embedding and head; the experts of two layers
    assert need.weights == 4 * (parameters - padding + biases)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields", "knobs", "parallel", "message"),
    [
        ("qwen3", {}, {}, {}, "a qwen3 model, has none that megarl knows by its config.json; set it to carry"),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, {}, {}, "has none that megarl knows"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 0}, {}, {}, "has none that megarl knows"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, {}, {}, "takes mtp_num_hidden_layers=1, and actor.path"),
        ("qwen3_5_text", {"mtp_use_dedicated_embeddings": True}, {}, {}, "takes mtp_use_dedicated_embeddings=False"),
        ("qwen3_next", {}, {}, {}, "lacks the tensor mtp.fc.weight of its layers of multi-token prediction"),
        ("glm4_moe", {}, {"shared_prefix": True}, {}, "actor.shared_prefix=true does not go with actor.mtp=train"),
        ("glm4_moe", {}, {}, OVERLAP, "parallel.tp_comm_overlap=true does not go with actor.mtp"),
        ("glm4_moe", {}, {"mtp": "both"}, {}, "actor.mtp=both"),
        ("glm4_moe", {}, {"mtp_loss_scaling_factor": 0.0}, {}, "actor.mtp_loss_scaling_factor=0.0"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    family: str,
    fields: dict[str, Any],
    knobs: dict[str, Any],
    parallel: dict[str, Any],
    message: str,
    checkpoints: Callable[..., Path],
    tmp_path: Path,
) -> None:
    plain = checkpoints(family, tied=False)
    has_layers = not (family == "qwen3" or (family == "qwen3_next" and not fields))
    folder = add_layers(plain, tmp_path / "source") if has_layers else plain
    for name, value in fields.items():
        set_field(folder, name, value)
    config, layout = EngineConfig(path=str(folder), **{"mtp": "train", **knobs}), ParallelConfig(dp_size=1, **parallel)
    model = read_config(str(folder))
    checks = [*knob_checks(config, layout), *model_checks(config, layout, model)]
    assert message in refusal(lambda: run_all(checks))


def test_a_copy_that_differs_from_the_model_is_refused(source: Callable[..., Path]) -> None:
    folder = source("glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.shared_head.head.weight"
    tensors[name][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = refusal(lambda: started(folder))
    assert f"{name} of actor.path={folder} differs from lm_head.weight; set actor.mtp=carry" in line
    groups.destroy()
    started(folder, mtp="carry")


def test_a_hidden_size_that_tp_does_not_divide_is_refused(source: Callable[..., Path]) -> None:
    folder = source("qwen3_5_text")
    set_field(folder, "hidden_size", 65)
    config, layout = EngineConfig(path=str(folder), mtp="train"), ParallelConfig(tp_size=2, dp_size=1)
    model = with_mtp(read_config(str(folder)))
    line = refusal(lambda: run_all(model_checks(config, layout, model)))
    assert "parallel.tp_size=2 does not divide the model's hidden_size=65" in line


def test_preferences_are_refused() -> None:
    config = cli.composed(["+experiment=dpo", "actor.mtp=train"])
    assert "would also learn rejected completions" in refusal(lambda: run_all(config_checks(config)))
