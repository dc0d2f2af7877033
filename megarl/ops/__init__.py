"""Fused operations on packed tokens: log-probs, advantages, policy loss. C++ and CUDA kernels behind checked calls.

`logprob`, `advantage` and `loss` are the public modules. `torch_twins` has the same operations in plain torch.
`row_invariant` has the operations of a deterministic run.
"""
