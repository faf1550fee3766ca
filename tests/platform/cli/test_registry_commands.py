"""`loraplex deployments|aliases|pins|residency|engine-builds|drift` against a control API that runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.platform.cli.test_tenancy_commands import Terminal
from tests.platform.control.stand import BASE, Stand
from tests.platform.control.test_playground import serving
from tests.platform.control.test_revisions import add_build


@pytest.fixture
async def terminal(
    _quiet_server: None, db_url: str, redis_url: str, short_tmp_path: Path
) -> AsyncIterator[Terminal]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand, serving(stand.app) as url:
        yield Terminal(stand, url)


async def shown(terminal: Terminal, *arguments: str) -> Any:
    return json.loads(await terminal.done(*arguments, "--json"))


async def test_a_deployment_is_set_field_by_field_compared_and_archived(
    terminal: Terminal,
) -> None:
    tenant = await terminal.stand.tenant("acme")
    for seed in (0, 1):
        await terminal.stand.version(tenant["id"], seed=seed)
    of = ("support", "-t", "acme")

    await terminal.done("deployments", "set", *of, "--version", "capitals:1")
    said = await terminal.done(
        *("deployments", "set", *of, "--system-prompt", "Be brief."),
        *("--sampling", "temperature=0.2", "--sampling", 'stop=["x"]'),
    )
    assert said == "support answers with capitals:1, sampling, system_prompt, revision 2"
    now = await shown(terminal, "deployments", "set", *of, "--sampling", "stop=")
    assert now["revision"]["params"] == {
        "system_prompt": "Be brief.",
        "sampling": {"temperature": 0.2},
    }
    # A new version keeps what else is set.
    await terminal.done("adapters", "deploy", *of, "--version", "capitals:2")
    now = await shown(terminal, "deployments", "show", *of)
    assert (now["revision"]["version"], now["revision"]["params"]["sampling"]) == (
        2,
        {"temperature": 0.2},
    )
    changes = (await shown(terminal, "deployments", "diff", "support", "1", "-t", "acme"))[
        "changes"
    ]
    assert {item["field"] for item in changes} == {
        "version_id",
        "digest",
        "params.system_prompt",
        "params.sampling.temperature",
    }
    assert "Be brief." in await terminal.done("deployments", "show", *of)
    assert "capitals:2" in await terminal.done("deployments", "list", "-t", "acme")
    added = await shown(terminal, "deployments", "add-revision", *of, "--base")
    assert added["version_id"] is None
    listed = await terminal.done("deployments", "revisions", *of)
    assert [line.split()[0] for line in listed.splitlines()] == [
        "REVISION",
        "5",
        "4",
        "3",
        "2",
        "1",
    ]
    for wrong, part in (
        (("--sampling", "temperature"), "NAME=VALUE"),
        (("--sampling", "temperature=warm"), "JSON"),
        (("--sampling", "temperature=9"), "temperature"),
        (("--version", "capitals", "--base"), "either"),
        (("--build", "bld_x"), "engine-builds"),
    ):
        assert part in await terminal.refused("deployments", "set", *of, *wrong)
    await terminal.done("deployments", "archive", *of)
    assert await shown(terminal, "deployments", "list", "-t", "acme") == []


async def test_the_platforms_deployment_needs_no_tenant(terminal: Terminal) -> None:
    build = await add_build(terminal.stand)

    await terminal.done("deployments", "set", BASE, "--build", build)

    assert build in await terminal.done("deployments", "list")
    assert build in await terminal.done("engine-builds", "list")
    code, output, _ = await terminal.run("drift")
    assert (code, f"{build}: no replica runs it" in output) == (1, True)
    await terminal.done("deployments", "set", BASE, "--build", "any")
    assert "all as desired" in await terminal.done("drift")


async def test_an_alias_is_moved_and_its_history_shown(terminal: Terminal) -> None:
    tenant = await terminal.stand.tenant("acme")
    for seed in (0, 1):
        await terminal.stand.version(tenant["id"], seed=seed)
    of = ("capitals", "production")
    await terminal.done("aliases", "set", *of, "1", "-t", "acme")
    await terminal.done(
        "deployments", "set", "support", "-t", "acme", "--follow", "capitals:production"
    )

    said = await terminal.done("aliases", "set", *of, "2", "-t", "acme")

    assert said == "production is capitals:2; support moved with it"
    history = await terminal.done("aliases", "history", *of, "-t", "acme")
    assert [line.split()[2] for line in history.splitlines()[1:]] == ["2", "1"]
    [alias] = await shown(terminal, "aliases", "list", "capitals", "-t", "acme")
    assert alias["version"] == 2
    # What is not named stays, also that it follows.
    now = await shown(
        terminal, "deployments", "set", "support", "-t", "acme", "--sampling", "top_k=3"
    )
    assert now["follow"]["alias"] == "production"
    assert "follow this alias: support" in await terminal.refused(
        "aliases", "remove", *of, "-t", "acme"
    )
    uses = await terminal.done("adapters", "uses", "capitals:2", "-t", "acme")
    assert "deployment" in uses
    assert "in use" in await terminal.refused("adapters", "retire", "capitals:2", "-t", "acme")
    assert "is retired" in await terminal.done("adapters", "retire", "capitals:1", "-t", "acme")
    assert "is ready" in await terminal.done("adapters", "unretire", "capitals:1", "-t", "acme")


async def test_a_pin_is_set_listed_and_ended(terminal: Terminal) -> None:
    await terminal.stand.tenant("acme")
    await terminal.done("deployments", "set", "support", "-t", "acme", "--base")

    said = await terminal.done(
        *("pins", "set", "support", "-t", "acme", "--until", "2099-01-01", "--reason", "audit")
    )

    assert said == "acme's support stays at revision 1 until 2099-01-01 00:00:00Z"
    await terminal.done("pins", "set", BASE, "-t", "acme", "--reason", "audit")
    listed = await terminal.done("pins", "list", "-t", "acme")
    assert {line.split()[0] for line in listed.splitlines()[1:]} == {"support", BASE}
    assert "YYYY-MM-DD" in await terminal.refused(
        *("pins", "set", "support", "-t", "acme", "--until", "soon", "--reason", "x")
    )
    await terminal.done("pins", "remove", "support", "-t", "acme")
    assert len(await shown(terminal, "pins", "list", "-t", "acme")) == 1


async def test_a_version_is_kept_in_memory_and_a_replica_that_refuses_is_told(
    terminal: Terminal,
) -> None:
    tenant = await terminal.stand.tenant("acme")
    await terminal.stand.version(tenant["id"])
    of = ("capitals", "-t", "acme")

    kept = await terminal.done("residency", "add", *of, "--reason", "launch")

    assert kept == "fake-0: kept"
    assert "launch" in await terminal.done("residency", "list")
    assert await terminal.done("residency", "remove", *of) == "fake-0: not kept any more"
    terminal.stand.engine.pin_refusal = "too_many_pins"
    refused = await terminal.refused("residency", "add", *of, "--reason", "launch")
    assert "fake-0: no" in refused
