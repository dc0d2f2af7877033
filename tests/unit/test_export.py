"""The export command writes the same files as `engine.save`, from any checkpoint and without a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from megarl import export
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_files, saved_file
from megarl.config import SaverConfig
from megarl.families import load_config
from megarl.families.weight_formats import FORMATS, ServedFormat, format_of
from megarl.ops.digest import digest
from megarl.ops.quantize import dequantise
from megarl.parallel import groups
from megarl.reshard.quantised_weights import QuantisedWeights, quantised
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from tests.sglang import wide_models
from tests.sglang.tiny_models import make_wide


@pytest.fixture(scope="module")
def saved(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with checkpoints of an actor and a critic at steps 1 and 2, and the exports of `engine.save`."""
    work = tmp_path_factory.mktemp("saved")
    (work / "run" / "checkpoints").mkdir(parents=True)
    path = str(checkpoints("qwen3", tied=True, vocab_size=341))
    engines = {
        ACTOR: MegatronEngine(EngineConfig(path=path, dtype="bfloat16")),
        "critic": MegatronEngine(EngineConfig(path=path, value_head_std=0.2), scalar=True),
    }
    saver = Saver(SaverConfig(asynchronous=False), work / "run" / "checkpoints", print)
    for engine in engines.values():
        engine.initialize()
    for step in (1, 2):
        for name, engine in engines.items():
            with torch.no_grad():
                for param in engine.modules[0].parameters():
                    param.mul_(1.5)
            engine.save(work / f"{name}-{step}")
        saver.save(engines, step, {})
    yield work
    groups.destroy()


def exported(saved: Path, output: Path, checkpoint: str = "run", **knobs: str) -> int:
    given = {"checkpoint": str(saved / checkpoint), "output": str(output), **knobs}
    return export.main([f"{name}={value}" for name, value in given.items()])


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.iterdir())
    assert sorted(p.name for p in other.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("engine", ["actor", "critic"])
@pytest.mark.parametrize(("checkpoint", "step"), [("run", 2), ("run/checkpoints/step_000001", 1)])
def test_an_export_is_byte_for_byte_what_the_engine_saves(
    engine: str, checkpoint: str, step: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(saved, tmp_path / "out", checkpoint, engine=engine) == 0
    assert_same_files(saved / f"{engine}-{step}", tmp_path / "out")
    assert f"export of step {step}" in capsys.readouterr().out


def test_an_export_may_convert_and_transformers_loads_it(saved: Path, tmp_path: Path) -> None:
    assert exported(saved, tmp_path / "out", dtype="float32") == 0
    before = load_file(saved / "actor-2" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in before.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert torch.equal(model.state_dict()["model.norm.weight"], after["model.norm.weight"])


def test_an_export_says_what_it_rounds(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exported(saved, tmp_path / "same", engine="critic") == 0
    assert exported(saved, tmp_path / "wider", dtype="float32") == 0
    assert "rounded" not in capsys.readouterr().out
    assert exported(saved, tmp_path / "narrower", dtype="bfloat16", engine="critic") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "narrower"))
    rounded = sum(int((before[name] != after[name].float()).sum()) for name in before)
    total = sum(tensor.numel() for tensor in before.values())
    assert rounded > total / 2
    assert f"rounded {rounded:,} of {total:,} weights from float32 to bfloat16\n" in capsys.readouterr().out
    assert '"dtype": "bfloat16"' in (tmp_path / "narrower" / "config.json").read_text()


def test_a_full_disk_is_one_line_and_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    """A limit of a file's size stands in for the full disk: safetensors meets both in its own code."""
    program = (
        "import resource, signal, sys\n"
        "from megarl import export\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "sys.exit(export.main(sys.argv[1:]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, f"checkpoint={saved / 'run'}", f"output={tmp_path / 'out'}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"output={tmp_path / 'out'} cannot be written (" in ended.stderr
    assert "File too large" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_export_in_several_files_holds_one_of_them_at_a_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    write = saved_file.save_file

    def counted(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        held.append(sum(t.nbytes for t in tensors.values()))
        write(tensors, *args, **kwargs)

    monkeypatch.setattr(saved_file, "save_file", counted)
    monkeypatch.setattr(hf_files, "MAX_FILE_BYTES", 60_000)
    assert exported(saved, tmp_path / "out") == 0
    assert len(held) > 3
    assert max(held) <= 60_000
    model, whole = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tmp_path / "out", saved / "actor-2"))
    assert all(torch.equal(model[name], whole[name]) for name in whole)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_a_quantised_export_is_what_a_sync_of_the_trained_weights_sends(
    format: ServedFormat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the actor reads FP8 in blocks back, as the products of values and scales."""
    model = make_wide(0)
    model.save_pretrained(tmp_path / "start")
    engine = MegatronEngine(EngineConfig(path=str(tmp_path / "start")))
    engine.initialize()
    try:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        Saver(SaverConfig(asynchronous=False), tmp_path / "run" / "checkpoints", print).save({ACTOR: engine}, 1, {})
        sent = {shard.name: shard.view.clone() for shard in QuantisedWeights(engine, format, engine.groups.tp).shards()}
    finally:
        groups.destroy()
    assert exported(tmp_path, tmp_path / "out", quantization=format.name) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: written.pop(name).tolist() for name in list(written) if name.endswith(".weight_shape")}
    weights = {n: list(t.shape) for n, t in model.state_dict().items() if format.quantises(n)} if format.shape else {}
    assert shapes == {name.removesuffix("weight") + "weight_shape": shape for name, shape in weights.items()}
    assert {name: digest(tensor) for name, tensor in written.items()} == {n: digest(t) for n, t in sent.items()}
    config = load_config(tmp_path / "out")
    assert format_of(config) is format
    if format.name == "int4":  # transformers and compressed-tensors read the same weights
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
        ).state_dict()
        for name in weights:
            pieces = [written[piece] for piece in format.names(name)]
            assert torch.equal(loaded[name].float(), dequantise(format, pieces, torch.float32)), name
    if format.name != "fp8":
        return
    name = "model.layers.1.mlp.down_proj.weight"
    shape = tuple(written[name].shape)
    read = hf_files.Checkpoint(str(tmp_path / "out"), config).read(name, shape, tuple(slice(0, n) for n in shape))
    assert 0 < float((read - model.state_dict()[name]).abs().max()) < float(read.abs().max()) / 16
    assert exported(tmp_path, tmp_path / "again", "out", quantization="fp8") == 2
    assert "is quantised already; leave out quantization" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_quantised_export_of_experts_is_what_a_sync_sends_and_layers_that_are_carried_along_are_quantised_too(
    family: str, tmp_path: Path
) -> None:
    config, format = wide_models.wide_config(family), FORMATS["fp8"]
    weights, mtp = wide_models.wide_weights(config, 5), {}
    if family == "deepseek_v3":  # a layer of multi-token prediction, as published: all but its own projection in 8 bits
        config.num_nextn_predict_layers = 1
        layer = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.1.")}
        mtp = {name.replace(".1.", ".2.", 1): tensor * 2 for name, tensor in layer.items()}
        mtp["model.layers.2.eh_proj.weight"] = torch.randn(256, 512)
    wide_models.save(config, weights | mtp, tmp_path / "start")
    engine = MegatronEngine(EngineConfig(path=str(tmp_path / "start")))
    engine.initialize()
    try:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        Saver(SaverConfig(asynchronous=False), tmp_path / "run" / "checkpoints", print).save({ACTOR: engine}, 1, {})
        sent = {shard.name: shard.view.clone() for shard in QuantisedWeights(engine, format).shards()}
    finally:
        groups.destroy()
    assert exported(tmp_path, tmp_path / "out", quantization="fp8") == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = sent | dict(quantised(mtp.items(), format))
    assert {name: digest(tensor) for name, tensor in written.items()} == {n: digest(t) for n, t in expected.items()}
    assert sum(name.endswith("_scale_inv") for name in written) == sum(map(format.quantises, weights | mtp))
    if family == "qwen3_moe":  # transformers spreads the scales of kv_a_proj_with_mqa evenly, and its blocks are not
        dequantise = FineGrainedFP8Config(dequantize=True)
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=dequantise).state_dict()
        rounded = wide_models.model_of(wide_models.save(config, wide_models.dequantised(weights), tmp_path / "rounded"))
        assert all(torch.equal(read[name], tensor) for name, tensor in rounded.state_dict().items())


def test_a_damaged_checkpoint_is_not_exported_and_the_one_before_serves(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved / "run" / "checkpoints" / "step_000002" / ACTOR / "rank_00000.safetensors"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert exported(saved, tmp_path / "one", "run/checkpoints/step_000002") == 2
        assert "is damaged or no checkpoint: actor/rank_00000.safetensors is not what" in capsys.readouterr().err
        assert exported(saved, tmp_path / "out") == 0
        assert "step_000002 is damaged" in capsys.readouterr().out
        assert_same_files(saved / "actor-1", tmp_path / "out")
    finally:
        path.write_bytes(content)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpont=x"], "unknown knob checkpont; did you mean checkpoint?"),
        (["checkpoint=x"], "checkpoint and output must be given"),
        (["checkpoint"], "usage:"),
        (
            ["checkpoint={saved}/run", "output={tmp}/out", "dtype=float8"],
            "dtype=float8 must be one of float32, bfloat16",
        ),
        (["checkpoint={saved}/absent", "output={tmp}/out"], "absent is not a folder"),
        (
            ["checkpoint={saved}/run", "output={tmp}/out", "quantization=int3"],
            "quantization=int3 is not known; use fp8, fp8_channel, int4, or",
        ),
        (
            ["checkpoint={saved}/run", "output={tmp}/out", "quantization=fp8", "engine=critic"],
            "quantization=fp8 goes with neither merge=true nor another engine than actor",
        ),
        (["checkpoint={saved}/run", "output={tmp}/out", "quantization=fp8"], "no whole blocks; take a tensor-parallel"),
        (["checkpoint={saved}/actor-1", "output={tmp}/out"], "damaged or no checkpoint: manifest.json is missing"),
        (["checkpoint={saved}/run", "output={tmp}/out", "engine=reward"], "has no engine=reward; it has actor, critic"),
        (["checkpoint={saved}/run", "output={saved}"], "is there and not empty"),
        (["checkpoint={saved}/run", "output={saved}/actor-1/config.json/out"], "cannot be written"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    arguments: list[str], message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([a.format(saved=saved, tmp=tmp_path) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
