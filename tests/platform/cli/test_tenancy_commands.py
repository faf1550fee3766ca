"""`loraplex tenants`, `projects`, `members` and `keys` against a control API that runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loraplex_platform.errors import (
    DisabledKeyError,
    ExpiredKeyError,
    InvalidApiKeyError,
    TenantSuspendedError,
)
from loraplex_platform.tenancy.authentication import Authenticated, authenticate

from tests.platform.cli.test_commands import run
from tests.platform.control.people import join
from tests.platform.control.stand import ADMIN_KEY, PASSWORD, Stand
from tests.platform.control.test_playground import serving
from tests.support.metering import PEPPER


class Terminal:
    """Somebody with an admin key in front of a terminal."""

    def __init__(self, stand: Stand, url: str) -> None:
        self.stand = stand
        self._environment = {"LORAPLEX_CONTROL_URL": url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(lambda: run(*arguments, **self._environment))

    async def done(self, *arguments: str) -> str:
        code, output, errors = await self.run(*arguments)
        assert code == 0, errors
        return output.strip()

    async def refused(self, *arguments: str) -> str:
        code, output, errors = await self.run(*arguments)
        assert (code, output) == (1, "")
        assert errors.startswith("Error: ")
        return errors

    async def holder(self, secret: str) -> Authenticated:
        return await authenticate(self.stand.db.sessions, PEPPER, secret)


@pytest.fixture
async def terminal(
    _quiet_server: None, db_url: str, redis_url: str, short_tmp_path: Path
) -> AsyncIterator[Terminal]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand, serving(stand.app) as url:
        yield Terminal(stand, url)


async def test_tenants_are_made_listed_and_suspended(terminal: Terminal) -> None:
    tenant_id = await terminal.done("tenants", "create", "acme", "--billing-tz", "Europe/Berlin")

    assert tenant_id.startswith("ten_")
    assert "Europe/Berlin" in await terminal.done("tenants", "list")
    [shown] = json.loads(await terminal.done("tenants", "list", "--json"))
    assert (shown["id"], shown["status"]) == (tenant_id, "active")
    secret = await terminal.done("keys", "create", "k", "-t", "acme")
    await terminal.done("tenants", "suspend", "acme")
    with pytest.raises(TenantSuspendedError):
        await terminal.holder(secret)
    await terminal.done("tenants", "activate", tenant_id)
    assert (await terminal.holder(secret)).tenant_slug == "acme"
    assert "IANA" in await terminal.refused("tenants", "create", "x", "--billing-tz", "Mars")
    assert "no tenant nobody" in await terminal.refused("tenants", "suspend", "nobody")


async def test_what_is_a_tenants_at_the_engines_is_set_in_part_and_taken_back(
    terminal: Terminal,
) -> None:
    await terminal.done("tenants", "create", "acme")
    schedule = ("tenants", "schedule", "acme")

    set_ = await terminal.done(
        *schedule, "--priority", "3", "--memory-weight", "0.5", "--max-adapters", "2"
    )
    changed = await terminal.done(*schedule, "--weight", "2", "--max-adapters", "none")

    assert set_ == "acme: priority 3, weight 1.0, memory_weight 0.5, max_adapters 2"
    assert changed == "acme: priority 3, weight 2.0, memory_weight 0.5, max_adapters none"
    assert "nothing to change" in await terminal.refused(*schedule)
    for option in ("--weight", "--memory-weight", "--max-adapters"):
        for number in ("nan", "inf", "0"):
            said = await terminal.refused(*schedule, option, number)
            assert option.removeprefix("--").replace("-", "_") in said.replace("-", "_")
    assert await terminal.done(*schedule, "--priority", "3") == changed


async def test_the_limits_that_bind_a_key_are_shown(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    shown = json.loads(await terminal.done("keys", "create", "k", "-t", "acme", "--json"))
    ask = ("limits", "effective", "--key", shown["id"])

    before = json.loads(await terminal.done(*ask, "--json"))
    limit = (await terminal.done("limits", "set", "rpm", "60", "--of", "acme")).partition(":")[0]
    [after] = json.loads(await terminal.done(*ask, "--json"))
    header, row = (await terminal.done(*ask)).splitlines()

    assert before == []
    assert (after["id"], after["value"], after["used"]) == (limit, "60", "0")
    assert header.split()[:4] == ["ID", "SCOPE", "LIMIT", "VALUE"]
    assert row.split()[0] == limit
    assert "No such key" in await terminal.refused("limits", "effective", "--key", "nobody")


async def test_a_keys_whole_life(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    await terminal.done("projects", "create", "Chat", "-t", "acme")
    options = ("--project", "chat", "--scope", "inference", "--allow-ip", "203.0.113.0/24")

    code, secret, told = await terminal.run("keys", "create", "batch", "-t", "acme", *options)

    assert (code, secret.count("\n")) == (0, 1)  # only the secret, so that it can be captured
    assert "shown this once" in told
    holder = await terminal.holder(secret.strip())
    assert (holder.scopes, [str(n) for n in holder.networks]) == ({"inference"}, ["203.0.113.0/24"])
    assert holder.project_id is not None
    base = (await terminal.stand.admin.get("/admin/v1/base-models")).json()["data"][0]["id"]
    update = ("keys", "update", "batch", "-t", "acme")
    await terminal.done(*update, "--grant", base, "--days", "3")
    assert (await terminal.holder(secret.strip())).grants is not None
    assert "disabled" in await terminal.done(*update, "--disable")
    with pytest.raises(DisabledKeyError):
        await terminal.holder(secret.strip())
    await terminal.done(*update, "--enable", "--name", "nightly")
    rotated = await terminal.done("keys", "rotate", "nightly", "-t", "acme", "--grace-s", "0")
    with pytest.raises(ExpiredKeyError):
        await terminal.holder(secret.strip())
    await terminal.holder(rotated)
    assert "nightly" in await terminal.done("keys", "list", "-t", "acme", "--live")
    assert "live keys" in await terminal.refused("projects", "archive", "chat", "-t", "acme")
    await terminal.done("keys", "revoke", "nightly", "-t", "acme", "--reason", "over")
    with pytest.raises(InvalidApiKeyError):
        await terminal.holder(rotated)
    [shown] = json.loads(await terminal.done("keys", "list", "-t", "acme", "--json"))
    assert (shown["status"], shown["revoke_reason"]) == ("revoked", "over")
    assert "nightly" not in await terminal.done("keys", "list", "-t", "acme", "--live")
    assert (await terminal.done("projects", "archive", "chat", "-t", "acme")).startswith("archived")
    assert await terminal.done("projects", "list", "-t", "acme") == "ID  NAME"


async def test_what_a_key_command_cannot_do_is_said(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    for _ in range(2):
        await terminal.done("keys", "create", "twin", "-t", "acme")

    assert "has no live key x" in await terminal.refused("keys", "revoke", "x", "-t", "acme")
    assert "name one by its id" in await terminal.refused("keys", "rotate", "twin", "-t", "acme")
    bad = ("keys", "create", "k", "-t", "acme")
    assert "give the id of" in await terminal.refused(*bad, "--grant", "everything")
    assert "ip_allow" in await terminal.refused(*bad, "--allow-ip", "everywhere")
    assert "scopes" in await terminal.refused(*bad, "--scope", "everything")
    assert "no project p" in await terminal.refused(*bad, "--project", "p")


async def test_members_come_change_and_go(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    invite = ("members", "invite", "ada@example.com", "developer", "-t", "acme")

    code, token, told = await terminal.run(*invite)

    assert (code, token.count("\n")) == (0, 1)
    assert "/join" in told
    assert (await join(terminal.stand, token.strip())).status_code == 200
    assert "ada@example.com" in await terminal.done("members", "list", "-t", "acme")
    ada = ("ada@example.com", "-t", "acme")
    changed = await terminal.done("members", "set-role", ada[0], "owner", *ada[1:])
    assert changed == "ada@example.com is now owner of acme"
    assert "last owner" in await terminal.refused("members", "remove", *ada)
    second = await terminal.done("members", "invite", "b@example.com", "owner", "-t", "acme")
    assert (await join(terminal.stand, second)).status_code == 200
    await terminal.done("members", "remove", *ada)
    assert "has no member" in await terminal.refused("members", "remove", *ada)
    [left] = json.loads(await terminal.done("members", "list", "-t", "acme", "--json"))
    assert (left["email"], left["role"]) == ("b@example.com", "owner")


async def test_users_are_switched_off_and_on_and_lose_their_role(terminal: Terminal) -> None:
    boss = await terminal.stand.login("admin", "boss@example.com")
    ada = await terminal.stand.login("viewer", "ada@example.com")
    current = "/admin/v1/sessions/current"

    await terminal.done("users", "logout", "Ada@example.com")
    assert (await ada.get(current)).status_code == 401
    await terminal.done("users", "disable", "ada@example.com")
    login = {"email": "ada@example.com", "password": PASSWORD}
    assert (await ada.post("/admin/v1/sessions", json=login)).status_code == 401
    await terminal.done("users", "enable", "ada@example.com")
    assert (await ada.post("/admin/v1/sessions", json=login)).status_code == 201
    await terminal.done("users", "remove-role", "ada@example.com")
    assert (await ada.get(current)).json()["user"]["role"] is None
    assert "last platform admin" in await terminal.refused("users", "disable", "boss@example.com")
    assert "no user" in await terminal.refused("users", "disable", "nobody@example.com")
    assert (await boss.get(current)).status_code == 200
