"""Everything that stands in for a GPU on a laptop: float32 kernels and layers, SGLang on CPU."""
