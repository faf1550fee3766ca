"""Which TCP ports the fleet listens on, settled before anything is started.

A taken port is an error, not a reason to take the next one: whoever asked for 8000 has it in scripts and
in their browser. Whoever does not care asks for 0.
"""

from __future__ import annotations

import errno
import socket

from loraplex_platform.local.errors import PortTakenError, SettingError


def settle_port(host: str, port: int, *, purpose: str, flag: str) -> int:
    """`port` if it can be bound on `host`; a free one for 0.

    Services ask for the port themselves a moment later, so a free one can in theory be lost in between;
    that start then fails and says why.

    Raises:
        PortTakenError: somebody listens there; names the process where the system tells us.
        SettingError: `host` cannot be bound at all, or the port is not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SettingError(f"--host {host} cannot be resolved: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        # As the servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(
                    f"port {port} for the {purpose} is taken{_holder(port)}: stop that, or choose "
                    f"another with {flag} (0 takes any free one)"
                ) from error
            raise SettingError(
                f"the {purpose} cannot listen on {host} port {port}: {error.strerror}"
            ) from error
        return int(probe.getsockname()[1])


def reachable_host(host: str) -> str:
    """The host part of a URL by which this machine reaches what is bound on `host`."""
    if host in {"0.0.0.0", ""}:  # noqa: S104 - named, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound on `host`."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_it and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
