"""A critic, and an actor with shared prompts, give the results of one process under every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from megarl.launcher.local import run_ranks
from megarl.parallel.config import ParallelConfig
from megarl.types import cu_seqlens_of
from tests.distributed.critic_worker import measure

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2_sp_pp2": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2},
    "pp2_vpp2": {"pp_size": 2, "vpp_size": 2},
    "cp2": {"cp_size": 2},
    "dp2": {"dp_size": 2},
}


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model, a batch of two groups with a prompt each, and the results of one process."""
    folder = tmp_path_factory.mktemp("critic")
    (folder / "model").symlink_to(checkpoints("qwen3", tied=False, vocab_size=347, num_hidden_layers=4))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 347, (n,), generator=generator) for n in (11, 6)]
    parts, masks, groups = [], [], []
    for i, length in enumerate((7, 3, 30, 12, 2, 17)):
        prompt = prompts[i % 2]
        parts.append(torch.cat([prompt, torch.randint(0, 347, (length,), generator=generator)]))
        masks.append(torch.arange(len(parts[-1])) >= len(prompt))
        groups.append(i % 2)
    total = sum(len(part) for part in parts)
    batch = {
        "cu_seqlens": cu_seqlens_of(torch.tensor([len(part) for part in parts])),
        "input_ids": torch.cat(parts),
        "loss_mask": torch.cat(masks),
        "values": torch.randn(total, generator=generator),
        "returns": torch.randn(total, generator=generator),
        "group_ids": torch.tensor(groups),
    }
    save_file(batch, folder / "batch.safetensors")
    (folder / "alone").mkdir()
    measure(folder, ParallelConfig(), folder / "alone")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_process_gives(name: str, work: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = math.prod(size for key, size in layout.items() if key not in ("vpp_size", "sequence_parallel"))
    (tmp_path / "logs").mkdir()
    arguments = [str(work), json.dumps(layout), str(tmp_path)]
    code = run_ranks("tests.distributed.critic_worker", arguments, ranks, tmp_path / "logs")
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in (tmp_path / "logs").iterdir())

    expected, actual = load_file(work / "alone" / "out.safetensors"), load_file(tmp_path / "out.safetensors")
    assert torch.equal(actual["resumed"], actual["after"])
    for key, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-5, msg=key)
    stats = json.loads((tmp_path / "stats.json").read_text())
    alone = json.loads((work / "alone" / "stats.json").read_text())
    assert len(stats) == (2 if "cp_size" in layout or "sequence_parallel" in layout else 3)
    for step, single in zip(stats, alone, strict=False):
        assert step == pytest.approx(single, rel=2e-5, abs=1e-6)
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").state_dict()
    single = AutoModelForSequenceClassification.from_pretrained(work / "alone" / "hf").state_dict()
    for key, tensor in exported.items():
        torch.testing.assert_close(tensor, single[key], atol=1e-5, rtol=0, msg=key)
