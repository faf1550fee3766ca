"""The worker's parts put together: loops over one database and the connected engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.billing.adapter_hours import AdapterHoursWorker
from loraplex_platform.billing.invoices import InvoiceWorker
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.evals.runner import EvalWorker
from loraplex_platform.gateway.failpoints import WORKER_POINTS, Failpoints
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer, ModelTexts
from loraplex_platform.ids import uuid7_floor
from loraplex_platform.metering.invariant_runs import check_and_keep
from loraplex_platform.outbox.relay import OutboxMetrics, Relay, Topic, note_backlog, purge_done
from loraplex_platform.quotas import queries as quotas
from loraplex_platform.rates.invariant import checks_of_redis
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisMetrics
from loraplex_platform.rates.versions import version_topic
from loraplex_platform.registry.builds import BuildKeeper
from loraplex_platform.registry.pins import PinWatch
from loraplex_platform.retention import service as retention
from loraplex_platform.rollouts.driver import RolloutDriver
from loraplex_platform.rollouts.serving import ConnectedFleet
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.webhooks.addresses import AddressRules, OwnerRules, parse_trusted
from loraplex_platform.webhooks.sender import Sender
from loraplex_platform.webhooks.service import Deliverer, webhook_topics
from loraplex_platform.webhooks.signing import Vault
from loraplex_platform.worker import queries
from loraplex_platform.worker.engines import ConnectedEngines
from loraplex_platform.worker.journals import JournalPuller
from loraplex_platform.worker.loops import Loop, LoopMetrics
from loraplex_platform.worker.residency import Residency
from loraplex_platform.worker.sweeper import Sweeper

log = structlog.get_logger(__name__)

MIRROR_INTERVAL_S = 2.0
RESIDENCY_INTERVAL_S = 2.0
PIN_INTERVAL_S = 10.0
KEY_USE_INTERVAL_S = 15.0
KEY_USE_WINDOW = timedelta(minutes=10)
PARTITION_INTERVAL_S = 3600.0
MONTHS_AHEAD = 2
INVARIANT_INTERVAL_S = 3600.0
INVARIANT_WINDOW = timedelta(days=2)
# Two days of books may be millions of rows: nobody waits for their check, and it holds up nobody.
INVARIANT_STATEMENT_S = 900.0
INVARIANT_STUCK_S = 3600.0
RETENTION_INTERVAL_S = 3600.0
WEBHOOK_INTERVAL_S = 1.0
HOURS_INTERVAL_S = 600.0
INVOICE_INTERVAL_S = 3600.0
EVAL_INTERVAL_S = 1.0
EVAL_SCHEDULE_INTERVAL_S = 15.0
ROLLOUT_INTERVAL_S = 0.5  # between looks for what is due
BACKLOG_INTERVAL_S = 15.0
PURGE_INTERVAL_S = 600.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker."""

    loops: list[Loop]
    registry: CollectorRegistry

    @property
    def stuck(self) -> list[str]:
        """Loops whose round hangs."""
        return [loop.name for loop in self.loops if loop.is_stuck]


@asynccontextmanager
async def open_worker(settings: WorkerSettings) -> AsyncIterator[Worker]:
    """Run every loop for as long as the block lasts."""
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(settings))
        redis_url = settings.redis_url
        router = await stack.enter_async_context(
            Router(
                database.sessions,
                gateway_id=_worker_id(),
                redis_url=None if redis_url is None else redis_url.get_secret_value(),
                curve_secret_key_file=settings.curve_secret_key_file,
            )
        )
        registry = CollectorRegistry()
        metrics = LoopMetrics(registry)
        topics = _topics(stack, settings, registry) + webhook_topics(database.sessions)
        # Of its own, with two connections: `open_database` has one timeout for all of its statements.
        patient = await stack.enter_async_context(
            open_database(
                settings.model_copy(update={"database_pool_size": 2}),
                statement_timeout_s=INVARIANT_STATEMENT_S,
            )
        )
        webhooks = await _webhook_loop(stack, settings, database, registry, metrics)
        loops = [
            webhooks,
            *_loops(settings, database, ConnectedEngines(router), registry, metrics),
            _invariant_loop(settings, patient, registry, metrics),
            *_billing_loops(settings, database, metrics),
            *_outbox_loops(database, topics, registry, metrics),
            *await _eval_loops(stack, settings, database, router, metrics),
            _rollout_loop(stack, settings, database, router, registry, metrics),
        ]
        tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in loops]
        try:
            yield Worker(loops, registry)
        finally:
            # Every round is a transaction or a question: it can end anywhere and be done again.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _worker_id() -> str:
    return f"worker-{socket.gethostname()[:24]}-{os.getpid()}"


async def _eval_loops(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    database: Database,
    router: Router,
    metrics: LoopMetrics,
) -> list[Loop]:
    if settings.model_dir is None:
        log.info("evals_off", reason="LORAPLEX_MODEL_DIR is not set: this worker runs no evals")
        return []
    texts = await asyncio.to_thread(ModelTexts.read, settings.model_dir)
    tokenizer = await asyncio.to_thread(BaseTokenizer, texts)
    stack.callback(tokenizer.close)
    evals = EvalWorker(
        database.sessions, router, tokenizer, settings.base_model, owner=_worker_id()
    )
    stack.push_async_callback(evals.close)
    return [
        Loop("evals", EVAL_INTERVAL_S, evals.run_once, metrics),
        Loop("eval_schedules", EVAL_SCHEDULE_INTERVAL_S, evals.start_due, metrics),
    ]


def _rollout_loop(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    database: Database,
    router: Router,
    registry: CollectorRegistry,
    metrics: LoopMetrics,
) -> Loop:
    fleet = ConnectedFleet(database.sessions, router, owner=_worker_id())
    stack.push_async_callback(fleet.close)
    looks = Histogram(
        "loraplex:rollout_look_seconds",
        "What a look at a rollout's step took.",
        buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        registry=registry,
    )
    driver = RolloutDriver(
        database.sessions,
        fleet,
        Failpoints(settings.failpoint or "", WORKER_POINTS),
        least_interval_s=settings.rollout_interval_s,
        on_look=looks.observe,
    )
    interval_s = min(settings.rollout_interval_s, ROLLOUT_INTERVAL_S)
    return Loop("rollouts", interval_s, driver.run_once, metrics)


def _topics(
    stack: contextlib.AsyncExitStack, settings: WorkerSettings, registry: CollectorRegistry
) -> list[Topic]:
    """Who is told what: every outbox topic has its handler here."""
    redis = None
    if settings.redis_url is not None:
        redis = DeadlineRedis(settings.redis_url.get_secret_value(), RedisMetrics(registry))
        stack.push_async_callback(redis.aclose)
    return [version_topic(redis)]


async def _webhook_loop(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    database: Database,
    registry: CollectorRegistry,
    loop_metrics: LoopMetrics,
) -> Loop:
    rules = OwnerRules(operators=AddressRules(parse_trusted(settings.webhook_networks)))
    sender = await stack.enter_async_context(Sender(rules))
    tries = Counter(
        "loraplex:webhook_tries", "Tries at deliveries.", ["outcome"], registry=registry
    )
    deliverer = Deliverer(
        database.sessions,
        Vault(settings.webhook_key, settings.webhook_old_key),
        sender,
        on_outcome=lambda outcome: tries.labels(outcome).inc(),
    )
    return Loop("webhooks", WEBHOOK_INTERVAL_S, deliverer.deliver_once, loop_metrics)


def _outbox_loops(
    database: Database, topics: list[Topic], registry: CollectorRegistry, loop_metrics: LoopMetrics
) -> list[Loop]:
    """A loop per topic, so that a slow one delays no other."""
    sessions = database.sessions
    metrics = OutboxMetrics(registry)

    async def look_at_backlog() -> None:
        await note_backlog(sessions, metrics, [topic.name for topic in topics])

    async def purge() -> None:
        purged = await purge_done(sessions)
        if purged:
            log.info("outbox_purged", count=purged)

    return [
        *(
            Loop(
                f"outbox_{topic.name}",
                topic.interval_s,
                Relay(sessions, topic, metrics).relay_once,
                loop_metrics,
            )
            for topic in topics
        ),
        Loop("outbox_backlog", BACKLOG_INTERVAL_S, look_at_backlog, loop_metrics),
        Loop("outbox_purge", PURGE_INTERVAL_S, purge, loop_metrics),
    ]


def _billing_loops(
    settings: WorkerSettings, database: Database, metrics: LoopMetrics
) -> list[Loop]:
    days = settings.invoice_finalize_after_days
    invoices = InvoiceWorker(
        database.sessions, settings, None if days is None else timedelta(days=days)
    )
    rollups = RollupWorker(database.sessions)
    hours = AdapterHoursWorker(database.sessions)
    return [
        Loop("adapter_hours", HOURS_INTERVAL_S, hours.run_once, metrics),
        Loop("rollups", settings.rollup_interval_s, rollups.run_once, metrics),
        Loop("invoices", INVOICE_INTERVAL_S, invoices.run_once, metrics),
    ]


def _loops(
    settings: WorkerSettings,
    database: Database,
    engines: ConnectedEngines,
    registry: CollectorRegistry,
    metrics: LoopMetrics,
) -> list[Loop]:
    sessions = database.sessions
    swept = Counter(
        "loraplex:worker_swept", "Requests taken over, by verdict.", ["verdict"], registry=registry
    )
    landed = Counter(
        "loraplex:worker_journal_entries", "Journal entries landed.", registry=registry
    )
    skipped = Counter(
        "loraplex:worker_journal_entries_skipped",
        "Journal entries that could not land, for what is in them.",
        registry=registry,
    )
    retained = Counter(
        "loraplex:retention_deleted",
        "Rows that retention deleted; of requests, months.",
        ["rule"],
        registry=registry,
    )
    sweeper = Sweeper(
        sessions,
        engines,
        grace_s=settings.lease_grace_s,
        replica_lost_after_s=settings.replica_lost_after_s,
    )
    builds = BuildKeeper(sessions)
    residency = Residency(sessions, engines, registry)
    pins_told = Counter(
        "loraplex:pins_told", "Ends of pins that were told of.", ["what"], registry=registry
    )
    pins = PinWatch(sessions, on_told=lambda what: pins_told.labels(what).inc())
    puller = JournalPuller(sessions, engines, on_skipped=skipped.inc)

    async def sweep() -> None:
        for verdict in await sweeper.sweep_once():
            swept.labels(verdict).inc()

    async def pull() -> None:
        landed.inc(await puller.pull_once())

    async def mirror() -> None:
        replicas = engines.all()
        for replica in replicas:
            async with database.transaction() as session:
                await queries.mirror_replica(session, replica.replica_id, replica.record)
        await builds.note(replica.record for replica in replicas)

    async def note_key_use() -> None:
        since = datetime.now(UTC) - KEY_USE_WINDOW
        async with database.transaction() as session:
            await queries.note_key_use(session, uuid7_floor(int(since.timestamp() * 1000)))

    async def make_partitions() -> None:
        async with database.transaction() as session:
            made = await queries.make_partitions(session, MONTHS_AHEAD)
        if made:
            log.info("partitions_made", count=made)

    async def purge_quotas() -> None:
        async with database.transaction() as session:
            await quotas.purge(session)

    async def retain() -> None:
        for name, count in (await retention.clean(sessions, SYSTEM)).items():
            retained.labels(name).inc(count)

    return [
        Loop("sweeper", settings.sweep_interval_s, sweep, metrics),
        Loop("journals", settings.journal_interval_s, pull, metrics),
        Loop("mirror", MIRROR_INTERVAL_S, mirror, metrics),
        Loop("residency", RESIDENCY_INTERVAL_S, residency.converge_once, metrics),
        Loop("pins", PIN_INTERVAL_S, pins.run_once, metrics),
        Loop("key_use", KEY_USE_INTERVAL_S, note_key_use, metrics),
        Loop("partitions", PARTITION_INTERVAL_S, make_partitions, metrics),
        Loop("quota_purge", PURGE_INTERVAL_S, purge_quotas, metrics),
        Loop("retention", RETENTION_INTERVAL_S, retain, metrics),
    ]


def _invariant_loop(
    settings: WorkerSettings,
    database: Database,
    registry: CollectorRegistry,
    metrics: LoopMetrics,
) -> Loop:
    holds = Gauge(
        "loraplex:invariant_holds", "1 if the invariant holds.", ["name"], registry=registry
    )

    async def check() -> None:
        report = await check_and_keep(
            database.sessions,
            "worker",
            since=datetime.now(UTC) - INVARIANT_WINDOW,
            lease_grace_s=settings.lease_grace_s,
            extra=checks_of_redis(settings.redis_url),
        )
        for result in report.checks:
            holds.labels(result.name).set(result.ok)
            if not result.ok:
                log.error("invariant_broken", name=result.name, detail=result.detail)

    return Loop(
        "invariants",
        INVARIANT_INTERVAL_S,
        check,
        metrics,
        stuck_after_s=INVARIANT_STUCK_S,
    )
