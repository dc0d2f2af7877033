"""Compares rollout log-probs with the trainer's, an end-to-end proof of a weight sync that reads no digest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class LogprobMismatchError(RuntimeError):
    """The servers' samples do not follow from the weights that they were sent."""


def check_first_logprobs(difference: float, bound: float, version: int, servers: Sequence[str]) -> None:
    """Raises LogprobMismatchError if `difference` exceeds `bound` or is not a number.

    `difference` is the mean |trainer - rollout log-prob|, in nats, of the first tokens sampled under `version`.
    """
    if not difference <= bound:
        raise LogprobMismatchError(
            f"the first tokens of version {version} from {', '.join(servers) or 'the servers'} have log-probs that "
            f"differ from the trainer's by {difference:.3g} on average, above reshard.max_logprob_diff={bound:g}: the "
            "servers do not compute what the trainer does; compare dtypes and SGLang's arguments, or raise the bound"
        )


def check_equal_logprobs(trainer: Tensor, rollout: Tensor) -> None:
    """Raises LogprobMismatchError unless both are equal in every bit; same tokens, same weights."""
    if different := int((trainer != rollout).sum()):
        largest = float((trainer - rollout).abs().max())
        raise LogprobMismatchError(
            f"deterministic=true, but {different} of {trainer.numel()} log-probs differ between rollout and trainer, "
            f"by up to {largest:.3g}: this machine's matrix products, or arguments under sglang, depend on the batch; "
            "leave out such arguments, or set it to false"
        )
