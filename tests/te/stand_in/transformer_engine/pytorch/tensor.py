"""Classes that Megatron asks for by `isinstance`; no tensor of the stand-in is one."""


class QuantizedTensor:
    """Base class of quantized tensors."""
