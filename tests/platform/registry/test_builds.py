"""Engine builds are noted when a replica is first seen, with the weights that it serves if they are known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from loraplex_engine.protocol import ReplicaRecord
from loraplex_platform.db import BaseModel, EngineBuild
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7
from loraplex_platform.registry import builds
from loraplex_platform.registry.builds import BuildKeeper
from sqlalchemy import select

from tests.support.metering import run_sql

NAME = "tiny"


def record(**changes: Any) -> ReplicaRecord:
    values: dict[str, Any] = {
        "replica_id": "a",
        "incarnation": "i",
        "address": "ipc://x",
        "curve_public_key": None,
        "base_model": NAME,
        "model_fingerprint": "sha256:one",
        "kv_format": "k",
        "device": "cpu",
        "isa": "avx2",
        "dtype": "float32",
        "torch_version": "2",
        "backends": {"lora": "native"},
        "max_model_len": 1,
        "max_loras": 1,
        "max_lora_rank": 1,
        "state": "ready",
        "started_at_unix_s": 0.0,
        "row_rule_holds": True,
        "base_revision": "sha256:w1",
        "tokenizer_sha256": "tok",
        "chat_template_sha256": "chat",
    }
    return ReplicaRecord(**values | changes)


async def add_base(db: Database, revision: str = "sha256:w1") -> UUID:
    base_id = uuid7()
    await run_sql(
        db,
        "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256, architecture)"
        " values (:id, :name, :revision, 'tok', 'chat', '{}')",
        id=base_id,
        name=NAME,
        revision=revision,
    )
    return base_id


async def all_of(db: Database, table: Any) -> list[Any]:
    async with db.sessions() as session:
        return list((await session.scalars(select(table).order_by(table.id))).all())


async def test_a_build_is_noted_once_with_its_facts_and_its_weights(db: Database) -> None:
    base_id = await add_base(db)
    keeper = BuildKeeper(db.sessions)

    for replica_id in ("a", "b"):
        await keeper.note([record(replica_id=replica_id)])
    await keeper.note([record(model_fingerprint="sha256:two", dtype="bfloat16")])

    one, two = await all_of(db, EngineBuild)
    assert (one.fingerprint, one.base_model_id, one.base_model) == ("sha256:one", base_id, NAME)
    assert one.facts["dtype"] == "float32"
    assert one.facts["tokenizer_sha256"] == "tok"
    assert (two.facts["dtype"], two.base_model_id) == ("bfloat16", base_id)


async def test_new_weights_of_a_known_tokenizer_are_a_base_model_and_others_are_not(
    db: Database,
) -> None:
    await add_base(db)
    keeper = BuildKeeper(db.sessions)

    await keeper.note(
        [
            record(model_fingerprint="sha256:two", base_revision="sha256:w2"),
            record(
                model_fingerprint="sha256:three", base_revision="sha256:w3", tokenizer_sha256="x"
            ),
        ]
    )

    assert [base.revision for base in await all_of(db, BaseModel)] == ["sha256:w1", "sha256:w2"]
    found = {build.fingerprint: build for build in await all_of(db, EngineBuild)}
    assert found["sha256:two"].base_model_id is not None
    assert found["sha256:three"].base_model_id is None


async def test_what_was_not_known_at_first_is_filled_in(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "UNKNOWN_AGAIN_S", 0.0)
    keeper = BuildKeeper(db.sessions)
    await keeper.note([record()])  # before the control process has started
    assert (await all_of(db, EngineBuild))[0].base_model_id is None
    base_id = await add_base(db)

    await keeper.note([record()])

    assert (await all_of(db, EngineBuild))[0].base_model_id == base_id


async def test_a_build_that_runs_is_kept_fresh_and_not_by_every_round(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_base(db)
    keeper = BuildKeeper(db.sessions)
    await keeper.note([record()])
    past = datetime.now(UTC) - timedelta(hours=1)
    await run_sql(db, "update engine_builds set last_seen_at = :past", past=past)

    await keeper.note([record()])
    assert (await all_of(db, EngineBuild))[0].last_seen_at == past
    monkeypatch.setattr(builds, "FRESH_S", 0.0)
    await keeper.note([record()])

    [build] = await all_of(db, EngineBuild)
    assert build.last_seen_at > past
    assert build.first_seen_at < build.last_seen_at


async def test_records_of_older_replicas_still_decode_and_are_builds(db: Database) -> None:
    new = msgspec.to_builtins(record())
    for field in ("base_revision", "tokenizer_sha256", "chat_template_sha256"):
        del new[field]
    old = msgspec.json.decode(msgspec.json.encode(new), type=ReplicaRecord)

    await BuildKeeper(db.sessions).note([old])

    [build] = await all_of(db, EngineBuild)
    assert (build.base_model_id, build.fingerprint) == (None, "sha256:one")
