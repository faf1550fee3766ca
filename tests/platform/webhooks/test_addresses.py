"""No webhook reaches what only this machine can."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import pytest
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.webhooks.addresses import (
    AddressRules,
    ForbiddenAddressError,
    PinnedBackend,
    parse_trusted,
)

PUBLIC = ["93.184.216.34", "1.1.1.1", "2606:4700:4700::1111"]
INSIDE = [
    "127.0.0.1",
    "127.8.9.1",
    "0.0.0.0",
    "10.0.0.5",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",  # carrier-grade NAT
    "169.254.169.254",  # metadata of every cloud
    "192.0.0.192",  # metadata of another
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fec0::1",
    "fd00:ec2::254",  # metadata over IPv6
    "ff02::1",
    "::ffff:127.0.0.1",  # IPv4 in IPv6
    "::ffff:169.254.169.254",
    "::ffff:a00:1",
    "::127.0.0.1",
    "64:ff9b::a9fe:a9fe",  # the same through a NAT64 translator
    "64:ff9b:1::a9fe:a9fe",
    "2002:7f00:1::",  # and through a tunnel
    "2001:0:7f00:1::",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_may_be_reached(address: str) -> None:
    assert AddressRules().allows(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", INSIDE)
def test_nothing_inside_may_be_reached(address: str) -> None:
    assert not AddressRules().allows(ipaddress.ip_address(address))


def test_an_operator_may_open_a_network_of_their_own() -> None:
    rules = AddressRules(parse_trusted("10.1.0.0/16, fd00::/8"))

    assert rules.allows(ipaddress.ip_address("10.1.2.3"))
    assert rules.allows(ipaddress.ip_address("::ffff:10.1.2.3"))
    assert rules.allows(ipaddress.ip_address("fd00::1"))
    assert not rules.allows(ipaddress.ip_address("10.2.0.1"))
    rules.check_url("http://10.1.2.3:8080/hook")
    with pytest.raises(ValueError, match="does not appear"):
        parse_trusted("everywhere")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://example.com/hook", "only https"),
        ("ftp://example.com/", "https://host/path"),
        ("file:///etc/passwd", "https://host/path"),
        ("gopher://127.0.0.1:6379/_FLUSHALL", "https://host/path"),
        ("//example.com/", "https://host/path"),
        ("https:///hook", "https://host/path"),
        ("https://user:secret@example.com/", "user and password"),
        ("https://example.com/#part", "from # on"),
        ("https://example.com:0/", "port 0"),
        ("https://example.com:99999/", "no URL"),
        ("https://[::1/", "no URL"),
        ("https://127.0.0.1/", "not a public"),
        ("https://[::ffff:169.254.169.254]/latest/meta-data", "not a public"),
        ("https://exam ple.com/", "printable ASCII"),
        ("https://example.com/\r\nX-Admin: 1", "printable ASCII"),
        ("https://exämple.com/", "printable ASCII"),
        ("https://example.com/" + "x" * 2000, "at most 2000"),
    ],
)
def test_a_url_that_can_never_be_right_is_refused_when_it_is_given(url: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        AddressRules().check_url(url)

    assert caught.value.param == "url"


def resolving(answers: list[list[str]]) -> Callable[..., Any]:
    """A resolver with other answers each time, as an attacker's DNS has them."""

    async def getaddrinfo(host: str, port: int, **options: object) -> list[Any]:
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in addresses
        ]

    return getaddrinfo


async def test_a_name_that_also_points_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", resolving([["93.184.216.34", "10.0.0.1"]]))

    with pytest.raises(ForbiddenAddressError):
        await AddressRules().resolve("rebind.example", 443)


async def test_the_address_that_was_looked_at_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    # The second answer, which a check-then-connect would get, points inside.
    monkeypatch.setattr(loop, "getaddrinfo", resolving([["93.184.216.34"], ["127.0.0.1"]]))
    backend = PinnedBackend(AddressRules())
    connected: list[str] = []

    async def connect(host: str, *rest: object) -> Any:
        connected.append(host)
        raise OSError("no network in tests")

    monkeypatch.setattr(backend._inner, "connect_tcp", connect)
    with pytest.raises(OSError, match="no network"):
        await backend.connect_tcp("rebind.example", 443)
    with pytest.raises(ForbiddenAddressError):
        await backend.connect_tcp("rebind.example", 443)
    with pytest.raises(ForbiddenAddressError):
        await backend.connect_unix_socket("/run/redis.sock")

    assert connected == ["93.184.216.34"]


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f000001", "2130706433", "0177.0.0.1"])
async def test_other_spellings_of_this_machine_are_still_this_machine(host: str) -> None:
    with pytest.raises((ForbiddenAddressError, OSError)):
        await AddressRules().resolve(host, 443)
