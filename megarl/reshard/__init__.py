"""Weights from the trainer into the live SGLang servers: sent, applied, and proven equal."""
