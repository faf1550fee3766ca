"""Real processes around one database, for breaking: a Postgres that fsyncs, a Redis, gateways, workers.

The engine is a scripted one in this process (`tests.support.fake_engine`), which outlives every gateway
as a real one does. What a case did to the world is judged by `World.judge`: all invariants, the token
identity, nothing held any more, and every answer that a client got in full billed once, as it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import quote
from uuid import UUID

import httpx
import psycopg
import redis
from loraplex_platform.db import LedgerEntry, Request, migrate
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.local.embedded import postgres_binaries, start_postgres, start_redis
from loraplex_platform.local.server_process import EmbeddedServer
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.settings import MigrationSettings
from loraplex_platform.worker.sweeper import SWEEPER
from sqlalchemy import select

from tests.chaos.proxy import Proxy
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, add_base, announce, deploy, eventually, says
from tests.support.fake_engine import FakeEngine
from tests.support.limits import set_limit
from tests.support.metering import PEPPER, Customer, add_customer
from tests.support.postgres import SERVE_ROLE, database_settings, serving_url

LEASE_S = 2.0
GRACE_S = 0.5
GATEWAY_TIMEOUT_S = 4.0  # a heartbeat takes three
DATABASE_DEADLINE_S = 1.5
START_DEADLINE_S = 120.0
QUIET_DEADLINE_S = 90.0
ANNOUNCE_S = 0.5
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one client got.

    Attributes:
        status: 0: no answer at all.
        is_whole: the answer came to its end without an error.
        usage: prompt and completion tokens, as the answer says.
        code: of the error, if one was told.
    """

    status: int
    elapsed_s: float
    is_whole: bool = False
    usage: tuple[int, int] | None = None
    request_id: UUID | None = None
    code: str | None = None
    has_left: bool = False  # the client did, by itself


# Requests without a whole answer: those whose clients were told of an error, and those whose
# connection broke (also before the client knew the request's id).
Unheard = Literal["told", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a case left behind."""

    num_requests: int
    num_whole: int
    num_refused: int
    num_broken: int
    num_billed: int
    num_lost: int  # whole answers that are not billed as they say
    num_given_away: int  # of those, such as the platform pays and the case says that it may
    num_unearned: int  # billed although the case says that such requests are not
    overspend: int  # tokens beyond the tenant's hard limit
    held: int  # tokens that are still held
    recovery_s: float  # until nothing was reserved and all journals had landed
    slowest_s: float
    difference: int  # of the identity
    broken_invariants: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Nothing lost, nothing double, nothing overspent, all invariants."""
        return not self.flaws

    @property
    def flaws(self) -> list[str]:
        """What is wrong, in words."""
        counts = {
            "lost": self.num_lost - self.num_given_away,
            "billed and not delivered": self.num_unearned,
            "tokens of overspend": self.overspend,
            "tokens still held": self.held,
            "tokens unaccounted for": self.difference,
        }
        return [f"{n} {what}" for what, n in counts.items() if n] + list(self.broken_invariants)


@dataclass(slots=True)
class ProcessUnderTest:
    """A gateway or a worker."""

    name: str
    process: asyncio.subprocess.Process
    url: str
    log_file: Path

    def kill(self) -> None:
        """kill -9."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def ready(self) -> dict[str, Any]:
        """What its /ready says."""
        async with httpx.AsyncClient() as client:
            body: dict[str, Any] = (await client.get(f"{self.url}/ready", timeout=30)).json()
            return body


@dataclass(slots=True)
class World:
    """See the module's header."""

    folder: Path
    servers: dict[str, EmbeddedServer]
    db: Database
    engine: FakeEngine
    customer: Customer | None = None
    limit: int = 0  # the customer's, in tokens
    postgres_folder: Path = field(init=False)
    _gateway_number: int = field(default=0, init=False)
    _tenant_number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.postgres_folder = self.folder / "pg"

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator[World]:
        """A migrated database with the base model, a Redis, one worker, and no gateway yet."""
        postgres = start_postgres(folder / "pg", is_durable=True)
        redis_server = start_redis(folder / "redis")
        async with contextlib.AsyncExitStack() as stack:
            servers = {"postgres": postgres, "redis": redis_server}
            # Whoever runs there at the end: some cases start new ones.
            stack.callback(lambda: [server.stop() for server in servers.values()])
            migrate.upgrade(database_settings(postgres.url))
            migrate.ensure_serving_role(
                MigrationSettings.model_validate(
                    {"database_url": postgres.url, "serve_role": SERVE_ROLE}
                )
            )
            db = await stack.enter_async_context(
                open_database(database_settings(serving_url(postgres.url)))
            )
            await deploy(db, await add_base(db), None, BASE)
            engine = FakeEngine(
                folder,
                max_model_len=tiny_model.CONTEXT_LENGTH,
                vocab_size=400,
                gateway_timeout_s=GATEWAY_TIMEOUT_S,
            )
            await stack.enter_async_context(engine)
            tiny_model.write(folder / "model")
            world = cls(folder, servers, db, engine)
            announcing = asyncio.create_task(world._announce_forever())
            stack.callback(announcing.cancel)
            await stack.enter_async_context(world.worker())
            yield world

    @property
    def postgres(self) -> EmbeddedServer:
        """The one that runs now."""
        return self.servers["postgres"]

    @property
    def redis(self) -> EmbeddedServer:
        """The one that runs now."""
        return self.servers["redis"]

    # ------------------------------------------------------------------ processes

    @contextlib.asynccontextmanager
    async def gateway(
        self, *, max_file_bytes: int | None = None, **settings: object
    ) -> AsyncIterator[ProcessUnderTest]:
        """A gateway that has found the engine; killed at the end if it still runs.

        Args:
            max_file_bytes: no file of its own may get longer: a disk that is full then.
            settings: of `GatewaySettings`.
        """
        self._gateway_number += 1
        values: dict[str, object] = {
            "model_dir": self.folder / "model",
            "base_model": BASE,
            "key_pepper": PEPPER.get_secret_value(),
            "salt_key": "salt-for-tests-0123456789abcdefghij",
            "gateway_port": 0,
            "drain_grace_s": 10,
            "request_lease_s": LEASE_S,
            "database_deadline_s": DATABASE_DEADLINE_S,
            "spool_dir": self.folder / "spool",
            "database_pool_size": 8,  # several gateways share the server's connections
            "allow_failpoints": True,
        } | settings
        name = f"gateway-{self._gateway_number}"
        async with self._process(name, "gateway", values, max_file_bytes) as process:
            await eventually(
                lambda: self._sees_engine(process), f"{name} sees the engine", deadline_s=60
            )
            yield process

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[ProcessUnderTest]:
        """One more worker."""
        values: dict[str, object] = {
            "sweep_interval_s": 0.2,
            "journal_interval_s": 0.2,
            "lease_grace_s": GRACE_S,
            "replica_lost_after_s": 3.0,
        }
        async with self._process(f"worker-{uuid7().hex[-6:]}", "worker", values) as process:
            yield process

    @contextlib.asynccontextmanager
    async def _process(
        self,
        name: str,
        command: str,
        settings: dict[str, object],
        max_file_bytes: int | None = None,
    ) -> AsyncIterator[ProcessUnderTest]:
        port_file, log_file = self.folder / f"{name}.port", self.folder / f"{name}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        own = {
            "database_url": serving_url(self.postgres.url),
            "redis_url": self.redis.url,
        } | settings
        environment = inherited | {f"LORAPLEX_{k.upper()}": str(v) for k, v in own.items()}

        def limit_files() -> None:
            if max_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        with _opened("/dev/null" if max_file_bytes else log_file) as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loraplex_platform.cli", command),
                *("--port-file", str(port_file)),
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=limit_files,
            )
        try:
            await eventually(
                lambda: port_file.exists() or process.returncode is not None,
                f"the port of {name}",
                deadline_s=START_DEADLINE_S,
            )
            assert process.returncode is None, log_file.read_text()
            url = f"http://127.0.0.1:{int(port_file.read_text())}"
            yield ProcessUnderTest(name, process, url, log_file)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _sees_engine(self, process: ProcessUnderTest) -> bool:
        return (await process.ready())["engines_ready"] == 1

    async def _announce_forever(self) -> None:
        while True:
            if self.engine._socket is not None:  # a dead engine says nothing
                with contextlib.suppress(redis.RedisError, OSError):
                    # In a thread, and for a while only: the Redis may stand still.
                    async with asyncio.timeout(1):
                        await asyncio.to_thread(announce, self.redis.url, self.engine)
            await asyncio.sleep(ANNOUNCE_S)

    @contextlib.asynccontextmanager
    async def between(
        self, server: Literal["postgres", "redis"]
    ) -> AsyncIterator[tuple[Proxy, str]]:
        """A proxy before a server, and the URL that goes through it."""
        target = self.servers[server].socket_path
        url = self.redis.url if server == "redis" else serving_url(self.postgres.url)
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="p"))
        async with Proxy(folder / target.name, target) as proxy:
            yield proxy, url.replace(quote(str(target.parent)), quote(str(folder)))

    @contextlib.asynccontextmanager
    async def between_engine(self) -> AsyncIterator[Proxy]:
        """The same for all that connect to the engine from now on."""
        address = self.engine.address
        path = self.folder / "engine-proxy.sock"
        async with Proxy(path, Path(address.removeprefix("ipc://"))) as proxy:
            self.engine.address = f"ipc://{path}"  # which is announced; it is bound already
            try:
                yield proxy
            finally:
                self.engine.address = address

    def restart_postgres(self) -> None:
        """kill -9 of the server and all of its processes, and a new one on the same files."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.postgres.pid, signal.SIGKILL)
        self.postgres.stop()
        self.servers["postgres"] = start_postgres(self.postgres_folder, is_durable=True)

    def start_standby(self) -> EmbeddedServer:
        """A second server that follows the first: from then on no COMMIT is acknowledged before both have
        applied it."""
        folder = self.folder / f"pg-{uuid7().hex[-6:]}"
        folder.mkdir()
        primary = self.postgres
        with (self.postgres_folder / "cluster" / "pg_hba.conf").open("a") as rules:
            rules.write("local replication all trust\n")
        with self.owner() as owner:
            owner.execute("select pg_reload_conf()")
        program = shutil.which("pg_basebackup", path=str(postgres_binaries()))
        assert program is not None
        command = [program, "-h", str(primary.socket_path.parent), "-U", "postgres"]
        command += ["-D", str(folder / "cluster"), "-R", "--checkpoint=fast"]
        subprocess.run(command, check=True, capture_output=True)
        who = os.stat(self.postgres_folder / "cluster")
        for path in (folder / "cluster", *(folder / "cluster").rglob("*")):
            os.chown(path, who.st_uid, who.st_gid)
        standby = start_postgres(folder, is_durable=True)
        self.servers[folder.name] = standby
        with self.owner() as owner:
            owner.execute("alter system set synchronous_standby_names = '*'")
            owner.execute("alter system set synchronous_commit = 'remote_apply'")
            owner.execute("select pg_reload_conf()")
        return standby

    def fail_over(self, standby: EmbeddedServer) -> None:
        """Promote it, and have its address be the dead one's."""
        address = self.servers["postgres"].socket_path
        self.postgres.stop()  # which has been killed
        with psycopg.connect(standby.url, autocommit=True) as connection:
            connection.execute("select pg_promote()")
        self.postgres_folder = self.folder / next(
            name for name, server in self.servers.items() if server is standby
        )
        del self.servers[self.postgres_folder.name]
        self.servers["postgres"] = standby
        address.symlink_to(standby.socket_path)

    def restart_redis(self) -> None:
        """kill -9 and an empty new one on the same socket."""
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()
        self.servers["redis"] = start_redis(self.folder / "redis")

    def owner(self) -> psycopg.Connection[Any]:
        """A connection as the database's owner."""
        return psycopg.connect(self.postgres.url, autocommit=True)

    # ------------------------------------------------------------------ customers and clients

    async def new_customer(self, limit: int = 10_000_000) -> Customer:
        """A tenant with a hard limit of so many tokens in all; the world is judged by it."""
        self._tenant_number += 1
        self.customer = await add_customer(self.db, f"tenant-{self._tenant_number}")
        self.limit = limit
        await set_limit(self.db, self.customer, "tokens_total", str(limit), "total")
        return self.customer

    async def ask(
        self,
        gateway: ProcessUnderTest,
        *,
        is_stream: bool = False,
        max_tokens: int = 60,
        leaves_after_bytes: int | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Answer:
        """One request of the customer's, to the end or (`leaves_after_bytes`) not."""
        assert self.customer is not None
        began_s = time.monotonic()
        body = {
            "model": BASE,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": max_tokens,
            "stream": is_stream,
        }
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        status, request_id, received, has_left = 0, None, b"", False
        try:
            async with (
                httpx.AsyncClient(
                    base_url=gateway.url,
                    headers={"authorization": f"Bearer {self.customer.secret}"} | (headers or {}),
                    timeout=timeout_s,
                    verify=False,  # else each of hundreds reads the machine's certificates
                ) as client,
                client.stream("POST", CHAT, json=body) as response,
            ):
                status = response.status_code
                request_id = UUID(response.headers["x-request-id"].removeprefix("req_"))
                async for chunk in response.aiter_raw():
                    received += chunk
                    if leaves_after_bytes is not None and len(received) >= leaves_after_bytes:
                        has_left = True
                        break
                else:
                    return _read(received, status, time.monotonic() - began_s, request_id)
        except (httpx.HTTPError, OSError):
            pass
        elapsed_s = time.monotonic() - began_s
        return Answer(status, elapsed_s, request_id=request_id, has_left=has_left)

    async def ask_many(
        self, gateways: Sequence[ProcessUnderTest], count: int, **options: Any
    ) -> list[Answer]:
        """So many at once, spread over the gateways, every other one a stream unless told."""
        if "is_stream" in options:
            return await asyncio.gather(
                *(self.ask(gateways[i % len(gateways)], **options) for i in range(count))
            )
        return await asyncio.gather(
            *(
                self.ask(gateways[i % len(gateways)], is_stream=i % 2 == 0, **options)
                for i in range(count)
            )
        )

    # ------------------------------------------------------------------ judging

    async def judge(
        self,
        answers: Sequence[Answer],
        may_be_billed: frozenset[Unheard] = frozenset(),
        *,
        may_be_given_away: bool = False,
    ) -> Verdict:
        """Wait until the dust has settled, and look at everything.

        Args:
            may_be_billed: beside whole answers, which must be; and only by their gateways: the sweeper
                bills nobody but clients that had left.
            may_be_given_away: the platform may pay for whole answers.
        """
        assert self.customer is not None
        began_s = time.monotonic()
        while True:
            report = await check_invariants(self.db.sessions, lease_grace_s=GRACE_S)
            identity = report.identity
            is_settled = not identity.pending_requests and not identity.unlanded
            # The server may still be at what a dead gateway asked of it: that is reserved only later.
            committed, held = self._window()
            waited_s = time.monotonic() - began_s
            if is_settled and (held == 0 or waited_s > QUIET_DEADLINE_S):
                break
            assert waited_s < QUIET_DEADLINE_S or is_settled, identity
            await asyncio.sleep(0.1)
        recovery_s = time.monotonic() - began_s
        async with self.db.sessions() as session:
            rows = (
                await session.execute(
                    select(LedgerEntry, Request.settled_by)
                    .join(Request, Request.id == LedgerEntry.entry_id)
                    .where(
                        LedgerEntry.tenant_id == self.customer.tenant_id,
                        LedgerEntry.kind == "usage",
                    )
                )
            ).all()
            entries = {entry.entry_id: (entry, settled_by) for entry, settled_by in rows}
        billed = {
            id_: (entry.prompt_tokens, entry.completion_tokens)
            for id_, (entry, _) in entries.items()
            if entry.account == "revenue"
        }
        lost = [
            answer
            for answer in answers
            if answer.is_whole and billed.get(answer.request_id or UUID(int=0)) != answer.usage
        ]
        given_away = [a for a in lost if may_be_given_away and a.request_id not in billed]
        left = {answer.request_id for answer in answers if answer.has_left}
        earned = {answer.request_id for answer in answers if answer.is_whole}
        told_ids = {a.request_id for a in answers if not a.is_whole and a.code is not None}
        unearned = [
            entry_id
            for entry_id in billed
            if entry_id not in earned
            and (
                ("told" if entry_id in told_ids else "broken") not in may_be_billed
                or (entries[entry_id][1] == SWEEPER and entry_id not in left)
            )
        ]
        used = sum(map(sum, billed.values()))
        return Verdict(
            num_requests=len(answers),
            num_whole=sum(answer.is_whole for answer in answers),
            num_refused=sum(answer.status >= 400 for answer in answers),
            num_broken=sum(not a.is_whole and a.status < 400 for a in answers),
            num_billed=len(billed),
            num_lost=len(lost),
            num_given_away=len(given_away),
            num_unearned=len(unearned),
            overspend=max(0, committed - self.limit, used - self.limit),
            held=held,
            recovery_s=recovery_s,
            slowest_s=max((answer.elapsed_s for answer in answers), default=0.0),
            difference=report.identity.difference,
            broken_invariants=tuple(
                f"{check.name}: {check.detail}" for check in report.checks if not check.ok
            ),
        )

    def _window(self) -> tuple[int, int]:
        """Tokens that are committed, and held, in the customer's quota."""
        assert self.customer is not None
        with self.owner() as owner:
            window = owner.execute(
                "select coalesce(sum(committed), 0), coalesce(sum(held), 0) from quota_windows"
                " where tenant_id = %s and metric = 'tokens_total'",
                (self.customer.tenant_id,),
            ).fetchone()
        assert window is not None
        committed, held = map(int, window)
        return committed, held

    async def has_running(self, count: int = 1) -> None:
        """Wait until the engine runs so many requests."""
        await eventually(lambda: self.engine.num_running >= count, "requests at the engine")

    def speak(self, text: str = "a story that takes its time ", **changes: Any) -> None:
        """What the engine answers from now on."""
        self.engine.script = says(text, **changes)
        self.engine.script_for = None


def _opened(path: str | Path) -> BinaryIO:
    return open(path, "wb")


def _read(received: bytes, status: int, elapsed_s: float, request_id: UUID | None) -> Answer:
    """What an answer that came to its end says."""
    if received.startswith((b"data:", b": ")):
        frames = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")]
        is_whole = bool(frames) and frames[-1] == b"[DONE]"
        events = [json.loads(frame) for frame in frames if frame != b"[DONE]"]
    else:
        events = [json.loads(received)] if received else []
        is_whole = status == 200
    usage = next((e["usage"] for e in reversed(events) if e.get("usage")), None)
    code = next((e["error"]["code"] for e in events if "error" in e), None)
    return Answer(
        status,
        elapsed_s,
        is_whole=is_whole and code is None,
        usage=None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"]),
        request_id=request_id,
        code=code,
    )


def told(answers: Iterable[Answer]) -> dict[str, int]:
    """How many ended how, for messages."""
    counts: dict[str, int] = {}
    for answer in answers:
        how = "whole" if answer.is_whole else answer.code or f"broken off, status {answer.status}"
        counts[how] = counts.get(how, 0) + 1
    return counts
