"""Rollouts beside a control API: revisions to compare, requests as gateways write them, a driver in this process.

async with Stand.open(db_url, redis_url, folder) as stand:
    world = await World.make(stand)
    rollout = await world.started(steps=[canary(500)])
    await world.play(rollout["id"], "canary", 100, error=True)
    await world.look()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
from loraplex_platform.db import Rollout, RolloutEvent
from loraplex_platform.db.session import Database
from loraplex_platform.ids import parse_id, uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.rollouts.driver import RolloutDriver
from loraplex_platform.rollouts.queries import Side
from sqlalchemy import select

from tests.platform.control.stand import Stand
from tests.support.metering import Customer, reservation, run_sql, settlement

MODEL = "capitals"
# Gates that a few requests decide.
NO_GATES: dict[str, Any] = dict.fromkeys(
    ("error_rate", "abort_rate", "ttft", "itl", "finish_reason", "output_length", "logprob")
)
ERRORS_ONLY: dict[str, Any] = {**NO_GATES, "error_rate": {"max_increase": 0.3, "min_requests": 20}}


def shadow(share_bp: int = 1000, hold_s: int = 0) -> dict[str, Any]:
    return {"kind": "shadow", "share_bp": share_bp, "hold_s": hold_s}


def canary(weight_bp: int = 500, hold_s: int = 0) -> dict[str, Any]:
    return {"kind": "canary", "weight_bp": weight_bp, "hold_s": hold_s}


@dataclass(slots=True)
class Servable:
    """A fleet that says what it is told to."""

    reason: str | None = None

    def problem(self, side: Side, model: str) -> str | None:
        del side, model
        return self.reason


@dataclass(slots=True)
class World:
    """A tenant whose deployment has two revisions; the first one answers."""

    stand: Stand
    tenant: str
    customer: Customer
    revisions: list[dict[str, Any]]
    fleet: Servable = field(default_factory=Servable)
    _driver: RolloutDriver | None = None

    @classmethod
    async def make(cls, stand: Stand, slug: str = "acme") -> World:
        tenant = (await stand.tenant(slug))["id"]
        path = f"/admin/v1/tenants/{tenant}"
        key = await stand.admin.post(f"{path}/keys", json={"name": "k"})
        versions = [await stand.version(tenant, f"adapter-{seed}", seed=seed) for seed in (1, 2)]
        revisions = []
        for version in (versions[1], versions[0]):
            answer = await stand.admin.put(
                f"{path}/deployments/{MODEL}", json={"version_id": version}
            )
            assert answer.status_code == 200, answer.text
            revisions.append(dict(answer.json()["revision"]))
        customer = Customer(
            parse_id("tenant", tenant), parse_id("api_key", key.json()["id"]), key.json()["secret"]
        )
        # The first is what is tried, the second is what answers.
        return cls(stand, tenant, customer, revisions)

    @property
    def db(self) -> Database:
        return self.stand.db

    @property
    def path(self) -> str:
        return f"/admin/v1/tenants/{self.tenant}/rollouts"

    @property
    def driver(self) -> RolloutDriver:
        if self._driver is None:
            self._driver = RolloutDriver(
                self.db.sessions,
                self.fleet,
                least_interval_s=0.0,
                cost_share=math.inf,
                patience_s=0.0,
            )
        return self._driver

    async def call(
        self,
        method: str,
        path: str = "",
        status: int = 200,
        *,
        client: httpx.AsyncClient | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        answer = await (client or self.stand.admin).request(method, f"{self.path}{path}", **options)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return dict(answer.json())

    async def made(self, **fields: Any) -> dict[str, Any]:
        """A draft."""
        body = {"deployment": MODEL, "canary": 1, "gate": ERRORS_ONLY, **fields}
        return await self.call("POST", status=201, json=body)

    async def started(self, **fields: Any) -> dict[str, Any]:
        """One that the worker has not seen yet."""
        made = await self.made(**fields)
        return await self.call("POST", f"/{made['id']}/start")

    async def stepping(self, **fields: Any) -> dict[str, Any]:
        """One in its first step."""
        rollout = await self.started(**fields)
        await self.look()
        return await self.read(rollout["id"])

    async def read(self, rollout_id: str) -> dict[str, Any]:
        return await self.call("GET", f"/{rollout_id}")

    async def act(self, rollout_id: str, verb: str, status: int = 200, **options: Any) -> Any:
        return await self.call("POST", f"/{rollout_id}/{verb}", status, **options)

    async def look(self, times: int = 1) -> None:
        """One look at everything that is under way, as a worker does."""
        for _ in range(times):
            seen: set[UUID] = set()
            async with self.db.sessions() as session:
                rows = await session.scalars(
                    select(Rollout.id).where(Rollout.ended_at.is_(None), Rollout.state != "draft")
                )
                seen = set(rows)
            for _ in seen:
                await _one_look(self.driver)

    async def events(self, rollout_id: str) -> list[tuple[str, str]]:
        """Kind and message of each, in order; their numbers have no gap and no double."""
        async with self.db.sessions() as session:
            rows = (
                await session.scalars(
                    select(RolloutEvent)
                    .where(RolloutEvent.rollout_id == parse_id("rollout", rollout_id))
                    .order_by(RolloutEvent.seq)
                )
            ).all()
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        return [(row.kind, row.message) for row in rows]

    async def kinds(self, rollout_id: str) -> list[str]:
        return [kind for kind, _ in await self.events(rollout_id)]

    async def current_number(self) -> int:
        """Of the revision that answers now."""
        answer = await self.stand.admin.get(f"/admin/v1/tenants/{self.tenant}/deployments/{MODEL}")
        return int(answer.json()["revision"]["number"])

    # ------------------------------------------------------------------ requests

    async def play(
        self,
        rollout_id: str,
        arm: str,
        count: int,
        *,
        step: int = 0,
        subjects: int | None = None,
        error: bool = False,
        finish_reason: str = "stop",
        tokens: int = 20,
        ttft_ms: int = 100,
        itl_p95_ms: float | None = 20.0,
        logprob: float | None = None,
        **changes: Any,
    ) -> list[UUID]:
        """Requests of one side, reserved and settled as a gateway does; subjects are its own."""
        rollout = parse_id("rollout", rollout_id)
        kind = "shadow" if arm == "shadow" else "user"
        ids = []
        for idx in range(count):
            wanted = reservation(
                self.customer,
                key_id=None if kind == "shadow" else self.customer.key_id,
                kind=kind,
                rollout_id=rollout,
                rollout_step=step,
                arm=arm,
                subject_key=hash((arm, idx % (subjects or count))),
                shadow_of=uuid7() if kind == "shadow" else None,
            )
            await metering.reserve(self.db.sessions, wanted)
            ending: dict[str, Any] = {
                "kind": kind,
                "finish_reason": "error" if error else finish_reason,
                "http_status": 500 if error else 200,
                "error_code": "engine_error" if error else None,
                "usage_outcome": "fault" if error else "completed",
                "usage_generated": tokens,
                "ttft_ms": ttft_ms,
                "itl_p95_ms": itl_p95_ms,
                "itl_mean_ms": itl_p95_ms,
            }
            await metering.settle(
                self.db.sessions, settlement(wanted.request_id, **ending | changes)
            )
            ids.append(wanted.request_id)
        if logprob is not None:
            await run_sql(
                self.db,
                "update requests set stable_logprob = :logprob where id = any(:ids)",
                logprob=logprob,
                ids=ids,
            )
        return ids

    async def play_equal(self, rollout_id: str, count: int = 60, **fields: Any) -> None:
        """Both sides alike."""
        for arm in ("stable", fields.pop("arm", "canary")):
            await self.play(rollout_id, arm, count, **fields)

    async def check_books(self, *, skip: Sequence[str] = ()) -> None:
        """Every invariant holds."""
        report = await check_invariants(self.db.sessions)
        broken = [one for one in report.checks if not one.ok and one.code not in skip]
        assert not broken, broken


async def _one_look(driver: RolloutDriver) -> None:
    """As `run_once`, but one: with an interval of nothing it would look for ever."""
    async with driver.sessions.begin() as session:
        from loraplex_platform.rollouts import queries

        rollout = await queries.claim(session, driver.least_interval_s)
    if rollout is not None:
        await driver._attend(rollout)
