"""Bad layouts are refused in one line with value, rule and remedy, before any process group is created."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3MoeConfig

from megarl.actor.checks import check_device, check_layout, knob_checks, model_checks
from megarl.actor.config import EngineConfig, backend_of
from megarl.knobs import UserError, run_all
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import same_bits


@pytest.fixture(scope="module", autouse=True)
def no_world() -> None:
    """Leaves the world of earlier tests in this process, so that a world found below was created below."""
    groups.destroy()


SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 100,
}
DENSE = Qwen3Config(**SHAPE)
MOE = Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
SP: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}

# knobs, message
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 0}, "tp_size=0 must be at least 1"),
    ({"pp_size": 0}, "pp_size=0 must be at least 1"),
    ({"vpp_size": 0, "pp_size": 2}, "vpp_size=0 must be at least 1"),
    ({"cp_size": -1}, "cp_size=-1 must be at least 1"),
    ({"dp_size": 0}, "dp_size=0 must be at least 1"),
    ({"ep_size": 0}, "ep_size=0 must be at least 1"),
    ({"etp_size": 0}, "etp_size=0 must be at least 1"),
    ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
    ({"first_stage_layers": -1, "pp_size": 2}, "first_stage_layers=-1 must be at least 0"),
    ({"last_stage_layers": -2, "pp_size": 2}, "last_stage_layers=-2 must be at least 0"),
    ({"first_stage_layers": 2}, "first_stage_layers=2 needs pipeline stages"),
    ({"last_stage_layers": 2}, "last_stage_layers=2 needs pipeline stages"),
    ({"vpp_size": 2}, "vpp_size=2 needs parallel.pp_size above 1"),
    ({"sequence_parallel": True}, "sequence_parallel=true needs parallel.tp_size above 1"),
]
# number of ranks, knobs, message
WORLDS: list[tuple[int, dict[str, Any], str]] = [
    (3, {"tp_size": 2}, "the world has 3 ranks"),
    (4, {"tp_size": 2, "dp_size": 1}, "tp_size=2 x pp_size=1 x cp_size=1 x dp_size=1 does not make 4"),
    (2, {"cp_size": 4}, "cp_size=4 x dp_size=any does not make 2"),
    (6, {"pp_size": 4}, "pp_size=4"),
    (4, {"tp_size": 2, "cp_size": 2, "dp_size": 2}, "does not make 4"),
    (2, {"dp_size": 2, "ep_size": 4}, "ep_size=4 x etp_size=1 does not divide the 2 ranks"),
    (4, {"pp_size": 2, "dp_size": 2, "ep_size": 4}, "does not divide the 2 ranks"),
    (2, {**SP, "ep_size": 2}, "ep_size=2 x etp_size=2 does not divide the 2 ranks"),
    (3, {"dp_size": 3, "etp_size": 2}, "etp_size=2 does not divide the 3 ranks"),
]
# model, knobs, message
MODELS: list[tuple[Any, dict[str, Any], str]] = [
    (DENSE, {"tp_size": 4}, "tp_size=4 does not divide the model's num_attention_heads=6"),
    (DENSE, {"tp_size": 5}, "tp_size=5 does not divide"),
    (DENSE, {"tp_size": 3}, "num_key_value_heads=2: one must divide the other"),
    (Qwen3Config(**{**SHAPE, "intermediate_size": 97}), {"tp_size": 2}, "intermediate_size=97"),
    (DENSE, {"pp_size": 4}, "pp_size=4 does not divide the model's 6 layers"),
    (DENSE, {"pp_size": 7}, "pp_size=7 does not divide the model's 6 layers"),
    (DENSE, {"pp_size": 2, "vpp_size": 2}, "vpp_size=2 does not divide the 3 layers of pipeline rank 0"),
    (DENSE, {"pp_size": 3, "vpp_size": 4}, "vpp_size=4 does not divide the 2 layers"),
    (DENSE, {"pp_size": 2, "first_stage_layers": 6}, "first_stage_layers=6 does not divide the model's 6 layers"),
    (DENSE, {"pp_size": 2, "first_stage_layers": 8}, "first_stage_layers=8"),
    (DENSE, {"pp_size": 2, "first_stage_layers": 2, "last_stage_layers": 2}, "2 are left for 0 ranks"),
    (DENSE, {"pp_size": 3, "first_stage_layers": 1}, "5 are left for 2 ranks"),
    (DENSE, {"pp_size": 4, "first_stage_layers": 1, "last_stage_layers": 2}, "3 are left for 2 ranks"),
    (
        DENSE, {"pp_size": 2, "vpp_size": 2, "first_stage_layers": 4, "last_stage_layers": 2, "ep_size": 2}, "ep_size=2"
    ),
    (DENSE, {"pp_size": 3, "vpp_size": 2, "last_stage_layers": 4}, "vpp_size=2 does not divide the 1 layers"),
    (DENSE, {"ep_size": 2, "dp_size": 2}, "ep_size=2"),
    (DENSE, {"etp_size": 2, "dp_size": 2}, "etp_size=2"),
    (MOE, {"ep_size": 4, "dp_size": 4}, "ep_size=4"),
    (MOE, {"etp_size": 5, "dp_size": 5}, "etp_size=5"),
    (MOE, {"tp_size": 2, "etp_size": 1}, "sequence_parallel"),
]  # fmt: skip


def one_line(error: pytest.ExceptionInfo[UserError], message: str) -> None:
    text = str(error.value)
    assert re.search(re.escape(message), text), text
    assert "\n" not in text
    assert not dist.is_initialized()


@pytest.mark.parametrize(("knobs", "message"), VALUES)
def test_an_invalid_value_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        ParallelConfig(**knobs).world_size()
    one_line(error, message)


@pytest.mark.parametrize(("ranks", "knobs", "message"), WORLDS)
def test_a_world_size_that_does_not_fit_the_sizes_is_refused(
    ranks: int, knobs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(UserError) as error:
        ParallelConfig(**knobs).world_size()
    one_line(error, message)


@pytest.mark.parametrize(("model", "knobs", "message"), MODELS)
def test_a_layout_that_does_not_fit_the_model_is_refused(model: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_layout(model, ParallelConfig(**knobs))
    one_line(error, message)


@pytest.mark.parametrize(
    ("knobs", "stages"),  # of 6 layers, by [pipeline rank][virtual stage]
    [
        ({}, [["012345"]]),
        ({"pp_size": 2}, [["012"], ["345"]]),
        ({"pp_size": 2, "first_stage_layers": 2}, [["01"], ["2345"]]),
        ({"pp_size": 3, "first_stage_layers": 3, "last_stage_layers": 1}, [["012"], ["34"], ["5"]]),
        ({"pp_size": 3, "vpp_size": 2}, [["0", "3"], ["1", "4"], ["2", "5"]]),
        ({"pp_size": 2, "vpp_size": 2, "last_stage_layers": 2}, [["01", "34"], ["2", "5"]]),
    ],
)
def test_layers_are_assigned_in_order(knobs: dict[str, Any], stages: list[list[str]]) -> None:
    assigned = ParallelConfig(**knobs).stage_layers(6)
    assert [["".join(map(str, layers)) for layers in rank] for rank in assigned] == stages


def test_kv_heads_may_be_fewer_than_tensor_parallel_ranks() -> None:
    check_layout(Qwen3Config(**{**SHAPE, "num_attention_heads": 8}), ParallelConfig(tp_size=4))


@pytest.mark.parametrize(
    ("backend", "has_gpu", "has_te", "message"),
    [
        ("te", False, False, "and a GPU was not found"),
        ("te", True, False, "and the package was not found"),
        ("te", True, True, ""),
        ("auto", False, False, ""),
        ("torch", True, True, ""),
        ("cpu", False, False, ""),
        ("cpu", True, False, "actor.backend=cpu is for machines without a GPU"),
    ],
)
def test_transformer_engine_is_asked_for_only_where_it_can_run(
    backend: str, has_gpu: bool, has_te: bool, message: str
) -> None:
    config = EngineConfig(backend=backend)
    if not message:
        check_device(config, has_gpu, has_te)
        return
    with pytest.raises(UserError) as error:
        check_device(config, has_gpu, has_te)
    one_line(error, message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(backend="flash"), "actor.backend=flash must be one of auto, torch, te, cpu"),
        (
            EngineConfig(backend="te", shared_prefix=True),
            "actor.backend=te with actor.shared_prefix=true computes 16 bits only, and actor.dtype=float32",
        ),
        (EngineConfig(backend="cpu", dtype="bfloat16"), "actor.backend=cpu is float32 only, and actor.dtype=bfloat16"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(UserError) as error:
        run_all(knob_checks(config, ParallelConfig()))
    one_line(error, message)


@pytest.mark.parametrize(
    ("knobs", "sizes", "message"),
    [
        ({"backend": "torch"}, {}, "and this engine has those of 'torch' (actor.backend=torch, actor.dtype=bfloat16)"),
        ({"backend": "cpu", "dtype": "float32"}, {}, "and this engine has those of 'cpu'"),
        ({"dtype": "float32"}, {}, "and this engine has those of 'torch' (actor.backend=auto, actor.dtype=float32)"),
        ({"recompute": "full"}, {}, "offloads what actor.recompute=full does not keep"),
        ({}, {"pp_size": 2}, "takes one pipeline stage, and parallel.pp_size=2"),
    ],
)
def test_activations_are_offloaded_only_where_megatron_can(
    knobs: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    config = EngineConfig(**{"dtype": "bfloat16", "offload_activations": 4, **knobs})
    with pytest.raises(UserError) as error:
        run_all(knob_checks(config, ParallelConfig(**sizes)))
    one_line(error, message)
    run_all(knob_checks(EngineConfig(dtype="bfloat16", offload_activations=4), ParallelConfig()))


def test_offloaded_activations_need_a_layer_more_and_transformer_engine() -> None:
    model, config = Qwen3Config(**SHAPE), EngineConfig(dtype="bfloat16", offload_activations=6)
    with pytest.raises(UserError) as error:
        run_all(model_checks(config, ParallelConfig(), model))
    one_line(error, "actor.offload_activations=6 must be below the model's 6 layers")
    run_all(model_checks(EngineConfig(offload_activations=5), ParallelConfig(), model))
    for has_gpu, deterministic in ((False, False), (True, False)):
        with pytest.raises(UserError) as error:
            check_device(config, has_gpu, False, deterministic)
        one_line(error, "and this engine has those of 'torch'")
    with pytest.raises(UserError) as error:
        run_all(knob_checks(config, ParallelConfig(), same_bits(1)))
    one_line(error, "and this engine has those of 'deterministic'")
    check_device(config, True, True)


def test_context_parallel_attention_of_transformer_engine_needs_16_bits() -> None:
    cut = ParallelConfig(cp_size=2)
    with pytest.raises(UserError) as error:
        run_all(knob_checks(EngineConfig(backend="te"), cut))
    one_line(error, "actor.backend=te with parallel.cp_size=2 computes 16 bits only, and actor.dtype=float32")
    run_all(knob_checks(EngineConfig(backend="te", dtype="bfloat16"), cut))


def test_products_of_transformer_engine_in_float32_are_refused() -> None:
    with pytest.raises(UserError) as error:
        run_all(knob_checks(EngineConfig(backend="te"), ParallelConfig()))
    one_line(error, "actor.backend=te multiplies float32 in TF32")
    run_all(knob_checks(EngineConfig(), ParallelConfig()))


@pytest.mark.parametrize(
    ("knobs", "refused"), [({}, True), ({"backend": "torch"}, False), ({"shared_prefix": False}, False)]
)
def test_shared_prompts_need_a_gpu_and_heads_that_flash_attention_takes(knobs: dict[str, Any], refused: bool) -> None:
    config = EngineConfig(**{"dtype": "bfloat16", "shared_prefix": True, **knobs})
    wide = Qwen3Config(head_dim=288, num_attention_heads=4, num_key_value_heads=2)
    checks = {
        "needs a GPU of compute capability 8.0 or newer, and this one has 7.5": lambda: check_device(
            config, True, True, capability=(7, 5)
        ),
        "takes heads of at most 256, and the model's have 288": lambda: run_all(
            model_checks(config, ParallelConfig(), wide)
        ),
    }
    for message, check in checks.items():
        if not refused:
            check()
            continue
        with pytest.raises(UserError) as error:
            check()
        one_line(error, f"actor.shared_prefix=true on Transformer Engine's layers {message}")
    check_device(config, True, True, capability=(8, 0))
    check_device(config, True, False, capability=(7, 5))
    narrow = Qwen3Config(head_dim=256, num_attention_heads=4, num_key_value_heads=2)
    run_all(model_checks(config, ParallelConfig(), narrow))


@pytest.mark.parametrize(
    ("knobs", "gpu", "te", "deterministic", "name"),
    [
        ({}, False, False, False, "cpu"),
        ({"dtype": "bfloat16"}, False, False, False, "torch"),
        ({"dtype": "bfloat16"}, True, True, False, "te"),
        ({}, True, True, False, "torch"),
        ({"backend": "te"}, True, True, False, "te"),
        ({}, True, False, False, "torch"),
        ({"dtype": "bfloat16", "shared_prefix": True}, True, True, False, "te"),
        ({"shared_prefix": True}, True, True, False, "torch"),
        ({"backend": "torch"}, True, True, False, "torch"),
        ({"backend": "torch"}, False, False, False, "torch"),
        ({}, False, False, True, "deterministic"),
    ],
)
def test_the_backend_follows_from_knob_machine_and_dtype(
    knobs: dict[str, Any], gpu: bool, te: bool, deterministic: bool, name: str
) -> None:
    assert backend_of(EngineConfig(**knobs), has_gpu=gpu, has_te=te, same_bits=deterministic) == name
