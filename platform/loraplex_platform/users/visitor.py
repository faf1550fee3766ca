"""Where a login attempt comes from, seen through the console that passes the form on.

The console adds the visitor's address to X-Forwarded-For. Anyone can send that header, so it counts
only as far as the addresses that vouch for it are ours: `LORAPLEX_CONTROL_TRUSTED_PROXIES`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(text: str) -> tuple[Network, ...]:
    """Comma-separated networks or addresses; empty: none.

    Raises:
        ValueError: one of them is neither.
    """
    parts = (part.strip() for part in text.split(","))
    return tuple(ipaddress.ip_network(part) for part in parts if part)


def visitor_address(peer: str, forwarded: Iterable[str], trusted: tuple[Network, ...]) -> str:
    """The nearest address that is not one of our proxies: `peer`, or one that they vouch for.

    Args:
        peer: who is connected to us.
        forwarded: values of X-Forwarded-For; each proxy adds its visitor on the right.
        trusted: networks of our own proxies.
    """
    address = peer
    for named in reversed([part.strip() for value in forwarded for part in value.split(",")]):
        if not _is_in(address, trusted):
            return address
        if not _is_address(named):
            return address  # a proxy of ours vouches for nonsense: it is the last one known
        address = named
    return address


def network_of(address: str) -> str:
    """Whom to count under: an IPv6 customer owns a /64, so counting single addresses would count nothing."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if ip.version == 6:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def _is_in(address: str, networks: tuple[Network, ...]) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(ip in network for network in networks)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
