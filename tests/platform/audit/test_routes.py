"""The audit log over HTTP: searched, exported, bounded to who asks, and compared with what was kept."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from loraplex_platform.audit import routes
from loraplex_platform.audit.service import SYSTEM, Actor, record
from loraplex_platform.ids import parse_id

from tests.platform.control.people import member
from tests.platform.control.stand import Stand, error_of
from tests.support.command_line import commands

PATH = "/admin/v1/audit"


async def found(stand: Stand, **filters: Any) -> list[dict[str, Any]]:
    answer = await stand.admin.get(PATH, params=filters)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def write(stand: Stand, tenant: dict[str, Any] | None, action: str, **fields: Any) -> None:
    tenant_id = None if tenant is None else parse_id("tenant", tenant["id"])
    async with stand.db.transaction() as session:
        actor = fields.pop("actor", SYSTEM)
        record(session, actor, action, "thing", fields.pop("object_id", None),
               tenant_id=tenant_id, **fields)  # fmt: skip


async def test_every_filter_narrows_and_pages_join(stand: Stand) -> None:
    acme, beta = await stand.tenant("acme"), await stand.tenant("beta")
    actor = Actor("user", "usr_1", "req_1")
    await write(stand, acme, "thing.make", object_id="a", actor=actor)
    await write(stand, acme, "thing.mend", object_id="b")
    await write(stand, beta, "thingy.make", object_id="a")
    await write(stand, None, "thing.make")

    assert {
        e["object_id"] for e in await found(stand, tenant_id=acme["id"], object_kind="thing")
    } == {
        "a",
        "b",
    }
    assert len(await found(stand, action="thing.make")) == 2
    assert len(await found(stand, action="thing.*")) == 3
    assert len(await found(stand, action="thing*")) == 4
    assert len(await found(stand, action="%")) == 0, "no wildcard of SQL"
    assert [e["tenant_id"] for e in await found(stand, object_id="a")] == [beta["id"], acme["id"]]
    assert (
        len(await found(stand, actor_id="usr_1"))
        == len(await found(stand, request_id="req_1"))
        == 1
    )
    [entry] = await found(stand, actor_id="usr_1")
    now = entry["at"]
    assert len(await found(stand, action="thing*", start_time=now - 60, end_time=now + 60)) == 4
    assert await found(stand, start_time=now + 60) == []
    assert await found(stand, end_time=now - 60) == []
    pages, after = [], None
    while True:
        params = {"limit": 2} | ({"after": after} if after else {})
        page = (await stand.admin.get(PATH, params=params)).json()
        pages += [entry["id"] for entry in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert pages == [entry["id"] for entry in await found(stand, limit=100)]
    error_of(await stand.admin.get(PATH, params={"tenant_id": "ten_x"}), 404, "not_found")
    assert (await stand.admin.get(PATH, params={"start_time": "yesterday"})).status_code == 400


async def test_an_export_opens_as_data(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = await stand.tenant("acme")
    await write(
        stand, acme, "=cmd|' /C calc'!A0", object_id="@SUM(1)", detail={"name": '=HYPERLINK("x")'}
    )

    answer = await stand.admin.get(PATH, params={"format": "csv", "object_kind": "thing"})

    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    [row] = csv.DictReader(io.StringIO(answer.text))
    assert row["action"] == "'=cmd|' /C calc'!A0"
    assert row["object_id"] == "'@SUM(1)"
    assert json.loads(row["detail"]) == {"name": '=HYPERLINK("x")'}
    assert row["tenant_id"] == acme["id"]
    assert row["seq"].isdigit()
    monkeypatch.setattr(routes, "MAX_CSV_ROWS", 1)
    too_many = await stand.admin.get(PATH, params={"format": "csv"})
    assert error_of(too_many, 400, "invalid_request")["param"] == "format"


async def test_a_tenants_owner_sees_their_own_and_developers_nothing(stand: Stand) -> None:
    acme, beta = await stand.tenant("acme"), await stand.tenant("beta")
    await write(stand, beta, "secret.thing")
    owner = await member(stand, acme["id"], "owner", "owner@acme.test")
    developer = await member(stand, acme["id"], "developer", "developer@acme.test")

    seen = (await owner.get(PATH)).json()["data"]
    chains = (await owner.get(f"{PATH}/chains")).json()["data"]
    as_csv = (await owner.get(PATH, params={"format": "csv"})).text

    assert seen
    assert {entry["tenant_id"] for entry in seen} == {acme["id"]}
    assert [chain["id"] for chain in chains] == [acme["id"]]
    assert beta["id"] not in as_csv
    assert (await owner.get(f"{PATH}/chains/{acme['id']}/1")).status_code == 200
    for path in (f"{PATH}/chains/{beta['id']}/1", f"{PATH}/chains/platform/1"):
        assert (await owner.get(path)).status_code == 404
    assert (await owner.get(PATH, params={"tenant_id": beta["id"]})).status_code == 404
    assert (await developer.get(PATH)).status_code == 403
    # What a member does is linked too, though their transaction is not the platform's.
    made = await owner.post(f"/admin/v1/tenants/{acme['id']}/keys", json={"name": "k"})
    assert made.status_code == 201, made.text
    [entry] = await found(stand, action="api_key.create")
    assert entry["seq"] is not None
    assert entry["actor_kind"] == "user"


async def test_what_was_kept_elsewhere_shows_a_log_that_was_written_anew(
    stand: Stand, db_url: str, tmp_path: Path
) -> None:
    acme = await stand.tenant("acme")
    for number in range(3):
        await write(stand, acme, f"thing.{number}")
    chain = next(
        c for c in (await stand.admin.get(f"{PATH}/chains")).json()["data"] if c["id"] == acme["id"]
    )
    kept = tmp_path / "heads.jsonl"
    kept.write_text(json.dumps(chain) + "\n")

    # The owner of the database cuts the last row off and mends the head, as the owner can.
    with psycopg.connect(db_url) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("delete from audit_log where action = 'thing.2'")
        connection.execute(
            "update audit_heads h set seq = h.seq - 1, hash = (select hash from audit_log a"
            " where a.chain = h.chain and a.seq = h.seq - 1) where chain = %s",
            [parse_id("tenant", acme["id"])],
        )

    books = (await stand.admin.get("/admin/v1/invariants")).json()
    assert next(c for c in books["checks"] if c["code"] == "I10")["ok"], "nothing here can tell"
    link = f"{PATH}/chains/{chain['id']}/{chain['seq']}"
    assert (await stand.admin.get(link)).status_code == 404
    assert (await stand.admin.get(f"{PATH}/chains/{chain['id']}/1")).json()["hash"]


async def test_the_command_line_lists_keeps_and_verifies(
    stand: Stand, db_url: str, tmp_path: Path
) -> None:
    acme = await stand.tenant("acme")
    await write(stand, acme, "thing.mend", object_id="x\x1b[2J", before={"a": 1}, after={"a": 2})
    kept, wrong_file = tmp_path / "heads.jsonl", tmp_path / "wrong"
    wrong_file.write_text("hello\n")
    async with commands(stand) as run:
        listed = await run("audit", "list", "--tenant", "acme", "--action", "thing.*")
        as_json = await run("audit", "list", "--json", "--limit", "1")
        kept.write_text((await run("audit", "heads")).out)
        whole = await run("audit", "verify", "--against", str(kept))
        wrong = await run("audit", "verify", "--against", str(wrong_file))
        await write(stand, acme, "thing.more")
        as_owner(db_url, "update audit_log set action = 'other' where action = 'thing.mend'")
        changed = await run("audit", "verify")
        # Written anew from there on, as the owner of the database can: only what was kept can tell.
        as_owner(db_url, "update audit_log a set hash = loraplex_audit_digest(a)"
                 " where action = 'other'")  # fmt: skip
        as_owner(
            db_url,
            "update audit_log a set prev_hash = p.hash from audit_log p"
            " where a.action = 'thing.more' and p.chain = a.chain and p.seq = a.seq - 1",
        )
        as_owner(db_url, "update audit_log a set hash = loraplex_audit_digest(a)"
                 " where action = 'thing.more'")  # fmt: skip
        as_owner(
            db_url,
            "update audit_heads h set hash = a.hash from audit_log a"
            " where a.chain = h.chain and a.seq = h.seq",
        )
        forged = await run("audit", "verify")
        compared = await run("audit", "verify", "--against", str(kept))

    assert listed.code == 0, listed
    assert "thing.mend" in listed.out
    assert "a: 1 -> 2" in listed.out
    assert "\x1b" not in listed.out
    assert json.loads(as_json.out)["object"] == "audit_entry"
    assert (whole.code, "whole" in whole.out) == (0, True), whole
    assert (wrong.code, "wrong:1" in wrong.err) == (1, True), wrong
    assert (changed.code, "was changed" in changed.err) == (1, True), changed
    assert forged.code == 0, "the database by itself cannot tell"
    assert (compared.code, "has hash" in compared.err) == (1, True), compared


def as_owner(url: str, statement: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(statement.encode())
