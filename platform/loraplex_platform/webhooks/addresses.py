"""Which addresses a webhook may reach: the public internet, and nothing behind our own doors.

A tenant chooses the URL, so it must not reach what only this machine can (SSRF: metadata services,
databases, other tenants' hosts). The name is resolved by us, every address that it has must be public, and
the connection goes to exactly the address that was looked at: a second answer of its DNS changes nothing.
Redirects are not followed. An operator may open networks of their own, and plain http to them, with
LORAPLEX_WEBHOOK_NETWORKS: to the operator's own webhooks only, never to a tenant's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import httpcore

from loraplex_platform.errors import InvalidRequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_URL_CHARS: Final = 2000
RESOLVE_TIMEOUT_S: Final = 5.0

# IPv6 ranges that lead to some IPv4 address by way of a translator or a tunnel, and what Python calls
# global although it is for protocols (one cloud has its metadata there) or relays.
_NEVER: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/23", "2002::/16"),
        *("192.0.0.0/24", "192.88.99.0/24"),
        "fec0::/10",  # site-local of old, which some networks still have
    )
)


# One answer for a name that is unknown and for one that leads inside: told apart, they would let a tenant
# ask our resolver which names there are inside.
NOT_PUBLIC: Final = "the host has no address on the public internet"


class ForbiddenAddressError(Exception):
    """The URL leads somewhere that webhooks must not reach; the message says so, without the address."""


class AddressRules:
    """What may be reached.

    Args:
        trusted: networks of the operator's own that may be reached too, also by plain http.
    """

    def __init__(self, trusted: Iterable[Network] = ()) -> None:
        self._trusted = tuple(trusted)

    def check_url(self, url: str) -> None:
        """Refuse what can never be right. What the name resolves to is looked at with every try.

        Raises:
            InvalidRequestError: says what is wrong with `url`.
        """
        if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
            raise _invalid(f"use at most {MAX_URL_CHARS} printable ASCII characters.")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _invalid("this is no URL.") from None
        if parts.scheme not in ("https", "http") or not host:
            raise _invalid("write https://host/path.")
        if parts.username is not None or parts.password is not None:
            raise _invalid("leave user and password out; messages are signed.")
        if parts.fragment:
            raise _invalid("leave the part from # on out.")
        if port == 0:
            raise _invalid("port 0 cannot be reached.")
        literal = _literal(host)
        if literal is not None and not self.allows(literal):
            raise _invalid("this address is not a public one.")
        if parts.scheme == "http" and (literal is None or not self._is_trusted(literal)):
            raise _invalid("only https: what is sent is not for everybody on its way to read.")

    def allows(self, address: Address) -> bool:
        """Whether a connection may be made to this address."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return self.allows(address.ipv4_mapped)
        if self._is_trusted(address):
            return True
        if any(address in network for network in _NEVER):
            return False
        return address.is_global and not (
            address.is_multicast or address.is_reserved or address.is_unspecified
        )

    async def resolve(self, host: str, port: int) -> str:
        """An address of `host` that may be reached.

        Raises:
            ForbiddenAddressError: one of its addresses may not.
            OSError: it has none.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        # All of them: a name that also points inside was made to.
        if not addresses or not all(self.allows(address) for address in addresses):
            raise ForbiddenAddressError(NOT_PUBLIC)
        return str(addresses[0])

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


@dataclass(frozen=True, slots=True)
class OwnerRules:
    """What may be reached depends on whose webhook it is: a tenant never reaches networks of ours."""

    operators: AddressRules = field(default_factory=AddressRules)
    tenants: AddressRules = field(default_factory=AddressRules)

    def of(self, tenant_id: UUID | None) -> AddressRules:
        """The rules of a tenant's webhooks; None: of the operator's own."""
        return self.operators if tenant_id is None else self.tenants


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were looked at, and to no others. TLS still checks the host's name."""

    def __init__(self, rules: AddressRules) -> None:
        self._rules = rules
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 # the interface of httpcore
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """As httpcore calls it.

        Raises:
            ForbiddenAddressError: see `AddressRules.resolve`.
            httpcore.ConnectError: it cannot be resolved or reached.
        """
        try:
            address = await self._rules.resolve(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise httpcore.ConnectError(NOT_PUBLIC) from error
        return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 # the interface of httpcore
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Never: sockets are this machine's.

        Raises:
            ForbiddenAddressError: always.
        """
        del path, timeout, socket_options
        raise ForbiddenAddressError("unix sockets cannot be reached")

    async def sleep(self, seconds: float) -> None:
        """As httpcore calls it between tries."""
        await asyncio.sleep(seconds)


def parse_trusted(text: str) -> tuple[Network, ...]:
    """Comma-separated networks, as LORAPLEX_WEBHOOK_NETWORKS has them.

    Raises:
        ValueError: one is no network.
    """
    return tuple(
        ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip()
    )


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {what}", param="url")
