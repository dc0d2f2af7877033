"""Stand-ins for CUDA on the CPU: Megatron must still need each one on the line that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
import torch

from megarl.parallel import megatron_patches, platform

MEGATRON = Path(megatron.core.__file__).parent
GATHERS = """
import torch
from megatron.core.distributed import param_and_grad_buffer as megatron
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig

torch.set_num_threads(1)
group = groups.initialize(ParallelConfig()).dp
buffers = [torch.zeros(4000) for _ in range(16)]
for number in range(3000):
    handles = []
    for buffer in buffers:
        shard = torch.full_like(buffer, number)
        with megatron._coalescing_manager(group, async_ops=True) as handle:
            megatron.dist_all_gather_func(buffer, shard, group=group, async_op=True)
        handles.append(handle)
    for handle in handles:
        handle.wait()
    assert all(bool((buffer == number).all()) for buffer in buffers), number
with megatron._coalescing_manager(group, async_ops=True) as handle:
    for buffer in buffers:
        megatron.dist_all_gather_func(buffer, shard, group=group, async_op=True)
(gathers,) = handle.works
assert len(gathers) == len(buffers), "each is a gather of its own"
handle.wait()
groups.destroy()
print("gathered")
"""
on_cpu = pytest.mark.skipif(platform.has_gpu(), reason="a GPU is here: nothing is replaced")


@pytest.mark.parametrize("name", megatron_patches.CUDA_ATTRIBUTES)
def test_megatron_still_asks_for_the_attribute_on_the_line_named(name: str) -> None:
    _, reason = megatron_patches.CUDA_ATTRIBUTES[name]
    file, line = re.match(r"(\S+\.py):(\d+)", reason).groups()
    text = (MEGATRON / file).read_text().splitlines()[int(line) - 1]
    assert re.search(rf"torch\.cuda\.{name}\b", text), f"{file}:{line} reads {text.strip()!r}: is the entry needed?"


@pytest.mark.parametrize(("module", "name"), megatron_patches.MEGATRON_ATTRIBUTES)
def test_megatron_still_has_what_is_replaced_on_the_line_named(module: str, name: str) -> None:
    _, reason = megatron_patches.MEGATRON_ATTRIBUTES[module, name]
    file, line = re.match(r"(\S+\.py):(\d+)", reason).groups()
    assert file == module.replace(".", "/") + ".py"
    text = (MEGATRON / file).read_text().splitlines()[int(line) - 1]
    assert name in text, f"{file}:{line} reads {text.strip()!r}: is the entry needed?"


def test_megatron_still_asks_for_deep_eps_event_where_version_2_has_it_not() -> None:
    line = (MEGATRON / "transformer/moe/fused_a2a.py").read_text().splitlines()[11]
    assert "from deep_ep.utils import" in line, "is provide_deep_ep still needed?"
    assert "EventOverlap" in line, "is provide_deep_ep still needed?"


@on_cpu
def test_cuda_means_cpu_inside_the_scope_only() -> None:
    megatron_patches.prepare()
    with megatron_patches.scope():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().device.type == "cpu"
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@on_cpu
def test_streams_and_events_do_nothing() -> None:
    megatron_patches.prepare()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        torch.cuda.Event().record()
    assert torch.cuda.current_device() == torch.device("cpu")


@on_cpu
def test_gathers_of_a_lone_rank_that_are_under_way_together_leave_the_heap_whole() -> None:
    """Without the patch torch 2.13 ends most such processes within 2,000 rounds."""
    ended = subprocess.run([sys.executable, "-c", GATHERS], capture_output=True, text=True, timeout=900, check=False)
    assert (ended.returncode, ended.stdout) == (0, "gathered\n"), ended.stderr[-2000:]
