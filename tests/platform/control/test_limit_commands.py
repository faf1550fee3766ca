"""`loraplex limits` and `loraplex explain` against a running control API."""

from __future__ import annotations

import asyncio
import json

import pytest
import structlog
from loraplex_platform.cli import app
from loraplex_platform.ids import format_id
from loraplex_platform.metering import service
from typer.testing import CliRunner

from tests.platform.control.stand import ADMIN_KEY, Stand
from tests.platform.control.test_limits import customer_of
from tests.platform.control.test_playground import serving
from tests.support.metering import reservation


def _drop(*_: object) -> structlog.typing.EventDict:
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def _quiet_server(_logs_as_they_were: None) -> None:
    """The server is in this process: its log must not be taken for what a command prints."""
    structlog.configure(processors=[_drop])


async def run(url: str, *arguments: str) -> tuple[int, str]:
    """Exit code and everything that was said."""
    runner = CliRunner(env={"LORAPLEX_CONTROL_URL": url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY})
    result = await asyncio.to_thread(runner.invoke, app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


async def test_a_limit_is_set_changed_listed_explained_and_removed(stand: Stand) -> None:
    customer, ids = await customer_of(stand)
    async with serving(stand.app) as url:
        per_month = ("limits", "set", "cost", "100", "--of", "acme", "--per", "month")
        code, output = await run(url, *per_month, "--alert", "80")
        assert code == 0, output
        assert output.strip().endswith(f"cost per month of {ids['tenant']} is 100.00")
        code, output = await run(url, *per_month[:3], "0.000004", *per_month[4:])
        assert code == 0, output
        await run(url, "limits", "set", "rpm", "60", "--of", ids["key"], "--burst", "5")
        code, output = await run(
            url, "limits", "set", "requests", "7", "--of", "platform", "--per", "24h", "--soft"
        )
        assert code == 0, output

        _, output = await run(url, "limits", "list", "--json")
        limits = json.loads(output)
        assert [(limit["metric"], limit["value"]) for limit in limits] == [
            ("requests", "7"),
            ("rpm", "60"),
            ("cost", "0.000004"),
        ]
        assert limits[2]["alert_pct"] == [80], "what was not named stays"
        assert (limits[0]["window_hours"], limits[0]["hard"]) == (24, False)

        wanted = reservation(customer)
        await service.reserve(stand.db.sessions, wanted)
        _, output = await run(url, "limits", "list", "--tenant", "acme")
        assert "cost per month" in output
        assert "requests" not in output
        _, output = await run(url, "explain", format_id("request", wanted.request_id))
        assert output.startswith("running: It was admitted by all limits")
        assert "was cut to 95" in output

        code, output = await run(url, "limits", "remove", limits[2]["id"])
        assert (code, output.strip()) == (0, f"removed {limits[2]['id']}")
        code, output = await run(url, "limits", "remove", limits[2]["id"])
        assert code == 1
        assert "No such limit" in output


async def test_what_is_wrong_is_said_with_the_remedy(stand: Stand) -> None:
    await customer_of(stand)
    async with serving(stand.app) as url:
        for arguments, said in (
            (("cost", "1", "--of", "acme"), "--per: say day, month"),
            (("rpm", "1", "--of", "acme", "--per", "day"), "--per: rpm is per minute"),
            (("rpm", "x", "--of", "acme"), "value"),
            (("rpm", "1", "--of", "nobody"), "no tenant nobody"),
        ):
            code, output = await run(url, "limits", "set", *arguments)
            assert code == 1, output
            assert said in output
