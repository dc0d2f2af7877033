"""SGLang's arguments of a server: their names on its command line, and their numbers."""

from __future__ import annotations

import socket

import pytest

from megarl.knobs import UserError
from megarl.rollout.servers import server_config
from megarl.rollout.servers.server_config import check_numbers, hold_ports, server_arg_options


def test_arguments_have_the_options_of_sglangs_command_line() -> None:
    options = server_arg_options()
    assert len(options) > 300
    assert options["max_total_tokens"] == "max-total-tokens"
    assert options["load_balance_method"] == "load-balance-method"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ep_size", 1.5, "sglang.ep_size=1.5 must be a whole number"),
        ("context_length", 2048.0, "sglang.context_length=2048.0 must be a whole number"),
        ("ep_size", 0, "sglang.ep_size=0 must be at least 1"),
        ("ep_size", "two", "sglang.ep_size=two must be at least 1"),
        ("mem_fraction_static", 1.0, "sglang.mem_fraction_static=1.0 must be above 0 and below 1"),
        ("watchdog_timeout", -0.5, "sglang.watchdog_timeout=-0.5 must be at least 0"),
    ],
)
def test_a_number_that_no_server_takes_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_numbers({key: value})


def test_numbers_that_servers_take_pass() -> None:
    check_numbers({"ep_size": 2, "mem_fraction_static": 0.5, "context_length": None, "max_prefill_tokens": -1})


def test_a_port_is_given_to_one_alone_and_a_server_may_listen_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = hold_ports("127.0.0.1", 1)
    port = first.getsockname()[1]
    monkeypatch.setattr(server_config, "FREE_PORTS", range(port, port + 1))
    with pytest.raises(UserError, match=f"has no 1 free ports in {port}-{port}; set server.port"):
        hold_ports("127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", port)) as server:  # with SO_REUSEADDR, as SGLang's
        socket.create_connection(("127.0.0.1", port)).close()
        server.accept()[0].close()
        with pytest.raises(UserError):
            hold_ports("127.0.0.1", 1)
    first.close()
