"""Checks of what must not pile up: spool, outbox, leases, and the last check of the books."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import UUID

from loraplex_platform.doctor.findings import Catalogue, Finding, fail, ok, warn
from loraplex_platform.doctor.look import Look
from loraplex_platform.ids import format_id

catalogue = Catalogue()

# As deploy/prometheus-rules.yml.
OUTBOX_OLD_S: Final = 600.0
# The worker looks every hour.
INVARIANTS_OLD_S: Final = 2 * 3600.0
# After a lease has ended the sweeper takes a few seconds; where a replica is silent, half a minute.
LEASE_GRACE_S: Final = 120.0
SPOOL_OLD_S: Final = 300.0


@catalogue.check("books.spool", "no bill waits on a gateway's disk")
async def spool(look: Look) -> Finding:
    folder = Path(look.needed("LORAPLEX_SPOOL_DIR"))
    return await asyncio.to_thread(_look_at_spool, folder)


def _look_at_spool(folder: Path) -> Finding:
    from loraplex_platform.gateway.spool import REJECTED_SUFFIX, SUFFIX

    if not folder.is_dir():
        return ok(f"{folder} is made when a gateway starts")
    rejected = [path.name for path in folder.glob(f"*{REJECTED_SUFFIX}") if path.stat().st_size]
    if rejected:
        return fail(
            f"{len(rejected)} files in {folder} hold bills that the books refuse: {rejected[0]}",
            f"loraplex reconcile, then look at them with a person who knows the books; keep {folder}",
        )
    waiting = [path.stat() for path in folder.glob(f"*{SUFFIX}") if path.stat().st_size]
    if not waiting:
        return ok(f"nothing waits in {folder}")
    oldest_s = datetime.now(UTC).timestamp() - min(stat.st_mtime for stat in waiting)
    text = f"{sum(stat.st_size for stat in waiting)} bytes wait in {len(waiting)} files of {folder}"
    if oldest_s > SPOOL_OLD_S:
        return fail(
            f"{text}, for {oldest_s / 60:.0f} min",
            "see database.reachable; a running gateway with this LORAPLEX_SPOOL_DIR bills what a dead one left",
        )
    return warn(text, "wait a moment: a gateway puts them on the books as soon as Postgres answers")


@catalogue.check("books.outbox", "what others are to be told has been told")
async def outbox(look: Look) -> Finding:
    from loraplex_platform.outbox.queries import backlog

    async with look.database() as database, database.sessions() as session:
        topics = await backlog(session)
    dead = [topic for topic in topics if topic.dead]
    if dead:
        names = ", ".join(f"{topic.dead} of {topic.topic}" for topic in dead)
        return fail(
            f"given up after many tries: {names}",
            f"mend the cause, then loraplex outbox --revive {dead[0].topic}{look.owner_note}",
        )
    old = [topic for topic in topics if topic.oldest_s > OUTBOX_OLD_S]
    if old:
        names = ", ".join(
            f"{one.waiting} of {one.topic}, the oldest for {one.oldest_s / 60:.0f} min"
            for one in old
        )
        return warn(names, "loraplex outbox, and the worker's log for outbox_put_off")
    waiting = sum(topic.waiting for topic in topics)
    return ok("nothing waits" if not waiting else f"{waiting} under way")


@catalogue.check("books.invariants", "the books added up when they were last checked")
async def invariants(look: Look) -> Finding:
    from loraplex_platform.metering.invariant_runs import find_last, report_of

    async with look.database() as database, database.sessions() as session:
        run = await find_last(session)
    remedy = f"loraplex reconcile{look.owner_note}"
    if run is None:
        return warn("they have never been checked", remedy)
    age_s = (datetime.now(UTC) - run.checked_at).total_seconds()
    when = f"{run.checked_at:%F %H:%M} UTC by {run.checked_by}"
    if not run.is_ok:
        broken = [check.name for check in report_of(run).checks if not check.ok]
        return fail(
            f"{', '.join(broken)} broken, {when}", f"{remedy}, which shows the rows that are wrong"
        )
    if age_s > INVARIANTS_OLD_S:
        return warn(f"all held, but that was {age_s / 3600:.0f} h ago ({when})", remedy)
    return ok(f"all hold, {when}")


@catalogue.check("books.leases", "every request that was begun is settled or runs")
async def leases(look: Look) -> Finding:
    from loraplex_platform.doctor import queries

    async with look.database() as database, database.sessions() as session:
        count, oldest_s, one = await queries.stuck_leases(session, LEASE_GRACE_S)
    if one is not None:
        which = format_id("request", UUID(one))
        return fail(
            f"{count} requests have been without an owner for up to {oldest_s / 60:.0f} min, such as {which}:"
            " what they hold of quotas is not free",
            "start a worker (its sweeper settles them from the engine's journal), and see fleet.worker; its log"
            " says why one is put off (sweep_*)",
        )
    return ok("none is without an owner")
