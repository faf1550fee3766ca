"""All that surrounds a gateway under test, in a process of its own: an engine that replays frames, and clients.

    python -m loraplex_platform.profiling.world --engine ipc:///dir/e.sock --port 8000 --streams 16 ...

Waits until every client's request has come, then sends one frame a step with a token for each, at an even pace;
the clients read their streams to the end. Ends with one JSON object: how many bytes they read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    EngineMessage,
    Generate,
    Hello,
    StepFrame,
    TokenEvent,
    Usage,
    Welcome,
    decode_from_gateway,
    encode,
)

REQUEST_PATH = "/stream"


class ReplayEngine:
    """Answers as an engine does; every token is a number that follows from row and step."""

    def __init__(self, address: str, num_streams: int, vocab_size: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 1000
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.bind(address)
        self._num_streams = num_streams
        self._vocab_size = vocab_size
        self._gateway = b""
        self.requests: list[Generate] = []
        self.greeted = asyncio.Event()
        self.all_here = asyncio.Event()

    async def receive(self) -> None:
        """Welcome the gateway, take its requests; forever."""
        while True:
            self._gateway, frame = await self._socket.recv_multipart()
            match decode_from_gateway(frame):
                case Hello():
                    await self._send(
                        Welcome(
                            protocol_version=PROTOCOL_VERSION,
                            replica_id="profile",
                            incarnation="profile",
                            model_fingerprint="profile",
                            max_model_len=1 << 20,
                            is_ready=True,
                        )
                    )
                    self.greeted.set()
                case Generate() as request:
                    self.requests.append(request)
                    await self._send(
                        Accepted(request_id=request.request_id, attempt=request.attempt)
                    )
                    if len(self.requests) == self._num_streams:
                        self.all_here.set()
                case Abort():
                    raise SystemExit("the gateway gave a request up")

    async def replay(self, num_steps: int, step_s: float) -> None:
        """Send so many frames, one every `step_s` seconds; the last one ends all requests."""
        begun = time.monotonic()
        for step in range(num_steps):
            await asyncio.sleep(max(0.0, begun + step * step_s - time.monotonic()))
            is_last = step == num_steps - 1
            events = [
                TokenEvent(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    token_ids=[(7919 * step + 104_729 * row + 257) % self._vocab_size],
                    finish_reason="length" if is_last else None,
                    usage=Usage(prompt_tokens=1, completion_tokens=num_steps) if is_last else None,
                )
                for row, request in enumerate(self.requests)
            ]
            await self._send(StepFrame(step_id=step + 1, events=events))

    async def _send(self, message: EngineMessage) -> None:
        await self._socket.send_multipart([self._gateway, encode(message)])


async def read_stream(port: int, row: int) -> int:
    """Ask for stream `row` and read it to its end; how many bytes its body had.

    Raises:
        SystemExit: it broke off.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {REQUEST_PATH}?row={row} HTTP/1.1\r\nhost: profile\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: 0\r\n\r\n".encode())
    num_bytes, tail = 0, b""
    while data := await reader.read(65536):
        num_bytes += len(data)
        tail = (tail + data)[-64:]
    writer.close()
    if b"data: [DONE]\n\n" not in tail:
        raise SystemExit(f"stream {row} broke off after {num_bytes} bytes")
    return num_bytes


async def run(options: argparse.Namespace) -> int:
    """Everything; how many bytes all streams had."""
    engine = ReplayEngine(options.engine, options.streams, options.vocab)
    receiving = asyncio.create_task(engine.receive())
    try:
        async with asyncio.timeout(options.steps * options.step_ms / 1e3 + 60):
            await engine.greeted.wait()
            clients = [
                asyncio.create_task(read_stream(options.port, row))
                for row in range(options.streams)
            ]
            await engine.all_here.wait()
            await engine.replay(options.steps, options.step_ms / 1e3)
            return sum(await asyncio.gather(*clients))
    finally:
        receiving.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_platform.profiling.world")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    num_bytes = asyncio.run(run(parser.parse_args(arguments)))
    sys.stdout.write(json.dumps({"num_bytes": num_bytes}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
