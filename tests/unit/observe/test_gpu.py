"""The log line of GPU memory."""

from __future__ import annotations

import logging

import pytest
import torch

from megarl.observe.gpu import log_gpu_stats


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_the_host_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megarl.observe.gpu"):
        log_gpu_stats("ref logp")
    (record,) = caplog.records
    place, memory = record.args  # type: ignore[misc]
    assert place == "ref logp"
    assert 0.05 < float(memory) < 100  # torch alone takes more than the lower bound
    assert record.getMessage().endswith(" GiB of host memory")
