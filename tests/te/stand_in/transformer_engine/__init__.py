"""Stand-in of Transformer Engine for the CPU: Python signatures of the real package, arithmetic of torch.

Covers the modules and functions through which Megatron-core 0.19.2 runs megarl's `te` backend: linear layers with their
tensor and sequence parallel collectives, marks on parameters and accumulation into `main_grad`; grouped linear
layers; sorting of tokens by expert; norms; attention over packed sequences with grouped heads and context parallelism
in zigzag order; rotary positions; SwiGLU; FusedAdam and the norm of gradients; the router's product; FP8 by rounding of
factors (`fp8.py`). It offloads activations by layers. Signatures come from `transformer_engine.json` of `tests/te`,
which was read from the real package. Arguments that the stand-in does not compute are refused.

Does not cover kernels, their rounding and their choice (flash-attn, cuDNN), streams, copies to the host, overlap of
communication, CUDA graphs and the fused MLP. It computes float32 everywhere; on a GPU fast attention takes 16 bits
only.
"""

from transformer_engine import common, pytorch  # noqa: F401
from transformer_engine.signatures import RECORD

__version__ = RECORD["versions"]["transformer_engine"]
