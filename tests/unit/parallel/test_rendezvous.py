"""Processes on several machines find each other through a folder, and listen on one interface only."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from megarl.knobs import UserError
from megarl.parallel import rendezvous

ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth1	00000000	0100000A	0003	0	0	100	00000000	0	0	0
ib0	00000000	0200000A	0003	0	0	50	00000000	0	0	0
eth0	0000000A	00000000	0001	0	0	0	00FFFFFF	0	0	0
"""


def test_a_published_text_is_awaited_and_read_whole(tmp_path: Path) -> None:
    later = threading.Timer(0.3, rendezvous.publish, (tmp_path, "server_0", "10.0.0.1:20000"))
    later.start()
    assert rendezvous.awaited(tmp_path, "server_0", 300) == "10.0.0.1:20000"
    later.join()
    assert [path.name for path in tmp_path.iterdir()] == ["server_0"]


def test_a_missing_text_is_reported_after_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"nobody published .*/trainer within 0\.2 s"):
        rendezvous.awaited(tmp_path, "trainer", 0.2)


def test_the_interface_is_the_default_routes_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(rendezvous, "ROUTES", tmp_path / "route")
    monkeypatch.setattr(rendezvous, "_ipv4_addresses", lambda: {"lo": "127.0.0.1", "ib0": "10.0.0.7"})
    monkeypatch.setenv(rendezvous.JOB_FOLDER, str(tmp_path))
    monkeypatch.delenv(rendezvous.INTERFACE, raising=False)
    assert (rendezvous.interface(), rendezvous.own_address()) == ("ib0", "10.0.0.7")
    monkeypatch.setenv(rendezvous.INTERFACE, "lo")
    assert rendezvous.own_address() == "127.0.0.1"
    monkeypatch.setenv(rendezvous.INTERFACE, "eth7")
    with pytest.raises(UserError, match=r"MEGARL_INTERFACE=eth7 has no IPv4 address on .*; choose one of lo, ib0"):
        rendezvous.interface()


def test_without_a_job_the_address_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rendezvous.JOB_FOLDER, raising=False)
    monkeypatch.setenv(rendezvous.INTERFACE, "no such")
    assert rendezvous.own_address() == "127.0.0.1"


def test_ranks_share_a_store_that_listens_only_on_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rendezvous.JOB_FOLDER, str(tmp_path))
    monkeypatch.setenv(rendezvous.INTERFACE, "lo")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    stores = []
    timeout = timedelta(seconds=300)
    join = threading.Thread(target=lambda: stores.append(rendezvous.ranks_store(tmp_path, 1, 2, timeout)))
    join.start()
    time.sleep(0.2)  # rank 1 starts first and waits
    store = rendezvous.ranks_store(tmp_path, 0, 2, timeout)
    join.join(300)
    stores[0].set("from rank 1", "here")
    assert store.get("from rank 1") == b"here"
    host, port = (tmp_path / rendezvous.TRAINER).read_text().split(":")
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == int(port)] == [host] == ["127.0.0.1"]
