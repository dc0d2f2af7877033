"""One virtual Slurm cluster, shared by all tests here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_cluster import Cluster, missing, running


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running(Path(folder)) as cluster:
        yield cluster
