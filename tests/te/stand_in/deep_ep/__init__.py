"""Stand-in of DeepEP 2.1 (`sgl-deep-ep`) for the CPU: its names and signatures, over gloo.

Covers the dispatch and the combination of Megatron's flex dispatcher on one node: which tokens go to which ranks, their
order, and sums on the way back. It computes any dtype, where the real kernels take bfloat16. Does not cover kernels,
buffers, NVLink and RDMA, streams and events.
"""

from deep_ep.buffers.legacy import Buffer  # noqa: F401
