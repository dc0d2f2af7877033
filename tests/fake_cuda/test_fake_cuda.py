"""The code that a GPU runs, on a CUDA device in host memory: devices, dtypes, results, and each wait of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from batches import batch, config, without  # noqa: E402
from run_cases import Case, DeviceProcess, Outcomes, result  # noqa: E402

from megarl.actor.supervised import MegatronLMEngine  # noqa: E402
from megarl.ops.digest import buffer_bytes  # noqa: E402
from megarl.reshard.config import RELAYING  # noqa: E402
from tests import rows  # noqa: E402

NUMBERS = HERE.parents[1] / "docs/numbers.md"

# Waits of the host in one update: place and kind -> why. `docs/numbers.md` has them as a table.
STEP = {
    "megarl/actor/reports.py _as_floats: copy to the host": "losses and metrics of all microbatches, read together",
    "megarl/actor/health.py gradients_are_finite: copy to the host": "a step with infinite gradients is left out",
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32: value": "gradients are clipped by a number",
    "megatron/core/utils.py local_multi_tensor_l2_norm: copy from the host": "not with Transformer Engine",
}
TE_STEP = [place for place, why in STEP.items() if why != "not with Transformer Engine"]
LOGPROBS = {"megarl/actor/batch/rank_batches.py rows_on_all_ranks: copy to the host": "log-probs go to the host"}
RANKS = {
    "megarl/actor/health.py on_all_ranks: value": "all ranks leave a step out, or none",
    "megarl/parallel/broadcast.py gather_json: copy to the host": "metrics of all ranks: their sizes, then their text",
}
SKIPPED = {"megarl/ops/skipped_columns.py kept_columns: size": "which columns its products need"}
EXPERTS = {
    "megatron/core/transformer/moe/token_dispatcher.py _maybe_dtoh_and_synchronize: synchronize": "tokens by expert"
}
# Transports -> where a trainer rank and a server rank have their staging memory
STAGING = {
    "gloo": ("host", "host"),
    "shm": ("host", "host"),
    "nccl": ("gpu", "gpu"),
    "cuda_ipc": ("gpu", "gpu"),
    "nixl": ("gpu", "gpu"),
    "mooncake": ("gpu", "gpu"),
}
LOADED = [("float32", False), ("bfloat16", False), ("bfloat16", True)]  # dtype, Adam on the host
FED = (2, 8)  # microbatches of equal sequences
RACES = {
    "no wait": "may still be writing",
    "no record": "memory was freed while another stream may still use it: no record_stream",
}
RARER = {  # cases that are left to `make test-long`
    "GSPO, recomputed logits",
    "GRPO, float32 head",
    "KTO",
    "RewardModel",
    "logits",
    "cp 2",
    "pp 2, vpp 2",
    "fed 8, vpp 2",
    "bfloat16 state",
    *(f"memory, relays of {name}" for name in RELAYING[2:]),
}
FAULTS = {
    "mask on the host": "MixedDevices: megarl/actor/supervised.py",
    "rows on the host": "MixedDevices: megarl/actor/model/heads.py logprobs",
    "a read per parameter": "",
}


def often(*names: str) -> list[Any]:
    """The names, as values of a parameter; those of rarer cases are marked as long."""
    return [pytest.param(name, marks=[pytest.mark.long] if name in RARER else []) for name in names]


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every case by its name."""
    dense, deep, deeper = (str(checkpoints("qwen3", tied=True, num_hidden_layers=n)) for n in (2, 3, 4))
    experts = str(checkpoints("qwen3_moe", tied=False))
    folder = tmp_path_factory.mktemp("states")
    three = {"path": dense, "max_tokens_per_mb": 30}
    sixteen = {"path": dense, "dtype": "bfloat16"}
    named: dict[str, Case] = {
        "sft": ("sft", {"path": dense}, {}),
        "3 layers, 3 microbatches": ("sft", {**three, "path": deep}, {}),
        "shared prompts": ("sft", {"path": dense, "shared_prefix": True}, {}),
        "GRPO": ("policy", sixteen, {}),
        "GSPO, recomputed logits": ("policy", {**sixteen, "algorithm": "GSPO", "kept_logits_mb": 0}, {}),
        "GRPO, logits in chunks": ("policy", {**sixteen, "kept_logits_mb": 0, "max_tokens_per_mb": 30}, {}),
        "GRPO, skipped columns": ("policy", {**sixteen, "kept_logits_mb": 0, "skipped_gradient": 0.02}, {}),
        **{f"skipped, {main}": ("skipped", {"main": main}, {}) for main in (False, True)},
        "GRPO, float32 head": ("policy", {**sixteen, "float32_head": True, "recompute": "selective"}, {}),
        **{name: ("preference", {"path": dense, "name": name}, {}) for name in ("DPO", "KTO", "RewardModel")},
        "critic": ("critic", {"path": dense}, {}),
        "logits": ("logits", {"path": dense}, {}),
        "experts": ("sft", {**three, "path": experts}, {}),
        "experts, ep 2": ("sft", {"path": experts}, {"dp_size": 2, "ep_size": 2}),
        "tp 2": ("sft", three, {"tp_size": 2, "sequence_parallel": True}),
        "cp 2": ("sft", three, {"cp_size": 2}),
        "dp 2": ("sft", three, {"dp_size": 2}),
        "pp 2": ("sft", three, {"pp_size": 2}),
        "pp 2, vpp 2": ("sft", {**three, "path": deeper}, {"pp_size": 2, "vpp_size": 2}),
        **{f"fed {count}": ("fed", {"path": dense, "microbatches": count}, {}) for count in FED},
        **{f"fed, {fault}": ("fed", {"path": dense, "microbatches": 2, "fault": fault}, {}) for fault in RACES},
        "fed 8, vpp 2": ("fed", {"path": deeper, "microbatches": 8}, {"pp_size": 2, "vpp_size": 2}),
        "fed 2 from the device": ("fed", {"path": dense, "microbatches": 2, "on_device": True}, {}),
        "copied": ("copied", {}, {}),
        "handed out": ("handed_out", {"path": dense}, {"dp_size": 2}),
        "float32 state": ("state", {"path": dense, "folder": str(folder / "float32")}, {}),
        "bfloat16 state": ("state", {**sixteen, "folder": str(folder / "bfloat16")}, {}),
        "state, Adam on the host": (
            "state",
            {**sixteen, "offload_optimizer": True, "folder": str(folder / "host")},
            {},
        ),
        **{
            f"loaded, {dtype}{', Adam on the host' * host}": (
                "loaded",
                {"path": dense, "dtype": dtype, "offload_optimizer": host, "folder": str(folder / f"{dtype}{host}")},
                {},
            )
            for dtype, host in LOADED
        },
        **{name: ("exact", {"transport": name}, {}) for name in ("gloo", "shm", "nccl", "cuda_ipc")},
        **{f"memory, {name}": ("memory", {"transport": name, "relay": "off", "keep": True}, {}) for name in STAGING},
        **{
            f"memory, relays of {name}": ("memory", {"transport": name, "relay": "1", "keep": False}, {})
            for name in RELAYING[1:]
        },
        "full": ("full", {"folder": str(folder / "full")}, {}),
        "debug_kernels": ("debug_kernels", {"path": dense}, {}),
        "notices": ("notices", {}, {}),
        **{name: ("planted", {"path": dense, "fault": name}, {}) for name in FAULTS},
    }
    return {name: case for name, case in named.items() if rows.wants_all() or name not in RARER}


@pytest.fixture(scope="module")
def outcomes(cases: dict[str, Case], process: DeviceProcess) -> Outcomes:
    return Outcomes(process, cases)


@pytest.fixture(scope="module")
def te_outcomes(
    checkpoints: Callable[..., Path], device: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    """Outcomes of updates by the backend `te`, on the stand-in for Transformer Engine."""
    te = {"dtype": "bfloat16", "backend": "te"}
    dense, deep = (str(checkpoints("qwen3", tied=True, num_hidden_layers=n)) for n in (2, 3))
    cases: dict[str, Case] = {
        "te": ("sft", {"path": dense, **te}, {}),
        "te, 3 layers, 3 microbatches": ("sft", {"path": deep, "max_tokens_per_mb": 30, **te}, {}),
        "te, GRPO": ("policy", {"path": dense, **te}, {}),
        "te, shared prompts": ("sft", {"path": dense, "shared_prefix": True, **te}, {}),
        "te, recomputed": ("sft", {"path": dense, "recompute": "selective", **te}, {}),
    }
    process = DeviceProcess(device, tmp_path_factory.mktemp("te"), HERE.parent / "te" / "stand_in", HERE.parents[1])
    yield Outcomes(process, cases)
    process.close()


@pytest.mark.parametrize("name", ["sft", "3 layers, 3 microbatches", "shared prompts"])
def test_an_update_waits_four_times_whatever_its_layers_and_microbatches(outcomes: Any, name: str) -> None:
    found = result(outcomes, name)
    assert found["waits"] == dict.fromkeys(STEP, 1)
    assert found["logprob_waits"] == dict.fromkeys(LOGPROBS, 1)
    assert len(found["evaluation_waits"]) == 1


@pytest.mark.parametrize(
    "name", ["te", "te, 3 layers, 3 microbatches", "te, GRPO", "te, shared prompts", "te, recomputed"]
)
def test_an_update_by_transformer_engine_waits_three_times(te_outcomes: Any, name: str) -> None:
    """Its own kernels are not run; Megatron's calls around them, and megarl's code, are."""
    waits = result(te_outcomes, name)["waits"]
    assert waits == dict.fromkeys([*TE_STEP, *(LOGPROBS if name == "te, GRPO" else [])], 1)


@pytest.mark.parametrize(
    "name", often("GRPO", "GSPO, recomputed logits", "GRPO, logits in chunks", "GRPO, float32 head")
)
def test_a_policy_update_also_hands_its_log_probs_to_the_host(outcomes: Any, name: str) -> None:
    assert result(outcomes, name)["waits"] == dict.fromkeys({**STEP, **LOGPROBS}, 1)


@pytest.mark.parametrize("name", ["sft", "3 layers, 3 microbatches"])
def test_cuda_is_asked_for_its_free_memory_once_an_update(outcomes: Any, name: str) -> None:
    assert result(outcomes, name)["memory_questions"] == {"update": 1}


def test_a_head_that_skips_columns_waits_once_a_chunk(outcomes: Any) -> None:
    assert result(outcomes, "GRPO, skipped columns")["waits"] == dict.fromkeys({**STEP, **LOGPROBS, **SKIPPED}, 1)


@pytest.mark.parametrize("main", [False, True], ids=["gradient of the weight", "main gradient"])
def test_skipped_columns_leave_the_device_the_same_gradients(outcomes: Any, main: bool) -> None:
    found = result(outcomes, f"skipped, {main}")
    assert max(found["errors"]) < 0.02
    assert found["left out"] >= 0.5


@pytest.mark.parametrize("name", often("DPO", "KTO", "RewardModel", "critic", "logits"))
def test_the_other_methods_wait_four_times(outcomes: Any, name: str) -> None:
    assert result(outcomes, name)["waits"] == dict.fromkeys(STEP, 1)


@pytest.mark.parametrize("name", often("tp 2", "cp 2", "dp 2", "experts, ep 2"))
def test_several_ranks_wait_three_times_more(outcomes: Any, name: str) -> None:
    waits = result(outcomes, name)["waits"]
    assert {place: count for place, count in waits.items() if place not in EXPERTS} == {
        **dict.fromkeys({**STEP, **RANKS}, 1),
        "megarl/parallel/broadcast.py gather_json: copy to the host": 2,
    }


def test_experts_cost_a_wait_for_each_layer_and_microbatch(outcomes: Any) -> None:
    assert result(outcomes, "experts")["waits"] == {**dict.fromkeys(STEP, 1), **dict.fromkeys(EXPERTS, 2 * 3)}


@pytest.mark.parametrize("name", often("pp 2", "pp 2, vpp 2"))
def test_exchanges_between_pipeline_stages_do_not_wait(outcomes: Any, name: str) -> None:
    """The first stage has no losses to read; it waits as often as other ranks otherwise, in any number of exchanges."""
    losses = "megarl/actor/reports.py _as_floats: copy to the host"
    assert result(outcomes, name)["waits"] == {
        **{place: 1 for place in {**STEP, **RANKS} if place != losses},
        "megarl/parallel/broadcast.py gather_json: copy to the host": 2,
    }


def test_microbatches_cost_neither_waits_nor_memory_of_the_device(outcomes: Any) -> None:
    """Only losses and metrics of each one stay, a few numbers, until they are read together."""
    few, many = (result(outcomes, f"fed {count}") for count in FED)
    assert few["waits"] == many["waits"] == dict.fromkeys(STEP, 1)
    assert many["loss"] == pytest.approx(few["loss"], rel=1e-5)
    assert many["bytes"] - few["bytes"] < 6 * 256
    assert few["left"] == many["left"] == 0


def test_a_batch_on_the_device_is_cut_on_the_host(outcomes: Any) -> None:
    """As AReaL's training scripts pass theirs."""
    assert result(outcomes, "fed 2 from the device")["loss"] == result(outcomes, "fed 2")["loss"]


@pytest.mark.long
def test_virtual_stages_share_the_copies(outcomes: Any) -> None:
    found = result(outcomes, "fed 8, vpp 2")
    assert found["left"] == 0
    assert "synchronize" not in str(found["waits"])


@pytest.mark.parametrize("fault", RACES)
def test_a_race_with_the_copies_is_noticed(outcomes: Any, fault: str) -> None:
    assert RACES[fault] in outcomes[f"fed, {fault}"]["error"]


def test_a_batch_is_handed_out_without_more_of_the_device_than_a_piece(outcomes: Any) -> None:
    """Its experts, of `routing_replay`, take gigabytes for a large model."""
    found = result(outcomes, "handed out")
    assert found["routes"] > 10 * found["bytes"] > 0


def test_a_value_is_copied_as_one_block_of_aligned_parts(outcomes: Any) -> None:
    assert result(outcomes, "copied") == {
        "same": [True] * 4,
        "devices": ["cuda"],
        "storages": 1,
        "aligned": True,
        "once": True,
        "versions": [0, 0],
        "waits": {},
    }


def test_the_table_of_waits_stands_in_the_numbers() -> None:
    rows = [
        *((place, "1 a step", why) for place, why in STEP.items()),
        *((place, "1 a pass", why) for place, why in LOGPROBS.items()),
        *((place, f"{1 + ('gather' in place)} a step of several ranks", why) for place, why in RANKS.items()),
        *((place, "1 a layer with experts and microbatch", why) for place, why in EXPERTS.items()),
        *((place, "1 a chunk, with `actor.skipped_gradient`", why) for place, why in SKIPPED.items()),
    ]
    text = NUMBERS.read_text()
    for place, count, why in rows:
        where, _, kind = place.partition(": ")
        file, function = where.split()
        assert f"| `{file}` | `{function}` | {kind} | {count} | {why} |" in text


def test_results_on_the_device_are_those_of_the_host(outcomes: Any, cases: dict[str, Case]) -> None:
    engine = MegatronLMEngine(config(**cases["sft"][1]))
    engine.initialize()
    data = without(batch(), "group_ids", "pair_ids")
    steps = [engine.train_lm(data) for _ in range(2)]
    logprobs = engine.logprobs(data, trained_only=True)
    found = result(outcomes, "sft")
    assert found["losses"] == pytest.approx([step["loss"] for step in steps], rel=1e-5)
    assert found["norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)
    assert found["logprobs"] == pytest.approx(logprobs.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", often("tp 2", "cp 2", "dp 2", "pp 2", "shared prompts"))
def test_layouts_agree_on_the_device(outcomes: Any, name: str) -> None:
    assert result(outcomes, name)["losses"] == pytest.approx(result(outcomes, "sft")["losses"], rel=1e-5)


def test_transformer_engine_agrees_on_shared_prompts(te_outcomes: Any) -> None:
    apart, together = (result(te_outcomes, name)["losses"] for name in ("te", "te, shared prompts"))
    assert together == pytest.approx(apart, rel=2**-8)
    assert together != apart, "nothing was shared"


@pytest.mark.parametrize(("dtype", "host"), LOADED)
def test_a_step_after_a_load_begins_at_the_loaded_weights(outcomes: Any, dtype: str, host: bool) -> None:
    found = result(outcomes, f"loaded, {dtype}{', Adam on the host' * host}")
    assert found["moved"] == []
    assert found["losses"][0] == found["losses"][1]


@pytest.mark.parametrize("name", often("float32 state", "bfloat16 state", "state, Adam on the host"))
def test_a_resume_and_rests_on_the_host_change_no_bit(outcomes: Any, name: str) -> None:
    found = result(outcomes, name)
    assert found["resumed"] == found["straight"]


@pytest.mark.parametrize("name", ["gloo", "shm", "nccl", "cuda_ipc"])
def test_weights_arrive_and_only_digests_bring_them_to_the_host(outcomes: Any, name: str) -> None:
    found = result(outcomes, name)
    through_host = found["parts"] if name in ("gloo", "shm") else 0
    assert found["reads"][1] == [through_host, through_host], "without digests"
    digests = 0 if through_host else 1  # of all parts, where the packed buckets are on the device
    assert found["reads"][0] == [digests + through_host, through_host], "with digests of all parts"
    assert found["digests"] == (0 if through_host else buffer_bytes(found["parts"]))  # of a leaf each, live there


@pytest.mark.parametrize("name", STAGING)
def test_syncs_hold_the_memory_that_preflight_counts(outcomes: Any, name: str) -> None:
    """Two buckets of 4 KiB a rank, and the trainer's copies of what it sent. The case compares live tensors with it."""
    found, (trainer, servers) = result(outcomes, f"memory, {name}"), STAGING[name]
    buckets, total = 2 * 4096, sum(found["gpu"] + found["host"])
    assert found[trainer][0] > buckets + 4096
    assert found[servers][1:] == [buckets, buckets]
    assert total == found[trainer][0] + 2 * buckets


@pytest.mark.parametrize("name", often(*(f"memory, relays of {name}" for name in RELAYING[1:])))
def test_relays_hold_two_buckets_more(outcomes: Any, name: str) -> None:
    found = result(outcomes, name)
    assert found["host" if name.endswith("gloo") else "gpu"] == [2 * 4096, 4 * 4096, 4 * 4096]  # relays in turn


def test_full_tensors_go_to_the_host_once(outcomes: Any) -> None:
    found = result(outcomes, "full")
    assert list(found["waits"].values()) == [found["digests"]]


def test_values_on_a_gpu_are_checked_with_debug_kernels_and_cost_no_wait_without(outcomes: Any) -> None:
    found = result(outcomes, "debug_kernels")
    assert set(found["before"].values()) == {"0 waits"}
    assert found["after"] == {
        "cu_seqlens": "cu_seqlens falls from 3 to 2 in sequence 1; it must rise from 0 to the 4 tokens",
        "labels": "labels lie in [0, 6], the vocabulary has 6 entries; use -1 where a row has no label",
        "temperatures": "temperatures lie in [-1.0, -1.0], each must be a positive number between 1e-30 and 1e+30; "
        "use greedy decoding for 0",
    }


def test_the_watch_notices_what_a_gpu_does(outcomes: Any) -> None:
    value, read, size, write = ["value"], ["copy to the host"], ["size"], ["copy from the host"]
    assert result(outcomes, "notices") == {
        "item": value,
        "float": value,
        "bool": value,
        "tolist": read,
        "cpu": read,
        "nonzero": size,
        "mask": size,
        "fill by mask": [],
        "repeat": size,
        "tensor": write,
        "to": write,
        "to without waiting": [],
        "to of pageable memory": ["copy of pageable memory"],
        "add a number": [],
        "add host": ["MixedDevices"],
        "index by host": ["MixedDevices"],
        "numpy": ["TypeError"],
        "reduce host": ["MixedDevices"],
        "read early": ["RuntimeError"],
        "read late": ["synchronize"],
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(outcomes: Any, fault: str) -> None:
    if FAULTS[fault]:
        assert FAULTS[fault] in outcomes[fault]["error"]
    else:
        assert result(outcomes, fault)["waits"] != dict.fromkeys(STEP, 1)
