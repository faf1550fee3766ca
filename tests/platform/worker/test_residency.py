"""Every replica is made to keep what is desired, and only that; what it refuses is told with its reason."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import msgspec
from loraplex_platform.db.session import Database
from loraplex_platform.fleet.drift import drift_of
from loraplex_platform.fleet.residency_queries import Desired
from loraplex_platform.ids import uuid7
from loraplex_platform.worker.residency import Residency
from prometheus_client import CollectorRegistry

from tests.support.engines import connected
from tests.support.fake_engine import FakeEngine
from tests.support.metering import add_customer, run_sql

BASE = "smollm2-135m"


def digest_of(number: int) -> str:
    return f"sha256:{number:064x}"


async def want(db: Database, number: int, base: str = BASE, status: str = "ready") -> UUID:
    """A version of a new tenant's that is to stay in memory."""
    customer = await add_customer(db, f"tenant-{number}")
    version_id, adapter_id, base_id = uuid7(), uuid7(), uuid7()
    await run_sql(
        db,
        "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256, architecture)"
        " values (:id, :name, :revision, '', '', '{}')",
        id=base_id,
        name=base,
        revision=f"sha256:{base_id.hex}",
    )
    await run_sql(
        db,
        "insert into adapters (id, tenant_id, name, base_model_id) values (:id, :tenant, 'a', :base)",
        id=adapter_id,
        tenant=customer.tenant_id,
        base=base_id,
    )
    await run_sql(
        db,
        "insert into adapter_versions (id, tenant_id, adapter_id, version, digest, status, size_bytes, rank,"
        " target_modules, report) values (:id, :tenant, :adapter, 1, :digest, :status, 1, 8, '{}', '{}')",
        id=version_id,
        tenant=customer.tenant_id,
        adapter=adapter_id,
        digest=digest_of(number),
        status=status,
    )
    await run_sql(
        db,
        "insert into resident_adapters (tenant_id, version_id, digest, reason, created_by)"
        " values (:tenant, :version, :digest, 'test', 'test')",
        tenant=customer.tenant_id,
        version=version_id,
        digest=digest_of(number),
    )
    return version_id


async def test_replicas_keep_what_is_desired_of_their_base_and_nothing_else(
    db: Database, short_tmp_path: Path
) -> None:
    for number in (1, 2):
        await want(db, number)
    await want(db, 3, base="another")
    await want(db, 4, status="retired")
    registry = CollectorRegistry()
    async with (
        FakeEngine(short_tmp_path, replica_id="a") as first,
        FakeEngine(short_tmp_path, replica_id="b") as second,
        connected(first, second) as engines,
    ):
        first.pinned = frozenset({digest_of(8), digest_of(9)})
        first.pinned_at_start = frozenset({digest_of(9)})
        residency = Residency(db.sessions, engines, registry)

        found = await residency.converge_once()
        after = await residency.converge_once()

        desired = {digest_of(1), digest_of(2)}
        # An engine's own pins are its operator's word: nobody else takes them back.
        assert first.pinned == desired | {digest_of(9)}
        assert second.pinned == desired
        assert {item.digest for item in found["a"].missing} == desired
        assert found["a"].extra == [digest_of(8)]
        assert not after["a"].missing
        assert not after["a"].extra
        second.pinned = frozenset()  # started again
        await residency.converge_once()
        assert second.pinned == desired
        labels = {"replica_id": "b", "kind": "missing"}
        assert registry.get_sample_value("loraplex:replica_drift", labels) == 2
        await residency.converge_once()
        assert registry.get_sample_value("loraplex:replica_drift", labels) == 0


async def test_a_replica_that_refuses_or_is_silent_holds_up_no_other(
    db: Database, short_tmp_path: Path
) -> None:
    await want(db, 1)
    registry = CollectorRegistry()
    async with (
        FakeEngine(short_tmp_path, replica_id="a") as full,
        FakeEngine(short_tmp_path, replica_id="b") as mute,
        FakeEngine(short_tmp_path, replica_id="c") as sound,
        connected(full, mute, sound) as engines,
    ):
        full.pin_refusal = "too_many_pins"
        mute.is_mute = True

        found = await Residency(db.sessions, engines, registry).converge_once()

        assert set(found) == {"a", "c"}
        assert sound.pinned == {digest_of(1)}
        labels = {"replica_id": "b", "kind": "missing"}
        assert registry.get_sample_value("loraplex:replica_drift", labels) is None


async def test_a_release_that_does_not_say_which_pins_are_its_own_keeps_them(
    short_tmp_path: Path,
) -> None:
    async with FakeEngine(short_tmp_path) as engine, connected(engine) as engines:
        engine.pinned = frozenset({digest_of(1)})
        [replica] = engines.all()
        stats = await replica.client.stats(5.0)

    old = msgspec.structs.replace(stats, adapters_pinned_at_start=None)
    nothing: list[Desired] = []
    assert drift_of(old, BASE, 0.0, nothing).extra == []
    assert drift_of(stats, BASE, 0.0, nothing).extra == [digest_of(1)]
