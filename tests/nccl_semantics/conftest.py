"""Starts the ranks of this folder's tests quickly, from a warm process, under the real launcher."""

from tests.distributed.conftest import warm_ranks

__all__ = ["warm_ranks"]
