"""The table of faults: each case breaks something under traffic and says what every client got.

What must be true afterwards is the same for all of them (`World.judge`), what a case says beside that
is asserted where it is said.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from loraplex_engine.client import ENGINE_SILENCE_S
from loraplex_platform.gateway.failpoints import Point

from tests.chaos.world import (
    DATABASE_DEADLINE_S,
    LEASE_S,
    Answer,
    ProcessUnderTest,
    Unheard,
    World,
    told,
)
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import eventually, says
from tests.support.pausing import paused

# A refusal says so by the deadline; the rest is what a machine with two cores needs for all at once.
SLACK_S = 3.0
# What a request may wait for the books once it has ended, see gateway/books.py.
ANSWER_WAIT_S = 3.0
# The promise of rates/redis_client.py is 0.1 s a call; a request makes a few.
REDIS_WAIT_S = 0.6


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        run: breaks something; what the clients got.
        in_ci: one of the few that every change is tested with.
        recovers_s: by when nothing may be held or reserved any more, after the last client has gone.
        limit: of the tenant, in tokens.
        may_be_billed: which requests beside whole answers; no others are. Who pays for an answer that
            was made and perhaps not heard is decided in docs/adr/0004.
        may_be_given_away: of two faults at once: the platform may pay for answers that were delivered.
    """

    name: str
    run: Callable[[World], Awaitable[list[Answer]]]
    in_ci: bool = False
    recovers_s: float = LEASE_S + 8.0
    limit: int = 10_000_000
    may_be_billed: frozenset[Unheard] = frozenset()
    may_be_given_away: bool = False


BROKEN: frozenset[Unheard] = frozenset({"broken"})
CASES: list[Case] = []


def case(
    name: str, **options: object
) -> Callable[
    [Callable[[World], Awaitable[list[Answer]]]], Callable[[World], Awaitable[list[Answer]]]
]:
    """Add a case to the table."""

    def add(
        run: Callable[[World], Awaitable[list[Answer]]],
    ) -> Callable[[World], Awaitable[list[Answer]]]:
        CASES.append(Case(name, run, **options))  # type: ignore[arg-type] # of Case
        return run

    return add


# ---------------------------------------------------------------------------- gateways that die

# Inside a transaction is certain only if the database takes its time over it.
_SLOW = """
create function chaos_slow() returns trigger language plpgsql as
    $$ begin perform pg_sleep(0.4); return new; end $$;
create trigger chaos_slow before insert on {table} for each row execute function chaos_slow();
"""
# Whoever inserts holds the parent and asks for its partition: dropping a trigger asks the other way round.
_SLOW_NO_MORE = """
lock table {table} in access exclusive mode;
drop function chaos_slow() cascade;
"""


async def _kill_at(world: World, point: str, *, is_stream: bool) -> list[Answer]:
    inside = {"inside_tx1": "requests", "inside_tx2": "ledger"}.get(point)
    what = f"{point}:kill(0.2)" if inside else f"{point}:kill#3"
    world.speak(token_delay_s=0.005)
    if inside:
        with world.owner() as owner:
            owner.execute(_SLOW.format(table=inside))
    try:
        async with world.gateway(failpoint=what) as gateway:
            answers = await world.ask_many([gateway], 6, is_stream=is_stream)
            async with asyncio.timeout(20):
                code = await gateway.process.wait()
            assert code == -signal.SIGKILL, code
    finally:
        if inside:
            with world.owner() as owner, owner.transaction():
                owner.execute(_SLOW_NO_MORE.format(table=inside))
    return answers


def _add_kills() -> None:
    for point in get_args(Point):
        for is_stream in (False, True):
            if point in ("clock",):
                continue
            kind = "stream" if is_stream else "whole"

            async def run(
                world: World, point: str = point, is_stream: bool = is_stream
            ) -> list[Answer]:
                return await _kill_at(world, point, is_stream=is_stream)

            in_ci = (point, is_stream) in {
                ("mid_stream", True),
                ("inside_tx2", True),
            }
            CASES.append(Case(f"kill -9 {point}, {kind}", run, in_ci=in_ci, may_be_billed=BROKEN))


_add_kills()


@case("kill -9 of a gateway with 40 in flight, two sweepers")
async def two_sweepers(world: World) -> list[Answer]:
    """Both find the same requests due at the same moment."""
    world.speak(token_delay_s=0.2)
    async with world.worker(), world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 40))
        await world.has_running(40)
        gateway.kill()
        return await asking


@case("a gateway that stands still for longer than its lease")
async def frozen_gateway(world: World) -> list[Answer]:
    """The sweeper takes over; the gateway comes back, and finds its lease token outdated."""
    world.speak(token_delay_s=0.02)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 8))
        await world.has_running(8)
        with paused(gateway.process.pid):
            await asyncio.sleep(LEASE_S + 3.0)
        return await asking


@case("a gateway that stands still before it dispatches, for longer than its lease")
async def frozen_before_dispatch(world: World) -> list[Answer]:
    """What it held is void and perhaps given to others by then: it must not run."""
    return await _freeze_at(world, "before_dispatch")


@case("a gateway that stands still between its last look at the lease and the engine")
async def frozen_before_send(world: World) -> list[Answer]:
    """The engine runs what is void; nobody hears a word of it."""
    return await _freeze_at(world, "before_send")


async def _freeze_at(world: World, point: str) -> list[Answer]:
    world.speak()
    async with world.gateway(failpoint=f"{point}:stall({LEASE_S + 3.0})#2") as gateway:
        answers = await world.ask_many([gateway], 4)
    # 503: its lease is over; 502: the engine has taken it for gone first.
    assert any(answer.status in (502, 503) for answer in answers), told(answers)
    assert all(answer.is_whole for answer in answers if answer.status == 200), told(answers)
    return answers


@case("SIGTERM under load")
async def sigterm(world: World) -> list[Answer]:
    """Running requests end in order, new ones hear 503."""
    world.speak(token_delay_s=0.02)
    async with world.gateway(drain_grace_s=10) as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 20))
        await world.has_running(20)
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        late = await world.ask_many([gateway], 4)
        answers = await asking
        assert await gateway.process.wait() == 0
    assert all(answer.is_whole for answer in answers), told(answers)
    assert not any(answer.is_whole for answer in late), told(late)
    return answers + late


@case("SIGTERM without grace under load")
async def sigterm_now(world: World) -> list[Answer]:
    """Streams are told, nothing is billed."""
    world.speak(token_delay_s=0.1)
    async with world.gateway(drain_grace_s=0) as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 20))
        await world.has_running(20)
        gateway.process.send_signal(signal.SIGTERM)
        answers = await asking
        assert await gateway.process.wait() == 0
    assert {answer.code for answer in answers} == {"draining"}, told(answers)
    return answers


# ---------------------------------------------------------------------------- clients


@case("clients leave at random bytes", may_be_billed=BROKEN)
async def aborts(world: World) -> list[Answer]:
    """Of 60 streams most are broken off: in the head, in a frame, after the last token."""
    chance = random.Random(7)
    world.speak(token_delay_s=0.01)
    async with world.gateway() as gateway:
        return await asyncio.gather(
            *(
                world.ask(
                    gateway,
                    is_stream=number % 4 != 0,
                    leaves_after_bytes=None if number % 5 == 0 else chance.randrange(1, 6000),
                )
                for number in range(60)
            )
        )


@case("each request five times, under one Idempotency-Key")
async def five_times(world: World) -> list[Answer]:
    """Three at once and two after: one is run, one is billed."""
    world.speak(token_delay_s=0.01)
    assert world.customer is not None
    tenant_id = world.customer.tenant_id
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(world.gateway()) for _ in range(2)]

        async def one(number: int) -> list[Answer]:
            key = {"Idempotency-Key": f"{tenant_id}-{number}"}
            first = await world.ask_many(gateways, 3, headers=key, is_stream=False)
            later = [await world.ask(gateway, headers=key) for gateway in gateways]
            assert sum(a.is_whole for a in first) == 1, told(first)
            assert {a.code for a in later} == {"idempotency_completed"}, told(later)
            return first + later

        answers = await asyncio.gather(*(one(number) for number in range(10)))
    flat = [answer for five in answers for answer in five]
    assert sum(answer.is_whole for answer in flat) == 10
    return flat


@case(
    "a lost answer is asked for again under its Idempotency-Key, of another gateway",
    may_be_billed=BROKEN,
)
async def lost_answer(world: World) -> list[Answer]:
    """The gateway dies between the books and the answer: billed, and not run again."""
    world.speak()
    key = {"Idempotency-Key": f"lost-{random.getrandbits(64)}"}
    async with world.gateway() as second:
        async with world.gateway(failpoint="after_tx2:kill") as first:
            lost = await world.ask(first, headers=key)
        again = await world.ask(second, headers=key)
    assert not lost.is_whole
    assert again.code == "idempotency_completed", again
    return [lost, again]


@case("an answer that broke off is asked for again under its Idempotency-Key, of another gateway")
async def absorbed_answer(world: World) -> list[Answer]:
    """The gateway dies before the books are closed: absorbed, and the key is free again."""
    world.speak()
    key = {"Idempotency-Key": f"broke-off-{random.getrandbits(64)}"}
    async with world.gateway() as second:
        async with world.gateway(failpoint="before_tx2:kill") as first:
            lost = await world.ask(first, headers=key)
        at_once = await world.ask(second, headers=key)
        await eventually(lambda: _is_quiet(world), "the sweeper's end")
        again = await world.ask(second, headers=key)
    assert at_once.code == "idempotency_in_progress", at_once
    assert again.is_whole, again
    return [lost, at_once, again]


# ---------------------------------------------------------------------------- engines


@case("engine killed before its first token")
async def engine_in_prefill(world: World) -> list[Answer]:
    """Nothing is billed; the next requests hear 503 until it is back."""
    world.speak(first_token_delay_s=5.0)
    return await _kill_engine(world)


@case("engine killed while it decodes")
async def engine_in_decode(world: World) -> list[Answer]:
    """What had come is absorbed."""
    world.speak(token_delay_s=0.1)
    return await _kill_engine(world)


async def _kill_engine(world: World) -> list[Answer]:
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 12))
        await world.has_running(12)
        await asyncio.sleep(0.3)
        await world.engine.crash()
        answers = await asking
        await world.engine.start()
        world.speak()
        await eventually(lambda: _has_engine(gateway), "the engine again")
        after = await world.ask_many([gateway], 4)
    assert {answer.code for answer in answers} == {"engine_lost"}, told(answers)
    assert all(answer.is_whole for answer in after), told(after)
    return answers + after


async def _has_engine(gateway: ProcessUnderTest) -> bool:
    return bool((await gateway.ready())["engines_ready"])


@case("network cut between gateway and engine", recovers_s=25.0)
async def engine_cut(world: World) -> list[Answer]:
    """Nobody is told: the silence is noticed, what ran is absorbed, and it is found again."""
    world.speak(token_delay_s=0.5)
    async with world.between_engine() as proxy, world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 8))
        await world.has_running(8)
        proxy.cut()
        answers = await asking
        proxy.heal()
        world.speak()
        await eventually(lambda: _has_engine(gateway), "the engine again")
        after = await world.ask_many([gateway], 4)
    assert {answer.code for answer in answers} == {"engine_lost"}, told(answers)
    assert max(answer.elapsed_s for answer in answers) < ENGINE_SILENCE_S + 3.0 + SLACK_S
    assert all(answer.is_whole for answer in after), told(after)
    return answers + after


@case("gateway and engine killed together")
async def both_die(world: World) -> list[Answer]:
    """A double fault: what was seen by nobody is absorbed or void, never billed."""
    world.speak(token_delay_s=0.1)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 12))
        await world.has_running(12)
        gateway.kill()
        await world.engine.crash()
        answers = await asking
    await asyncio.sleep(0.5)
    await world.engine.start()
    return answers


# ---------------------------------------------------------------------------- Redis


@case("Redis stands still")
async def redis_paused(world: World) -> list[Answer]:
    """Requests go on without it, none waits for long."""
    world.speak()
    async with world.gateway() as gateway:
        with paused(world.redis.pid):
            answers = [await world.ask(gateway, is_stream=n % 2 == 0) for n in range(6)]
        answers += await world.ask_many([gateway], 6)
    assert all(answer.is_whole for answer in answers), told(answers)
    slowest_s = max(answer.elapsed_s for answer in answers)
    assert slowest_s < REDIS_WAIT_S + SLACK_S, slowest_s
    return answers


@case("network cut between gateway and Redis")
async def redis_cut(world: World) -> list[Answer]:
    """As if it stood still, for this gateway alone; afterwards it is used again."""
    world.speak()
    async with world.between("redis") as (proxy, url), world.gateway(redis_url=url) as gateway:
        before = await world.ask_many([gateway], 4)
        proxy.cut()
        answers = [await world.ask(gateway, is_stream=n % 2 == 0) for n in range(6)]
        proxy.heal()
        after = await world.ask_many([gateway], 6)
    assert all(answer.is_whole for answer in before + answers + after), told(answers + after)
    slowest_s = max(answer.elapsed_s for answer in answers)
    assert slowest_s < REDIS_WAIT_S + SLACK_S, slowest_s
    return before + answers + after


@case("Redis killed and started empty")
async def redis_killed(world: World) -> list[Answer]:
    """Nothing in it was worth keeping."""
    world.speak(token_delay_s=0.01)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 12))
        await world.has_running(12)
        world.restart_redis()
        answers = await asking + await world.ask_many([gateway], 12)
    assert all(answer.is_whole for answer in answers), told(answers)
    return answers


@case("Redis flushed under load")
async def redis_flushed(world: World) -> list[Answer]:
    """Again and again."""
    import redis

    world.speak(token_delay_s=0.01)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 40))
        with redis.Redis.from_url(world.redis.url) as client:
            for _ in range(20):
                client.flushall()
                await asyncio.sleep(0.05)
        answers = await asking
    assert all(answer.is_whole for answer in answers), told(answers)
    return answers


# ---------------------------------------------------------------------------- Postgres


@case("Postgres stands still", in_ci=True, recovers_s=25.0)
async def postgres_paused(world: World) -> list[Answer]:
    """What runs is answered in time and billed after; what is new is refused by the deadline."""
    world.speak(token_delay_s=0.02)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 10))
        await world.has_running(10)
        with paused(world.postgres.pid):
            answers = await asking
            refused = await world.ask_many([gateway], 6)
            spool = (await gateway.ready())["spool"]
        assert all(answer.is_whole for answer in answers), told(answers)
        assert not any(answer.is_whole for answer in refused), told(refused)
        assert {answer.status for answer in refused} == {503}, told(refused)
        assert max(a.elapsed_s for a in refused) < DATABASE_DEADLINE_S + SLACK_S, refused
        assert max(a.elapsed_s for a in answers) < 2.0 + ANSWER_WAIT_S + SLACK_S, answers
        assert spool == {"pending": 10, "writable": True}, spool
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        return answers + refused


async def _has_spooled(gateway: ProcessUnderTest, count: int) -> bool:
    return bool((await gateway.ready())["spool"]["pending"] == count)


@case("Postgres killed under load", recovers_s=45.0)
async def postgres_killed(world: World) -> list[Answer]:
    """kill -9 of the server; it comes back on the same files."""
    world.speak(token_delay_s=0.02)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 20))
        await world.has_running(20)
        await asyncio.to_thread(world.postgres.process.kill)  # type: ignore[union-attr] # our child
        answers = await asking
        refused = await world.ask_many([gateway], 4)
        world.restart_postgres()
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        after = await world.ask_many([gateway], 4)
    assert all(answer.is_whole for answer in answers), told(answers)
    assert not any(answer.is_whole for answer in refused), told(refused)
    assert all(answer.is_whole for answer in after), told(after)
    return answers + refused + after


@case("Postgres fails over to a synchronous standby under load", recovers_s=45.0)
async def postgres_fails_over(world: World) -> list[Answer]:
    """What was acknowledged is on the standby; what ended meanwhile is in the spool."""
    standby = world.start_standby()
    await eventually(lambda: _has_standby(world), "a synchronous standby")
    world.speak(token_delay_s=0.02)
    async with world.gateway() as gateway:
        before = await world.ask_many([gateway], 8)
        asking = asyncio.create_task(world.ask_many([gateway], 20))
        await world.has_running(20)
        await asyncio.to_thread(world.postgres.process.kill)  # type: ignore[union-attr] # our child
        answers = await asking
        refused = await world.ask_many([gateway], 4)
        world.fail_over(standby)
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        after = await world.ask_many([gateway], 4)
    whole = before + answers + after
    assert all(answer.is_whole for answer in whole), told(whole)
    assert not any(answer.is_whole for answer in refused), told(refused)
    return whole + refused


async def _has_standby(world: World) -> bool:
    with world.owner() as owner:
        found = owner.execute("select sync_state from pg_stat_replication").fetchall()
    return found == [("sync",)]


_TERMINATES = """
create function chaos_terminate() returns trigger language plpgsql security definer as $$ begin
    if pg_current_xact_id()::text::bigint % 3 = 0 then
        perform pg_terminate_backend(pg_backend_pid());
    end if;
    return null;
end $$;
create constraint trigger chaos_terminate_tx1 after insert on requests
    deferrable initially deferred for each row execute function chaos_terminate();
create constraint trigger chaos_terminate_tx2 after insert on ledger
    deferrable initially deferred for each row execute function chaos_terminate();
"""
_TERMINATES_NO_MORE = "drop function chaos_terminate() cascade"


@case("every third backend is terminated at its COMMIT")
async def terminated(world: World) -> list[Answer]:
    """Of reserve and settle alike: the second try does it."""
    world.speak()
    with world.owner() as owner:
        owner.execute(_TERMINATES)
    try:
        async with world.gateway() as gateway:
            answers = []
            for _ in range(10):
                answers += await world.ask_many([gateway], 4)
            await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
    finally:
        with world.owner() as owner:
            owner.execute(_TERMINATES_NO_MORE)
    codes = {answer.code for answer in answers if not answer.is_whole}
    assert codes <= {"database_unavailable"}, told(answers)
    assert sum(answer.is_whole for answer in answers) > 20, told(answers)
    return answers


@case("the acknowledgement of TX1's COMMIT is lost, of every third")
async def lost_tx1(world: World) -> list[Answer]:
    """The second try finds its own reservation."""
    return await _lose_replies(world, '"what":"reserve"')


@case("the acknowledgement of TX2's COMMIT is lost, of every third")
async def lost_tx2(world: World) -> list[Answer]:
    """The second try finds its own settlement: told, and billed once."""
    return await _lose_replies(world, '"what":"settle"')


async def _lose_replies(world: World, words: str) -> list[Answer]:
    world.speak()
    async with (
        world.between("postgres") as (proxy, url),
        world.gateway(database_url=url) as gateway,
    ):
        proxy.lose_replies_to(words, every=3)
        answers = []
        for _ in range(6):
            answers += await world.ask_many([gateway], 4)
        num_lost = proxy.num_lost
        proxy.lose_replies_to(words, every=0)
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
    assert num_lost >= 3, num_lost
    # A second try may lose its reply as well: then nothing was run, and the sweeper lets go of it.
    codes = {answer.code for answer in answers if not answer.is_whole}
    assert codes <= {"database_unavailable"}, told(answers)
    assert sum(answer.is_whole for answer in answers) > 12, told(answers)
    return answers


@case("network cut between gateway and Postgres, for longer than the lease", recovers_s=25.0)
async def postgres_cut(world: World) -> list[Answer]:
    """What ends meanwhile is told, kept, and billed after; what would not end is ended as our fault."""
    async with (
        world.between("postgres") as (proxy, url),
        world.gateway(database_url=url) as gateway,
    ):
        ending = await _begin(world, gateway, 10, token_delay_s=0.02)
        lasting = await _begin(world, gateway, 4, token_delay_s=0.5)
        proxy.cut()
        answers = await ending
        refused = await world.ask_many([gateway], 4)
        ended = await lasting
        spool = (await gateway.ready())["spool"]
        proxy.heal()
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        world.speak()
        after = await world.ask_many([gateway], 4)
    assert all(answer.is_whole for answer in answers + after), told(answers + after)
    assert {answer.status for answer in refused} == {503}, told(refused)
    assert max(answer.elapsed_s for answer in refused) < DATABASE_DEADLINE_S + SLACK_S, refused
    assert {answer.code for answer in ended} <= {"engine_lost", "engine_error"}, told(ended)
    assert spool["writable"], spool
    assert spool["pending"] >= 10, spool
    return answers + refused + ended + after


async def _begin(
    world: World, gateway: ProcessUnderTest, count: int, *, token_delay_s: float
) -> asyncio.Task[list[Answer]]:
    """So many requests more, which run."""
    world.speak(token_delay_s=token_delay_s)
    running = world.engine.num_running
    asking = asyncio.create_task(world.ask_many([gateway], count))
    await world.has_running(running + count)
    return asking


# ---------------------------------------------------------------------------- the spool


@case("disk full on the spool", recovers_s=45.0)
async def disk_full(world: World) -> list[Answer]:
    """Some endings are kept on disk and the rest in memory; readiness says so; all are billed."""
    world.speak(token_delay_s=0.02)
    async with world.gateway(max_file_bytes=4096) as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 30))
        await world.has_running(30)
        with paused(world.postgres.pid):
            answers = await asking
            spool = (await gateway.ready())["spool"]
        assert 0 < spool["pending"] < 30, spool
        assert not spool["writable"], spool
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        assert all(answer.is_whole for answer in answers), told(answers)
        return answers


@case("gateway killed with a full spool, five copies of which are replayed", recovers_s=45.0)
async def spool_of_the_dead(world: World) -> list[Answer]:
    """A double fault, and duplicate delivery: once is once."""
    world.speak(token_delay_s=0.02)
    spool = world.folder / "spool"
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 12))
        await world.has_running(12)
        with paused(world.postgres.pid):
            answers = await asking
            assert (await gateway.ready())["spool"]["pending"] == 12
            gateway.kill()
            await gateway.process.wait()
            _copy_spools(spool, 4)
    assert all(answer.is_whole for answer in answers), told(answers)
    async with world.gateway() as first, world.gateway() as second:
        await eventually(lambda: _count_spools(spool) <= 2, "the copies gone")
        for gateway in (first, second):
            await eventually(
                lambda gateway=gateway: _has_spooled(gateway, 0),  # type: ignore[misc]
                "the spool's end",
            )
        return answers


def _copy_spools(folder: Path, times: int) -> None:
    for path in list(folder.glob("*.spool")):
        if path.stat().st_size:
            for number in range(times):
                shutil.copy(path, path.with_name(f"copy-{number}-{path.name}"))


def _count_spools(folder: Path) -> int:
    return len(list(folder.glob("*.spool")))


# ---------------------------------------------------------------------------- clocks


@case("a gateway's clock jumps an hour ahead")
async def clock_ahead(world: World) -> list[Answer]:
    """It refuses from then on, what runs there ends well, and the others serve."""
    return await _jump(world, 3600)


@case("a gateway's clock jumps an hour back")
async def clock_back(world: World) -> list[Answer]:
    """As ahead."""
    return await _jump(world, -3600)


async def _jump(world: World, seconds: int) -> list[Answer]:
    world.speak(token_delay_s=0.02)
    wrong_clock = f"clock:skew({seconds})#5"
    async with world.gateway(failpoint=wrong_clock) as wrong, world.gateway() as right:
        before = await world.ask_many([wrong, right], 8)
        after_wrong = await world.ask_many([wrong], 8)
        after_right = await world.ask_many([right], 8)
    assert {answer.code for answer in after_wrong} == {"clock_skew"}, told(after_wrong)
    whole = before + after_right
    assert all(answer.is_whole for answer in whole), told(whole)
    return before + after_wrong + after_right


# ---------------------------------------------------------------------------- races for a budget

# Of `World.ask`, under the tiny model's template.
_PROMPT_TOKENS = len(
    tiny_model.ids_of(
        "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
)
RACE_DEADLINE_S = 15.0  # all at once on two cores takes its time
RACE_TOKENS = 20  # the completion's max_tokens, all of which is said


@asynccontextmanager
async def _gateways(
    world: World, *, database_deadline_s: float = DATABASE_DEADLINE_S
) -> AsyncIterator[list[ProcessUnderTest]]:
    """Three, started side by side; what those that live have told and only spooled is booked before they end."""
    async with AsyncExitStack() as stack:
        gateways = await asyncio.gather(
            *(
                stack.enter_async_context(world.gateway(database_deadline_s=database_deadline_s))
                for _ in range(3)
            )
        )
        yield gateways
        await _until_booked([one for one in gateways if one.process.returncode is None])


async def _until_booked(gateways: list[ProcessUnderTest]) -> None:
    """Until nothing is left in the spools of these."""
    for gateway in gateways:
        await eventually(
            lambda gateway=gateway: _has_spooled(gateway, 0),  # type: ignore[misc]
            "the spool's end",
        )


async def race(world: World, num_clients: int, num_paid: int) -> list[Answer]:
    """Three gateways, and a budget for so many of their clients."""
    world.engine.script = says("x" * 100, end=False)
    async with _gateways(world, database_deadline_s=RACE_DEADLINE_S) as gateways:
        answers = await world.ask_many(gateways, num_clients, max_tokens=RACE_TOKENS)
    whole = [answer for answer in answers if answer.is_whole]
    refused = {answer.code for answer in answers if not answer.is_whole}
    assert len(whole) == num_paid, told(answers)
    assert refused <= {"insufficient_quota"}, told(answers)
    assert {answer.usage[0] for answer in whole if answer.usage} == {_PROMPT_TOKENS}
    return answers


@case(
    "three gateways, 60 clients, a budget for 15",
    in_ci=True,
    limit=15 * (_PROMPT_TOKENS + RACE_TOKENS),
)
async def small_race(world: World) -> list[Answer]:
    """The same as the next, for every change."""
    return await race(world, 60, 15)


@case("three gateways, 200 clients, a budget for 50", limit=50 * (_PROMPT_TOKENS + RACE_TOKENS))
async def large_race(world: World) -> list[Answer]:
    """No gateway knows what the others have admitted; the database does."""
    return await race(world, 200, 50)


@case(
    "three gateways, 200 clients, a budget for 50; one gateway killed",
    limit=50 * (_PROMPT_TOKENS + RACE_TOKENS),
    may_be_billed=BROKEN,
)
async def race_with_a_death(world: World) -> list[Answer]:
    """What the dead one held is free again within its lease."""
    world.engine.script = says("x" * 100, end=False, token_delay_s=0.01)
    async with _gateways(world, database_deadline_s=RACE_DEADLINE_S) as gateways:
        asking = asyncio.create_task(world.ask_many(gateways, 200, max_tokens=RACE_TOKENS))
        await world.has_running(10)
        gateways[0].kill()
        return await asking


# ---------------------------------------------------------------------------- two faults at once


@case(
    "a race for a budget; one gateway and Postgres killed",
    limit=50 * (_PROMPT_TOKENS + RACE_TOKENS),
    may_be_billed=BROKEN,
    may_be_given_away=True,
    recovers_s=60.0,
)
async def race_with_two_deaths(world: World) -> list[Answer]:
    """No limit is passed; at most what the dead gateway had in its spool is given away."""
    world.engine.script = says("x" * 100, end=False, token_delay_s=0.02)
    async with _gateways(world) as gateways:
        asking = asyncio.create_task(world.ask_many(gateways, 100, max_tokens=RACE_TOKENS))
        await world.has_running(10)
        await asyncio.to_thread(world.postgres.process.kill)  # type: ignore[union-attr] # our child
        gateways[0].kill()
        answers = await asking
        world.restart_postgres()
        await _until_booked(gateways[1:])
        return answers + await world.ask_many(gateways[1:], 60, max_tokens=RACE_TOKENS)


@case(
    "a race for a budget; one gateway killed and Redis flushed",
    limit=50 * (_PROMPT_TOKENS + RACE_TOKENS),
    may_be_billed=BROKEN,
)
async def race_with_a_death_and_no_redis(world: World) -> list[Answer]:
    """Budgets know nothing of Redis."""
    world.engine.script = says("x" * 100, end=False, token_delay_s=0.01)
    async with _gateways(world, database_deadline_s=RACE_DEADLINE_S) as gateways:
        asking = asyncio.create_task(world.ask_many(gateways, 200, max_tokens=RACE_TOKENS))
        await world.has_running(10)
        gateways[0].kill()
        world.restart_redis()
        return await asking


@case("Postgres and Redis killed together", recovers_s=45.0)
async def both_stores_die(world: World) -> list[Answer]:
    """What runs is told and billed after; what is new hears 503 in time."""
    world.speak(token_delay_s=0.02)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 12))
        await world.has_running(12)
        await asyncio.to_thread(world.postgres.process.kill)  # type: ignore[union-attr] # our child
        world.restart_redis()
        answers = await asking
        refused = await world.ask_many([gateway], 4)
        world.restart_postgres()
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        after = await world.ask_many([gateway], 4)
    assert all(answer.is_whole for answer in answers + after), told(answers + after)
    assert {answer.status for answer in refused} == {503}, told(refused)
    assert max(a.elapsed_s for a in refused) < DATABASE_DEADLINE_S + REDIS_WAIT_S + SLACK_S, refused
    return answers + refused + after


@case("the engine is killed while Postgres stands still", recovers_s=25.0)
async def engine_dies_without_postgres(world: World) -> list[Answer]:
    """A fault is kept on disk like any ending."""
    world.speak(token_delay_s=0.1)
    async with world.gateway() as gateway:
        asking = asyncio.create_task(world.ask_many([gateway], 8))
        await world.has_running(8)
        with paused(world.postgres.pid):
            await world.engine.crash()
            answers = await asking
        await world.engine.start()
        await eventually(lambda: _has_spooled(gateway, 0), "the spool's end")
        await eventually(lambda: _has_engine(gateway), "the engine again")
    assert {answer.code for answer in answers} == {"engine_lost"}, told(answers)
    return answers


@case(
    "a gateway is cut off from Postgres and then killed",
    may_be_given_away=True,
    recovers_s=25.0,
)
async def cut_off_and_killed(world: World) -> list[Answer]:
    """The stated bound: what only its spool knows is given away where nobody replays that in time."""
    async with world.between("postgres") as (proxy, url):
        async with world.gateway(database_url=url) as gateway:
            ending = await _begin(world, gateway, 8, token_delay_s=0.02)
            proxy.cut()
            answers = await ending
            gateway.kill()
            await gateway.process.wait()
        proxy.heal()
        await eventually(lambda: _is_quiet(world), "the sweeper's end")
    async with world.gateway() as heir:  # the spool comes too late, and changes nothing
        await eventually(lambda: _count_spools(world.folder / "spool") <= 1, "the heir's end")
        await eventually(lambda: _has_spooled(heir, 0), "the spool's end")
    assert all(answer.is_whole for answer in answers), told(answers)
    return answers


async def _is_quiet(world: World) -> bool:
    with world.owner() as owner:
        row = owner.execute("select count(*) from requests where state = 'reserved'").fetchone()
    return row == (0,)
