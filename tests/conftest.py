"""What every test stands on: tiny checkpoints in the families' own formats, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from xdist.scheduler import LoadScopeScheduling

from megarl.parallel import platform
from tests import clocks, fuzzing, guardian, hangs, rows
from tests.latent_shapes import LATENT, SIGMOID_EXPERTS, YARN
from tests.running_tests import RunningTests

# A job in the background may be started with Ctrl-C ignored, and its children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

fuzzing.repeat_examples()

# Where several processes share the suite (`make test`), one runs the whole of a file, and of files that use the same
# servers: what fixtures started is there once. Folders whose files take long come first.
SERVERS_OF = (
    ("tests/sglang/test_weights",),
    (
        "tests/sglang/test_routing",
        "tests/sglang/test_rollout",
        "tests/sglang/test_server",
        "tests/sglang/test_supervision",
    ),
    ("tests/slurm/",),
    ("tests/fake_cuda/",),
)
FOLDERS = (
    "seeds",
    "sglang",
    "e2e",
    "slurm",
    "distributed",
    "nccl_semantics",
    "te",
    "simt",
    "gpu",
    "kernels",
    "fake_cuda",
    "unit",
)


STALLS = pytest.StashKey[clocks.Stalls]()


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return next((files[0] for files in SERVERS_OF if file.startswith(files)), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-options", action="store_true", help="set up models and servers as on GPUs, on the CPU")
    parser.addoption("--stall", type=float, metavar="SECONDS", help="lines that read a clock stop for so long first")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the rows of long tables (`rows.py`). --gpu-options answers the third question of `platform.py` as a GPU.

    This covers options of models, pipelines and servers in the tests' own processes. Tensors stay on the CPU, Megatron
    keeps its patches, and collectives go over gloo. Processes that a test starts by a command take the CPU's options.
    """
    config.addinivalue_line("markers", "long: takes minutes and rarely fails; left to `make test-long`")
    config.addinivalue_line(
        "markers", "cpu_options(reason): the test is about the CPU's options; --gpu-options skips it"
    )
    quick = config.option.markexpr == "not long"
    os.environ[rows.VARIABLE] = "some" if quick else "all"
    if config.getoption("--gpu-options"):
        platform.takes_gpu_options = lambda: True
    if seconds := config.getoption("--stall"):
        config.stash[STALLS] = clocks.Stalls(seconds)
    config.pluginmanager.register(hangs.Hangs())
    if not hasattr(config, "workerinput"):  # its workers have a terminal reporter too, which nobody sees
        config.pluginmanager.register(RunningTests() if quick else RunningTests(fuzzing.LONG_LIMIT_S + 300))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if stalls := item.config.stash.get(STALLS, None):
        stalls.begin_test()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.nodeid.split("/")[1], len(order)))
    if config.getoption("--gpu-options"):
        for item in items:
            for marker in item.iter_markers("cpu_options"):
                item.add_marker(pytest.mark.skip(reason=f"about the CPU's options: {marker.args[0]}"))


def pytest_collection_finish() -> None:
    """Leaves what the modules and the thousands of tests consist of out of later collections of garbage."""
    gc.collect()
    gc.freeze()


FAMILY_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "gemma3_text": Gemma3TextConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "kimi_k2": DeepseekV3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
}
EXPERTS: dict[str, dict[str, Any]] = {  # what a mixture of experts has besides
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8},
    "deepseek_v3": {
        **SIGMOID_EXPERTS,
        **LATENT,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "moe_layer_freq": 1,
        "rope_parameters": YARN,
    },
    "glm4_moe": {
        **SIGMOID_EXPERTS,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {**SIGMOID_EXPERTS, **LATENT},
    "kimi_k2": {  # YaRN keeps the scale of rotated elements, and groups do not limit the choice of experts
        **SIGMOID_EXPERTS,
        **LATENT,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "moe_layer_freq": 1,
        "rope_parameters": {**YARN, "beta_fast": 1, "mscale": 1.0},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


DELTA_NET: dict[str, Any] = {  # 4 key heads and 8 value heads; every second layer has attention
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "full_attention_interval": 2,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 40}
EXPERTS["qwen3_next"] = {**EXPERTS["qwen3_moe"], **DELTA_NET, **SHARED_EXPERT}
EXPERTS["qwen3_5_text"] = DELTA_NET
EXPERTS["qwen3_5_moe_text"] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, **DELTA_NET, **SHARED_EXPERT
}  # fmt: skip
ZERO_CENTERED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # norms scale by 1 + their weight


def random_model(family: str, *, tied: bool, vocab_size: int = 343, seed: int = 0, **fields: Any) -> torch.nn.Module:
    """A random fp32 model: 2 layers, hidden 64, 4 heads on 2 KV heads. Norms and biases are random too."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        **({} if family == "qwen2" else {"head_dim": 16}),
        **EXPERTS.get(family, {}),
        **fields,
    }
    shape = {name: value for name, value in shape.items() if (name, value) != ("head_dim", None)}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family](**shape), dtype=torch.float32)
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            is_gain = "norm" in name and (family not in ZERO_CENTERED or "linear_attn" in name)
            parameter.copy_((1.0 if is_gain else 0.0) + 0.1 * torch.randn_like(parameter))
    return model.eval()


def save_model(family: str, model: torch.nn.Module, folder: Path) -> None:
    """Writes a model in its family's format. Kimi-K2's is DeepSeek-V3's under a name that transformers lacks."""
    model.save_pretrained(folder)
    if family == "kimi_k2":
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "model_type": family}))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("qwen3", tied=True, ...)`: the folder of a random model, written by transformers."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(family: str, **fields: Any) -> Path:
        key = (family, *sorted((k, str(v)) for k, v in fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            save_model(family, random_model(family, **fields), made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the session when a process that a test started is still there after the last test.

    Descendants inherit a mark in their environment, by which one whose parent is gone is found too. A session that is
    interrupted leaves them to its guardian.
    """
    os.environ[guardian.MARK] = mark = str(uuid.uuid4())
    guarding = guardian.start(mark)
    yield
    left = {*psutil.Process().children(recursive=True), *guardian.marked(mark)}
    # multiprocessing's own helpers end with this process, and so does the guardian
    left = {
        p
        for p in left
        if p.pid != guarding
        and not (told(p.ppid, 0) == os.getpid() and "multiprocessing" in " ".join(told(p.cmdline, [])))
    }
    _, alive = psutil.wait_procs(left, timeout=900)
    assert not alive, f"tests left processes behind: {[' '.join(told(p.cmdline, []))[:120] for p in alive]}"


def told(fact: Callable[[], Any], otherwise: Any) -> Any:
    """A fact of a process; `otherwise` where it has ended or is another user's."""
    try:
        return fact()
    except psutil.Error:
        return otherwise


@pytest.fixture(scope="session", autouse=True)
def no_sandbox_stays(nothing_is_left_behind: None) -> Iterator[None]:
    """Idle servers of the sandbox, which a run leaves for the next one, end with the tests."""
    yield
    if sandbox := sys.modules.get("megarl.sandbox"):
        sandbox.close()


@pytest.fixture(scope="module", autouse=True)
def no_world_stays() -> Iterator[None]:
    """A world that a module's tests made in this process ends with them."""
    yield
    if groups := sys.modules.get("megarl.parallel.groups"):
        groups.destroy()
