"""SGLang with a mocked GPU: arguments that it resolves for the recipes, and the receiver's verdict on its models.

Usage: gpu_backends_worker.py CHECKPOINT...

Prints lines of JSON: a verdict for each checkpoint and architecture, then the resolutions and the table of
docs/make_gpu_backends.py, which says what its mock covers. A model is built by SGLang's own classes for CUDA, with its
loader's post-processing, in CPU memory; `torch.cuda.Stream` is a mock.
Not covered: kernels, tensors in GPU memory, and packages that are absent here, such as sgl_kernel and flashinfer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarl import cli
from megarl.cpu.sglang_launch import MissingFinder
from megarl.families import FAMILIES, decoder
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_parameters import LayoutError, check_plain, live_fragments
from megarl.rollout.servers import gpu_backends
from tests.held_ports import held_port

ROOT = Path(__file__).parents[2]
ON_GPU = ("cuda", "cutlass")  # packages that SGLang's model classes for CUDA import
RUN = cli.composed(["+experiment=gsm8k_grpo"])
spec = importlib.util.spec_from_file_location("make_gpu_backends", ROOT / "docs" / "make_gpu_backends.py")
assert spec is not None
assert spec.loader is not None
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def built(checkpoint: Path, dtype: str) -> torch.nn.Module:
    """The model of a checkpoint's config as SGLang builds it for the arguments that megarl passes."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    arguments = table.resolved(
        dataclasses.replace(RUN, server=dataclasses.replace(RUN.server, dtype=dtype)), checkpoint
    )
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(arguments, role="scheduler", ranks=ranks)
    port = held_port()
    with mock.patch.object(parallel_state, "is_cuda_alike", return_value=False):  # groups of CPU tensors
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    initialize_moe_config()
    model_config = ModelConfig.from_server_args(arguments)
    yarn = functools.partial(factory.DeepseekScalingRotaryEmbedding, device="cpu")  # its default is "cuda"
    with (
        set_default_torch_dtype(model_config.dtype),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(factory, "DeepseekScalingRotaryEmbedding", yarn),
    ):
        model = loader._initialize_model(model_config, LoadConfig(), None)
    check_plain(model)
    loader.DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
    return model


def verdict(checkpoint: Path, architecture: str, dtype: str, ours: bool) -> dict[str, Any]:
    """The receiver's answer to the model. `ours`: with megarl's choice of backends, else with SGLang's own."""
    if not ours:
        gpu_backends.arguments = lambda *_: {}
    os.environ.update(gpu_backends.environment(dtype) if ours else {})
    with table.mocked_gpu(architecture):
        try:
            model = built(checkpoint, dtype)
            check_plain(model)
            fragments = list(live_fragments(model.named_parameters(), Geometry.of(model.config, 0, 1, 1)))
        except LayoutError as error:
            return {"refused": str(error)}
        dtypes = sorted({str(fragment.view.dtype) for fragment in fragments})
        told = {"fragments": len(fragments), "dtypes": dtypes, "routers": routers(model)}
        return told | ({"norm": norm(model)} if dtype == "float32" else {})


def routers(model: torch.nn.Module) -> list[tuple[int, int, str]]:
    """Layer, experts a token, and format of the output of each router that may record its choice."""
    from sglang.srt.layers.moe.topk import TopK

    configs = [module.topk_config for module in model.modules() if isinstance(module, TopK)]
    return [(c.layer_id, c.top_k, c.output_format.name) for c in configs if c.allow_routed_experts_capture]


def norm(model: torch.nn.Module) -> str:
    """Runs the model's last norm: `float32` if torch computes it, else the name of the kernel that SGLang called."""
    model.model.norm.weight.data.fill_(0.0 if decoder(model.config).zero_centered_norms else 1.0)
    hidden = torch.arange(12.0).reshape(3, 4).repeat(1, model.config.hidden_size // 4)
    try:
        normed = model.model.norm(hidden)
    except RuntimeError as error:  # from the stand-in of sgl_kernel
        return str(error).partition(" ")[0]
    expected = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=model.config.rms_norm_eps)
    torch.testing.assert_close(normed, expected)
    return str(normed.dtype).removeprefix("torch.")


def in_child(*case: Any) -> dict[str, Any]:
    """The verdict from a forked process: SGLang keeps its arguments and groups in globals."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(verdict(*case)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{case} ended with status {status}"
    return json.loads(told)


def main() -> None:
    logging.disable(logging.WARNING)
    table.prepare()
    sys.meta_path.append(MissingFinder([name for name in ON_GPU if importlib.util.find_spec(name) is None]))
    with table.mocked_gpu("sm90"):
        importlib.import_module("sglang.srt.models.registry").import_model_classes("sglang.srt.models")
    cases = []
    for path in map(Path, sys.argv[1:]):
        family = json.loads((path / "config.json").read_text())["model_type"]
        experts = FAMILIES[family].experts
        cases += [(family, path, name, "bfloat16", True) for name in (table.ARCHITECTURES if experts else ["sm100"])]
        if family != "gpt_oss":  # SGLang asks for a backend with sinks, and torch_native has none (model_hook.py:538)
            cases += [(family, path, "sm100", "float32", True)]
        cases += [(family, path, "sm100", dtype, False) for dtype in ("bfloat16", "float32")]
    for family, *case in cases:
        told = {"family": family, "architecture": case[1], "dtype": case[2], "ours": case[3]}
        print(json.dumps(told | in_child(*case)), flush=True)
    entries = table.resolutions()
    print(json.dumps({"entries": entries, "table": table.render(entries)}), flush=True)


if __name__ == "__main__":
    main()
