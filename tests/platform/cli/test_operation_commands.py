"""Retention, webhooks and the deletion of a tenant from the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.control.stand import Stand
from tests.support.command_line import commands


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    key = "webhook-key-for-tests-0123456789abcdef"
    async with Stand.open(db_url, redis_url, short_tmp_path, webhook_key=key) as stand:
        yield stand


async def test_retention_is_shown_set_and_applied(stand: Stand) -> None:
    async with commands(stand) as run:
        shown = await run("retention", "--dry-run")
        changed = await run("retention", "--set", "requests=100", "--set", "audit_log=forever")
        applied = await run("retention", "--apply")
        as_json = await run("retention", "--json")
        short = await run("retention", "--set", "requests=3")
        odd = await run("retention", "--set", "requests")

    assert shown.code == changed.code == applied.code == 0, (shown, changed, applied)
    assert "400 days" in shown.out
    assert "100 days" in changed.out
    assert applied.out == "nothing was due\n"
    rules = {rule["id"]: rule for rule in json.loads(as_json.out)}
    assert rules["requests"]["keep_days"] == 100
    assert rules["audit_log"]["keep_days"] is None
    assert (short.code, "at least 62 days" in short.err) == (1, True)
    assert (odd.code, "NAME=DAYS" in odd.err) == (1, True)


async def test_webhooks_live_on_the_command_line(stand: Stand) -> None:
    await stand.tenant("acme")
    async with commands(stand) as run:
        made = await run("webhooks", "create", "https://example.com/h", "-t", "acme")
        listed = await run("webhooks", "list", "-t", "acme", "--json")
        [webhook] = [one["id"] for one in json.loads(listed.out)]
        sent = await run("webhooks", "test", webhook, "-t", "acme")
        told = await run("webhooks", "deliveries", webhook, "-t", "acme")
        replayed = await run("webhooks", "replay", webhook, sent.out.strip(), "-t", "acme")
        rotated = await run("webhooks", "rotate-secret", webhook, "-t", "acme", "--grace-s", "0")
        moved = await run(
            *("webhooks", "update", webhook, "-t", "acme", "--topic", "alert"),
            *("--url", "https://example.com/moved"),
        )
        nothing = await run("webhooks", "update", webhook, "-t", "acme")
        off = await run("webhooks", "switch", webhook, "off", "-t", "acme")
        plain = await run("webhooks", "list", "-t", "acme")
        foreign = await run("webhooks", "deliveries", webhook)
        gone = await run("webhooks", "delete", webhook, "-t", "acme")
        none = await run("webhooks", "list", "-t", "acme")
        inside = await run("webhooks", "create", "https://10.0.0.1/")

    assert made.code == 0, made
    assert made.out.startswith("whsec_")
    assert rotated.out.startswith("whsec_")
    assert rotated.out != made.out
    assert "test" in told.out
    assert sent.out.strip() in told.out
    assert replayed.out == sent.out
    assert (off.code, "disabled" in plain.out) == (0, True)
    assert moved.out == f"{webhook}  alert  https://example.com/moved\n"
    assert (nothing.code, "--topic" in nothing.err) == (1, True)
    assert "https://example.com/moved" in plain.out
    assert foreign.code == 1
    assert (gone.code, none.out) == (0, "")
    assert (inside.code, "not a public" in inside.err) == (1, True)


async def test_a_tenant_is_deleted_only_by_its_name(stand: Stand) -> None:
    await stand.tenant("acme")
    async with commands(stand) as run:
        wrong = await run("tenants", "delete", "acme", "--confirm", "beta")
        done = await run("tenants", "delete", "acme", text="acme\n")

    assert (wrong.code, "confirm" in wrong.err) == (1, True)
    assert done.code == 0, done
    assert "removed  0 api_keys" in done.out
    assert "kept     audit log" in done.out
