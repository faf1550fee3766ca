"""The spool: what ends while Postgres is away is on disk, and on the books when it is back."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from loraplex_platform.db.session import Database, DatabaseUnavailableError
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.spool import (
    Spool,
    SpoolError,
    SpoolFile,
    SpoolFolderError,
    SpoolRecord,
    Void,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.records import Settlement
from loraplex_platform.worker.engines import ConnectedEngines
from loraplex_platform.worker.sweeper import SWEEPER, Sweeper

from tests.support.metering import (
    Customer,
    add_customer,
    reservation,
    rows_of,
    run_sql,
    settlement,
)
from tests.support.processes import Peer, hear_all


def make_spool(folder: Path, db: Database, *, max_bytes: int = 1 << 20) -> Spool:
    return Spool(folder, db.sessions, GatewayMetrics(), max_bytes=max_bytes)


def outcomes(spool: Spool) -> dict[str, float]:
    """How often each came of a replay."""
    [family] = spool._metrics.spool_replayed.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}


async def reserved(db: Database, customer: Customer, **changes: Any) -> UUID:
    mine = reservation(customer, **changes)
    await metering.reserve(db.sessions, mine)
    return mine.request_id


def leave_behind(folder: Path, payload: bytes) -> None:
    """As a gateway that is gone."""
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([payload], 1 << 16)
    file.close()


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))


async def states(db: Database, *request_ids: UUID) -> list[str]:
    return [(await rows_of(db, request_id))[0].state for request_id in request_ids]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


# ---------------------------------------------------------------------------- records


def test_a_record_comes_back_as_it_was() -> None:
    record = SpoolRecord(
        settlement=Settlement(
            request_id=uuid7(),
            lease_token=3,
            usage=AttemptUsage(
                outcome="completed",
                source="terminal",
                prompt_tokens=10,
                generated=20,
                cached_tokens=4,
                discarded_past_stop=2,
                attempt=2,
                replica_id="r1",
            ),
            earlier=(
                AttemptUsage(outcome="lost", source="observed", prompt_tokens=10, generated=1),
            ),
            settled_by="gw-1",
            finish_reason="stop",
            http_status=200,
            ttft_ms=5,
            e2e_ms=70,
        )
    )

    again = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=SpoolRecord)

    assert again == record
    assert isinstance(again.settlement, Settlement)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_record_is_left_out_and_later_ones_do_not_lie_behind_it(
    folder: Path, cut: int
) -> None:
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([b"one", b"two", b"three"], 1000)
    file.close()
    size = file.path.stat().st_size
    os.truncate(file.path, size - cut)

    adopted = SpoolFile.adopt(file.path)

    assert adopted is not None
    assert adopted[1] == [b"one", b"two"]
    adopted[0].close()


def test_garbage_is_no_record(folder: Path) -> None:
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([b"one"], 1000)
    file.close()
    for garbage in (b"\0" * 64, b"\xff" * 64, struct.pack("<II", 3, 0) + b"bad", b"x"):
        whole = file.path.read_bytes()
        with file.path.open("ab") as end:
            end.write(garbage)

        adopted = SpoolFile.adopt(file.path)

        assert adopted is not None
        assert adopted[1] == [b"one"]
        adopted[0].close()
        file.path.write_bytes(whole)


async def test_a_record_of_the_release_before_rollouts_is_still_read(
    folder: Path, db: Database
) -> None:
    """It says nothing of fingerprints and paces; one of now does, and they reach the books."""
    customer = await add_customer(db)
    old, new = [await reserved(db, customer) for _ in range(2)]
    record = msgspec.to_builtins(SpoolRecord(settlement=settlement(old)))
    for name in ("fingerprint", "itl_mean_ms", "itl_p95_ms"):
        del record["settlement"][name]
    leave_behind(folder, msgspec.msgpack.encode(record))

    async with make_spool(folder, db) as spool:
        paced = settlement(new, fingerprint="sha256:f", itl_mean_ms=1.5, itl_p95_ms=2.25)
        await spool.put(SpoolRecord(settlement=paced))
        await spool._adopt()
        await spool.replay_once()

    assert [(await rows_of(db, id_))[0].state for id_ in (old, new)] == ["settled"] * 2
    before, now = [(await rows_of(db, id_))[0] for id_ in (old, new)]
    assert (before.fingerprint, before.itl_mean_ms, before.itl_p95_ms) == (None, None, None)
    assert (now.fingerprint, now.itl_mean_ms, now.itl_p95_ms) == ("sha256:f", 1.5, 2.25)


def test_a_record_that_a_disk_has_spoilt_costs_that_one_alone(folder: Path) -> None:
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([b"one", b"two", b"three"], 1000)
    file.close()
    data = bytearray(file.path.read_bytes())
    data[data.index(b"two")] ^= 1
    file.path.write_bytes(data)

    adopted = SpoolFile.adopt(file.path)

    assert adopted is not None
    assert adopted[1] == [b"one", b"three"]
    adopted[0].close()


def test_half_a_write_is_cut_off_so_that_the_next_record_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([b"one"], 1000)
    fill_disk(monkeypatch, file.path.stat().st_size + 6)
    with pytest.raises(SpoolError, match="No space left"):
        file.append([b"a record too many"], 1000)
    monkeypatch.undo()
    file.append([b"two"], 1000)
    file.close()

    adopted = SpoolFile.adopt(file.path)

    assert adopted is not None
    assert adopted[1] == [b"one", b"two"]
    adopted[0].delete()


def test_a_file_has_one_owner_and_a_deleted_one_none(folder: Path) -> None:
    folder.mkdir()
    mine = SpoolFile.create(folder)
    assert SpoolFile.adopt(mine.path) is None
    mine.close()
    first = SpoolFile.adopt(mine.path)
    assert first is not None
    assert SpoolFile.adopt(mine.path) is None
    first[0].delete()
    assert SpoolFile.adopt(mine.path) is None


_ADOPT_AND_HOLD = """
import json, sys
from pathlib import Path
from loraplex_platform.gateway.spool import SpoolFile
adopted = SpoolFile.adopt(Path(sys.argv[1]))
print(json.dumps(adopted is not None), flush=True)
sys.stdin.read()
"""


def test_of_two_processes_one_gets_a_file_and_kill_9_frees_it(folder: Path) -> None:
    folder.mkdir()
    file = SpoolFile.create(folder)
    file.append([b"one"], 1000)
    file.close()
    with (
        Peer("-c", _ADOPT_AND_HOLD, file.path) as one,
        Peer("-c", _ADOPT_AND_HOLD, file.path) as other,
    ):
        assert sorted(hear_all([one, other])) == [False, True]
        assert SpoolFile.adopt(file.path) is None
    # Both were killed.
    adopted = SpoolFile.adopt(file.path)
    assert adopted is not None
    assert adopted[1] == [b"one"]
    adopted[0].close()


def test_a_folder_that_cannot_be_written_stops_the_start_with_a_remedy(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SpoolFolderError, match="LORAPLEX_SPOOL_DIR"):
        Spool(tmp_path / "file" / "spool", None, GatewayMetrics(), max_bytes=4096)  # type: ignore[arg-type] # never used


# ---------------------------------------------------------------------------- replay


async def test_what_was_spooled_is_settled_and_voided_once_and_the_file_is_empty_then(
    db: Database, folder: Path
) -> None:
    customer = await add_customer(db)
    billed, refused = await reserved(db, customer), await reserved(db, customer)
    async with make_spool(folder, db) as spool:
        await asyncio.gather(
            spool.put(SpoolRecord(settlement=settlement(billed))),
            spool.put(
                SpoolRecord(
                    void=Void(
                        request_id=refused,
                        lease_token=1,
                        voided_by="gw-1",
                        http_status=503,
                        error_code="overloaded",
                    )
                )
            ),
        )
        [file] = files(folder, "*.spool")
        assert spool.num_pending == 2
        assert file.stat().st_size > 0
        assert file.stat().st_mode & 0o077 == 0

        assert await spool.replay_once() == 2

        assert await states(db, billed, refused) == ["settled", "voided"]
        assert (spool.num_pending, file.stat().st_size) == (0, 0)
        assert outcomes(spool) == {"settled": 1, "voided": 1}
        request, [attempt], [entry] = await rows_of(db, billed)
        assert (attempt.billed, entry.account, request.http_status) == (20, "revenue", 200)
        # The same again, as after a crash between the books and the file.
        await spool.put(SpoolRecord(settlement=settlement(billed)))
        await spool.replay_once()
        assert outcomes(spool)["overtaken"] == 1
        assert len((await rows_of(db, billed))[2]) == 1
    assert files(folder) == []  # nothing is left of a gateway that ended in order


async def test_records_of_a_gateway_that_died_are_put_on_the_books_by_the_next(
    db: Database, folder: Path
) -> None:
    customer = await add_customer(db)
    ids = [await reserved(db, customer) for _ in range(3)]
    dead = make_spool(folder, db)
    for request_id in ids:
        await dead.put(SpoolRecord(settlement=settlement(request_id)))
    async with make_spool(folder, db) as living:
        await living._adopt()
        assert living.num_pending == 0  # the file has its owner

        dead._own.file.close()  # what the kernel does for a dead process
        dead._disk.shutdown()
        await living._adopt()
        await living.replay_once()

        assert await states(db, *ids) == ["settled"] * 3
        assert files(folder) == [living._own.file.path]


async def test_while_postgres_is_away_records_wait_and_the_loop_puts_them_on_the_books_after(
    db: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = await add_customer(db)
    ids = [await reserved(db, customer) for _ in range(5)]
    is_away = True
    num_refused = 0
    real_renew = metering.renew

    async def renew(*arguments: Any) -> Any:
        nonlocal num_refused
        if is_away:
            num_refused += 1
            raise DatabaseUnavailableError
        return await real_renew(*arguments)

    monkeypatch.setattr(metering, "renew", renew)
    async with make_spool(folder, db) as spool:
        replaying = asyncio.create_task(spool.replay_forever())
        for request_id in ids:
            await spool.put(SpoolRecord(settlement=settlement(request_id)))
        async with asyncio.timeout(20):
            while num_refused < 2:  # noqa: ASYNC110 - the loop sets no event
                await asyncio.sleep(0.02)
        assert spool.num_pending == 5

        is_away = False
        async with asyncio.timeout(20):
            while spool.num_pending:  # noqa: ASYNC110 - the loop sets no event
                await asyncio.sleep(0.02)

        assert await states(db, *ids) == ["settled"] * 5
        replaying.cancel()


async def test_a_record_that_the_books_refuse_is_set_aside_and_the_others_go_on(
    db: Database, folder: Path
) -> None:
    customer = await add_customer(db)
    wrong, right = await reserved(db, customer), await reserved(db, customer)
    async with make_spool(folder, db) as spool:
        await spool.put(SpoolRecord(settlement=settlement(wrong, usage_discarded_past_stop=1_000)))
        await spool.put(SpoolRecord(settlement=settlement(right)))

        await spool.replay_once()

        assert await states(db, wrong, right) == ["reserved", "settled"]
        [rejected] = files(folder, "*.rejected")
        assert str(wrong) in rejected.read_text()
        assert rejected.stat().st_mode & 0o077 == 0
        assert outcomes(spool) == {"rejected": 1, "settled": 1}


async def test_a_file_that_cannot_be_read_stops_nobody_elses(db: Database, folder: Path) -> None:
    customer = await add_customer(db)
    mine = await reserved(db, customer)
    os.makedirs(folder / "a-folder.spool")
    async with make_spool(folder, db) as spool:
        await spool.put(SpoolRecord(settlement=settlement(mine)))

        await spool._adopt()
        await spool.replay_once()

        assert await states(db, mine) == ["settled"]


async def test_records_of_another_version_stay_where_they_are(db: Database, folder: Path) -> None:
    os.mkdir(folder)
    file = SpoolFile.create(folder)
    file.append([msgspec.msgpack.encode({"settlement": {"from": "the future"}})], 1000)
    file.close()
    before = file.path.read_bytes()

    async with make_spool(folder, db) as spool:
        await spool._adopt()
        await spool.replay_once()
        assert outcomes(spool) == {"unreadable": 1}

    assert file.path.read_bytes() == before


# ---------------------------------------------------------------------------- bounds


async def test_a_full_spool_refuses_and_takes_again_once_it_is_empty(
    db: Database, folder: Path
) -> None:
    customer = await add_customer(db)
    ids = [await reserved(db, customer) for _ in range(20)]
    async with make_spool(folder, db, max_bytes=1000) as spool:
        results = []
        for request_id in ids:
            record = SpoolRecord(settlement=settlement(request_id))
            results += await asyncio.gather(spool.put(record), return_exceptions=True)
        kept = [i for i, result in zip(ids, results, strict=True) if result is None]
        assert 0 < len(kept) < len(ids)
        assert all(isinstance(r, SpoolError | None) for r in results)
        assert not spool.is_writable
        [file] = files(folder, "*.spool")
        assert file.stat().st_size <= 1000

        await spool.replay_once()

        assert await states(db, *kept) == ["settled"] * len(kept)
        await spool.put(SpoolRecord(settlement=settlement(ids[-1])))
        assert spool.is_writable
        await spool.replay_once()


def fill_disk(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """From so many bytes on a file takes no more; the last write is half done, as on a real disk."""
    real_write = os.write

    def write(fd: int, data: Any) -> int:
        left = size_bytes - os.fstat(fd).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(data)[:left])

    monkeypatch.setattr("loraplex_platform.gateway.spool.os.write", write)


async def test_a_full_disk_refuses_keeps_what_was_whole_and_readiness_heals(
    db: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = await add_customer(db)
    ids = [await reserved(db, customer) for _ in range(40)]
    fill_disk(monkeypatch, 4096)
    async with make_spool(folder, db) as spool:
        results = [
            result
            for request_id in ids
            for result in await asyncio.gather(
                spool.put(SpoolRecord(settlement=settlement(request_id))), return_exceptions=True
            )
        ]
        kept = [i for i, result in zip(ids, results, strict=True) if result is None]
        assert 0 < len(kept) < len(ids)
        assert not spool.is_writable
        [file] = files(folder, "*.spool")

        # The records that were acknowledged can all be read, although half a one was written.
        copy = folder / "copy.spool"
        copy.write_bytes(file.read_bytes())
        adopted = SpoolFile.adopt(copy)
        assert adopted is not None
        assert len(adopted[1]) == len(kept)
        adopted[0].delete()

        replaying = asyncio.create_task(spool.replay_forever())
        async with asyncio.timeout(20):
            while not (spool.is_writable and spool.num_pending == 0):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
        replaying.cancel()
        assert await states(db, *kept) == ["settled"] * len(kept)


# ---------------------------------------------------------------------------- the sweeper


class _NoEngines(ConnectedEngines):
    def __init__(self) -> None:
        """Nobody answers."""

    def find(self, replica_id: str) -> None:
        return None


async def test_spool_and_sweepers_may_race_and_each_request_is_settled_once(
    db: Database, folder: Path
) -> None:
    customer = await add_customer(db)
    ids = [await reserved(db, customer, lease_s=-60.0) for _ in range(30)]
    # What the engine's journal says, which is what a sweeper settles by.
    await run_sql(
        db,
        "insert into engine_usage (request_id, attempt, replica_id, tenant_id, finish_reason,"
        " prompt_tokens, cached_tokens, completion_tokens, ended_at)"
        " select id, 1, 'replica-1', tenant_id, 'stop', 10, 0, 20, now() from requests",
    )
    sweepers = [
        Sweeper(db.sessions, _NoEngines(), grace_s=0.0, replica_lost_after_s=0.0) for _ in range(2)
    ]
    async with make_spool(folder, db) as spool, make_spool(folder, db) as other:
        for request_id in ids:
            await spool.put(SpoolRecord(settlement=settlement(request_id)))
            await other.put(SpoolRecord(settlement=settlement(request_id)))

        await asyncio.gather(
            spool.replay_once(),
            other.replay_once(),
            *(sweeper.sweep_once() for sweeper in sweepers),
        )
        for sweeper in sweepers:
            await sweeper.sweep_once()

    for request_id in ids:
        request, attempts, entries = await rows_of(db, request_id)
        assert (request.state, len(attempts), len(entries)) == ("settled", 1, 1)
        account = "absorbed" if request.settled_by == SWEEPER else "revenue"
        assert (entries[0].account, entries[0].completion_tokens) == (account, 20)
