"""Members of tenants for tests of the control API: invited, joined and logged in as people are."""

from __future__ import annotations

from typing import Any

import httpx

from tests.platform.control.stand import PASSWORD, Stand

ROLES = ("owner", "admin", "developer", "billing", "viewer")


async def invite(
    stand: Stand, tenant_id: str, email: str, role: str, *, by: httpx.AsyncClient | None = None
) -> dict[str, Any]:
    """An invitation with its token."""
    client = by or stand.admin
    body = {"email": email, "role": role}
    made = await client.post(f"/admin/v1/tenants/{tenant_id}/invitations", json=body)
    assert made.status_code == 201, made.text
    return dict(made.json())


async def join(stand: Stand, token: str, password: str | None = PASSWORD) -> httpx.Response:
    """Accept an invitation as somebody without a session."""
    body = {"token": token, "password": password}
    return await stand.client(None).post("/admin/v1/invitations/accept", json=body)


async def log_in(stand: Stand, email: str, password: str = PASSWORD) -> httpx.AsyncClient:
    """A browser's client that is logged in."""
    client = stand.client(None)
    body = {"email": email, "password": password}
    answer = await client.post("/admin/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    return client


async def member(stand: Stand, tenant_id: str, role: str, email: str) -> httpx.AsyncClient:
    """Somebody who belongs to the tenant, logged in."""
    invitation = await invite(stand, tenant_id, email, role)
    joined = await join(stand, invitation["token"])
    assert joined.status_code == 200, joined.text
    return await log_in(stand, email)


async def user_id_of(client: httpx.AsyncClient) -> str:
    """Who is logged in."""
    return str((await client.get("/admin/v1/sessions/current")).json()["user"]["id"])
