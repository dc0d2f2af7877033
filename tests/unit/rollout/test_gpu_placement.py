"""GPUs of ranks and servers on one machine, whose number is planted: no GPU is needed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from megarl import checks, cli
from megarl.knobs import UserError
from megarl.parallel import hardware_queues, platform
from megarl.parallel.determinism import OFF
from megarl.rollout.client.connections import ADDRESSES_VARIABLE
from megarl.rollout.servers import gpu_backends, server_config
from megarl.rollout.servers.gpu_placement import check_gpu_count, number_gpus
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.trainer.rollouts.rank0_servers import choose_servers
from megarl.trainer.rollouts.teacher_servers import TeacherServers


def test_servers_on_gpus_take_backends_that_serve_their_dtype() -> None:
    experts = {"moe_runner_backend": "triton", "disable_shared_experts_fusion": True}
    assert gpu_backends.arguments("float32") == {**experts, "attention_backend": "torch_native"}
    assert gpu_backends.arguments("bfloat16") == experts
    assert gpu_backends.environment("float32") == {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    assert gpu_backends.environment("bfloat16") == {}


@pytest.mark.parametrize(
    ("major", "quantization", "chosen"),
    [(10, "fp8", True), (9, "fp8", False), (None, "fp8", False), (10, "int4", False), (10, "none", False)],
)
def test_scales_of_fp8_stay_as_they_are_sent_on_blackwell(
    major: int | None, quantization: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM would round them to powers of two there, and a sync refuses such a server."""
    monkeypatch.setattr(hardware_queues, "lowest_major", lambda: major)
    arguments = gpu_backends.arguments("bfloat16", quantization)
    assert arguments.get("fp8_gemm_runner_backend") == ("triton" if chosen else None)


TRITON_8_0 = r"sglang.attention_backend=triton{} cannot read server.kv_cache_dtype=fp8_e4m3 on GPUs of .* 8.0"


@pytest.mark.parametrize(
    ("capability", "arguments", "default", "message"),
    [
        ((8, 0), {"attention_backend": "triton"}, "", TRITON_8_0.format("")),
        (
            (8, 6),
            {"decode_attention_backend": "triton"},
            "",
            r"sglang.decode_attention_backend=triton cannot read .* 8.6",
        ),
        ((8, 0), {}, "triton", TRITON_8_0.format(", the default for this model,") + ".*; set kv_cache_dtype=auto$"),
        ((8, 0), {"attention_backend": "flashinfer"}, "triton", None),
        ((8, 0), {"prefill_attention_backend": "flashinfer"}, "triton", TRITON_8_0.format(", the default .*,")),
        ((8, 0), {f"{part}_attention_backend": "fa3" for part in ("prefill", "decode")}, "triton", None),
        ((8, 0), {}, "", None),
        ((8, 9), {"attention_backend": "triton"}, "triton", None),
        (None, {"attention_backend": "triton"}, "triton", None),
    ],
)
def test_an_8_bit_cache_is_refused_where_tritons_attention_cannot_read_it(
    capability: tuple[int, int] | None,
    arguments: dict[str, Any],
    default: str,
    message: str | None,
) -> None:
    """Triton has E4M3 from compute capability 8.9 on; a server of an A100 would end at its first kernel."""
    gpu_backends.check_cache(capability, "auto", arguments, default)
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        gpu_backends.check_cache(capability, "fp8_e4m3", arguments, default)


@pytest.mark.parametrize(
    ("model", "dtype", "refused"),
    [
        (DeepseekV3Config(num_hidden_layers=4), "bfloat16", True),
        (GptOssConfig(num_hidden_layers=2), "bfloat16", True),
        (DeepseekV3Config(num_hidden_layers=4), "float32", False),  # megarl's default is torch_native
        (Qwen3MoeConfig(num_experts=4), "bfloat16", False),
    ],
)
def test_models_whose_attention_is_tritons_by_default_have_no_8_bit_cache_on_an_a100(
    model: PretrainedConfig, dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "compute_capability", lambda: (8, 0))
    knobs = ["server.device=cuda", f"server.dtype={dtype}", "server.kv_cache_dtype=fp8_e4m3"]
    config = cli.composed(["+experiment=gsm8k_grpo", *knobs])
    found = checks.failures(checks.kernel_checks(config, model))
    assert any("triton, the default for this model, cannot read" in text for text in found) == refused
    planned = checks.failures([*checks.model_checks(config, model), *checks.server_checks(config, Path("model"))])
    assert not any("cannot read" in text for text in planned), "a plan may be for other GPUs than this machine's"


def test_names_of_gpus_stay_where_a_server_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e1f")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    number_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5e1f"


@pytest.mark.parametrize("fails", [False, True])
def test_gpus_named_by_uuid_have_numbers_once_cuda_has_read_the_uuids(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's custom all-reduce calls int() on each name, and is left out where that fails."""
    uuids, read = "GPU-5e1f,GPU-0c2d", []

    def number(gpu: int) -> int:
        if fails:
            raise RuntimeError("Can't get device UUIDs")
        return (5, 2)[gpu]

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: read.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", number)
    for names in ("3,1", "MIG-7a", uuids):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        number_gpus()
        named = os.environ["CUDA_VISIBLE_DEVICES"]
        assert named == ("5,2" if names == uuids and not fails else names)
    assert read == [uuids]
    assert os.environ["CUDA_DEVICE_ORDER"] == ("FASTEST_FIRST" if fails else "PCI_BUS_ID")


@pytest.mark.parametrize("arguments", [{"dcp_replicate_q_proj": True}, {"dcp_comm_backend": "a2a"}], ids=str)
def test_copies_of_query_projections_that_no_sync_renews_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"copies of query projections that no weight sync renews"):
        gpu_backends.check_backends("bfloat16", arguments, colocated=False)


def test_the_ranks_of_a_server_meet_by_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCP store of torch listens on every address, at a port that another server may have drawn."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = server_config.SGLangServerConfig(device="cuda", dtype="bfloat16")
    chosen = server_config.choose_platform(config, {}, OFF)
    variable = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    assert [chosen.environment(place)[variable] for place in ("/a", "/b")] == [
        "file:///a/rendezvous",
        "file:///b/rendezvous",
    ]


def test_a_colocated_servers_draft_model_is_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it gives up holds the draft's weights too, and no sync brings them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = server_config.SGLangServerConfig(device="cuda", dtype="bfloat16", colocate=True)
    assert server_config.choose_platform(config, {}, OFF).arguments["enable_draft_weights_cpu_backup"] is True


@pytest.mark.parametrize("name", ["enable_eplb", "init_expert_location", "ep_num_redundant_experts"])
def test_servers_that_move_experts_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"sglang.{name}='x' cannot be set: it moves experts"):
        server_config.check_server_config(server_config.SGLangServerConfig(), tmp_path, {name: "x"})


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(server_config, "has_memory_saver", lambda: True)


def own_gpus(servers: SGLangServers) -> list[str]:
    """The GPUs that each server uses: the first of those that it sees."""
    tp = servers.config.tp_size
    return [",".join((server.gpus or "").split(",")[:tp]) for server in servers.servers]


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("knobs", "gpus"),
    [
        (("parallel.dp_size=4", "server.n_servers=4"), ["4", "5", "6", "7"]),
        (("parallel.dp_size=2", "server.n_servers=2", "server.tp_size=2"), ["2,3", "4,5"]),
        (("parallel.dp_size=8", "server.n_servers=8", "server.colocate=true"), list("01234567")),
    ],
)
def test_servers_take_the_gpus_after_the_ranks_or_share_them(
    knobs: tuple[str, ...], gpus: list[str], tmp_path: Path
) -> None:
    config = cli.load(["+experiment=gsm8k_grpo", "server.device=cuda", *knobs])
    servers = choose_servers(config, tmp_path)
    assert isinstance(servers, SGLangServers)
    assert own_gpus(servers) == gpus
    for server in servers.servers:
        environment = server._environment("scratch")
        assert sorted(environment["CUDA_VISIBLE_DEVICES"].split(",")) == list("01234567")  # cuda_ipc reads the others
        for name in ("enable_memory_saver", "disable_prefill_cuda_graph"):
            assert server.args.get(name, False) == config.server.colocate
        assert environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("true" if config.server.colocate else None)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    "argument",
    [
        "cuda_graph_backend_prefill=breakable",
        "cuda_graph_backend_decode=breakable",
        "cuda_graph_config={decode:{backend:breakable}}",
        "disable_prefill_cuda_graph=false",
    ],
)
def test_graphs_that_sglang_refuses_where_memory_is_given_up_are_refused(argument: str) -> None:
    knobs = ["+experiment=gsm8k_grpo", "server.device=cuda", f"+sglang.{argument}"]
    cli.load([*knobs, "parallel.dp_size=4", "server.n_servers=4"])
    colocated = ["parallel.dp_size=8", "server.n_servers=8", "server.colocate=true"]
    with pytest.raises(UserError, match=r"^sglang\.\w+=.* gives a server breakable CUDA graphs") as refused:
        cli.load([*knobs, *colocated])
    assert str(refused.value).startswith(f"sglang.{argument.partition('=')[0]}=")
    cli.load([*knobs[:2], *colocated, "+sglang.cuda_graph_backend_prefill=full"])


SERVED_TEACHER = ("+experiment=opd", "teacher.source=server", "algorithm.divergence=top_k", "teacher.n_servers=2")


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("knobs", "gpus"),
    [((), ["3", "4"]), (("teacher.tp_size=2",), ["3,4", "5,6"]), (("method=sft",), ["2", "3"])],
)
def test_a_teacher_takes_the_gpus_after_ranks_and_servers(
    knobs: tuple[str, ...], gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangServers, "start", lambda servers: None)
    config = cli.load([*SERVED_TEACHER, "server.device=cuda", "parallel.dp_size=2", *knobs])
    servers = TeacherServers(config, tmp_path)._servers
    assert servers is not None
    assert own_gpus(servers) == gpus
    if config.method == "rl":  # servers that somebody else started take no GPU of this machine
        monkeypatch.setenv(ADDRESSES_VARIABLE, "10.0.0.1:1")
        beside_ranks = TeacherServers(config, tmp_path)._servers
        assert beside_ranks is not None
        assert own_gpus(beside_ranks)[0].startswith("2")


@pytest.mark.usefixtures("eight_gpus")
def test_a_machine_with_too_few_gpus_for_the_teacher_is_refused_before_anything_starts() -> None:
    config = cli.load([*SERVED_TEACHER, "server.device=cuda", "parallel.dp_size=2", "teacher.tp_size=4"])
    (check,) = checks.gpu_count_checks(config)
    message = r"2 trainer ranks beside 1 servers x server.tp_size=1 and 8 GPUs of the teacher need 11 GPUs, .* has 8; "
    with pytest.raises(UserError, match=message + r"lower parallel\.\*, server\.n_servers or teacher\.\*$"):
        check()
    (fits,) = checks.gpu_count_checks(cli.load([*SERVED_TEACHER, "parallel.dp_size=4", "server.n_servers=2"]))
    fits()


@pytest.mark.usefixtures("eight_gpus")
def test_a_machine_with_too_few_gpus_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cli.load(["+experiment=gsm8k_grpo", "parallel.dp_size=8", "server.n_servers=2"])
    (check,) = checks.gpu_count_checks(config)
    message = r"8 trainer ranks beside 2 servers x server.tp_size=1 need 10 GPUs, .* has 8; .*colocate=true"
    with pytest.raises(UserError, match=message):
        check()
    monkeypatch.setenv("RANK", "0")  # a rank leaves the count to the command that started it
    assert checks.gpu_count_checks(config) == []


def test_colocated_servers_need_the_larger_side_alone() -> None:
    check_gpu_count(gpus=8, ranks=8, servers=8, tp_size=1, colocate=True)
    with pytest.raises(UserError, match=r"8 trainer ranks in turn with 3 servers x server.tp_size=4 need 12 GPUs"):
        check_gpu_count(gpus=8, ranks=8, servers=3, tp_size=4, colocate=True)


@pytest.mark.usefixtures("eight_gpus")
def test_a_rank_without_a_gpu_is_refused_and_takes_no_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert platform.device() == torch.device("cuda", 7)
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(UserError, match=r"LOCAL_RANK=8 needs GPU 8, and this machine shows 8"):
        platform.device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # Slurm may bind one to each task
    assert platform.device() == torch.device("cuda", 0)


def test_colocation_without_the_memory_saver_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = server_config.SGLangServerConfig(device="cuda", dtype="bfloat16", colocate=True)
    with pytest.raises(UserError, match=r"server.colocate=true needs the package torch_memory_saver"):
        server_config.check_server_config(config, tmp_path, {})
