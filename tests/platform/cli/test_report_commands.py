"""What lists, shows and reports, against a control API that runs: usage, requests, fleet, people, invoices' recipients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest
from loraplex_platform.cli.report_commands import ArmName
from loraplex_platform.ids import format_id
from loraplex_platform.metering import service
from loraplex_platform.metering.records import Arm

from tests.platform.cli.test_tenancy_commands import Terminal
from tests.platform.control.stand import BASE, Stand, adapter
from tests.platform.control.test_playground import serving
from tests.support.billing import add_usage, month_ago
from tests.support.metering import add_customer, reservation


@pytest.fixture
async def terminal(
    _quiet_server: None, db_url: str, redis_url: str, short_tmp_path: Path
) -> AsyncIterator[Terminal]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand, serving(stand.app) as url:
        yield Terminal(stand, url)


async def shown(terminal: Terminal, *arguments: str) -> Any:
    return json.loads(await terminal.done(*arguments, "--json"))


async def test_usage_by_time_and_group_as_table_json_and_csv(
    terminal: Terminal, db_url: str
) -> None:
    acme = await add_customer(terminal.stand.db, "acme")
    await add_customer(terminal.stand.db, "beta")
    at = month_ago(1)
    add_usage(db_url, acme, at, completion=1234)
    since = ("--start", f"{at:%Y-%m-01}", "--width", "1mo")

    rows = await shown(terminal, "usage", "-t", "acme", "--by", "model", *since)
    table = await terminal.done("usage", *since)
    csv = await terminal.done("usage", *since, "--csv")
    beta = await shown(terminal, "usage", "-t", "beta", *since)

    assert [row["completion_tokens"] for row in rows if row["requests"]] == [1234]
    header, *lines = table.splitlines()
    assert header.split()[:3] == ["TENANT", "FROM", "REQUESTS"]
    assert any(line.startswith("acme") and "1234" in line for line in lines)
    assert "1234" in csv
    assert "completion_tokens" in csv.splitlines()[0]
    assert [row for row in beta if row["requests"]] == []
    assert "YYYY-MM-DD" in await terminal.refused("usage", "--start", "yesterday")
    assert "say one of tenant_id" in await terminal.refused("usage", "--by", "colour")
    assert "not both" in await terminal.refused("usage", "--csv", "--json")
    assert "no tenant nobody" in await terminal.refused("usage", "-t", "nobody")


async def test_requests_are_listed_newest_first_and_filtered(terminal: Terminal) -> None:
    acme = await add_customer(terminal.stand.db, "acme")
    beta = await add_customer(terminal.stand.db, "beta")
    ids = []
    for customer in (acme, acme, beta):
        wanted = reservation(customer)
        await service.reserve(terminal.stand.db.sessions, wanted)
        ids.append(format_id("request", wanted.request_id))

    everybodys = await shown(terminal, "requests")
    theirs = await shown(terminal, "requests", "-t", "acme")
    newest = await terminal.done("requests", "-t", "acme", "--limit", "1")

    assert [item["id"] for item in everybodys] == ids[::-1]
    assert [item["id"] for item in theirs] == ids[1::-1]
    assert newest.splitlines()[1].startswith(ids[1])
    assert len(newest.splitlines()) == 2
    assert await shown(terminal, "requests", "--arm", "canary") == []
    assert await shown(terminal, "requests", "--arm", "named") == []


def test_arms_are_the_books() -> None:
    assert get_args(ArmName) == get_args(Arm)


async def test_fleet_overview_and_models_tell_what_is_there(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")

    fleet = await terminal.done("fleet")
    overview = await terminal.done("overview")

    assert fleet.splitlines()[1].split()[:4] == ["fake-0", "ready", "cpu", "float32"]
    loads = [line.split() for line in fleet.splitlines() if " store " in line]
    assert loads == [["fake-0", "store", "3", "40", "ms", "50", "ms", "1,250", "ms"]]
    assert ["tenants,", "keys", "1,", "0"] in [line.split() for line in overview.splitlines()]
    assert (await shown(terminal, "fleet"))["replicas"][0]["replica_id"] == "fake-0"
    assert (await shown(terminal, "overview"))["tenants"] == 1
    [model] = await shown(terminal, "models", "list")
    assert model["name"] == BASE
    assert model["id"] in await terminal.done("models", "list")


async def test_people_are_found_and_invitations_withdrawn(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    await terminal.stand.login("viewer", "ada@example.com")
    await terminal.stand.login("admin", "bob@example.com")
    await terminal.done("members", "invite", "eve@example.com", "viewer", "-t", "acme")

    assert {user["email"] for user in await shown(terminal, "users", "list")} == {
        "ada@example.com",
        "bob@example.com",
    }
    found = await terminal.done("users", "list", "--search", "ada")
    assert [line.split()[1:3] for line in found.splitlines()[1:]] == [["ada@example.com", "viewer"]]
    assert "pending" in await terminal.done("members", "invitations", "-t", "acme")
    withdraw = ("members", "withdraw", "Eve@example.com", "-t", "acme")
    assert await terminal.done(*withdraw) == "withdrawn: eve@example.com, viewer"
    [invitation] = await shown(terminal, "members", "invitations", "-t", "acme")
    assert invitation["status"] == "revoked"
    assert "no open invitation" in await terminal.refused(*withdraw)


async def test_a_tenant_is_shown_and_moved_to_another_zone(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    await terminal.done("tenants", "schedule", "acme", "--weight", "2")
    await terminal.done("projects", "create", "chat", "-t", "acme")

    await terminal.done("tenants", "update", "acme", "--billing-tz", "Europe/Berlin")

    table = await terminal.done("tenants", "show", "acme")
    assert "Europe/Berlin" in table
    assert ["weight", "2.0"] in [line.split() for line in table.splitlines()]
    assert (await shown(terminal, "tenants", "show", "acme"))["scheduling"]["weight"] == 2
    assert "IANA" in await terminal.refused("tenants", "update", "acme", "--billing-tz", "Mars")
    assert (await terminal.done("projects", "rename", "chat", "bot", "-t", "acme")).endswith(" bot")
    assert "bot" in await terminal.done("projects", "list", "-t", "acme")


async def test_whom_invoices_are_made_out_to(terminal: Terminal) -> None:
    await terminal.done("tenants", "create", "acme")
    of = ("invoices", "recipient", "-t", "acme")

    none = await terminal.refused(*of)
    made = await shown(
        terminal,
        *of,
        "--legal-name",
        "Acme GmbH",
        "--address",
        "1 Lane|Berlin",
        "--email",
        "a@b.de",
    )
    changed = await shown(terminal, *of, "--tax-percent", "19", "--tax-label", "VAT")

    assert "no billing profile yet" in none
    assert made["address"] == "1 Lane\nBerlin"
    assert float(changed["tax_percent"]) == 19
    # What was not named stays.
    assert (changed["legal_name"], changed["email"]) == ("Acme GmbH", "a@b.de")
    assert "Acme GmbH" in await terminal.done(*of)
    assert "tax_percent" in await terminal.refused(*of, "--tax-percent", "plenty")


async def test_an_adapters_report_and_an_upload_that_nobody_ends(terminal: Terminal) -> None:
    tenant = await terminal.stand.tenant("acme")
    await terminal.stand.version(tenant["id"])
    config = adapter().config
    sizes = [
        {"name": "adapter_config.json", "size_bytes": len(config), "sha256": "0" * 64},
        {"name": "adapter_model.safetensors", "size_bytes": 9, "sha256": "0" * 64},
    ]
    path = f"/admin/v1/tenants/{tenant['id']}/adapter-uploads"
    begun = await terminal.stand.admin.post(path, json={"name": "half", "files": sizes})
    assert begun.status_code == 201, begun.text

    report = await terminal.done("adapters", "show", "capitals", "-t", "acme")

    assert "version 1 is ready" in " ".join(report.split())
    assert (await shown(terminal, "adapters", "show", "capitals", "-t", "acme"))["versions"]
    assert "no adapter nothing" in await terminal.refused(
        "adapters", "show", "nothing", "-t", "acme"
    )
    [upload] = await shown(terminal, "adapters", "uploads", "-t", "acme")
    assert upload["state"] == "open"
    assert "half" in await terminal.done("adapters", "uploads", "-t", "acme")
    await terminal.done("adapters", "abandon", upload["id"], "-t", "acme")
    assert await shown(terminal, "adapters", "uploads", "-t", "acme") == []


async def test_a_suite_is_deleted(terminal: Terminal, tmp_path: Path) -> None:
    await terminal.done("tenants", "create", "acme")
    case = {"id": "a", "messages": [{"role": "user", "content": "?"}]}
    case |= {"checks": [{"type": "contains", "value": "x"}]}
    (tmp_path / "golden.jsonl").write_text(json.dumps(case) + "\n")
    await terminal.done("eval", "import", "capitals", str(tmp_path / "golden.jsonl"), "-t", "acme")

    assert await shown(terminal, "eval", "series", "capitals", "-t", "acme")
    assert "deleted capitals" in await terminal.done("eval", "delete", "capitals", "-t", "acme")
    assert "no eval suite" in await terminal.refused("eval", "delete", "capitals", "-t", "acme")
