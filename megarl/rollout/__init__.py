"""Rollouts: SGLang servers, the client that speaks to them, workflows and the executor that drives them."""
