"""Calls to Redis that end in time, whatever Redis does.

Each call has a deadline, its connection included; a breaker stops calling what does not answer. The
epoch is the id of the server's own run, read on every new connection: a Redis that was restarted,
emptied or restored from an old copy is told apart from the one that we filled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from redis import asyncio as redis_asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError

from loraplex_platform.rates.breaker import Breaker
from loraplex_platform.rates.redis_pipe import Argument, RedisPipe
from loraplex_platform.rates.scripts import Script

log = structlog.get_logger(__name__)

DEADLINE_S = 0.1


class RedisAwayError(Exception):
    """Redis did not answer in time, is not there, or refuses what we ask. Nothing may depend on it."""


class RedisMetrics:
    """How the calls go."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "loraplex:redis_calls",
            "Calls to Redis by script and outcome: ok, late, failed, held_back.",
            ["script", "outcome"],
            registry=registry,
        )
        self.is_away = Gauge(
            "loraplex:redis_away",
            "1 while Redis does not answer and is asked only now and then.",
            registry=registry,
        )


class DeadlineRedis:
    """See the module's header. `aclose` it in the end.

    Args:
        url: of a single server; the scripts' keys would also suit a cluster, this client does not.
        deadline_s: for each call.
    """

    def __init__(
        self,
        url: str,
        metrics: RedisMetrics,
        *,
        deadline_s: float = DEADLINE_S,
        breaker: Breaker | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._breaker = breaker or Breaker()
        self._epoch = ""
        self._pipe = RedisPipe(url, self._learn_epoch)

    @property
    def epoch(self) -> str:
        """The run of the server that we are connected to; empty before the first call."""
        return self._epoch

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:  # noqa: ANN401 # a reply of Redis
        """The script's reply.

        Raises:
            RedisAwayError: there is none in time. Whether the script ran is unknown.
        """
        due_s = asyncio.get_running_loop().time() + self._deadline_s
        return await self._bounded(script.name, self._evaluate(due_s, script, keys, arguments))

    async def command(self, *words: Argument) -> Any:  # noqa: ANN401 # a reply of Redis
        """A plain command's reply, under the same deadline.

        Raises:
            RedisAwayError: there is none in time.
        """
        due_s = asyncio.get_running_loop().time() + self._deadline_s
        return await self._bounded(str(words[0]).lower(), self._once_more(due_s, *words))

    def ask_ahead(self, *words: Argument) -> asyncio.Future[Any] | None:
        """Have a command sent in one write with whatever is asked next, right before it.

        Returns:
            Its reply, which is there when that other one is, unless the connection broke between the
            two; None: Redis did not answer lately, and nothing is sent.
        """
        return None if self._breaker.is_open else self._pipe.ask(*words)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._pipe.aclose()

    # ------------------------------------------------------------------ insides

    async def _bounded(self, name: str, call: Any) -> Any:  # noqa: ANN401 # see run
        calls = self._metrics.calls
        if not self._breaker.allows():
            call.close()
            calls.labels(name, "held_back").inc()
            raise RedisAwayError("Redis did not answer lately.")
        try:
            reply = await call
        except (RedisError, OSError, TimeoutError) as error:
            calls.labels(name, "late" if isinstance(error, TimeoutError) else "failed").inc()
            self._note_failure(error)
            raise RedisAwayError(f"Redis did not answer ({type(error).__name__}).") from error
        calls.labels(name, "ok").inc()
        if self._breaker.is_open:
            log.info("redis_back")
            self._metrics.is_away.set(0)
        self._breaker.note_success()
        return reply

    def _note_failure(self, error: Exception) -> None:
        was_open = self._breaker.is_open
        self._breaker.note_failure()
        if self._breaker.is_open and not was_open:
            log.warning("redis_away", reason=type(error).__name__)
            self._metrics.is_away.set(1)

    async def _evaluate(
        self, due_s: float, script: Script, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:  # noqa: ANN401 # see run
        words = (len(keys), *keys, *arguments)
        try:
            return await self._once_more(due_s, "EVALSHA", script.sha, *words)
        except NoScriptError:
            return await self._once_more(due_s, "EVAL", script.text, *words)

    async def _once_more(self, due_s: float, *words: Argument) -> Any:  # noqa: ANN401 # see run
        """All we ask is harmless to repeat, and the connection may have been dead before we used it."""
        try:
            return await self._pipe.call(due_s, *words)
        except TimeoutError:
            raise  # an OSError too, but the time is over
        except (redis_asyncio.ConnectionError, OSError):
            return await self._pipe.call(due_s, *words)

    async def _learn_epoch(self, connection: AbstractConnection) -> None:
        await connection.send_command("INFO", "server")
        self._epoch = _run_id(await connection.read_response())


def _run_id(info: Any) -> str:  # noqa: ANN401 # a reply of Redis
    text = info.decode() if isinstance(info, bytes) else str(info)
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "run_id":
            return value.strip()
    raise redis_asyncio.ConnectionError("Redis does not say which run it is.")
