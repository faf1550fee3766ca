from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from loraplex_platform.local.embedded import start_redis
from loraplex_platform.rates.redis_pipe import MAX_BATCH, RedisPipe
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.support.pausing import paused

if TYPE_CHECKING:
    from pathlib import Path

    from loraplex_platform.local.server_process import EmbeddedServer
    from redis.asyncio.connection import AbstractConnection


class Greeter:
    """Counts connections."""

    def __init__(self) -> None:
        self.num_connections = 0

    async def __call__(self, connection: AbstractConnection) -> None:
        self.num_connections += 1


def pipe(url: str, greeter: Greeter | None = None, deadline_s: float = 5.0) -> RedisPipe:
    return RedisPipe(url, deadline_s=deadline_s, on_connect=greeter or Greeter())


async def test_everybody_gets_their_own_answer_over_one_connection(redis_url: str) -> None:
    greeter = Greeter()
    one = pipe(redis_url, greeter)
    count = 3 * MAX_BATCH

    answers = await asyncio.gather(*(one.call("ECHO", f"{i}") for i in range(count)))

    assert answers == [str(i).encode() for i in range(count)]
    assert greeter.num_connections == 1
    await one.aclose()


async def test_a_refused_command_concerns_nobody_else(redis_url: str) -> None:
    one = pipe(redis_url)

    results = await asyncio.gather(
        one.call("ECHO", "a"), one.call("NONSENSE"), one.call("ECHO", "b"), return_exceptions=True
    )

    assert results[0] == b"a"
    assert isinstance(results[1], ResponseError)
    assert results[2] == b"b"
    await one.aclose()


async def test_whoever_leaves_takes_no_answer_of_others(redis_url: str) -> None:
    one = pipe(redis_url)
    await one.call("PING")

    asking = [asyncio.create_task(one.call("ECHO", f"{i}")) for i in range(50)]
    await asyncio.sleep(0)  # they are on their way
    for task in asking[::2]:
        task.cancel()
    results = await asyncio.gather(*asking[1::2])

    assert results == [str(i).encode() for i in range(1, 50, 2)]
    assert await one.call("ECHO", "z") == b"z"
    await one.aclose()


async def test_an_answer_that_comes_too_late_is_nobodys(own_redis: EmbeddedServer) -> None:
    greeter = Greeter()
    one = pipe(own_redis.url, greeter, deadline_s=0.1)
    await one.call("PING")

    with paused(own_redis.pid):
        results = await asyncio.gather(
            *(one.call("ECHO", f"{i}") for i in range(9)), return_exceptions=True
        )

    assert all(isinstance(result, TimeoutError) for result in results)
    assert await one.call("ECHO", "now") == b"now"
    assert greeter.num_connections == 2
    await one.aclose()


async def test_a_server_that_was_restarted_is_connected_to_again(
    own_redis: EmbeddedServer, short_tmp_path: Path
) -> None:
    greeter = Greeter()
    one = pipe(own_redis.url, greeter)
    await one.call("PING")
    own_redis.stop()
    with pytest.raises((RedisConnectionError, OSError)):
        await one.call("PING")

    again = start_redis(short_tmp_path / "redis")
    try:
        assert await one.call("ECHO", "back") == b"back"
    finally:
        again.stop()
    assert greeter.num_connections == 2
    await one.aclose()


async def test_a_closed_pipe_leaves_nobody_waiting(own_redis: EmbeddedServer) -> None:
    one = pipe(own_redis.url)
    await one.call("PING")
    with paused(own_redis.pid):
        asking = asyncio.create_task(one.call("PING"))
        await asyncio.sleep(0.05)

        await one.aclose()

        with pytest.raises(RedisConnectionError):
            await asking
