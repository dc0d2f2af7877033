"""Fused operations on packed tokens: log-probs, advantages, policy loss. C++ and CUDA kernels behind checked calls.

`logprob`, `advantage`, `loss` and `index` are the public faces, `reference` holds a plain-torch twin of each,
`kernels` is the one file that hands memory to the compiled module. `row_invariant` has what a deterministic run needs.
"""
