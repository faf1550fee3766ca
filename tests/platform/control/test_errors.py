"""One shape of error for everything, and what surrounds every answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loraplex_platform.tenancy import service as tenancy

from tests.platform.control.stand import Stand, error_of, settings_for


async def test_framework_errors_have_our_shape(stand: Stand) -> None:
    client = stand.admin

    error_of(await client.get("/admin/v1/nope"), 404, "not_found")
    error_of(await client.get("/admin/v1/tenants/"), 404, "not_found")
    error_of(await client.get("/"), 404, "not_found")
    error_of(await client.patch("/admin/v1/tenants"), 405, "method_not_allowed")
    for content in (b"{", b"", b"[1]", b'"x"', b"null", b"\xff", b'{"slug": NaN}', b"[" * 5000):
        answer = await client.post(
            "/admin/v1/tenants", content=content, headers={"content-type": "application/json"}
        )
        error = error_of(answer, 400, "invalid_request")
        assert error["type"] == "invalid_request_error"
    form = await client.post("/admin/v1/tenants", data={"slug": "x"})
    error_of(form, 400, "invalid_request")
    missing = await client.post("/admin/v1/tenants", json={})
    assert error_of(missing, 400, "invalid_request")["message"] == "slug: it is required: add it."


async def test_bodies_over_the_cap_are_refused_declared_or_chunked(stand: Stand) -> None:
    declared = await stand.admin.post("/admin/v1/tenants", content=b"x" * (2 << 20))
    error_of(declared, 413, "request_too_large")

    async def chunks() -> Any:
        for _ in range(64):
            yield b"x" * 65536

    for path in ("/admin/v1/tenants", "/admin/v1/sessions", "/login"):
        chunked = await stand.admin.post(path, content=chunks())
        error_of(chunked, 413, "request_too_large")
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/playground"
    error_of(await stand.admin.post(path, content=chunks()), 413, "request_too_large")


async def test_every_answer_is_hardened_and_has_its_id(stand: Stand) -> None:
    client = stand.client(headers={"x-request-id": "chosen-by-the-client"})

    seen = set()
    for path in ("/live", "/login", "/docs", "/admin/v1/tenants", "/nope", "/openapi.json"):
        answer = await client.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 6
    assert "chosen-by-the-client" not in seen


async def test_a_crash_is_a_500_that_tells_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(tenancy, "get_tenant", crash)
    answer = await stand.admin.get(f"/admin/v1/tenants/ten_{'0' * 32}")

    error_of(answer, 500, "internal_error")
    assert "secret detail" not in answer.text


async def test_a_database_that_is_down_is_a_503_never_a_401(
    stand: Stand, db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    from loraplex_platform.control.context import ControlContext
    from loraplex_platform.db.session import open_database

    viewer = await stand.login("viewer")
    gone = settings_for("postgresql://postgres@/x?host=/nowhere", redis_url, short_tmp_path)
    context: ControlContext = stand.app.state.context
    async with open_database(gone) as database:
        object.__setattr__(context, "sessions", database.sessions)

        for client in (stand.admin, viewer):
            answer = await client.get("/admin/v1/tenants")
            error_of(answer, 503, "database_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await stand.admin.get("/ready")).status_code == 503
        assert (await stand.admin.get("/live")).status_code == 200


async def test_metrics_are_for_this_machine_or_the_admin_key(stand: Stand) -> None:
    await stand.admin.get("/admin/v1/tenants")

    local = await stand.client(None).get("/metrics")
    assert 'loraplex:control_requests_total{method="GET",route="/admin/v1/tenants"' in local.text
    away = stand.client(None, address="192.0.2.1")
    error_of(await away.get("/metrics"), 404, "not_found")
    assert (await stand.client(address="192.0.2.1").get("/metrics")).status_code == 200
