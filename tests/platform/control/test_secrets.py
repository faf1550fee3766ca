"""No secret is anywhere but in the answer that showed it: not in logs, not in the database."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest
import structlog
from structlog.testing import LogCapture

from tests.platform.control.stand import ADMIN_KEY, PASSWORD, Stand, adapter
from tests.support.everything_stored import database_texts, redis_texts
from tests.support.metering import PEPPER

CANARY = "canary-9f8e7d6c5b4a"


@pytest.fixture
def captured_logs() -> Iterator[LogCapture]:
    before = structlog.get_config()
    capture = LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, capture])
    yield capture
    structlog.configure(**before)


async def test_secrets_stay_out_of_logs_database_and_audit(
    stand: Stand,
    db_url: str,
    redis_url: str,
    captured_logs: LogCapture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}"
    secrets = [ADMIN_KEY, PASSWORD, PEPPER.get_secret_value(), CANARY]
    for headers in ({}, {"idempotency-key": "k"}):
        made = await stand.admin.post(f"{path}/keys", json={"name": "a"}, headers=headers)
        secrets.append(made.json()["secret"])
    rotated = await stand.admin.post(f"{path}/keys/{made.json()['id']}/rotate", json={})
    secrets.append(rotated.json()["secret"])
    client = await stand.login("admin")
    secrets.append(client.cookies["loraplex_session"])
    invitation = {"email": "ada@example.com", "role": "viewer"}
    invited = await stand.admin.post(f"{path}/invitations", json=invitation)
    secrets.append(invited.json()["token"])
    accepted = {"token": invited.json()["token"], "password": CANARY}
    await client.post("/admin/v1/invitations/accept", json=accepted)
    await stand.admin.patch(f"{path}/keys/{made.json()['id']}", json={CANARY: CANARY})
    await client.post("/admin/v1/sessions", json={"email": "x@y.z", "password": CANARY})
    await client.post("/login", data={"email": "admin@example.com", "password": CANARY})
    await stand.client(CANARY).get(f"/admin/v1/tenants?token={CANARY}")
    await stand.client(CANARY).get(f"/{CANARY}")
    await stand.admin.post("/admin/v1/users", json={"email": "q", "password": CANARY})
    await stand.upload(tenant["id"], "a", adapter(base_model_name_or_path=CANARY))
    chat = {"model": "a", "messages": [{"role": "user", "content": CANARY}]}
    await stand.admin.post(f"{path}/playground", json=chat)

    logged = json.dumps(captured_logs.entries, default=str) + caplog.text
    assert '"event": "request"' in logged  # the capture works
    stored = "\n".join(database_texts(db_url))
    assert "api_key.create" in stored
    mirrored = "\n".join(redis_texts(redis_url))
    assert stand.engine.replica_id in mirrored
    measured = (await stand.admin.get("/metrics")).text
    assert "loraplex" in measured
    for secret in secrets:
        for place in (logged, stored, mirrored, measured):
            assert secret not in place


async def test_every_write_leaves_an_audit_row_with_actor_and_request(
    stand: Stand, db_url: str
) -> None:
    user = await stand.login("admin")
    tenant = (await user.post("/admin/v1/tenants", json={"slug": "acme"})).json()
    path = f"/admin/v1/tenants/{tenant['id']}"
    key = (await user.post(f"{path}/keys", json={"name": "a"})).json()
    await user.delete(f"{path}/keys/{key['id']}")
    await stand.version(tenant["id"], "a")
    await user.put(f"{path}/deployments/d", json={"version_id": None})
    await user.delete(f"{path}/deployments/d")
    await user.delete("/admin/v1/sessions/current")

    with psycopg.connect(db_url) as connection:
        rows = connection.execute(
            "select action, actor_kind, actor_id, request_id from audit_log where request_id "
            "is not null order by id"
        ).fetchall()

    assert [row[0] for row in rows] == [
        "user.create",
        "session.create",
        "tenant.create",
        "api_key.create",
        "api_key.revoke",
        "adapter.create",
        "adapter_version.create",
        "deployment.put",
        "deployment.archive",
        "session.revoke",
    ]
    assert {row[1] for row in rows} == {"admin_key", "user"}
    for _, kind, actor_id, request_id in rows:
        assert (actor_id is None) == (kind == "admin_key")
        assert request_id.startswith("req_")
