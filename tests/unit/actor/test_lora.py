"""Adapters on one rank: PEFT reads and writes the same files, exports, critics, and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl import export
from megarl.actor.checks import model_checks
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.critic import MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import shared_base
from megarl.actor.model.adapters import Adapter, adapters_in
from megarl.actor.sizes.parameter_counts import rank_parameters
from megarl.actor.weights.adapter_shards import shape_of
from megarl.actor.weights.peft_files import CONFIG, WEIGHTS, check_adapters
from megarl.families import read_config
from megarl.knobs import UserError, run_all
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import BY_LIBRARY, OFF
from megarl.types import PackedBatch, cu_seqlens_of

LORA = LoraConfig(rank=4, alpha=6.0)
LENGTHS = [7, 12, 3]


@pytest.fixture(scope="module")
def base(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints(family="qwen3", tied=True, vocab_size=341)


@pytest.fixture
def engine_of(base: Path) -> Iterator[Callable[..., MegatronEngine]]:
    """Starts engines with adapters on the base, one at a time, and ends the last one."""
    started: list[MegatronEngine] = []

    def start(kind: type[MegatronEngine] = MegatronEngine, **fields: Any) -> MegatronEngine:
        while started:
            started.pop().destroy()
        knobs = {"path": str(base), "lora": LORA, "optimizer": OptimizerConfig(lr=0.01), **fields}
        started.append(kind(EngineConfig(**knobs)))
        started[0].initialize()
        return started[0]

    yield start
    while started:
        started.pop().destroy()


def batch_of(seed: int = 3) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 341, (sum(LENGTHS),), generator=generator)
    return PackedBatch(cu_seqlens_of(torch.tensor(LENGTHS)), {"input_ids": ids, "loss_mask": torch.ones(len(ids)) > 0})


def logprobs_of(model: Any, batch: PackedBatch) -> Tensor:
    """Log-probs of each token but a sequence's first by a transformers model."""
    parts = []
    with torch.no_grad():
        for ids in batch["input_ids"].split(LENGTHS):
            table = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
            parts += [torch.zeros(1), table.gather(1, ids[1:, None]).squeeze(1)]
    return torch.cat(parts)


def nll(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> Tensor:
    return -logprobs.mean()


def steps(engine: MegatronEngine, count: int) -> None:
    engine.train()
    for _ in range(count):
        engine.train_batch(batch_of(), nll, lambda data: data["loss_mask"].sum(), loss_input="logprobs")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_peft_reads_what_was_trained_and_gives_the_same_log_probs(
    base: Path, tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    engine = engine_of()
    close(engine.eval().logprobs(batch_of()), logprobs_of(AutoModelForCausalLM.from_pretrained(base), batch_of()))
    steps(engine, 3)
    engine.save(tmp_path / "adapter")
    trained = engine.eval().logprobs(batch_of())
    with engine.base_alone():
        assert (engine.logprobs(batch_of()) - trained).abs().max() > 0.1
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    close(trained, logprobs_of(model, batch_of()))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_adapters_of_mlps_alone_are_trained_in_recomputed_layers(
    recompute: str, engine_of: Callable[..., MegatronEngine]
) -> None:
    """The first layer's input has no gradient of its own, and a recomputed layer without one gives none."""
    lora = dataclasses.replace(LORA, targets=["gate_proj", "up_proj", "down_proj"])
    engine = engine_of(lora=lora, recompute=recompute)
    steps(engine, 1)
    matrices = [part.b for adapter in adapters_in(engine.modules) for part in adapter.children()]
    assert len(matrices) == 3 * engine.hf_config.num_hidden_layers
    assert all(matrix.any() for matrix in matrices)


def test_an_adapter_of_peft_is_read_and_written_back_bit_for_bit(
    base: Path, tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    torch.manual_seed(5)
    knobs = PeftConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), knobs)
    model.save_pretrained(tmp_path / "from_peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    engine = engine_of(lora=dataclasses.replace(LORA, path=str(tmp_path / "from_peft"), targets=targets))
    close(engine.eval().logprobs(batch_of()), logprobs_of(model, batch_of()))
    engine.save(tmp_path / "back")
    given, back = (load_file(tmp_path / name / WEIGHTS) for name in ("from_peft", "back"))
    assert given.keys() == back.keys()
    assert all(torch.equal(given[name], back[name]) for name in given)


def test_peft_has_adapters_in_the_layers_that_were_trained_and_in_no_other(
    base: Path, tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    engine = engine_of(lora=dataclasses.replace(LORA, targets=["q_proj", "1.mlp.down_proj"]))
    steps(engine, 2)
    engine.save(tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    layers = [name.removeprefix("model.layers.") for name in model.targeted_module_names]
    assert sorted(layers) == ["0.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.q_proj"]
    close(engine.eval().logprobs(batch_of()), logprobs_of(model, batch_of()))


def test_a_checkpoint_is_exported_as_adapters_or_merged(
    base: Path,
    tmp_path: Path,
    engine_of: Callable[..., MegatronEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = engine_of()
    steps(engine, 2)
    engine.save_state(tmp_path / "step" / "actor")
    engine.save(tmp_path / "saved")
    trained, served = engine.eval().logprobs(batch_of()), dict(engine.named_weights())
    found = export.Manifest(tmp_path / "step", 2, {})
    monkeypatch.setattr(export, "find", lambda *_: found)  # of a run's folder: tests/e2e has one
    for name, merge in (("adapters", False), ("merged", True)):
        export.export(export.ExportConfig(checkpoint="any", output=str(tmp_path / name), merge=merge))
    written = load_file(tmp_path / "adapters" / WEIGHTS)
    assert all(torch.equal(tensor, written[name]) for name, tensor in load_file(tmp_path / "saved" / WEIGHTS).items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    close(trained, logprobs_of(model, batch_of()))
    assert all(
        torch.equal(served[name], tensor) for name, tensor in load_file(tmp_path / "merged/model.safetensors").items()
    )
    assert "rounded" not in capsys.readouterr().out
    for name, merge, weights in (("adapters", False, WEIGHTS), ("merged", True, "model.safetensors")):
        output = tmp_path / f"{name}16"
        export.export(export.ExportConfig(checkpoint="any", output=str(output), merge=merge, dtype="bfloat16"))
        before, after = load_file(tmp_path / name / weights), load_file(output / weights)
        rounded = sum(int((before[key] != after[key].float()).sum()) for key in before)
        total = sum(tensor.numel() for tensor in before.values())
        assert rounded > 0
        assert f"rounded {rounded:,} of {total:,} weights from float32 to bfloat16\n" in capsys.readouterr().out


def test_a_critic_trains_its_head_beside_the_adapters(engine_of: Callable[..., MegatronEngine], tmp_path: Path) -> None:
    engine = engine_of(MegatronScalarEngine)

    def loss(values: Tensor, data: PackedBatch) -> Tensor:
        return (values - 1).square().mean()

    engine.train()
    for _ in range(2):
        engine.train_batch(batch_of(), loss, lambda data: data["loss_mask"].sum(), loss_input="values")
    engine.save(tmp_path / "critic")
    written = load_file(tmp_path / "critic" / WEIGHTS)
    assert written["base_model.model.score.weight"].abs().max() > 0
    assert json.loads((tmp_path / "critic" / CONFIG).read_text())["modules_to_save"] == ["score"]
    scores = engine.scores(batch_of())
    again = engine_of(MegatronScalarEngine, lora=dataclasses.replace(LORA, path=str(tmp_path / "critic")))
    assert torch.equal(again.scores(batch_of()), scores)


def test_a_critic_takes_a_policys_adapters_and_begins_with_a_head_of_its_own(
    engine_of: Callable[..., MegatronEngine], tmp_path: Path
) -> None:
    policy = engine_of()
    steps(policy, 1)
    policy.save(tmp_path / "policy")
    critic = engine_of(MegatronScalarEngine, lora=dataclasses.replace(LORA, path=str(tmp_path / "policy")))
    critic.save(tmp_path / "critic")
    given, written = (load_file(tmp_path / name / WEIGHTS) for name in ("policy", "critic"))
    assert written.keys() - given.keys() == {"base_model.model.score.weight"}
    assert all(torch.equal(written[name], tensor) for name, tensor in given.items())


def test_dropout_masks_follow_from_the_number_of_the_step(engine_of: Callable[..., MegatronEngine]) -> None:
    engine = engine_of(lora=dataclasses.replace(LORA, dropout=0.5))
    lora, adapter = engine._weights.lora, next(adapters_in(engine.modules))
    assert lora is not None
    state = torch.get_rng_state()

    def dropped(step: int) -> Tensor:
        with lora.masks_of_step(step):
            return adapter._dropped(torch.ones(100, 40))

    assert torch.equal(dropped(0), dropped(0))
    assert not torch.equal(dropped(0), dropped(1))
    assert set(dropped(0).unique().tolist()) == {0.0, 2.0}
    assert 0.9 < dropped(0).mean() < 1.1
    assert torch.equal(state, torch.get_rng_state())


def test_an_engine_on_a_base_without_a_model_is_refused(base: Path) -> None:
    first, second = (MegatronEngine(EngineConfig(path=str(base), lora=LORA)) for _ in range(2))
    with pytest.raises(UserError, match="the engine whose base is shared has no model; call its initialize first"):
        second.initialize(base=first)


@pytest.mark.parametrize(
    ("etp", "linear", "differ"), [(1, "linear_fc1", True), (2, "linear_fc1", False), (2, "linear_fc2", True)]
)
def test_dropout_of_experts_differs_between_ranks_with_inputs_of_their_own(etp: int, linear: str, differ: bool) -> None:
    """Experts that ranks cut by rows read the same tokens on all of them, and must drop the same elements."""
    box = SimpleNamespace(at=(0, 0), start=(0, 0), stop=(4, 6))
    module = f"decoder.layers.0.mlp.experts.local_experts.0.{linear}"
    part: Any = SimpleNamespace(part="a_proj", module=module, columns=(0, 6), height=4, rows=[(box, 0)])
    dropped = []
    for rank in range(2):
        groups: Any = SimpleNamespace(
            etp=SimpleNamespace(size=lambda: etp), tp_rank=rank, layout=SimpleNamespace(sequence_parallel=False)
        )
        torch.manual_seed(3)
        groups.tp = groups.etp
        dropped.append(Adapter(torch.zeros(4, 6), [part], 2, 1.0, 0.5, groups)._dropped(torch.ones(20, 6)))
    assert torch.equal(*dropped) != differ


@pytest.mark.parametrize(("quantization", "refused"), [("nf4", True), ("none", False)])
def test_grouped_experts_on_a_quantised_base_are_refused(quantization: str, refused: bool, base: Path) -> None:
    lora = dataclasses.replace(LORA, quantization=quantization)
    config = EngineConfig(path=str(base), lora=lora, experts="grouped")
    message = r"actor\.experts=grouped does not go with actor\.lora\.quantization=nf4"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        check_adapters(config, ParallelConfig(), read_config(str(base)), False)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"path": "other"}, MegatronEngine, "actor.path=.* differs from the shared base's .*; give both engines the"),
        ({"dtype": "bfloat16"}, MegatronEngine, "actor.dtype=bfloat16 differs from the shared base's float32"),
        ({"lora": LoraConfig()}, MegatronEngine, "actor.lora.rank=0 of an engine leaves no frozen base to share"),
        ({}, MegatronScalarEngine, "a model with a value head has no LM head to share; start the policy first"),
    ],
)
def test_an_engine_on_another_base_is_refused(
    fields: dict[str, Any],
    kind: type[MegatronEngine],
    message: str,
    base: Path,
    checkpoints: Callable[..., Path],
    engine_of: Callable[..., MegatronEngine],
) -> None:
    first = engine_of(kind)
    if "path" in fields:
        fields = {"path": str(checkpoints(family="qwen3", tied=False, vocab_size=341))}
    knobs = {"path": str(base), "lora": LORA, **fields}
    with pytest.raises(UserError, match=message):
        MegatronEngine(EngineConfig(**knobs)).initialize(base=first)


def test_an_engine_on_a_base_allocates_no_second_one(
    engine_of: Callable[..., MegatronEngine], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, on_meta, take = engine_of(), [], shared_base.take

    def watched(module: Any, given: Any) -> None:
        marks = {name: parameter.__dict__ for name, parameter in module.named_parameters()}
        assert any(marks.values()), "Megatron marks its parameters"
        assert marks == {n: p.__dict__ for n, p in given.named_parameters() if n in marks}
        on_meta.extend(parameter.is_meta for parameter in module.parameters())
        take(module, given)

    monkeypatch.setattr(shared_base, "take", watched)
    second = MegatronEngine(EngineConfig(path=str(base), lora=LORA))
    second.initialize(base=first)
    assert len(on_meta) > 10
    assert all(on_meta)
    second.destroy()
    close(first.eval().logprobs(batch_of()), logprobs_of(AutoModelForCausalLM.from_pretrained(base), batch_of()))


def test_only_adapters_have_gradients_and_moments(base: Path) -> None:
    model, single = read_config(str(base)), ParallelConfig()
    plain, adapted = rank_parameters(model, single, 0), rank_parameters(model, single, 0, shape_of(LORA))
    assert plain.trained_dense == plain.dense == adapted.dense
    shapes = {
        name: spec for name, spec in load_file(base / "model.safetensors").items() if name.endswith("_proj.weight")
    }
    assert adapted.trained_dense == sum(LORA.rank * sum(tensor.shape) for tensor in shapes.values())


@pytest.mark.parametrize(
    ("fields", "parallel", "deterministic", "message"),
    [
        ({"targets": ["q_prj"]}, {}, False, r"actor.lora.targets=q_prj does not exist; did you mean q_proj\?"),
        ({"targets": ["q_norm"]}, {}, False, "actor.lora.targets=q_norm does not exist"),
        ({"targets": []}, {}, False, r"actor.lora.targets=\[\] leaves nothing to train"),
        ({}, {}, True, "deterministic=true does not go with adapters"),
        ({"path": "/nowhere"}, {}, False, "actor.lora.path=/nowhere has no readable adapter_config.json"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    fields: dict[str, Any], parallel: dict[str, Any], deterministic: bool, message: str, base: Path
) -> None:
    config = EngineConfig(path=str(base), lora=dataclasses.replace(LORA, **fields))
    form = BY_LIBRARY if deterministic else OFF
    with pytest.raises(UserError, match=message):
        run_all(model_checks(config, ParallelConfig(**parallel), read_config(str(base)), form))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, "has r=8, and actor.lora.rank=4"),
        ({"lora_alpha": 1.0}, "has lora_alpha=1.0, and actor.lora.alpha=6.0"),
        ({"use_rslora": True}, "has use_rslora=True, and actor.lora.rslora=False"),
        ({"use_dora": True}, "has use_dora=True; adapters here have use_dora=False"),
        ({"peft_type": "IA3"}, "has peft_type=IA3; adapters here have peft_type=LORA"),
    ],
)
def test_an_adapter_of_other_knobs_is_refused(
    change: dict[str, Any], message: str, base: Path, tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    document = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**document, **change}))
    with pytest.raises(UserError, match=message):
        engine.load(tmp_path)


def test_adapters_in_place_of_a_model_are_told_how_to_be_merged(
    tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    engine_of().save(tmp_path)
    with pytest.raises(UserError, match=r"holds adapters and no model; merge them: python -m megarl\.export"):
        read_config(str(tmp_path))


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, engine_of: Callable[..., MegatronEngine]) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=r"has shape .*, this model's has"):
        engine.load(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=r"lacks the tensor base_model\.model\.model\.layers\.0"):
        engine.load(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot be read"):
        engine.load(tmp_path)
