"""The knobs of the machines that a run is planned for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.knobs import UserError, knob


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a run is planned for; `megarl.preflight` lays it out on them."""

    gpus_per_node: int = knob(0, "GPUs of a node; 0: everything runs on the CPUs of this machine")
    gpu_memory_gib: float = knob(80.0, "memory of a GPU in GiB")
    network_gb_s: float = knob(50.0, "bandwidth of a GPU's network link, GB/s each way; for the time of a weight sync")
    gpu_tflops: float = knob(989.0, "dense bfloat16 peak of a GPU in TFLOP/s, for expected times; 989 is an H100 SXM")
    gpu_memory_gb_s: float = knob(3350.0, "bandwidth of a GPU's memory in GB/s, for expected times; an H100 SXM's")
    train_utilisation: float = knob(0.35, "part of gpu_tflops that training and prefill are expected to reach")
    decode_utilisation: float = knob(0.5, "part of gpu_memory_gb_s that decoding is expected to reach")
    mean_length: float = knob(0.5, "expected mean length of prompts and completions, as a part of the longest allowed")

    def __post_init__(self) -> None:
        if self.gpus_per_node < 0:
            raise UserError(
                f"cluster.gpus_per_node={self.gpus_per_node} must be at least 0; 0 is a machine without GPUs"
            )
        for name in ("gpu_memory_gib", "network_gb_s", "gpu_tflops", "gpu_memory_gb_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"cluster.{name}={getattr(self, name)} must be above 0")
        for name in ("train_utilisation", "decode_utilisation", "mean_length"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"cluster.{name}={getattr(self, name)} must lie above 0 and at most at 1")
