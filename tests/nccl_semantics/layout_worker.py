"""Worker of every rank: trains one step under each layout and gathers the weights, with NCCL's rules in force.

Arguments: the work folder, the seconds that an operation may take, and the cases' names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Qwen3Config

from megarl.parallel import groups, megatron_patches, platform
from megarl.preflight import invariance
from megarl.preflight.invariance import Case
from tests.nccl_semantics import nccl_over_gloo

DEEP = Qwen3Config(**(invariance.SHAPE | {"num_hidden_layers": 8}), tie_word_embeddings=True)
MODELS = {**invariance.MODELS, "deep": DEEP}
CASES = {
    **invariance.CASES,
    "deep tp1": Case("deep"),
    "pp4": Case(knobs={"pp_size": 4}),
    "pp4 vpp2": Case("deep", {"pp_size": 4, "vpp_size": 2}),
    "cp2 pp2": Case(knobs={"cp_size": 2, "pp_size": 2}),
    "moe tp2 ep2": Case("moe", {"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "ep_size": 2, "etp_size": 2}),
}


def reference_of(name: str) -> str:
    """Name of the case of the single process, on the same model and batch."""
    return "deep tp1" if CASES[name].model == "deep" else CASES[name].reference


def main(work: Path, limit_s: float, names: list[str]) -> None:
    torch.set_num_threads(1)
    emulation = nccl_over_gloo.install(work, limit_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "collective_backend", lambda: "nccl")
        patch.setattr(platform, "takes_gpu_options", lambda: True)
        megatron_patches.prepare()
        for name in names:
            actor = invariance.build_actor(CASES[name], work / CASES[name].model)
            # Ranks that have sent their part go on to the world's first collective, while rank 0 still receives.
            before = set(emulation.communicators)
            weights = {f"weight {name}": tensor.clone() for name, tensor in actor.named_weights()}
            pairs = [key for key in set(emulation.communicators) - before if key[1] is not None]
            assert not pairs, f"to gather weights, NCCL would connect pairs of ranks: {pairs}"
            dist.all_reduce(torch.ones(1))
            figures = invariance.measure(actor, invariance.batch_of(actor, CASES[name], work))
            if dist.get_rank() == 0:
                save_file(figures | weights, work / f"{name}.safetensors")
            del actor
            groups.leave_layout()
        groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
