"""Answers while Postgres is away: told in time, kept on disk, billed once it is back."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from loraplex_platform.db import Request
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.gateway import pump
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.gateway.failpoints import Failpoints, Point
from loraplex_platform.gateway.spool import SpoolFolderError
from loraplex_platform.metering import service as metering
from loraplex_platform.worker.sweeper import Sweeper
from sqlalchemy import select

from tests.platform.gateway.stand import BASE, Stand, eventually, says, settings_for
from tests.support.engines import connected
from tests.support.metering import run_sql

_BODY: dict[str, Any] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
}
CHAT = "/v1/chat/completions"


class Outage:
    """Settling fails, or takes for ever, until it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> None:
        self.is_over = False
        self._hangs = hangs
        self._real = {name: getattr(metering, name) for name in ("settle", "void", "renew")}
        for name in self._real:
            monkeypatch.setattr(metering, name, self._stand_in(name))

    def _stand_in(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            if not self.is_over and self._hangs and name == "settle":
                await eventually(lambda: self.is_over)
            if not self.is_over:
                raise DatabaseUnavailableError
            return await self._real[name](*arguments, **options)

        return call


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_answer_is_told_kept_and_billed_after(
    db_url: str,
    redis_url: str,
    short_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
    hangs: bool,
) -> None:
    spool_dir = short_tmp_path / "spool"
    async with Stand.open(db_url, redis_url, short_tmp_path, spool_dir=spool_dir) as stand:
        stand.engine.script = says("told all the same")
        outage = Outage(monkeypatch, hangs=hangs)

        began_s = time.monotonic()
        answer = await stand.http().post(CHAT, json=_BODY | {"stream": is_stream})
        elapsed_s = time.monotonic() - began_s

        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n") == is_stream
        assert elapsed_s < 3.0 + 2.0
        ready = (await stand.http("").get("/ready")).json()
        assert ready["spool"] == {"pending": 1, "writable": True}
        outage.is_over = True
        assert stand.gateway.spool is not None
        spool = stand.gateway.spool
        await eventually(lambda: spool.num_pending == 0, "the spool's end")
        request, attempt, entry = await stand.last_request()
        assert attempt is not None
        assert entry is not None
        assert (request.state, request.http_status, request.finish_reason) == (
            "settled",
            200,
            "stop",
        )
        assert (attempt.source, entry.account) == ("terminal", "revenue")
        await stand.check_books()


async def test_a_request_whose_lease_was_taken_over_meanwhile_is_not_run(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    """Else it would use what its tenant's budget has given to another by then."""

    class Stall(Failpoints):
        def hit(self, point: Point) -> None:
            if point == "before_dispatch":
                time.sleep(1.1)
                with psycopg.connect(db_url) as owner:  # as the sweeper does
                    owner.execute("update requests set lease_token = lease_token + 1")

    async with Stand.open(db_url, redis_url, short_tmp_path, request_lease_s=1.0) as stand:
        stand.gateway.failpoints = Stall()
        stand.engine.script = says("never said")

        answer = await stand.http().post(CHAT, json=_BODY)

        assert answer.status_code == 503
        assert stand.generated == []
        async with stand.db.sessions() as session:
            [request] = (await session.scalars(select(Request))).all()
        assert (request.state, request.lease_token) == ("reserved", 2)
        await metering.void(stand.db.sessions, request.id, 2, voided_by="sweeper")
        await stand.check_books()


class Sweep(Failpoints):
    """At a point the process stands still past its lease, and the sweeper takes the request over."""

    def __init__(self, db_url: str, point: Point, number: int = 1) -> None:
        super().__init__()
        self.num_hits = 0
        self.has_acted = False
        self._db_url = db_url
        self._point = point
        self._number = number

    def hit(self, point: Point) -> None:
        if point == self._point and not self.has_acted:
            self.num_hits += 1
            if self.num_hits >= self._number:
                self._take_over()

    def _take_over(self) -> None:
        with psycopg.connect(self._db_url) as owner:
            taken = owner.execute(
                "update requests set lease_token = lease_token + 1 where id ="
                " (select id from requests for update skip locked)"
            )
            # Else this very process renews it, and could not go on while we wait: the next time.
            self.has_acted = taken.rowcount == 1
        if self.has_acted:
            time.sleep(1.1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("point", ["before_send", "mid_stream", "before_tx2"])
async def test_of_what_the_sweeper_has_taken_over_nobody_hears_the_rest(
    db_url: str, redis_url: str, short_tmp_path: Path, is_stream: bool, point: Point
) -> None:
    """Also where the gateway stood still after its last look at the lease."""
    async with Stand.open(db_url, redis_url, short_tmp_path, request_lease_s=1.0) as stand:
        sweep = Sweep(db_url, point, 5 if point == "mid_stream" else 1)
        stand.gateway.failpoints = sweep
        stand.engine.script = says("x" * 12, token_delay_s=0.02)  # a token each

        answer = await stand.http().post(CHAT, json=_BODY | {"stream": is_stream})

        assert sweep.has_acted
        has_begun = is_stream and point != "before_send"
        assert answer.status_code == (200 if has_begun else 503)
        assert '"code":"engine_lost"' in answer.text
        assert "[DONE]" not in answer.text
        assert '"usage"' not in answer.text
        assert '"finish_reason":"stop"' not in answer.text
        said = "".join(re.findall('"content":"(.*?)"', answer.text))
        num_heard = sweep.num_hits - 1 if point == "mid_stream" else 12
        assert said == ("x" * num_heard if has_begun else "")
        await eventually(lambda: stand.engine.num_running == 0, "the engine stopped")
        await run_sql(stand.db, "update requests set lease_until = now() - interval '1 s'")
        async with connected(stand.engine) as engines:
            sweeper = Sweeper(stand.db.sessions, engines, grace_s=0.0, replica_lost_after_s=0.0)
            assert await sweeper.sweep_once() == ["settled"]
        _, _, entry = await stand.last_request()
        assert entry is not None
        assert entry.account == "absorbed"
        await stand.check_books()


async def test_a_gateway_that_stands_still_while_it_settles_tells_no_end_that_is_not_its_own(
    db_url: str, redis_url: str, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is awake again it has waited long enough for the books, and yet they may be another's."""
    settle = metering.settle
    sweep = Sweep(db_url, "inside_tx2")

    async def stand_still(*arguments: Any) -> Any:
        if not sweep.has_acted:
            await asyncio.sleep(0.01)
            while not sweep.has_acted:
                sweep.hit("inside_tx2")
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        return await settle(*arguments)

    monkeypatch.setattr(metering, "settle", stand_still)
    monkeypatch.setattr(pump, "ANSWER_WAIT_S", 0.5)
    async with Stand.open(db_url, redis_url, short_tmp_path, request_lease_s=1.0) as stand:
        stand.engine.script = says("never heard")

        answer = await stand.http().post(CHAT, json=_BODY)

        assert answer.status_code == 503
        await stand.settled()
        monkeypatch.setattr(metering, "settle", settle)
        await run_sql(stand.db, "update requests set lease_until = now() - interval '1 s'")
        async with connected(stand.engine) as engines:
            sweeper = Sweeper(stand.db.sessions, engines, grace_s=0.0, replica_lost_after_s=0.0)
            assert await sweeper.sweep_once() == ["settled"]
        await stand.check_books()


async def test_a_stream_goes_on_where_the_lease_was_ours_after_all(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    """The process stood still, and nobody took its requests meanwhile."""
    async with Stand.open(db_url, redis_url, short_tmp_path, request_lease_s=1.0) as stand:
        stand.gateway.failpoints = Failpoints("mid_stream:stall(1.1)#3")
        stand.engine.script = says("abcdefghijkl", token_delay_s=0.02)

        answer = await stand.http().post(CHAT, json=_BODY | {"stream": True})

        assert "".join(re.findall('"content":"(.*?)"', answer.text)) == "abcdefghijkl"
        assert answer.text.endswith("data: [DONE]\n\n")
        await stand.check_books()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_whose_commit_was_not_acknowledged_is_told_and_billed_once(
    db_url: str,
    redis_url: str,
    short_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
) -> None:
    """The second try finds the request settled: by ourselves, and not by a sweeper."""
    settle = metering.settle

    async def settle_twice(*arguments: Any) -> Any:
        assert (await settle(*arguments)).applied
        return await settle(*arguments)

    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        stand.engine.script = says("told all the same")
        monkeypatch.setattr(metering, "settle", settle_twice)

        answer = await stand.http().post(CHAT, json=_BODY | {"stream": is_stream})

        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n") == is_stream
        await stand.check_books()


@pytest.mark.parametrize("has_spool", [False, True])
async def test_without_a_spool_or_where_it_refuses_the_ending_waits_in_memory(
    db_url: str,
    redis_url: str,
    short_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_spool: bool,
) -> None:
    options = {"spool_dir": short_tmp_path / "spool"} if has_spool else {}
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as stand:
        if stand.gateway.spool is not None:
            stand.gateway.spool._max_bytes = 10  # no record fits
        stand.engine.script = says("told all the same")
        outage = Outage(monkeypatch, hangs=False)

        answer = await stand.http().post(CHAT, json=_BODY)

        assert answer.status_code == 200
        ready = (await stand.http("").get("/ready")).json()
        assert ready["spool"] == ({"pending": 0, "writable": False} if has_spool else None)
        outage.is_over = True
        request, _, entry = await stand.last_request()
        assert (request.state, entry is not None) == ("settled", True)
        await stand.check_books()


async def test_a_gateway_whose_spool_cannot_be_written_does_not_start(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    settings = settings_for(db_url, redis_url, short_tmp_path, spool_dir="/dev/null/spool")

    with pytest.raises(SpoolFolderError, match="LORAPLEX_SPOOL_DIR"):
        async with open_gateway(settings):
            pass
