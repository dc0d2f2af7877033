"""Steps of the GPU acceptance for a number of GPUs: what each proves, its command and its deadline."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET_S = 1200.0  # of the whole acceptance
GPU_COUNTS = (1, 2, 8)
JSON_LINES, JUNIT = "json", "junit"  # forms of a step's figures


@dataclass(frozen=True)
class Step:
    """One command. The runner adds the option that names the file of its figures."""

    name: str
    proves: str
    command: tuple[str, ...]
    deadline_s: float
    figures: str = ""  # JSON_LINES, JUNIT or none
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""  # the reason, if this machine cannot run it

    def with_figures(self, path: Path) -> list[str]:
        """The command, with its figures written to `path`."""
        option = {JSON_LINES: ["--json", str(path)], JUNIT: [f"--junitxml={path}"], "": []}
        return [*self.command, *option[self.figures]]

    def shown(self) -> str:
        """The command as a shell takes it, with paths from the repository's root."""
        words = ["python" if word == sys.executable else word.replace(f"{ROOT}/", "") for word in self.command]
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(words)])


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for. `packages` are the optional parts it has."""

    gpus: int  # 0: the plan's steps run on the CPU, with small sizes
    packages: frozenset[str]  # of OPTIONAL_PARTS

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


OPTIONAL_PARTS = frozenset({"compute-sanitizer", "transformer_engine"})
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
NO_GPU = "needs a GPU"


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Command of a script in this folder's parent."""
    return (sys.executable, str(ROOT / "benchmarks" / name), *arguments)


def plan(machine: Machine, model: str = "") -> list[Step]:
    """Steps in their order: those that the others stand on first, the slow sanitizer last.

    `model` is a folder of a HF checkpoint for the GRPO runs; without it they take a random one.
    """
    return [
        *_foundation(machine),
        _layers(machine),
        *_kernel_benchmarks(machine),
        *_transports(machine),
        *_runs(machine, model),
        _deterministic(machine, model),
        _update(machine),
        *_utilisation(machine),
        *_sanitizer(machine),
    ]


def _foundation(machine: Machine) -> list[Step]:
    """The environment, the build, and the kernels' tests on the device."""
    cuda = "1" if machine.gpus else "auto"
    on_cpu = ("test_logprob_values.py", "test_advantages.py", "test_policy_loss.py")
    tests = ("tests/gpu",) if machine.gpus else tuple(f"tests/kernels/{name}" for name in on_cpu)
    against = "the CPU's kernels and the float64 oracle" if machine.gpus else "the float64 oracle"
    # The emulator's cases of tests/gpu run without a GPU too: `make test` has them.
    select = ("-k", "not emulat") if machine.gpus else ()
    return [
        Step("doctor", "nothing that megarl needs is missing", (sys.executable, "-m", "megarl.doctor"), 60),
        Step(
            "build",
            "the kernels compile on this machine and are linked into megarl/_C",
            (sys.executable, str(ROOT / "setup.py"), "build_ext", "--inplace"),
            300,
            environment={"MEGARL_CUDA": cuda},
        ),
        Step("kernels", f"every kernel agrees with {against}", (*PYTEST, *tests, *select), 240, JUNIT),
    ]


def _sanitizer(machine: Machine) -> list[Step]:
    """NVIDIA's checker over a subset of the kernels' tests; everything runs tens of times slower under it."""
    reason = "" if machine.gpus else NO_GPU
    if machine.gpus and "compute-sanitizer" not in machine.packages:
        reason = "compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
    tools = {
        "memcheck": "no kernel reads or writes outside its tensors",
        "racecheck": "no two threads of a block race for shared memory",
    }
    subset = (*PYTEST, "tests/gpu", "-k", "(extreme or gae or policy_loss) and not emulat and not 2_to_the")
    return [
        Step(
            f"compute-sanitizer {tool}",
            proves,
            ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *subset),
            240,
            JUNIT,
            # Each tensor is an allocation of its own, so that the checker knows its bounds.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            reason,
        )
        for tool, proves in tools.items()
    ]


def _layers(machine: Machine) -> Step:
    """Transformer Engine's layers against torch's; on the CPU its own layers."""
    candidate = ("te", "bfloat16") if machine.gpus else ("cpu", "float32")
    shape = () if machine.gpus else ("--hidden", "128", "--layers", "2", "--vocab", "512")
    missing = machine.gpus and "transformer_engine" not in machine.packages
    return Step(
        f"backend {candidate[0]}",
        f"log-probs and gradients of backend={candidate[0]} are as near to float32 as those of backend=torch",
        script("acceptance/layer_backends.py", "--candidate", *candidate, *shape),
        150,
        JSON_LINES,
        skip="Transformer Engine is not installed: requirements/build_gpu_packages.sh" if missing else "",
    )


def _kernel_benchmarks(machine: Machine) -> list[Step]:
    """Scripts that time one kernel on a device."""
    small = not machine.gpus
    sizes = {
        "logprob": ("--tokens 4096", "--tokens 64 --vocab 1000 --dtype bfloat16 --rounds 1"),
        "linear_logprobs": (
            "--tokens 16384 --hidden 4096 --dtype bfloat16",
            "--tokens 256 --vocab 4000 --hidden 32 --rounds 1",
        ),
        "gae": ("", "--length 64"),
        "policy_loss": ("", "--tokens 1024"),
    }
    times = {
        "logprob": "log-prob and entropy against torch eager, torch.compile and Liger-Kernel",
        "linear_logprobs": "LM head and log-prob in chunks against all logits, and Liger-Kernel's",
        "gae": "packed GAE against a loop over time",
        "policy_loss": "the one-pass policy loss against torch eager",
    }
    return [
        Step(
            f"benchmark {name}",
            f"time of {what}",
            script(f"{name}.py", "--device", machine.device, *sizes[name][small].split()),
            240 if name == "logprob" else 90,
            JSON_LINES,
        )
        for name, what in times.items()
    ]


def _transports(machine: Machine) -> list[Step]:
    """A weight sync of a random model from trainer ranks to a server, by each transport, read back and compared."""
    gpus = machine.gpus
    shape = "--hidden 128 --layers 2" if not gpus else "--hidden 2048 --layers 16 --dtype bfloat16"
    steps = []
    for transport, needed in (("gloo", 0), ("shm", 0), ("disk", 0), ("cuda_ipc", 1), ("nccl", 2)):
        shared = transport == "cuda_ipc" or gpus == 1
        tp = gpus if shared and gpus < 8 else gpus // 2
        options = f"--device {machine.device} --transport {transport} --tp {max(1, tp)} --rounds 3 {shape}"
        enough = NO_GPU if needed == 1 else f"needs {needed} GPUs, as NCCL allows one rank a GPU; there are {gpus}"
        steps.append(
            Step(
                f"transport {transport}",
                f"weights reach a server of tp {max(1, tp)} by {transport} and are proven equal there",
                script("reshard.py", *options.split(), *(["--same-gpus"] if shared and gpus else [])),
                240 if transport == "gloo" else 150,  # the first server compiles SGLang's kernels
                JSON_LINES,
                skip="" if gpus >= needed else enough,
            )
        )
    return steps


def _runs(machine: Machine, model: str) -> list[Step]:
    """Short GRPO runs: trainer and servers on GPUs of their own, and in turn on the same ones."""
    gpus = machine.gpus
    chosen = ("--model", model) if model else ()
    apart = "" if gpus != 1 else "needs 2 GPUs: one trains, one samples"
    layouts = {"apart": apart, "colocated": "" if gpus else NO_GPU}
    where = {"apart": "on GPUs of their own", "colocated": "in turn on the same GPUs"}
    return [
        Step(
            f"grpo {layout}",
            f"trainer and servers {where[layout] if gpus else 'on the CPU'} learn, and agree on log-probs",
            script("acceptance/grpo_run.py", "--gpus", str(gpus), "--layout", layout, *chosen),
            240,
            JSON_LINES,
            skip=reason,
        )
        for layout, reason in layouts.items()
    ]


def _deterministic(machine: Machine, model: str) -> Step:
    """Two runs of a few steps that must have the same bits."""
    layout = "colocated" if machine.gpus == 1 else "apart"
    chosen = ("--model", model) if model else ()
    return Step(
        "grpo deterministic",
        "two runs of 10 steps with deterministic=true have the same bits; their servers' distance from the trainer",
        script("acceptance/deterministic_run.py", "--gpus", str(machine.gpus), "--layout", layout, *chosen),
        450,
        JSON_LINES,
    )


def _update(machine: Machine) -> Step:
    sizes = {
        "cuda": "--hidden 1024 --layers 8 --prompts 8 --tokens 16384 --dtype bfloat16",
        "cpu": "--hidden 128 --layers 1 --vocab 500 --prompts 1 --samples 2 --max-new 64 --rounds 1",
    }
    return Step(
        "benchmark ppo_update",
        "time of the policy update against transformers with padding",
        script("ppo_update.py", *sizes[machine.device].split()),
        180,
        JSON_LINES,
    )


def _utilisation(machine: Machine) -> list[Step]:
    """MFU of an update of two models. Where the whole model does not fit the GPUs, its first layers run alone.

    Adam's moments and the float32 weights and gradients of Qwen3-30B-A3B take 60 GiB of each of eight GPUs: with half
    of its layers they are on the GPU, and the update waits for no host.
    """
    gpus = machine.gpus
    shared = "actor.backend=te actor.max_tokens_per_mb=8192"
    batch = f"--prompts {max(4, 2 * gpus)} --samples 8 --prompt 256 --completion 1024 --max-new 4096"
    dense = {1: "", 2: "parallel.tp_size=2 parallel.sequence_parallel=true"}
    dense[8] = f"{dense[2]} parallel.dp_size=4"
    models = {
        "Qwen3-8B": (dict(zip(GPU_COUNTS, (8, 16, 0), strict=True)), f"model=qwen3_8b {dense.get(gpus, '')}"),
        "Qwen3-30B-A3B": (
            dict(zip(GPU_COUNTS, (4, 8, 24), strict=True)),
            f"model=qwen3_30b_a3b actor.recompute=selective parallel.dp_size={gpus} parallel.ep_size={gpus}",
        ),
    }
    missing = gpus and "transformer_engine" not in machine.packages
    steps = []
    for model, (layers, knobs) in models.items():
        options = f"{batch} --layers {layers[gpus]} {shared} {knobs}" if gpus else "--warm 1 --updates 1"
        on_cpu = "" if model == "Qwen3-8B" else NO_GPU  # one of the two runs there, on the bundled model
        reason = "Transformer Engine is not installed: requirements/build_gpu_packages.sh" if missing else ""
        steps.append(
            Step(
                f"MFU {model}",
                f"share of the GPUs' peak that an update of {model if gpus else 'the bundled model'} reaches",
                script("update_mfu.py", *options.split()),
                300,
                JSON_LINES,
                skip=reason if gpus else on_cpu,
            )
        )
    return steps


def overrides(gpus: int, layout: str, steps: int) -> list[str]:
    """Hydra overrides of a GRPO run: ranks and servers that fill the machine's GPUs.

    Apart, half of the GPUs train. Co-located, all train and all serve. Two ranks form a tensor-parallel group where
    there are eight GPUs.
    """
    if gpus and not (gpus > 1 or layout == "colocated"):
        raise ValueError(f"layout={layout} needs 2 GPUs or more, not {gpus}")
    tp = 2 if gpus == 8 else 1
    ranks = max(1, gpus if layout == "colocated" else gpus // 2)
    shared = [
        "+experiment=gsm8k_grpo", f"total_train_steps={steps}", "actor.optimizer.warmup_steps=0",
        "actor.optimizer.lr_decay_style=constant", "algorithm.n_minibatches=1", "evaluator.every_steps=0",
        "evaluator.at_start=false", "evaluator.at_end=false", "saver.every_steps=0", "saver.export_hf=false",
        "rewards.functions=[acceptance.even_tokens.reward]", "train_dataset.max_length=256",
        "valid_dataset.max_length=256",
    ]  # fmt: skip
    if not gpus:
        return [*shared, "gconfig.n_samples=4", "train_dataset.batch_size=8"]
    placed = [
        f"parallel.tp_size={tp}", f"parallel.dp_size={ranks // tp}", f"server.tp_size={tp}",
        f"server.n_servers={ranks // tp}", f"cluster.gpus_per_node={gpus}", "actor.dtype=bfloat16",
        "server.dtype=bfloat16", "parallel.timeout_s=240", "rollout.batch_timeout_s=120",
        f"reshard.transport={'cuda_ipc' if layout == 'colocated' else 'nccl'}",
    ]  # fmt: skip
    return [*shared, *placed, *(["server.colocate=true"] if layout == "colocated" else [])]


def benchmarks_on_path() -> dict[str, str]:
    """Environment in which `acceptance.even_tokens` and megarl can be imported."""
    places = [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
