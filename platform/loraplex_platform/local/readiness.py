"""Is it up? Small asynchronous probes, without an HTTP library's import time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

Probe = Callable[[], Awaitable[bool]]

PROBE_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 * 1024


async def at_once() -> bool:
    """Ready as soon as it runs."""
    return True


def http_ok(host: str, port: int, path: str) -> Probe:
    """Ready when GET `path` answers 200."""

    async def probe() -> bool:
        status, _ = await _get(host, port, path)
        return status == 200

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
        status, _ = await _get("127.0.0.1", port, path)
        return status == 200

    return probe


def gateway_with_engine(host: str, port: int) -> Probe:
    """Ready when the gateway is and has an engine: its own /ready is about itself only."""

    async def probe() -> bool:
        status, body = await _get(host, port, "/ready")
        if status != 200:
            return False
        try:
            return bool(json.loads(body)["engines_ready"])
        except (ValueError, KeyError, TypeError):
            return False

    return probe


async def _get(host: str, port: int, path: str) -> tuple[int | None, bytes]:
    """Status and body of one GET; no status if nobody answered in time."""
    host = host.strip("[]")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_ANSWER_BYTES)
            try:
                # HTTP/1.0: the answer ends with the connection, so it needs no parsing.
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
                answer = await reader.read(MAX_ANSWER_BYTES)
                while more := await reader.read(MAX_ANSWER_BYTES - len(answer)):
                    answer += more
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(None, 2)
    status = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
    return status, body
