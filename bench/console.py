"""The console at full size: `python -m bench.console [--scale 0.05] [--only lists usage pages]`.

A throw-away Postgres of its own (fsync on) with a tenant of 400,000 keys and 10,000 adapters among 11,000
tenants, and a month of five million requests, rolled up (16 GB of disk at scale 1); the control API and
`loraplex console` as processes of their own.

| part | what is measured | target |
|---|---|---|
| lists | every list behind a page: the first page, a deep one, each filter, searches | 100 ms |
| usage | the usage explorer's reports | 300 ms |
| pages | every page in Chromium, from navigation until its table or chart stands | 2 s |

Of a list and a report also the CPU milliseconds of Postgres and of the control API: on a machine that
others use, wall clock says less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from loraplex_admin.api import SESSION_COOKIE
from loraplex_admin.catalog import PAGES
from loraplex_admin.resources import PAGE_SIZE
from loraplex_platform.db import migrate
from loraplex_platform.db.session import open_database
from loraplex_platform.ids import format_id
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.logs import configure_logging
from loraplex_platform.metering.invariant_runs import check_and_keep, find_last
from loraplex_platform.settings import ControlSettings, MigrationSettings
from loraplex_platform.worker.app import INVARIANT_WINDOW
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from bench import console_tables, key_list, usage_report
from bench.console_tables import Sizes
from bench.processes import Served, free_port
from tests.platform.control.stand import Stand
from tests.support import browser
from tests.support.billing import as_owner
from tests.support.postgres import SERVE_ROLE, database_settings

PARTS = ("lists", "usage", "pages")
LIST_MS, USAGE_MS, PAGE_MS = 100.0, 300.0, 2000.0
WARM_UP, REPEATS, PAGE_REPEATS = 3, 20, 5
DEEP_PAGES = 25  # the console turns one after the other; what is deeper costs the same
START_S = 60.0
# A table is drawn on a canvas, a chart too; both come after the script that asked for them has ended.
_IS_DRAWN = """() => document.querySelector('[data-testid="stMain"] h1')
    && document.querySelector('[data-testid="stApp"]')
    && !document.querySelector('[data-test-script-state="running"]')
    && !document.querySelector('[data-testid="stSkeleton"], [data-testid="stSpinner"]')
    && !document.querySelector('[data-stale="true"]')
    && [...document.querySelectorAll('[data-testid="stDataFrame"], [data-testid="stVegaLiteChart"]')]
        .every(drawn => !drawn.checkVisibility() || drawn.querySelector('canvas, svg'))
    && performance.now()"""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one thing took, milliseconds; CPU is the mean of a call's."""

    part: str
    title: str
    rows: int
    median_ms: float
    p95_ms: float
    longest_ms: float
    target_ms: float
    postgres_cpu_ms: float | None = None
    api_cpu_ms: float | None = None

    @property
    def is_met(self) -> bool:
        """By 95 in 100."""
        return self.p95_ms < self.target_ms


@dataclass(frozen=True, slots=True)
class Case:
    """A list or a report as a page asks for it."""

    title: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)


def _timing(
    part: str, title: str, rows: int, times_ms: list[float], target: float, **cpu: float
) -> Timing:
    ranked = sorted(times_ms)
    at = min(len(ranked) - 1, int(0.95 * len(ranked)))
    return Timing(
        part, title, rows, statistics.median(ranked), ranked[at], ranked[-1], target, **cpu
    )


# ---------------------------------------------------------------------- the platform


@contextlib.asynccontextmanager
async def _filled(folder: Path, sizes: Sizes) -> AsyncIterator[tuple[Stand, str, UUID]]:
    """A platform in a folder, filled unless it has been: its stand, the owner's URL, the large tenant."""
    tell = Console(stderr=True).print
    postgres = start_postgres(folder / "pg")
    redis = start_redis(folder / "redis")
    try:
        migrate.upgrade(database_settings(postgres.url))
        migrate.ensure_serving_role(
            MigrationSettings.model_validate(
                {"database_url": postgres.url, "serve_role": SERVE_ROLE}
            )
        )
        async with Stand.open(postgres.url, redis.url, folder / "stand") as stand:
            done = folder / "filled.json"
            if done.exists():
                was = json.loads(done.read_text())
                if was["sizes"] != asdict(sizes):
                    raise SystemExit(
                        f"--keep: {folder} holds other sizes; pass its --scale or another folder"
                    )
                tenant = UUID(was["tenant"])
            else:
                tenant = (await usage_report.fill(stand, postgres.url, sizes.requests)).tenant_id
                await _fill_rest(stand, postgres.url, tenant, sizes, tell)
                done.write_text(json.dumps({"sizes": asdict(sizes), "tenant": str(tenant)}))
            await _as_the_worker_checks(postgres.url)
            yield stand, postgres.url, tenant
    finally:
        redis.stop()
        postgres.stop()


async def _as_the_worker_checks(url: str) -> None:
    """The books' last two days are checked once, as they are every hour: the page shows the last check."""
    async with open_database(database_settings(url), statement_timeout_s=None) as database:
        async with database.sessions() as session:
            if await find_last(session) is not None:
                return
        since = datetime.now(UTC) - INVARIANT_WINDOW
        await check_and_keep(database.sessions, "worker", since=since)


async def _fill_rest(
    stand: Stand, url: str, tenant: UUID, sizes: Sizes, tell: Callable[[str], None]
) -> None:
    path = f"/admin/v1/tenants/{format_id('tenant', tenant)}/projects"
    made = await stand.admin.post(path, json={"name": "Bots"})
    made.raise_for_status()
    other = as_owner(url, "select id from tenants where slug = 'tenant-1'")[0][0]
    ids = {
        "mine": str(tenant),
        "other": str(other),
        "project": made.json()["id"].removeprefix("prj_"),
    }
    await asyncio.to_thread(key_list.fill, url, ids, sizes.keys)
    tell(f"{sizes.keys} keys filled, and as many of another tenant")
    base = as_owner(
        url, "select base_model_id from deployments where tenant_id = %s limit 1", tenant
    )
    await asyncio.to_thread(console_tables.fill, url, tenant, base[0][0], sizes, tell)


@contextlib.contextmanager
def _control(settings: ControlSettings, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`loraplex control` as a process, with the stand's settings: its URL, and the process."""
    port = free_port()
    values = settings.model_dump(exclude_unset=True) | {"control_port": port}
    environment = {
        f"LORAPLEX_{name.upper()}": value.get_secret_value()
        if isinstance(value, SecretStr)
        else str(value)
        for name, value in values.items()
        if value is not None
    }
    command = [sys.executable, "-m", "loraplex_platform.control.main"]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready", trust_env=False).is_success
        return False

    with Served(command, folder / "control.log", environment) as served:
        served.wait_until(is_ready, START_S)
        yield url, psutil.Process(served.process.pid)


# ---------------------------------------------------------------------- lists and reports


def _lists(url: str, tenant: UUID) -> list[Case]:
    """Every list that a page shows, and its filters."""
    id_ = format_id("tenant", tenant)
    mine = f"/tenants/{id_}"
    only = {"tenant_id": id_}

    def newest(table: str, kind: str, condition: str = "tenant_id = %s", column: str = "id") -> str:
        statement = f"select {column} from {table} where {condition} order by {column} desc limit 1"
        return format_id(kind, as_owner(url, statement, tenant)[0][0])

    project = newest("projects", "project")
    adapter = newest("adapters", "adapter", "tenant_id = %s and name like 'support-%%'")
    webhook, rollout = newest("webhooks", "webhook"), newest("rollouts", "rollout")
    run, suite = newest("eval_runs", "eval_run"), newest("eval_suites", "eval_suite")
    revision = newest("deployment_revisions", "deployment_revision")
    assistant = as_owner(
        url, "select max(public_name) from deployments where public_name like 'assistant-%%'"
    )[0][0]
    actor, thing, cause = as_owner(
        url,
        "select actor_id, object_id, request_id from audit_log where tenant_id = %s and seq = 6",
        tenant,
    )[0]
    searches = {
        "/tenants": ("customer-77", "customer"),
        f"{mine}/keys": ("key 123", "key"),
        f"{mine}/adapters": ("support-77", "support"),
        f"{mine}/deployments": ("assistant-77", "assistant"),
        f"{mine}/members": ("member-77", "member"),
        "/users": ("member-77", "member"),
    }
    filters: list[tuple[str, str, dict[str, Any]]] = [
        ("keys, active", f"{mine}/keys", {"status": "active"}),
        ("keys, of a project", f"{mine}/keys", {"project_id": project}),
        ("limits of keys", "/limits", only | {"scope_kind": "key"}),
        ("limits of projects (none)", "/limits", only | {"scope_kind": "project"}),
        ("requests, a tenant's", "/requests", only),
        ("requests of a revision (none)", "/requests", only | {"revision_id": revision}),
        ("requests of a rollout (none)", "/requests", only | {"rollout_id": rollout}),
        ("requests of one side (none)", "/requests", only | {"arm": "canary"}),
        ("invoices, a tenant's", "/invoices", only),
        ("audit, a tenant's", "/audit", only),
        ("audit, by action", "/audit", {"action": "key.revoke"}),
        ("audit, by actions (none)", "/audit", {"action": "nothing.*"}),
        ("audit, by actor", "/audit", {"actor_id": actor}),
        ("audit, by actor (none)", "/audit", {"actor_id": "nobody"}),
        ("audit, by kind of object", "/audit", {"object_kind": "adapter"}),
        ("audit, by object", "/audit", {"object_id": thing}),
        ("audit, a tenant's, by object", "/audit", only | {"object_id": thing}),
        ("audit, by request", "/audit", {"request_id": cause}),
        ("audit, a day", "/audit", {"start_time": 1_700_000_000, "end_time": 1_700_086_400}),
        ("rollouts, aborted", f"{mine}/rollouts", {"state": "aborted"}),
        ("rollouts, of a deployment", f"{mine}/rollouts", {"deployment": assistant}),
        ("eval runs of a suite", f"{mine}/eval-runs", {"suite_id": suite}),
        ("eval runs, failed", f"{mine}/eval-runs", {"state": "failed"}),
        ("eval runs, timeout (none)", f"{mine}/eval-runs", {"state": "timeout"}),
    ]
    plain = [
        ("tenants", "/tenants"),
        ("users", "/users"),
        ("members", f"{mine}/members"),
        ("invitations", f"{mine}/invitations"),
        ("projects", f"{mine}/projects"),
        ("keys", f"{mine}/keys"),
        ("limits", "/limits"),
        ("models", "/base-models"),
        ("engine builds", "/engine-builds"),
        ("adapters", f"{mine}/adapters"),
        ("aliases", f"{mine}/adapters/{adapter}/aliases"),
        ("an alias's events", f"{mine}/adapters/{adapter}/aliases/production/events"),
        ("imports", f"{mine}/adapter-imports"),
        ("deployments", f"{mine}/deployments"),
        ("revisions", f"{mine}/deployments/{assistant}/revisions"),
        ("pins", f"{mine}/pins"),
        ("rollouts", f"{mine}/rollouts"),
        ("a rollout's events", f"{mine}/rollouts/{rollout}/events"),
        ("eval suites", f"{mine}/eval-suites"),
        ("eval runs", f"{mine}/eval-runs"),
        ("eval results", f"{mine}/eval-runs/{run}/results"),
        ("eval schedules", f"{mine}/eval-schedules"),
        ("price books", "/price-books"),
        ("adjustments", f"{mine}/adjustments"),
        ("invoices", "/invoices"),
        ("requests", "/requests"),
        ("audit", "/audit"),
        ("audit chains", "/audit/chains"),
        ("webhooks", f"{mine}/webhooks"),
        ("deliveries", f"{mine}/webhooks/{webhook}/deliveries"),
        ("residency", "/fleet/residency"),
    ]
    whole = [
        ("fleet", "/fleet"),
        ("overview", "/overview"),
        ("drift", "/fleet/drift"),
        ("an adapter", f"{mine}/adapters/{adapter}"),
    ]
    cases = [Case(title, path, {"limit": PAGE_SIZE}) for title, path in plain]
    for title, path in plain:
        if path in searches:
            few, many = searches[path]
            cases += [
                Case(f"{title}, search {kind}", path, {"limit": PAGE_SIZE, "search": search})
                for kind, search in (("few", few), ("many", many), ("none", "zzz-no-such"))
            ]
    cases += [Case(title, path, {"limit": PAGE_SIZE} | more) for title, path, more in filters]
    return cases + [Case(title, path) for title, path in whole]


def _reports(tenant: UUID) -> list[Case]:
    """What the usage explorer offers."""
    start = int(usage_report.first_day().timestamp())
    month: dict[str, Any] = {"start_time": start, "end_time": start + usage_report.DAYS * 86400}
    cases = []
    for whose, only in (
        ("all tenants", {}),
        ("large tenant", {"tenant_id": format_id("tenant", tenant)}),
    ):
        for group in (None, "model", "key_id", "adapter_version_id", "deployment_id", "tenant_id"):
            for width in ("1d", "1mo"):
                params = (
                    month
                    | only
                    | {"bucket_width": width}
                    | ({"group_by[]": group} if group else {})
                )
                by = {"1d": "day", "1mo": "month"}[width] + (
                    f" and {group.removesuffix('_id')}" if group else ""
                )
                cases.append(Case(f"{whose}, by {by}", "/usage", params))
    return cases


class _Asker:
    """Asks the control API, and says what that cost."""

    def __init__(self, stand: Stand, url: str, process: psutil.Process) -> None:
        self._stand = stand
        self._process = process
        headers = {"authorization": f"Bearer {stand.settings.admin_key.get_secret_value()}"}
        self._http = httpx.Client(
            base_url=f"{url}/admin/v1", headers=headers, timeout=120, trust_env=False
        )

    def time(self, part: str, case: Case, target_ms: float) -> tuple[Timing, dict[str, Any]]:
        """Its timing, and the last answer."""
        for _ in range(WARM_UP):
            self._get(case)
        began = self._cpu_s()
        times_ms, answer = [], {}
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            answer = self._get(case)
            times_ms.append(1000 * (time.perf_counter() - began_s))
        postgres, api = (
            1000 * (now - then) / REPEATS for now, then in zip(self._cpu_s(), began, strict=True)
        )
        rows = len(answer.get("data", ()))
        timing = _timing(
            part, case.title, rows, times_ms, target_ms, postgres_cpu_ms=postgres, api_cpu_ms=api
        )
        return timing, answer

    def deep(self, case: Case, answer: dict[str, Any]) -> Timing | None:
        """A page deep in the list, if it has so many."""
        for _ in range(DEEP_PAGES):
            if not answer["has_more"]:
                return None
            turned = case.params | {"after": answer["last_id"]}
            answer = self._get(Case(case.title, case.path, turned))
        turned = case.params | {"after": answer["last_id"]}
        return self.time("lists", Case(f"{case.title}, deep", case.path, turned), LIST_MS)[0]

    def _get(self, case: Case) -> dict[str, Any]:
        answer = self._http.get(case.path, params=case.params)
        assert answer.is_success, f"{case.title}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def _cpu_s(self) -> tuple[float, float]:
        return usage_report.server_cpu_s(self._stand), sum(self._process.cpu_times()[:2])


# ---------------------------------------------------------------------- pages


def _pages(control_url: str, folder: Path, cookie: str, slug: str, pick: str) -> Iterator[Timing]:
    """Each page, cold (a new visitor, empty cache) and warm (theirs again)."""
    with browser.console(control_url, folder) as url, browser.chromium() as chromium:
        for page in (one for one in PAGES if pick in one.title):
            address = f"{url}/{page.path}?tenant={slug}"
            cold_ms: list[float] = []
            warm_ms: list[float] = []
            for number in range(PAGE_REPEATS):
                shown = browser.open_page(chromium)
                shown.context.add_cookies([{"name": SESSION_COOKIE, "value": cookie, "url": url}])
                for times_ms in (cold_ms, warm_ms):
                    shown.goto(address, wait_until="commit")
                    drawn = shown.wait_for_function(_IS_DRAWN, polling="raf").json_value()
                    times_ms.append(float(drawn))
                if number == 0:
                    shown.screenshot(path=folder / f"{page.path}.png")
                shown.context.close()
            for kind, times_ms in (("cold", cold_ms), ("warm", warm_ms)):
                yield _timing("pages", f"{page.title}, {kind}", 1, times_ms, PAGE_MS)


# ---------------------------------------------------------------------- the command


async def measure(folder: Path, sizes: Sizes, parts: list[str], *, pick: str = "") -> list[Timing]:
    """Fill, then the parts; what each thing took. `pick`: only what has this in its title."""
    found: list[Timing] = []

    def note(timing: Timing) -> None:
        found.append(timing)
        cpu = (
            ""
            if timing.postgres_cpu_ms is None
            else f"; CPU: Postgres {timing.postgres_cpu_ms:.1f}, API {timing.api_cpu_ms:.1f}"
        )
        print(
            f"{'  ' if timing.is_met else '! '}{timing.part}: {timing.title}: {timing.rows} rows, median "
            f"{timing.median_ms:.0f} ms, p95 {timing.p95_ms:.0f}, longest {timing.longest_ms:.0f} "
            f"(target {timing.target_ms:g}){cpu}",
            flush=True,
        )

    def ask(stand: Stand, url: str, owner_url: str, process: psutil.Process, tenant: UUID) -> None:
        asker = _Asker(stand, url, process)
        for part, cases, target_ms in (
            ("lists", _lists(owner_url, tenant), LIST_MS),
            ("usage", _reports(tenant), USAGE_MS),
        ):
            for case in cases if part in parts else []:
                if pick not in case.title:
                    continue
                timing, answer = asker.time(part, case, target_ms)
                note(timing)
                deep = (
                    asker.deep(case, answer) if answer.get("has_more") and part == "lists" else None
                )
                if deep is not None:
                    note(deep)

    def look(url: str, cookie: str) -> None:
        for timing in _pages(url, folder, cookie, "tenant-0", pick):
            note(timing)

    async with _filled(folder, sizes) as (stand, owner_url, tenant):
        with _control(stand.settings, folder) as (url, process):
            await asyncio.to_thread(ask, stand, url, owner_url, process, tenant)
            if "pages" in parts:
                client = await stand.login("admin", f"look-{time.time_ns()}@example.com")
                await asyncio.to_thread(look, url, client.cookies[SESSION_COOKIE])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of every table; 0.05 for a try")
    parser.add_argument("--requests", type=int, help="as many instead, for they take the longest")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument(
        "--pick", default="", help="only lists, reports and pages with this in their title"
    )
    parser.add_argument("--keep", type=Path, help="fill this folder once, and use it again")
    parser.add_argument("--json", type=Path, help="write the timings to this file, too")
    arguments = parser.parse_args()
    if arguments.scale <= 0:
        parser.error("--scale: pass a number above 0")
    configure_logging("warning", "console")
    sizes = Sizes().scaled(arguments.scale)
    if arguments.requests is not None:
        sizes = replace(sizes, requests=arguments.requests)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lpx-")))
        folder.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()
        found = asyncio.run(measure(folder, sizes, arguments.only, pick=arguments.pick))
    loads = f"load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
    missed = [timing for timing in found if not timing.is_met]
    table = Table(title=f"{len(missed)} of {len(found)} missed their target; {loads}")
    for name in ("part", "what", "median ms", "p95 ms", "target ms"):
        table.add_column(name)
    for one in missed:
        table.add_row(
            one.part, one.title, f"{one.median_ms:.0f}", f"{one.p95_ms:.0f}", f"{one.target_ms:g}"
        )
    Console(stderr=True).print(table)
    if arguments.json is not None:
        report = {"sizes": asdict(sizes), "load": [load[0], os.getloadavg()[0]]}
        arguments.json.write_text(
            json.dumps(report | {"timings": [asdict(one) for one in found]}, indent=1)
        )


if __name__ == "__main__":
    main()
