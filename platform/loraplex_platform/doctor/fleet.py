"""Checks of the processes: which are there, and when each gave its last sign; and of the console's address."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec
from loraplex_engine.artifact import without_login
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, REPLICA_TTL_S, ReplicaRecord
from loraplex_engine.urls import http_fault

from loraplex_platform.doctor.findings import Catalogue, Finding, NotLookedAtError, fail, ok, warn
from loraplex_platform.doctor.look import Look
from loraplex_platform.local.ports import is_loopback

catalogue = Catalogue()

GATEWAY_SILENT_S: Final = 60.0
WORKER_SILENT_S: Final = 120.0


def _start(look: Look, process: str) -> str:
    if look.is_local:
        return f"loraplex up --data-dir {look.data_dir.root}"
    return f"docker compose up -d {process} (or loraplex {process}), and look at its log"


async def replica_records(look: Look) -> list[ReplicaRecord] | None:
    """What engines publish of themselves in Redis now; None: there is none, or it does not answer."""
    from redis.exceptions import RedisError

    records = []
    try:
        async with look.redis() as client:
            async for key in client.scan_iter(f"{REPLICA_KEY_PREFIX}*", count=1000):
                value = await client.get(key)
                if value is not None:
                    records.append(msgspec.json.decode(value, type=ReplicaRecord))
    except (NotLookedAtError, RedisError, OSError, ValueError, msgspec.MsgspecError):
        return None
    return sorted(records, key=lambda record: record.replica_id)


@catalogue.check("fleet.engines", "an engine is there and ready")
async def engines(look: Look) -> Finding:
    from loraplex_platform.doctor import queries

    published = await replica_records(look)
    records = published or []
    ready = [record.replica_id for record in records if record.state == "ready"]
    if ready:
        others = [f"{x.replica_id} is {x.state}" for x in records if x.state != "ready"]
        builds = {(x.model_fingerprint, x.dtype) for x in records if x.state == "ready"}
        text = f"ready: {', '.join(ready)}" + "".join(f"; {other}" for other in others)
        if len(builds) > 1:
            return warn(
                f"{text}; they are of {len(builds)} builds, and answer with different bits",
                "the console's Fleet page shows each one's fingerprint; end the old ones",
            )
        return ok(text)
    if records:
        states = ", ".join(f"{record.replica_id} is {record.state}" for record in records)
        return warn(states, "wait, and look at the engine's log: it says what it is doing")
    # Redis may be away: what the worker has seen is the fallback of the gateways too.
    async with look.database() as database, database.sessions() as session:
        seen = await queries.replicas_seen(session)
    fresh = [one.name for one in seen if one.age_s < 2 * REPLICA_TTL_S]
    # One that has taken its record down is gone, however lately the worker has seen it.
    if fresh and published is None:
        return warn(
            f"seen by the worker: {', '.join(fresh)}; Redis, where they say so, is not there",
            "see redis.reachable, and LORAPLEX_ENGINE_REDIS_URL of the engines",
        )
    last = f"; the last was {seen[0].name}, {_age(seen[0].age_s)} ago" if seen else ""
    return fail(f"none, so that every request gets 503{last}", _start(look, "engine"))


@catalogue.check("fleet.gateways", "a gateway is there")
async def gateways(look: Look) -> Finding:
    from loraplex_platform.doctor import queries

    url = look.url_of("gateway")
    answered = None
    if url is not None:
        try:
            status, body = await look.ask(f"{url}/ready")
            answered = (
                f"{without_login(url)} is ready"
                if status == 200
                else f"{without_login(url)}/ready says {status} {body}"
            )
            if status != 200:
                return fail(answered, _start(look, "gateway"))
            if body.get("engines_ready") == 0:
                answered += ", without an engine"
        except OSError as error:
            answered = f"{without_login(url)} does not answer ({error})"
    try:
        async with look.database() as database, database.sessions() as session:
            seen = await queries.gateways_seen(session)
    except NotLookedAtError:
        if answered is None:
            raise
        if "does not answer" in answered:
            return fail(answered, _start(look, "gateway"))
        return ok(answered)
    fresh = [one for one in seen if one.age_s < GATEWAY_SILENT_S]
    text = ", ".join(f"{one.name} {_age(one.age_s)} ago" for one in fresh[:5])
    if not fresh:
        last = f"; the last sign was {_age(seen[0].age_s)} ago" if seen else ""
        return fail(f"{answered or 'no gateway has given a sign'}{last}", _start(look, "gateway"))
    if answered is not None and "does not answer" in answered:
        return warn(
            f"{answered}, but {text}",
            "mend LORAPLEX_GATEWAY_URL: the control API sends the playground's questions there",
        )
    return ok(f"{answered}; {text}" if answered else text)


@catalogue.check("fleet.worker", "a worker is there")
async def worker(look: Look) -> Finding:
    from loraplex_platform.doctor import queries

    url = look.url_of("worker")
    if url is not None:
        try:
            status, body = await look.ask(f"{url}/live")
        except OSError as error:
            return fail(f"{without_login(url)} does not answer ({error})", _start(look, "worker"))
        if status != 200:
            return fail(f"{without_login(url)}/live says {status} {body}", _start(look, "worker"))
        return ok(f"{without_login(url)} is live")
    async with look.database() as database, database.sessions() as session:
        age_s = await queries.worker_age_s(session)
    if age_s is None:
        return fail("none has ever left a trace", _start(look, "worker"))
    if age_s > WORKER_SILENT_S:
        return fail(
            f"the last sign was {_age(age_s)} ago: nothing is settled for dead gateways, rolled up or delivered",
            _start(look, "worker"),
        )
    return ok(f"last sign {_age(age_s)} ago")


@catalogue.check("fleet.control", "the control API answers")
async def control(look: Look) -> Finding:
    url = look.url_of("control")
    if url is None:
        raise NotLookedAtError("LORAPLEX_CONTROL_URL is not set")
    try:
        status, body = await look.ask(f"{url}/ready")
    except OSError as error:
        return fail(f"{without_login(url)} does not answer ({error})", _start(look, "control"))
    if status != 200:
        return fail(
            f"{without_login(url)}/ready says {status} {body.get('status', '')}",
            "see database.reachable",
        )
    if body.get("adapter_store") == "unavailable":
        return warn(
            f"{without_login(url)} is ready, its adapter store is not", "see store.reachable"
        )
    return ok(f"{without_login(url)} is ready")


@catalogue.check("fleet.console", "the console answers, at an address that browsers may use")
async def console(look: Look) -> Finding:
    url = look.url_of("console")
    if url is None:
        raise NotLookedAtError("LORAPLEX_CONSOLE_URL is not set")
    fault = http_fault(url)
    if fault is not None:
        return fail(f"LORAPLEX_CONSOLE_URL: {fault}", "set it to https://console.example.com")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return fail(
            f"LORAPLEX_CONSOLE_URL is {without_login(url)!r}",
            "set it to https://console.example.com",
        )
    try:
        status, _ = await look.ask(f"{url}/_stcore/health")
    except OSError as error:
        return fail(
            f"{without_login(url)} does not answer ({error})",
            f"{_start(look, 'console')}; or mend LORAPLEX_CONSOLE_URL, to which logins are sent back",
        )
    if status != 200:
        return fail(
            f"{without_login(url)}/_stcore/health says {status}: that is no console",
            _start(look, "console"),
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        return warn(
            f"{without_login(url)} is neither TLS nor this machine: logins cross the network in the open",
            "put a proxy with TLS in front, and set LORAPLEX_CONSOLE_URL=https://...",
        )
    control_url = look.url_of("control")
    control_host = (
        urlsplit(control_url).hostname if control_url and http_fault(control_url) is None else None
    )
    if look.is_local and control_host not in (None, parts.hostname):
        return warn(
            f"console {parts.hostname}, control API {control_host}: the login's cookie is of one host",
            "give both the same host name",
        )
    return ok(f"{without_login(url)} answers")


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
