"""Waits for a key of the store: they watch meanwhile, end at the deadline, and print nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import PrefixStore, Store

from megarl.reshard.transfer.store import WATCH_S, AttemptDeadline, Deadline, join_store, open_store, read, write


@pytest.fixture(params=["server", "client", "prefix"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    served = open_store("127.0.0.1", 300.0)
    kinds: dict[str, Callable[[], Store]] = {
        "server": lambda: served,
        "client": lambda: join_store("127.0.0.1", served.port, 300.0),
        "prefix": lambda: PrefixStore("part", served),
    }
    yield kinds[request.param]()
    assert served.port  # it serves the client until here


def test_a_watched_wait_prints_nothing(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def watch() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            write(store, "key", [1, "two"])

    assert read(store, "key", Deadline(600), watch) == [1, "two"]
    assert looks == 4
    assert capfd.readouterr() == ("", "")


def test_a_value_that_is_there_needs_no_watch(store: Store) -> None:
    write(store, "key", 3)
    assert read(store, "key", Deadline(600), watch=lambda: pytest.fail("watched")) == 3


def test_a_value_of_another_thread_is_seen(store: Store) -> None:
    writer = threading.Timer(0.2, write, (store, "key", 4))
    writer.start()
    assert read(store, "key", Deadline(600), lambda: None) == 4
    writer.join()


def test_an_error_of_the_watch_ends_the_wait(store: Store) -> None:
    def watch() -> None:
        raise RuntimeError("the server has died")

    with pytest.raises(RuntimeError, match="the server has died"):
        read(store, "key", Deadline(600), watch)


@pytest.mark.parametrize("watch", [None, lambda: None], ids=["unwatched", "watched"])
def test_a_wait_ends_at_its_deadline(watch: Callable[[], None] | None, store: Store) -> None:
    with pytest.raises(TimeoutError, match=r"0\.3 s"):
        read(store, "key", Deadline(0.3), watch)


def test_a_wait_of_an_attempt_ends_once_the_trainer_has_ended_that(store: Store) -> None:
    deadline = AttemptDeadline(600.0, store, "7/verdict")
    assert deadline.left() > 300
    write(store, "7/verdict", {})
    time.sleep(2 * WATCH_S)  # it looks at the store now and then
    with pytest.raises(RuntimeError, match="the trainer has ended the attempt"):
        deadline.left()
    with pytest.raises(TimeoutError, match="deadline of 0 s passed"):
        AttemptDeadline(0.0, store, "8/verdict").left()
