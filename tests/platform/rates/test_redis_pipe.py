from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

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


class Pipe(RedisPipe):
    """With one deadline for all calls."""

    deadline_s = 10.0

    async def ask(self, *words: str) -> Any:
        return await self.call(asyncio.get_running_loop().time() + self.deadline_s, *words)


def pipe(url: str, greeter: Greeter | None = None, **changes: Any) -> Pipe:
    return Pipe(url, greeter or Greeter(), **changes)


async def test_everybody_gets_their_own_answer_over_one_connection(redis_url: str) -> None:
    greeter = Greeter()
    one = pipe(redis_url, greeter)
    count = 3 * MAX_BATCH

    answers = await asyncio.gather(*(one.ask("ECHO", f"{i}") for i in range(count)))

    assert answers == [str(i).encode() for i in range(count)]
    assert greeter.num_connections == 1
    await one.aclose()


async def test_a_refused_command_concerns_nobody_else(redis_url: str) -> None:
    one = pipe(redis_url)

    results = await asyncio.gather(
        one.ask("ECHO", "a"), one.ask("NONSENSE"), one.ask("ECHO", "b"), return_exceptions=True
    )

    assert results[0] == b"a"
    assert isinstance(results[1], ResponseError)
    assert results[2] == b"b"
    await one.aclose()


async def test_whoever_leaves_takes_no_answer_of_others(redis_url: str) -> None:
    one = pipe(redis_url)
    await one.ask("PING")

    asking = [asyncio.create_task(one.ask("ECHO", f"{i}")) for i in range(50)]
    await asyncio.sleep(0)  # they are on their way
    for task in asking[::2]:
        task.cancel()
    results = await asyncio.gather(*asking[1::2])

    assert results == [str(i).encode() for i in range(1, 50, 2)]
    assert await one.ask("ECHO", "z") == b"z"
    await one.aclose()


@pytest.mark.parametrize(("hanging_s", "num_connections"), [(60.0, 1), (0.2, 2)])
async def test_an_answer_that_comes_too_late_is_nobodys(
    own_redis: EmbeddedServer, hanging_s: float, num_connections: int
) -> None:
    greeter = Greeter()
    one = pipe(own_redis.url, greeter, hanging_s=hanging_s)
    await one.ask("PING")
    one.deadline_s = 0.1

    with paused(own_redis.pid):
        results = await asyncio.gather(
            *(one.ask("ECHO", f"{i}") for i in range(9)), return_exceptions=True
        )
        await asyncio.sleep(0.3)

    one.deadline_s = 10.0
    assert all(isinstance(result, TimeoutError) for result in results)
    assert await one.ask("ECHO", "now") == b"now"
    assert greeter.num_connections == num_connections
    await one.aclose()


async def test_time_that_we_lose_ourselves_does_not_count(redis_url: str) -> None:
    one = pipe(redis_url)
    await one.ask("PING")
    one.deadline_s = 0.05

    asking = asyncio.create_task(one.ask("ECHO", "a"))
    for _ in range(3):
        await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 # somebody holds up the loop

    assert await asking == b"a"
    await one.aclose()


async def test_a_server_that_was_restarted_is_connected_to_again(
    own_redis: EmbeddedServer, short_tmp_path: Path
) -> None:
    greeter = Greeter()
    one = pipe(own_redis.url, greeter)
    await one.ask("PING")
    own_redis.stop()
    with pytest.raises((RedisConnectionError, OSError)):
        await one.ask("PING")

    again = start_redis(short_tmp_path / "redis")
    try:
        assert await one.ask("ECHO", "back") == b"back"
    finally:
        again.stop()
    assert greeter.num_connections == 2
    await one.aclose()


async def test_a_closed_pipe_leaves_nobody_waiting(own_redis: EmbeddedServer) -> None:
    one = pipe(own_redis.url)
    await one.ask("PING")
    with paused(own_redis.pid):
        asking = asyncio.create_task(one.ask("PING"))
        await asyncio.sleep(0.05)

        await one.aclose()

        with pytest.raises(RedisConnectionError):
            await asking
