"""Requests that follow each other on one connection, against a scripted peer."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from megarl.reshard.sync.http_pipeline import HttpPipeline
from megarl.reshard.sync.server_control import PendingCall
from megarl.reshard.transfer.store import Deadline

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[HttpPipeline, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = HttpPipeline(f"127.0.0.1:{listener.getsockname()[1]}", 300.0)
        peer, _ = listener.accept()
        with peer:
            yield connection, peer
        connection.close()


def test_requests_are_sent_before_earlier_ones_are_answered_and_answers_keep_their_order(
    pair: tuple[HttpPipeline, socket.socket],
) -> None:
    connection, peer = pair
    numbers = [connection.ask("POST", f"/{i}", {"X-Key": "k"}, b"{}", 300.0) for i in range(3)]
    requests = b""
    while requests.count(b"{}") < 3:
        requests += peer.recv(4096)
    assert requests.startswith(b"POST /0 HTTP/1.1\r\n")
    assert b"X-Key: k\r\n" in requests
    assert not connection.answered(numbers[0], 0.0)
    peer.sendall(OK + b"a0" + OK.replace(b"200 OK", b"400 Bad Request") + b"a1" + OK[:-3])
    assert connection.answered(numbers[1], 300.0)
    assert [connection.answer(n) for n in numbers[:2]] == [(200, b"a0"), (400, b"a1")]
    assert not connection.answered(numbers[2], 0.05)  # only a part has arrived
    assert connection.idle_s() == 0.0
    peer.sendall(OK[-3:] + b"a2")
    assert connection.answered(numbers[2], 300.0)
    assert connection.answer(numbers[2]) == (200, b"a2")
    assert connection.idle_s() > 0.0


def test_an_answer_without_a_length_ends_with_the_connection(pair: tuple[HttpPipeline, socket.socket]) -> None:
    connection, peer = pair
    number = connection.ask("GET", "/", {}, b"", 300.0)
    peer.recv(4096)
    peer.sendall(b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\n\r\noops")
    peer.shutdown(socket.SHUT_WR)
    assert connection.answered(number, 300.0)
    assert connection.answer(number) == (500, b"oops")


def test_what_a_lost_connection_did_not_answer_is_an_error_at_once(pair: tuple[HttpPipeline, socket.socket]) -> None:
    connection, peer = pair
    numbers = [connection.ask("GET", "/", {}, b"", 300.0) for _ in range(2)]
    peer.recv(4096)
    peer.sendall(OK + b"a0")
    peer.shutdown(socket.SHUT_WR)
    assert all(connection.answered(number, 300.0) for number in numbers)
    assert connection.answer(numbers[0]) == (200, b"a0")
    with pytest.raises(ConnectionError, match="the server closed the connection"):
        connection.answer(numbers[1])
    assert connection.idle_s() == float("inf")


def test_a_process_with_more_than_a_thousand_open_files_can_wait() -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < 1200:
        pytest.skip(f"this process may open {limit} files")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), limit))
    with contextlib.ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1050:
            pass
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connection = HttpPipeline(f"127.0.0.1:{listener.getsockname()[1]}", 300.0)
            peer, _ = listener.accept()
            with peer:
                number = connection.ask("GET", "/", {}, b"", 300.0)
                assert not connection.answered(number, 0.01)
                peer.sendall(OK + b"a0")
                assert connection.answered(number, 300.0)
            connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_call_that_is_answered_late_is_given_up_with_its_deadline(pair: tuple[HttpPipeline, socket.socket]) -> None:
    connection, peer = pair
    call = PendingCall(connection, connection.ask("POST", "/load", {}, b"{}", 300.0), "/load")
    with pytest.raises(TimeoutError, match=r"no answer to /load within 0\.05 s"):
        call.result(Deadline(0.05))
    peer.recv(4096)
    assert peer.recv(1) == b""  # closed: the answer would be taken for the next request's
