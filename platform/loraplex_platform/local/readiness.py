"""Is it up? Small asynchronous probes, without an HTTP library's import time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

Probe = Callable[[], Awaitable[bool]]

PROBE_TIMEOUT_S = 2.0


async def at_once() -> bool:
    """Ready as soon as it runs."""
    return True


def http_ok(host: str, port: int, path: str) -> Probe:
    """Ready when GET `path` answers 200."""

    async def probe() -> bool:
        return await _http_status(host, port, path) == 200

    return probe


def http_ok_at_port_file(port_file: Path, path: str) -> Probe:
    """Ready when `port_file` names a loopback port whose GET `path` answers 200."""

    def read_port() -> int | None:
        try:
            return int(port_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    async def probe() -> bool:
        port = read_port()
        if port is None:
            return False
        return await _http_status("127.0.0.1", port, path) == 200

    return probe


async def _http_status(host: str, port: int, path: str) -> int | None:
    """The status of one GET; None if nobody answered in time."""
    host = host.strip("[]")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    parts = status_line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
