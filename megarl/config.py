"""The configuration of a run: the knobs of its stages joined, and the run's own.

A stage's knobs live in a frozen dataclass beside the code that reads them. The knobs here have readers in the trainer,
the launchers and preflight. YAML in `configs/` holds differences from the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.algorithms import AlgorithmConfig, GRPOConfig, algorithm_of
from megarl.data.config import CurriculumConfig, DataConfig, DatasetConfig
from megarl.knobs import MAX_COUNT, MAX_SECONDS, MAX_SEED, check_ranges, knob
from megarl.observe.logger import LoggerConfig
from megarl.observe.run_folder import check_name
from megarl.parallel import determinism, platform
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.rewards.pool import RewardConfig
from megarl.rollout.config import RolloutConfig
from megarl.rollout.evaluate import EvaluatorConfig
from megarl.rollout.servers.server_config import SGLangServerConfig, check_numbers
from megarl.types import GenerationHyperparameters

METHODS = ("rl", "sft", "preference")
LAUNCHERS = ("local", "slurm", "ray")
REFERENCE_MODES = ("precompute", "online")
TEACHER_SOURCES = ("none", "trainer", "server", "policy")


@dataclass(frozen=True)
class ReferenceConfig:
    """Source of the start policy's log-probs, for the preference methods."""

    mode: str = knob(
        "precompute",
        "precompute: once, before the first step, kept for later runs; online: a frozen model beside",
        choices=REFERENCE_MODES,
    )

    def __post_init__(self) -> None:
        check_ranges(self, "reference")


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher of `algorithm=opd`."""

    source: str = knob(
        "none",
        "trainer (a frozen model in the trainer's ranks), server (SGLang, without weight syncs) or policy (the student "
        "itself, which reads a hint)",
        choices=TEACHER_SOURCES,
    )
    path: str = knob("", "local folder of the teacher's HF checkpoint, or a hub name", path=True)
    hint: str = knob(
        "",
        "text that the teacher alone reads at the end of the last user message; {COLUMN} stands for a prompt's column",
    )
    max_prompt_tokens: int = knob(
        0, "with a hint: tokens of the teacher's longest prompt; longer ones are rejected", least=0, most=MAX_COUNT
    )
    addresses: list[str] = knob(
        factory=list, meaning="source=server: host:port of servers that run already; empty: the run starts its own"
    )
    n_servers: int = knob(1, "source=server: servers that the run starts", least=1, most=1024)
    tp_size: int = knob(1, "tensor-parallel ranks of one of them", least=1, most=1024)
    max_requests: int = knob(16, "requests to teacher servers under way at once", least=1, most=MAX_COUNT)
    wait_s: float = knob(
        600.0, "seconds until a teacher server that is lost must answer again; later the run ends", above=0,
        most=MAX_SECONDS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_ranges(self, "teacher")


@dataclass(frozen=True)
class SaverConfig:
    """Checkpoints during a run, and the export at its end."""

    every_steps: int = knob(
        50, "steps between checkpoints; 0 writes one only when the run ends or is stopped", least=0, most=MAX_COUNT
    )
    keep: int = knob(2, "checkpoints kept; older ones are removed", least=1, most=MAX_COUNT)
    asynchronous: bool = knob(True, "train on while a checkpoint is written, from a copy of the state on the host")
    timeout_s: float = knob(3600.0, "seconds that the writing of a checkpoint may take", above=0, most=MAX_SECONDS)
    export_hf: bool = knob(True, "write the trained model as a HF checkpoint to hf/ at the end")
    keep_batches: int = knob(
        0,
        "batches of the last steps kept for `megarl.replay`; 0 is none; every_steps of them reach back to a checkpoint",
        least=0,
        most=MAX_COUNT,
    )
    batches_gb: float = knob(10.0, "GB that the kept batches may take; the oldest go first", above=0, most=1e6)

    def __post_init__(self) -> None:
        check_ranges(self, "saver")


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a run is planned for; launchers and `megarl.preflight` lay it out on them."""

    gpus_per_node: int = knob(0, "GPUs of a node; 0: everything runs on the CPUs of this machine", least=0, most=128)
    gpu_memory_gib: float = knob(80.0, "memory of a GPU in GiB", least=0.001, most=1e5)
    network_gb_s: float = knob(
        50.0,
        "bandwidth of a GPU's network link between nodes, GB/s each way; for times of syncs and of training",
        least=0.001,
        most=1e6,
    )
    node_gb_s: float = knob(
        450.0,
        "bandwidth between GPUs of a node, GB/s each way, for expected times; 450 is NVLink of an H100 SXM",
        least=0.001,
        most=1e6,
    )
    gpu_tflops: float = knob(
        989.0, "dense bfloat16 peak of a GPU in TFLOP/s, for expected times; 989 is an H100 SXM", least=0.001, most=1e6
    )
    gpu_memory_gb_s: float = knob(
        3350.0, "bandwidth of a GPU's memory in GB/s, for expected times; an H100 SXM's", least=0.001, most=1e6
    )
    train_utilisation: float = knob(
        0.35, "part of gpu_tflops that training and prefill are expected to reach", least=0.001, most=1
    )
    decode_utilisation: float = knob(
        0.5, "part of gpu_memory_gb_s that decoding is expected to reach", least=0.001, most=1
    )
    mean_length: float = knob(
        0.5, "expected mean length of prompts and completions, as a part of the longest allowed", least=0.001, most=1
    )

    def __post_init__(self) -> None:
        check_ranges(self, "cluster")


@dataclass(frozen=True)
class Config:
    """One run."""

    experiment_name: str = knob("unnamed", "name of the run's folder under run_root", path=True)
    method: str = knob(
        "rl", "rl (rollouts and policy updates), sft (supervised) or preference (DPO and its kin)", choices=METHODS
    )
    seed: int = knob(1, "seed of the data order and of the sampling streams", least=0, most=MAX_SEED)
    total_train_steps: int = knob(
        100, "optimizer batches to train on; learning-rate schedules end there", least=1, most=MAX_COUNT
    )
    run_root: str = knob("runs", "folder that run folders are made in", path=True)
    deterministic: bool = knob(
        False,
        "method=rl, and slower: on CPU log-probs of rollout and trainer are equal in every bit, or the run stops; on "
        "GPUs each side repeats its own bits",
    )
    resume: str | None = knob(None, "run folder to go on from, at its last checkpoint", path=True)
    launcher: str = knob(
        "local", "what starts ranks and servers: local (this machine), slurm or ray", choices=LAUNCHERS
    )
    actor: EngineConfig = knob(factory=EngineConfig, meaning="the model that is trained")
    parallel: ParallelConfig = knob(factory=ParallelConfig, meaning="its layout over trainer ranks")
    algorithm: AlgorithmConfig = knob(factory=GRPOConfig, meaning="the algorithm, by its group: algorithm=dapo")
    critic_optimizer: OptimizerConfig = knob(factory=OptimizerConfig, meaning="Adam of PPO's critic")
    reference: ReferenceConfig = knob(factory=ReferenceConfig, meaning="the start policy of method=preference")
    teacher: TeacherConfig = knob(factory=TeacherConfig, meaning="the teacher of algorithm=opd")
    gconfig: GenerationHyperparameters = knob(factory=GenerationHyperparameters, meaning="how completions are sampled")
    data: DataConfig = knob(factory=DataConfig, meaning="how the rows of all data sets are prepared")
    train_dataset: DatasetConfig = knob(factory=DatasetConfig, meaning="prompts, examples or preferences to train on")
    valid_dataset: DatasetConfig = knob(factory=DatasetConfig, meaning="held-out rows of the same kind")
    curriculum: CurriculumConfig = knob(
        factory=CurriculumConfig, meaning="prompts left out by their measured difficulty"
    )
    rollout: RolloutConfig = knob(factory=RolloutConfig, meaning="the client of the rollout servers, and the workflow")
    rewards: RewardConfig = knob(factory=RewardConfig, meaning="how completions are scored")
    server: SGLangServerConfig = knob(factory=SGLangServerConfig, meaning="the rollout servers of a run")
    sglang: dict[str, Any] = knob(
        factory=dict, meaning="SGLang's own server arguments, passed through: +sglang.NAME=VALUE"
    )
    reshard: ReshardConfig = knob(factory=ReshardConfig, meaning="weights from the trainer to the servers")
    adapters: dict[str, list[str]] = knob(
        factory=dict,
        meaning="adapters trained at once on one frozen model, by name, each with its own knobs: "
        "+adapters.NAME=[KNOB=VALUE,...]; needs actor.lora.sync=adapters",
    )
    saver: SaverConfig = knob(factory=SaverConfig, meaning="checkpoints of the run")
    evaluator: EvaluatorConfig = knob(factory=EvaluatorConfig, meaning="held-out evaluation during the run")
    logger: LoggerConfig = knob(factory=LoggerConfig, meaning="where metrics go")
    cluster: ClusterConfig = knob(factory=ClusterConfig, meaning="the machines that the run is planned for")

    def __post_init__(self) -> None:
        check_name(self.experiment_name)

    @property
    def determinism(self) -> determinism.Determinism:
        """The form of `deterministic`, by where the trainer runs."""
        on_gpu = self.cluster.gpus_per_node > 0 or platform.takes_gpu_options()
        return determinism.choose(self.deterministic, max(self.parallel.tp_size, self.server.tp_size), on_gpu)


def longest_sequence(config: Config) -> int | None:
    """Tokens of the longest sequence that the run can train on; None if `train_dataset.max_length` is not set."""
    if config.train_dataset.max_length is None:
        return None
    return config.train_dataset.max_length + (config.gconfig.max_new_tokens if config.method == "rl" else 0)


def server_arguments(config: Config) -> dict[str, Any]:
    """SGLang's ServerArgs that the servers start with beside their knobs: the user's, and those that knobs imply."""
    head = {"enable_fp32_lm_head": True} if config.actor.float32_head else {}
    routes = {"enable_return_routed_experts": True} if replays_rollout(config) else {}
    return {**head, **config.sglang, **routes}


def server_ep_size(config: Config) -> int:
    """Expert-parallel ranks of a server.

    Raises:
        UserError: `sglang.ep_size` is no number of ranks.
    """
    check_numbers(config.sglang)
    return int(config.sglang.get("ep_size") or 1)


def replays_rollout(config: Config) -> bool:
    """True if servers return the experts of their tokens, which the trainer replays."""
    return config.method == "rl" and getattr(config.algorithm, "routing_replay", "off") == "rollout"


def is_paired(config: Config) -> bool:
    """True if rows are pairs of completions, which stay in one microbatch."""
    return config.method == "preference" and getattr(algorithm_of(config.algorithm), "paired", False)
