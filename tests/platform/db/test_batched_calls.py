"""What gathers while a statement is under way goes together, and nobody pays for another's trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest
from loraplex_platform.db import batched_calls
from loraplex_platform.db.batched_calls import MAX_ITEMS, MAX_SENDING, BatchedCalls
from loraplex_platform.db.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loraplex_platform.db.calls import CallPool, Row
    from loraplex_platform.db.session import Database

_DOUBLE = """
select item, n * 2 from jsonb_to_recordset(%(batch)s::jsonb) as asked (item integer, n bigint)
where n <> 13
"""


class _Server:
    """Stands for a `CallPool`: answers when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.answers: list[asyncio.Future[None]] = []

    async def rows(self, query: str, parameters: Mapping[str, object]) -> list[Row]:
        batch = msgspec.json.decode(cast("str", parameters["batch"]))
        self.batches.append(batch)
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]
        return [(item["item"], item["n"] * 2) for item in reversed(batch) if item["n"] != 13]

    def names(self, place: int) -> list[int]:
        return [item["n"] for item in self.batches[place]]


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def batched(server: _Server) -> BatchedCalls:
    return BatchedCalls(cast("CallPool", server), "select")


def _ask(batched: BatchedCalls, *numbers: int) -> list[asyncio.Task[Row | None]]:
    return [asyncio.create_task(batched.call({"n": number})) for number in numbers]


async def _until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 # of many things
            await asyncio.sleep(0.001)


async def test_what_comes_meanwhile_goes_in_the_next_statement(
    server: _Server, batched: BatchedCalls
) -> None:
    first = _ask(batched, 1)
    await _until(lambda: server.batches)
    rest = _ask(batched, 2, 3, 4)
    await asyncio.sleep(0)
    server.answers[0].set_result(None)
    await _until(lambda: len(server.batches) == 2)
    server.answers[1].set_result(None)

    answers = await asyncio.gather(*first, *rest)

    assert answers == [(0, 2), (0, 4), (1, 6), (2, 8)]
    assert [server.names(place) for place in range(2)] == [[1], [2, 3, 4]]
    later = _ask(batched, 5)
    await _until(lambda: len(server.batches) == 3)
    server.answers[2].set_result(None)
    assert await later[0] == (0, 10)


async def test_a_statement_takes_so_many_at_most(server: _Server, batched: BatchedCalls) -> None:
    asked = _ask(batched, *range(100, 100 + MAX_ITEMS + 1))
    for place in range(2):
        await _until(lambda place=place: len(server.batches) > place)  # type: ignore[misc]
        server.answers[place].set_result(None)
    await asyncio.gather(*asked)

    assert [len(batch) for batch in server.batches] == [MAX_ITEMS, 1]


async def test_what_the_statement_has_not_decided_is_asked_for_alone(
    server: _Server, batched: BatchedCalls
) -> None:
    asked = _ask(batched, 7, 13)
    await _until(lambda: server.answers)
    server.answers[0].set_result(None)

    assert await asyncio.gather(*asked) == [(0, 14), None]


async def test_who_left_before_its_turn_is_not_sent(server: _Server, batched: BatchedCalls) -> None:
    first = _ask(batched, 1)
    await _until(lambda: server.batches)
    leaving, staying = _ask(batched, 2, 3)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    server.answers[0].set_result(None)
    await _until(lambda: len(server.batches) == 2)
    server.answers[1].set_result(None)

    assert await staying == (0, 6)
    assert server.names(1) == [3]
    assert await first[0] == (0, 2)


async def test_who_leaves_during_its_turn_takes_nobody_along(
    server: _Server, batched: BatchedCalls
) -> None:
    leaving, staying = _ask(batched, 2, 3)
    await _until(lambda: server.batches)
    leaving.cancel()
    await asyncio.sleep(0)
    server.answers[0].set_result(None)

    assert await staying == (1, 6)


async def test_a_statement_that_hangs_holds_nobody_else_up(
    server: _Server, batched: BatchedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_calls, "PATIENCE_S", 0.01)
    hanging = _ask(batched, 1)
    await _until(lambda: server.batches)

    others = _ask(batched, 2)
    await _until(lambda: len(server.batches) == 2)
    server.answers[1].set_result(None)

    assert await others[0] == (0, 4)
    assert not hanging[0].done()
    server.answers[0].set_result(None)
    assert await hanging[0] == (0, 2)


async def test_no_more_than_so_many_hang_and_then_what_waits_is_sent(
    server: _Server, batched: BatchedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_calls, "PATIENCE_S", 0.01)
    asked = []
    for number in range(MAX_SENDING):
        asked += _ask(batched, number)
        await _until(lambda number=number: len(server.batches) == number + 1)  # type: ignore[misc]
    asked += _ask(batched, 100, 101)
    await asyncio.sleep(0.05)
    assert len(server.batches) == MAX_SENDING

    server.answers[2].set_result(None)
    await _until(lambda: len(server.batches) == MAX_SENDING + 1)
    for answer in server.answers:
        if not answer.done():
            answer.set_result(None)

    assert [row and row[1] for row in await asyncio.gather(*asked)] == [0, 2, 4, 6, 200, 202]
    assert server.names(MAX_SENDING) == [100, 101]


@pytest.mark.parametrize("error", [psycopg.errors.LockNotAvailable(), RuntimeError("a bug")])
async def test_an_error_sends_everybody_to_ask_alone(
    server: _Server, batched: BatchedCalls, error: Exception
) -> None:
    asked = _ask(batched, 1, 2)
    await _until(lambda: server.answers)
    server.answers[0].set_exception(error)

    assert await asyncio.gather(*asked) == [None, None]


async def test_no_database_is_no_database_for_all_of_them_and_then_over(
    server: _Server, batched: BatchedCalls
) -> None:
    asked = _ask(batched, 1, 2)
    await _until(lambda: server.answers)
    server.answers[0].set_exception(DatabaseUnavailableError("gone"))

    errors = await asyncio.gather(*asked, return_exceptions=True)

    assert [str(error) for error in errors] == ["gone", "gone"]
    assert errors[0] is not errors[1]
    again = _ask(batched, 3)
    await _until(lambda: len(server.answers) == 2)
    server.answers[1].set_result(None)
    assert await again[0] == (0, 6)


async def test_closing_leaves_nobody_waiting(server: _Server, batched: BatchedCalls) -> None:
    sent = _ask(batched, 1)
    await _until(lambda: server.batches)
    waiting = _ask(batched, 2)
    await asyncio.sleep(0)

    await batched.close()

    late = _ask(batched, 3)
    for task in (*sent, *waiting, *late):
        with pytest.raises(DatabaseUnavailableError):
            await asyncio.wait_for(task, 10)
    assert len(server.batches) == 1


async def test_what_cannot_be_sent_is_its_senders_own_trouble(
    server: _Server, batched: BatchedCalls
) -> None:
    odd = asyncio.create_task(batched.call({"n": object()}))
    [good] = _ask(batched, 1)
    await _until(lambda: server.answers)
    server.answers[0].set_result(None)

    assert await good == (0, 2)
    with pytest.raises(TypeError):
        await odd


async def test_over_a_real_database(db: Database) -> None:
    batched = db.sessions.batched(_DOUBLE)

    answers = await asyncio.gather(*(batched.call({"n": number}) for number in range(20)))

    assert [row and row[1] for row in answers] == [
        None if number == 13 else 2 * number for number in range(20)
    ]
    assert db.sessions.batched(_DOUBLE) is batched


async def test_ids_go_as_they_are(db: Database) -> None:
    query = """
    select item, id from jsonb_to_recordset(%(batch)s::jsonb) as asked (item integer, id uuid)
    """
    wanted: list[UUID] = [uuid4() for _ in range(3)]

    rows = await asyncio.gather(*(db.sessions.batched(query).call({"id": id_}) for id_ in wanted))

    assert [row and row[1] for row in rows] == wanted


# ---------------------------------------------------------------------------- by itself


class _Alone:
    """An item's own way to be done: ends when it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.ended = asyncio.Event()

    async def __call__(self) -> Row:
        self.num_begun += 1
        await self.ended.wait()
        return (0, 1000)


async def test_one_that_comes_by_itself_goes_its_own_way_and_what_comes_meanwhile_together(
    server: _Server, batched: BatchedCalls
) -> None:
    alone = _Alone()
    first = asyncio.create_task(batched.call({"n": 1}, alone))
    await _until(lambda: alone.num_begun == 1)
    others = [asyncio.create_task(batched.call({"n": n}, alone)) for n in (2, 3)]
    await asyncio.sleep(0)
    alone.ended.set()
    await _until(lambda: len(server.batches) == 1)
    server.answers[0].set_result(None)

    assert await asyncio.gather(first, *others) == [(0, 1000), (0, 4), (1, 6)]
    assert server.names(0) == [2, 3]
    assert alone.num_begun == 1


async def test_any_number_that_wait_by_themselves_hold_nobody_else_up(
    server: _Server, batched: BatchedCalls
) -> None:
    waiting = _Alone()
    stuck = []
    for n in range(2 * MAX_SENDING):
        stuck.append(asyncio.create_task(batched.call({"n": n}, waiting)))
        await _until(lambda n=n: waiting.num_begun == n + 1)  # type: ignore[misc] # a default binds it

    other = _ask(batched, 50)
    await _until(lambda: len(server.batches) == 1)
    server.answers[0].set_result(None)

    assert await other[0] == (0, 100)
    waiting.ended.set()
    assert await asyncio.gather(*stuck) == [(0, 1000)] * len(stuck)
    assert batched._num_late_alone == 0


async def test_what_one_by_itself_raises_its_caller_hears(batched: BatchedCalls) -> None:
    async def alone() -> Row:
        raise psycopg.errors.RaiseException("of another kind")

    with pytest.raises(psycopg.errors.RaiseException, match="of another kind"):
        await batched.call({"n": 1}, alone)


async def test_closing_ends_one_by_itself_too(batched: BatchedCalls) -> None:
    alone = _Alone()
    asked = asyncio.create_task(batched.call({"n": 1}, alone))
    await _until(lambda: alone.num_begun == 1)

    await batched.close()

    with pytest.raises(DatabaseUnavailableError):
        await asked
