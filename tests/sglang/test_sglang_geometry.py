"""The rules of SGLang's layout, compared with SGLang's own model classes and loaders."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.families.weight_formats import FORMATS
from tests import forked_servers, rows
from tests.held_ports import held_port
from tests.sglang import wide_models
from tests.sglang.tiny_models import make_wide, save_multimodal, save_quantised

pytestmark = rows.marks()
ROOT = Path(__file__).parents[2]
LATENT = ("deepseek_v3", "moonlight", "glm4_moe_lite")
FAMILIES = (
    "qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "glm4_moe", *LATENT
)  # fmt: skip


def ranks_of(
    checkpoints: list[Path], tp_size: int, ep_size: int = 1, padded: bool = True
) -> list[list[dict[str, Any]]]:
    """Each rank's report on each checkpoint. `padded`: with sizes padded as on CPU, else as on a GPU."""
    port = held_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp_size)))
    with contextlib.ExitStack() as ended:
        processes = []
        for rank in range(tp_size):
            output = ended.enter_context(tempfile.NamedTemporaryFile())
            arguments = map(str, (os.getpid(), rank, tp_size, ep_size, port, int(padded), *checkpoints))
            process = forked_servers.Popen(
                [sys.executable, "-m", "tests.sglang.geometry_worker", *arguments],
                stdin=forked_servers.DEVNULL,
                stdout=output,
                stderr=forked_servers.STDOUT,
                start_new_session=True,
                env=environment,
            )
            ended.callback(process.kill)
            processes.append((process, Path(output.name)))
        reports = []
        for process, output in processes:
            code, text = process.wait(450), output.read_text()
            assert code == 0, text[-3000:]
            reports.append([json.loads(line) for line in text.splitlines() if line.startswith('{"checkpoint"')])
    return reports


def check(reports: list[list[dict[str, Any]]], expected: int) -> None:
    for rank in reports:
        assert len(rank) == expected
        for report in rank:
            assert report["geometry"] == "equal", report
            assert report["wrong"] == [], report
            assert report["refilled"] == [], report
            assert report["adapters"] == [], report
            assert report["fragments"] >= len(report["names"]) > 10


def test_fragments_hold_what_sglangs_own_loader_put_there_at_tp1(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoints = [tiny_checkpoint(family, tied=False) for family in rows.every(3, [*FAMILIES])]
    tied = rows.every(4, ["qwen2", "qwen3", "llama", "mistral", "gemma3_text"])
    checkpoints += [tiny_checkpoint(family) for family in tied]
    reports = ranks_of(checkpoints, tp_size=1)
    check(reports, len(checkpoints))


def test_fragments_hold_what_sglangs_own_loader_put_there_at_tp2_with_padded_heads(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoints = [tiny_checkpoint(family, tied=False) for family in FAMILIES]
    checkpoints += [
        tiny_checkpoint(family, tied=False, kv_heads=1) for family in ("llama", "qwen2", "qwen3_moe", "gpt_oss")
    ]
    checkpoints += [tiny_checkpoint("gemma3_text")]
    save_multimodal(tmp_path)
    checkpoints.append(tmp_path)
    reports = ranks_of(checkpoints, tp_size=2)
    check(reports, len(checkpoints))
    derived = {name for report in reports[1] for name in report["derived"]}
    assert derived >= {"gemma_weight", "w2_weight_bias"}, "of Qwen3-Next's norms, and of gpt-oss on the second rank"
    assert any(report["held"] < report["elements"] for report in reports[1]), "nothing was padded"


def test_fragments_hold_what_sglangs_own_loader_put_there_at_tp2_with_shared_kv_heads_and_experts_spread(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Without the CPU's padding, as SGLang builds models on a GPU."""
    families = ("llama", "qwen3_moe", "mixtral", "glm4_moe")
    checkpoints = [tiny_checkpoint(family, tied=False, kv_heads=1) for family in families]
    checkpoints += [tiny_checkpoint(family, tied=False) for family in LATENT]
    reports = ranks_of(checkpoints, tp_size=2, ep_size=2, padded=False)
    check(reports, len(checkpoints))
    for first, second in zip(*reports, strict=True):
        experts = [{n for n in report["names"] if ".experts." in n} for report in (first, second)]
        assert not experts[0] & experts[1]
        shared = set(first["names"]) & set(second["names"])
        assert any("k_proj" in name or "kv_a_proj" in name for name in shared)


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [
        pytest.param("fp8", 2, marks=pytest.mark.long),
        pytest.param("fp8_channel", 2, marks=pytest.mark.long),
        ("int4", 2),
        pytest.param("int4", 1, marks=pytest.mark.long),
        pytest.param("fp8", 1, marks=pytest.mark.long),
        pytest.param("fp8_channel", 1, marks=pytest.mark.long),
    ],
)
def test_fragments_hold_the_bytes_that_sglangs_own_loader_put_there_of_a_quantised_checkpoint(
    name: str, tp_size: int, tmp_path: Path
) -> None:
    """By digests of every part, quantised weights and their scales."""
    format = FORMATS[name]
    reports = ranks_of([save_quantised(make_wide(3), tmp_path, format)], tp_size)
    check(reports, 1)
    for (report,) in reports:
        assert sum(name.endswith(format.scales.suffix) for name in report["names"]) == 14
        shapes = 2 * 2 * 4 if format.shape else 0  # of two layers' four parameters, which nothing reads
        assert report["elements"] - report["held"] == shapes


@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size"),
    [
        pytest.param(name, *ranks, marks=pytest.mark.long)
        for name in ("fp8", "int4")
        for ranks in ((2, 1), (1, 1), (2, 2))
    ],
)
def test_fragments_hold_the_bytes_that_sglangs_own_loader_put_there_of_quantised_experts(
    name: str, tp_size: int, ep_size: int, tmp_path: Path
) -> None:
    """Experts spread over ranks run on GPUs alone, so those are without the CPU's padding."""
    format = FORMATS[name]
    families = wide_models.FIELDS if name == "fp8" else [f for f in wide_models.FIELDS if f in format.families]
    configs = {family: wide_models.wide_config(family) for family in families}
    checkpoints = [
        wide_models.save_quantised(config, wide_models.wide_weights(config, 4), tmp_path / family, format)
        for family, config in configs.items()
    ]
    reports = ranks_of(checkpoints, tp_size, ep_size, padded=ep_size == 1)
    check(reports, len(checkpoints))
    suffix = format.scales.suffix
    for rank in reports:
        for report in rank:
            scaled = {name.removesuffix(suffix) + ".weight" for name in report["names"] if name.endswith(suffix)}
            assert sum(".experts." in name for name in scaled) >= 3 * 4 // ep_size
            valued = {n.removesuffix(format.values.suffix) + ".weight" for n in report["names"]}
            assert scaled == {name for name in valued if format.quantises(name)}
            if name == "fp8":
                assert report["elements"] - report["held"] <= 8  # scales of caches, 4 a layer with latent attention


def test_blocks_are_those_of_sglangs_own_function_with_plain_scales() -> None:
    """SGLang rounds the scales to powers of two, for kernels that take no others; here that step is left out."""
    source = (
        "from megarl.cpu import sglang_launch; sglang_launch.install()\n"
        "import torch\n"
        "from sglang.srt.layers.quantization import fp8_utils\n"
        "from megarl.ops.digest import digest\n"
        "from megarl.families.weight_formats import FORMATS\n"
        "from megarl.reshard.quantised_weights import quantised\n"
        "fp8_utils.ceil_to_ue8m0 = lambda scale: scale\n"
        "torch.manual_seed(0)\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    weight = (torch.randn(512, 384) * torch.randn(512, 1).exp()).to(dtype)\n"
        "    weight[:128, :128] = 0\n"
        "    weight[128:256, :128] *= 1e-6\n"
        "    own = [tensor for _, tensor in quantised([('mlp.up_proj.weight', weight)], FORMATS['fp8'])]\n"
        "    theirs = fp8_utils.per_block_cast_to_fp8(weight)\n"
        "    assert [digest(t) for t in own] == [digest(t.contiguous()) for t in theirs], dtype\n"
    )
    result = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert result.returncode == 0, result.stderr[-3000:]


def test_an_order_is_carried_out_once_beside_a_draft_model(tmp_path: Path) -> None:
    """A second call of the loader would wait for messages that the trainer has already sent."""
    with (tmp_path / "output").open("wb") as output:
        process = forked_servers.Popen(
            [sys.executable, "-m", "tests.sglang.draft_model_worker", str(os.getpid())],
            stdin=forked_servers.DEVNULL,
            stdout=output,
            stderr=forked_servers.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
        code = process.wait(450)
    text = (tmp_path / "output").read_text()
    assert code == 0, text
    assert json.loads(text.splitlines()[-1]) == {
        "success": True,
        "target": ["begin", "update", "end"],
        "draft": [],
    }
