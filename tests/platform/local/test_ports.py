"""Ports are settled before anything starts."""

from __future__ import annotations

import os
import socket

import pytest
from loraplex_platform.local.errors import PortTakenError, SettingError
from loraplex_platform.local.ports import is_loopback, reachable_host, settle_port


def test_zero_takes_a_free_port_and_a_free_port_is_kept() -> None:
    port = settle_port("127.0.0.1", 0, purpose="gateway", flag="--gateway-port")

    assert port > 0
    assert settle_port("127.0.0.1", port, purpose="gateway", flag="--gateway-port") == port


def test_a_taken_port_is_named_with_its_holder_and_the_flag() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        with pytest.raises(PortTakenError) as caught:
            settle_port("127.0.0.1", port, purpose="gateway", flag="--gateway-port")

    message = str(caught.value)
    assert f"port {port} for the gateway is taken" in message
    assert f"(pid {os.getpid()})" in message
    assert "--gateway-port" in message


def test_a_host_that_is_not_ours_is_a_clear_error() -> None:
    # TEST-NET-1 (RFC 5737): no machine has this address.
    with pytest.raises(SettingError, match=r"cannot listen on 192\.0\.2\.1"):
        settle_port("192.0.2.1", 0, purpose="gateway", flag="--gateway-port")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.1.5", False),
        ("example.org", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_wildcards_are_reached_by_loopback() -> None:
    assert reachable_host("0.0.0.0") == "127.0.0.1"
    assert reachable_host("::1") == "[::1]"
    assert reachable_host("example.org") == "example.org"
